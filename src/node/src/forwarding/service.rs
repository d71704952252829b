//! The service of log forwarding: runs a delivery for each target of the cluster, and keeps
//! the cursors.
//!
//! ```text
//! [waiting: data partition] --> [deliveries of all targets] --other targets--+
//!                                        ^                                    |
//!                                        +------------------------------------+
//! ```
//!
//! What this module does not do: follow the proxy of the cluster (`deliver`).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::try_join_all;
use polis_base::cause;
use polis_base::files::{self, File};
use polis_control::cluster;
use polis_machine::storage;
use polis_runtime::event::{Closed, until};
use polis_runtime::logtree::ring;
use polis_runtime::supervisor::Context;
use polis_wire::node_roles::Nodes;
use polis_wire::parameters::{LogTarget, Proxy};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use super::cursors::Cursors;
use super::deliver::Delivery;
use super::line::Subject;
use super::{Order, Status};

/// Between two writes of the cursors: each flush to the disk slows etcd, and after a power cut
/// the lines since the last one are sent again.
const SAVE: Duration = Duration::from_secs(10);

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file of the cursors.
    pub cursors: File,
    /// The public authorities, in PEM.
    pub bundle: PathBuf,
    /// The version of the system.
    pub version: String,
}

impl Config {
    /// The forwarding of a running node.
    #[must_use]
    pub fn live(root: &files::Root, version: &str) -> Self {
        Self {
            cursors: root.data.node.log_cursors.clone(),
            bundle: PathBuf::from("/etc/ssl/certs/ca-certificates.crt"),
            version: version.to_owned(),
        }
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The ring of the log.
    pub ring: watch::Receiver<ring::Status>,
    /// Where it goes; `None` before it is known.
    pub order: watch::Receiver<Option<Order>>,
    /// The proxy of the cluster; `None` without one, and before it is known.
    pub proxy: watch::Receiver<Option<Proxy>>,
    /// This node in its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Every node; `None` before the first message of a leader.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The values that it reads.
    pub inputs: Inputs,
    /// The published status.
    pub status: watch::Sender<Status>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The file of the cursors cannot be read: without it, every line would be sent again.
    #[error("cannot read how far the log was sent")]
    Cursors(#[from] files::Error),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart goes on at the cursors.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        let ready = until(&mut self.inputs.storage, "storage", |status| {
            status.ready().is_some().then_some(())
        });
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        let cursors = Arc::new(Mutex::new(Cursors::load(&self.config.cursors).await?));
        let mut keeper = Keeper { file: self.config.cursors.clone(), saved: None, cursors };
        ctx.healthy();
        let ran = ctx.until_cancelled(self.work(&mut keeper)).await;
        keeper.save().await;
        match ran {
            Some(Err(error)) => Err(error),
            Some(Ok(never)) => match never {},
            None => Ok(()),
        }
    }

    async fn work(&mut self, keeper: &mut Keeper) -> Result<std::convert::Infallible, RunError> {
        let subject = watch::Sender::new(self.subject());
        let mut tick = interval(SAVE);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let order = self.inputs.order.borrow_and_update().clone();
            if let Some(order) = &order {
                self.show(order, keeper);
            }
            let deliveries = order.into_iter().flat_map(|order| order.targets).map(|target| {
                let delivery = Delivery {
                    target,
                    proxy: self.inputs.proxy.clone(),
                    bundle: self.config.bundle.clone(),
                    subject: subject.subscribe(),
                    ring: self.inputs.ring.clone(),
                    cursors: Arc::clone(&keeper.cursors),
                    status: self.status.clone(),
                };
                delivery.run()
            });
            let all = try_join_all(deliveries.collect::<Vec<_>>());
            let all = async {
                match all.await {
                    Err(closed) => closed,
                    // There are no targets.
                    Ok(_none) => std::future::pending().await,
                }
            };
            let mut all = std::pin::pin!(all);
            loop {
                let (changed, name) = tokio::select! {
                    // Cancel-safe: polled on in the next round.
                    closed = &mut all => return Err(closed.into()),
                    // Cancel-safe: they wait for event values.
                    changed = self.inputs.order.changed() => {
                        changed.map_err(|_closed| Closed("the targets of logs"))?;
                        break;
                    }
                    changed = self.inputs.cluster.changed() => (changed, "the cluster"),
                    changed = self.inputs.nodes.changed() => (changed, "the nodes"),
                    // Cancel-safe per its documentation.
                    _now = tick.tick() => {
                        keeper.save().await;
                        continue;
                    }
                };
                changed.map_err(|_closed| Closed(name))?;
                let now = self.subject();
                subject.send_if_modified(|known| {
                    let changed = *known != now;
                    *known = now;
                    changed
                });
            }
            subject.send_replace(self.subject());
        }
    }

    /// Forgets the targets that are not ordered any more, and shows those that are.
    fn show(&self, order: &Order, keeper: &Keeper) {
        let urls: Vec<_> = order.targets.iter().map(LogTarget::url).collect();
        let known = keeper.locked(|cursors| {
            cursors.targets.retain(|url, _| urls.contains(url));
            cursors.clone()
        });
        self.status.send_modify(|status| {
            status.targets.retain(|url, _| urls.contains(url));
            for url in urls {
                let cursor = known.targets.get(&url).copied().unwrap_or_default();
                let target = status.targets.entry(url).or_default();
                (target.missing, target.rejected) = (cursor.missing, cursor.rejected);
            }
        });
    }

    /// The node, as it is known now.
    fn subject(&mut self) -> Subject {
        let node = self.inputs.cluster.borrow_and_update().node;
        let nodes = self.inputs.nodes.borrow_and_update().clone();
        let known = node.and_then(|id| nodes?.get(&id).map(|node| node.name.clone()));
        let cluster = self.inputs.order.borrow().as_ref().map(|order| order.cluster.clone());
        Subject {
            id: node.map(|id| id.to_string()).unwrap_or_default(),
            name: known.unwrap_or_default(),
            cluster: cluster.unwrap_or_default(),
            version: self.config.version.clone(),
        }
    }
}

/// The cursors, and what of them the disk has.
struct Keeper {
    file: File,
    cursors: Arc<Mutex<Cursors>>,
    saved: Option<Cursors>,
}

impl Keeper {
    fn locked<T>(&self, read: impl FnOnce(&mut Cursors) -> T) -> T {
        read(&mut self.cursors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn save(&mut self) {
        let now = self.locked(|cursors| cursors.clone());
        if self.saved.as_ref() == Some(&now) {
            return;
        }
        match now.save(&self.file).await {
            Ok(()) => self.saved = Some(now),
            Err(error) => {
                let cause = cause::line(&error);
                warn!(cause, "cannot keep how far the log was sent: lines may be sent again");
            }
        }
    }
}
