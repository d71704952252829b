//! The members of the mesh, from the records of the nodes. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use polis_proto::v1;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::pod_network::{Networks, Prefix};

use super::key::PublicKey;
use super::plan::{self, Member, Mesh, Rejected};

/// The records, as one node uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It has no place yet: what it waits for.
    Waiting(&'static str),
    /// It cannot have the mesh: why.
    Unfit(String),
    /// Its mesh, its own prefix, and the nodes that are left out.
    Mesh {
        /// The wanted state of the kernel.
        mesh: Mesh,
        /// The addresses of its pods.
        prefix: Prefix,
        /// The other nodes by their keys.
        names: BTreeMap<PublicKey, NodeId>,
        /// Nodes that are left out.
        rejected: BTreeMap<NodeId, Rejected>,
    },
}

/// The place of the node `own`, whose key is `key`, in the networks of its cluster. `addresses` are
/// all that it has.
#[must_use]
pub fn place(
    own: NodeId,
    key: PublicKey,
    networks: Networks,
    addresses: &[IpAddr],
    nodes: Option<&Nodes>,
) -> Place {
    if let Some(cause) = inside(networks, addresses).or_else(|| without_ipv4(addresses)) {
        return Place::Unfit(cause);
    }
    let Some(nodes) = nodes else {
        return Place::Waiting("the records of the nodes, from a leader");
    };
    let network = nodes.get(&own).and_then(|node| node.cluster_network.as_ref());
    let Some(network) = network else {
        return Place::Waiting("a pod prefix for this node, from the leader");
    };
    if network.wireguard_public_key != key.bytes() {
        return Place::Waiting("the leader to record the key of this node");
    }
    let members = members(nodes);
    let (mesh, mut rejected) = plan::plan(own, networks, &members);
    match (mesh, members.get(&own)) {
        (Some(mesh), Some(member)) => {
            let names = members.iter().map(|(id, member)| (member.key, *id)).collect();
            Place::Mesh { mesh, prefix: member.prefix, names, rejected }
        }
        _ => match rejected.remove(&own) {
            Some(why) => Place::Unfit(format!("the record of this node is unusable: {why}")),
            None => Place::Unfit("the pod prefix in the record of this node is damaged".to_owned()),
        },
    }
}

/// The routes of the mesh would take the packets to such an address.
fn inside(networks: Networks, addresses: &[IpAddr]) -> Option<String> {
    let overlap = addresses.iter().find_map(|address| {
        let IpAddr::V4(v4) = address else { return None };
        Some((address, networks.with(*v4)?))
    });
    overlap.map(|(address, network)| {
        format!(
            "the address {address} of this node is in {network}, which Kubernetes uses for pods \
             and Services: give the machine an address outside of it"
        )
    })
}

/// The addresses of pods, and their ways between nodes, are of IPv4.
fn without_ipv4(addresses: &[IpAddr]) -> Option<String> {
    let first = addresses.first().filter(|_| !addresses.iter().any(IpAddr::is_ipv4))?;
    Some(format!(
        "the address {first} of this node is one of IPv6, and pods and Services have IPv4 alone: \
         give the machine an address of IPv4, by DHCP or first in its parameters"
    ))
}

/// Every node with a place in the mesh. One whose record cannot be read has none.
fn members(nodes: &Nodes) -> BTreeMap<NodeId, Member> {
    let up = nodes.iter().filter(|(_, node)| node.state() == v1::NodeState::Up);
    up.filter_map(|(id, node)| Some((*id, member(node)?))).collect()
}

