//! Enlisting in etcd: makes this node a member of etcd while the cluster gives it the role.
//!
//! ```text
//! [no member] --role, JoinConsensus--> [orders: join] --learner, voter--> [serves the role]
//!      ^                                                                       |
//!      +------ etcd ended, its data removed <------ the leader reports it -----+
//!                                                    the role is gone, or the member
//! ```
//!
//! A node that was a member before has its orders from the cluster manager.
//!
//! Invariants:
//! - The file that says that this node has a vote is written before the vote is reported.
//! - The node believes only a leader of this boot that the role is gone: that leader has
//!   taken the member out of etcd before. The state that the last boot left behind may be
//!   old.
//! - A node with the role asks a leader, whose list of members is that of a majority,
//!   whether its member was removed.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use polis_base::cause;
use polis_base::files::{self, File};
use polis_control::cluster::{self, Membership, RETRY, TRUST};
use polis_control::consensus::{self, Invitation, MemberStatus, Orders, Peer, Start};
use polis_machine::network;
use polis_runtime::event::{Closed, until};
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{self, NodeId, NodeKey};
use polis_wire::node_roles::{Nodes, Role, is_consensus_member};
use polis_wire::rpc::client::{Client, Repeat};

/// Between two attempts, once the client has lost its patience.
const ENLIST_RETRY: Duration = Duration::from_secs(2);

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The files that this node keeps of itself and of its member of etcd.
    pub data: files::Data,
    /// The way to the leader.
    pub client: Client,
    /// Every node, as the leader reports it, with the roles that the cluster wants of this
    /// one.
    pub nodes: watch::Receiver<Option<Arc<Nodes>>>,
    /// The address.
    pub network: watch::Receiver<network::Status>,
    /// etcd.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The orders for etcd.
    pub orders: watch::Sender<Option<Orders>>,
    /// This machine's state in its cluster; its roles are kept here.
    pub cluster: cluster::Writer,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The disk.
    #[error("cannot store or read the state of this node")]
    File(#[from] files::Error),
    /// The key is not one.
    #[error("the key of this node cannot be used")]
    Key(#[source] identity::Error),
    /// The key has gone.
    #[error("the key of this node is missing from the data partition")]
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
        loop {
            match ctx.until_cancelled(Box::pin(self.term())).await {
                Some(ended) => ended?,
                None => return Ok(()),
            }
        }
    }

    /// From no member to no member again.
    async fn term(&mut self) -> Result<(), Error> {
        let mut cluster = self.cluster.subscribe();
        let own =
            until(&mut cluster, "the cluster", |status| status.node.filter(|_| status.is_member()));
        let own = own.await?;
        // A run that died while it left, or a disk that failed: a member that enters beside
        // the remains would lose its vote at the next boot, which continues with them.
        let left = self.data.node.leaving.clone();
        if blocking(move || left.read()).await?.is_some() {
            self.leave().await?;
        }
        if self.orders.borrow().is_none() {
            let mut nodes = self.nodes.clone();
            until(&mut nodes, "the nodes", |nodes| has_role(nodes, own).filter(|has| *has)).await?;
        }
        let mut nodes = self.nodes.clone();
        let gone = until(&mut nodes, "the nodes", |nodes| has_role(nodes, own).filter(|has| !has));
        let (consensus, client) = (self.consensus.clone(), self.client.clone());
        let voter = self.data.node.voter.clone();
        tokio::select! {
            // Cancel-safe, all: an invitation that is not used is given again.
            gone = gone => drop(gone?),
            out = out(own, consensus, &client, voter) => out?,
            served = self.serve() => match served? {},
        }
        self.leave().await
    }

    /// Clears up after a member of etcd that the cluster has taken out.
    async fn leave(&mut self) -> Result<(), Error> {
        info!("the cluster removes this node from etcd");
        self.cluster.serves(Role::ConsensusMember, false);
        self.orders.send_replace(None);
        until(&mut self.consensus, "etcd", |status| status.is_absent().then_some(())).await?;
        let data = self.data.clone();
        blocking(move || cluster::remove_member(&data)).await?;
        info!("the data of the etcd member is removed");
        Ok(())
    }

    /// Serves the role until cancelled.
    async fn serve(&mut self) -> Result<Infallible, Error> {
        if self.orders.borrow().is_none() {
            info!("the cluster wants this node to run a member of etcd");
            self.order().await?;
        }
        loop {
            let joins = self.orders.borrow().as_ref().is_some_and(|orders| orders.start.joins());
            let voted = until(&mut self.consensus, "etcd", |status| match status.standing {
                MemberStatus::Voter => Some(true),
                MemberStatus::Stopped if joins && !status.removed => Some(false),
                MemberStatus::Starting | MemberStatus::Learner { .. } | MemberStatus::Stopped => {
                    None
                }
            });
            if voted.await? {
                break;
            }
            // The members may have changed since the node received its orders.
            self.order().await?;
            let started = |status: &consensus::Status| {
                (status.standing != MemberStatus::Stopped).then_some(())
            };
            until(&mut self.consensus, "etcd", started).await?;
        }
        // From here on it is the member of its own data. Its invitation grows old: if etcd
        // started with that again, months later, it would show an expired certificate to
        // peers that no longer report the newer one.
        self.orders.send_if_modified(|orders| match orders {
            Some(orders) if orders.start.joins() => {
                orders.start = Start::Restart;
                true
            }
            _ => false,
        });
        let vote = until(&mut self.consensus, "etcd", |status| {
            let (cluster, member) = status.cluster.zip(status.member)?;
            Some(cluster::Vote { cluster, member: member.0 })
        });
        let vote = vote.await?.to_bytes();
        self.data.node.voter.save(vote).await?;
        self.cluster.serves(Role::ConsensusMember, true);
        info!("this node is a voting member of etcd");
        std::future::pending().await
    }

    /// Gets what a new member needs from the leader, and gives it to etcd's keeper.
    async fn order(&mut self) -> Result<(), Error> {
        let address = until(&mut self.network, "the network", |status| status.primary).await?;
        let file = self.data.node.credentials.key.clone();
        let der = blocking(move || file.read()).await?.ok_or(Error::KeyLost)?;
        let key = NodeKey::from_pkcs8_der(&zeroize::Zeroizing::new(der)).map_err(Error::Key)?;
        let start = self.invited(&key, address).await;
        let peer = Peer::of(key.id());
        self.orders.send_replace(Some(Orders { key, peer, start }));
        Ok(())
    }

    /// Asks the leader for what a member needs, until there is an answer.
    async fn invited(&self, key: &NodeKey, address: IpAddr) -> Start {
        let request = v1::JoinConsensusRequest { address: address.to_string() };
        let mut failed = cause::Last::default();
        loop {
            let call = |channel| {
                let request = request.clone();
                async move {
                    Ok(CuratorClient::new(channel).join_consensus(request).await?.into_inner())
                }
            };
            match self.client.call(Repeat::Allowed, call).await {
                Ok(answer) => match Invitation::read(answer, key.id()) {
                    Some(invitation) => return Start::Join(Box::new(invitation)),
                    None => warn!("the leader's answer to a new member cannot be read; retrying"),
                },
                Err(status) => {
                    if failed.is_new(&status.to_string()) {
                        warn!(%status, "cannot become a member of etcd yet; retrying");
                    }
                }
            }
            sleep(ENLIST_RETRY).await;
        }
    }
}

