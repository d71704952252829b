//! The root service: builds every service of the node and hands event values over.
//!
//! Only this file knows them all: [`Values`] has what they share, one constructor a group makes
//! the services of it, and [`run`] starts them. Only the stop is ordered here by hand: the last
//! service started is the first stopped. Each service waits for the event values that it needs,
//! so every service starts as early as it can.
//!
//! ```text
//! parameters --> network --> names          storage
//!      |            |          ^   \       ^   |
//!      |            v          |    \wanted|   | mounted
//!      +-------> cluster --identity--> ----+   |
//!                   | \--orders--> consensus <-+
//!                   v                  v
//!              credentials --> curator <---> agent
//!                   |            |          management
//!                   +--> roles <-+ ----> ready            console watches all
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polis_proto::v1;
use polis_tui::Snapshot;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::daemon::{heartbeat, logs, memory};
use crate::roles;
use crate::{agent, console, firewall, forwarding, maintenance, management, shipping};
use polis_base::environment::Environment;
use polis_base::sys::efivar;
use polis_base::sys::reboot::Reason;
use polis_base::{extra, files, recovery};
use polis_control::{cluster, consensus, curator};
use polis_machine::network::{self, names};
use polis_machine::{install, mirror, parameters, storage, time, update, volumes};
use polis_runtime::logtree::{kernel, ring};
use polis_runtime::supervisor::{Context, Policy};
use polis_wire::endpoint::MANAGEMENT_PORT;
use polis_wire::identity::Identity;
use polis_wire::node_roles::Nodes;
use polis_wire::rpc;
use polis_wire::rpc::client::{Candidate, Client, Patience};
use polis_workload as workload;
use polis_workload::runtime;

/// The needs of the root service.
#[derive(Clone, Debug)]
pub struct Root {
    /// The facts from `init`.
    pub environment: Environment,
    /// The recovery key of the disk, if somebody gave it to this machine.
    pub recovery: recovery::Given,
    /// Becomes true when the node is ready.
    pub ready: watch::Sender<bool>,
    /// Changes as long as the runtime runs.
    pub beats: watch::Sender<u64>,
    /// The terminals that carry the console: `init` shows a failure there.
    pub terminals: watch::Sender<Vec<String>>,
    /// The requests to end the machine, in order. The requester logs the request and its
    /// user.
    pub end: watch::Sender<Option<Reason>>,
    /// The requests of somebody at the machine: a worker is drained first, and another request
    /// ends the machine at once.
    pub leave: watch::Sender<Option<Reason>>,
    /// Where this node is drained.
    pub drains: workload::drain::Drains,
    /// The parts of Kubernetes on this node.
    pub workload: watch::Sender<workload::Status>,
    /// What `init` shows of a machine in maintenance.
    pub maintenance: watch::Sender<maintenance::Shown>,
}

/// Starts every service, then waits: those of a node, or those of a machine in maintenance.
///
/// # Errors
///
/// Of maintenance alone; a node ends only by a child's death.
pub async fn run(root: Root, ctx: Context) -> Result<(), maintenance::Error> {
    if let Some(report) = &root.environment.maintenance {
        let Root { environment, end, maintenance, .. } = &root;
        let (end, shown) = (end.clone(), maintenance.clone());
        let firewall = firewall_config();
        return maintenance::Service::live(environment, report, firewall, end, shown)
            .run(ctx)
            .await;
    }
    Box::pin(serve(root, &ctx)).await;
    Ok(())
}