/// The place of a node; `None` where its record cannot be read.
pub(super) fn member(node: &v1::NodeInfo) -> Option<Member> {
    let network = node.cluster_network.as_ref()?;
    let key = network.wireguard_public_key.as_slice().try_into().ok()?;
    let address = node.status.as_ref().and_then(|status| status.external_address.parse().ok());
    Some(Member { key: PublicKey::new(key)?, prefix: network.pod_prefix.parse().ok()?, address })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::samples::{OWN, id, info, key, nodes, seen};

    #[test]
    fn a_node_without_ipv4_has_no_place() {
        let six = "2001:db8::1".parse().unwrap();
        let (networks, known) = (Networks::default(), nodes(&[1]));
        let seen = |addresses: &[IpAddr]| place(id(1), key(1), networks, addresses, Some(&known));
        let Place::Unfit(cause) = seen(&[six]) else { panic!("it has IPv6 alone") };
        assert!(
            cause.starts_with("the address 2001:db8::1 of this node is one of IPv6"),
            "{cause}"
        );
        assert!(matches!(seen(&[six, OWN[0]]), Place::Mesh { .. }));
        assert!(matches!(seen(&[]), Place::Mesh { .. }), "no address yet");
    }

    #[test]
    fn a_node_waits_until_its_record_has_prefix_and_key() {
        let waits = |place| matches!(place, Place::Waiting(_));
        let networks = Networks::default();
        assert!(waits(place(id(1), key(1), networks, &OWN, None)));
        assert!(waits(seen(&nodes(&[2]))));
        let mut all = nodes(&[1, 2]);
        all.get_mut(&id(1)).unwrap().cluster_network.as_mut().unwrap().wireguard_public_key.clear();
        assert!(waits(seen(&all)));
        // Another key in the record is one of an earlier disk.
        assert!(waits(place(id(1), key(9), networks, &OWN, Some(&nodes(&[1])))));
        let Place::Mesh { mesh, prefix, names, rejected } = seen(&nodes(&[1, 2])) else {
            panic!("it has everything")
        };
        assert_eq!(prefix.to_string(), "10.192.1.0/24");
        assert_eq!(mesh.peers.keys().collect::<Vec<_>>(), [&key(2)]);
        assert_eq!(names[&key(2)], id(2));
        assert!(rejected.is_empty());
    }

    #[test]
    fn nodes_without_a_place_and_removed_nodes_are_no_peers() {
        let mut all = nodes(&[1, 2, 3, 4, 5]);
        all.get_mut(&id(2)).unwrap().set_state(v1::NodeState::Decommissioned);
        all.get_mut(&id(3)).unwrap().cluster_network = None;
        let network = |node| v1::ClusterNetwork { ..info(node).cluster_network.unwrap() };
        all.get_mut(&id(4)).unwrap().cluster_network =
            Some(v1::ClusterNetwork { pod_prefix: "10.192.4/24".to_owned(), ..network(4) });
        all.get_mut(&id(5)).unwrap().cluster_network =
            Some(v1::ClusterNetwork { wireguard_public_key: vec![5; 31], ..network(5) });
        let Place::Mesh { mesh, .. } = seen(&all) else { panic!("it has a mesh") };
        assert!(mesh.peers.is_empty(), "{mesh:?}");
    }

    #[test]
    fn a_node_inside_of_the_networks_of_kubernetes_says_so() {
        let addresses = [OWN[0], "10.224.9.9".parse().unwrap()];
        let known = nodes(&[1]);
        let seen = |networks| place(id(1), key(1), networks, &addresses, Some(&known));
        let default = Networks::default();
        let Place::Unfit(cause) = seen(default) else { panic!("it overlaps") };
        assert!(cause.starts_with("the address 10.224.9.9 of this node is in 10.224.0.0/16"));
        // The network of pods is the default one, since the record is of it.
        let chosen = Networks { services: "172.24.0.0/16".parse().unwrap(), ..default };
        let Place::Mesh { mesh, .. } = seen(chosen) else { panic!("the address is in no network") };
        assert_eq!(mesh.routes, [chosen.pods, chosen.services]);
    }

    #[test]
    fn a_record_that_overlaps_another_is_reported_by_its_own_node() {
        let mut all = nodes(&[1, 2]);
        all.get_mut(&id(2)).unwrap().cluster_network.as_mut().unwrap().pod_prefix =
            "10.192.1.0/24".to_owned();
        let Place::Unfit(cause) = seen(&all) else { panic!("it overlaps") };
        assert!(cause.ends_with(&format!("its pod prefix overlaps that of {}", id(2))), "{cause}");
    }
}
