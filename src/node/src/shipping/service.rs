//! The service of shipping: waits for a reason to look at the bucket, and tries until the bucket
//! has the newest snapshot of this node.
//!
//! ```text
//! [idle: no bucket, or no leader] --leads, bucket--> [waiting: no snapshot] --taken--> [sending]
//!        ^                                                                    sent /     |  ^
//!        |                                          [done] <-----------------------+     |  |
//!        |                                             \--another snapshot, bucket----->-+  |
//!        |                                                                 failed --backoff-+
//!        +-- another leader, or no bucket: from anywhere; a transfer is dropped
//! ```

use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use polis_base::cause;
use polis_base::files::{self, Dir};
use polis_base::sys::clock;
use polis_control::consensus::snapshots::Taken;
use polis_control::curator::configuration;
use polis_control::curator::leader::Term;
use polis_control::{consensus, curator};
use polis_proto::v1;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::restart::{History, Verdict};
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::Endpoint;
use polis_wire::parameters;
use polis_wire::s3::Client;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::ship::{Error, Shipper};
use super::{Delivery, Failure, Status};

/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The folder of the snapshots of this node.
    pub snapshots: Dir,
    /// The public authorities, in PEM.
    pub bundle: PathBuf,
}

impl Config {
    /// The shipping of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            snapshots: root.data.etcd.snapshots.clone(),
            bundle: PathBuf::from("/etc/ssl/certs/ca-certificates.crt"),
        }
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Whether this node leads.
    pub curator: watch::Receiver<curator::Status>,
    /// The copy of the records, of which it reads the configuration.
    pub directory: watch::Receiver<curator::Directory>,
    /// The snapshots of this node.
    pub consensus: watch::Receiver<consensus::Status>,
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

