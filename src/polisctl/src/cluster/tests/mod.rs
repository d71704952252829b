//! Tests of what the commands show.

mod clusters;
mod nodes;
mod status;

use polis_proto::v1;
use polis_wire::identity::NodeId;

fn id(digit: u8) -> String {
    NodeId::from_public_key(&[digit; 32]).to_string()
}

fn node(digit: u8, state: v1::NodeState, health: v1::NodeHealth) -> v1::NodeInfo {
    let key = [digit; 32];
    v1::NodeInfo {
        id: id(digit),
        public_key: key.to_vec(),
        state: state.into(),
        roles: Some(v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        }),
        status: Some(v1::NodeStatus {
            external_address: format!("192.0.2.{digit}"),
            version: "0.1.0".to_owned(),
            storage_kind: v1::StorageKind::Authenticated.into(),
            ..Default::default()
        }),
        health: health.into(),
        heartbeat_age_ms: 1200,
        registered_at: 1_700_000_000,
        ..Default::default()
    }
}

fn info() -> v1::GetClusterInfoResponse {
    v1::GetClusterInfoResponse {
        ca_certificate: b"abc".to_vec(),
        configuration: Some(v1::ClusterConfiguration {
            cluster_domain: "cluster.internal".to_owned(),
            tpm_mode: v1::cluster_configuration::TpmMode::BestEffort.into(),
            ..Default::default()
        }),
        cluster_directory: Some(v1::ClusterDirectory {
            nodes: vec![v1::cluster_directory::Node {
                id: "polis-01".to_owned(),
                addresses: vec!["192.0.2.1".to_owned()],
            }],
        }),
        leader: "polis-01".to_owned(),
        nodes_up: 2,
        nodes_new: 1,
        ..Default::default()
    }
}

fn consensus() -> v1::ConsensusStatus {
    let member = |digit: u8, learner: bool, answers: bool| v1::ConsensusMember {
        id: digit.into(),
        node_id: id(digit),
        peer_urls: vec![format!("https://polis-0{digit}:7834")],
        learner,
        answers,
        applied_index: if digit == 1 { 420 } else { 0 },
        db_bytes: if digit == 1 { 5 << 20 } else { 0 },
        db_used_bytes: if digit == 1 { 1 << 20 } else { 0 },
        index: if digit == 1 { 421 } else { 0 },
        leader: if digit == 1 { 1 } else { 0 },
        told_age_ms: if digit == 1 { 0 } else { -1 },
        reach: None,
        snapshots: None,
    };
    v1::ConsensusStatus {
        cluster_id: 0xabc,
        leader: 1,
        term: 4,
        revision: 77,
        quota_bytes: 2 << 30,
        members: vec![member(1, false, true), member(2, true, true)],
        ..Default::default()
    }
}
