//! The event values of the node: what its services share, each with the sender that its owner gets.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polis_proto::v1;
use polis_tui::Snapshot;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Root;
use crate::{console, firewall, forwarding, management, roles, shipping};
use polis_base::files;
use polis_control::{cluster, consensus, curator};
use polis_machine::network::{self, names};
use polis_machine::{mirror, parameters, storage, time, update, volumes};
use polis_runtime::logtree::ring;
use polis_wire::identity::Identity;
use polis_wire::node_roles::Nodes;
use polis_wire::pod_network::Networks;
use polis_wire::rpc;
use polis_wire::rpc::client::{Candidate, Client, Timeouts};
use polis_workload as workload;
use polis_workload::runtime;

/// Every event value of the node, and the handles that several services share.
///
/// The owner of a value gets the sender; `docs/event-values.md` names the owners.
pub(super) struct Values {
    pub(super) tree: files::Root,
    pub(super) known: watch::Sender<parameters::Known>,
    /// Whether they are asked of a metadata service.
    pub(super) asks: watch::Sender<parameters::Asking>,
    pub(super) network: watch::Sender<network::Status>,
    /// The network that the cluster orders.
    pub(super) network_order: watch::Sender<Option<network::Order>>,
    /// When another machine last opened a connection to the curator of this node.
    pub(super) reached: watch::Sender<Option<Instant>>,
    /// Since when the node is known to reach the cluster over its network.
    pub(super) proof: watch::Sender<Option<Instant>>,
    pub(super) storage: watch::Sender<storage::Status>,
    pub(super) health: watch::Sender<storage::Health>,
    /// On what the data partition lies.
    pub(super) backing: watch::Sender<Option<storage::Backing>>,
    /// The mirror of the disk.
    pub(super) mirror: watch::Sender<mirror::Status>,
    /// The volumes of further disks.
    pub(super) volumes: watch::Sender<volumes::Status>,
    pub(super) ring: watch::Sender<ring::Status>,
    pub(super) wanted: watch::Sender<Option<storage::Wanted>>,
    pub(super) orders: watch::Sender<Option<consensus::Orders>>,
    pub(super) identity: watch::Sender<Option<Identity>>,
    pub(super) peers: watch::Sender<names::Peers>,
    pub(super) found: watch::Sender<names::Peers>,
    pub(super) cluster: cluster::Writer,
    pub(super) unlock_requests: watch::Sender<cluster::unlock::request::Open>,
    pub(super) announcements: watch::Sender<cluster::unlock::firmware::Open>,
    /// Until when the removal of this node is to wipe its disk, too.
    pub(super) reset: watch::Sender<Option<Instant>>,
    pub(super) update: watch::Sender<update::Status>,
    /// The update of the cluster, as the curator of this node knows it.
    pub(super) cluster_update: watch::Sender<Option<v1::GetUpdateResponse>>,
    /// Where another system is taken: by an operator, or in an update of the cluster.
    pub(super) door: update::Door,
    pub(super) bundles: update::Store,
    pub(super) credentials: watch::Sender<Option<rpc::Credentials>>,
    pub(super) access_list: watch::Sender<Arc<rpc::AccessList>>,
    pub(super) curator: watch::Sender<curator::Status>,
    pub(super) containerd: watch::Sender<runtime::Status>,
    pub(super) pods: watch::Sender<Option<runtime::Pods>>,
    /// The roles that the cluster gives to this node.
    pub(super) given: watch::Sender<Option<v1::NodeRoles>>,
    /// The networks of pods and Services.
    pub(super) networks: watch::Sender<Networks>,
    /// Why the leader names others.
    pub(super) networks_fault: watch::Sender<Option<String>>,
    /// The time servers of the cluster.
    pub(super) time_servers: watch::Sender<Vec<parameters::NtpServer>>,
    /// Where the log goes.
    pub(super) log_targets: watch::Sender<Option<forwarding::Order>>,
    /// The proxy for what leaves the cluster.
    pub(super) proxy: watch::Sender<Option<parameters::Proxy>>,
    pub(super) forwarding: watch::Sender<forwarding::Status>,
    /// Which snapshot of etcd its target has, while this node leads.
    pub(super) shipping: watch::Sender<shipping::Status>,
    /// The curator's copy of the records.
    pub(super) directory: watch::Sender<curator::Directory>,
    /// The firewall that the cluster orders.
    pub(super) order: watch::Sender<Option<firewall::Order>>,
    pub(super) firewall: watch::Sender<firewall::Status>,
    pub(super) time: watch::Sender<time::Status>,
    pub(super) ahead: watch::Sender<time::Ahead>,
    pub(super) workload: watch::Sender<workload::Status>,
    pub(super) drains: workload::drain::Drains,
    pub(super) calls: management::Calls,
    pub(super) tpm: management::Tpm,
    pub(super) cluster_health: watch::Sender<update::ClusterHealth>,
    /// The workloads, for a system on trial and for an update that is installed.
    pub(super) workload_health: watch::Sender<update::workload::Workload>,
    pub(super) mesh: workload::mesh::Outputs,
    pub(super) candidates: watch::Sender<Vec<Candidate>>,
    pub(super) report: watch::Sender<v1::NodeStatus>,
    pub(super) nodes: watch::Sender<Option<Arc<Nodes>>>,
    pub(super) cluster_nodes: watch::Sender<console::ClusterNodes>,
    pub(super) snapshot: watch::Sender<Arc<Snapshot>>,
    /// The keeper of etcd, which hands out its status and clients.
    pub(super) member: consensus::Service,
    /// The way to the leader.
    pub(super) client: Client,
    /// The permissions of callers.
    pub(super) table: Arc<rpc::Table>,
    /// The counters of the curator, which management shows.
    pub(super) metrics: Arc<rpc::Metrics>,
    /// The same of the access proxy to Kubernetes.
    pub(super) access_metrics: Arc<rpc::Metrics>,
}

impl Values {
    pub(super) fn new(root: &Root) -> Self {
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
            backing: watch::Sender::default(),
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
            networks: watch::Sender::default(),
            networks_fault: watch::Sender::default(),
            time_servers: watch::Sender::default(),
            log_targets: watch::Sender::default(),
            proxy: watch::Sender::default(),
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
                Timeouts::default(),
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
