//! The published status of this node's etcd member.

use std::collections::BTreeSet;
use std::fmt;

use polis_bundle::ClusterVersion;
use polis_proto::v1;

use super::client::Clients;
use super::snapshots::Snapshots;
use super::{PEER_PORT, Peer};
use polis_wire::identity::NodeId;

/// etcd's number for a member, fixed for the member's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// In etcd's own notation: hexadecimal.
impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// The role of this member among the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberStatus {
    /// Not serving yet.
    #[default]
    Starting,
    /// Copying what the voters have; does not count for a majority.
    Learner {
        /// How many entries of the log are still to come.
        behind: u64,
    },
    /// A full member.
    Voter,
    /// Ended; the supervisor starts it again.
    Stopped,
}

impl MemberStatus {
    /// The word on the serial line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Learner { .. } => "learner",
            Self::Voter => "voter",
            Self::Stopped => "stopped",
        }
    }
}

/// One member of the cluster, this one or another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// etcd's number for it.
    pub id: MemberId,
    /// The node ID; empty until the member has started for the first time.
    pub name: String,
    /// Where its peers reach it.
    pub peer_url: String,
    /// Whether it is a learner.
    pub learner: bool,
}

impl Member {
    /// Whether it is the member of `id`, which is reached at `peer`. A member that has not
    /// started yet has no name: its address alone identifies it.
    #[must_use]
    pub fn is_of(&self, id: NodeId, peer: &Peer) -> bool {
        self.name == id.to_string() || self.peer_url == peer.url()
    }

    /// The node of the member. The member's name shows it, once the member has started;
    /// before that, its peer URL does: see [`Peer::of`].
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        let place =
            || self.peer_url.strip_prefix("https://")?.strip_suffix(&format!(":{PEER_PORT}"));
        let named = if self.name.is_empty() { place()? } else { self.name.as_str() };
        named.parse().ok()
    }

    /// The name that people see.
    #[must_use]
    pub fn called(&self) -> &str {
        if self.name.is_empty() { &self.peer_url } else { &self.name }
    }
}

/// An alarm of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Alarm {
    /// The database reached its quota: writes are refused.
    NoSpace,
    /// Members have different data: writes are refused. etcd 3.5 does not say whose is wrong.
    Corrupt,
}

impl fmt::Display for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSpace => "NOSPACE",
            Self::Corrupt => "CORRUPT",
        })
    }
}

/// This node's member as an event value. The console prints it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Its role among the others.
    pub standing: MemberStatus,
    /// Its number; unknown until it first served.
    pub member: Option<MemberId>,
    /// The number of its cluster.
    pub cluster: Option<u64>,
    /// Where its peers reach it.
    pub peer_url: String,
    /// etcd's version.
    pub version: String,
    /// The cluster version, once this member has known it in this start of the machine.
    pub cluster_version: Option<ClusterVersion>,
    /// The leader, if there is one.
    pub leader: Option<MemberId>,
    /// The number of elections so far.
    pub term: u64,
    /// The newest entry of the log that this member knows.
    pub index: u64,
    /// The newest entry that is in the database.
    pub applied: u64,
    /// The number of changes to the data.
    pub revision: u64,
    /// Bytes of the database file.
    pub db_size: u64,
    /// Bytes of it that are in use; the rest is freed by defragmentation.
    pub db_used: u64,
    /// Bytes at which writes are refused.
    pub db_quota: u64,
    /// The alarms that are raised.
    pub alarms: Vec<Alarm>,
    /// Every member, in order of their numbers.
    pub members: Vec<Member>,
    /// The way to the member while it serves.
    pub clients: Option<Clients>,
    /// Whether other members may be added; see [`super::Members::add`].
    pub ready_to_grow: bool,
    /// Whether etcd ended because the others removed this member, and has had no contact
    /// with a leader since.
    pub removed: bool,
    /// SHA-256 of the file with the authorities that it trusts, once its own certificate is of
    /// the one that signs.
    pub authorities: Option<[u8; 32]>,
    /// The same when etcd was started: it reads that file only then.
    pub authorities_at_start: Option<[u8; 32]>,
    /// The snapshots on the disk of this node, once it has looked.
    pub snapshots: Option<Snapshots>,
}

