//! Shows the node on its screen, and on every terminal that the parameters name.
//!
//! ```text
//! event values --+
//! load, words,   +--fold--> Snapshot (event value) --> screen: tty1, hvc0, ...
//! members, logs -+            at most 10 a second        one service each
//! ```
//!
//! Invariants:
//! - A terminal that is gone, slow or stuck delays nothing but itself.
//! - Nothing is drawn while nothing changes, but for the clock once a second.
//!
//! What this module does not do: lay out pages (`polis_tui`), or draw failures
//! that open the trapdoor (`boot`).

mod fold;
mod load;
mod logs;
pub mod members;
pub mod nodes;
mod screen;
mod words;
mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use polis_tui::Snapshot;
use polis_tui::snapshot::Nodes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use self::load::Load;
use self::logs::Window;
use self::members::Learned;
use self::words::Words;
use crate::event::Closed;
use crate::identity::{Fingerprint, Identity};
use crate::node::environment::Environment;
use crate::parameters::Known;
use crate::pki::Overview;
use crate::stage::Stages;
use crate::storage::tree;
use crate::supervisor::{Context, Policy, Tree};
use crate::sys::clock;
use crate::sys::reboot::Reason;
use crate::{cluster, consensus, network, storage};

/// The machine's own screen.
const SCREEN: &str = "tty1";
/// Between two snapshots: ten a second is as fast as anybody reads.
const PACE: Duration = Duration::from_millis(100);
/// The same before the node is ready: the boot needs the processor more.
const PACE_BOOTING: Duration = Duration::from_millis(250);
/// The same while more is said than anybody reads.
const PACE_FLOODED: Duration = Duration::from_millis(500);
/// The clock shows seconds.
const CLOCK: Duration = Duration::from_secs(1);

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// What `init` told.
    pub environment: Environment,
    /// What is watched.
    pub inputs: Inputs,
    /// The terminals that carry the console, by name under `/dev`.
    pub terminals: watch::Sender<Vec<String>>,
    /// What the terminals show, for consoles elsewhere too.
    pub snapshot: watch::Sender<Arc<Snapshot>>,
    /// Asks the members of etcd how they are.
    pub members: members::Service,
    /// How a person in front of a terminal ends the machine.
    pub end: watch::Sender<Option<Reason>>,
}

/// What is watched, beside what the context has.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// What this machine was told.
    pub known: watch::Receiver<Known>,
    /// Its addresses.
    pub network: watch::Receiver<network::Status>,
    /// Its data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// How that does.
    pub health: watch::Receiver<storage::Health>,
    /// What it is to its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The certificates of the cluster.
    pub pki: watch::Receiver<Overview>,
    /// The nodes of the cluster.
    pub cluster_nodes: watch::Receiver<ClusterNodes>,
    /// Who this node is.
    pub identity: watch::Receiver<Option<Identity>>,
}

/// What is known of the nodes of the cluster; the console adds to every age in it
/// what has passed since.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterNodes {
    /// When it was learned, in time since the kernel started.
    pub at: Duration,
    /// The nodes; `None` before anything was heard from a curator.
    pub nodes: Option<Nodes>,
}

/// The newest of everything at one moment.
#[derive(Clone, Debug)]
struct Values {
    environment: Environment,
    stages: Stages,
    services: Tree,
    known: Known,
    network: network::Status,
    storage: storage::Status,
    health: storage::Health,
    cluster: cluster::Status,
    consensus: consensus::Status,
    pki: Overview,
    cluster_nodes: ClusterNodes,
    identity: Option<Identity>,
    load: Option<Load>,
    words: Words,
    members: Learned,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when an owner of an input ended.
    pub async fn run(self, ctx: Context) -> Result<(), Closed> {
        let snapshot = self.snapshot;
        let mut logs = Window::new(ctx.logs());
        let load = watch::Sender::default();
        let words = watch::Sender::default();
        let asked = watch::Sender::default();
        let members = watch::Sender::default();
        start_helpers(&ctx, &load, &asked, &words);
        let (asking, learned) = (self.members, members.clone());
        ctx.spawn("members", Policy::forever(), move |ctx| {
            asking.clone().run(ctx, learned.clone())
        });
        let mut watched = Watched {
            inputs: self.inputs,
            stages: ctx.stages(),
            services: ctx.tree(),
            load: load.subscribe(),
            words: words.subscribe(),
            members: members.subscribe(),
        };
        let mut shown = BTreeSet::new();
        let mut last = Instant::now();
        loop {
            let values = watched.newest(&self.environment);
            let names = terminals(&values.known);
            self.terminals.send_if_modified(|known| {
                let new = *known != names;
                if new {
                    known.clone_from(&names);
                }
                new
            });
            for name in names {
                if shown.insert(name.clone()) {
                    let screen = screen::Service {
                        name,
                        snapshot: snapshot.subscribe(),
                        end: self.end.clone(),
                    };
                    let service = screen.name.replace('/', "-");
                    ctx.spawn(&service, Policy::forever(), move |ctx| screen.clone().run(ctx));
                }
            }
            ask(&asked, &values);
            logs.catch_up();
            let drawn = fold::fold(&values, logs.shown(), clock::uptime(), clock::now());
            let pace = match drawn.ready {
                _ if logs.is_flooded() => PACE_FLOODED,
                Some(_) => PACE,
                None => PACE_BOOTING,
            };
            snapshot.send_replace(Arc::new(drawn));
            // Twice changes nothing.
            ctx.healthy();

            let wait = async {
                tokio::select! {
                    // Cancel-safe: only waits.
                    () = sleep(CLOCK) => Ok(()),
                    // Cancel-safe: what arrived stays in the window.
                    () = logs.wait() => Ok(()),
                    // Cancel-safe: waits for event values.
                    changed = watched.changed() => changed,
                }?;
                // What happens meanwhile is in the next snapshot.
                sleep_until(last + pace).await;
                Ok(())
            };
            match ctx.until_cancelled(wait).await {
                Some(waited) => waited?,
                None => return Ok(()),
            }
            last = Instant::now();
        }
    }
}

