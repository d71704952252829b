//! What every node takes the others for: the words that leader and member share.
//!
//! The leader judges by them, members hear and show by them. Whoever tells of nodes
//! (`curator`, `liaison`) and whoever only listens meet here, and need not know each
//! other for it.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1;

use crate::identity::NodeId;

/// Every node that this one has heard of.
pub type Nodes = BTreeMap<NodeId, v1::NodeInfo>;

/// Between two heartbeats of a node, unless the leader says otherwise.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// Two may be lost, or a leader elected in between.
pub const LATE: Duration = HEARTBEAT.saturating_mul(3);

/// Whether a node with these roles is to run a member of etcd, and a curator beside it.
#[must_use]
pub fn is_consensus_member(roles: Option<&v1::NodeRoles>) -> bool {
    roles.is_some_and(|roles| roles.consensus_member.is_some())
}