/// The task: the reason to begin anew where it changes.
#[derive(Clone, Debug, PartialEq)]
struct Order {
    term: Term,
    target: v1::SnapshotConfiguration,
    proxy: Option<Endpoint>,
    cluster: u64,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let ran = ctx.until_cancelled(self.work()).await;
        self.status.send_replace(Status::default());
        match ran {
            Some(Err(closed)) => Err(closed),
            Some(Ok(never)) => match never {},
            None => Ok(()),
        }
    }

    async fn work(&mut self) -> Result<Infallible, Closed> {
        loop {
            let order = self.order();
            let url = order.as_ref().map(|order| {
                let read = parameters::snapshot_target(&order.target, "snapshots");
                read.ok().flatten().map_or_else(|| order.target.url.clone(), |it| it.url())
            });
            // The state of one target says nothing about another.
            self.status.send_replace(Status {
                delivery: url.map(|target| Delivery { target, ..Delivery::default() }),
            });
            let mut inputs = self.inputs.clone();
            let changed = async {
                loop {
                    inputs.changed().await?;
                    if self.order() != order {
                        return Ok(());
                    }
                }
            };
            match &order {
                None => changed.await?,
                Some(order) => tokio::select! {
                    // Cancel-safe: it only waits.
                    changed = changed => changed?,
                    // Cancel-safe: the store keeps nothing of an object that is cut off, and the
                    // next attempt begins with a look at the bucket.
                    sent = self.keep_sending(order) => match sent? {},
                },
            }
        }
    }

    /// The present task.
    fn order(&self) -> Option<Order> {
        let term = self.inputs.curator.borrow().leadership.term.clone()?;
        let (target, proxy) = {
            let directory = self.inputs.directory.borrow();
            let known = directory.configuration();
            let target = known.snapshots.clone()?;
            let proxy = through(&target, &configuration::proxy(known));
            (target, proxy)
        };
        let cluster = self.inputs.consensus.borrow().cluster?;
        Some(Order { term, target, proxy, cluster })
    }

    /// The newest snapshot of this node that counts.
    fn taken(&self) -> Option<Taken> {
        self.inputs.consensus.borrow().snapshots.as_ref()?.newest
    }

    /// What the next snapshot to send waits for; `None` while nothing keeps this node from taking
    /// it.
    fn missing(&self) -> Option<String> {
        let local = self.inputs.consensus.borrow().snapshots.clone().unwrap_or_default();
        let waited = |which| format!("the {which} checked snapshot on the disk of this node");
        match local.newest {
            // A file that does not count keeps no other from being taken.
            Some(_) => local.failure.map(|failure| format!("{}: {failure}", waited("next"))),
            None => {
                let first = waited("first");
                Some(match local.problem() {
                    Some(problem) => format!("{first}: {problem}"),
                    None => format!("{first}, a few minutes after its member of etcd votes"),
                })
            }
        }
    }

    /// Shows what the next snapshot waits for.
    fn wait_for_next(&self) {
        let waits_for = self.missing();
        self.change(|delivery| delivery.waits_for = waits_for);
    }

    /// Sends the newest snapshot, and each one after it.
    async fn keep_sending(&self, order: &Order) -> Result<Infallible, Closed> {
        let mut consensus = self.inputs.consensus.clone();
        let mut done = None;
        let mut backoff = History::default();
        loop {
            let taken = self.taken();
            match taken.filter(|taken| done != Some(*taken)) {
                None => {
                    self.wait_for_next();
                    consensus.changed().await.map_err(|_closed| Closed("the etcd member"))?;
                }
                Some(taken) => {
                    // Boxed: it is large, and rare.
                    match Box::pin(self.attempt(order, &taken)).await {
                        Ok(()) => {
                            (done, backoff) = (Some(taken), History::default());
                        }
                        Err(error) => {
                            self.failed(&error);
                            sleep(pause(&mut backoff)).await;
                        }
                    }
                }
            }
        }
    }

    async fn attempt(&self, order: &Order, taken: &Taken) -> Result<(), Error> {
        let Some(target) = order.term.store.snapshot_target().await? else {
            // The copy of the records follows in a moment.
            return Ok(());
        };
        let mut bucket = target.bucket.clone();
        bucket.server.proxy.clone_from(&order.proxy);
        let client = Client {
            bucket,
            credentials: target.credentials.clone(),
            bundle: self.config.bundle.clone(),
            clock: clock::now,
        };
        let dir = self.config.snapshots.clone();
        let shipper = Shipper { client, target, cluster: order.cluster, dir };
        let found = shipper.look(taken).await?;
        self.change(|delivery| delivery.newest = found.newest);
        if !found.has_it {
            let shipped = shipper.send(taken).await?;
            let (revision, bytes) = (shipped.revision, shipped.bytes);
            info!(revision, bytes, target = shipper.target.bucket.url(), "sent a snapshot of etcd");
            self.change(|delivery| {
                delivery.newest = Some(shipped);
                delivery.sent += 1;
            });
        }
        self.works_again();
        Ok(())
    }

    fn works_again(&self) {
        let mut ended = None;
        self.change(|delivery| {
            delivery.waits_for = None;
            ended = delivery.failure.take();
        });
        if let Some(Failure { since, .. }) = ended {
            let seconds = clock::now().duration_since(since).unwrap_or_default().as_secs();
            info!(seconds, "snapshots of etcd reach their target again");
        }
    }

    /// An attempt failed. Each cause is logged once, until one succeeds.
    fn failed(&self, error: &Error) {
        let (cause, help) = (cause::line(error), error.help());
        let mut is_new = false;
        self.change(|delivery| {
            let known = delivery.failure.as_ref();
            is_new = known.is_none_or(|known| known.cause != cause);
            let since = known.map_or_else(clock::now, |known| known.since);
            delivery.waits_for = None;
            let (cause, help) = (cause.clone(), help.clone());
            delivery.failure = Some(Failure { cause, help, since });
        });
        if is_new {
            let help = help.unwrap_or_default();
            warn!(cause, help, "a snapshot of etcd does not reach its target");
        }
    }

    /// Changes the status of the target.
    fn change(&self, change: impl FnOnce(&mut Delivery)) {
        self.status.send_if_modified(|status| {
            let Some(delivery) = &mut status.delivery else { return false };
            let before = delivery.clone();
            change(delivery);
            before != *delivery
        });
    }
}

impl Inputs {
    /// Waits until one of them changes. Cancel-safe.
    async fn changed(&mut self) -> Result<(), Closed> {
        tokio::select! {
            // Cancel-safe, all: they wait for event values.
            changed = self.curator.changed() => changed.map_err(|_closed| Closed("the curator")),
            changed = self.directory.changed() => {
                changed.map_err(|_closed| Closed("the directory"))
            }
            changed = self.consensus.changed() => {
                changed.map_err(|_closed| Closed("the etcd member"))
            }
        }
    }
}

