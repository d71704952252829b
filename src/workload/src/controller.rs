//! The role Kubernetes controller on this node: starts its parts, in the order in which they
//! wait for each other.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::api::Api;
use super::certificates::{Trusted, until_an_authority_ends, until_another_key_signs};
use super::component::{Check, Component, Error, Process};
use super::credentials::Purpose;
use super::parts::{Part, Parts};
use super::site::Site;
use super::{access, args, certificates, confinement, ground, reconciler, tokens};
use polis_base::cause;
use polis_control::consensus;
use polis_machine::network;
use polis_runtime::event::until;
use polis_runtime::supervisor::{Context, Policy, blocking};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};

/// The liveness checks of the API server, without that of etcd: a restart of the API server
/// brings no quorum back.
const API_LIVE: &str = "/livez?exclude=etcd";
const API_READY: &str = "/readyz";

/// The checks of the controller manager and the scheduler.
const MANAGER_HEALTH: &str = "/healthz";
const SCHEDULER_READY: &str = "/readyz";
const SCHEDULER_LIVE: &str = "/livez";

/// The service account of pods that name none. A new cluster has it seconds after the
/// controller manager is healthy, and refuses every pod until then.
const FIRST_ACCOUNT: &str = "/api/v1/namespaces/default/serviceaccounts/default";

/// Why the programs that need the cluster's own objects do not start yet.
const WAITS: &str = "it waits until the reconciler has tried to apply the cluster's own objects";

/// Configuration and inputs of the parts. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Controller {
    pub(super) site: Site,
    /// The machine to prepare first; `None` where the parts are guests of another host.
    pub(super) ground: Option<ground::Config>,
    pub(super) node: NodeId,
    pub(super) look: Duration,
    pub(super) consensus: watch::Receiver<consensus::Status>,
    pub(super) network: watch::Receiver<network::Status>,
    pub(super) nodes: watch::Receiver<Option<Arc<Nodes>>>,
    pub(super) identity: access::Identity,
    pub(super) parts: Parts,
}

impl Controller {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`ground::Error`] when the machine cannot be prepared.
    pub(super) async fn run(self, ctx: Context) -> Result<(), ground::Error> {
        if let Some(ground) = self.ground.clone() {
            // First of all, so that an API server that starts takes no processor time from
            // etcd and this process.
            let prepared =
                blocking(move || ground::prepare(&ground, &[Role::KubernetesController]));
            if let Err(error) = prepared.await {
                self.parts.fail(Part::ApiServer, cause::line(&error));
                return Err(error);
            }
        }
        let forever = Policy::forever();
        let (trusted, known) = watch::channel(None);
        let (signs, signing) = watch::channel(None);
        let certificates = certificates::Service {
            site: self.site.clone(),
            node: self.node,
            consensus: self.consensus.clone(),
            look: self.look,
            credentials: self.identity.credentials.clone(),
            trusted,
            signs,
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Certificates.name(), forever, move |ctx| certificates.clone().run(ctx));
        let tokens = tokens::Service {
            sockets: self.site.run.tokens.clone(),
            consensus: self.consensus.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn("tokens", forever, move |ctx| tokens.clone().run(ctx));
        let api_server = self.clone();
        ctx.spawn(Part::ApiServer.name(), forever, move |ctx| {
            let controller = api_server.clone();
            async move { controller.api_server(&ctx).await }
        });
        let (tries, tried) = watch::channel(false);
        let reconciler = reconciler::Service {
            api: self.master(),
            ca: self.site.run.ca.clone(),
            front_proxy_ca: self.site.run.front_proxy_ca.clone(),
            node: self.node,
            nodes: self.nodes.clone(),
            tried: tries,
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Reconciler.name(), forever, move |ctx| reconciler.clone().run(ctx));
        self.start_programs(&ctx, &tried, known, signing);
        let access = access::Service {
            site: self.site.clone(),
            node: self.node,
            identity: self.identity.clone(),
            parts: self.parts.clone(),
        };
        // Last, so that callers are sent away before the API server ends.
        ctx.spawn(Part::Access.name(), forever, move |ctx| access.clone().run(ctx));
        ctx.healthy();
        ctx.cancelled().await;
        Ok(())
    }

    /// Starts the programs that need the cluster's own objects.
    fn start_programs(
        &self,
        ctx: &Context,
        tried: &watch::Receiver<bool>,
        known: watch::Receiver<Trusted>,
        signing: watch::Receiver<Option<String>>,
    ) {
        let forever = Policy::forever();
        let (manager, objects) = (self.controller_manager(), tried.clone());
        ctx.spawn(Part::ControllerManager.name(), forever, move |ctx| {
            let (component, part) = (manager.clone(), Part::ControllerManager);
            let (known, signing, objects) = (known.clone(), signing.clone(), objects.clone());
            let outdated = async move {
                tokio::select! {
                    // Cancel-safe, both: they wait.
                    ended = until_an_authority_ends(part, known) => ended,
                    other = until_another_key_signs(part, signing) => other,
                }
            };
            async move { after_objects(component, &ctx, objects, outdated).await }
        });
        let (scheduler, objects) = (self.scheduler(), tried.clone());
        ctx.spawn(Part::Scheduler.name(), forever, move |ctx| {
            let (component, objects) = (scheduler.clone(), objects.clone());
            async move { after_objects(component, &ctx, objects, std::future::pending()).await }
        });
    }

    /// The client for health checks of the API server.
    fn api(&self) -> Api {
        Api { address: self.site.api(), ca: self.site.run.ca.clone(), client: None }
    }

    /// The client of this node, which may do everything.
    fn master(&self) -> Api {
        Api { client: Some(Purpose::Reconciler.pair(&self.site.data)), ..self.api() }
    }

    async fn api_server(mut self, ctx: &Context) -> Result<(), Error> {
        let parts = self.parts.clone();
        let Some(ready) = ctx.until_cancelled(parts.ready(Part::Certificates)).await else {
            return Ok(());
        };
        ready?;
        let inputs = async {
            // It reads the keys of tokens at its start, and ends without them.
            let leads = |status: &consensus::Status| status.leader.map(drop);
            until(&mut self.consensus, "etcd", leads).await?;
            until(&mut self.network, "the network", |status| status.primary).await
        };
        let Some(address) = ctx.until_cancelled(inputs).await.transpose()? else {
            return Ok(());
        };
        let (part, data) = (Part::ApiServer, self.site.data.clone());
        let admitted = blocking(move || data.admit_audit());
        admitted.await.map_err(|source| Error::Files { part, source })?;
        let component = Component {
            part,
            program: self.site.programs.join("kube-apiserver"),
            args: args::api_server(&self.site, address),
            process: Process::KUBE,
            confinement: Some(confinement::api_server(&self.site)),
            ready: Check::tls(&self.api(), API_READY),
            first: None,
            live: Check::tls(&self.api(), API_LIVE),
            parts: self.parts.clone(),
        };
        let moved = async {
            // While the node has no address, the old one stays.
            let moved = until(&mut self.network, "the network", |status| {
                status.primary.filter(|primary| *primary != address)
            });
            match moved.await {
                Ok(_new) => Error::Outdated { part, what: "the address of the node has changed" },
                Err(closed) => closed.into(),
            }
        };
        component.run(ctx, moved).await
    }

    fn controller_manager(&self) -> Component {
        let api = Api { address: self.site.controller_manager(), ..self.api() };
        Component {
            part: Part::ControllerManager,
            program: self.site.programs.join("kube-controller-manager"),
            args: args::controller_manager(&self.site),
            process: Process::KUBE,
            confinement: Some(confinement::controller_manager(&self.site)),
            ready: Check::tls(&api, MANAGER_HEALTH),
            first: Some(Check::tls(&self.master(), FIRST_ACCOUNT)),
            live: Check::tls(&api, MANAGER_HEALTH),
            parts: self.parts.clone(),
        }
    }

    fn scheduler(&self) -> Component {
        let api = Api { address: self.site.scheduler(), ..self.api() };
        Component {
            part: Part::Scheduler,
            program: self.site.programs.join("kube-scheduler"),
            args: args::scheduler(&self.site),
            process: Process::KUBE,
            confinement: Some(confinement::scheduler(&self.site)),
            ready: Check::tls(&api, SCHEDULER_READY),
            first: None,
            live: Check::tls(&api, SCHEDULER_LIVE),
            parts: self.parts.clone(),
        }
    }
}

