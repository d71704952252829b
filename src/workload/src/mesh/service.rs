//! The service of the mesh: reads the records and the kernel, plans, applies, publishes,
//! waits, and again.
//!
//! ```text
//! [absent] --role of Kubernetes--> [waiting] --record has prefix and key--> [ready]
//!    ^                              what for                                 |  ^
//!    |                                                         kernel refuses|  |RETRY
//!    |                                                                       v  |
//!    +-- role taken away, the last pod ended: device and table removed - [failed: cause]
//! ```
//!
//! Invariants:
//! - Only the kernel knows its state: a pass reads it again, at the latest after [`REVIEW`],
//!   so a restart of the node finds the former device, and sessions with other nodes go on.
//! - While the records are unknown, what is there stays. After a boot nothing is there: a node
//!   that no leader answers has the mesh of the last records on its disk ([`Kept`]).
//! - The records of a leader replace the kept ones whole: no peer of the disk outlasts them.
//! - The mesh goes after the last pod: a pod's last packet is encrypted, as all before it.
//! - The device is made before the rules, and removed after them: a pass without a mesh to make
//!   sees by the device what an earlier one has left.
//! - A refusal ends nothing: it is the status, and tried again.
//!
//! What this module does not do: report the key to the leader (`agent`), or configure pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::DEVICE;
use super::actions::{Device, Observed, actions};
use super::kept::Kept;
use super::kernel::{self, Kernel};
use super::key::{self, PrivateKey, PublicKey};
use super::plan::Mesh;
use super::records::{Place, place};
use super::rules;
use super::status::{Outputs, PeerStatus, Stage, Status, publish};
use crate::host;
use crate::host::sysctl::{self, Parameter};
use crate::parts::{Part, PartState, Parts};
use crate::runtime;
use polis_base::cause;
use polis_base::files;
use polis_base::sys::clock;
use polis_control::cluster;
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::process;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, has_kubernetes};
use polis_wire::pod_network::Networks;

/// Between two looks at the kernel: handshakes are two minutes apart, and nothing else
/// changes the device.
const REVIEW: Duration = Duration::from_secs(30);

/// Wait before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// How long a leader is awaited before the kept places count: one that is there has sent the
/// records by then. The kept ones may be old, and are not used for a moment only.
const LEADER_MAX: Duration = Duration::from_secs(10);

/// A pass takes some milliseconds. One that the kernel or `nft` does not answer is begun again
/// with new sockets and another process.
const PASS_MAX: Duration = Duration::from_secs(60);

/// Passes until the kernel has everything: make the device, configure it, find nothing to do.
const PASSES_MAX: u32 = 4;

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directories of the own key, from the outermost; made if missing.
    pub directories: Vec<files::Dir>,
    /// The file with the own key.
    pub key: files::File,
    /// The file with the places of the nodes, for the next boot.
    pub places: files::File,
    /// How long a leader is awaited before the places of the last boot count.
    pub leader_max: Duration,
    /// The program `nft`.
    pub nft: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
}

impl Config {
    /// The mesh of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            directories: vec![root.data.kubernetes.dir.clone(), root.data.mesh.clone()],
            key: root.data.mesh_key.clone(),
            places: root.data.mesh_places.clone(),
            leader_max: LEADER_MAX,
            nft: PathBuf::from("/usr/sbin/nft"),
            proc: PathBuf::from("/proc"),
        }
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed inputs.
    pub config: Config,
    /// This node, and whether it is a member.
    pub cluster: watch::Receiver<cluster::Status>,
    /// The roles that the cluster gives to it; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The networks of pods and Services, known before the roles are.
    pub networks: watch::Receiver<Networks>,
    /// Its addresses.
    pub network: watch::Receiver<network::Status>,
    /// Every node; `None` before the first message of a leader.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The container runtime: whether pods are left.
    pub containerd: watch::Receiver<runtime::Status>,
    /// The event values of the mesh.
    pub outputs: Outputs,
    pub(crate) parts: Parts,
}

