//! Whether this node runs pods: starts containerd with the role of a worker, and ends the
//! pods when the role or the machine ends, whether containerd runs or not.
//!
//! ```text
//! [unknown] --no role, and nothing has run since the boot--> [stopped]
//!     |                                                       ^  |
//!     |  role, data partition                                 |  |
//!     +------------------> containerd (`daemon`) <---------------+
//!     |                          | role taken away            |
//!     |                          v                            |
//!     +--no role------------> [ending] pods, containerd, shims, mounts, forwarding
//!                                ^  | RETRY
//!                                +--+ the kernel still forwards, or a table of kube-proxy or of
//!                                     the CNI plugins is left
//! ```
//!
//! Invariants:
//! - The status is [`Status::Stopped`] only when no pod of this boot is left, the kernel forwards
//!   nothing, and nothing translates addresses for pods: the mesh waits for it, so the last packet
//!   of a pod is still encrypted, and none comes after it.
//! - To end the pods needs no containerd: their control groups are enough.

use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use super::daemon::{Daemon, PODS_AT_END};
use super::places::Config;
use super::{Pods, Status, pods};
use crate::{Part, host};
use polis_base::cause;
use polis_base::serial::EventLine;
use polis_control::cluster;
use polis_machine::{network, storage};
use polis_runtime::event::Closed;
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Child, Context, Policy, blocking};
use polis_wire::node_roles::Role;
use polis_wire::parameters::Proxy;

/// How long pods have to end when the role is taken away: Kubernetes' own default.
const PODS_WITHOUT_ROLE: Duration = Duration::from_secs(30);

/// Wait before an end that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The inputs from this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The node does not know its roles yet, or has no data partition: what runs goes on.
    Unknown,
    /// No pods.
    Nothing,
    /// A container runtime.
    Pods,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where everything is.
    pub config: Config,
    /// Whether this node is a member.
    pub cluster: watch::Receiver<cluster::Status>,
    /// The roles that the cluster gives to it; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The parts of Kubernetes: kubelet ends before containerd does.
    pub workload: watch::Receiver<crate::Status>,
    /// The cards, bonds and VLANs, of which one may come at any time.
    pub network: watch::Receiver<network::Status>,
    /// The proxy of the cluster; `None` without one, and before it is known.
    pub proxy: watch::Receiver<Option<Proxy>>,
    /// The state that the rest of the node reads.
    pub status: watch::Sender<Status>,
    /// The pods; `None` while containerd does not answer.
    pub pods: watch::Sender<Option<Pods>>,
}

