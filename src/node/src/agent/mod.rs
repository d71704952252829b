//! The agent: keeps this node in touch with the curators. It reports, watches and
//! renews.
//!
//! All reports to the cluster and all messages from it go through the one client for the
//! leader, which outlives every leader.
//!
//! ```text
//! directory file, nodes, discovery, parameters --> candidates --> Client --> the leader
//!                                                         ^
//! report     what this node says about itself, on change --+
//! heartbeat  every five seconds ---------------------------+--> contact --+
//! turn       its part of an update of the cluster, from heartbeat to heartbeat
//! renewal    the certificate, after two thirds,
//!            and when another CA signs --------------------+              v
//! node_watch    every node, newest value first ---------------+         split: cut off?
//!              |--> nodes  --> candidates, directory file
//!              |--> roles  --> disk, `roles`
//!              |--> order of another network --> `network`, where a heartbeat confirms it
//!              +--> standing, where no curator runs
//! users      the list of users --> disk, and back at the next start
//! calls      what operators asked of this node, for the audit log
//! attest     what this boot was started with, by the TPM, where a heartbeat asks for it
//! ```
//!
//! Invariants:
//! - This module writes into the cluster's records only through the leader.
//! - The last values stay valid while no curator is reachable: roles, nodes and access
//!   are those of the last message.
//!
//! What this module does not do: lead a machine home (`cluster`), or start what a
//! role asks for (`roles`).

mod attest;
mod calls;
mod candidates;
mod heartbeat;
mod kept;
mod node_watch;
mod received;
mod renewal;
mod report;
mod split;
mod turn;
mod users;

use std::sync::Arc;
use std::time::Duration;

use crate::firewall::{self, Order};
use crate::management::{Calls, Tpm};
use crate::{forwarding, shipping};
use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;

use polis_base::environment::Environment;
use polis_base::files::{self, File};
use polis_base::sys::reboot::Reason;
use polis_control::{cluster, consensus};
use polis_machine::network::names::Peers;
use polis_machine::{mirror, network, parameters, storage, time, update, volumes};
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::{CURATOR_PORT, MANAGEMENT_PORT};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{HEARTBEAT, Nodes};
use polis_wire::pod_network::Networks;
use polis_wire::rpc::client::{Candidate, Client};
use polis_wire::rpc::{AccessList, Credentials};
use polis_workload as workload;

pub use self::report::Subject;
pub use self::turn::{Taking, Tools};

/// A node without contact for this long is cut off: three heartbeats, and an election.
pub const CUT_OFF_AFTER: Duration = Duration::from_secs(20);

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the cluster can be reached, for the next boot.
    pub directory: File,
    /// The roles of this node in the last message from the cluster.
    pub roles: File,
    /// The networks of pods and Services.
    pub networks: File,
    /// The firewall of the cluster in the last message.
    pub firewall: File,
    /// The targets of logs in the last message from the cluster.
    pub log_targets: File,
    /// The time servers of the cluster in the last message.
    pub time_servers: File,
    /// The proxy of the cluster in the last message.
    pub proxy: File,
    /// The users in the last message from the cluster.
    pub users: File,
    /// The node's own certificate.
    pub certificate: File,
    /// The CA of the cluster and those before it.
    pub authorities: File,
    /// Where curators listen.
    pub port: u16,
    /// Between two heartbeats, until the leader sets another interval.
    pub heartbeat: Duration,
    /// How long this node may be without contact.
    pub cut_off_after: Duration,
    /// Where nodes serve their management.
    pub management_port: u16,
}

impl Config {
    /// The member of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            directory: root.esp.cluster_directory.clone(),
            roles: root.data.node.roles.clone(),
            networks: root.data.node.networks.clone(),
            firewall: root.data.node.firewall.clone(),
            log_targets: root.data.node.log_targets.clone(),
            time_servers: root.data.node.time_servers.clone(),
            proxy: root.data.node.proxy.clone(),
            users: root.data.node.users.clone(),
            certificate: root.data.node.credentials.certificate.clone(),
            authorities: root.data.node.credentials.authorities.clone(),
            port: CURATOR_PORT,
            heartbeat: HEARTBEAT,
            cut_off_after: CUT_OFF_AFTER,
            management_port: MANAGEMENT_PORT,
        }
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The facts from `init`.
    pub environment: Environment,
    /// The etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The parameters of this machine.
    pub parameters: watch::Receiver<parameters::Known>,
    /// Nodes that have moved from their address in the directory.
    pub found: watch::Receiver<Peers>,
    /// The parts of Kubernetes.
    pub workload: watch::Receiver<workload::Status>,
    /// The firewall.
    pub firewall: watch::Receiver<firewall::Status>,
    /// The clock.
    pub time: watch::Receiver<time::Status>,
    /// How far the log has reached each target.
    pub forwarding: watch::Receiver<forwarding::Status>,
    /// Which snapshot of etcd its target has, while this node leads.
    pub shipping: watch::Receiver<shipping::Status>,
    /// The systems of this machine.
    pub update: watch::Receiver<update::Status>,
    /// The mirror of the disk.
    pub mirror: watch::Receiver<mirror::Status>,
    /// Its further disks.
    pub volumes: watch::Receiver<volumes::Status>,
    /// The key of this node in the mesh, while it has a role of Kubernetes.
    pub mesh_key: watch::Receiver<Option<workload::mesh::PublicKey>>,
    /// Why the leader names other networks of pods and Services than this node uses.
    pub networks_fault: watch::Receiver<Option<String>>,
    /// When another machine last opened a connection to the curator of this node.
    pub reached: watch::Receiver<Option<Instant>>,
    /// Whether this node is ready.
    pub ready: watch::Receiver<bool>,
}