/// Waits until a leader reports that this node no longer has a member of etcd.
async fn out(
    own: NodeId,
    mut consensus: watch::Receiver<consensus::Status>,
    client: &Client,
    voter: File,
) -> Result<(), Error> {
    loop {
        // A member that knows a leader is in the cluster, and a member that has just started
        // will learn of one.
        let doubtful = |status: &consensus::Status| {
            (!status.is_absent() && (status.removed || status.leader.is_none())).then_some(())
        };
        until(&mut consensus, "etcd", doubtful).await?;
        let led = |status: &consensus::Status| status.leader.map(drop);
        if !consensus.borrow().removed {
            let patience = tokio::time::timeout(TRUST, until(&mut consensus, "etcd", led));
            if let Ok(led) = patience.await {
                led?;
                continue;
            }
        }
        let file = voter.clone();
        let voted = blocking(move || file.read()).await?;
        match cluster::membership(client, own, voted.as_deref()).await {
            Ok(Membership::Out) => {
                warn!("this node has the role, but its etcd member was removed");
                return Ok(());
            }
            Ok(Membership::Member | Membership::Elsewhere) => {}
            Err(status) => debug!(%status, "no leader reports the members of etcd"),
        }
        sleep(RETRY).await;
    }
}

/// Whether this node, a member of the cluster, has the role; nothing before a leader's
/// message in this boot.
fn has_role(nodes: &Option<Arc<Nodes>>, own: NodeId) -> Option<bool> {
    let node = nodes.as_ref()?.get(&own)?;
    let role = is_consensus_member(node.roles.as_ref());
    (node.state() == v1::NodeState::Up).then_some(role)
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_base::files::Root;
    use polis_wire::rpc::client::Timeouts;

    #[test]
    fn a_role_is_gone_only_where_a_leader_says_so() {
        let own = NodeId::from_public_key(&[1; 32]);
        let node = |state: v1::NodeState, member: bool| {
            let consensus_member = member.then_some(v1::node_roles::ConsensusMember {});
            let roles = Some(v1::NodeRoles { consensus_member, ..Default::default() });
            let info = v1::NodeInfo { state: state.into(), roles, ..Default::default() };
            Some(Arc::new(Nodes::from([(own, info)])))
        };
        assert_eq!(has_role(&None, own), None);
        assert_eq!(has_role(&Some(Arc::default()), own), None, "a record that is not there");
        assert_eq!(has_role(&node(v1::NodeState::Up, true), own), Some(true));
        assert_eq!(has_role(&node(v1::NodeState::Up, false), own), Some(false));
        assert_eq!(has_role(&node(v1::NodeState::Decommissioned, false), own), None);
    }

    #[tokio::test]
    async fn an_interrupted_departure_ends_before_the_node_enters_again() {
        let disk = tempfile::tempdir().unwrap();
        let data = Root::at(disk.path()).data;
        data.create().unwrap();
        // The last run died here: the number of the member is one that has voted.
        data.etcd.log.create().unwrap();
        std::fs::write(data.etcd.log.path().join("0.wal"), b"votes").unwrap();
        data.node.voter.write(b"vote").unwrap();
        data.node.leaving.write(b"").unwrap();

        let own = NodeId::from_public_key(&[1; 32]);
        let consensus_member = Some(v1::node_roles::ConsensusMember {});
        let roles = Some(v1::NodeRoles { consensus_member, ..Default::default() });
        let state = v1::NodeState::Up.into();
        let info = v1::NodeInfo { state, roles, ..Default::default() };
        let nodes = watch::Sender::new(Some(Arc::new(Nodes::from([(own, info)]))));
        // Without an address, it sends no requests.
        let network = watch::Sender::<network::Status>::default();
        let consensus = watch::Sender::<consensus::Status>::default();
        let state = cluster::State::Home;
        let home = cluster::Status { state, node: Some(own), ..Default::default() };
        let timeouts = Timeouts { attempt: ENLIST_RETRY, total: ENLIST_RETRY };
        let (candidates, credentials) = (watch::Sender::default(), watch::Sender::default());
        let mut service = Service {
            data: data.clone(),
            client: Client::new(candidates.subscribe(), credentials.subscribe(), timeouts),
            nodes: nodes.subscribe(),
            network: network.subscribe(),
            consensus: consensus.subscribe(),
            orders: watch::Sender::new(None),
            cluster: cluster::Writer::new(home),
        };
        let cleared = async {
            while data.node.leaving.read().unwrap().is_some() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            ended = service.term() => panic!("{ended:?}"),
            () = sleep(Duration::from_secs(20)) => panic!("it enters beside what is left"),
            () = cleared => {}
        }
        assert_eq!(data.node.voter.read().unwrap(), None);
        assert!(data.etcd.log.is_empty().unwrap());
    }
}
