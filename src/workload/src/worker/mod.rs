//! The role Kubernetes worker on this node: starts what runs pods, in the order in which
//! the parts wait for each other.
//!
//! ```text
//! leader --RPC--> worker-certificates --+--> policy --+
//! nodes -----> api-balancer             |      ^      |
//! containerd (`runtime`) ---------------+------|------+--> kubelet --> node, once it is Ready
//! prefix ----> pod-network --> containerd      |                |
//!     +----------------------------------------+                +--> kube-proxy
//!          worker-certificates, API server ----> dns
//!                        worker-certificates ----> csi (`csi`)
//!
//! registries     leader --RPC--> the files that containerd reads at a pull   a service
//! certificates   keys of this node, and certificates from the leader    a service
//! balancer       127.0.0.1 -> the API servers of all controllers         a service
//! pod_network    the CNI file, from the prefix of the node's pods        a service
//! node_object    what the API server says of this node, and its label    a service
//! dns            the address on `lo`, the Corefile, CoreDNS              a service
//! configuration  the files                                               pure
//! args           the command lines                                       pure
//! ```
//!
//! The clients on a worker know one address of the API, that of the balancer: no file
//! changes with the set of controllers, or with the roles of this node.
//!
//! Invariants:
//! - kubelet starts after containerd has the images of the system, and with certificates
//!   only.
//! - kubelet starts after the kernel enforces NetworkPolicies: no pod of this boot has ever run
//!   without.
//! - Pods outlive every part here, and `node` itself; containerd's service ends them with the
//!   role, and with the machine. It removes the table of kube-proxy with the role, too, and
//!   another kube-proxy starts after that.
//!
//! What this module does not do: run containerd (`runtime`), route between nodes (`mesh`),
//! or allocate the prefix (`curator`).

mod args;
mod balancer;
mod certificates;
mod configuration;
mod dns;
mod node_object;
mod pod_network;
mod registries;

#[cfg(test)]
pub(super) use self::configuration::pair;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::api::{self, Api};
use super::certificates::{self as shared, replace, until_another_authority_signs};
use super::component::{Check, Component, Error, Process};
use super::drain::{self, Drains};
use super::parts::{Part, PartState, Parts};
use super::site::Site;
use super::{confinement, csi, mesh, runtime, taints};
use polis_base::cause;
use polis_base::files;
use polis_machine::network;
use polis_runtime::event::{Closed, until};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_runtime::sys::cgroup::Group;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::pki::WorkerPurpose;
use polis_wire::rpc::Credentials;
use polis_wire::rpc::client::Client;

/// The checks of kubelet and kube-proxy.
const KUBELET_HEALTH: &str = "/healthz";
const PROXY_HEALTH: &str = "/healthz";
/// kube-proxy that cannot reach an API server still forwards by what it knows.
const PROXY_LIVE: &str = "/livez";

/// The checks of the program that enforces NetworkPolicies: ready once it has read them and the
/// kernel has its table and its queue, and alive unless the kernel has lost one of these.
const POLICY_READY: &str = "/readyz";
const POLICY_LIVE: &str = "/livez";

/// One of the resources that the name server reads: the rights to all of them come together.
const SERVICES: &str = "/api/v1/services?limit=1";

/// The kubelets of a cluster start again within this time after another authority signs, and not
/// at once: each asks the API servers for its pods, and for a token of each of them.
const SPREAD: Duration = Duration::from_secs(60);

/// The kernel kills pods before kubelet and kube-proxy.
const OOM_SCORE: i16 = -999;

/// Configuration and inputs of the parts. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Worker {
    pub(super) site: Site,
    pub(super) tree: files::Root,
    pub(super) node: NodeId,
    /// Between two looks at the age of certificates.
    pub(super) look: Duration,
    /// The way to the leader, which signs.
    pub(super) client: Client,
    /// The node's own, which change when the authorities of the cluster do.
    pub(super) credentials: watch::Receiver<Option<Credentials>>,
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// Those of the last boot, while no leader has answered in this one.
    pub(super) last: watch::Receiver<Option<Arc<Nodes>>>,
    pub(super) network: watch::Receiver<network::Status>,
    /// The addresses of this node's pods.
    pub(super) prefix: watch::Receiver<Option<mesh::Prefix>>,
    pub(super) containerd: watch::Receiver<runtime::Status>,
    pub(super) drains: Drains,
    pub(super) parts: Parts,
}

