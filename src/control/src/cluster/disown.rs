//! The end of a membership: wipes the secrets of a node that its cluster has removed.
//!
//! ```text
//! a refusal names the node as removed (agent) --+
//! the own etcd does not come up, and a curator ---+--> [disowning]
//!   says that the node was removed                        |
//!                                                         v
//!      sealed configuration: disowned, no secrets -> shares forgotten -> etcd ends
//!        -> keys, certificates, etcd's data removed -> trapdoor, now and at every boot
//!           or, where an owner asked for it, or the parameters name the node:
//!              data partition given up -> reboot -> [wiped]
//! ```
//!
//! Every step may be repeated. The first one is permanent: without the node's half, only
//! the recovery key opens the disk, and the next boot knows why.
//!
//! Invariants:
//! - An outage or a missing record never wipes anything: the node wipes only after a
//!   curator that proved to be of this cluster has answered that the node is removed for
//!   good.

use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::curator_client::CuratorClient;
use prost::Message as _;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::credentials;
use super::hints::Hints;
use super::member_removal::{Membership, RETRY, TRUST, membership, remove_member};
use super::probe::Step;
use super::sealed::Sealed;
use super::service::Consensus;
use super::state::Event;
use super::unlock::disk::Found;
use super::unlock::keeper::Slot;
use super::{Error, Service};
use crate::consensus;
use polis_base::files::{self, File, Root};
use polis_base::stage::{Stage, State};
use polis_base::sys::reboot::Reason;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Identity, NodeId};
use polis_wire::node_roles::is_consensus_member;
use polis_wire::rpc::client::{Channel, Client, Repeat, Timeouts, candidates};
use polis_wire::rpc::is_removal;

/// The deadline of one question.
const TIMEOUTS: Timeouts =
    Timeouts { attempt: Duration::from_secs(5), total: Duration::from_secs(10) };
/// A killed process ends within that.
const KILLED: Duration = Duration::from_secs(1);

/// The cluster's answer about a node whose etcd does not come up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The node was removed for good.
    Removed,
    /// The node is a member of the cluster, and no longer a member of etcd.
    NoMember,
}

impl<C: Consensus> Service<C> {
    /// Wipes the secrets of a member. Returns the error to stop with.
    pub(super) async fn disown(&mut self, ctx: &Context) -> Error {
        self.status.happened(Event::Removed, ctx.lines(), |_disowning| {});
        warn!("the cluster has removed this node: its keys are wiped");
        let reset = self.reset.borrow().is_some_and(|until| Instant::now() < until);
        let own = self.status.borrow().node;
        let wipes = reset || own.is_some_and(|own| self.named() == Some(own));
        let sealed = match self.forget_keys(wipes).await {
            Ok(sealed) => sealed,
            Err(error) => return error,
        };
        self.orders.send_replace(None);
        sleep(KILLED).await;
        if self.storage.borrow().ready().is_some() {
            let root = self.config.root.clone();
            if let Err(error) = blocking(move || wipe(&root).map_err(Error::from)).await {
                return error;
            }
        }
        match sealed {
            Some(sealed) if sealed.wiped => self.give_up().await,
            sealed => {
                let node = sealed.map(|sealed| Identity::new(sealed.node_public_key).id);
                Error::Disowned { node }
            }
        }
    }

    /// Wipes what opens the disk, for good; returns the sealed configuration that is left. With
    /// `wipes`, the data partition ends, too.
    async fn forget_keys(&self, wipes: bool) -> Result<Option<Sealed>, Error> {
        let unlocker = self.config.unlocker(self.disk());
        let root = self.config.root.clone();
        blocking(move || {
            let record = match root.esp.sealed_configuration.read() {
                // The next boot finds the damage; what opens the disk goes all the same.
                Err(files::Error::Damaged { .. }) => None,
                record => record?,
            };
            let sealed = record.and_then(|record| Sealed::from_record(&record).ok());
            let sealed = sealed.map(|sealed| Sealed {
                disowned: true,
                secrets: None,
                wiped: sealed.wiped || wipes,
                ..sealed
            });
            if let Some(sealed) = &sealed {
                root.esp.sealed_configuration.write(&sealed.to_record())?;
            }
            unlocker.shares.forget(Slot::Current)?;
            unlocker.shares.forget(Slot::Next)?;
            root.esp.key_change.erase()?;
            Ok(sealed)
        })
        .await
    }

    /// Wipes the keys of the node that this machine was, gives its data partition up, and
    /// has the machine rebooted: the next boot wipes the partition before anything uses it.
    pub(super) async fn wipe_disk(&mut self) -> Error {
        self.orders.send_replace(None);
        match self.forget_keys(true).await {
            Ok(_sealed) => self.give_up().await,
            Err(error) => error,
        }
    }

    async fn give_up(&mut self) -> Error {
        let mut disk = self.disk();
        let given_up = match disk.look().await {
            // Nothing to give up: an entry that was cut off had not made it.
            Ok(Found::Absent(_)) => Ok(()),
            Ok(Found::Locked(..) | Found::Mounted(_)) => disk.give_up().await,
            Err(closed) => Err(closed),
        };
        if let Err(closed) = given_up {
            return closed.into();
        }
        if let Err(interrupted) = self.config.probe.passed(Step::GivenUp) {
            return interrupted.into();
        }
        warn!("the machine reboots, and wipes its data partition then");
        self.end.send_replace(Some(Reason::Reboot));
        std::future::pending().await
    }

