//! The service of the workload stack: follows the roles of this node.
//!
//! ```text
//! [no role] --role--> [controller, worker or both run]
//!      |                       |
//!      |                       +--role taken away--> its parts end, the last first; the
//!      |                                             worker's before the controller's
//!      +--role, and the image has no programs--> [unfit]: reported, nothing starts
//! ```

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tracing::{info, warn};

use super::controller::Controller;
use super::drain::Drains;
use super::parts::{Part, Parts, Status};
use super::site::Site;
use super::worker::Worker;
use super::{access, host, mesh, runtime};
use polis_base::files;
use polis_control::{cluster, consensus};
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Child, Context, Policy};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};
use polis_wire::pod_network::Networks;
use polis_wire::rpc::client::Client;

/// Between two looks at the age of certificates, which is counted in days.
const LOOK: Duration = Duration::from_secs(60 * 60);

/// The report of a node whose image lacks the programs.
const NOT_CARRIED: &str = "the image of this node (variant base) does not carry Kubernetes: \
                           install one of the variant full, or take the role away";

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where everything is.
    pub site: Site,
    /// The machine to prepare for workloads; `None` where the parts are guests of another
    /// host.
    pub host: Option<host::Config>,
    /// The mesh of the machine; `None` where the parts are guests of another host.
    pub mesh: Option<mesh::Config>,
    /// The tree of the node.
    pub tree: files::Root,
    /// Between two looks at the age of certificates.
    pub look: Duration,
}

impl Config {
    /// The workload stack of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            site: Site::live(root),
            host: Some(host::Config::live(root)),
            mesh: Some(mesh::Config::live(root)),
            tree: root.clone(),
            look: LOOK,
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
    /// The member of etcd beside it.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The address that API servers give each other.
    pub network: watch::Receiver<network::Status>,
    /// Every node; `None` before the first message of a leader.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// containerd.
    pub containerd: watch::Receiver<runtime::Status>,
    /// The way to the leader.
    pub client: Client,
    /// The credentials of the proxy for users of Polis.
    pub identity: access::Identity,
    /// The published status.
    pub status: watch::Sender<Status>,
    /// Where this node is asked to move its pods away.
    pub drains: Drains,
    /// The event values of the mesh.
    pub mesh: mesh::Outputs,
}

/// The programs that the node is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// Programs that the image lacks.
    NotCarried,
    Roles(Roles),
}

/// The roles of Kubernetes of this node, of which it has at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Roles {
    node: NodeId,
    controller: bool,
    worker: bool,
    /// Those of a cluster never change. A node whose earlier version did not know them begins with
    /// the default ones, and begins again once a leader answers.
    networks: Networks,
}

impl Roles {
    /// The parts of these roles, in the order of start.
    fn parts(self) -> Vec<Part> {
        let controller = self.controller.then_some(Part::CONTROLLER);
        let worker = self.worker.then_some(Part::WORKER);
        controller.into_iter().flatten().chain(worker.into_iter().flatten()).collect()
    }
}

/// The services of the roles that run.
#[derive(Default)]
struct Running {
    controller: Option<Child>,
    worker: Option<Child>,
    /// The networks that they were started with.
    networks: Networks,
}

