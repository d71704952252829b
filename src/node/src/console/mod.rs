//! The console: shows the node on its screen, and on every terminal that the parameters
//! name.
//!
//! ```text
//! event values --+
//! load, words,   +--fold--> Snapshot (event value) --> screen: tty1, hvc0, ...
//! members, logs -+            at most 10 a second        one service each
//! ```
//!
//! Invariants:
//! - A terminal that is gone, slow or stuck delays only itself.
//! - Nothing is drawn while the shown values do not change, except the clock.
//! - A snapshot is never older than a second, and one with news never older than a
//!   frame.
//!
//! What this module does not do: lay out pages (`polis_tui`), or draw failures
//! that open the trapdoor (`boot`).

mod age;
mod attention;
mod counters;
mod fingerprint_words;
mod fold;
mod history;
mod load;
mod logs;
pub mod members;
pub mod nodes;
mod screen;
mod watched;
mod workloads;
mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use polis_tui::Snapshot;
use polis_tui::snapshot::Nodes;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use self::attention::Attention;
use self::logs::Window;
use self::watched::{Values, Watched};
use polis_base::environment::Environment;
use polis_base::sys::command_line;
use polis_base::sys::reboot::Reason;
use polis_base::{files, sys};
use polis_control::{cluster, consensus};
use polis_machine::parameters::Known;
use polis_machine::{mirror, network, storage, time, volumes};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::identity::{Fingerprint, Identity};
use polis_wire::pki::Overview;
use polis_workload as workload;
use polis_workload::runtime;

/// The machine's own screen.
const SCREEN: &str = "tty1";
/// Between two snapshots: ten a second is as fast as anybody reads.
const PACE: Duration = Duration::from_millis(100);
/// The same before the node is ready: the boot needs the processor more.
const PACE_BOOTING: Duration = Duration::from_millis(250);
/// The same while more is logged than anybody reads.
const PACE_FLOODED: Duration = Duration::from_millis(500);
/// A boot that takes longer is looked at by the time of day.
const BOOT: Duration = Duration::from_secs(120);
/// The clock shows seconds.
const CLOCK: Duration = Duration::from_secs(1);

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The facts from `init`.
    pub environment: Environment,
    /// The watched values.
    pub inputs: Inputs,
    /// The terminals that carry the console, by name under `/dev`.
    pub terminals: watch::Sender<Vec<String>>,
    /// The content of the terminals, for consoles elsewhere too.
    pub snapshot: watch::Sender<Arc<Snapshot>>,
    /// Asks the members of etcd how they are.
    pub members: members::Service,
    /// How a person in front of a terminal ends the machine.
    pub end: watch::Sender<Option<Reason>>,
}

/// The watched values, beside those of the context.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The parameters of this machine.
    pub known: watch::Receiver<Known>,
    /// Its addresses.
    pub network: watch::Receiver<network::Status>,
    /// Its data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// Its clock.
    pub time: watch::Receiver<time::Status>,
    /// How its data partition does.
    pub health: watch::Receiver<storage::Health>,
    /// The volumes of further disks.
    pub volumes: watch::Receiver<volumes::Status>,
    /// The mirror of the disk.
    pub mirror: watch::Receiver<mirror::Status>,
    /// This node's state in its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The certificates of the cluster.
    pub pki: watch::Receiver<Overview>,
    /// The nodes of the cluster.
    pub cluster_nodes: watch::Receiver<ClusterNodes>,
    /// The identity of this node.
    pub identity: watch::Receiver<Option<Identity>>,
    /// The roles that the cluster gives to this node; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The parts of Kubernetes.
    pub workload: watch::Receiver<workload::Status>,
    /// The service that runs the pods.
    pub containerd: watch::Receiver<runtime::Status>,
    /// The pods of this node.
    pub pods: watch::Receiver<Option<runtime::Pods>>,
    /// Which snapshot of etcd its target has, while this node leads.
    pub shipping: watch::Receiver<crate::shipping::Status>,
}

