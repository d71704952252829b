//! Keeps this node in touch with the curators: reports, hears, renews.
//!
//! Everything that a member owes to its cluster and hears from it goes through
//! the one client for the leader; it outlives every leader.
//!
//! ```text
//! directory file, nodes, discovery, parameters --> candidates --> Client --> the leader
//!                                                         ^
//! report     what this node says about itself, on change --+
//! heartbeat  every five seconds ---------------------------+--> contact --+
//! renewal    the certificate, after two thirds ------------+              v
//! node_watch    every node, newest value first ---------------+         split: cut off?
//!              |--> nodes  --> candidates, directory file
//!              |--> roles  --> disk, `roles`
//!              +--> standing, where no curator runs
//! ```
//!
//! Invariants:
//! - Nothing here writes into the cluster's records but through the leader.
//! - What was heard stays true while nobody is heard: roles, nodes and access are
//!   those of the last word.
//!
//! What this module does not do: lead a machine home (`cluster`), or start what a
//! role asks for (`roles`).

mod candidates;
mod heartbeat;
mod node_watch;
mod renewal;
mod report;
mod split;

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::network::names::Peers;
use crate::{cluster, consensus, network, parameters, storage};
use polis_base::environment::Environment;
use polis_base::files::{self, File};
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::CURATOR_PORT;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{HEARTBEAT, Nodes};
use polis_wire::rpc::client::{Candidate, Client};
use polis_wire::rpc::{AccessList, Credentials};

pub use self::report::Subject;

/// A node that was not heard for so long is cut off: three heartbeats, and an
/// election.
pub const CUT_OFF_AFTER: Duration = Duration::from_secs(20);

/// What is fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the cluster can be reached, for the next boot.
    pub directory: File,
    /// The roles that this node had when it last heard of them.
    pub roles: File,
    /// The node's own certificate.
    pub certificate: File,
    /// Where curators listen.
    pub port: u16,
    /// Between two heartbeats, until the leader says otherwise.
    pub heartbeat: Duration,
    /// How long this node may hear nobody.
    pub cut_off_after: Duration,
}

impl Config {
    /// The member of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            directory: root.esp.cluster_directory.clone(),
            roles: root.data.node.roles.clone(),
            certificate: root.data.node.credentials.certificate.clone(),
            port: CURATOR_PORT,
            heartbeat: HEARTBEAT,
            cut_off_after: CUT_OFF_AFTER,
        }
    }
}

/// What is read.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// What `init` told.
    pub environment: Environment,
    /// The etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// What this machine was told.
    pub parameters: watch::Receiver<parameters::Known>,
    /// Nodes that are not where the directory says.
    pub found: watch::Receiver<Peers>,
}

/// What is told to the rest of the node.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// What this node says about itself.
    pub report: watch::Sender<v1::NodeStatus>,
    /// Whom to ask for the leader.
    pub candidates: watch::Sender<Vec<Candidate>>,
    /// Every node; `None` until the first word.
    pub nodes: watch::Sender<Option<Arc<Nodes>>>,
    /// The roles that the cluster gives to this node; `None` while nothing was
    /// ever heard.
    pub roles: watch::Sender<Option<v1::NodeRoles>>,
    /// Who has access; written where no curator runs.
    pub standing: watch::Sender<Arc<AccessList>>,
    /// What this node serves and calls with.
    pub credentials: watch::Sender<Option<Credentials>>,
    /// What this machine is to its cluster: here it may become split, and heal.
    pub cluster: cluster::Writer,
    /// When the leader answered last.
    pub contact: watch::Sender<Option<Instant>>,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// What is fixed.
    pub config: Config,
    /// The way to the leader; it follows `candidates` and `credentials`.
    pub client: Client,
    /// What is read.
    pub inputs: Inputs,
    /// What is told.
    pub outputs: Outputs,
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