/// Runs a part that needs the cluster's own objects, until it is outdated.
///
/// It waits until the reconciler has tried all of them, or has needed long for that, and not until
/// it is ready: while the API server refuses one of them because of an admission webhook, only the
/// scheduler and the controller manager can bring the pod of that webhook back.
async fn after_objects(
    component: Component,
    ctx: &Context,
    mut tried: watch::Receiver<bool>,
    outdated: impl Future<Output = Error>,
) -> Result<(), Error> {
    if !*tried.borrow() {
        component.parts.wait(component.part, WAITS);
    }
    let tried = until(&mut tried, "the reconciler", |tried| tried.then_some(()));
    let Some(tried) = ctx.until_cancelled(tried).await else { return Ok(()) };
    tried?;
    component.run(ctx, outdated).await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::time::sleep;

    use super::*;
    use crate::parts::{PartState, Status};

    #[tokio::test(start_paused = true)]
    async fn a_program_waits_for_the_attempt_on_the_objects_and_for_no_success() {
        let (ctx, _handles) = Context::for_test();
        let status = watch::Sender::new(Status::default());
        let seen = status.subscribe();
        let parts = Parts::new(status, ctx.lines().clone());
        parts.expect(&Part::CONTROLLER);
        let part = Part::Scheduler;
        let check = Check::plain((Ipv4Addr::LOCALHOST, 1).into(), SCHEDULER_READY);
        let component = Component {
            part,
            program: "/nowhere/kube-scheduler".into(),
            args: Vec::new(),
            process: Process::KUBE,
            confinement: None,
            ready: check.clone(),
            first: None,
            live: check,
            parts: parts.clone(),
        };
        let (tries, tried) = watch::channel(false);
        let story = async {
            sleep(Duration::from_secs(60)).await;
            assert_eq!(parts.state(part), Some(PartState::Starting));
            assert_eq!(seen.borrow().fault(part), Some(format!("it is starting: {WAITS}")));
            parts.fail(Part::Reconciler, "cannot apply an object");
            tries.send_replace(true);
        };
        let program = after_objects(component, &ctx, tried, std::future::pending());
        let (ended, ()) = tokio::join!(program, story);
        // It was started: there is no such program.
        assert!(matches!(ended, Err(Error::Process { part: Part::Scheduler, .. })), "{ended:?}");
        assert!(matches!(parts.state(part), Some(PartState::Failed { .. })));
    }
}