/// Runs the services of a node.
async fn serve(root: Root, ctx: &Context) {
    let values = Values::new(&root);
    let base = Base::new(&values, &root, ctx);
    let membership = Membership::new(&values, &root);
    let control = Control::new(&values, &root);
    let faces = Faces::new(&values, &root);
    let Root { ready, beats, .. } = root;

    // A service that fails for want of something outside may find it later: only the
    // service itself knows that it never will, and then opens the trapdoor.
    let forever = Policy::forever();
    ctx.spawn("heartbeat", forever, move |ctx| {
        heartbeat::Service { beats: beats.clone() }.run(ctx)
    });
    ctx.spawn("kernel", forever, move |ctx| base.kernel.clone().run(ctx));
    // Started early, so that it stops late, and shows the stop.
    if !console::is_off() {
        ctx.spawn("console", forever, move |ctx| faces.console.clone().run(ctx));
    }
    // Before storage, which uses its device until it stops.
    ctx.spawn("mirror", forever, move |ctx| base.mirror.clone().run(ctx));
    ctx.spawn("storage", forever, move |ctx| base.storage.clone().run(ctx));
    ctx.spawn("volumes", forever, move |ctx| base.volumes.clone().run(ctx));
    ctx.spawn("logs", forever, move |ctx| base.logs.clone().run(ctx));
    ctx.spawn("update", forever, move |ctx| base.update.clone().run(ctx));
    ctx.spawn("network", forever, move |ctx| base.network.clone().run(ctx));
    ctx.spawn("names", forever, move |ctx| base.names.clone().run(ctx));
    ctx.spawn("time", forever, move |ctx| base.time.clone().run(ctx));
    ctx.spawn("firewall", forever, move |ctx| base.firewall.clone().run(ctx));
    ctx.spawn("forwarding", forever, move |ctx| base.forwarding.clone().run(ctx));
    ctx.spawn("parameters", forever, move |ctx| base.parameters.clone().run(ctx));
    ctx.spawn("consensus", forever, move |ctx| membership.consensus.clone().run(ctx));
    ctx.spawn("cluster", forever, move |ctx| membership.cluster.clone().run(ctx));
    ctx.spawn("credentials", forever, move |ctx| membership.credentials.clone().run(ctx));
    ctx.spawn("curator", forever, move |ctx| control.curator.clone().run(ctx));
    ctx.spawn("shipping", forever, move |ctx| control.shipping.clone().run(ctx));
    ctx.spawn("roles", forever, move |ctx| control.roles.clone().run(ctx));
    ctx.spawn("health", forever, move |ctx| control.health.clone().run(ctx));
    ctx.spawn("peers", forever, move |ctx| membership.peers.clone().run(ctx));
    ctx.spawn("discovery", forever, move |ctx| membership.discovery.clone().run(ctx));
    ctx.spawn("enlist", forever, move |ctx| membership.enlist.clone().run(ctx));
    ctx.spawn("agent", forever, move |ctx| control.agent.clone().run(ctx));
    ctx.spawn("runtime", forever, move |ctx| control.containerd.clone().run(ctx));
    ctx.spawn("workload", forever, move |ctx| control.workload.clone().run(ctx));
    ctx.spawn("nodes", forever, move |ctx| faces.nodes.clone().run(ctx));
    ctx.spawn("management", forever, move |ctx| faces.management.clone().run(ctx));
    let workload = values.workload.subscribe();
    let memory = memory::Service { ready: ready.subscribe(), workload };
    ctx.spawn("memory", forever, move |ctx| memory.clone().run(ctx));
    // Last, so that it stops first.
    #[cfg(feature = "fault-injection")]
    crate::injection::start(
        ctx,
        &ready,
        &values.member.status(),
        &root.recovery,
        &values.pods.subscribe(),
    );
    ctx.healthy();
    ctx.cancelled().await;
}