/// Why the mesh is not there.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot make a directory for the key of the mesh")]
    Directory(#[source] files::Error),
    #[error(transparent)]
    Key(#[from] key::Error),
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    #[error("cannot set the rules of the mesh")]
    Rules(#[source] process::Error),
    #[error("the kernel does not keep the interface {DEVICE} as it was set")]
    Unsettled,
    #[error("the kernel or nft has not answered within {} seconds", PASS_MAX.as_secs())]
    Slow,
    #[error("{0}")]
    Unfit(String),
}

/// The inputs from this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The node does not know its roles yet, or its last pods end: the present mesh stays.
    Stays,
    /// No mesh.
    Nothing,
    /// The mesh of this node.
    Mesh(NodeId),
}

fn wanted(
    cluster: &cluster::Status,
    roles: Option<v1::NodeRoles>,
    containerd: &runtime::Status,
) -> Wanted {
    let nothing = match containerd {
        runtime::Status::Stopped | runtime::Status::Absent => Wanted::Nothing,
        runtime::Status::Unknown
        | runtime::Status::Starting
        | runtime::Status::Serving(_)
        | runtime::Status::Ending
        | runtime::Status::Failed(_) => Wanted::Stays,
    };
    match (cluster.state, cluster.node, roles) {
        (cluster::State::Disowning, _, _) => nothing,
        (cluster::State::Home | cluster::State::Split, Some(own), Some(roles)) => {
            if has_kubernetes(Some(&roles)) { Wanted::Mesh(own) } else { nothing }
        }
        _ => Wanted::Stays,
    }
}

/// The result of a pass, or [`Error::Slow`].
async fn in_time(pass: impl Future<Output = Result<Status, Error>>) -> Result<Status, Error> {
    timeout(PASS_MAX, pass).await.unwrap_or(Err(Error::Slow))
}

/// The memory of a run.
#[derive(Debug)]
struct Run {
    /// The places of the last boot, and for the next one.
    kept: Kept,
    /// Until when a leader is awaited; `None` while nothing waits, and once the kept places were
    /// looked at.
    leader_until: Option<Instant>,
    /// Whether they were.
    recalled: bool,
    /// The networks of the table of rules that this run has set; `None` without one.
    rules: Option<Networks>,
    /// The kernel has nothing of the mesh, so there is nothing to look at.
    clean: bool,
    /// The mesh that the kernel has had since this moment: the records change more often than
    /// the mesh does.
    settled: Option<(Mesh, Instant)>,
    /// The endpoints that were set last.
    last_set: BTreeMap<PublicKey, SocketAddr>,
    /// The last failure, which is logged once.
    failed: cause::Last,
    /// Nodes that are left out, of which each is logged once.
    rejected: BTreeSet<NodeId>,
}

impl Run {
    fn new(config: &Config) -> Self {
        Self {
            kept: Kept::new(config.places.clone()),
            leader_until: None,
            recalled: false,
            rules: None,
            clean: false,
            settled: None,
            last_set: BTreeMap::new(),
            failed: cause::Last::default(),
            rejected: BTreeSet::new(),
        }
    }

    /// Keeps the places of the nodes for the next boot, or keeps none any more.
    async fn keep(&mut self, wanted: Wanted, nodes: Option<&Nodes>) {
        match (wanted, nodes) {
            (Wanted::Mesh(own), Some(nodes)) => self.kept.write(own, nodes).await,
            (Wanted::Nothing, _) => self.kept.forget().await,
            (Wanted::Mesh(_), None) | (Wanted::Stays, _) => {}
        }
    }
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let mut run = Run::new(&self.config);
        ctx.healthy();
        loop {
            // Read before the pass, so that a change during it leads to another one.
            let wanted = wanted(
                &self.cluster.borrow_and_update(),
                *self.roles.borrow_and_update(),
                &self.containerd.borrow_and_update(),
            );
            // After the roles, before which they are written.
            let networks = *self.networks.borrow_and_update();
            let addresses = self.network.borrow_and_update().addresses();
            let nodes = self.nodes.borrow_and_update().clone();
            let pass = async {
                match wanted {
                    Wanted::Stays => Ok(self.outputs.status.borrow().clone()),
                    Wanted::Nothing => self.remove(&mut run, &ctx).await,
                    Wanted::Mesh(own) => {
                        let nodes = nodes.as_deref();
                        self.build(own, networks, &addresses, nodes, &mut run, &ctx).await
                    }
                }
            };
            // Boxed: sockets and their buffers are some kilobytes.
            let pass = in_time(Box::pin(pass));
            let Some(done) = ctx.until_cancelled(pass).await else { return Ok(()) };
            let wait = self.conclude(done, wanted, &mut run);
            // Last: the disk may be slow.
            let keep = run.keep(wanted, nodes.as_deref());
            if ctx.until_cancelled(keep).await.is_none() {
                return Ok(());
            }
            match ctx.until_cancelled(self.changed(wait)).await {
                Some(changed) => changed?,
                None => return Ok(()),
            }
        }
    }

    /// Waits for a change of an input, or for the time. Cancel-safe.
    async fn changed(&mut self, wait: Option<Duration>) -> Result<(), Closed> {
        let timer = async {
            match wait {
                Some(wait) => sleep(wait).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Cancel-safe, all of them: they wait for event values or the time.
            changed = self.cluster.changed() => changed.map_err(|_closed| Closed("the cluster")),
            changed = self.roles.changed() => changed.map_err(|_closed| Closed("the roles")),
            changed = self.networks.changed() => changed.map_err(|_closed| Closed("the networks")),
            changed = self.network.changed() => changed.map_err(|_closed| Closed("the network")),
            changed = self.nodes.changed() => changed.map_err(|_closed| Closed("the nodes")),
            changed = self.containerd.changed() => {
                changed.map_err(|_closed| Closed("the container runtime"))
            }
            () = timer => Ok(()),
        }
    }

    /// Publishes the result of a pass, and returns the time until the next one.
    fn conclude(
        &self,
        done: Result<Status, Error>,
        wanted: Wanted,
        run: &mut Run,
    ) -> Option<Duration> {
        if wanted == Wanted::Stays {
            // An input ends the wait.
            return None;
        }
        let status = done.unwrap_or_else(|error| {
            let cause = cause::line(&error);
            if run.failed.is_new(&cause) {
                warn!(cause, "the mesh of this node cannot be made or removed");
            }
            let former = self.outputs.status.borrow().clone();
            Status { stage: Stage::Failed(cause), ..former }
        });
        if !matches!(status.stage, Stage::Failed(_)) {
            run.failed.clear();
        }
        if let Stage::Waiting(what) = status.stage
            && self.outputs.status.borrow().stage != status.stage
        {
            info!("the mesh waits for {what}");
        }
        for (id, why) in &status.rejected {
            if run.rejected.insert(*id) {
                warn!(node = %id, "is left out of the mesh: {why}");
            }
        }
        run.rejected.retain(|id| status.rejected.contains_key(id));
        let wait = match &status.stage {
            Stage::Absent => None,
            // An input ends the wait, or the time that a leader has.
            Stage::Waiting(_) => {
                run.leader_until.map(|at| at.saturating_duration_since(Instant::now()))
            }
            Stage::Ready => {
                let since = run.settled.as_ref().map(|(_, since)| since.elapsed());
                Some(REVIEW.saturating_sub(since.unwrap_or_default()))
            }
            Stage::Failed(_) => Some(RETRY),
        };
        match (&status.stage, wanted) {
            (_, Wanted::Stays | Wanted::Nothing) => self.parts.remove(Part::Mesh),
            (Stage::Absent, Wanted::Mesh(_)) => self.parts.set(Part::Mesh, PartState::Starting),
            (Stage::Waiting(what), Wanted::Mesh(_)) => {
                self.parts.wait(Part::Mesh, format!("it waits for {what}"));
            }
            (Stage::Ready, Wanted::Mesh(_)) => self.parts.set(Part::Mesh, PartState::Ready),
            (Stage::Failed(cause), Wanted::Mesh(_)) => {
                self.parts.fail(Part::Mesh, cause.as_str());
            }
        }
        publish(&self.outputs.status, status);
        wait
    }

    /// Makes the mesh of this node in the networks of its cluster, as the records have it.
    async fn build(
        &self,
        own: NodeId,
        networks: Networks,
        addresses: &[IpAddr],
        nodes: Option<&Nodes>,
        run: &mut Run,
        ctx: &Context,
    ) -> Result<Status, Error> {
        run.clean = false;
        let settled = run.settled.take();
        let key = self.own_key().await?;
        publish(&self.outputs.key, Some(key.public()));
        let last = self.last(nodes, run).await;
        let known = nodes.or(last.as_deref());
        let place = place(own, key.public(), networks, addresses, known);
        let (mesh, prefix, names, rejected) = match place {
            Place::Waiting(what) => {
                if nodes.is_some() {
                    // The addresses may be another node's by now.
                    publish(&self.outputs.prefix, None);
                }
                return Ok(Status { stage: Stage::Waiting(what), ..Status::default() });
            }
            Place::Unfit(cause) => return Err(Error::Unfit(cause)),
            Place::Mesh { mesh, prefix, names, rejected } => (mesh, prefix, names, rejected),
        };
        if let Some((known, since)) = settled.filter(|(known, _)| *known == mesh)
            && since.elapsed() < REVIEW
        {
            run.settled = Some((known, since));
            let former = self.outputs.status.borrow().clone();
            return Ok(Status { rejected, ..former });
        }
        let (wanted, last_set) = (&mesh, &run.last_set);
        let settle = async |kernel: &Kernel| settle(kernel, wanted, last_set, &key).await;
        let (device, changed) = kernel::connected(settle).await?;
        run.last_set = mesh.endpoints();
        if changed > 0 {
            info!(changed, peers = mesh.peers.len(), %prefix, "the mesh is in place");
        }
        self.accept_answers().await;
        if run.rules != Some(networks) {
            self.rules(Some(networks), ctx).await?;
            // The kernel has the table of connections from these rules on.
            let proc = self.config.proc.clone();
            blocking(move || host::allow_connections(&proc)).await;
            run.rules = Some(networks);
        }
        publish(&self.outputs.prefix, Some(prefix));
        let mut peers = BTreeMap::new();
        for (key, present) in &device.peers {
            let Some(id) = names.get(key) else { continue };
            let (endpoint, handshake) = (present.endpoint, present.handshake);
            peers.insert(*id, PeerStatus { endpoint, handshake });
        }
        run.settled = Some((mesh, Instant::now()));
        Ok(Status { stage: Stage::Ready, peers, rejected })
    }

    /// The places of the last boot, while they count: no leader has sent the records in this boot,
    /// and had the time to.
    async fn last(&self, nodes: Option<&Nodes>, run: &mut Run) -> Option<Arc<Nodes>> {
        if nodes.is_some() {
            run.leader_until = None;
            publish(&self.outputs.last, None);
            return None;
        }
        let last = self.outputs.last.borrow().clone();
        if last.is_some() || run.recalled {
            return last;
        }
        let until = *run.leader_until.get_or_insert(Instant::now() + self.config.leader_max);
        if Instant::now() < until {
            return None;
        }
        (run.leader_until, run.recalled) = (None, true);
        let last = Arc::new(run.kept.read().await?);
        info!(
            nodes = last.len(),
            "no leader answers: the nodes of the mesh are those of the last boot"
        );
        publish(&self.outputs.last, Some(Arc::clone(&last)));
        Some(last)
    }

    /// Removes the mesh of a node without a role. One that never had any runs no program.
    async fn remove(&self, run: &mut Run, ctx: &Context) -> Result<Status, Error> {
        publish(&self.outputs.prefix, None);
        publish(&self.outputs.key, None);
        publish(&self.outputs.last, None);
        if run.clean {
            return Ok(Status::default());
        }
        let find = async |kernel: &Kernel| match kernel.observe().await? {
            Observed::Absent => Ok(None),
            Observed::Foreign(index) | Observed::Device(Device { index, .. }) => Ok(Some(index)),
        };
        let found = kernel::connected::<_, kernel::Error>(find).await?;
        // The device is last: while it is there, the next pass removes the rules, too, also where
        // this one, or the run, is cut off in between.
        if found.is_some() || run.rules.is_some() {
            self.rules(None, ctx).await?;
            run.rules = None;
        }
        if let Some(index) = found {
            let delete = async |kernel: &Kernel| kernel.delete(index).await;
            kernel::connected::<_, kernel::Error>(delete).await?;
            info!("the mesh is removed: this node has no role of Kubernetes");
        }
        run.clean = true;
        Ok(Status::default())
    }

    async fn own_key(&self) -> Result<PrivateKey, Error> {
        let Config { directories, key, .. } = self.config.clone();
        blocking(move || {
            directories.iter().try_for_each(files::Dir::create).map_err(Error::Directory)?;
            Ok(PrivateKey::load_or_make(&key)?)
        })
        .await
    }

    /// A packet of a pod that comes through the mesh has no route back on the interface that
    /// a node port was reached by: the strict check would drop it.
    async fn accept_answers(&self) {
        let parameter = Parameter::new(format!("net/ipv4/conf/{DEVICE}/rp_filter"), "0");
        let proc = self.config.proc.clone();
        for refused in blocking(move || sysctl::apply(&proc, &[parameter])).await {
            warn!(error = &refused as &dyn std::error::Error, "goes on without it");
        }
    }

    async fn rules(&self, wanted: Option<Networks>, ctx: &Context) -> Result<(), Error> {
        let log = ctx.sink("nft", Parser::Raw);
        rules::apply(&self.config.nft, wanted, log).await.map_err(Error::Rules)
    }
}

/// Changes the kernel until it has the mesh; returns the device, and the number of changes.
async fn settle(
    kernel: &Kernel,
    mesh: &Mesh,
    last_set: &BTreeMap<PublicKey, SocketAddr>,
    key: &PrivateKey,
) -> Result<(Device, usize), Error> {
    let mut changed = 0;
    for _pass in 0..PASSES_MAX {
        let observed = kernel.observe().await?;
        let mesh = match &observed {
            Observed::Device(device) => mesh.without_roamed(&device.peers, last_set, clock::now()),
            Observed::Absent | Observed::Foreign(_) => mesh.clone(),
        };
        let actions = actions(&observed, Some((&mesh, key.public())));
        match observed {
            Observed::Device(device) if actions.is_empty() => return Ok((device, changed)),
            Observed::Absent | Observed::Foreign(_) | Observed::Device(_) => {}
        }
        for action in &actions {
            kernel.apply(action, key).await?;
        }
        changed += actions.len();
    }
    Err(Error::Unsettled)
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
