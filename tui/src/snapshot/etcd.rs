//! The etcd cluster, as this node's member sees it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// The etcd cluster as this node sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Etcd {
    /// This member's standing as on the serial line: `starting learner voter stopped`.
    pub state: String,
    /// etcd's version.
    pub version: String,
    /// Every member, this one included.
    pub members: Vec<Member>,
    /// The raft term.
    pub term: u64,
    /// The last raft index that this member knows.
    pub index: u64,
    /// The last raft index that this member has applied.
    pub applied: u64,
    /// Bytes of the database file.
    pub db_size: u64,
    /// Bytes of it that are in use; the rest is freed by defragmentation.
    pub db_used: u64,
    /// Bytes that the database may have; zero if not known.
    pub db_quota: u64,
    /// Alarms in force, for example `NOSPACE`, with the member where that matters.
    pub alarms: Vec<String>,
    /// Whether a majority of the voters answers each other, as far as this member sees:
    /// it knows the leader.
    pub quorum: bool,
    /// How many more voters may fail before the cluster stops; `None` without a
    /// quorum, or where it is not known of every voter whether it answers.
    pub survives: Option<u32>,
    /// The recent past of this member; empty before its first sample.
    pub past: History,
    /// The snapshots of etcd on the disk of this node, once it has looked.
    pub snapshots: Option<Snapshots>,
    /// Where they go outside of the cluster, while this node sends them.
    pub bucket: Option<Bucket>,
}

/// The place outside of the cluster where snapshots of etcd go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bucket {
    /// Its URL.
    pub url: String,
    /// The newest snapshot there, once that is known.
    pub newest: Option<Taken>,
    /// The reason to wait, without a problem.
    pub waits_for: Option<String>,
    /// Why snapshots cannot be sent, and the remedy.
    pub problem: Option<String>,
    /// For how long they cannot be sent, if that is known.
    #[serde(with = "time::optional")]
    pub failing: Option<Duration>,
}

/// The snapshots of etcd that a node keeps on its own disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshots {
    /// How many are whole and checked.
    pub kept: u64,
    /// The newest of them.
    pub newest: Option<Taken>,
    /// Why the last attempt failed, or which files among them do not count.
    pub problem: Option<String>,
}

/// A snapshot that was taken and checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Taken {
    /// How long ago.
    #[serde(with = "time")]
    pub age: Duration,
    /// Bytes of the file.
    pub bytes: u64,
    /// The revision of etcd in it.
    pub revision: u64,
}

/// The recent past of a member. Each list has the newest sample last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    /// Time between two samples.
    #[serde(with = "time")]
    pub pace: Duration,
    /// Mean time of a commit to the disk, in microseconds; zero without one.
    pub commit: Vec<u64>,
    /// Changes of the leader.
    pub elections: Vec<u64>,
    /// Bytes of the database file.
    pub db_size: Vec<u64>,
}

impl Etcd {
    /// Whether this node's member takes part, so that it knows of the others.
    pub(crate) fn takes_part(&self) -> bool {
        matches!(self.state.as_str(), "voter" | "learner")
    }
}

/// A member of the etcd cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// Its name, which is its node ID; empty if it never started.
    pub name: String,
    /// Its member ID.
    pub id: u64,
    /// Where its peers reach it.
    pub url: String,
    /// Voter or learner.
    pub standing: MemberStatus,
    /// Whether it is the leader.
    pub leader: bool,
    /// Whether it is this node.
    pub own: bool,
    /// Whether it answers, once it was asked.
    pub answers: Option<bool>,
    /// Entries of the log that it has not applied yet, if that is known.
    pub lag: Option<u64>,
    /// How long a question to it and its answer take, in microseconds, if that
    /// was measured.
    pub round_trip: Option<u64>,
    /// Bytes of its database file, if that is known.
    pub db_size: Option<u64>,
    /// The numbers of the members that it reaches, if its node knows that of each.
    pub reaches: Option<Vec<u64>>,
}

/// The rights of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberStatus {
    /// Counts for the quorum.
    #[default]
    Voter,
    /// Receives the log and does not vote yet.
    Learner {
        /// How much of the leader's log it has, in percent, if that is known.
        caught_up: Option<u8>,
    },
}