/// Every event value of the node, and the handles that several services share.
///
/// The owner of a value gets the sender; `docs/event-values.md` names the owners.
struct Values {
    tree: files::Root,
    known: watch::Sender<parameters::Known>,
    /// Whether they are asked of a metadata service.
    asks: watch::Sender<parameters::Asking>,
    network: watch::Sender<network::Status>,
    /// The network that the cluster orders.
    network_order: watch::Sender<Option<network::Order>>,
    /// When another machine last opened a connection to the curator of this node.
    reached: watch::Sender<Option<Instant>>,
    /// Since when the node is known to reach the cluster over its network.
    proof: watch::Sender<Option<Instant>>,
    storage: watch::Sender<storage::Status>,
    health: watch::Sender<storage::Health>,
    /// On what the data partition lies.
    ground: watch::Sender<Option<storage::Ground>>,
    /// The mirror of the disk.
    mirror: watch::Sender<mirror::Status>,
    /// The volumes of further disks.
    volumes: watch::Sender<volumes::Status>,
    ring: watch::Sender<ring::Status>,
    wanted: watch::Sender<Option<storage::Wanted>>,
    orders: watch::Sender<Option<consensus::Orders>>,
    identity: watch::Sender<Option<Identity>>,
    peers: watch::Sender<names::Peers>,
    found: watch::Sender<names::Peers>,
    cluster: cluster::Writer,
    unlock_requests: watch::Sender<cluster::unlock::request::Open>,
    announcements: watch::Sender<cluster::unlock::firmware::Open>,
    /// Until when the removal of this node is to wipe its disk, too.
    reset: watch::Sender<Option<Instant>>,
    update: watch::Sender<update::Status>,
    /// The update of the cluster, as the curator of this node knows it.
    cluster_update: watch::Sender<Option<v1::GetUpdateResponse>>,
    /// Where another system is taken: by an operator, or in an update of the cluster.
    door: update::Door,
    bundles: update::Store,
    credentials: watch::Sender<Option<rpc::Credentials>>,
    access_list: watch::Sender<Arc<rpc::AccessList>>,
    curator: watch::Sender<curator::Status>,
    containerd: watch::Sender<runtime::Status>,
    pods: watch::Sender<Option<runtime::Pods>>,
    /// The roles that the cluster gives to this node.
    given: watch::Sender<Option<v1::NodeRoles>>,
    /// The time servers of the cluster.
    time_servers: watch::Sender<Vec<parameters::NtpServer>>,
    /// Where the log goes.
    log_targets: watch::Sender<Option<forwarding::Order>>,
    forwarding: watch::Sender<forwarding::Status>,
    /// Which snapshot of etcd its target has, while this node leads.
    shipping: watch::Sender<shipping::Status>,
    /// The curator's copy of the records.
    directory: watch::Sender<curator::Directory>,
    /// The firewall that the cluster orders.
    order: watch::Sender<Option<firewall::Order>>,
    firewall: watch::Sender<firewall::Status>,
    time: watch::Sender<time::Status>,
    ahead: watch::Sender<time::Ahead>,
    workload: watch::Sender<workload::Status>,
    drains: workload::drain::Drains,
    calls: management::Calls,
    tpm: management::Tpm,
    cluster_health: watch::Sender<update::ClusterHealth>,
    /// The workloads, for a system on trial and for an update that is installed.
    workload_health: watch::Sender<update::workload::Workload>,
    mesh: workload::mesh::Outputs,
    candidates: watch::Sender<Vec<Candidate>>,
    report: watch::Sender<v1::NodeStatus>,
    nodes: watch::Sender<Option<Arc<Nodes>>>,
    cluster_nodes: watch::Sender<console::ClusterNodes>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    /// The keeper of etcd, which hands out its status and clients.
    member: consensus::Service,
    /// The way to the leader.
    client: Client,
    /// The permissions of callers.
    table: Arc<rpc::Table>,
    /// The counters of the curator, which management shows.
    metrics: Arc<rpc::Metrics>,
    /// The same of the access proxy to Kubernetes.
    access_metrics: Arc<rpc::Metrics>,
}