/// The proxy on the way to the target, if there is one.
fn through(target: &v1::SnapshotConfiguration, proxy: &v1::ProxyConfiguration) -> Option<Endpoint> {
    // The leader has checked both.
    let bucket = parameters::snapshot_target(target, "snapshots").ok().flatten()?;
    let proxy = parameters::proxy(proxy, "proxy").ok().flatten()?;
    proxy.leading_to(&bucket.server.endpoint.host).cloned()
}

/// The pause before the next attempt.
fn pause(backoff: &mut History) -> Duration {
    let random = f64::from(rand::random::<u16>()) / f64::from(u16::MAX);
    match backoff.died(Policy::forever(), clock::uptime(), None, random) {
        Verdict::Restart(delay) => delay,
        Verdict::GiveUp(_) => PAUSE_MAX,
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use polis_control::consensus::snapshots::Snapshots;

    use super::*;

    /// What the shipping of a node with these snapshots waits for.
    fn waits_for(local: Snapshots) -> Option<String> {
        let local = consensus::Status { snapshots: Some(local), ..Default::default() };
        let inputs = Inputs {
            curator: watch::Sender::default().subscribe(),
            directory: watch::Sender::default().subscribe(),
            consensus: watch::Sender::new(local).subscribe(),
        };
        let config = Config::live(&files::Root::at("/nonexistent".as_ref()));
        let status = watch::Sender::new(Status { delivery: Some(Delivery::default()) });
        let service = Service { config, inputs, status };
        service.wait_for_next();
        let shown = service.status.borrow().delivery.clone();
        shown.unwrap().waits_for
    }

    #[test]
    fn a_store_outside_of_the_cluster_is_reached_through_its_proxy() {
        let target = v1::SnapshotConfiguration {
            url: "s3+https://s3.example/bucket".to_owned(),
            ..Default::default()
        };
        let proxy = |direct: &[&str]| v1::ProxyConfiguration {
            url: "http://proxy.example:3128".to_owned(),
            direct: direct.iter().map(|&entry| entry.to_owned()).collect(),
            ..Default::default()
        };
        let through = |proxy: v1::ProxyConfiguration| {
            through(&target, &proxy).map(|endpoint| endpoint.to_string())
        };
        assert_eq!(through(proxy(&[])).as_deref(), Some("proxy.example:3128"));
        assert_eq!(through(proxy(&["example"])), None);
        assert_eq!(through(v1::ProxyConfiguration::default()), None);
    }

    #[test]
    fn a_node_that_takes_no_newer_snapshot_says_so_while_it_has_an_old_one_too() {
        let newest = Taken { number: 1, at: UNIX_EPOCH, bytes: 7, revision: 9 };
        let problem = || Some("too little room for a snapshot".to_owned());
        let none = Snapshots::default();
        let old = Snapshots { kept: 1, newest: Some(newest), ..none.clone() };
        let first = "the first checked snapshot on the disk of this node";
        let votes = format!("{first}, a few minutes after its member of etcd votes");
        assert_eq!(waits_for(none.clone()), Some(votes));
        let failed = waits_for(Snapshots { failure: problem(), ..none });
        assert_eq!(failed, Some(format!("{first}: too little room for a snapshot")));
        assert_eq!(waits_for(old.clone()), None);
        let failed = waits_for(Snapshots { failure: problem(), ..old });
        let next = "the next checked snapshot on the disk of this node";
        assert_eq!(failed, Some(format!("{next}: too little room for a snapshot")));
    }

    #[test]
    fn a_file_that_does_not_count_is_named_only_where_no_snapshot_counts() {
        let newest = Taken { number: 2, at: UNIX_EPOCH, bytes: 7, revision: 9 };
        let none =
            Snapshots { rejected: vec!["1: it is damaged".to_owned()], ..Snapshots::default() };
        let hourly = Snapshots { kept: 1, newest: Some(newest), ..none.clone() };
        assert_eq!(waits_for(hourly.clone()), None);
        let first = "the first checked snapshot on the disk of this node";
        let named = format!("{first}: a file does not count: 1: it is damaged");
        assert_eq!(waits_for(none), Some(named));
        let failed = waits_for(Snapshots { failure: Some("no room".to_owned()), ..hourly });
        let next = "the next checked snapshot on the disk of this node";
        assert_eq!(failed, Some(format!("{next}: no room")));
    }
}
