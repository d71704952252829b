//! The membership of etcd: adds, promotes and removes members.
//!
//! ```text
//! add:    room for more -> certificate -> learner -> (it starts) -> voter
//! evict:  quorum without it? -> remove from etcd -> revoke its certificate
//! ```
//!
//! Invariants:
//! - Every call may be repeated; it skips a step that is done already.
//! - A member is removed before its certificate is revoked: a CRL alone does not cut off a
//!   peer that the others dial.
//! - A voter is removed only if the members that answer without it are a majority.
//! - A learner that never started is a member like any other: it can be removed.
//! - A list of members is that of a majority: a member that is cut off gives none.
//! - The certificates of the peers are written by the store that the caller hands over: that
//!   of a leader writes only while it leads (`curator::Fenced`), which etcd cannot ask of a
//!   change of its members.
//!
//! What this module does not do: decide who may be a member (`curator`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{MemberAddOptions, MemberListResponse};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::client::{self, Clients, call};
use super::credentials::{authority, peer_certificate};
use super::status::members_of;
use super::{Invitation, Member, MemberId, Peer, Refusal, Status, Work, peers, quorum};
use polis_base::cause;
use polis_base::files::Sockets;
use polis_base::sys::clock;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::identity::{Identity, NodeId};
use polis_wire::pki::{self, Namespace, Reason};

/// etcd rejects a second change until every member was reached for five seconds.
const CHANGE_MAX: Duration = Duration::from_secs(15);

/// Between two attempts at a change that etcd is not ready for.
const CHANGE_RETRY: Duration = Duration::from_millis(100);

/// How long another newcomer is waited for: shorter than the deadline of the caller, so
/// that the caller learns which node is being added.
const TURN_MAX: Duration = Duration::from_secs(5);

/// How long a removed member has to learn of its removal. Once its certificate is revoked,
/// no member accepts its connections, and it would wait for a leader without end.
const FAREWELL: Duration = Duration::from_secs(1);

/// A restart at another pace takes less than a second.
const ROOM_MAX: Duration = Duration::from_secs(30);

/// The delay between two attempts to promote a learner that just came.
const PROMOTE: Duration = Duration::from_millis(50);

/// The delay between two attempts for a learner that does not catch up: it may be off for good.
const PROMOTE_MAX: Duration = Duration::from_secs(1);

/// A leader that does not hand over in the time of an election is replaced by one.
const HAND_OVER_MAX: Duration = Duration::from_secs(2);

/// By how much an attempt may be later than the learner could have been promoted: this part
/// of the time that it took.
const PROMOTE_LATE: u32 = 16;

/// How long a reading of the members that answer is shown, and the least time between two: a
/// caller may ask as fast as it can, and etcd computes all its metrics for each.
const SHOWN_FOR: Duration = Duration::from_secs(1);

/// A key that does not exist, since those of every namespace are longer: a read of it is short.
const NO_KEY: &str = "polis:";

