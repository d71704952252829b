//! Places in the network of pods: which node has which prefix, and which key in the mesh.
//!
//! [`settle`] and [`changes`] are pure. `nodes` applies them to every change of a node's
//! record, so a prefix comes and goes in the transaction of the role that it belongs to.
//!
//! ```text
//! no role of Kubernetes --first role given--> prefix --node reports its key--> prefix, key
//!          ^                                     |                                |
//!          +------ last role taken, decommissioned, deleted ----------------------+
//! ```
//!
//! Invariants:
//! - A node has a prefix exactly while it has a role of Kubernetes.
//! - Each prefix and each key has a record of its own, which only one node can create: two
//!   nodes never have one prefix or one key, whatever they do at the same moment.
//! - A prefix is the first free one, so prefixes stay dense and rules stay short.

use std::collections::BTreeSet;
use std::net::IpAddr;

use polis_proto::v1::{self, ClusterNetwork};
use prost::Message as _;
use tracing::info;

use super::error::Error;
use super::state::{Refusal, Request};
use super::store::{
    self, CONFIGURATION, CONFLICTS_MAX, MESH_KEYS, Outcome, POD_PREFIXES, Store, node_key,
};
use polis_base::hex;
use polis_machine::parameters;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::has_kubernetes;
use polis_wire::pki::{self, Guard, Write};
use polis_wire::pod_network::{Networks, Prefix};

/// The networks of the cluster, and the prefixes of nodes in them.
#[derive(Clone, Debug)]
pub(super) struct Prefixes {
    pub(super) networks: Networks,
    /// Those that nodes have.
    pub(super) taken: BTreeSet<Prefix>,
}

/// The networks of pods and Services in the configuration of a cluster.
///
/// # Errors
///
/// [`store::Error::Damaged`].
pub(super) fn networks(configuration: &v1::ClusterConfiguration) -> Result<Networks, store::Error> {
    let v1::ClusterConfiguration { pod_network, service_network, .. } = configuration;
    parameters::networks(pod_network, service_network, "configuration")
        .map_err(|_invalid| store::Error::Damaged { key: CONFIGURATION.to_owned() })
}

/// Whether the request may give a node a place.
pub(super) fn gives_place(request: &Request) -> bool {
    matches!(request, Request::Roles { add, .. } if has_kubernetes(Some(add)))
}

/// The record with the place that its roles ask for. Without `prefixes`, no place is given.
///
/// # Errors
///
/// [`Refusal::PodNetworkFull`], [`Refusal::InPodNetwork`], [`Refusal::NoIpv4`].
pub(super) fn settle(node: v1::Node, prefixes: Option<&Prefixes>) -> Result<v1::Node, Refusal> {
    let cluster_network = match (has_kubernetes(node.roles.as_ref()), prefixes) {
        (false, _) => None,
        (true, Some(Prefixes { networks, taken })) if node.cluster_network.is_none() => {
            check_address(&node, *networks)?;
            let free = networks.node_prefixes().find(|prefix| !taken.contains(prefix));
            let free = free.ok_or(Refusal::PodNetworkFull { network: networks.pods })?;
            Some(ClusterNetwork { pod_prefix: free.to_string(), ..ClusterNetwork::default() })
        }
        (true, _) => node.cluster_network.clone(),
    };
    Ok(v1::Node { cluster_network, ..node })
}

/// Refuses a role of Kubernetes to a node that supports only the default networks, in a cluster
/// with others. The last heartbeat shows it: each version that supports others names its image
/// there. A node that has not sent one to this leader is not refused.
///
/// # Errors
///
/// [`Error::EarlierVersion`].
pub(super) fn check_version(
    node: NodeId,
    add: &v1::NodeRoles,
    networks: Networks,
    report: Option<&v1::UpdateReport>,
) -> Result<(), Error> {
    let fits = networks == Networks::default() || !has_kubernetes(Some(add));
    match report.filter(|report| report.image.is_empty() && !fits) {
        Some(report) => Err(Error::EarlierVersion { node, version: report.version.clone() }),
        None => Ok(()),
    }
}