impl Running {
    /// Ends what is not wanted any more, or in other networks, the worker first: its parts use the
    /// controller's.
    async fn stop(&mut self, wanted: Wanted) {
        let networks = self.networks;
        let stays = |has: fn(&Roles) -> bool| matches!(&wanted, Wanted::Roles(roles) if has(roles) && roles.networks == networks);
        if !stays(|roles| roles.worker)
            && let Some(child) = self.worker.take()
        {
            info!("the role of a worker was removed, or the networks changed");
            child.stop().await;
        }
        if !stays(|roles| roles.controller)
            && let Some(child) = self.controller.take()
        {
            info!("the role of a controller was removed, or the networks changed");
            child.stop().await;
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
        let parts = Parts::new(self.status.clone(), ctx.lines().clone());
        let carries = self.config.site.carries_programs();
        let mut runs = Running::default();
        // Nothing is known of what a run before this one has published.
        let mut said = None;
        if carries {
            self.start_mesh(&ctx, &parts);
        }
        ctx.healthy();
        loop {
            let roles = self.roles.borrow_and_update().unwrap_or_default();
            // After the roles, before which they are written.
            let networks = *self.networks.borrow_and_update();
            let wanted = wanted(&self.cluster.borrow_and_update(), &roles, networks, carries);
            if said != Some(wanted) {
                runs.stop(wanted).await;
                match wanted {
                    Wanted::Nothing => parts.none(),
                    Wanted::NotCarried => {
                        warn!(NOT_CARRIED);
                        parts.unfit(NOT_CARRIED);
                    }
                    Wanted::Roles(roles) => {
                        if roles.networks != runs.networks {
                            // Every part has ended, and starts anew.
                            parts.expect(&[]);
                        }
                        parts.expect(&roles.parts());
                        self.start(&ctx, &mut runs, roles, &parts);
                    }
                }
                said = Some(wanted);
            }
            let changed = async {
                tokio::select! {
                    // Cancel-safe, all: they wait for event values.
                    changed = self.cluster.changed() => changed.map_err(|_closed| "the cluster"),
                    changed = self.roles.changed() => changed.map_err(|_closed| "the roles"),
                    changed = self.networks.changed() => changed.map_err(|_closed| "the networks"),
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed.map_err(Closed)?,
                None => return Ok(()),
            }
        }
    }

    /// Starts the mesh, which follows the roles by itself: it goes on while one role of
    /// Kubernetes takes the place of another.
    fn start_mesh(&self, ctx: &Context, parts: &Parts) {
        let Some(config) = self.config.mesh.clone() else { return };
        let mesh = mesh::Service {
            config,
            cluster: self.cluster.clone(),
            roles: self.roles.clone(),
            networks: self.networks.clone(),
            network: self.network.clone(),
            nodes: self.nodes.clone(),
            containerd: self.containerd.clone(),
            outputs: self.mesh.clone(),
            parts: parts.clone(),
        };
        ctx.spawn(Part::Mesh.name(), Policy::forever(), move |ctx| mesh.clone().run(ctx));
    }

    /// Starts what is wanted and does not run.
    fn start(&self, ctx: &Context, runs: &mut Running, roles: Roles, parts: &Parts) {
        let forever = Policy::forever();
        runs.networks = roles.networks;
        if roles.controller && runs.controller.is_none() {
            let controller = self.controller(roles, parts);
            let run = move |ctx| controller.clone().run(ctx);
            runs.controller = Some(ctx.spawn("controller", forever, run));
        }
        if roles.worker && runs.worker.is_none() {
            let worker = self.worker(roles, parts);
            runs.worker = Some(ctx.spawn("worker", forever, move |ctx| worker.clone().run(ctx)));
        }
    }

    /// The site in the networks of the cluster.
    fn site(&self, networks: Networks) -> Site {
        Site { networks, ..self.config.site.clone() }
    }

    fn controller(&self, roles: Roles, parts: &Parts) -> Controller {
        Controller {
            site: self.site(roles.networks),
            host: self.config.host.clone(),
            node: roles.node,
            look: self.config.look,
            consensus: self.consensus.clone(),
            network: self.network.clone(),
            nodes: self.nodes.clone(),
            identity: self.identity.clone(),
            parts: parts.clone(),
        }
    }

    fn worker(&self, roles: Roles, parts: &Parts) -> Worker {
        Worker {
            credentials: self.identity.credentials.clone(),
            site: self.site(roles.networks),
            tree: self.config.tree.clone(),
            node: roles.node,
            look: self.config.look,
            client: self.client.clone(),
            nodes: self.nodes.clone(),
            network: self.network.clone(),
            prefix: self.mesh.prefix.subscribe(),
            last: self.mesh.last.subscribe(),
            containerd: self.containerd.clone(),
            drains: self.drains.clone(),
            parts: parts.clone(),
        }
    }
}

/// The programs that this node is to run.
fn wanted(
    cluster: &cluster::Status,
    roles: &v1::NodeRoles,
    networks: Networks,
    carries: bool,
) -> Wanted {
    let has = |role| cluster.is_member() && Role::given(roles).any(|given| given == role);
    let (controller, worker) = (has(Role::KubernetesController), has(Role::KubernetesWorker));
    match (cluster.node, carries) {
        _ if !controller && !worker => Wanted::Nothing,
        (_, false) => Wanted::NotCarried,
        (Some(node), true) => Wanted::Roles(Roles { node, controller, worker, networks }),
        (None, true) => Wanted::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use polis_wire::rpc;
    use polis_wire::rpc::client::Timeouts;

    use super::*;

    fn status(state: cluster::State) -> cluster::Status {
        let node = Some(NodeId::from_public_key(&[7; 32]));
        cluster::Status { node, state, ..cluster::Status::default() }
    }

    #[test]
    fn the_roles_of_a_member_decide_what_runs() {
        use cluster::State::{Disowning, Home, Split};
        let node = NodeId::from_public_key(&[7; 32]);
        let networks = Networks::default();
        let said = |roles: &[Role], state, carries| {
            wanted(&status(state), &Role::record(roles), networks, carries)
        };
        let both = [Role::ConsensusMember, Role::KubernetesController];
        let controller = Wanted::Roles(Roles { node, controller: true, worker: false, networks });
        assert_eq!(said(&both, Home, true), controller);
        assert_eq!(said(&both, Split, true), controller);
        let worker = Wanted::Roles(Roles { node, controller: false, worker: true, networks });
        assert_eq!(said(&[Role::KubernetesWorker], Home, true), worker);
        let Wanted::Roles(all) = said(&Role::ALL, Home, true) else { panic!() };
        assert_eq!(all.parts().len(), Part::CONTROLLER.len() + Part::WORKER.len());
        assert_eq!(said(&both, Disowning, true), Wanted::Nothing);
        assert_eq!(said(&both[..1], Home, true), Wanted::Nothing);
        for role in [Role::KubernetesController, Role::KubernetesWorker] {
            assert_eq!(said(&[role], Home, false), Wanted::NotCarried);
        }
        assert_eq!(said(&both[..1], Home, false), Wanted::Nothing);
    }

    #[tokio::test]
    async fn what_runs_ends_in_other_networks_and_stays_in_the_same() {
        let (ctx, _handles) = Context::for_test();
        let child = |name| {
            ctx.spawn(name, Policy::forever(), |ctx| async move {
                ctx.cancelled().await;
                Ok::<_, std::convert::Infallible>(())
            })
        };
        let networks = Networks::default();
        let (controller, worker) = (Some(child("controller")), Some(child("worker")));
        let mut runs = Running { controller, worker, networks };
        let node = NodeId::from_public_key(&[7; 32]);
        let roles = Roles { node, controller: true, worker: true, networks };
        runs.stop(Wanted::Roles(roles)).await;
        assert!(runs.controller.is_some() && runs.worker.is_some());
        let other = Networks { services: "172.24.0.0/16".parse().unwrap(), ..networks };
        runs.stop(Wanted::Roles(Roles { networks: other, ..roles })).await;
        assert!(runs.controller.is_none() && runs.worker.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_without_the_programs_is_reported_while_the_role_is_there() {
        let base = tempfile::tempdir().unwrap();
        let root = files::Root::at(base.path());
        let mut config = Config::live(&root);
        base.path().clone_into(&mut config.site.programs);
        let (_cluster, cluster) = watch::channel(status(cluster::State::Home));
        let (given, roles) = watch::channel(None);
        let (_networks, networks) = watch::channel(Networks::default());
        let (_consensus, consensus) = watch::channel(consensus::Status::default());
        let (_network, network) = watch::channel(network::Status::default());
        let (_candidates, candidates) = watch::channel(Vec::new());
        let (_credentials, credentials) = watch::channel(None);
        let (_nodes, nodes) = watch::channel(None);
        let (_containerd, containerd) = watch::channel(runtime::Status::default());
        let (_access_list, access_list) = watch::channel(Arc::default());
        let status = watch::Sender::default();
        let mut seen = status.subscribe();
        let service = Service {
            config,
            cluster,
            roles,
            networks,
            consensus,
            network,
            nodes,
            containerd,
            client: Client::new(candidates, credentials.clone(), Timeouts::default()),
            identity: access::Identity {
                credentials,
                access_list,
                metrics: Arc::new(rpc::Metrics::new(&rpc::Table::users())),
            },
            status,
            drains: Drains::default(),
            mesh: mesh::Outputs::default(),
        };
        let (ctx, mut handles) = Context::for_test();
        let story = async {
            given.send_replace(Some(Role::record(&[Role::KubernetesWorker])));
            seen.wait_for(|status: &Status| status.unfit.is_some()).await.unwrap();
            given.send_replace(Some(v1::NodeRoles::default()));
            seen.wait_for(|status| status.unfit.is_none()).await.unwrap();
            handles.cancel().await;
            handles.take_lines()
        };
        let (ended, lines) = tokio::join!(service.run(ctx), story);
        assert_eq!(ended, Ok(()));
        let [first, second] = lines.as_slice() else { panic!("{lines:?}") };
        let failed = "POLIS workload part=all state=failed cause=\"the image";
        assert!(first.starts_with(failed), "{first}");
        assert!(second.starts_with("POLIS workload part=all state=stopped"), "{second}");
    }
}
