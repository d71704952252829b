//! The nodes of the cluster, as the curator's leader reports them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::etcd::MemberStatus;
use super::time;

/// The nodes of the cluster, as far as this one knows them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nodes {
    /// Every node, in order of their IDs.
    pub nodes: Vec<Node>,
    /// The node ID of the curator's leader, if there is one.
    pub leader: Option<String>,
    /// The time without contact, if this is the state from before the node lost its
    /// connection to a curator.
    #[serde(with = "time::optional")]
    pub stale: Option<Duration>,
    /// The age of the last heartbeat at which the node is late: the age of a healthy
    /// one is below it and is not shown.
    #[serde(with = "time::optional")]
    pub late_after: Option<Duration>,
    /// The update of the cluster, while one goes on and a curator runs on this node.
    pub update: Option<Update>,
}

/// An update of the cluster that goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Update {
    /// The new version.
    pub version: String,
    /// How it goes.
    pub state: UpdateState,
    /// Nodes of the plan that run the new version.
    pub done: usize,
    /// All nodes of the plan.
    pub total: usize,
    /// The ID of the node that has its turn, or that did not take the version.
    pub node: Option<String>,
    /// When its turn began, or it failed: a time of day.
    pub since: Option<String>,
    /// What it waits for, as far as this node knows; after a failure its cause.
    pub waits_for: String,
}

/// How an update goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateState {
    /// The bundle is on its way.
    Loading,
    /// Nodes take turns.
    Running,
    /// An owner holds it.
    Paused,
    /// A node did not take the version.
    Failed,
    /// Of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The node ID.
    pub id: String,
    /// An operator's name for it.
    pub name: Option<String>,
    /// The address that others reach it by.
    pub address: Option<String>,
    /// How far it has come on its way into the cluster, or out of it.
    pub state: NodeState,
    /// Whether its heartbeat is there.
    pub health: Health,
    /// Time since its last heartbeat, if the node is late.
    #[serde(with = "time::optional")]
    pub heartbeat: Option<Duration>,
    /// Its roles in the cluster, in words.
    pub roles: Vec<String>,
    /// The state of its etcd member, if it has one.
    pub etcd: Option<MemberStatus>,
    /// Labels, as `key=value`.
    pub labels: Vec<String>,
    /// The fingerprint of its key in words, to compare before it is approved.
    pub words: Option<String>,
    /// The version of its system, if it has reported one.
    pub version: Option<String>,
    /// How its clock stood in a heartbeat: set by a source, and how far from it.
    pub clock: Option<String>,
    /// Whether it voted in the former cluster, from whose snapshot this one was founded
    /// again.
    pub former_voter: bool,
    /// Whether it is the curator's leader.
    pub leader: bool,
    /// Whether it is this node.
    pub own: bool,
}

/// How far a node has come on its way into the cluster, or out of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Waits for approval by a person.
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
    /// Its heartbeat is recent.
    Healthy,
    /// Its last heartbeat is older than it may be.
    Late,
    /// The leader is too new to know.
    #[default]
    #[serde(other)]
    Unknown,
}