/// The reason why the membership was not changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The member's service has ended.
    #[error("the etcd member of this node was removed")]
    Gone(#[from] Closed),
    /// Only a voter can change the membership.
    #[error("the etcd member of this node is not a voter, or could not free space in time")]
    NoVoter,
    /// The change would harm the cluster.
    #[error("the member must stay")]
    Refused(#[from] Refusal),
    /// etcd adds one learner at a time.
    #[error("{node} is entering etcd, which adds one node at a time")]
    Turn {
        /// The node that is being added.
        node: String,
    },
    /// A member does not remove itself: it could not revoke its certificate then.
    #[error("this member cannot remove itself: use another one")]
    Itself,
    /// This member could not ask the others which members answer.
    #[error("cannot determine which members answer")]
    Peers(#[source] std::io::Error),
    /// A certificate could not be made or revoked.
    #[error("cannot change the certificates of the etcd peers")]
    Pki(#[from] pki::Error),
    /// etcd rejected the change.
    #[error("cannot change the members of etcd")]
    Etcd(#[from] client::Error),
}

/// The way to change the membership. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Members {
    status: watch::Receiver<Status>,
    growth: watch::Sender<bool>,
    wake: Arc<Notify>,
    sockets: Sockets,
    shown: Arc<Mutex<Reading>>,
}

/// The last reading of the members that answer.
#[derive(Debug, Default)]
struct Reading {
    /// When it began.
    begun: Option<Instant>,
    /// The result of the last one that ended, and when it did.
    found: Option<(Instant, BTreeSet<MemberId>)>,
}

impl Members {
    pub(super) fn new(
        status: watch::Receiver<Status>,
        growth: watch::Sender<bool>,
        wake: Arc<Notify>,
        sockets: Sockets,
    ) -> Self {
        Self { status, growth, wake, sockets, shown: Arc::default() }
    }

    /// Makes `identity` a member, as a learner at first, unless it is one already; returns
    /// what it needs to start. The first time, this member's etcd starts again to make
    /// room. `pki` is the way to write in the namespace [`User::EtcdPki`](client::User).
    ///
    /// # Errors
    ///
    /// [`Error`]; the call may be repeated.
    pub async fn add<S: pki::Store>(
        &self,
        identity: &Identity,
        peer: &Peer,
        pki: S,
    ) -> Result<Invitation, Error> {
        let mut status = self.status.clone();
        self.growth.send_if_modified(|wanted| !std::mem::replace(wanted, true));
        let room = until(&mut status, "the etcd member", |status| {
            status.voter().filter(|_| status.ready_to_grow).cloned()
        });
        let clients = tokio::time::timeout(ROOM_MAX, room).await;
        let clients = clients.map_err(|_elapsed| Error::NoVoter)??;

        let namespace = Namespace::new(pki, "");
        let desired = peer_certificate(identity, peer);
        let issued = namespace.ensure(&desired, clock::now()).await?;
        let crl = namespace
            .crl(&authority())
            .await?
            .ok_or_else(|| pki::Error::Damaged { what: "CRL", name: authority().name.clone() })?;

        let authorities = namespace.authorities(&authority()).await?.ok_or_else(|| {
            pki::Error::Damaged { what: "certificate", name: authority().name.clone() }
        })?;

        let url = peer.url();
        let is_it = |member: &Member| member.peer_url == url;
        let mut members = room_for(&is_it, &clients).await?;
        if !members.iter().any(is_it) {
            let added = change("add a member", || {
                let mut etcd = clients.raw().cluster_client();
                let url = url.clone();
                async move {
                    let options = MemberAddOptions::new().with_is_learner();
                    etcd.member_add([url], Some(options)).await
                }
            });
            members = match added.await {
                Ok(added) => members_of(added.member_list()),
                // An attempt that was given up may have succeeded.
                Err(error) => {
                    let members = list(&clients).await?;
                    members.iter().any(is_it).then_some(members).ok_or(error)?
                }
            };
            self.wake.notify_one();
            info!(node = %identity.id, "added a learner");
        }
        Ok(Invitation { authorities, certificate: issued.der, crl: crl.der, members })
    }

    /// The members that answer, this one among them.
    ///
    /// # Errors
    ///
    /// [`Error::Peers`].
    pub async fn answering(&self) -> Result<BTreeSet<MemberId>, Error> {
        let connected = peers::answering(&self.sockets.http()).await.map_err(Error::Peers)?;
        let status = self.status.borrow().clone();
        let members = status.members.into_iter();
        let connected: Vec<_> = members.filter(|member| connected.contains(&member.id)).collect();
        let mut answering = peers::reachable(&connected).await;
        answering.extend(status.member);
        Ok(answering)
    }

    /// The same, to be shown: all callers share one reading for a second. Empty if it failed.
    pub async fn answering_lately(&self) -> BTreeSet<MemberId> {
        let mut shown = self.shown.lock().await;
        if let Some((at, found)) = &shown.found
            && at.elapsed() < SHOWN_FOR
        {
            return found.clone();
        }
        if let Some(begun) = shown.begun {
            // The caller that began it may have gone before its end.
            sleep_until(begun + SHOWN_FOR).await;
        }
        shown.begun = Some(Instant::now());
        let found = self.answering().await.unwrap_or_default();
        shown.found = Some((Instant::now(), found.clone()));
        found
    }

    /// Whether a client or a peer takes a copy of this member's database now.
    pub(super) async fn sends_copies(&self) -> Result<bool, Error> {
        peers::sends_copies(&self.sockets.http()).await.map_err(Error::Peers)
    }

    /// Lets a voter that is connected lead, if this member does. Returns whether it leads no more.
    pub(super) async fn hand_over(&self, clients: &Clients) -> bool {
        let status = self.status.borrow().clone();
        hand_over(&status, clients, &self.sockets).await
    }

    /// The numbers of this member since it was started.
    ///
    /// # Errors
    ///
    /// [`Error::Peers`].
    pub async fn work(&self) -> Result<Work, Error> {
        peers::work(&self.sockets.http()).await.map_err(Error::Peers)
    }

    /// The nodes whose member does not answer, as far as this member sees. Takes a few
    /// seconds at most.
    ///
    /// # Errors
    ///
    /// [`Error::Peers`].
    pub async fn unreachable(&self) -> Result<BTreeSet<NodeId>, Error> {
        let members = self.status.borrow().members.clone();
        if members.len() < 2 {
            return Ok(BTreeSet::new());
        }
        let answering = self.answering().await?;
        let silent = members.iter().filter(|member| !answering.contains(&member.id));
        Ok(silent.filter_map(Member::node).collect())
    }

    /// Every member, by the current view of a majority.
    ///
    /// # Errors
    ///
    /// [`Error::NoVoter`] and [`Error::Etcd`].
    pub async fn list(&self) -> Result<Vec<Member>, Error> {
        let status = self.status.borrow().clone();
        Ok(list(status.voter().ok_or(Error::NoVoter)?).await?)
    }

    /// The member of `id`, if it has one and the others can go on without it. A member that
    /// never started has no name yet: `peer` identifies it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the others cannot go on without it.
    pub async fn may_leave(&self, id: NodeId, peer: &Peer) -> Result<Option<Member>, Error> {
        let status = self.status.borrow().clone();
        let clients = status.voter().ok_or(Error::NoVoter)?;
        let members = list(clients).await?;
        let Some(leaving) = members.iter().find(|member| member.is_of(id, peer)) else {
            return Ok(None);
        };
        quorum::may_leave(leaving, &members, &self.answering().await?)?;
        Ok(Some(leaving.clone()))
    }

    /// Removes the member of `id` for good, which [`Self::may_leave`] found, and
    /// revokes its certificates. `pki` as in [`Self::add`].
    ///
    /// # Errors
    ///
    /// [`Error`]; the call may be repeated.
    pub async fn evict<S: pki::Store>(
        &self,
        id: NodeId,
        member: Option<&Member>,
        pki: S,
    ) -> Result<(), Error> {
        if let Some(member) = member {
            self.remove(member).await?;
            tokio::time::sleep(FAREWELL).await;
        }
        self.revoke(id, pki).await
    }

    /// Removes a member: one that [`Self::may_leave`] found, or a learner.
    ///
    /// # Errors
    ///
    /// [`Error`]; the call may be repeated.
    pub async fn remove(&self, member: &Member) -> Result<(), Error> {
        let status = self.status.borrow().clone();
        let clients = status.voter().ok_or(Error::NoVoter)?;
        if Some(member.id) == status.member {
            return Err(Error::Itself);
        }
        let removed = change("remove a member", || {
            let mut etcd = clients.raw().cluster_client();
            async move { etcd.member_remove(member.id.0).await }
        });
        match removed.await {
            // The answer to an earlier attempt was lost.
            Err(error) if error.says("member not found") => {}
            removed => drop(removed?),
        }
        self.wake.notify_one();
        info!(event = "voted", node = member.called(), "a member of etcd was removed");
        Ok(())
    }

    /// Revokes the certificates of a node's member. `pki` as in [`Self::add`].
    ///
    /// # Errors
    ///
    /// [`Error`]; the call may be repeated.
    pub async fn revoke<S: pki::Store>(&self, id: NodeId, pki: S) -> Result<(), Error> {
        let namespace = Namespace::new(pki, "");
        namespace.revoke_surely(&authority(), &id.to_string(), Reason::Left, clock::now()).await?;
        Ok(())
    }

    /// Promotes learners that have caught up, while this member leads, and keeps
    /// this member's peer URL right. A service.
    pub(super) async fn promote(mut self, ctx: Context) -> Result<(), Error> {
        let url = self.status.borrow().peer_url.clone();
        let mut since = None;
        let mut failed = cause::Last::default();
        loop {
            let waiting = until(&mut self.status, "the etcd member", |status| {
                let clients = status.voter()?.clone();
                ctx.healthy();
                let own = status.members.iter().find(|member| Some(member.id) == status.member)?;
                let learner = status.members.iter().find(|member| member.learner);
                match learner.filter(|_| status.leader == status.member) {
                    Some(learner) => Some((clients, Change::Promote(learner.clone()))),
                    None if own.peer_url != url => Some((clients, Change::Move(own.clone()))),
                    None => None,
                }
            });
            let Some(found) = ctx.until_cancelled(waiting).await else { return Ok(()) };
            let (clients, change) = found?;
            let (member, changed) = match &change {
                Change::Promote(learner) => (learner.id, promote(&clients, learner).await),
                Change::Move(own) => (own.id, follow(&clients, own, &url).await),
            };
            match changed {
                Ok(changed) => {
                    failed.clear();
                    if changed {
                        self.wake.notify_one();
                    }
                }
                Err(error) => {
                    let error = cause::line(&error);
                    if failed.is_new(&error) {
                        warn!(error, "cannot change a member yet");
                    }
                }
            }
            let begun = match since {
                Some((same, begun)) if same == member => begun,
                _ => tokio::time::Instant::now(),
            };
            since = Some((member, begun));
            let pause = tokio::time::sleep(pause(begun.elapsed()));
            if ctx.until_cancelled(pause).await.is_none() {
                return Ok(());
            }
        }
    }
}

enum Change {
    Promote(Member),
    Move(Member),
}

/// The delay before the next attempt for a learner that was found this long ago.
fn pause(waited: Duration) -> Duration {
    (waited / PROMOTE_LATE).clamp(PROMOTE, PROMOTE_MAX)
}

/// Waits until there is room for another learner, or `is_it` is among the members; returns
/// the members.
///
/// etcd takes one learner, and notices an existing one only when it comes to the entry of
/// its log for another. As long as such an entry is on its way, it drops every other change
/// without an error, the promotion that would make room among them: so this member does not
/// request a change that etcd is going to reject.
async fn room_for(
    is_it: &impl Fn(&Member) -> bool,
    clients: &Clients,
) -> Result<Vec<Member>, Error> {
    let end = tokio::time::Instant::now() + TURN_MAX;
    loop {
        let members = list(clients).await?;
        let Some(learner) = members.iter().find(|member| member.learner) else {
            return Ok(members);
        };
        if members.iter().any(is_it) {
            return Ok(members);
        }
        if tokio::time::Instant::now() >= end {
            return Err(Error::Turn { node: learner.called().to_owned() });
        }
        tokio::time::sleep(CHANGE_RETRY).await;
    }
}

/// Whether the list of members changed. A learner that has not caught up is not an error:
/// the promotion is retried.
async fn promote(clients: &Clients, learner: &Member) -> Result<bool, client::Error> {
    let mut etcd = clients.raw().cluster_client();
    // A change that etcd drops is never answered.
    match call("promote a learner", etcd.member_promote(learner.id.0)).await {
        Ok(_) => {
            info!(event = "votes", node = learner.called(), "a member of etcd became a voter");
            Ok(true)
        }
        Err(error) if error.says("in sync with leader") => Ok(false),
        // Another member was faster: the next list of members shows it.
        Err(error) if error.says("can only promote a learner member") => Ok(true),
        Err(error) => Err(error),
    }
}

/// Publishes the address of this member to the others.
async fn follow(clients: &Clients, own: &Member, url: &str) -> Result<bool, client::Error> {
    let mut etcd = clients.raw().cluster_client();
    call("update the peer URL", etcd.member_update(own.id.0, [url.to_owned()])).await?;
    info!(from = own.peer_url, to = url, "updated the peer URL");
    Ok(true)
}

/// Lets a voter that is connected lead, if the member of `status` leads: writes go on at once
/// then, and not after an election. Returns whether it leads no more.
pub(super) async fn hand_over(status: &Status, clients: &Clients, sockets: &Sockets) -> bool {
    if status.leader.is_none() || status.leader != status.member {
        return true;
    }
    let connected = peers::answering(&sockets.http()).await.unwrap_or_default();
    let fits = |member: &&Member| {
        !member.learner && Some(member.id) != status.member && connected.contains(&member.id)
    };
    let Some(next) = status.members.iter().find(fits) else { return false };
    let mut etcd = clients.raw().maintenance_client();
    let error = match tokio::time::timeout(HAND_OVER_MAX, etcd.move_leader(next.id.0)).await {
        Ok(Ok(_moved)) => {
            info!(leader = next.name, "this member hands its leadership over");
            return true;
        }
        Ok(Err(error)) => cause::line(&error),
        Err(elapsed) => cause::line(&elapsed),
    };
    warn!(error, "this member cannot hand its leadership over");
    false
}

/// Every member, by the current view of a majority. The client asks a member for its own list,
/// which may be old; a read before it waits until the member has all that a majority has.
async fn list(clients: &Clients) -> Result<Vec<Member>, client::Error> {
    let listed: MemberListResponse = change("list the members", || {
        let (mut kv, mut etcd) = (clients.raw().kv_client(), clients.raw().cluster_client());
        async move {
            kv.get(NO_KEY, None).await?;
            etcd.member_list().await
        }
    })
    .await?;
    Ok(members_of(listed.members()))
}

/// Retries a call while etcd is not ready for it: just after another change, or just after
/// an election.
async fn change<T, F>(what: &'static str, attempt: impl Fn() -> F) -> Result<T, client::Error>
where
    F: Future<Output = Result<T, etcd_client::Error>>,
{
    let end = tokio::time::Instant::now() + CHANGE_MAX;
    loop {
        let error = match call(what, attempt()).await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let passing = error.retriable() || error.says("unhealthy cluster");
        if !passing || tokio::time::Instant::now() >= end {
            return Err(error);
        }
        tokio::time::sleep(CHANGE_RETRY).await;
    }
}

#[cfg(test)]
#[path = "members_tests.rs"]
mod tests;
