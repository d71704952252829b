//! The status report of this node: collects it, and sends it to the leader at each
//! change.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::firewall;
use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{trace, warn};

use super::Service;
use polis_base::sys::clock;
use polis_base::{boot, cause};
use polis_control::cluster::{Keeper, KeyStatus};
use polis_control::{cluster, consensus};
use polis_machine::{mirror, network, storage, update, volumes};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::endpoint::CURATOR_PORT;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::parameters::VolumeName;
use polis_wire::rpc::client::Repeat;
use polis_workload as workload;
use polis_workload::drain;
use polis_workload::mesh::PublicKey;

/// Between two attempts, once the client has lost its patience.
const RETRY: Duration = Duration::from_secs(5);

/// Addresses beside the primary one that a report has.
const ADDRESSES_MAX: usize = 16;

/// Links that a report has.
const LINKS_MAX: usize = 64;

/// Faults of the network that a report has.
const FAULTS_MAX: usize = 16;

/// Further disks that a report has.
const VOLUMES_MAX: usize = 16;

/// Bytes of a program's last words in a report. The whole is in the log.
const WORDS_MAX: usize = 500;

/// The sources of the report.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The version of the system.
    pub version: &'a str,
    /// Its image.
    pub image: &'a str,
    /// The kernel's name for this boot.
    pub boot_id: &'a str,
    /// Its addresses.
    pub network: &'a network::Status,
    /// Its data partition.
    pub storage: &'a storage::Status,
    /// Its etcd member.
    pub consensus: &'a consensus::Status,
    /// How the keys of its disk are kept, where it has any.
    pub keys: Option<&'a KeyStatus>,
    /// The parts of Kubernetes.
    pub workload: &'a workload::Status,
    /// Bytes of memory that the machine has; zero if unknown.
    pub memory: u64,
    /// The firewall.
    pub firewall: &'a firewall::State,
    /// The system partition that it runs from.
    pub slot: &'a str,
    /// The systems of this machine.
    pub update: &'a update::Status,
    /// The mirror of the disk.
    pub mirror: &'a mirror::Status,
    /// Its further disks.
    pub volumes: &'a volumes::Status,
    /// Why the leader names other networks of pods and Services than this node uses.
    pub networks_fault: Option<&'a str>,
}

impl Subject<'_> {
    /// The report, without the time.
    #[must_use]
    pub fn report(&self) -> v1::NodeStatus {
        let kind = match self.storage.ready().map(|ready| ready.kind) {
            None => v1::StorageKind::Unspecified,
            Some(storage::Kind::Insecure) => v1::StorageKind::Insecure,
            Some(storage::Kind::Encrypted) => v1::StorageKind::Encrypted,
            Some(storage::Kind::Authenticated) => v1::StorageKind::Authenticated,
        };
        // A curator runs beside every voter.
        let curator = self.consensus.voter().is_some();
        v1::NodeStatus {
            external_address: self.network.primary.map(|ip| ip.to_string()).unwrap_or_default(),
            version: self.version.to_owned(),
            image: self.image.to_owned(),
            boot_id: self.boot_id.to_owned(),
            storage_kind: kind.into(),
            key_keeper: keeper(self.keys).into(),
            firmware_update_announced: self.keys.is_some_and(|keys| keys.firmware_update_announced),
            curator_port: if curator { CURATOR_PORT.into() } else { 0 },
            workload_fault: self.workload.unfit.clone().unwrap_or_default(),
            workload: workload(self.workload),
            drain: match self.workload.drain {
                drain::State::None => String::new(),
                state => state.name().to_owned(),
            },
            workload_crash_loop: self.workload.crash_loop().map(bounded).unwrap_or_default(),
            firewall_fault: fault(self.firewall),
            other_addresses: self
                .network
                .addresses()
                .iter()
                .filter(|address| Some(**address) != self.network.primary)
                .take(ADDRESSES_MAX)
                .map(ToString::to_string)
                .collect(),
            slot: self.slot.to_owned(),
            trial: self.update.trial,
            memory_bytes: self.memory,
            data_bytes: self.storage.ready().map_or(0, |ready| ready.size),
            other_system: self
                .update
                .other
                .as_ref()
                .map(|other| bounded(other.to_string()))
                .unwrap_or_default(),
            network: Some(links(self.network, self.networks_fault)),
            mirror: self.mirror.as_ref().map(|it| bounded(it.text())).unwrap_or_default(),
            volumes: volumes(self.volumes),
            ..Default::default()
        }
    }
}

