//! The service of the firewall: makes the rules, gives them to the kernel, publishes them, waits
//! for a change, and again.
//!
//! ```text
//! [starting] --carrier, nft--> [in force] --other rules, settled--> nft --> [in force]
//!                          |  ^
//!                nft fails v  | RETRY
//!                        [failed: cause]: the former rules stay
//! ```
//!
//! The rules outlive this service and the node: those of a node that ended hold until the next one
//! has its own.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::Order;
use super::counters::{self, Counted};
use super::rules::{Known, Metadata, Rules};
use super::text;
use polis_base::cause;
use polis_control::{cluster, consensus};
use polis_machine::network::{self, names::Peers};
use polis_machine::parameters::Asking;
use polis_runtime::event::{Closed, until};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::Context;
use polis_runtime::sys::confine::{CapabilitySet, Confinement};
use polis_runtime::sys::process::{self, Command};
use polis_wire::node_roles::{self, Nodes};
use polis_wire::parameters::Firewall;

/// How long changes are awaited together: at a boot, one input after the other arrives.
const SETTLE: Duration = Duration::from_millis(200);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// How long the modules are waited for, and between two looks.
const MODULES_MAX: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);
/// `nft` takes some milliseconds.
const NFT_MAX: Duration = Duration::from_secs(60);

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program `nft`.
    pub nft: PathBuf,
    /// There once the last module that the rules need is loaded.
    pub module: PathBuf,
    /// Whether every packet is accepted: a fault that stories ask for.
    pub open: bool,
    /// The turn to count. Each count is a process, and a viewer may ask hundreds of times a second.
    turn: Arc<Semaphore>,
}

impl Config {
    /// The firewall of a running node.
    pub fn live(open: bool) -> Self {
        let (nft, module) = ("/usr/sbin/nft".into(), "/sys/module/nft_ct".into());
        Self { nft, module, open, turn: Arc::new(Semaphore::new(1)) }
    }

    /// The packets that each rule has accepted, counted for one caller after the other.
    ///
    /// # Errors
    ///
    /// A cause in words.
    pub async fn counted(&self) -> Result<Counted, String> {
        let _turn = self.turn.acquire().await.map_err(|closed| closed.to_string())?;
        let list = ["--json", "list", "table", "inet", text::TABLE];
        let listed = timeout(NFT_MAX, self.command().args(list).run()).await;
        let listed = listed.map_err(|_elapsed| Error::Slow.to_string())?;
        let output = listed.map_err(|error| cause::line(&error))?;
        counters::read(&output).map_err(|error| cause::line(&error))
    }

    /// Waits until `init` has loaded what the rules need, and not for long: without it, the kernel
    /// looks for it while `nft` waits, which takes a translated machine a second of its boot.
    async fn modules(&self) {
        let end = Instant::now() + MODULES_MAX;
        while !self.module.exists() && Instant::now() < end {
            sleep(LOOK).await;
        }
    }

    /// `nft`, confined.
    fn command(&self) -> Command {
        Command::new(&self.nft).confined(confinement())
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Whether this node is home.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its member of etcd.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The roles that the cluster gives to it.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// Every node; `None` before the first message of a leader.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The nodes of the last boot, and those that were found on the segment.
    pub peers: watch::Receiver<Peers>,
    /// The order of the cluster; `None` before the first message.
    pub order: watch::Receiver<Option<Order>>,
    /// Whether a metadata service is asked for the parameters of this machine.
    pub asks: watch::Receiver<Asking>,
}

impl Inputs {
    /// The rules of `now`, their configuration, and when a trial of it ends.
    fn rules(&self, now: Instant) -> (Rules, Firewall, Option<Instant>) {
        let (state, own) = {
            let cluster = self.cluster.borrow();
            (cluster.state, cluster.node)
        };
        let (firewall, until) = {
            let order = self.order.borrow();
            let at = order.as_ref().map(|order| order.at(now));
            at.map_or_else(Default::default, |(firewall, until)| (firewall.clone(), until))
        };
        let nodes = self.nodes.borrow().clone();
        let mut members: BTreeSet<IpAddr> = BTreeSet::new();
        for (id, node) in nodes.iter().flat_map(|nodes| nodes.iter()) {
            if node.state() == v1::NodeState::Up && Some(*id) != own {
                members.extend(node_roles::addresses(node));
            }
        }
        let peers = self.peers.borrow();
        members.extend(peers.iter().filter(|(id, _)| Some(**id) != own).map(|(_, it)| *it));
        let rules = Rules::new(&Known {
            roles: self.roles.borrow().as_ref(),
            etcd: !self.consensus.borrow().is_absent(),
            members: &members,
            home: state == cluster::State::Home && nodes.is_some(),
            firewall: &firewall,
            metadata: if *self.asks.borrow() { Metadata::Asked } else { Metadata::Closed },
        });
        (rules, firewall, until)
    }

