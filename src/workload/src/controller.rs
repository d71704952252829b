//! The role Kubernetes controller on this node: starts its parts, in the order in which they
//! wait for each other.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{debug, info};

use super::api::{self, Api, MERGE_PATCH, Session};
use super::certificates::{Trusted, until_an_authority_ends, until_another_key_signs};
use super::component::{Check, Component, Error, Process};
use super::credentials::Purpose;
use super::parts::{Part, Parts};
use super::site::Site;
use super::{access, args, audit, certificates, confinement, host, reconciler, tokens};
use polis_base::cause;
use polis_control::consensus;
use polis_machine::network;
use polis_runtime::event::{Closed, until};
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

/// The leases by which one controller manager leads, and one scheduler, of those of all
/// controllers.
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";

/// How long it may take to give a lease up before a program starts. The lease ends by itself after
/// a minute.
const START_MAX: Duration = Duration::from_secs(1);

/// The same after the program has ended: a run has to end within the supervisor's ten seconds, and
/// the process may take nine of them.
const END_MAX: Duration = Duration::from_millis(500);

/// Why the programs that need the cluster's own objects do not start yet.
const WAITS: &str = "it waits until the reconciler has tried to apply the cluster's own objects";

/// Configuration and inputs of the parts. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Controller {
    pub(super) site: Site,
    /// The machine to prepare first; `None` where the parts are guests of another host.
    pub(super) host: Option<host::Config>,
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
    /// [`host::Error`] when the machine cannot be prepared.
    pub(super) async fn run(self, ctx: Context) -> Result<(), host::Error> {
        if let Some(host) = self.host.clone() {
            // First of all, so that an API server that starts takes no processor time from
            // etcd and this process.
            let prepared = blocking(move || host::prepare(&host, &[Role::KubernetesController]));
            if let Err(error) = prepared.await {
                self.parts.fail(Part::ApiServer, cause::line(&error));
                return Err(error);
            }
        }
        let forever = Policy::forever();
        let (trusted, known) = watch::channel(None);
        let (signs, signing) = watch::channel(None);
        let (serves, named) = watch::channel(None);
        let certificates = certificates::Service {
            site: self.site.clone(),
            node: self.node,
            consensus: self.consensus.clone(),
            look: self.look,
            credentials: self.identity.credentials.clone(),
            trusted,
            signs,
            serves,
            parts: self.parts.clone(),
        };
        ctx.spawn(Part::Certificates.name(), forever, move |ctx| certificates.clone().run(ctx));
        let tokens = tokens::Service {
            sockets: self.site.run.tokens.clone(),
            consensus: self.consensus.clone(),
            parts: self.parts.clone(),
        };
        ctx.spawn("tokens", forever, move |ctx| tokens.clone().run(ctx));
        // Before the API server, so that it ends after it and copies its last lines.
        let audit = audit::Service { data: self.site.data.clone() };
        ctx.spawn("audit", forever, move |ctx| audit.clone().run(ctx));
        let api_server = self.clone();
        ctx.spawn(Part::ApiServer.name(), forever, move |ctx| {
            let controller = api_server.clone();
            async move { Box::pin(controller.api_server(&ctx)).await }
        });
        let (tries, tried) = watch::channel(false);
        let reconciler = reconciler::Service {
            api: Session::new(&self.master()),
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
            named,
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
        let lease = self.lease("kube-controller-manager");
        ctx.spawn(Part::ControllerManager.name(), forever, move |ctx| {
            let (component, part, lease) =
                (manager.clone(), Part::ControllerManager, lease.clone());
            let (known, signing, objects) = (known.clone(), signing.clone(), objects.clone());
            let outdated = async move {
                tokio::select! {
                    // Cancel-safe, both: they wait.
                    ended = until_an_authority_ends(part, known) => ended,
                    other = until_another_key_signs(part, signing) => other,
                }
            };
            async move { after_objects(component, lease, &ctx, objects, outdated).await }
        });
        let (scheduler, objects) = (self.scheduler(), tried.clone());
        let lease = self.lease("kube-scheduler");
        ctx.spawn(Part::Scheduler.name(), forever, move |ctx| {
            let (component, lease, objects) = (scheduler.clone(), lease.clone(), objects.clone());
            let outdated = std::future::pending();
            async move { after_objects(component, lease, &ctx, objects, outdated).await }
        });
    }

    fn lease(&self, name: &'static str) -> Lease {
        let (api, node) = (self.master(), self.node);
        Lease { api, node, name, start_max: START_MAX, end_max: END_MAX }
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
    lease: Lease,
    ctx: &Context,
    mut tried: watch::Receiver<bool>,
    outdated: impl Future<Output = Error>,
) -> Result<(), Error> {
    if !*tried.borrow() {
        component.parts.wait(component.part, WAITS);
    }
    let inputs = async {
        until(&mut tried, "the reconciler", |tried| tried.then_some(())).await?;
        // The machine may have lost its power while the program led.
        lease.give_up(lease.start_max).await;
        Ok::<_, Closed>(())
    };
    let Some(inputs) = ctx.until_cancelled(inputs).await else { return Ok(()) };
    inputs?;
    let ended = component.run(ctx, outdated).await;
    // The process has ended, and that of another controller may lead.
    lease.give_up(lease.end_max).await;
    ended
}

/// The lease of a program that runs on every controller and leads on one.
#[derive(Clone, Debug)]
struct Lease {
    /// The API server, asked by a caller who may do everything.
    api: Api,
    node: NodeId,
    name: &'static str,
    /// How long it may take to give it up, before a start and after an end.
    start_max: Duration,
    end_max: Duration,
}

impl Lease {
    /// Gives the lease up, if a process of this node held it last. That process has ended, and the
    /// next one has another name: it would wait for a minute, and the Services would have the
    /// addresses that pods had before the boot until then.
    async fn give_up(&self, within: Duration) {
        match timeout(within, Box::pin(self.change())).await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => info!(lease = self.name, "given up for a process that has ended"),
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                debug!(error, lease = self.name, "cannot give up the lease");
            }
            Err(_elapsed) => debug!(lease = self.name, "no answer about the lease"),
        }
    }

    /// Returns whether it was given up.
    async fn change(&self) -> Result<bool, api::Error> {
        let (session, path) = (Session::new(&self.api), format!("{LEASES}/{}", self.name));
        let Some(lease) = session.read(&path).await? else { return Ok(false) };
        let Some(change) = given_up(&lease, self.node) else { return Ok(false) };
        let answer = session.send(Method::PATCH, &path, MERGE_PATCH, &change).await?;
        match answer.status {
            // Another process has taken it meanwhile.
            409 => Ok(false),
            _ => self.api.succeeded(&answer).map(|()| true),
        }
    }
}