/// The further disks, those that failed first: a node may have more than a report.
fn volumes(status: &volumes::Status) -> Vec<v1::VolumeReport> {
    let mut all: Vec<_> = status.iter().collect();
    all.sort_by_key(|(_, state)| match state {
        volumes::State::Failed { .. } => 0,
        volumes::State::Starting | volumes::State::Ready => 1,
        volumes::State::Absent => 2,
    });
    let report = |(name, state): (&VolumeName, &volumes::State)| v1::VolumeReport {
        name: name.to_string(),
        state: state.name().to_owned(),
        cause: state.cause().map(|cause| bounded(cause.to_owned())).unwrap_or_default(),
    };
    all.into_iter().take(VOLUMES_MAX).map(report).collect()
}

/// The links, the faults, of which that of pods and Services is the first, and the state of an
/// order.
fn links(network: &network::Status, networks_fault: Option<&str>) -> v1::NetworkReport {
    let link = |interface: &network::Interface| {
        let (kind, on, vlan) = match &interface.kind {
            network::Kind::Card(None) => ("card", None, 0),
            network::Kind::Card(Some(member)) => ("card", Some(&member.bond), 0),
            network::Kind::Bond(_) => ("bond", None, 0),
            network::Kind::Vlan { on, id } => ("vlan", Some(on), *id),
        };
        let addresses = || interface.addresses.iter().take(ADDRESSES_MAX);
        let origins = addresses().map(|address| interface.origin(address).to_owned());
        v1::NetworkLink {
            name: interface.name.clone(),
            kind: kind.to_owned(),
            mac: interface.mac.to_string(),
            carrier: interface.carrier,
            driver: interface.driver.clone().unwrap_or_default(),
            path: interface.path.clone(),
            mtu: interface.mtu,
            addresses: addresses().map(ToString::to_string).collect(),
            origins: origins.collect(),
            on: on.cloned().unwrap_or_default(),
            vlan: vlan.into(),
        }
    };
    let faults = networks_fault.map(str::to_owned).into_iter().chain(network.faults.clone());
    v1::NetworkReport {
        number: network.change.number,
        state: network.change.state.into(),
        cause: bounded(network.change.cause.clone()),
        links: network.interfaces.iter().take(LINKS_MAX).map(link).collect(),
        faults: faults.take(FAULTS_MAX).map(bounded).collect(),
    }
}

/// The state of all parts of Kubernetes as one text; empty without a role, or where the node
/// cannot carry it.
fn workload(status: &workload::Status) -> String {
    match status.all() {
        None => String::new(),
        Some(_) if status.unfit.is_some() => String::new(),
        Some(workload::PartState::Failed { cause }) => bounded(format!("failed: {cause}")),
        Some(state) => state.name().to_owned(),
    }
}

/// Why the firewall is not in force; empty where it is, or was not due yet.
fn fault(state: &firewall::State) -> String {
    match state {
        firewall::State::Starting | firewall::State::InForce => String::new(),
        firewall::State::Failed(cause) => bounded(format!("the firewall is not in force: {cause}")),
        firewall::State::Open => "the firewall is off, as a test asked for".to_owned(),
    }
}

/// The last words of a program, as far as a record has room for them.
fn bounded(mut words: String) -> String {
    let mut ends = (0..=words.len().min(WORDS_MAX)).rev();
    words.truncate(ends.find(|end| words.is_char_boundary(*end)).unwrap_or(0));
    words
}

