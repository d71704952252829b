//! The service of the workload stack: follows the roles of this node.
//!
//! ```text
//! [no role] --role--> [controller runs] --role taken away--> its parts end, the last first
//!      |
//!      +--role, and the image has no programs--> [unfit]: reported, nothing starts
//! ```

use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tracing::{info, warn};

use super::controller::Controller;
use super::mesh;
use super::parts::{Part, Parts, Status};
use super::site::Site;
use super::{access, ground};
use crate::{cluster, consensus, network};
use polis_base::files;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Child, Context, Policy};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};

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
    pub ground: Option<ground::Config>,
    /// The mesh of the machine; `None` where the parts are guests of another host.
    pub mesh: Option<mesh::Config>,
    /// Between two looks at the age of certificates.
    pub look: Duration,
}

impl Config {
    /// The workload stack of a running node.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            site: Site::live(root),
            ground: Some(ground::Config::live(root)),
            mesh: Some(mesh::Config::live(root)),
            look: LOOK,
        }
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// What is fixed.
    pub config: Config,
    /// This node, and whether it is a member.
    pub cluster: watch::Receiver<cluster::Status>,
    /// The roles that the cluster gives to it; `None` before it knows them.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The member of etcd beside it.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The address that API servers give each other.
    pub network: watch::Receiver<network::Status>,
    /// Every node; `None` before the first message of a leader.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// What the proxy for users of Polis serves with.
    pub identity: access::Identity,
    /// The published status.
    pub status: watch::Sender<Status>,
    /// The event values of the mesh.
    pub mesh: mesh::Outputs,
}

/// What the node is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// Programs that the image lacks.
    NotCarried,
    Controller(NodeId),
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
        let mut runs: Option<Child> = None;
        let mut said = Wanted::Nothing;
        if carries {
            self.start_mesh(&ctx, &parts);
        }
        ctx.healthy();
        loop {
            let roles = self.roles.borrow_and_update().unwrap_or_default();
            let wanted = wanted(&self.cluster.borrow_and_update(), &roles, carries);
            if wanted != said {
                if let Some(child) = runs.take() {
                    info!("the role was taken away");
                    child.stop().await;
                }
                match wanted {
                    Wanted::Nothing => parts.none(),
                    Wanted::NotCarried => {
                        warn!(NOT_CARRIED);
                        parts.unfit(NOT_CARRIED);
                    }
                    Wanted::Controller(node) => {
                        parts.expect(&Part::CONTROLLER);
                        runs = Some(self.start(&ctx, node, &parts));
                    }
                }
                said = wanted;
            }
            let changed = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.cluster.changed() => changed.map_err(|_closed| "the cluster"),
                    changed = self.roles.changed() => changed.map_err(|_closed| "the roles"),
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
            network: self.network.clone(),
            nodes: self.nodes.clone(),
            outputs: self.mesh.clone(),
            parts: parts.clone(),
        };
        ctx.spawn(Part::Mesh.name(), Policy::forever(), move |ctx| mesh.clone().run(ctx));
    }

    fn start(&self, ctx: &Context, node: NodeId, parts: &Parts) -> Child {
        let controller = Controller {
            site: self.config.site.clone(),
            ground: self.config.ground.clone(),
            node,
            look: self.config.look,
            consensus: self.consensus.clone(),
            network: self.network.clone(),
            identity: self.identity.clone(),
            parts: parts.clone(),
        };
        ctx.spawn("controller", Policy::forever(), move |ctx| controller.clone().run(ctx))
    }
}

/// What this node is to run.
fn wanted(cluster: &cluster::Status, roles: &v1::NodeRoles, carries: bool) -> Wanted {
    let has = |role| cluster.is_member() && Role::given(roles).any(|given| given == role);
    let controller = has(Role::KubernetesController);
    match (cluster.node, carries) {
        (_, false) if controller || has(Role::KubernetesWorker) => Wanted::NotCarried,
        (Some(node), true) if controller => Wanted::Controller(node),
        _ => Wanted::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: cluster::State) -> cluster::Status {
        let node = Some(NodeId::from_public_key(&[7; 32]));
        cluster::Status { node, state, ..cluster::Status::default() }
    }

    #[test]
    fn the_roles_of_a_member_decide_what_runs() {
        use cluster::State::{Disowning, Home, Split};
        let node = NodeId::from_public_key(&[7; 32]);
        let said =
            |roles: &[Role], state, carries| wanted(&status(state), &Role::record(roles), carries);
        let both = [Role::ConsensusMember, Role::KubernetesController];
        assert_eq!(said(&both, Home, true), Wanted::Controller(node));
        assert_eq!(said(&both, Split, true), Wanted::Controller(node));
        assert_eq!(said(&both, Disowning, true), Wanted::Nothing);
        assert_eq!(said(&both[..1], Home, true), Wanted::Nothing);
        for role in [Role::KubernetesController, Role::KubernetesWorker] {
            assert_eq!(said(&[role], Home, false), Wanted::NotCarried);
        }
        assert_eq!(said(&both[..1], Home, false), Wanted::Nothing);
    }

    #[tokio::test(start_paused = true)]
    async fn an_image_without_the_programs_is_reported_while_the_role_is_there() {
        let base = tempfile::tempdir().unwrap();
        let root = files::Root::at(base.path());
        let mut config = Config::live(&root);
        base.path().clone_into(&mut config.site.programs);
        let (_cluster, cluster) = watch::channel(status(cluster::State::Home));
        let (given, roles) = watch::channel(None);
        let (_consensus, consensus) = watch::channel(consensus::Status::default());
        let (_network, network) = watch::channel(network::Status::default());
        let (_nodes, nodes) = watch::channel(None);
        let (_credentials, credentials) = watch::channel(None);
        let (_access_list, access_list) = watch::channel(Arc::default());
        let identity = access::Identity { credentials, access_list };
        let status = watch::Sender::default();
        let mut seen = status.subscribe();
        let mesh = mesh::Outputs::default();
        let service =
            Service { config, cluster, roles, consensus, network, nodes, identity, status, mesh };
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
