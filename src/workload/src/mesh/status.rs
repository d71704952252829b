//! The state of the mesh for the rest of the node: event values.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::pod_network::Prefix;

use super::key::PublicKey;
use super::plan::Rejected;

/// The published status of the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// How far it is.
    pub stage: Stage,
    /// The other nodes in it.
    pub peers: BTreeMap<NodeId, PeerStatus>,
    /// Nodes that are left out, with the reason of each.
    pub rejected: BTreeMap<NodeId, Rejected>,
}

/// How far the mesh of a node is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// The node has no role that asks for it.
    #[default]
    Absent,
    /// It waits: what for.
    Waiting(&'static str),
    /// The kernel has all of it.
    Ready,
    /// It cannot be made: why.
    Failed(String),
}

/// Another node, as this one reaches it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerStatus {
    /// Where packets to it go; `None` while its address is unknown.
    pub endpoint: Option<SocketAddr>,
    /// When the two last agreed on keys, by the clock of this machine; `None` if they never
    /// did. They do so every two minutes while packets flow, and not at all without packets.
    pub handshake: Option<SystemTime>,
}

impl PeerStatus {
    /// The age of the last handshake; zero for one that the clock says is to come.
    #[must_use]
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        self.handshake.map(|at| now.duration_since(at).unwrap_or_default())
    }
}

/// The event values of the mesh. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// The status.
    pub status: watch::Sender<Status>,
    /// The public half of the own key, once there is one; `None` without the role.
    pub key: watch::Sender<Option<PublicKey>>,
    /// The addresses of this node's pods, once the kernel routes those of the others; `None`
    /// without the role.
    pub prefix: watch::Sender<Option<Prefix>>,
    /// The places of the nodes of the last boot, while this one has reached no leader in this
    /// boot.
    pub last: watch::Sender<Option<Arc<Nodes>>>,
}

/// Writes a value, and wakes its readers only if it is another one.
pub(super) fn publish<T: PartialEq>(value: &watch::Sender<T>, new: T) {
    value.send_if_modified(|known| {
        let changed = *known != new;
        *known = new;
        changed
    });
}
