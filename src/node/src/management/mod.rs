//! The management API of this node: serves its status, logs, services, screen, update, end and
//! numbers to operators.
//!
//! Every node serves `NodeManagement` on port 7839 and metrics on 7840, once it
//! has a certificate of the cluster. A node that waits for the key of its disk
//! serves them too, with a certificate that its join key has signed.
//!
//! ```text
//! event values, log tree --> [grpc]     7839  NodeManagement, reflection, health
//!                       \--> [metrics]  7840  GET /metrics
//! ```
//!
//! Invariants:
//! - A request that changes something is in the log with the user who made it, and then in the
//!   audit log of the cluster.
//! - Nothing here makes another service wait: everything is read from event
//!   values and from the log tree.
//!
//! What this module does not do: authorize callers (`rpc`), or operate more than one node
//! (`curator`).

mod attest;
mod calls;
mod certificate;
mod console;
mod drain;
mod firewall;
mod logs;
mod metrics;
mod serve;
#[cfg(test)]
mod tests;
mod text;
mod update;

pub use self::attest::Tpm;
pub(crate) use self::attest::is_absent;
pub use self::calls::Calls;

use std::net::SocketAddr;
use std::sync::Arc;

use polis_tui::Snapshot;
use tokio::sync::watch;
use tokio::time::Instant;

use polis_base::environment::Environment;
use polis_base::sys::reboot::Reason;
use polis_control::cluster::unlock::{Announcements, Requests};
use polis_control::{cluster, consensus};
use polis_machine::time;
use polis_machine::update::{Door, Store};
use polis_runtime::logtree::ring;
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::{MANAGEMENT_PORT, METRICS_PORT};
use polis_wire::pki::Overview;
use polis_wire::rpc::{self, AccessList, App, Credentials, Limits, Listen, Metrics, Table};
use polis_workload as workload;
use polis_workload::drain::Drains;

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where management listens.
    pub listen: Listen,
    /// Where metrics are read.
    pub metrics: Listen,
    /// The limits for callers.
    pub limits: Limits,
}

impl Config {
    /// The management of a running node.
    #[must_use]
    pub fn live() -> Self {
        // A node has few operators, and a curator many nodes.
        let limits = Limits { known: 256, ..Limits::default() };
        Self {
            listen: Listen::Everywhere(MANAGEMENT_PORT),
            metrics: Listen::Everywhere(METRICS_PORT),
            limits,
        }
    }
}

/// The values that it reads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The facts from `init`.
    pub environment: Environment,
    /// This machine's state in its cluster.
    pub cluster: watch::Receiver<cluster::Status>,
    /// Its etcd member.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The certificates of the cluster.
    pub pki: watch::Receiver<Overview>,
    /// Whether this node was ready in this boot.
    pub ready: watch::Receiver<bool>,
    /// The status that this node reports.
    pub report: watch::Receiver<polis_proto::v1::NodeStatus>,
    /// The logs of earlier boots.
    pub ring: watch::Receiver<ring::Status>,
    /// The content of its screen.
    pub snapshot: watch::Receiver<Arc<Snapshot>>,
    /// The credentials with which it serves; empty before the node is home.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// Where a recovery key can be given while the disk is locked.
    pub unlock_requests: Requests,
    /// Where a firmware update can be announced while the node is home.
    pub announcements: Announcements,
    /// The access list.
    pub access_list: watch::Receiver<Arc<AccessList>>,
    /// The parts of Kubernetes.
    pub workload: watch::Receiver<workload::Status>,
    /// Where this node can be drained.
    pub drains: Drains,
    /// The clock.
    pub time: watch::Receiver<time::Status>,
    /// How far the log has reached each target.
    pub forwarding: watch::Receiver<crate::forwarding::Status>,
    /// Which snapshot of etcd its target has, while this node leads.
    pub shipping: watch::Receiver<crate::shipping::Status>,
    /// The update of the cluster that goes on, or the last one.
    pub cluster_update: watch::Receiver<Option<polis_proto::v1::GetUpdateResponse>>,
    /// The mirror of the disk.
    pub mirror: watch::Receiver<polis_machine::mirror::Status>,
    /// The further disks.
    pub volumes: watch::Receiver<polis_machine::volumes::Status>,
    /// The firewall.
    pub firewall: watch::Receiver<crate::firewall::Status>,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The values that it reads.
    pub inputs: Inputs,
    /// The permissions of callers.
    pub table: Arc<Table>,
    /// The counters of the other servers of this node, by name.
    pub servers: Vec<(&'static str, Arc<Metrics>)>,
    /// The channel for requests to end the machine.
    pub end: watch::Sender<Option<Reason>>,
    /// Until when the removal of this node by the cluster is to wipe its disk, too.
    pub reset: watch::Sender<Option<Instant>>,
    /// Where another system is taken.
    pub update: Door,
    /// Where a bundle is kept for other nodes.
    pub bundles: Store,
    /// The calls of operators to this node, for the audit log.
    pub calls: Calls,
    /// How the firewall is asked.
    pub firewall: firewall::Config,
    /// The TPM of this machine.
    pub tpm: Tpm,
    /// Where management and metrics listen, while they do.
    pub listening: [watch::Sender<Option<SocketAddr>>; 2],
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The descriptors of the API cannot be read: the build is broken.
    #[error("cannot describe the API")]
    Reflection(#[from] tonic_reflection::server::Error),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        let Self { config, inputs, table, mut servers, end, reset, .. } = self;
        let Self { update, bundles, calls, firewall, tpm, listening, .. } = self;
        let [grpc_listens, page_listens] = listening;
        let management = Arc::new(Metrics::new(&table));
        let pages = Arc::new(Metrics::new(&table));
        servers.push(("management", Arc::clone(&management)));
        servers.push(("metrics", Arc::clone(&pages)));
        let handlers = serve::Handlers {
            inputs: inputs.clone(),
            logs: ctx.logs().clone(),
            services: ctx.tree(),
            end,
            reset,
            update,
            bundles,
            firewall,
            tpm,
            lines: ctx.lines().clone(),
        };
        let sources = metrics::Sources {
            inputs: inputs.clone(),
            services: ctx.tree(),
            stages: ctx.stages(),
            logs: ctx.logs().clone(),
            servers,
        };
        let meanwhile = watch::Sender::new(None);
        let certificate = certificate::Service {
            home: inputs.credentials.clone(),
            waiting: inputs.unlock_requests.watch(),
            shown: meanwhile.clone(),
        };
        let server = |name, listen, metrics, app, listening| rpc::Server {
            config: rpc::Config { name, listen, limits: config.limits.clone() },
            credentials: meanwhile.subscribe(),
            named: None,
            access_list: inputs.access_list.clone(),
            table: Arc::clone(&table),
            metrics,
            app,
            refused: None,
            reached: None,
            listening,
        };
        let grpc = App::Grpc(handlers.routes(calls.clone())?);
        let grpc = server("management", config.listen.clone(), management, grpc, grpc_listens);
        let page = App::Page(Arc::new(move || sources.page()));
        let page = server("metrics", config.metrics.clone(), pages, page, page_listens);
        let forever = Policy::forever();
        ctx.spawn("certificate", forever, move |ctx| certificate.clone().run(ctx));
        ctx.spawn("metrics", forever, move |ctx| page.clone().run(ctx));
        ctx.spawn("grpc", forever, move |ctx| grpc.clone().run(ctx));
        ctx.healthy();
        calls.count(&ctx).await;
        Ok(())
    }
}
