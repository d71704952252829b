//! The nodes of the cluster, as the curator's leader tells them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::etcd::Standing;
use super::time;

/// The nodes of the cluster, as far as this one knows them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nodes {
    /// Every node, in order of their IDs.
    pub nodes: Vec<Node>,
    /// The node ID of the curator's leader, if there is one.
    pub leader: Option<String>,
    /// For how long nothing was heard, if this is what was known before the
    /// node lost its way to a curator.
    #[serde(with = "time::optional")]
    pub stale: Option<Duration>,
    /// How old the last heartbeat of a node gets before the node is late: so old at
    /// most is that of a healthy one, whose age is not told.
    #[serde(with = "time::optional")]
    pub late_after: Option<Duration>,
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The node ID.
    pub id: String,
    /// The address that others reach it by.
    pub address: Option<String>,
    /// How far it has come on its way into the cluster, or out of it.
    pub state: NodeState,
    /// Whether its heartbeat is there.
    pub health: Health,
    /// Time since its last heartbeat, where that is told: of one that is late.
    #[serde(with = "time::optional")]
    pub heartbeat: Option<Duration>,
    /// What it does for the cluster, in words.
    pub roles: Vec<String>,
    /// What its etcd member is, if it has one.
    pub etcd: Option<Standing>,
    /// Labels, as `key=value`.
    pub labels: Vec<String>,
    /// The fingerprint of its key in words, to compare before it is approved.
    pub words: Option<String>,
    /// The version of its system, if it has told.
    pub version: Option<String>,
    /// Whether it is the curator's leader.
    pub leader: bool,
    /// Whether it is this node.
    pub own: bool,
}

/// How far a node has come on its way into the cluster, or out of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Has asked to be let in: a person decides.
    New,
    /// Was approved, and has not entered yet.
    Standby,
    /// A member.
    Up,
    /// Was removed; never a member again.
    Decommissioned,
    /// Not known, or of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Whether a node's heartbeat is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Heard of lately.
    Healthy,
    /// Not heard of for longer than its heartbeat may take.
    Late,
    /// The leader is too new to know.
    #[default]
    #[serde(other)]
    Unknown,
}
