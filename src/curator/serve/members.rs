//! Changes and shows the members of etcd, as the records of nodes say.
//!
//! ```text
//! in:   role in the record -> address in the record -> certificate, learner (-> voter)
//! out:  quorum without it? -> removed from etcd -> certificate revoked -> role out of the record
//! ```
//!
//! A leader that dies between two steps of the way out leaves a node that still
//! has the role: nothing was promised, and the next attempt ends it.
//!
//! Invariants:
//! - One change at a time: nobody enters by a role that is being taken away.
//! - A leader does not remove its own member: it steps down, and the next does.

use std::net::{IpAddr, Ipv4Addr};

use polis_proto::v1;
use tonic::Status;
use tracing::info;

use super::Lead;
use crate::consensus::{Member, Peer};
use crate::curator::convert;
use crate::curator::error::Error;
use crate::curator::nodes;
use crate::curator::state::{Refusal, Request};
use crate::identity::NodeId;

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
        if node.state() != v1::NodeState::Up {
            return Err(Refusal::NotUp.into());
        }
        if node.roles.as_ref().is_none_or(|roles| roles.consensus_member.is_none()) {
            return Err(Error::NoRole);
        }
        let identity = nodes::identity(id, &node)?;
        // The others must know the way before etcd sends them there.
        let mut status = node.status.unwrap_or_default();
        if status.external_address != address.to_string() {
            status.external_address = address.to_string();
            self.store().change(id, Request::Status(status)).await?;
        }
        let peer = (parts.naming)(id, address);
        let invitation = parts.members.add(&identity, &peer).await?;
        let directory = parts.directory.borrow();
        let member = |member: &Member| {
            // A member that has not started yet has no name: that is the new one.
            let own = member.peer_url == peer.url();
            let node = if own { Some(id) } else { member.name.parse().ok() };
            let known = node.and_then(|node| directory.node(node));
            let known = known.and_then(|known| known.node.status.as_ref());
            v1::join_consensus_response::Peer {
                node_id: node.map_or_else(|| member.name.clone(), |node| node.to_string()),
                address: match own {
                    true => address.to_string(),
                    false => known.map(|s| s.external_address.clone()).unwrap_or_default(),
                },
                peer_url: member.peer_url.clone(),
            }
        };
        Ok(v1::JoinConsensusResponse {
            members: invitation.members.iter().map(member).collect(),
            ca_certificate: invitation.ca,
            peer_certificate: invitation.certificate,
            crl: invitation.crl,
        })
    }

    /// Where the member of a node is reached, or would be.
    async fn peer(&self, id: NodeId) -> Result<Peer, Error> {
        let status = self.store().node(id).await?.status.unwrap_or_default();
        // Whatever entered etcd has told its address before, and where the place
        // is a name, the address does not matter.
        let address = status.external_address.parse();
        Ok((self.handlers.0.naming)(id, address.unwrap_or(Ipv4Addr::UNSPECIFIED.into())))
    }

    /// Takes a node out of etcd, if it is in there, and then `changes` its record.
    pub(super) async fn leave_consensus<T>(
        &self,
        id: NodeId,
        changes: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Status> {
        let parts = &self.handlers.0;
        let _changing = parts.changing.lock().await;
        let left = async {
            let leaving = parts.members.may_leave(id, &self.peer(id).await?).await?;
            let own = parts.consensus.borrow().member;
            if own.is_some() && own == leaving.as_ref().map(|member| member.id) {
                return Ok(false);
            }
            parts.members.evict(id, leaving.as_ref()).await?;
            Ok::<_, Error>(true)
        };
        match left.await {
            Ok(true) => changes.await.map_err(|error| self.refuse(error)),
            Ok(false) => {
                info!("stepping down, for the next leader to remove this member");
                self.term.step_down();
                Err(self.handlers.not_leader())
            }
            Err(error) => Err(self.refuse(error)),
        }
    }

    /// etcd, as the member beside this curator sees it.
    pub(super) async fn consensus_status(&self) -> v1::ConsensusStatus {
        let parts = &self.handlers.0;
        let answering = parts.members.answering().await.unwrap_or_default();
        let status = parts.consensus.borrow().clone();
        convert::consensus_status(&status, &answering, &parts.heartbeats)
    }
}