impl Service {
    /// Runs until cancelled; then the pods end.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        let pods = pods::Service {
            socket: self.config.tree.ephemeral.containerd.client().to_owned(),
            runtime: self.status.subscribe(),
            pods: self.pods.clone(),
        };
        ctx.spawn("pods", Policy::forever(), move |ctx| pods.clone().run(ctx));
        ctx.healthy();
        let mut said = None;
        let mut daemon = None;
        let mut uplinks = Vec::new();
        let mut failed = cause::Last::default();
        loop {
            // Read before the work, so that a change during it leads to another pass.
            let links = self.uplinks();
            let wanted = self.wanted();
            if said != Some(wanted) {
                let mut done = true;
                match wanted {
                    Wanted::Unknown => {}
                    Wanted::Nothing => {
                        done = self.leave(daemon.take(), &mut failed, &ctx).await;
                    }
                    Wanted::Pods if !self.config.binary.exists() => self.report_absent(&ctx),
                    Wanted::Pods if daemon.is_none() => daemon = Some(self.start(&ctx)),
                    Wanted::Pods => {}
                }
                said = done.then_some(wanted);
            }
            if daemon.is_some() && uplinks != links {
                let host = self.config.host.clone();
                blocking(move || host::prepare_uplinks(&host)).await;
                uplinks = links;
            }
            let wait = said.is_none().then_some(RETRY);
            match ctx.until_cancelled(self.changed(wait)).await {
                Some(changed) => changed?,
                None => break,
            }
        }
        // A containerd that ran has ended its pods; one that was down has not.
        if self.config.has_run() {
            self.status.send_replace(Status::Ending);
            host::pods::end(&self.config.host.cgroup, PODS_AT_END).await;
            self.release().await;
            self.forget().await;
        }
        Ok(())
    }

    fn start(&self, ctx: &Context) -> Child {
        self.status.send_replace(Status::Starting);
        let Self { config, proxy, status, .. } = self.clone();
        let daemon = Daemon { config, proxy, status };
        ctx.spawn("containerd", Policy::forever(), move |ctx| daemon.clone().run(ctx))
    }

    fn report_absent(&self, ctx: &Context) {
        const CAUSE: &str = "the image of this machine is of the base variant: it runs no pods";
        warn!("{CAUSE}");
        let line = EventLine::new("workload").field("part", "containerd").field("state", "failed");
        ctx.lines().event(line.field("cause", CAUSE));
        self.status.send_replace(Status::Absent);
    }

    /// Ends the pods before containerd, which cleans up behind them, then everything else of
    /// them. When the machine ends meanwhile, they have less time. Returns whether all of it has
    /// ended; it may be repeated.
    async fn leave(&self, daemon: Option<Child>, failed: &mut cause::Last, ctx: &Context) -> bool {
        if daemon.is_some() || self.config.has_run() {
            self.status.send_replace(Status::Ending);
            let group = &self.config.host.cgroup;
            let ended = ctx.until_cancelled(host::pods::end(group, PODS_WITHOUT_ROLE)).await;
            if ended.is_none() {
                host::pods::end(group, PODS_AT_END).await;
            }
            if let Some(daemon) = daemon {
                daemon.stop().await;
            }
            self.release().await;
            if !self.end_forwarding(failed, ctx).await {
                return false;
            }
            self.forget().await;
        }
        self.status.send_replace(Status::Stopped);
        true
    }

    /// Ends the way of packets from and to pods; returns whether it has ended. kube-proxy has ended
    /// together with kubelet.
    async fn end_forwarding(&self, failed: &mut cause::Last, ctx: &Context) -> bool {
        let log = ctx.sink("nft", Parser::Raw);
        let ended = Box::pin(host::end_forwarding(&self.config.host, log));
        match ctx.until_cancelled(ended).await {
            Some(Ok(())) => {
                failed.clear();
                true
            }
            Some(Err(error)) => {
                let cause = cause::line(&error);
                if failed.is_new(&cause) {
                    warn!(
                        cause,
                        "packets are still forwarded or translated for pods; it is tried again"
                    );
                }
                false
            }
            None => false,
        }
    }

    /// Ends the shims and unmounts, after the pods and containerd have ended.
    async fn release(&self) {
        host::pods::end_shims(&self.config.host.cgroup).await;
        let host = self.config.host.clone();
        blocking(move || host::release(&host)).await;
    }

    /// Removes the sign that there is something to end ([`Config::has_run`]). Last, so that a
    /// process that starts in between ends the rest.
    async fn forget(&self) {
        let tree = self.config.tree.clone();
        if let Err(error) = blocking(move || tree.ephemeral.containerd_config.remove()).await {
            // The next end does the same again, with nothing to do.
            info!(error = &error as &dyn std::error::Error, "a file of containerd stays");
        }
    }

    /// The parts that this node is to run, or still runs: kubelet ends first.
    fn wanted(&mut self) -> Wanted {
        let kubelet = self.workload.borrow_and_update().parts.contains_key(&Part::Kubelet);
        let is_worker =
            |roles: &v1::NodeRoles| Role::given(roles).any(|role| role == Role::KubernetesWorker);
        let worker = self.roles.borrow_and_update().as_ref().map(is_worker);
        let mounted = self.storage.borrow_and_update().ready().is_some();
        let worker = match self.cluster.borrow_and_update().state {
            cluster::State::Home | cluster::State::Split => worker,
            cluster::State::Disowning => Some(false),
            cluster::State::Unknown | cluster::State::Foreign | cluster::State::Trusted => None,
        };
        match worker {
            Some(true) if mounted => Wanted::Pods,
            Some(false) if !kubelet => Wanted::Nothing,
            Some(_) | None => Wanted::Unknown,
        }
    }

    /// The cards, bonds and VLANs, with their numbers: a bond that is made again has the same name
    /// and another number, and begins with the parameters of an interface of a pod.
    fn uplinks(&mut self) -> Vec<(u32, String)> {
        let network = self.network.borrow_and_update();
        network.interfaces.iter().map(|link| (link.index, link.name.clone())).collect()
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
            changed = self.storage.changed() => changed.map_err(|_closed| Closed("storage")),
            changed = self.network.changed() => changed.map_err(|_closed| Closed("the network")),
            changed = self.workload.changed() => {
                changed.map_err(|_closed| Closed("the parts of Kubernetes"))
            }
            () = timer => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
