//! The watched values of the console: distinguishes news from values that move all the
//! time.
//!
//! Invariants:
//! - An unchanged value is neither copied nor recomputed; at rest, nothing is.

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use polis_proto::v1;
use polis_tui::snapshot::History;
use tokio::sync::watch;

use super::fingerprint_words::FingerprintWords;
use super::load::Load;
use super::members::Learned;
use super::{ClusterNodes, Inputs};
use polis_base::environment::Environment;
use polis_base::stage::Stages;
use polis_control::{cluster, consensus};
use polis_machine::parameters::Known;
use polis_machine::{mirror, network, storage, time, volumes};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Tree;
use polis_wire::identity::Identity;
use polis_wire::pki::Overview;
use polis_workload as workload;
use polis_workload::runtime;

use crate::shipping;

/// The newest of everything at one moment.
#[derive(Clone, Debug)]
pub(super) struct Values {
    pub(super) environment: Environment,
    pub(super) stages: Stages,
    pub(super) services: Tree,
    pub(super) known: Known,
    pub(super) network: network::Status,
    pub(super) storage: storage::Status,
    pub(super) time: time::Status,
    pub(super) health: storage::Health,
    pub(super) volumes: volumes::Status,
    pub(super) mirror: mirror::Status,
    pub(super) cluster: cluster::Status,
    pub(super) consensus: consensus::Status,
    pub(super) pki: Overview,
    pub(super) cluster_nodes: ClusterNodes,
    pub(super) identity: Option<Identity>,
    pub(super) roles: Option<v1::NodeRoles>,
    pub(super) workload: workload::Status,
    pub(super) containerd: runtime::Status,
    pub(super) pods: Option<runtime::Pods>,
    pub(super) shipping: shipping::Status,
    pub(super) load: Option<Load>,
    pub(super) words: FingerprintWords,
    pub(super) members: Learned,
    pub(super) past: History,
}

impl Values {
    /// The values before the first message.
    pub(super) fn nothing(environment: Environment) -> Self {
        Self {
            environment,
            stages: Stages::default(),
            services: Tree::default(),
            known: None,
            network: network::Status::default(),
            storage: storage::Status::Starting,
            time: time::Status::default(),
            health: storage::Health::default(),
            volumes: volumes::Status::new(),
            mirror: None,
            cluster: cluster::Status::default(),
            consensus: consensus::Status::default(),
            pki: Overview::default(),
            cluster_nodes: ClusterNodes::default(),
            identity: None,
            roles: None,
            workload: workload::Status::default(),
            containerd: runtime::Status::default(),
            pods: None,
            shipping: shipping::Status::default(),
            load: None,
            words: FingerprintWords::default(),
            members: Learned::new(),
            past: History::default(),
        }
    }
}

/// Every value on the screen, from its owner.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) inputs: Inputs,
    pub(super) stages: watch::Receiver<Stages>,
    pub(super) services: watch::Receiver<Tree>,
    pub(super) load: watch::Receiver<Option<Load>>,
    pub(super) words: watch::Receiver<FingerprintWords>,
    pub(super) members: watch::Receiver<Learned>,
    pub(super) past: watch::Receiver<History>,
    /// The last values.
    pub(super) values: Values,
    /// Whether only the waiting code may have seen one of them.
    pub(super) waited_for: bool,
}

impl Watched {
    /// The present values, and whether one of them differs from the last time.
    pub(super) fn newest(&mut self) -> (&Values, bool) {
        // A value that was waited for counts as seen.
        let all = std::mem::take(&mut self.waited_for);
        let Inputs {
            known,
            network,
            storage,
            time,
            health,
            volumes,
            mirror,
            cluster,
            consensus,
            pki,
            cluster_nodes,
            identity,
            roles,
            workload,
            containerd,
            pods,
            shipping,
        } = &mut self.inputs;
        let values = &mut self.values;
        let renewed = [
            renew(identity, all, &mut values.identity),
            renew(&mut self.stages, all, &mut values.stages),
            renew(&mut self.services, all, &mut values.services),
            renew(known, all, &mut values.known),
            renew(network, all, &mut values.network),
            renew(storage, all, &mut values.storage),
            renew(time, all, &mut values.time),
            renew(health, all, &mut values.health),
            renew(volumes, all, &mut values.volumes),
            renew(mirror, all, &mut values.mirror),
            renew(cluster, all, &mut values.cluster),
            renew(consensus, all, &mut values.consensus),
            renew(pki, all, &mut values.pki),
            renew(cluster_nodes, all, &mut values.cluster_nodes),
            renew(roles, all, &mut values.roles),
            renew(workload, all, &mut values.workload),
            renew(containerd, all, &mut values.containerd),
            renew(pods, all, &mut values.pods),
            renew(shipping, all, &mut values.shipping),
            renew(&mut self.load, all, &mut values.load),
            renew(&mut self.words, all, &mut values.words),
            renew(&mut self.members, all, &mut values.members),
            renew(&mut self.past, all, &mut values.past),
        ];
        (values, renewed.contains(&true))
    }

    /// Waits until any of them changes that a person waits for. The others change
    /// all the time, and are in the next picture, with the clock. Cancel-safe.
    pub(super) async fn changed(&mut self) -> Result<(), Closed> {
        let Inputs {
            known,
            network,
            storage,
            cluster,
            pki,
            identity,
            roles,
            workload,
            containerd,
            pods,
            shipping,
            time: _,
            health: _,
            volumes: _,
            mirror: _,
            consensus: _,
            cluster_nodes: _,
        } = &mut self.inputs;
        let any = [
            changed(&mut self.stages, "the stages"),
            changed(&mut self.services, "the services"),
            changed(known, "the parameters"),
            changed(network, "the network"),
            changed(storage, "the storage"),
            changed(cluster, "the cluster"),
            changed(pki, "the certificates"),
            changed(identity, "the identity"),
            changed(roles, "the roles"),
            changed(workload, "the workload"),
            changed(containerd, "the container runtime"),
            changed(pods, "the pods"),
            changed(shipping, "the target of snapshots"),
            changed(&mut self.words, "the words"),
        ];
        let changed = select_all(any).await.0;
        self.waited_for = true;
        changed
    }
}

/// Copies the value of `from` to `to` if it is new, or if `whatever` is set.
fn renew<T: Clone>(from: &mut watch::Receiver<T>, whatever: bool, to: &mut T) -> bool {
    let newest = from.borrow_and_update();
    let is_new = whatever || newest.has_changed();
    if is_new {
        to.clone_from(&newest);
    }
    is_new
}

fn changed<'a, T: Send + Sync>(
    value: &'a mut watch::Receiver<T>,
    name: &'static str,
) -> BoxFuture<'a, Result<(), Closed>> {
    async move { value.changed().await.map_err(|_closed| Closed(name)) }.boxed()
}
