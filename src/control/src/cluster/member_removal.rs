//! The removal of an etcd member from the disk of its node, after the cluster has removed the
//! member from etcd.
//!
//! ```text
//! leaving written -> etcd's data, keys, certificates removed -> voter removed -> leaving removed
//! ```
//!
//! A half-finished removal looks like a disk that lost a member, which is an error for an
//! operator. So the node first writes down that it leaves, and the next boot finishes that
//! before it looks for a member.
//!
//! Invariants:
//! - `leaving` is written only after a leader has answered that the member is out of etcd:
//!   a boot that finds the file may remove the remains.
//! - A member that has voted is out only if the cluster that it voted in answers that it no
//!   longer has its number: numbers never come again, names and places do. A cluster that
//!   was restored from a snapshot is another one, and may lack data that is on this disk:
//!   only an owner gives that data up, by taking the role away there.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use prost::Message as _;
use tonic::Status;

use crate::consensus::{self, Peer};
use polis_base::files::{self, Data};
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::{Client, Repeat};

/// How long a member of etcd may be without a leader before it asks a curator whether it is
/// still a member: a cluster that is up needs one election, which takes seconds. To ask too
/// early costs a few calls.
pub const TRUST: Duration = Duration::from_secs(8);

/// The time between two further questions.
pub const RETRY: Duration = Duration::from_secs(10);

/// The member as which this node has voted, and its cluster: the content of the file `voter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vote {
    /// The number of the cluster of etcd.
    pub cluster: u64,
    /// The number of the member.
    pub member: u64,
}

impl Vote {
    /// The stored form.
    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        [self.cluster.to_be_bytes(), self.member.to_be_bytes()].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (cluster, member) = bytes.split_first_chunk()?;
        let member = u64::from_be_bytes(member.try_into().ok()?);
        Some(Self { cluster: u64::from_be_bytes(*cluster), member })
    }
}

/// A leader's answer about the member of etcd on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Membership {
    /// The member is in its etcd, or the leader does not know.
    Member,
    /// The member is not in its etcd any more.
    Out,
    /// The leader has another etcd than the one in which the member has voted.
    Elsewhere,
}

/// Asks a leader what became of the member of this node. `voter` is the file of its vote,
/// if it has one.
///
/// # Errors
///
/// The errors of [`Client::call`].
pub async fn membership(
    client: &Client,
    own: NodeId,
    voter: Option<&[u8]>,
) -> Result<Membership, Status> {
    let call = |channel| async move {
        let request = v1::GetConsensusStatusRequest {};
        Ok(CuratorClient::new(channel).get_consensus_status(request).await?.into_inner())
    };
    let reported = client.call(Repeat::Allowed, call).await?;
    Ok(classify(own, voter, &reported))
}

/// The meaning of a leader's answer `reported` for the member of this node.
fn classify(own: NodeId, voter: Option<&[u8]>, reported: &v1::ConsensusStatus) -> Membership {
    let out = |out| if out { Membership::Out } else { Membership::Member };
    // An empty list is ignored; so is the list of a leader whose own etcd does not answer
    // at that moment, which sends cluster 0.
    if reported.members.is_empty() || reported.cluster_id == 0 {
        return Membership::Member;
    }
    let Some(voter) = voter else {
        // The member has not promised anything yet.
        let (name, url) = (own.to_string(), Peer::of(own).url());
        let is_own =
            |one: &v1::ConsensusMember| one.node_id == name || one.peer_urls.contains(&url);
        return out(!reported.members.iter().any(is_own));
    };
    let Some(vote) = Vote::read(voter) else { return Membership::Member };
    if reported.cluster_id != vote.cluster {
        return Membership::Elsewhere;
    }
    out(!reported.members.iter().any(|one| one.id == vote.member))
}

/// Removes the member of etcd from the disk. Blocks.
///
/// # Errors
///
/// The first part that cannot be removed; the next boot goes on.
pub fn remove_member(data: &Data) -> Result<(), files::Error> {
    data.node.leaving.write(b"")?;
    go_on(data)
}

/// Continues a removal that was cut off, if there was one; returns whether there was. Blocks.
pub(super) fn finish(data: &Data) -> Result<bool, files::Error> {
    let begun = data.node.leaving.read()?.is_some();
    if begun {
        go_on(data)?;
    }
    Ok(begun)
}

fn go_on(data: &Data) -> Result<(), files::Error> {
    consensus::forget(&data.etcd)?;
    // The first node of a cluster may have no list yet, and without one it would look for
    // its member.
    if data.node.roles.read()?.is_none() {
        data.node.roles.write(&v1::NodeRoles::default().encode_to_vec())?;
    }
    data.node.voter.remove()?;
    data.node.leaving.remove()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_out_only_where_the_cluster_that_it_voted_in_says_so() {
        let own = NodeId::from_public_key(&[1; 32]);
        let other = NodeId::from_public_key(&[2; 32]);
        let reported = |cluster_id, members: &[(u64, NodeId)]| v1::ConsensusStatus {
            cluster_id,
            members: members
                .iter()
                .map(|(id, node)| v1::ConsensusMember {
                    id: *id,
                    node_id: node.to_string(),
                    peer_urls: vec![Peer::of(*node).url()],
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        let vote = Vote { cluster: 7, member: 70 }.to_bytes();
        let classify =
            |voter: Option<&[u8]>, reported: &v1::ConsensusStatus| classify(own, voter, reported);
        for voter in [None, Some(&vote[..]), Some(&b""[..])] {
            assert_eq!(
                classify(voter, &reported(7, &[])),
                Membership::Member,
                "an empty list is ignored"
            );
            assert_eq!(
                classify(voter, &reported(7, &[(70, own), (71, other)])),
                Membership::Member
            );
            let nobody = classify(voter, &reported(0, &[(71, other)]));
            assert_eq!(nobody, Membership::Member, "an answer without a cluster is ignored");
        }
        assert_eq!(classify(Some(&vote), &reported(7, &[(71, other)])), Membership::Out);
        // The role was taken and given again: another member has its name.
        assert_eq!(classify(Some(&vote), &reported(7, &[(72, own), (71, other)])), Membership::Out);
        // Restored from a snapshot, with or without the member.
        for members in [&[(71, other)][..], &[(70, own), (71, other)]] {
            assert_eq!(classify(Some(&vote), &reported(8, members)), Membership::Elsewhere);
        }
        let nobody = classify(Some(b""), &reported(7, &[(71, other)]));
        assert_eq!(nobody, Membership::Member, "its own member is unknown");
        // A member that has never voted is identified by its name.
        assert_eq!(classify(None, &reported(8, &[(71, other)])), Membership::Out);
    }
}