impl Values {
    fn new(root: &Root) -> Self {
        let tree = files::Root::live();
        // With an unreadable table, every caller is rejected.
        let table = Arc::new(rpc::Table::polis().unwrap_or_else(|unreadable| {
            tracing::error!(error = &unreadable as &dyn std::error::Error, "nothing is served");
            rpc::Table::default()
        }));
        let (update, workload_health) = (watch::Sender::default(), watch::Sender::default());
        let machine = update::Config::live(&root.environment, &tree);
        let orders = watch::Sender::new(None);
        let candidates = watch::Sender::default();
        let credentials = watch::Sender::new(None);
        let access_list = watch::Sender::new(Arc::<rpc::AccessList>::default());
        Self {
            known: watch::Sender::new(None),
            asks: watch::Sender::default(),
            network: watch::Sender::default(),
            network_order: watch::Sender::default(),
            reached: watch::Sender::default(),
            cluster_update: watch::Sender::default(),
            proof: watch::Sender::default(),
            storage: watch::Sender::new(storage::Status::Starting),
            health: watch::Sender::default(),
            ground: watch::Sender::default(),
            mirror: watch::Sender::default(),
            volumes: watch::Sender::default(),
            ring: watch::Sender::default(),
            wanted: watch::Sender::new(None),
            identity: watch::Sender::new(None),
            peers: watch::Sender::default(),
            found: watch::Sender::default(),
            cluster: cluster::Writer::default(),
            unlock_requests: watch::Sender::default(),
            announcements: watch::Sender::default(),
            reset: watch::Sender::default(),
            door: update::Door::new(machine, workload_health.subscribe(), update.clone()),
            bundles: update::Store::new(tree.data.update.clone()),
            update,
            curator: watch::Sender::default(),
            containerd: watch::Sender::default(),
            pods: watch::Sender::default(),
            given: watch::Sender::default(),
            time_servers: watch::Sender::default(),
            log_targets: watch::Sender::default(),
            forwarding: watch::Sender::default(),
            shipping: watch::Sender::default(),
            directory: watch::Sender::default(),
            order: watch::Sender::default(),
            firewall: watch::Sender::default(),
            // Before any service could see a date from before the image.
            time: watch::Sender::new(time::raise(Path::new("/etc/os-release"))),
            ahead: watch::Sender::default(),
            workload: root.workload.clone(),
            drains: root.drains.clone(),
            calls: management::Calls::new(tree.data.node.calls.clone()),
            tpm: management::Tpm::new(PathBuf::from("/dev")),
            cluster_health: watch::Sender::new(roles::health::unknown()),
            workload_health,
            mesh: workload::mesh::Outputs::default(),
            report: watch::Sender::default(),
            nodes: watch::Sender::default(),
            cluster_nodes: watch::Sender::default(),
            snapshot: watch::Sender::default(),
            member: consensus::Service::new(consensus::Config::live(&tree), orders.subscribe()),
            client: Client::new(
                candidates.subscribe(),
                credentials.subscribe(),
                Patience::default(),
            )
            .wary(access_list.subscribe()),
            metrics: Arc::new(rpc::Metrics::new(&table)),
            access_metrics: Arc::new(rpc::Metrics::new(&rpc::Table::users())),
            tree,
            orders,
            candidates,
            credentials,
            access_list,
            table,
        }
    }
}

/// The services without a cluster: the machine, its disk, its network, its parameters.
struct Base {
    kernel: kernel::Service,
    mirror: mirror::Service,
    storage: storage::Service,
    volumes: volumes::Service,
    logs: logs::Service,
    update: update::Service,
    parameters: parameters::Service,
    network: network::Service,
    names: names::Service,
    firewall: firewall::Service,
    forwarding: forwarding::Service,
    time: time::Service,
}