    /// Forgets the node whose data partition is gone. The sealed configuration goes last: it
    /// says what is left to do.
    pub(super) async fn forget_node(&self) -> Result<(), Error> {
        let unlocker = self.config.unlocker(self.disk());
        let esp = self.config.root.esp.clone();
        blocking(move || {
            unlocker.shares.forget(Slot::Current)?;
            unlocker.shares.forget(Slot::Next)?;
            let records =
                [&esp.key_change, &esp.cluster_journal, &esp.cluster_directory, &esp.network];
            for file in records {
                file.erase()?;
            }
            Ok::<_, Error>(esp.sealed_configuration.erase()?)
        })
        .await?;
        info!("what a removed node left on this machine is wiped");
        Ok(self.config.probe.passed(Step::Forgotten)?)
    }

    /// Removes the remains of an etcd member from this node after the cluster has removed
    /// the member. If the node has the role again, it enters as a new member.
    pub(super) async fn leave_etcd(&mut self) -> Result<(), Error> {
        info!("the cluster removed this node from etcd while it was off");
        self.orders.send_replace(None);
        sleep(KILLED).await;
        let data = self.config.root.data.clone();
        Ok(blocking(move || remove_member(&data)).await?)
    }
}

fn wipe(root: &Root) -> Result<(), files::Error> {
    let files::Node { credentials, roles, networks, users, voter, leaving, .. } = &root.data.node;
    for file in [&credentials.key, &credentials.certificate, &credentials.authorities] {
        file.erase()?;
    }
    roles.remove()?;
    networks.remove()?;
    users.remove()?;
    consensus::forget(&root.data.etcd)?;
    voter.remove()?;
    leaving.remove()
}

/// The answer of a curator.
enum Reply {
    Final(Verdict),
    /// The cluster has another etcd than the one that this node is a member of: it was
    /// restored from a snapshot. The data that the snapshot lacks may exist on this disk
    /// alone, so nothing is ended: an operator decides.
    FoundedAgain,
}

/// A member whose own etcd does not come up.
pub(super) struct Doubt<'a> {
    pub(super) ctx: &'a Context,
    pub(super) root: Root,
    pub(super) hints: Hints,
    pub(super) own: NodeId,
}

impl Doubt<'_> {
    /// Asks the curators of other nodes what has become of this node, once its own etcd has
    /// had its time; without a limit, until an answer ends the wait for etcd.
    pub(super) async fn end(&self) -> Verdict {
        sleep(TRUST).await;
        let mut logged = false;
        loop {
            let files = &self.root.data.node;
            let hints = self.hints.directory();
            match ask(files, &self.root.esp.cluster_directory, &hints, self.own).await {
                Ok(Some(Reply::FoundedAgain)) => {
                    let what = founded_again(self.own);
                    if !std::mem::replace(&mut logged, true) {
                        warn!("waiting for {what}");
                    }
                    self.ctx.stage(Stage::Cluster, State::Waiting(what));
                }
                Ok(Some(Reply::Final(verdict))) => return verdict,
                Ok(None) => {}
                Err(why) => debug!(why, "no curator knows the state of this node"),
            }
            sleep(RETRY).await;
        }
    }
}

/// The text of the wait of an etcd member that was removed.
fn founded_again(own: NodeId) -> String {
    format!(
        "an owner: the cluster was founded again from a snapshot, and this node's etcd member \
         is older, so data newer than the snapshot may exist only on this disk; `polisctl node \
         roles {own} --remove consensus-member` discards it and lets the node join, and --add \
         makes it a voter again"
    )
}

async fn ask(
    files: &files::Node,
    directory: &File,
    hints: &v1::ClusterDirectory,
    own: NodeId,
) -> Result<Option<Reply>, String> {
    let (files, directory) = (files.clone(), directory.clone());
    let read = blocking(move || {
        let known = directory.read().map_err(|error| error.to_string())?.unwrap_or_default();
        let known = v1::ClusterDirectory::decode(known.as_slice());
        let known = known.map_err(|error| error.to_string())?;
        let credentials =
            credentials::read(&files.credentials).map_err(|error| error.to_string())?;
        let voter = files.voter.read().map_err(|error| error.to_string())?;
        Ok::<_, String>((candidates(&known), credentials, voter))
    });
    let (known, credentials, voter) = read.await?;
    let known = known.into_iter().chain(candidates(hints));
    let others: Vec<_> = known.filter(|one| one.node != Some(own)).collect();
    if others.is_empty() {
        return Ok(None);
    }
    let client = Client::fixed(others, credentials, TIMEOUTS);
    let call = |channel: Channel| async move {
        let request = v1::WatchRequest { node_id: own.to_string() };
        let mut hints = CuratorClient::new(channel).watch(request).await?.into_inner();
        while let Some(event) = hints.message().await? {
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
        Err(status) if is_removal(&status) => return Ok(Some(Reply::Final(Verdict::Removed))),
        Err(status) => return Err(status.to_string()),
    };
    let verdict = classify(&node);
    if verdict.is_some() || node.state() != v1::NodeState::Up {
        return Ok(verdict.map(Reply::Final));
    }
    let word = membership(&client, own, voter.as_deref()).await;
    Ok(match word.map_err(|status| status.to_string())? {
        Membership::Member => None,
        Membership::Out => Some(Reply::Final(Verdict::NoMember)),
        Membership::Elsewhere => Some(Reply::FoundedAgain),
    })
}

/// Classifies the record of a node; a member of etcd with the role may be out of etcd all
/// the same.
fn classify(node: &v1::NodeInfo) -> Option<Verdict> {
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
        assert_eq!(classify(&node(v1::NodeState::Up, Some(member))), None);
        assert_eq!(classify(&node(v1::NodeState::Up, None)), Some(Verdict::NoMember));
        assert_eq!(classify(&node(v1::NodeState::Decommissioned, None)), Some(Verdict::Removed));
        assert_eq!(classify(&node(v1::NodeState::New, None)), None);
        assert_eq!(classify(&v1::NodeInfo::default()), None);
    }
}