/// Pods need IPv4, and the routes of the mesh would swallow the packets to a node inside of them.
///
/// # Errors
///
/// [`Refusal::InPodNetwork`], [`Refusal::NoIpv4`].
pub(super) fn check_address(node: &v1::Node, networks: Networks) -> Result<(), Refusal> {
    let Some(status) = &node.status else { return Ok(()) };
    let address = match status.external_address.parse() {
        Ok(IpAddr::V4(address)) => address,
        Ok(IpAddr::V6(address)) => return Err(Refusal::NoIpv4 { address }),
        Err(_unknown) => return Ok(()),
    };
    match networks.with(address) {
        Some(network) => Err(Refusal::InPodNetwork { address, network }),
        None => Ok(()),
    }
}

/// The conditions and changes that make the records of prefixes and keys follow the place of
/// the node `id`.
pub(super) fn changes(
    id: NodeId,
    before: Option<&ClusterNetwork>,
    after: Option<&ClusterNetwork>,
) -> (Vec<Guard>, Vec<Write>) {
    let owner = v1::ClusterNetworkOwner { node_id: id.to_string() }.encode_to_vec();
    let (before, after) = (places(before), places(after));
    let mut guards = Vec::new();
    let mut writes = Vec::new();
    for gone in before.difference(&after) {
        writes.push(Write::Delete(gone.clone()));
    }
    for new in after.difference(&before) {
        guards.push(Guard::Absent(new.clone()));
        writes.push(Write::Put(new.clone(), owner.clone()));
    }
    (guards, writes)
}

/// The keys of the records that belong to a place.
fn places(network: Option<&ClusterNetwork>) -> BTreeSet<String> {
    let Some(network) = network else { return BTreeSet::new() };
    let prefix = (!network.pod_prefix.is_empty()).then(|| prefix_at(&network.pod_prefix));
    let key = &network.wireguard_public_key;
    let key = (!key.is_empty()).then(|| key_at(key));
    prefix.into_iter().chain(key).collect()
}

fn prefix_at(prefix: &str) -> String {
    format!("{POD_PREFIXES}{prefix}")
}

fn key_at(key: &[u8]) -> String {
    format!("{MESH_KEYS}{}", hex::encode(key))
}

impl<S: pki::Store + Clone> Store<S> {
    /// The networks of the cluster, and the prefixes that nodes have.
    pub(super) async fn prefixes(&self) -> Result<Prefixes, Error> {
        let configuration = self.read::<v1::ClusterConfiguration>(CONFIGURATION).await?;
        let networks = networks(&configuration.unwrap_or_default())?;
        let listed = self.kv.list(POD_PREFIXES).await.map_err(store::Error::Store)?;
        let prefix = |(key, _): (String, pki::Entry)| {
            let prefix = key.strip_prefix(POD_PREFIXES).and_then(|text| text.parse().ok());
            prefix.ok_or(store::Error::Damaged { key })
        };
        let taken = listed.into_iter().map(prefix).collect::<Result<_, store::Error>>()?;
        Ok(Prefixes { networks, taken })
    }

    /// Records the key of a node in the mesh. Without a role of Kubernetes, the node has no
    /// place, and nothing happens: the role was taken away a moment ago.
    ///
    /// # Errors
    ///
    /// [`Error::MeshKeyTaken`], [`Refusal::Unknown`].
    pub async fn set_mesh_key(&self, id: NodeId, key: &[u8; 32]) -> Result<(), Error> {
        let record = node_key(id);
        for _attempt in 0..CONFLICTS_MAX {
            let place = key_at(key);
            let owner = self.read::<v1::ClusterNetworkOwner>(&place).await?;
            let apply = |old: Option<v1::Node>| {
                let node = old.ok_or(Refusal::Unknown)?;
                let before = node.cluster_network.clone();
                let Some(network) = &before else { return Ok(Outcome::Keep(node)) };
                if network.wireguard_public_key == key {
                    return Ok(Outcome::Keep(node));
                }
                if let Some(owner) = &owner {
                    return Err(Error::MeshKeyTaken { by: owner.node_id.clone() });
                }
                let after =
                    ClusterNetwork { wireguard_public_key: key.to_vec(), ..network.clone() };
                let (guards, writes) = changes(id, before.as_ref(), Some(&after));
                let node = v1::Node { cluster_network: Some(after), ..node };
                info!(node = %id, "a node has its key in the mesh");
                Ok(Outcome::Put(node, guards, writes))
            };
            if self.attempt(&record, apply).await?.is_some() {
                return Ok(());
            }
        }
        Err(store::Error::Contended { key: record }.into())
    }
}

#[cfg(test)]
#[path = "pod_network_tests.rs"]
mod tests;