impl Base {
    fn new(values: &Values, root: &Root, ctx: &Context) -> Self {
        let tree = &values.tree;
        Self {
            kernel: kernel::Service { tree: ctx.logs().clone() },
            mirror: mirror::Service {
                config: mirror::Config::live(&root.environment, tree),
                known: values.known.subscribe(),
                wanted: values.wanted.subscribe(),
                storage: values.storage.subscribe(),
                ready: root.ready.subscribe(),
                end: root.end.clone(),
                ground: values.ground.clone(),
                status: values.mirror.clone(),
            },
            storage: storage::Service {
                config: storage::Config {
                    disk: root.environment.disk.clone(),
                    root: tree.clone(),
                    mount_options: storage::machine::MOUNT_OPTIONS,
                },
                wanted: values.wanted.subscribe(),
                status: values.storage.clone(),
                health: values.health.clone(),
                ground: values.ground.subscribe(),
            },
            volumes: volumes::Service::live(
                &root.environment,
                tree.clone(),
                values.known.subscribe(),
                values.storage.subscribe(),
                values.volumes.clone(),
            ),
            logs: logs::Service {
                image: root.environment.image.clone(),
                storage: values.storage.subscribe(),
                status: values.ring.clone(),
            },
            update: update::Service {
                config: values.door.config().clone(),
                previous: root.environment.previous_guru.clone(),
                trial: update::TRIAL,
                ready: root.ready.subscribe(),
                health: values.cluster_health.subscribe(),
                workload: values.workload_health.subscribe(),
                status: values.update.clone(),
            },
            parameters: parameters::Service {
                config: parameters::Config {
                    sys: PathBuf::from("/sys"),
                    dev: PathBuf::from("/dev"),
                    esp: tree.esp.parameters.clone(),
                    given: tree.esp.given_parameters.clone(),
                    kept: tree.esp.user_data.clone(),
                    metadata: parameters::METADATA_ADDRESS,
                    metadata_v6: parameters::metadata_v6,
                },
                storage: values.storage.subscribe(),
                asks: values.asks.clone(),
                known: values.known.clone(),
            },
            network: network::Service {
                config: network::Config {
                    interfaces: network::Interfaces::Hardware,
                    sys: PathBuf::from("/sys"),
                    resolv_conf: tree.ephemeral.resolv_conf.clone(),
                    record: tree.esp.network.clone(),
                },
                known: values.known.subscribe(),
                order: values.network_order.subscribe(),
                proof: values.proof.subscribe(),
                asks: values.asks.subscribe(),
                status: values.network.clone(),
            },
            names: names::Service {
                config: names::Config {
                    hosts: tree.ephemeral.hosts.clone(),
                    hostname: tree.ephemeral.hostname.clone(),
                    machine_id: tree.ephemeral.machine_id.clone(),
                    kernel: names::Kernel::Set,
                },
                identity: values.identity.subscribe(),
                network: values.network.subscribe(),
                peers: values.peers.subscribe(),
            },
            firewall: firewall::Service {
                config: firewall_config(),
                inputs: firewall::Inputs {
                    cluster: values.cluster.subscribe(),
                    consensus: values.member.status(),
                    roles: values.given.subscribe(),
                    nodes: values.nodes.subscribe(),
                    peers: values.peers.subscribe(),
                    order: values.order.subscribe(),
                    asks: values.asks.subscribe(),
                },
                network: values.network.subscribe(),
                status: values.firewall.clone(),
            },
            forwarding: forwarding::Service {
                config: forwarding::Config::live(tree, &root.environment.version),
                inputs: forwarding::Inputs {
                    storage: values.storage.subscribe(),
                    ring: values.ring.subscribe(),
                    order: values.log_targets.subscribe(),
                    cluster: values.cluster.subscribe(),
                    nodes: values.nodes.subscribe(),
                },
                status: values.forwarding.clone(),
            },
            time: time::Service {
                config: time::Config::live(tree, &values.time.borrow()),
                inputs: time::Inputs {
                    identity: values.identity.subscribe(),
                    network: values.network.subscribe(),
                    roles: values.given.subscribe(),
                    nodes: values.nodes.subscribe(),
                    peers: values.peers.subscribe(),
                    servers: values.time_servers.subscribe(),
                    storage: values.storage.subscribe(),
                },
                status: values.time.clone(),
                ahead: values.ahead.clone(),
            },
        }
    }
}

