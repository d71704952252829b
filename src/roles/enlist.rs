//! Makes this node a member of etcd once the cluster gives it the role.
//!
//! ```text
//! member of the cluster, with the role, without orders for etcd
//!     --JoinConsensus--> orders: join --> learner --> voter: the role is served
//! ```
//!
//! A node that was a member before has its orders from the cluster manager.
//!
//! Invariants:
//! - etcd gets orders once in a boot.

use std::net::IpAddr;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::cluster::{self, Role};
use crate::consensus::{self, Invitation, Member, MemberId, Orders, Peer, Start};
use crate::event::{Closed, until};
use crate::identity::{self, NodeKey};
use crate::network;
use crate::rpc::client::{Client, Repeat};
use crate::storage::file::{self, File};
use crate::supervisor::Context;

/// Between two attempts, once the client has lost its patience.
const RETRY: Duration = Duration::from_secs(2);

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The key of this node.
    pub key: File,
    /// The way to the leader.
    pub client: Client,
    /// What the cluster wants of this node.
    pub roles: watch::Receiver<Option<v1::NodeRoles>>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// etcd.
    pub consensus: watch::Receiver<consensus::Status>,
    /// What etcd is to do.
    pub orders: watch::Sender<Option<Orders>>,
    /// What this machine is to its cluster; its roles are kept here.
    pub cluster: watch::Sender<cluster::Status>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The key cannot be read.
    #[error("cannot read the key of this node")]
    File(#[from] file::Error),
    /// The key is not one.
    #[error("the key of this node cannot be used")]
    Key(#[source] identity::Error),
    /// The key has gone.
    #[error("the key of this node has gone from the data partition")]
    KeyLost,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        ctx.healthy();
        match ctx.until_cancelled(Box::pin(self.enlist())).await {
            Some(served) => served?,
            None => return Ok(()),
        }
        ctx.cancelled().await;
        Ok(())
    }

    async fn enlist(&mut self) -> Result<(), Error> {
        let mut cluster = self.cluster.subscribe();
        until(&mut cluster, "the cluster", |status| status.is_member().then_some(())).await?;
        if self.orders.borrow().is_none() {
            let has_role = |roles: &Option<v1::NodeRoles>| {
                roles.as_ref().is_some_and(|roles| roles.consensus_member.is_some()).then_some(())
            };
            until(&mut self.roles, "the roles", has_role).await?;
            let address = until(&mut self.network, "the network", |status| status.primary).await?;
            let file = self.key.clone();
            let der = tokio::task::spawn_blocking(move || file.read()).await;
            let der = der.map_err(|_lost| Error::KeyLost)??.ok_or(Error::KeyLost)?;
            let key = NodeKey::from_pkcs8_der(&zeroize::Zeroizing::new(der)).map_err(Error::Key)?;
            info!("the cluster wants this node to run a member of etcd");
            let start = self.invited(&key, address).await;
            let peer = Peer::of(key.id());
            self.orders.send_replace(Some(Orders { key, peer, start }));
        }
        until(&mut self.consensus, "etcd", |status| status.voter().map(drop)).await?;
        self.cluster.send_if_modified(|status| {
            let news = !status.roles.contains(&Role::ConsensusMember);
            if news {
                status.roles.push(Role::ConsensusMember);
            }
            news
        });
        info!("this node is a voting member of etcd");
        Ok(())
    }

    /// Asks the leader for what a member needs, until there is an answer.
    async fn invited(&self, key: &NodeKey, address: IpAddr) -> Start {
        let request = v1::JoinConsensusRequest { address: address.to_string() };
        loop {
            let call = |channel| {
                let request = request.clone();
                async move {
                    Ok(CuratorClient::new(channel).join_consensus(request).await?.into_inner())
                }
            };
            match self.client.call(Repeat::Allowed, call).await {
                Ok(answer) => return Start::Join(Box::new(invitation(answer, key))),
                Err(status) => {
                    warn!(%status, "cannot become a member of etcd yet; asking again");
                    sleep(RETRY).await;
                }
            }
        }
    }
}

/// The answer as etcd's keeper takes it.
fn invitation(answer: v1::JoinConsensusResponse, key: &NodeKey) -> Invitation {
    let own = Peer::of(key.id()).url();
    let member = |peer: v1::join_consensus_response::Peer| Member {
        id: MemberId(0),
        // As etcd says it: the new one has no name yet.
        name: if peer.peer_url == own { String::new() } else { peer.node_id },
        peer_url: peer.peer_url,
        learner: false,
    };
    Invitation {
        ca: answer.ca_certificate,
        certificate: answer.peer_certificate,
        crl: answer.crl,
        members: answer.members.into_iter().map(member).collect(),
    }
}
