//! The members of etcd: changes and shows them, according to the records of nodes.
//!
//! ```text
//! in:   role in the record -> address in the record -> certificate, learner (-> voter)
//!       -> role still in the record, and still the leader? -> what it needs to start
//! ```
//!
//! Invariants:
//! - A node does not start a member if its role was gone by the time that the member was added.
//!
//! What this module does not do: the way out (`departures`).

use std::net::IpAddr;

use polis_proto::v1;

use super::Lead;
use crate::consensus::Member;
use crate::consensus::client::User;
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::nodes;
use crate::curator::state::Request;
use polis_wire::identity::NodeId;

impl Lead {
    /// Makes a node with the role a member; returns what it needs to start.
    pub(super) async fn join_consensus(
        &self,
        id: NodeId,
        address: IpAddr,
    ) -> Result<v1::JoinConsensusResponse, Error> {
        let parts = &self.handlers.0;
        let _changing = parts.changing.lock().await;
        let node = self.store().node(id).await?;
        nodes::may_enter_etcd(&node)?;
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
    /// newer ones are known.
    pub(super) async fn consensus_status(
        &self,
        members: Option<Vec<Member>>,
    ) -> v1::ConsensusStatus {
        let parts = &self.handlers.0;
        let answering = parts.members.answering().await.unwrap_or_default();
        let mut status = parts.consensus.borrow().clone();
        status.members = members.unwrap_or(status.members);
        convert::consensus_status(&status, &answering, &parts.heartbeats)
    }
}