fn keeper(keys: Option<&KeyStatus>) -> v1::KeyKeeper {
    match keys.map(|keys| keys.keeper) {
        None => v1::KeyKeeper::Unspecified,
        Some(None) => v1::KeyKeeper::None,
        Some(Some(Keeper::Tpm)) => v1::KeyKeeper::Tpm,
        Some(Some(Keeper::Firmware)) => v1::KeyKeeper::Firmware,
        Some(Some(Keeper::Disk)) => v1::KeyKeeper::Disk,
    }
}

/// Keeps the event value, and pushes it.
pub(super) async fn run(mut service: Service, ctx: Context) -> Result<(), Closed> {
    let boot_id = boot::id();
    let mut nodes = service.outputs.nodes.subscribe();
    let mut pushed = None;
    let mut failed = cause::Last::default();
    ctx.healthy();
    loop {
        let report = fold(&mut service, &boot_id);
        service.outputs.report.send_if_modified(|known| {
            let changed = *known != report;
            known.clone_from(&report);
            changed
        });
        let key = *service.inputs.mesh_key.borrow_and_update();
        let unrecorded = key.filter(|key| {
            let nodes = nodes.borrow_and_update();
            service.own().zip(nodes.as_ref()).is_some_and(|(own, nodes)| lacks(nodes, own, key))
        });
        let work = async {
            let same = pushed.as_ref() == Some(&report) && unrecorded.is_none();
            if same || service.own().is_none() {
                return changed(&mut service, &mut nodes, key).await;
            }
            match push(&service, report.clone(), key).await {
                Ok(()) => {
                    failed.clear();
                    pushed = Some(report.clone());
                    // The record follows in a moment, and with it the end of this wait.
                    match unrecorded {
                        Some(_) => changed(&mut service, &mut nodes, key).await,
                        None => Ok(()),
                    }
                }
                Err(status) => {
                    if failed.is_new(&status.to_string()) {
                        warn!(%status, "cannot report the state of this node to the leader");
                    }
                    sleep(RETRY).await;
                    Ok(())
                }
            }
        };
        match ctx.until_cancelled(Box::pin(work)).await {
            Some(done) => done?,
            None => return Ok(()),
        }
    }
}

fn fold(service: &mut Service, boot_id: &str) -> v1::NodeStatus {
    let inputs = &mut service.inputs;
    let network = inputs.network.borrow_and_update().clone();
    let storage = inputs.storage.borrow_and_update().clone();
    let consensus = inputs.consensus.borrow_and_update().clone();
    let workload = inputs.workload.borrow_and_update().clone();
    let firewall = inputs.firewall.borrow_and_update().state.clone();
    let update = inputs.update.borrow_and_update().clone();
    let mirror = inputs.mirror.borrow_and_update().clone();
    let volumes = inputs.volumes.borrow_and_update().clone();
    let networks_fault = inputs.networks_fault.borrow_and_update().clone();
    let keys = service.outputs.cluster.borrow().keys.clone();
    Subject {
        version: &inputs.environment.version,
        image: &inputs.environment.image,
        boot_id,
        network: &network,
        storage: &storage,
        consensus: &consensus,
        keys: keys.as_ref(),
        workload: &workload,
        memory: workload::host::cgroup::memory(Path::new("/proc")),
        firewall: &firewall,
        slot: &inputs.environment.slot,
        update: &update,
        mirror: &mirror,
        volumes: &volumes,
        networks_fault: networks_fault.as_deref(),
    }
    .report()
}

/// Whether the record of the node has a place in the mesh without its key: the leader has
/// given the place after the last report, or the key is a new one.
fn lacks(nodes: &Nodes, own: NodeId, key: &PublicKey) -> bool {
    let network = nodes.get(&own).and_then(|node| node.cluster_network.as_ref());
    network.is_some_and(|network| network.wireguard_public_key != key.bytes())
}

