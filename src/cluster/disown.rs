//! Ends the membership of a node that its cluster has removed.
//!
//! ```text
//! a refusal names the node as removed (liaison) --+
//! the own etcd does not come up, and a curator ---+--> [disowning]
//!   says that the node was removed                        |
//!                                                         v
//!      sealed configuration: disowned, no secrets -> shares forgotten -> etcd ends
//!        -> keys, certificates, etcd's data removed -> trapdoor, now and at every boot
//! ```
//!
//! Every step may be taken again. The first one is what lasts: without the node's
//! half nothing but the recovery key opens the disk, and the next boot knows why.
//!
//! Invariants:
//! - Nothing is wiped because of an outage, or of a record that is not there: only
//!   where a curator that proved to be of this cluster says that it is for ever.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use prost::Message as _;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::credentials;
use super::keeper::Slot;
use super::parting::{ASK_AGAIN, TRUST, is_out, part};
use super::sealed::Sealed;
use super::service::Consensus;
use super::state::Event;
use super::{Error, Service, Status, blocking};
use crate::consensus;
use crate::curator::state::is_consensus_member;
use crate::identity::NodeId;
use crate::rpc::client::{Channel, Client, Patience, Repeat, candidates};
use crate::rpc::is_removal;
use crate::storage::file::{self, File};
use crate::storage::{Root, tree};
use crate::supervisor::Context;

/// For one question.
const PATIENCE: Patience =
    Patience { attempt: Duration::from_secs(5), total: Duration::from_secs(10) };
/// A process that is killed ends within that.
const KILLED: Duration = Duration::from_secs(1);

/// What the cluster says of a node whose etcd does not come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It was taken out for good.
    Removed,
    /// It is a member of the cluster, and of etcd no more.
    NoMember,
}

impl<C: Consensus> Service<C> {
    /// Wipes what made this machine a member. Returns the error to stop with.
    pub(super) async fn disown(&mut self, ctx: &Context) -> Error {
        let status = self.status.borrow().clone();
        if let Some(state) = status.state.after(Event::Removed) {
            self.publish(ctx, Status { state, ..status });
        }
        warn!("the cluster has removed this node: its keys are wiped");
        let unlocker = self.config.unlocker(self.disk());
        let root = self.config.root.clone();
        let sealed = blocking(move || {
            if let Some(Ok(sealed)) =
                root.esp.sealed_configuration.read()?.map(|record| Sealed::from_record(&record))
            {
                let sealed = Sealed { disowned: true, secrets: None, ..sealed };
                root.esp.sealed_configuration.write(&sealed.to_record())?;
            }
            unlocker.shares.forget(Slot::Current)?;
            unlocker.shares.forget(Slot::Next)?;
            Ok(root.esp.key_change.erase()?)
        })
        .await;
        if let Err(error) = sealed {
            return error;
        }
        self.orders.send_replace(None);
        sleep(KILLED).await;
        if self.storage.borrow().ready().is_some() {
            let root = self.config.root.clone();
            if let Err(error) = blocking(move || Ok(wipe(&root)?)).await {
                return error;
            }
        }
        Error::Disowned
    }

    /// Takes what is left of a member of etcd from this node, which the cluster has
    /// taken out. If it has the role again, it enters as another one.
    pub(super) async fn leave_etcd(&mut self) -> Result<(), Error> {
        info!("the cluster has taken this node out of etcd while it was off");
        self.orders.send_replace(None);
        sleep(KILLED).await;
        let data = self.config.root.data.clone();
        blocking(move || Ok(part(&data)?)).await
    }
}

fn wipe(root: &Root) -> Result<(), file::Error> {
    let tree::Node { credentials, roles, voter, leaving, .. } = &root.data.node;
    for file in [&credentials.key, &credentials.certificate, &credentials.ca] {
        file.erase()?;
    }
    roles.remove()?;
    consensus::forget(&root.data.etcd)?;
    voter.remove()?;
    leaving.remove()
}

/// Asks the curators of others what has become of this node, once its own etcd has
/// had its time; for ever, until they say something that ends the wait for it.
pub(super) async fn doubt(root: &Root, own: NodeId) -> Verdict {
    sleep(TRUST).await;
    loop {
        match ask(&root.data.node, &root.esp.cluster_directory, own).await {
            Ok(Some(verdict)) => return verdict,
            Ok(None) => {}
            Err(why) => debug!(why, "no curator says what has become of this node"),
        }
        sleep(ASK_AGAIN).await;
    }
}

async fn ask(files: &tree::Node, directory: &File, own: NodeId) -> Result<Option<Verdict>, String> {
    let (files, directory) = (files.clone(), directory.clone());
    let read = tokio::task::spawn_blocking(move || {
        let known = directory.read().map_err(|error| error.to_string())?.unwrap_or_default();
        let known = v1::ClusterDirectory::decode(known.as_slice());
        let known = known.map_err(|error| error.to_string())?;
        let credentials =
            credentials::read(&files.credentials).map_err(|error| error.to_string())?;
        let voter = files.voter.read().map_err(|error| error.to_string())?;
        Ok::<_, String>((candidates(&known), credentials, voter))
    });
    let (known, credentials, voter) = read.await.map_err(|lost| lost.to_string())??;
    let others: Vec<_> = known.into_iter().filter(|one| one.node != Some(own)).collect();
    if others.is_empty() {
        return Ok(None);
    }
    let client = Client::fixed(others, credentials, PATIENCE);
    let call = |channel: Channel| async move {
        let request = v1::WatchRequest { node_id: own.to_string() };
        let mut told = CuratorClient::new(channel).watch(request).await?.into_inner();
        while let Some(event) = told.message().await? {
            let node = event.nodes.into_iter().find(|node| node.id == own.to_string());
            if node.is_some() || event.current {
                return Ok(node);
            }
        }
        Ok(None)
    };
    let node = match client.call(Repeat::Allowed, call).await {
        Ok(Some(node)) => node,
        Ok(None) => return Ok(None),
        Err(status) if is_removal(&status) => return Ok(Some(Verdict::Removed)),
        Err(status) => return Err(status.to_string()),
    };
    let verdict = judge(&node);
    if verdict.is_some() || node.state() != v1::NodeState::Up {
        return Ok(verdict);
    }
    let out = is_out(&client, own, voter.as_deref()).await;
    Ok(out.map_err(|status| status.to_string())?.then_some(Verdict::NoMember))
}

/// What the record of a node says of it; a member of etcd with the role may be out of
/// etcd all the same.
fn judge(node: &v1::NodeInfo) -> Option<Verdict> {
    let role = is_consensus_member(node.roles.as_ref());
    match node.state() {
        v1::NodeState::Decommissioned => Some(Verdict::Removed),
        v1::NodeState::Up if !role => Some(Verdict::NoMember),
        v1::NodeState::Up
        | v1::NodeState::Unspecified
        | v1::NodeState::New
        | v1::NodeState::Standby => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_record_says_ends_a_member() {
        let member = v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        };
        let node = |state: v1::NodeState, roles| v1::NodeInfo {
            state: state.into(),
            roles,
            ..Default::default()
        };
        assert_eq!(judge(&node(v1::NodeState::Up, Some(member))), None);
        assert_eq!(judge(&node(v1::NodeState::Up, None)), Some(Verdict::NoMember));
        assert_eq!(judge(&node(v1::NodeState::Decommissioned, None)), Some(Verdict::Removed));
        assert_eq!(judge(&node(v1::NodeState::New, None)), None);
        assert_eq!(judge(&v1::NodeInfo::default()), None);
    }
}
