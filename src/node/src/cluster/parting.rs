//! Removes what a member of etcd leaves on its node when the cluster has taken it out.
//!
//! ```text
//! leaving written -> etcd's data, keys, certificates removed -> voter removed -> leaving removed
//! ```
//!
//! Half of it looks like a disk that lost a member, which is an error for a person.
//! So the node first writes down that it leaves, and the next boot finishes that
//! before it looks for a member.
//!
//! Invariants:
//! - `leaving` is written only on the word of a leader that the member is out of etcd:
//!   whoever finds it may remove what is left.
//! - Who has voted is out only if the cluster that it voted in says that it has not
//!   its number any more: numbers never come again, names and places do. A cluster
//!   that was founded again from a snapshot is another one, and may lack what is on
//!   this disk: only an operator, who takes the role away there, has it given up.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use prost::Message as _;
use tonic::Status;

use crate::consensus::{self, Peer};
use polis_base::files::{self, Data};
use polis_wire::identity::NodeId;
use polis_wire::rpc::client::{Client, Repeat};

/// How long a member of etcd may be without a leader before a curator is asked whether
/// it is one still: a cluster that is up takes an election, which is seconds. To ask too
/// early costs a few calls.
pub const TRUST: Duration = Duration::from_secs(8);

/// Between two questions after that.
pub const ASK_AGAIN: Duration = Duration::from_secs(10);

/// As whom this node has voted, and where: what the file `voter` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vote {
    /// The number of the cluster of etcd.
    pub cluster: u64,
    /// The number of the member.
    pub member: u64,
}

impl Vote {
    /// As it is kept.
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

/// What a leader says of the member of etcd that a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Membership {
    /// It is one of its etcd, or nothing is known of it.
    Member,
    /// Its etcd has it no more.
    Out,
    /// The leader has another etcd than the one in which it has voted.
    Elsewhere,
}

/// Asks a leader what became of the member of this node. `voter` is the file of its
/// vote, if it has one.
///
/// # Errors
///
/// What [`Client::call`] fails with.
pub async fn membership(
    client: &Client,
    own: NodeId,
    voter: Option<&[u8]>,
) -> Result<Membership, Status> {
    let call = |channel| async move {
        let request = v1::GetConsensusStatusRequest {};
        Ok(CuratorClient::new(channel).get_consensus_status(request).await?.into_inner())
    };
    let told = client.call(Repeat::Allowed, call).await?;
    Ok(classify(own, voter, &told))
}

/// What a leader that tells `told` says of the member of this node.
fn classify(own: NodeId, voter: Option<&[u8]>, told: &v1::ConsensusStatus) -> Membership {
    let out = |out| if out { Membership::Out } else { Membership::Member };
    // No list is no word; nor is one of a leader whose own etcd does not answer just then,
    // which tells of cluster 0.
    if told.members.is_empty() || told.cluster_id == 0 {
        return Membership::Member;
    }
    let Some(voter) = voter else {
        // It has promised nothing yet.
        let (name, url) = (own.to_string(), Peer::of(own).url());
        let is_own =
            |one: &v1::ConsensusMember| one.node_id == name || one.peer_urls.contains(&url);
        return out(!told.members.iter().any(is_own));
    };
    let Some(vote) = Vote::read(voter) else { return Membership::Member };
    if told.cluster_id != vote.cluster {
        return Membership::Elsewhere;
    }
    out(!told.members.iter().any(|one| one.id == vote.member))
}

/// Removes the member of etcd from the disk. Blocks.
///
/// # Errors
///
/// The first part that cannot be removed; the next boot goes on.
pub fn part(data: &Data) -> Result<(), files::Error> {
    data.node.leaving.write(b"")?;
    go_on(data)
}

/// Goes on with what was cut off, if something was; says whether it was. Blocks.
pub(super) fn finish(data: &Data) -> Result<bool, files::Error> {
    let begun = data.node.leaving.read()?.is_some();
    if begun {
        go_on(data)?;
    }
    Ok(begun)
}

fn go_on(data: &Data) -> Result<(), files::Error> {
    consensus::forget(&data.etcd)?;
    // A founder may have no list yet, and without one it would look for its member.
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
        let told = |cluster_id, members: &[(u64, NodeId)]| v1::ConsensusStatus {
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
            |voter: Option<&[u8]>, told: &v1::ConsensusStatus| classify(own, voter, told);
        for voter in [None, Some(&vote[..]), Some(&b""[..])] {
            assert_eq!(classify(voter, &told(7, &[])), Membership::Member, "no list is no word");
            assert_eq!(classify(voter, &told(7, &[(70, own), (71, other)])), Membership::Member);
            let nobody = classify(voter, &told(0, &[(71, other)]));
            assert_eq!(nobody, Membership::Member, "no cluster is no word");
        }
        assert_eq!(classify(Some(&vote), &told(7, &[(71, other)])), Membership::Out);
        // The role was taken and given: another member has its name.
        assert_eq!(classify(Some(&vote), &told(7, &[(72, own), (71, other)])), Membership::Out);
        // Founded again from a snapshot, with or without it.
        for members in [&[(71, other)][..], &[(70, own), (71, other)]] {
            assert_eq!(classify(Some(&vote), &told(8, members)), Membership::Elsewhere);
        }
        let nobody = classify(Some(b""), &told(7, &[(71, other)]));
        assert_eq!(nobody, Membership::Member, "it does not know who it was");
        // Who has never voted goes by its name.
        assert_eq!(classify(None, &told(8, &[(71, other)])), Membership::Out);
    }
}