    /// Waits for a change of any of them. Cancel-safe: waits for event values.
    async fn changed(&mut self) -> Result<(), Closed> {
        let (changed, name) = tokio::select! {
            changed = self.cluster.changed() => (changed, "the cluster"),
            changed = self.consensus.changed() => (changed, "the member of etcd"),
            changed = self.roles.changed() => (changed, "the roles"),
            changed = self.nodes.changed() => (changed, "the nodes"),
            changed = self.peers.changed() => (changed, "the addresses of nodes"),
            changed = self.order.changed() => (changed, "the cluster's firewall"),
            changed = self.asks.changed() => (changed, "the parameters"),
        };
        changed.map_err(|_closed| Closed(name))
    }
}

/// How far the kernel has the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// `nft` has not answered yet in this run.
    #[default]
    Starting,
    /// It has them.
    InForce,
    /// It has the former ones, or no rules.
    Failed(String),
    /// Every packet is accepted: the fault that a story asks for.
    Open,
}

/// The published status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// How far the kernel has them.
    pub state: State,
    /// The rules that are wanted, and in force unless the state says otherwise.
    pub rules: Arc<Rules>,
    /// The configuration that they follow.
    pub firewall: Firewall,
    /// Until when it is tried; `None`: it was confirmed.
    pub until: Option<Instant>,
}

/// Why the kernel does not have the rules.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the rules of the firewall cannot be set")]
    Nft(#[from] process::Error),
    #[error("nft has not answered within {} seconds", NFT_MAX.as_secs())]
    Slow,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed inputs.
    pub config: Config,
    /// The values that it reads.
    pub inputs: Inputs,
    /// Whether anything is plugged in.
    pub network: watch::Receiver<network::Status>,
    /// The published status.
    pub status: watch::Sender<Status>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        // A packet that could arrive comes after that, and the rules of this boot are better known.
        let line = until(&mut self.network, "the network", |network| {
            network.interfaces.iter().any(|interface| interface.carrier).then_some(())
        });
        match ctx.until_cancelled(line).await {
            Some(line) => line?,
            None => return Ok(()),
        }
        if ctx.until_cancelled(self.config.modules()).await.is_none() {
            return Ok(());
        }
        // The rules that the kernel has from this run.
        let mut present: Option<Rules> = None;
        let mut failed = cause::Last::default();
        loop {
            let (rules, firewall, until) = self.inputs.rules(Instant::now());
            let mut wait = until;
            let mut state = if self.config.open { State::Open } else { State::InForce };
            if present.as_ref() != Some(&rules) {
                let Some(applied) = ctx.until_cancelled(Box::pin(self.apply(&rules, &ctx))).await
                else {
                    return Ok(());
                };
                match applied {
                    Ok(()) => {
                        failed.clear();
                        let count = rules.rules.len();
                        info!(rules = count, members = rules.members.len(), "the firewall is set");
                        present = Some(rules.clone());
                    }
                    Err(error) => {
                        // The kernel may have taken them from a program that was ended late.
                        present = None;
                        let cause = cause::line(&error);
                        if failed.is_new(&cause) {
                            warn!(cause, "the firewall is not as it should be; it is tried again");
                        }
                        state = State::Failed(cause);
                        wait = Some(Instant::now() + RETRY);
                    }
                }
            }
            self.publish(Status { state, rules: Arc::new(rules), firewall, until });
            let changed = async {
                match wait {
                    Some(at) => tokio::select! {
                        // Cancel-safe, both.
                        changed = self.inputs.changed() => changed,
                        () = sleep_until(at) => Ok(()),
                    },
                    None => self.inputs.changed().await,
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed?,
                None => return Ok(()),
            }
            if ctx.until_cancelled(sleep(SETTLE)).await.is_none() {
                return Ok(());
            }
        }
    }

    async fn apply(&self, rules: &Rules, ctx: &Context) -> Result<(), Error> {
        let input = if self.config.open { text::removal() } else { text::text(rules) };
        let nft = self.config.command().args(["-f", "-"]).input(input.into_bytes());
        let nft = nft.log(ctx.sink("nft", Parser::Raw)).run();
        timeout(NFT_MAX, nft).await.map_err(|_elapsed| Error::Slow)?.map(drop).map_err(Into::into)
    }

    fn publish(&self, status: Status) {
        self.status.send_if_modified(|known| {
            let changed = *known != status;
            *known = status;
            changed
        });
    }
}