/// Waits until the report may have changed, or a leader can receive it. Cancel-safe.
async fn changed(
    service: &mut Service,
    nodes: &mut watch::Receiver<Option<Arc<Nodes>>>,
    key: Option<PublicKey>,
) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let named = async {
        let asked = |status: &cluster::Status| (status.node, status.keys.clone());
        let known = asked(&service.outputs.cluster.borrow());
        until(&mut cluster, "the cluster", |status| (asked(status) != known).then_some(())).await
    };
    let inputs = &mut service.inputs;
    tokio::select! {
        // Cancel-safe, all of them: they wait for event values.
        changed = inputs.network.changed() => changed.map_err(|_closed| Closed("the network")),
        changed = inputs.storage.changed() => changed.map_err(|_closed| Closed("the storage")),
        changed = inputs.consensus.changed() => changed.map_err(|_closed| Closed("etcd")),
        changed = inputs.firewall.changed() => changed.map_err(|_closed| Closed("the firewall")),
        changed = inputs.workload.changed() => changed.map_err(|_closed| Closed("the workload")),
        changed = inputs.update.changed() => changed.map_err(|_closed| Closed("the update")),
        changed = inputs.mirror.changed() => changed.map_err(|_closed| Closed("the mirror")),
        changed = inputs.volumes.changed() => changed.map_err(|_closed| Closed("the volumes")),
        changed = inputs.mesh_key.changed() => changed.map_err(|_closed| Closed("the mesh")),
        changed = inputs.networks_fault.changed() => {
            changed.map_err(|_closed| Closed("the networks of pods and Services"))
        }
        // Only a node in the mesh compares its record with its key.
        changed = nodes.changed(), if key.is_some() => {
            changed.map_err(|_closed| Closed("the nodes"))
        }
        named = named => named,
    }
}