/// The firewall: in force, unless a test asks for its absence.
fn firewall_config() -> firewall::Config {
    #[cfg(feature = "fault-injection")]
    let open = crate::injection::no_firewall();
    #[cfg(not(feature = "fault-injection"))]
    let open = false;
    firewall::Config::live(open)
}

/// The services that make the machine a node of its cluster, and of etcd, and that find the
/// others.
struct Membership {
    consensus: consensus::Service,
    cluster: cluster::Service,
    credentials: cluster::credentials::Service,
    peers: cluster::peers::Service,
    discovery: cluster::discovery::Service,
    enlist: roles::enlist::Service,
}

impl Membership {
    fn new(values: &Values, root: &Root) -> Self {
        let Values { tree, member, .. } = values;
        Self {
            consensus: member.clone(),
            cluster: cluster::Service {
                config: cluster::Config {
                    root: tree.clone(),
                    probe: cluster::Probe::default(),
                    tpm: Arc::new(cluster::unlock::sealer::Machine {
                        dev: PathBuf::from("/dev"),
                        extra: PathBuf::from(extra::DIRECTORY),
                    }),
                    efivars: PathBuf::from(efivar::DIRECTORY),
                    recovery: root.recovery.clone(),
                    install: install::Config::live(&root.environment, tree),
                },
                parameters: values.known.subscribe(),
                storage: values.storage.subscribe(),
                network: values.network.subscribe(),
                consensus: member.status(),
                wanted: values.wanted.clone(),
                identity: values.identity.clone(),
                orders: values.orders.clone(),
                unlock_requests: values.unlock_requests.clone(),
                announcements: values.announcements.clone(),
                reset: values.reset.subscribe(),
                end: root.end.clone(),
                status: values.cluster.clone(),
            },
            credentials: cluster::credentials::Service {
                files: tree.data.node.credentials.clone(),
                cluster: values.cluster.subscribe(),
                credentials: values.credentials.clone(),
            },
            peers: cluster::peers::Service {
                directory: tree.esp.cluster_directory.clone(),
                nodes: values.nodes.subscribe(),
                found: values.found.subscribe(),
                peers: values.peers.clone(),
            },
            discovery: cluster::discovery::Service {
                key: tree.data.node.credentials.key.clone(),
                identity: values.identity.subscribe(),
                consensus: member.status(),
                leader: values.client.leader_id(),
                network: values.network.subscribe(),
                peers: values.peers.subscribe(),
                found: values.found.clone(),
            },
            enlist: roles::enlist::Service {
                data: tree.data.clone(),
                client: values.client.clone(),
                nodes: values.nodes.subscribe(),
                network: values.network.subscribe(),
                consensus: member.status(),
                orders: values.orders.clone(),
                cluster: values.cluster.clone(),
            },
        }
    }
}

/// The services that lead the cluster, or follow the leader, that decide when the node is
/// ready, and that run what its roles ask for.
struct Control {
    curator: curator::Service,
    shipping: shipping::Service,
    agent: agent::Service,
    containerd: runtime::Service,
    roles: roles::readiness::Service,
    health: roles::health::Service,
    workload: workload::Service,
}