/// The known state of the nodes of the cluster; the console adds to every age in it the
/// time since then.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterNodes {
    /// When it was learned, in time since the kernel started.
    pub at: Duration,
    /// The nodes; `None` before the first message from a curator.
    pub nodes: Option<Nodes>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when an owner of an input ended.
    pub async fn run(self, ctx: Context) -> Result<(), Closed> {
        let attention = Attention::default();
        let (mut watched, asked) = self.start(&ctx, &attention);
        let mut logs = Window::new(ctx.logs());
        let mut attached = BTreeSet::new();
        let mut last = Instant::now();
        let mut clock = interval(CLOCK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (values, renewed) = watched.newest();
            if renewed {
                self.attach(&ctx, &terminals(&values.known), &mut attached, &attention);
                ask(&asked, values);
            }
            let (uptime, now) = (sys::clock::uptime(), sys::clock::now());
            logs.date(started(values, uptime, now), uptime);
            logs.catch_up();
            let drawn = if renewed {
                fold::fold(values, logs.shown(), uptime, now)
            } else {
                age::later(&self.snapshot.borrow(), values, logs.shown(), uptime, now)
            };
            let pace = match drawn.ready {
                _ if logs.is_flooded() => PACE_FLOODED,
                Some(_) => PACE,
                None => PACE_BOOTING,
            };
            self.snapshot.send_replace(Arc::new(drawn));
            // Twice changes nothing.
            ctx.healthy();

            let wait = async {
                tokio::select! {
                    // Cancel-safe per the docs of `tick`.
                    _tick = clock.tick() => Ok(()),
                    // Cancel-safe: keys that arrived stay in the window.
                    () = logs.wait() => Ok(()),
                    // Cancel-safe: waits for event values.
                    changed = watched.changed() => {
                        attention.call();
                        changed
                    }
                }?;
                // Changes meanwhile are in the next snapshot.
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

    /// Starts the services that measure, ask and compute for the snapshots; returns all
    /// watched values, and the handle by which words are requested.
    fn start(
        &self,
        ctx: &Context,
        attention: &Attention,
    ) -> (Watched, watch::Sender<BTreeSet<Fingerprint>>) {
        let (load, words, learned) =
            (watch::Sender::default(), watch::Sender::default(), watch::Sender::default());
        let (asked, past) = (watch::Sender::default(), watch::Sender::default());
        let watched = Watched {
            inputs: self.inputs.clone(),
            stages: ctx.stages(),
            services: ctx.tree(),
            load: load.subscribe(),
            words: words.subscribe(),
            members: learned.subscribe(),
            past: past.subscribe(),
            values: Values::nothing(self.environment.clone()),
            waited_for: true,
        };
        let load = load::Service {
            proc: PathBuf::from("/proc"),
            sys: PathBuf::from("/sys"),
            data: Arc::new(files::Root::live().data),
            load,
            attention: attention.clone(),
        };
        let words = fingerprint_words::Service { requested: asked.subscribe(), words };
        let members = self.members.clone();
        let past = history::Service {
            consensus: members.consensus.clone(),
            members: members.members.clone(),
            past,
        };
        ctx.spawn("past", Policy::forever(), move |ctx| past.clone().run(ctx));
        ctx.spawn("load", Policy::forever(), move |ctx| load.clone().run(ctx));
        ctx.spawn("words", Policy::forever(), move |ctx| words.clone().run(ctx));
        ctx.spawn("members", Policy::forever(), move |ctx| {
            members.clone().run(ctx, learned.clone())
        });
        (watched, asked)
    }

    /// Starts a screen for each terminal without one.
    fn attach(
        &self,
        ctx: &Context,
        terminals: &[String],
        attached: &mut BTreeSet<String>,
        attention: &Attention,
    ) {
        self.terminals.send_if_modified(|known| {
            let new = *known != terminals;
            if new {
                *known = terminals.to_vec();
            }
            new
        });
        for name in terminals {
            if attached.insert(name.clone()) {
                let screen = screen::Service {
                    name: name.clone(),
                    snapshot: self.snapshot.subscribe(),
                    end: self.end.clone(),
                    attention: attention.clone(),
                };
                let service = name.replace('/', "-");
                ctx.spawn(&service, Policy::forever(), move |ctx| screen.clone().run(ctx));
            }
        }
    }
}

/// Whether this boot is to have no console: the word `polis.console=off` on the
/// kernel command line, for the measurement of what a console costs.
#[must_use]
pub fn is_off() -> bool {
    let line = command_line::read().unwrap_or_default();
    command_line::value(&line, "polis.console") == Some("off")
}

/// Asks for the words of the fingerprints on the screen. A boot has better to do,
/// unless somebody waits for the words.
fn ask(asked: &watch::Sender<BTreeSet<Fingerprint>>, values: &Values) {
    let own = values.cluster.fingerprint.into_iter();
    let authorities = values.pki.authorities.iter().map(fold::fingerprint);
    let wanted: BTreeSet<_> = match values.cluster.state {
        cluster::State::Foreign | cluster::State::Trusted => own.collect(),
        _ if fold::ready(values).is_some() => own.chain(authorities).collect(),
        _ => BTreeSet::new(),
    };
    asked.send_if_modified(|before| {
        let new = *before != wanted;
        *before = wanted;
        new
    });
}

/// The start of the kernel by the wall clock, if that is known: a boot is shown in seconds,
/// and a clock that reads earlier than the build of this code is not set.
fn started(values: &Values, uptime: Duration, now: SystemTime) -> Option<SystemTime> {
    let over = fold::ready(values).is_some() || uptime >= BOOT;
    let right = sys::clock::correction(now, sys::clock::floor("")).is_none();
    now.checked_sub(uptime).filter(|_| over && right)
}

/// The terminals that carry the console, by name under `/dev`.
fn terminals(known: &Known) -> Vec<String> {
    let configured = known.as_ref().and_then(|known| known.parameters());
    let more = configured.into_iter().flat_map(|configured| configured.console_tui.iter().cloned());
    std::iter::once(SCREEN.to_owned()).chain(more).collect()
}

#[cfg(test)]
#[path = "rest_tests.rs"]
mod tests;