/// The values that the agent publishes to the rest of the node.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// The status that this node reports.
    pub report: watch::Sender<v1::NodeStatus>,
    /// The nodes to ask for the leader.
    pub candidates: watch::Sender<Vec<Candidate>>,
    /// Every node; `None` until the first message.
    pub nodes: watch::Sender<Option<Arc<Nodes>>>,
    /// The time servers of the cluster.
    pub time_servers: watch::Sender<Vec<parameters::NtpServer>>,
    /// The targets of logs; `None` before the first message, and without one of an earlier boot.
    pub log_targets: watch::Sender<Option<forwarding::Order>>,
    /// The proxy of the cluster; `None` without one, and before it is known.
    pub proxy: watch::Sender<Option<parameters::Proxy>>,
    /// The firewall of the cluster; `None` before the first message.
    pub firewall: watch::Sender<Option<Order>>,
    /// The network that the cluster orders for this node; `None` before the first message, and
    /// without an order.
    pub network: watch::Sender<Option<network::Order>>,
    /// Since when the node is known to reach the cluster over its network.
    pub proof: watch::Sender<Option<Instant>>,
    /// The roles that the cluster gives to this node; `None` before the first message.
    pub roles: watch::Sender<Option<v1::NodeRoles>>,
    /// The networks of pods and Services; the default ones before the first message. They are
    /// known before the roles are.
    pub networks: watch::Sender<Networks>,
    /// Why the leader names others; `None` while it does not.
    pub networks_fault: watch::Sender<Option<String>>,
    /// The access list; written where no curator runs.
    pub access_list: watch::Sender<Arc<AccessList>>,
    /// The certificates with which this node serves and calls.
    pub credentials: watch::Sender<Option<Credentials>>,
    /// This machine's state in its cluster: here it may become split, and heal.
    pub cluster: cluster::Writer,
    /// When the leader answered last.
    pub contact: watch::Sender<Option<Instant>>,
    /// Whether the leader wants a proof of this boot by the TPM.
    pub prove_tpm: watch::Sender<bool>,
    /// The turn that the leader gives this node in an update of the cluster.
    pub turn: watch::Sender<Option<v1::UpdateTurn>>,
    /// The number of the turn in which this node may restart now.
    pub leave: watch::Sender<Option<i64>>,
    /// How that turn goes.
    pub taking: watch::Sender<Taking>,
    /// The requests to end the machine.
    pub end: watch::Sender<Option<Reason>>,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The way to the leader; it follows `candidates` and `credentials`.
    pub client: Client,
    /// The values that it reads.
    pub inputs: Inputs,
    /// The values that the agent publishes.
    pub outputs: Outputs,
    /// The way to start etcd again.
    pub restarts: consensus::Restarts,
    /// The parts of this node that an update of the cluster needs.
    pub tools: Tools,
    /// The calls of operators to this node, for the audit log.
    pub calls: Calls,
    /// The TPM of this machine.
    pub tpm: Tpm,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// None: only a child's death can end it.
    pub async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let forever = Policy::forever();
        macro_rules! start {
            ($($name:literal $module:ident)*) => {$(
                let service = self.clone();
                ctx.spawn($name, forever, move |ctx| {
                    $module::run(service.clone(), ctx)
                });
            )*};
        }
        start! {
            "report" report
            "candidates" candidates
            "watch" node_watch
            "heartbeat" heartbeat
            "renewal" renewal
            "split" split
            "turn" turn
            "users" users
            "calls" calls
            "attest" attest
        }
        let client = self.client.clone();
        ctx.spawn("leader", forever, move |ctx| {
            let client = client.clone();
            async move {
                ctx.healthy();
                match ctx.until_cancelled(Box::pin(client.follow())).await {
                    Some(never) => match never {},
                    None => Ok::<_, std::convert::Infallible>(()),
                }
            }
        });
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// This node, once the cluster manager has named it.
    fn own(&self) -> Option<NodeId> {
        self.outputs.cluster.borrow().node
    }
}