impl Control {
    fn new(values: &Values, root: &Root) -> Self {
        let Values { tree, member, .. } = values;
        Self {
            curator: curator::Service {
                config: curator::Config::live(),
                identity: values.identity.subscribe(),
                consensus: member.status(),
                members: member.members(),
                network: values.network.subscribe(),
                ahead: values.ahead.subscribe(),
                credentials: values.credentials.subscribe(),
                metrics: Arc::clone(&values.metrics),
                table: Arc::clone(&values.table),
                access_list: values.access_list.clone(),
                directory: values.directory.clone(),
                reached: values.reached.clone(),
                update: values.cluster_update.clone(),
                status: values.curator.clone(),
            },
            shipping: shipping::Service {
                config: shipping::Config::live(tree),
                inputs: shipping::Inputs {
                    curator: values.curator.subscribe(),
                    directory: values.directory.subscribe(),
                    consensus: member.status(),
                },
                status: values.shipping.clone(),
            },
            agent: agent::Service {
                config: agent::Config::live(tree),
                client: values.client.clone(),
                inputs: agent::Inputs {
                    environment: root.environment.clone(),
                    consensus: member.status(),
                    network: values.network.subscribe(),
                    storage: values.storage.subscribe(),
                    parameters: values.known.subscribe(),
                    found: values.found.subscribe(),
                    workload: values.workload.subscribe(),
                    firewall: values.firewall.subscribe(),
                    time: values.time.subscribe(),
                    forwarding: values.forwarding.subscribe(),
                    shipping: values.shipping.subscribe(),
                    update: values.update.subscribe(),
                    mirror: values.mirror.subscribe(),
                    volumes: values.volumes.subscribe(),
                    mesh_key: values.mesh.key.subscribe(),
                    reached: values.reached.subscribe(),
                    ready: root.ready.subscribe(),
                },
                outputs: agent::Outputs {
                    report: values.report.clone(),
                    candidates: values.candidates.clone(),
                    nodes: values.nodes.clone(),
                    time_servers: values.time_servers.clone(),
                    log_targets: values.log_targets.clone(),
                    firewall: values.order.clone(),
                    network: values.network_order.clone(),
                    proof: values.proof.clone(),
                    roles: values.given.clone(),
                    access_list: values.access_list.clone(),
                    credentials: values.credentials.clone(),
                    cluster: values.cluster.clone(),
                    contact: watch::Sender::default(),
                    prove_tpm: watch::Sender::default(),
                    turn: watch::Sender::default(),
                    leave: watch::Sender::default(),
                    taking: watch::Sender::default(),
                    end: root.end.clone(),
                },
                restarts: member.restarts(),
                tools: agent::Tools {
                    door: values.door.clone(),
                    bundles: values.bundles.clone(),
                    drains: values.drains.clone(),
                    looks: Arc::default(),
                },
                calls: values.calls.clone(),
                tpm: values.tpm.clone(),
            },
            containerd: runtime::Service {
                config: runtime::Config::live(tree),
                cluster: values.cluster.subscribe(),
                roles: values.given.subscribe(),
                storage: values.storage.subscribe(),
                workload: values.workload.subscribe(),
                network: values.network.subscribe(),
                status: values.containerd.clone(),
                pods: values.pods.clone(),
            },
            roles: roles::readiness::Service {
                image: root.environment.image.clone(),
                cluster: values.cluster.subscribe(),
                consensus: member.status(),
                curator: values.curator.subscribe(),
                leader: values.client.leader_id(),
                network: values.network.subscribe(),
                ready: root.ready.clone(),
            },
            health: roles::health::Service {
                cluster: values.cluster.subscribe(),
                consensus: member.status(),
                roles: values.given.subscribe(),
                workload: values.workload.subscribe(),
                health: values.cluster_health.clone(),
                parts: values.workload_health.clone(),
            },
            workload: workload::Service {
                config: workload::Config::live(tree),
                cluster: values.cluster.subscribe(),
                roles: values.given.subscribe(),
                consensus: member.status(),
                network: values.network.subscribe(),
                nodes: values.nodes.subscribe(),
                containerd: values.containerd.subscribe(),
                client: values.client.clone(),
                identity: workload::Identity {
                    credentials: values.credentials.subscribe(),
                    access_list: values.access_list.subscribe(),
                    metrics: Arc::clone(&values.access_metrics),
                },
                status: values.workload.clone(),
                drains: values.drains.clone(),
                mesh: values.mesh.clone(),
            },
        }
    }
}

/// The services that show the node: on its terminals, and to those who operate it.
struct Faces {
    console: console::Service,
    nodes: console::nodes::Service,
    management: management::Service,
}