/// The rights of `nft`: it may configure the network, and has no file beside those of the system.
fn confinement() -> Confinement {
    Confinement::new().keeps(CapabilitySet::NET_ADMIN)
}

#[cfg(test)]
mod tests {
    use polis_base::files::Root;
    use polis_runtime::sys::acts;
    use polis_wire::identity::NodeId;

    use super::*;

    #[test]
    fn a_member_is_known_by_all_addresses_that_it_reports() {
        let node = |state: v1::NodeState, own: &str, others: &[&str]| v1::NodeInfo {
            state: state.into(),
            status: Some(v1::NodeStatus {
                external_address: own.to_owned(),
                other_addresses: others.iter().map(|&address| address.to_owned()).collect(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        let own = cluster::Status { node: Some(id(1)), ..cluster::Status::default() };
        let nodes = Nodes::from([
            (id(1), node(v1::NodeState::Up, "10.0.0.1", &["10.1.0.1"])),
            (id(2), node(v1::NodeState::Up, "10.0.0.2", &["10.1.0.2", "noise", "2001:db8::2"])),
            (id(3), node(v1::NodeState::Decommissioned, "10.0.0.3", &["10.1.0.3"])),
        ]);
        let inputs = Inputs {
            cluster: watch::channel(own).1,
            consensus: watch::channel(consensus::Status::default()).1,
            roles: watch::channel(None).1,
            nodes: watch::channel(Some(Arc::new(nodes))).1,
            peers: watch::channel(Peers::default()).1,
            order: watch::channel(None).1,
            asks: watch::channel(false).1,
        };
        let (rules, ..) = inputs.rules(Instant::now());
        let members: Vec<_> = rules.members.iter().map(ToString::to_string).collect();
        assert_eq!(members, ["10.0.0.2", "10.1.0.2", "2001:db8::2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn packets_are_counted_for_one_caller_after_the_other() {
        let config = Config { nft: "/nowhere/nft".into(), ..Config::live(false) };
        let other = config.clone();
        let counting = config.turn.acquire().await.unwrap();
        timeout(Duration::from_secs(1), other.counted()).await.unwrap_err();
        drop(counting);
        // There is no such program.
        other.counted().await.unwrap_err();
    }

    /// Not a test: what the children of the next one do.
    #[test]
    fn act_of_a_confined_child() {
        acts::child();
    }

    #[tokio::test]
    async fn nft_reaches_neither_the_kernel_s_interface_nor_the_node_s_key() {
        let base = tempfile::tempdir().unwrap();
        let root = Root::at(base.path());
        let test = "firewall::service::tests::act_of_a_confined_child";
        acts::keeps_from_all(test, &confinement(), &[], &root).await;
    }
}