async fn push(
    service: &Service,
    mut report: v1::NodeStatus,
    key: Option<PublicKey>,
) -> Result<(), tonic::Status> {
    let since_1970 = clock::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    report.reported_at = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
    let request = v1::UpdateNodeStatusRequest {
        status: Some(report),
        wireguard_public_key: key.map(|key| key.bytes().to_vec()).unwrap_or_default(),
    };
    let call = |channel| {
        let request = request.clone();
        async move { CuratorClient::new(channel).update_node_status(request).await }
    };
    service.client.call(Repeat::Allowed, call).await?;
    trace!("the leader has the state of this node");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_reported_while_the_record_has_a_place_without_it() {
        let (own, key) = (NodeId::from_public_key(&[1; 32]), PublicKey::new([2; 32]).unwrap());
        let with = |network: Option<&[u8]>| {
            let cluster_network = network.map(|key| v1::ClusterNetwork {
                wireguard_public_key: key.to_vec(),
                pod_prefix: "10.192.0.0/24".to_owned(),
            });
            Nodes::from([(own, v1::NodeInfo { cluster_network, ..Default::default() })])
        };
        assert!(lacks(&with(Some(&[])), own, &key));
        assert!(lacks(&with(Some(&[3; 32])), own, &key));
        assert!(!lacks(&with(Some(&[2; 32])), own, &key));
        // Without a role, the leader would not keep it.
        assert!(!lacks(&with(None), own, &key));
        assert!(!lacks(&Nodes::new(), own, &key));
    }

    #[test]
    fn the_parts_of_kubernetes_are_reported_together() {
        use polis_workload::{Part, PartState};
        let with = |parts: &[(Part, PartState)]| {
            let parts = parts.iter().cloned().collect();
            super::workload(&workload::Status { parts, ..workload::Status::default() })
        };
        assert_eq!(with(&[]), "");
        assert_eq!(with(&[(Part::Kubelet, PartState::Ready)]), "ready");
        let failed = (Part::Dns, PartState::Failed { cause: "no port".to_owned() });
        assert_eq!(with(&[(Part::Kubelet, PartState::Starting)]), "starting");
        assert_eq!(with(&[(Part::Kubelet, PartState::Ready), failed]), "failed: dns: no port");
    }

    #[test]
    fn an_address_that_another_machine_has_too_is_reported() {
        let conflict = "another machine, 02:00:00:00:00:09, has the address 10.0.2.15 of eth0, too";
        let mut faults = vec![conflict.to_owned(), "é".repeat(WORDS_MAX)];
        faults.resize(FAULTS_MAX + 1, "vlan7 has no link".to_owned());
        let status = network::Status { faults, ..network::Status::default() };
        let reported = links(&status, None).faults;
        assert_eq!(reported[0], conflict);
        assert!(reported.iter().all(|fault| fault.len() <= WORDS_MAX));
        assert_eq!(reported.len(), FAULTS_MAX, "what the leader takes");
        let other = "the leader names other networks";
        let reported = links(&status, Some(other)).faults;
        assert_eq!((&*reported[0], &*reported[1], reported.len()), (other, conflict, FAULTS_MAX));
    }

    #[test]
    fn a_report_says_what_is_known_and_nothing_else() {
        let mut network = network::Status::default();
        let storage = storage::Status::Starting;
        let consensus = consensus::Status::default();
        let deaths = workload::Deaths { count: 2, cause: "é".repeat(WORDS_MAX) };
        let workload = workload::Status {
            unfit: Some("no".to_owned()),
            deaths: [(workload::Part::Kubelet, deaths)].into(),
            ..workload::Status::default()
        };
        let other = update::Other {
            version: semver::Version::new(0, 2, 0),
            image: None,
            slot: "A",
            standing: update::Standing::Tried,
            cause: Some("guru 0310".to_owned()),
        };
        let update = update::Status { known: true, trial: true, other: Some(other) };
        let failed = volumes::State::Failed { cause: "its disk is missing".to_owned() };
        let mut volumes = volumes::Status::from([("db".parse().unwrap(), failed)]);
        for number in 0..VOLUMES_MAX {
            volumes.insert(format!("a{number}").parse().unwrap(), volumes::State::Ready);
        }
        let subject = |network: &network::Status| {
            Subject {
                version: "0.1.0",
                image: "abc",
                boot_id: "b",
                network,
                storage: &storage,
                consensus: &consensus,
                keys: Some(&KeyStatus {
                    sealed: true,
                    keeper: Some(Keeper::Tpm),
                    recovery_key_unsaved: true,
                    firmware_update_announced: true,
                }),
                workload: &workload,
                memory: 5,
                firewall: &firewall::State::Failed("no".to_owned()),
                slot: "B",
                update: &update,
                mirror: &None,
                volumes: &volumes,
                networks_fault: None,
            }
            .report()
        };
        let early = subject(&network);
        assert_eq!(early.external_address, "");
        assert_eq!(early.storage_kind(), v1::StorageKind::Unspecified);
        assert_eq!(early.curator_port, 0);
        assert_eq!((early.memory_bytes, early.data_bytes), (5, 0));
        assert_eq!(early.workload_fault, "no");
        assert_eq!(early.firewall_fault, "the firewall is not in force: no");
        assert_eq!((early.workload.as_str(), early.drain.as_str()), ("", ""));
        assert!(early.workload_crash_loop.starts_with("kubelet ends again and again: éé"));
        assert!(early.workload_crash_loop.len() <= WORDS_MAX);
        assert_eq!(early.key_keeper(), v1::KeyKeeper::Tpm);
        assert!(early.firmware_update_announced);
        assert_eq!((early.slot.as_str(), early.trial), ("B", true));
        assert_eq!(early.other_system, "0.2.0 in slot A, failed: guru 0310");
        let volume = &early.volumes[0];
        let words = [&volume.name, &volume.state, &volume.cause];
        assert_eq!(words, ["db", "failed", "its disk is missing"]);
        assert_eq!(early.volumes.len(), VOLUMES_MAX, "what the leader takes");
        network.primary = Some([10, 0, 2, 15].into());
        let later = subject(&network);
        assert_eq!(later.external_address, "10.0.2.15");
        assert_eq!((later.version.as_str(), later.image.as_str()), ("0.1.0", "abc"));
    }
}