impl Faces {
    fn new(values: &Values, root: &Root) -> Self {
        let member = &values.member;
        Self {
            console: console::Service {
                terminals: root.terminals.clone(),
                snapshot: values.snapshot.clone(),
                members: console::members::Service {
                    consensus: member.status(),
                    members: member.members(),
                    nodes: values.nodes.subscribe(),
                    credentials: values.credentials.subscribe(),
                    port: MANAGEMENT_PORT,
                },
                end: root.leave.clone(),
                environment: root.environment.clone(),
                inputs: console::Inputs {
                    known: values.known.subscribe(),
                    network: values.network.subscribe(),
                    storage: values.storage.subscribe(),
                    time: values.time.subscribe(),
                    health: values.health.subscribe(),
                    volumes: values.volumes.subscribe(),
                    mirror: values.mirror.subscribe(),
                    cluster: values.cluster.subscribe(),
                    consensus: member.status(),
                    pki: member.overview(),
                    cluster_nodes: values.cluster_nodes.subscribe(),
                    identity: values.identity.subscribe(),
                    roles: values.given.subscribe(),
                    workload: values.workload.subscribe(),
                    containerd: values.containerd.subscribe(),
                    pods: values.pods.subscribe(),
                    shipping: values.shipping.subscribe(),
                },
            },
            nodes: console::nodes::Service {
                nodes: values.nodes.subscribe(),
                leader: values.client.leader_id(),
                consensus: member.status(),
                own: values.cluster.subscribe(),
                update: values.cluster_update.subscribe(),
                shown: values.cluster_nodes.clone(),
            },
            management: management::Service {
                config: management::Config::live(),
                inputs: management::Inputs {
                    environment: root.environment.clone(),
                    cluster: values.cluster.subscribe(),
                    consensus: member.status(),
                    pki: member.overview(),
                    ready: root.ready.subscribe(),
                    report: values.report.subscribe(),
                    ring: values.ring.subscribe(),
                    snapshot: values.snapshot.subscribe(),
                    credentials: values.credentials.subscribe(),
                    unlock_requests: cluster::unlock::Requests::new(
                        values.unlock_requests.subscribe(),
                    ),
                    announcements: cluster::unlock::Announcements::new(
                        values.announcements.subscribe(),
                    ),
                    access_list: values.access_list.subscribe(),
                    workload: values.workload.subscribe(),
                    drains: values.drains.clone(),
                    time: values.time.subscribe(),
                    forwarding: values.forwarding.subscribe(),
                    shipping: values.shipping.subscribe(),
                    cluster_update: values.cluster_update.subscribe(),
                    mirror: values.mirror.subscribe(),
                    volumes: values.volumes.subscribe(),
                    firewall: values.firewall.subscribe(),
                },
                table: Arc::clone(&values.table),
                servers: vec![
                    ("curator", Arc::clone(&values.metrics)),
                    ("access", Arc::clone(&values.access_metrics)),
                ],
                end: root.end.clone(),
                reset: values.reset.clone(),
                update: values.door.clone(),
                bundles: values.bundles.clone(),
                calls: values.calls.clone(),
                firewall: firewall_config(),
                tpm: values.tpm.clone(),
                listening: Default::default(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the services, in the order in which they are started.
    fn started() -> Vec<&'static str> {
        let (code, _tests) = include_str!("root.rs").split_once("#[cfg(test)]").unwrap();
        let sources = [code, include_str!("injection/mod.rs")];
        let calls = sources.into_iter().flat_map(|code| code.split("ctx.spawn(\"").skip(1));
        calls.filter_map(|call| Some(call.split_once('"')?.0)).collect()
    }

    #[test]
    fn the_picture_of_the_tree_has_every_service_in_the_order_of_start() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/supervision.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (_, picture) = page.split_once("```text\nroot ").unwrap();
        let (picture, _) = picture.split_once("```").unwrap();
        let drawn = picture.lines().filter_map(|line| {
            let branch = line.strip_prefix("├ ").or_else(|| line.strip_prefix("└ "))?;
            branch.split_whitespace().next()
        });
        assert_eq!(drawn.collect::<Vec<_>>(), started());
    }
}