impl Status {
    /// Whether this node has, and is to have, no member.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.peer_url.is_empty()
    }

    /// How many members vote.
    #[must_use]
    pub fn voters(&self) -> usize {
        self.members.iter().filter(|member| !member.learner).count()
    }

    /// The place of this member among the voters, from zero, and their number.
    #[must_use]
    pub fn place(&self) -> (u64, u64) {
        let voters = self.members.iter().filter(|member| !member.learner);
        let before = voters.clone().filter(|voter| Some(voter.id) < self.member).count();
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        (count(before), count(voters.count()).max(1))
    }

    /// How many voters may fail before writes stop, if all of them are well.
    #[must_use]
    pub fn tolerates(&self) -> usize {
        self.voters().saturating_sub(1) / 2
    }

    /// How many more voters may fail before writes stop, if these members answer.
    #[must_use]
    pub fn spare(&self, answering: &BTreeSet<MemberId>) -> usize {
        let voters = self.members.iter().filter(|member| !member.learner);
        let answer = voters.filter(|member| answering.contains(&member.id)).count();
        answer.saturating_sub(self.voters() / 2 + 1)
    }

    /// The status line of this member, once it serves.
    #[must_use]
    pub fn figures(&self) -> Option<v1::ConsensusFigures> {
        let serves = match self.standing {
            MemberStatus::Learner { .. } | MemberStatus::Voter => self.member.is_some(),
            MemberStatus::Starting | MemberStatus::Stopped => false,
        };
        serves.then(|| v1::ConsensusFigures {
            leader: self.leader.map_or(0, |leader| leader.0),
            index: self.index,
            applied_index: self.applied,
            db_bytes: self.db_size,
            db_used_bytes: self.db_used,
            authorities: self.authorities.map_or_else(Vec::new, Vec::from),
            authorities_at_start: self.authorities_at_start.map_or_else(Vec::new, Vec::from),
            snapshots: self.local_snapshots(),
        })
    }

    /// The snapshots on the disk of this node, as it reports them.
    #[must_use]
    pub fn local_snapshots(&self) -> Option<v1::LocalSnapshots> {
        self.snapshots.as_ref().map(Snapshots::message)
    }

    /// The way to etcd, once this member is a voter: a learner answers hardly any request.
    #[must_use]
    pub fn voter(&self) -> Option<&Clients> {
        self.clients.as_ref().filter(|_| self.standing == MemberStatus::Voter)
    }
}

/// Converts etcd's list into our types, in order of the numbers.
pub(super) fn members_of(list: &[etcd_client::Member]) -> Vec<Member> {
    let mut members: Vec<_> = list
        .iter()
        .map(|member| Member {
            id: MemberId(member.id()),
            name: member.name().to_owned(),
            // More than one URL is never set.
            peer_url: member.peer_urls().first().cloned().unwrap_or_default(),
            learner: member.is_learner(),
        })
        .collect();
    members.sort_by_key(|member| member.id);
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_never_started_is_known_by_its_place() {
        let [own, other] = [1, 2].map(|key| NodeId::from_public_key(&[key; 32]));
        let member = |name: &str, peer_url: String| Member {
            id: MemberId(1),
            name: name.to_owned(),
            peer_url,
            learner: true,
        };
        let silent = member("", Peer::of(own).url());
        assert!(silent.is_of(own, &Peer::of(own)) && !silent.is_of(other, &Peer::of(other)));
        assert_eq!(silent.node(), Some(own));
        let moved = member(&own.to_string(), "https://10.0.0.1:7834".to_owned());
        assert!(moved.is_of(own, &Peer::of(own)));
        assert_eq!(moved.node(), Some(own));
        assert_eq!(member("", "https://10.0.0.1:7834".to_owned()).node(), None);
    }
}
