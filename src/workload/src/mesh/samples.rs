//! The records of nodes that tests of the mesh have in common.

use std::net::{IpAddr, Ipv4Addr};

use polis_proto::v1;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};
use polis_wire::pod_network::Networks;

use super::key::PublicKey;
use super::records::{Place, place};

/// The addresses of the node 1.
pub(super) const OWN: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::new(10, 0, 2, 1))];

pub(super) fn id(node: u8) -> NodeId {
    NodeId::from_public_key(&[node; 32])
}

pub(super) fn key(node: u8) -> PublicKey {
    PublicKey::new([node; 32]).unwrap()
}

/// The record of a worker with a place in the mesh.
pub(super) fn info(node: u8) -> v1::NodeInfo {
    v1::NodeInfo {
        id: id(node).to_string(),
        state: v1::NodeState::Up.into(),
        roles: Some(Role::record(&[Role::KubernetesWorker])),
        labels: [("disk".to_owned(), "large".to_owned())].into(),
        status: Some(v1::NodeStatus {
            external_address: format!("10.0.2.{node}"),
            ..Default::default()
        }),
        cluster_network: Some(v1::ClusterNetwork {
            wireguard_public_key: vec![node; 32],
            pod_prefix: format!("10.192.{node}.0/24"),
        }),
        ..Default::default()
    }
}

pub(super) fn nodes(numbers: &[u8]) -> Nodes {
    numbers.iter().map(|node| (id(*node), info(*node))).collect()
}

/// The place of the node 1 in these records.
pub(super) fn seen(nodes: &Nodes) -> Place {
    place(id(1), key(1), Networks::default(), &OWN, Some(nodes))
}