/// The change that gives up a lease that a process of this node holds: both programs call
/// themselves by the name of the host and a random part. `None` for another holder.
fn given_up(lease: &Value, node: NodeId) -> Option<Value> {
    let (host, _random) = lease["spec"]["holderIdentity"].as_str()?.split_once('_')?;
    let metadata = &lease["metadata"];
    (host == node.to_string()).then(|| {
        json!({
            "metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
            "spec": {"holderIdentity": ""},
        })
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;
    use std::future::{pending, ready};
    use std::net::Ipv4Addr;

    use http::{Request, Response};
    use hyper::body::Incoming;
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use polis_runtime::supervisor::STOP_DEADLINE;
    use tokio::net::TcpListener;
    use tokio::time::sleep;

    use super::*;
    use crate::component::STOP_MAX;
    use crate::parts::{PartState, Status};

    /// A part without a program.
    fn absent(parts: &Parts) -> Component {
        let check = Check::plain((Ipv4Addr::LOCALHOST, 1).into(), SCHEDULER_READY);
        Component {
            part: Part::Scheduler,
            program: "/nowhere/kube-scheduler".into(),
            args: Vec::new(),
            process: Process::KUBE,
            confinement: None,
            ready: check.clone(),
            first: None,
            live: check,
            parts: parts.clone(),
        }
    }

    #[test]
    fn a_lease_of_a_process_of_this_node_is_given_up_and_no_other_one() {
        let [own, other] = [7, 8].map(|key| NodeId::from_public_key(&[key; 32]));
        let lease = |holder: Value| {
            json!({
                "metadata": {"name": "kube-scheduler", "uid": "u", "resourceVersion": "7"},
                "spec": {"holderIdentity": holder, "leaseDurationSeconds": 60},
            })
        };
        let held =
            |node: NodeId| lease(json!(format!("{node}_0f3a51c2-7b1d-4c55-9a0e-2f6d1b8e4a77")));
        // The holder may have changed since.
        let change = json!({
            "metadata": {"uid": "u", "resourceVersion": "7"},
            "spec": {"holderIdentity": ""},
        });
        assert_eq!(given_up(&held(own), own), Some(change));
        for lease in [held(other), lease(json!("")), lease(Value::Null), lease(json!("host_1"))] {
            assert_eq!(given_up(&lease, own), None, "{lease}");
        }
    }

    #[tokio::test]
    async fn a_lease_is_given_up_before_a_program_starts_and_after_its_end() {
        let (ctx, _handles) = Context::for_test();
        let parts = Parts::new(watch::Sender::default(), ctx.lines().clone());
        let base = tempfile::tempdir().unwrap();
        let (site, acceptor) = api::tests::trusted(base.path()).await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let api = Api { address, ca: site.run.ca.clone(), client: None };
        let node = NodeId::from_public_key(&[7; 32]);
        // A busy machine may be slow.
        let patience = Duration::from_secs(60);
        let name = "kube-scheduler";
        let lease = Lease { api, node, name, start_max: patience, end_max: patience };
        let requests = RefCell::new(Vec::new());
        let answer = |request: Request<Incoming>| {
            requests.borrow_mut().push(format!("{} {}", request.method(), request.uri().path()));
            let held = json!({"spec": {"holderIdentity": format!("{node}_0f3a51c2")}});
            ready(Ok::<_, Infallible>(Response::new(held.to_string())))
        };
        let serve = async {
            while let Ok((tcp, _from)) = listener.accept().await {
                let tls = TokioIo::new(acceptor.accept(tcp).await.unwrap());
                let _lost = http1::Builder::new().serve_connection(tls, service_fn(answer)).await;
            }
        };
        let (_tries, tried) = watch::channel(true);
        let ended = tokio::select! {
            () = serve => panic!("the server goes on"),
            ended = after_objects(absent(&parts), lease, &ctx, tried, pending()) => ended,
        };
        assert!(matches!(ended, Err(Error::Process { .. })), "{ended:?}");
        let each = ["GET", "PATCH"].map(|method| format!("{method} {LEASES}/{name}"));
        assert_eq!(requests.take(), [each.clone(), each].concat());
    }

    #[test]
    fn a_run_whose_process_is_killed_and_whose_lease_has_no_answer_ends_in_time() {
        // The last lines of a process that was killed may take a second.
        assert!(STOP_MAX + Duration::from_secs(1) + END_MAX < STOP_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_waits_for_the_attempt_on_the_objects_and_for_no_success() {
        let (ctx, _handles) = Context::for_test();
        let status = watch::Sender::new(Status::default());
        let seen = status.subscribe();
        let parts = Parts::new(status, ctx.lines().clone());
        parts.expect(&Part::CONTROLLER);
        let part = Part::Scheduler;
        let base = tempfile::tempdir().unwrap();
        let ca = polis_base::files::Root::at(base.path()).ephemeral.kubernetes.ca;
        // Nothing listens there.
        let api = Api { address: (Ipv4Addr::LOCALHOST, 1).into(), ca, client: None };
        let node = NodeId::from_public_key(&[7; 32]);
        let name = "kube-scheduler";
        let lease = Lease { api, node, name, start_max: START_MAX, end_max: END_MAX };
        let (tries, tried) = watch::channel(false);
        let story = async {
            sleep(Duration::from_secs(60)).await;
            assert_eq!(parts.state(part), Some(PartState::Starting));
            assert_eq!(seen.borrow().fault(part), Some(format!("it is starting: {WAITS}")));
            parts.fail(Part::Reconciler, "cannot apply an object");
            tries.send_replace(true);
        };
        let program = after_objects(absent(&parts), lease, &ctx, tried, pending());
        let (ended, ()) = tokio::join!(program, story);
        // It was started: there is no such program.
        assert!(matches!(ended, Err(Error::Process { part: Part::Scheduler, .. })), "{ended:?}");
        assert!(matches!(parts.state(part), Some(PartState::Failed { .. })));
    }
}