impl Worker {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// It returns no error; the death of a child ends the run.
    pub(super) async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let forever = Policy::forever();
        let (trusted, known) = watch::channel(None);
        let certificates = certificates::Service {
            site: self.site.clone(),
            node: self.node,
            client: self.client.clone(),
            credentials: self.credentials.clone(),
            nodes: self.nodes.clone(),
            look: self.look,
            trusted,
            parts: self.parts.clone(),
        };
        let part = Part::WorkerCertificates.name();
        ctx.spawn(part, forever, move |ctx| certificates.clone().run(ctx));
        let balancer = balancer::Service {
            listen: self.site.api_balancer(),
            node: self.node,
            local: self.site.api(),
            nodes: self.nodes.clone(),
            last: self.last.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::ApiBalancer.name(), forever, move |ctx| balancer.clone().run(ctx));
        let pod_network = pod_network::Service {
            tree: self.tree.clone(),
            prefix: self.prefix.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::PodNetwork.name(), forever, move |ctx| pod_network.clone().run(ctx));
        let (policy, trusts) = (self.clone(), known.clone());
        ctx.spawn(Part::Policy.name(), forever, move |ctx| {
            let (worker, trusts) = (policy.clone(), trusts.clone());
            async move { Box::pin(worker.policy(trusts, &ctx)).await }
        });
        let follower = self.clone();
        ctx.spawn(Part::Containerd.name(), forever, move |ctx| follower.clone().follow(ctx));
        let (registered, exists) = watch::channel(false);
        let (kubelet, trusts) = (self.clone(), known.clone());
        ctx.spawn(Part::Kubelet.name(), forever, move |ctx| {
            let (worker, trusts, exists) = (kubelet.clone(), trusts.clone(), exists.clone());
            async move { Box::pin(worker.kubelet(trusts, exists, &ctx)).await }
        });
        let object = node_object::Service {
            api: self.own(),
            node: self.node,
            programs: self.site.programs.clone(),
            registered,
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Node.name(), forever, move |ctx| object.clone().run(ctx));
        let drain = drain::Service {
            api: self.own(),
            node: self.node,
            drains: self.drains.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn("drain", forever, move |ctx| drain.clone().run(ctx));
        let proxy = self.clone();
        ctx.spawn(Part::KubeProxy.name(), forever, move |ctx| {
            let worker = proxy.clone();
            async move { worker.kube_proxy(&ctx).await }
        });
        let dns = dns::Service {
            site: self.site.clone(),
            api: self.asked_as(WorkerPurpose::Dns),
            network: self.network.clone(),
            trusted: known,
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Dns.name(), forever, move |ctx| dns.clone().run(ctx));
        let registries = registries::Service {
            directory: self.tree.ephemeral.registries.clone(),
            client: self.client.clone(),
            over: Arc::default(),
        };
        ctx.spawn("registries", forever, move |ctx| registries.clone().run(ctx));
        let csi = csi::Service {
            api: self.asked_as(WorkerPurpose::Csi),
            node: self.node,
            store: csi::Store::live(&self.tree.data),
            plugins: self.tree.data.kubelet_plugins.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Csi.name(), forever, move |ctx| csi.clone().run(ctx));
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// The API server, asked as this node.
    fn own(&self) -> Api {
        self.asked_as(WorkerPurpose::Kubelet)
    }

    /// The API server, asked with the certificate for `purpose`.
    fn asked_as(&self, purpose: WorkerPurpose) -> Api {
        Api {
            address: self.site.api_balancer(),
            ca: self.site.run.worker_ca.clone(),
            client: Some(configuration::pair(&self.site.data, purpose)),
        }
    }

    /// Shows the state of containerd, which runs at the root, as that of a part.
    async fn follow(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        loop {
            let status = self.containerd.borrow_and_update().clone();
            match &status {
                runtime::Status::Failed(cause) => self.parts.died(Part::Containerd, cause),
                status => self.parts.set(Part::Containerd, state(status)),
            }
            match ctx.until_cancelled(self.containerd.changed()).await {
                Some(changed) => changed.map_err(|_closed| Closed("containerd"))?,
                None => return Ok(()),
            }
        }
    }

    /// Enforces NetworkPolicies. The program leaves its table behind, so that a connection of a
    /// pod is never made because the program is down; the table goes with the mesh.
    async fn policy(
        mut self,
        trusts: watch::Receiver<shared::Trusted>,
        ctx: &Context,
    ) -> Result<(), Error> {
        let (part, parts) = (Part::Policy, self.parts.clone());
        let inputs = async {
            self.parts.ready(Part::WorkerCertificates).await?;
            // An image without containerd has no program for policies either, and no pods.
            until(&mut self.containerd, "containerd", |status| {
                (!matches!(status, runtime::Status::Unknown | runtime::Status::Absent))
                    .then_some(())
            })
            .await?;
            until(&mut self.prefix, "the prefix of pods", |prefix| *prefix).await
        };
        let Some(prefix) = ctx.until_cancelled(inputs).await.transpose()? else { return Ok(()) };
        let health = self.site.loopback_port(configuration::POLICY_HEALTH);
        let component = Component {
            part,
            program: self.site.programs.join("policy"),
            args: args::policy(&self.site, self.node, prefix),
            process: Process::KUBE,
            confinement: Some(confinement::policy(&self.site)),
            // It starts while an API server does, and lives while none answers.
            ready: Check::plain(health, POLICY_LIVE),
            first: Some(Check::plain(health, POLICY_READY)),
            live: Check::plain(health, POLICY_LIVE),
            parts: self.parts.clone(),
        };
        let renumbered = async {
            let other = until(&mut self.prefix, "the prefix of pods", |new| {
                new.filter(|new| *new != prefix)
            });
            match other.await {
                Ok(_new) => Error::Outdated { part, what: "the prefix of its pods has changed" },
                Err(closed) => closed.into(),
            }
        };
        let signed = until_another_authority_signs(part, trusts);
        let outdated = async {
            tokio::select! {
                // Cancel-safe, both: they wait.
                renumbered = renumbered => renumbered,
                signed = before_ready(part, &parts, signed) => signed,
            }
        };
        component.run(ctx, outdated).await
    }

    /// `registered` is whether its Node object exists.
    async fn kubelet(
        mut self,
        trusts: watch::Receiver<shared::Trusted>,
        registered: watch::Receiver<bool>,
        ctx: &Context,
    ) -> Result<(), Error> {
        let parts = self.parts.clone();
        let inputs = async {
            parts.ready(Part::WorkerCertificates).await?;
            parts.ready(Part::Containerd).await?;
            parts.ready(Part::Policy).await?;
            until(&mut self.network, "the network", |status| status.primary).await
        };
        let Some(address) = ctx.until_cancelled(inputs).await.transpose()? else { return Ok(()) };
        let part = Part::Kubelet;
        let controller = self.parts.state(Part::ApiServer).is_some();
        let (site, tree) = (self.site.clone(), self.tree.clone());
        let record = |nodes: &Nodes| taints::registered(nodes.get(&self.node));
        let taints = self.nodes.borrow().as_deref().map(record).unwrap_or_default();
        let write = move || {
            let file = configuration::kubelet(&site, &tree, controller, &taints);
            replace(&site.run.kubelet_config, &file)
        };
        blocking(write).await.map_err(|source| Error::Files { part, source })?;
        let component = Component {
            part,
            program: self.site.programs.join("kubelet"),
            args: args::kubelet(&self.site, self.node, address),
            process: Process { group: Group::Kubelet, oom_score: Some(OOM_SCORE), ..Process::KUBE },
            confinement: None,
            ready: Check::plain(
                self.site.loopback_port(configuration::KUBELET_HEALTH),
                KUBELET_HEALTH,
            ),
            first: None,
            live: Check::plain(
                self.site.loopback_port(configuration::KUBELET_HEALTH),
                KUBELET_HEALTH,
            ),
            parts: self.parts.clone(),
        };
        // kubelet registers its Node once in its life.
        let lost = node_object::lost(registered);
        let outdated = async {
            tokio::select! {
                // Cancel-safe, all: they wait.
                moved = moved(self.network, address, part) => moved,
                // At its start it asks for another token for each pod, and else only late in the
                // hour of the one before: a rotation need not wait for that.
                signed = in_turn(until_another_authority_signs(part, trusts)) => signed,
                lost = lost => match lost {
                    Ok(()) => Error::Outdated { part, what: "its Node object was deleted" },
                    Err(closed) => closed.into(),
                },
                changed = parts.asked_for(Part::ApiServer, !controller) => match changed {
                    Ok(()) => Error::Outdated { part, what: "the roles of the node have changed" },
                    Err(closed) => closed.into(),
                },
            }
        };
        component.run(ctx, outdated).await
    }

    async fn kube_proxy(mut self, ctx: &Context) -> Result<(), Error> {
        let (part, parts) = (Part::KubeProxy, self.parts.clone());
        let report = |error: &api::Error| {
            let error = cause::line(error);
            parts.wait(part, format!("it waits for the Node object of this machine: {error}"));
        };
        // It reads the addresses of node ports from the Node object at its start, and after
        // half a minute goes on without them.
        let (api, object) = (self.own(), format!("/api/v1/nodes/{}", self.node));
        let ready = async {
            self.parts.ready(Part::WorkerCertificates).await?;
            node_object::readable(&api, &object, &self.parts, report).await;
            self.parts.set(part, PartState::Starting);
            until(&mut self.containerd, "containerd", after_a_former_role).await
        };
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        let health = self.site.loopback_port(configuration::PROXY_HEALTH);
        let component = Component {
            part,
            program: self.site.programs.join("kube-proxy"),
            args: args::kube_proxy(&self.site),
            // It asks for this score itself, for which it has no right.
            process: Process { oom_score: Some(OOM_SCORE), ..Process::KUBE },
            confinement: Some(confinement::kube_proxy(&self.site)),
            ready: Check::plain(health, PROXY_HEALTH),
            first: None,
            live: Check::plain(health, PROXY_LIVE),
            parts: self.parts.clone(),
        };
        component.run(ctx, std::future::pending()).await
    }
}

/// The reason to start a part again that counts only until the part is ready.
///
/// A boot begins with the authorities of the last one. Programs read them again within five
/// minutes: that is soon enough for one that serves, and too long for one that pods wait for.
async fn before_ready(part: Part, parts: &Parts, wanted: impl Future<Output = Error>) -> Error {
    tokio::select! {
        // Cancel-safe, both: they wait.
        wanted = wanted => wanted,
        ready = parts.ready(part) => match ready {
            Ok(()) => std::future::pending().await,
            Err(closed) => Error::from(closed),
        },
    }
}

/// Delays a start that the kubelets of all nodes want at the same moment.
async fn in_turn(wanted: impl Future<Output = Error>) -> Error {
    let error = wanted.await;
    sleep(SPREAD.mul_f64(random())).await;
    error
}

/// A number from 0 to 1, another one on each node and each time.
fn random() -> f64 {
    f64::from(rand::random::<u16>()) / f64::from(u16::MAX)
}

/// Returns when the node has another address than the one that a part was started with.
async fn moved(
    mut network: watch::Receiver<network::Status>,
    address: IpAddr,
    part: Part,
) -> Error {
    // While the node has no address, the old one stays.
    let moved = until(&mut network, "the network", |status| {
        status.primary.filter(|primary| *primary != address)
    });
    match moved.await {
        Ok(_new) => Error::Outdated { part, what: "the address of the node has changed" },
        Err(closed) => closed.into(),
    }
}

/// Whether nothing of a former role is left: until then, the runtime may remove the table of a
/// kube-proxy.
fn after_a_former_role(containerd: &runtime::Status) -> Option<()> {
    match containerd {
        runtime::Status::Unknown | runtime::Status::Stopped | runtime::Status::Ending => None,
        runtime::Status::Absent
        | runtime::Status::Starting
        | runtime::Status::Serving(_)
        | runtime::Status::Failed(_) => Some(()),
    }
}

/// The state of containerd as a part.
fn state(status: &runtime::Status) -> PartState {
    match status {
        runtime::Status::Unknown
        | runtime::Status::Stopped
        | runtime::Status::Starting
        | runtime::Status::Ending => PartState::Starting,
        runtime::Status::Absent => {
            PartState::Failed { cause: "the image of this node has no containerd".to_owned() }
        }
        runtime::Status::Failed(cause) => PartState::Failed { cause: cause.clone() },
        runtime::Status::Serving(health) if health.runtime.holds => PartState::Ready,
        runtime::Status::Serving(health) => {
            PartState::Failed { cause: health.runtime.reason.clone() }
        }
    }
}

impl Process {
    /// A program that writes plain lines, in the group of the control plane.
    const PLAIN: Self = Self { parser: Parser::Raw, ..Self::KUBE };
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use polis_wire::rpc::client::Timeouts;
    use tokio::time::Instant;

