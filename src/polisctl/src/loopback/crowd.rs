//! Records of other nodes, members and users with the longest texts that a cluster accepts:
//! they take the most room on a screen.

use polis_proto::v1;
use polis_wire::rpc::testing::{key, node_id};

/// The seeds of their keys.
const OTHERS: [u8; 4] = [2, 3, 4, 5];

/// The longest name of a node.
fn name(seed: u8) -> String {
    format!("{}-{seed}", "database-of-the-warehouse".repeat(3)).chars().skip(14).collect()
}

/// An address of a group: a connection to it fails at once, where one to a node that is not
/// there may take seconds.
fn address(seed: u8) -> String {
    format!("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff{seed}")
}

/// Where their management ports are, as a context names them.
pub(in crate::loopback) fn ports() -> Vec<String> {
    OTHERS.map(|seed| format!("[{}]:7839", address(seed))).into()
}

/// One node that is late, one former voter on its way out, one that waits and one that was removed.
pub(in crate::loopback) fn nodes() -> Vec<v1::NodeInfo> {
    OTHERS.into_iter().map(node).collect()
}

fn node(seed: u8) -> v1::NodeInfo {
    use v1::{NodeHealth, NodeState};
    let (state, health) = match seed {
        2 | 3 => (NodeState::Up, NodeHealth::Late),
        4 => (NodeState::New, NodeHealth::Absent),
        _ => (NodeState::Decommissioned, NodeHealth::Absent),
    };
    let roles = v1::NodeRoles {
        consensus_member: Some(v1::node_roles::ConsensusMember {}),
        kubernetes_controller: Some(v1::node_roles::KubernetesController {}),
        kubernetes_worker: Some(v1::node_roles::KubernetesWorker {}),
    };
    let status = v1::NodeStatus {
        external_address: address(seed),
        version: "0.1.0-rc.12+20261123".to_owned(),
        workload: "failed: the API server waits for etcd, which has no leader".to_owned(),
        drain: "drained".to_owned(),
        workload_crash_loop: "kubelet ends again and again: swap is on, and it needs it off"
            .to_owned(),
        ..Default::default()
    };
    v1::NodeInfo {
        id: node_id(seed).to_string(),
        public_key: key(seed).verifying_key().to_bytes().to_vec(),
        state: state.into(),
        health: health.into(),
        heartbeat_age_ms: 86_400_000 * 400,
        registered_at: 1_700_000_000,
        roles: Some(roles),
        labels: [("topology.polis.internal/rack".to_owned(), "r".repeat(63))].into(),
        leaving: seed == 3,
        former_voter: seed == 3,
        recovery_key_unsaved: true,
        name: name(seed),
        status: Some(status),
        ..Default::default()
    }
}

/// A member of etcd for each, one of them learning; none answers.
pub(in crate::loopback) fn members() -> Vec<v1::ConsensusMember> {
    let member = |seed: u8| {
        v1::ConsensusMember {
        id: u64::MAX - u64::from(seed),
        node_id: node_id(seed).to_string(),
        peer_urls: vec![format!("https://[{}]:7834", address(seed))],
        learner: seed == 3,
        index: u64::MAX,
        applied_index: u64::MAX,
        db_bytes: 2 << 30,
        db_used_bytes: 1 << 30,
        told_age_ms: 86_400_000,
        snapshots: Some(v1::LocalSnapshots {
            kept: 24,
            newest_at: 1_700_000_000,
            newest_bytes: 1 << 30,
            newest_revision: u64::MAX,
            problem: "too little room for a snapshot: 4224 MiB of the data partition must be free \
                      for a snapshot, so that etcd keeps room for itself, and 300 MiB are; a larger \
                      disk or fewer volumes make room"
                .to_owned(),
        }),
        ..Default::default()
    }
    };
    [2, 3].map(member).into()
}

/// A user with the longest name.
pub(in crate::loopback) fn users() -> Vec<v1::User> {
    let public_key = key(OTHERS[0]).verifying_key().to_bytes().to_vec();
    let role = v1::UserRole::Operator.into();
    vec![v1::User { name: "a".repeat(63), role, public_key, revoked: true }]
}

/// A machine that the leader turned away.
pub(in crate::loopback) fn refused() -> Vec<v1::RefusedRegistration> {
    vec![v1::RefusedRegistration {
        public_key: key(OTHERS[3]).verifying_key().to_bytes().to_vec(),
        address: address(OTHERS[3]),
        reason: "ticket-rotated".to_owned(),
        count: u64::from(u32::MAX),
        last_at: 1_700_000_000,
    }]
}
