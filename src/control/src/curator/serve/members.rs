//! The members of etcd: changes and shows them, according to the records of nodes.
//!
//! ```text
//! in:   role in the record -> address in the record -> certificate, learner (-> voter)
//!       -> role still in the record, and still the leader? -> what it needs to start
//! ```
//!
//! Invariants:
//! - A node does not start a member if its role was gone by the time that the member was added.
//! - Only a node that may enter waits for the turn to change the members: while another one has
//!   it, no member starts again for a rotation, and no node for an update.
//!
//! What this module does not do: the way out (`departures`).

use std::net::IpAddr;

use polis_proto::v1;
use tokio::sync::{Mutex, MutexGuard};

use super::Lead;
use crate::consensus::Member;
use crate::consensus::client::User;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::nodes;
use crate::curator::state::Request;
use crate::curator::store::Store;
use polis_wire::identity::NodeId;
use polis_wire::pki;

impl Lead {
    /// Makes a node with the role a member; returns what it needs to start.
    pub(super) async fn join_consensus(
        &self,
        id: NodeId,
        address: IpAddr,
    ) -> Result<v1::JoinConsensusResponse, Error> {
        let parts = &self.handlers.0;
        let (_changing, node) = admitted(self.store(), &parts.changing, id).await?;
        let identity = nodes::identity(id, &node)?;
        // The other members must know the address before etcd sends them there.
        let mut status = node.status.unwrap_or_default();
        if status.external_address != address.to_string() {
            status.external_address = address.to_string();
            self.store().change(id, Request::Status(status)).await?;
        }
        let peer = (parts.naming)(id, address);
        let pki = self.fenced(User::EtcdPki)?;
        let invitation = parts.members.add(&identity, &peer, pki).await?;
        // That may have taken long, and etcd does not ask which curator leads: a member that
        // was added for a deposed leader gets no further than this, and the next leader finds
        // it.
        self.store().confirm_role(id).await?;
        let member = |member: &Member| v1::join_consensus_response::Peer {
            node_id: match member.is_of(id, &peer) {
                true => id.to_string(),
                false => member.name.clone(),
            },
            peer_url: member.peer_url.clone(),
        };
        Ok(v1::JoinConsensusResponse {
            members: invitation.members.iter().map(member).collect(),
            authorities: Some(invitation.authorities.to_message()),
            peer_certificate: invitation.certificate,
            crl: invitation.crl,
        })
    }

    /// The status of etcd from the member beside this curator, with these `members` if
    /// newer ones are known. To be shown: see [`Self::spare`].
    pub(super) async fn consensus_status(
        &self,
        members: Option<Vec<Member>>,
    ) -> v1::ConsensusStatus {
        let parts = &self.handlers.0;
        let answering = parts.members.answering_lately().await;
        let mut status = parts.consensus.borrow().clone();
        status.members = members.unwrap_or(status.members);
        convert::consensus_status(&status, &answering, &parts.heartbeats)
    }

    /// How many more voters may fail before writes stop, for a decision: as of now.
    pub(super) async fn spare(&self) -> u32 {
        let parts = &self.handlers.0;
        let answering = parts.members.answering().await.unwrap_or_default();
        let spare = parts.consensus.borrow().spare(&answering);
        u32::try_from(spare).unwrap_or(u32::MAX)
    }
}

/// The turn to change the members for a node that may enter, and its record.
async fn admitted<'a, S: pki::Store + Clone>(
    store: &Store<S>,
    changing: &'a Mutex<()>,
    id: NodeId,
) -> Result<(MutexGuard<'a, ()>, v1::Node), Error> {
    // Before the wait, too: a node without the role that calls without end would keep the turn
    // from everyone else.
    nodes::may_enter_etcd(&store.node(id).await?)?;
    let turn = changing.lock().await;
    let node = store.node(id).await?;
    nodes::may_enter_etcd(&node)?;
    Ok((turn, node))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polis_wire::pki::memory::Memory;
    use polis_wire::pki::{Store as _, Write};
    use prost::Message as _;
    use tokio::time::timeout;

    use super::*;
    use crate::curator::store::node_key;

    #[tokio::test(start_paused = true)]
    async fn a_node_without_the_role_does_not_wait_for_the_turn_to_change_the_members() {
        let (memory, changing) = (Memory::default(), Mutex::new(()));
        let [worker, voter] = [1, 2].map(|seed| NodeId::from_public_key(&[seed; 32]));
        let member = v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        };
        for (id, roles) in [(worker, None), (voter, Some(member))] {
            let node = v1::Node { state: v1::NodeState::Up.into(), roles, ..Default::default() };
            let write = Write::Put(node_key(id), node.encode_to_vec());
            assert!(memory.commit(Vec::new(), vec![write]).await.unwrap());
        }
        let store = Store::new(memory);
        let enter = |id| timeout(Duration::from_secs(1), admitted(&store, &changing, id));
        let turn = changing.lock().await;
        let refused = enter(worker).await.unwrap();
        assert!(matches!(refused, Err(Error::NoRole)), "{refused:?}");
        assert!(enter(voter).await.is_err(), "it waits for its turn");
        drop(turn);
        let (_turn, node) = enter(voter).await.unwrap().unwrap();
        assert_eq!(node.roles, Some(member));
        assert!(changing.try_lock().is_err());
    }
}