    use super::*;
    use crate::runtime::{Condition, Health};

    /// The worker of a node that knows nothing of its cluster yet.
    fn worker(tree: files::Root, parts: Parts) -> Worker {
        let candidates = watch::channel(Vec::new()).1;
        let credentials = watch::channel(None).1;
        Worker {
            site: Site::live(&tree),
            tree,
            node: NodeId::from_public_key(&[7; 32]),
            look: Duration::from_secs(3600),
            client: Client::new(candidates, credentials.clone(), Timeouts::default()),
            credentials,
            nodes: watch::channel(None).1,
            last: watch::channel(None).1,
            network: watch::channel(network::Status::default()).1,
            prefix: watch::channel(None).1,
            containerd: watch::channel(runtime::Status::default()).1,
            drains: Drains::default(),
            parts,
        }
    }

    #[tokio::test]
    async fn kube_proxy_says_what_it_waits_for() {
        let base = tempfile::tempdir().unwrap();
        let (ctx, handles) = Context::for_test();
        let status = watch::Sender::default();
        let mut seen = status.subscribe();
        let parts = Parts::new(status, ctx.lines().clone());
        parts.set(Part::WorkerCertificates, PartState::Ready);
        let worker = worker(files::Root::at(base.path()), parts);
        let story = async {
            let why = until(&mut seen, "the workload", |status| {
                status.waits.get(&Part::KubeProxy).cloned()
            });
            let why = why.await.unwrap();
            assert!(why.starts_with("it waits for the Node object of this machine: "), "{why}");
            handles.cancel().await;
        };
        let (ended, ()) = tokio::join!(Box::pin(worker.kube_proxy(&ctx)), story);
        ended.unwrap();
    }