/// Whether this boot is to have no console: the word `polis.console=off` on the
/// kernel command line, for the measurement of what a console costs.
#[must_use]
pub fn is_off() -> bool {
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    line.split_ascii_whitespace().any(|word| word == "polis.console=off")
}

/// Starts what measures and computes for the snapshots.
fn start_helpers(
    ctx: &Context,
    load: &watch::Sender<Option<Load>>,
    asked: &watch::Sender<BTreeSet<Fingerprint>>,
    words: &watch::Sender<Words>,
) {
    let load = load::Service {
        proc: PathBuf::from("/proc"),
        sys: PathBuf::from("/sys"),
        data: tree::Root::live().data.mount.path().to_owned(),
        load: load.clone(),
    };
    let words = words::Service { asked: asked.subscribe(), words: words.clone() };
    ctx.spawn("load", Policy::forever(), move |ctx| load.clone().run(ctx));
    ctx.spawn("words", Policy::forever(), move |ctx| words.clone().run(ctx));
}

/// Asks for the words of what is shown. A boot has better to do, unless somebody
/// waits for the words.
fn ask(asked: &watch::Sender<BTreeSet<Fingerprint>>, values: &Values) {
    let own = values.identity.map(|identity| Fingerprint::of_key(&identity.public_key));
    let authorities = values.pki.authorities.iter().map(fold::fingerprint);
    let wanted: BTreeSet<_> = match values.cluster.state {
        cluster::State::Foreign | cluster::State::Trusted => own.into_iter().collect(),
        _ if fold::ready(values).is_some() => own.into_iter().chain(authorities).collect(),
        _ => BTreeSet::new(),
    };
    asked.send_if_modified(|before| {
        let new = *before != wanted;
        *before = wanted;
        new
    });
}

/// The terminals that carry the console, by name under `/dev`.
fn terminals(known: &Known) -> Vec<String> {
    let told = known.as_ref().and_then(|known| known.parameters());
    let more = told.into_iter().flat_map(|told| told.console_tui.iter().cloned());
    std::iter::once(SCREEN.to_owned()).chain(more).collect()
}

struct Watched {
    inputs: Inputs,
    stages: watch::Receiver<Stages>,
    services: watch::Receiver<Tree>,
    load: watch::Receiver<Option<Load>>,
    words: watch::Receiver<Words>,
    members: watch::Receiver<Learned>,
}

impl Watched {
    fn newest(&mut self, environment: &Environment) -> Values {
        let Inputs {
            known,
            network,
            storage,
            health,
            cluster,
            consensus,
            pki,
            cluster_nodes,
            identity,
        } = &mut self.inputs;
        Values {
            environment: environment.clone(),
            stages: self.stages.borrow_and_update().clone(),
            services: self.services.borrow_and_update().clone(),
            known: known.borrow_and_update().clone(),
            network: network.borrow_and_update().clone(),
            storage: storage.borrow_and_update().clone(),
            health: health.borrow_and_update().clone(),
            cluster: cluster.borrow_and_update().clone(),
            consensus: consensus.borrow_and_update().clone(),
            pki: pki.borrow_and_update().clone(),
            cluster_nodes: cluster_nodes.borrow_and_update().clone(),
            identity: *identity.borrow_and_update(),
            load: self.load.borrow_and_update().clone(),
            words: self.words.borrow_and_update().clone(),
            members: self.members.borrow_and_update().clone(),
        }
    }

    /// Waits until any of them changes that a person waits for. The others change
    /// all the time, and are in the next picture, with the clock. Cancel-safe.
    async fn changed(&mut self) -> Result<(), Closed> {
        let Inputs {
            known,
            network,
            storage,
            cluster,
            pki,
            identity,
            health: _,
            consensus: _,
            cluster_nodes: _,
        } = &mut self.inputs;
        let any = [
            changed(&mut self.stages, "the stages"),
            changed(&mut self.services, "the services"),
            changed(known, "the parameters"),
            changed(network, "the network"),
            changed(storage, "the storage"),
            changed(cluster, "the cluster"),
            changed(pki, "the certificates"),
            changed(identity, "the identity"),
            changed(&mut self.words, "the words"),
        ];
        select_all(any).await.0
    }
}

fn changed<'a, T: Send + Sync>(
    value: &'a mut watch::Receiver<T>,
    name: &'static str,
) -> BoxFuture<'a, Result<(), Closed>> {
    async move { value.changed().await.map_err(|_closed| Closed(name)) }.boxed()
}