    #[tokio::test]
    async fn a_policy_program_starts_again_for_another_authority_only_before_it_is_ready() {
        let (ctx, _handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        let part = Part::Policy;
        let known_as = |names: &[u8]| -> shared::Trusted {
            Some(names.iter().map(|name| vec![*name].into()).collect())
        };
        for is_ready in [false, true] {
            parts.set(part, PartState::Starting);
            let (known, trusts) = watch::channel(known_as(&[1]));
            let signed = until_another_authority_signs(part, trusts);
            let mut outdated = std::pin::pin!(before_ready(part, &parts, signed));
            assert!(outdated.as_mut().now_or_never().is_none());
            if is_ready {
                parts.set(part, PartState::Ready);
                assert!(outdated.as_mut().now_or_never().is_none());
            }
            known.send_replace(known_as(&[2, 1]));
            let ended = outdated.as_mut().now_or_never();
            let starts = matches!(ended, Some(Error::Outdated { part: Part::Policy, .. }));
            assert_eq!(starts, !is_ready, "{ended:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn kubelets_that_another_authority_asks_to_start_again_do_so_one_after_the_other() {
        let mut waits = Vec::new();
        for _node in 0..16 {
            let begun = Instant::now();
            let signs = std::future::ready(Error::from(Closed("the authorities")));
            drop(in_turn(signs).await);
            waits.push(begun.elapsed());
        }
        waits.sort();
        assert!(waits.last() <= Some(&(SPREAD + Duration::from_millis(1))), "{waits:?}");
        waits.dedup();
        assert!(waits.len() > 8, "{waits:?}");
    }

    #[test]
    fn kube_proxy_starts_after_what_a_former_one_has_left_is_removed() {
        for left in [runtime::Status::Unknown, runtime::Status::Ending, runtime::Status::Stopped] {
            assert_eq!(after_a_former_role(&left), None, "{left:?}");
        }
        let failed = runtime::Status::Failed("no root".to_owned());
        let serving = runtime::Status::Serving(Health::default());
        for here in [runtime::Status::Starting, serving, failed] {
            assert_eq!(after_a_former_role(&here), Some(()), "{here:?}");
        }
    }

    #[test]
    fn containerd_is_ready_while_it_can_run_containers() {
        let serving = |holds, reason: &str| {
            let runtime = Condition { holds, reason: reason.to_owned() };
            // Without a prefix, pods have no network: `pod-network` reports that.
            runtime::Status::Serving(Health { runtime, network: Condition::default() })
        };
        assert_eq!(state(&serving(true, "")), PartState::Ready);
        let cause = "no snapshotter".to_owned();
        assert_eq!(state(&serving(false, "no snapshotter")), PartState::Failed { cause });
        assert_eq!(state(&runtime::Status::Starting), PartState::Starting);
        assert!(matches!(state(&runtime::Status::Absent), PartState::Failed { .. }));
        let cause = "exited with status 1: no root".to_owned();
        let died = state(&runtime::Status::Failed(cause.clone()));
        assert_eq!(died, PartState::Failed { cause });
    }
}
