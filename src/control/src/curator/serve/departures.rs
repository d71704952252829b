//! Departures: takes nodes out of etcd and out of the cluster, one after the other.
//!
//! ```text
//! a call ------------------> [may it leave?] --no--> refused, and nothing has changed
//!                                  | yes
//! a leader that begins ---> [`leaving` in its record] -> removed from etcd -> revoked
//! and finds `leaving`                                                           |
//!                              role, or all of it, out of the record <----------+
//! ```
//!
//! A call only waits for the departure: the caller may go away. The current leader carries
//! out `leaving` for as long as the record has it, and a repeated call waits for the same
//! departure. If the others cannot go on without the node any more, the departure is
//! withdrawn, as if it had been refused, and the log of the leader reports it. One that has begun
//! waits while another voter restarts for its update, or its member for a rotation.
//!
//! A learner of a node that should not be a member is taken out, too: a leader that did not
//! know yet that it no longer leads may have added it.
//!
//! Invariants:
//! - A node is taken out of etcd only after its record has `leaving`.
//! - One change of the members at a time: no node enters by a role that is being taken away.
//! - No voter leaves while another one has the leave to restart for its update, or is not back, or
//!   its member is to start again for a rotation: two that are away at once may cost the quorum.
//! - A leader does not remove its own member: it steps down, and the next leader does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::departure::Then;
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::time::sleep;
use tonic::Status;
use tracing::{info, warn};

use super::{Handlers, Lead};
use crate::consensus::client::User;
use crate::consensus::{self, Member, MembersError};
use crate::curator::directory::{Directory, Known};
use crate::curator::error::Error;
use crate::curator::leader::Leadership;
use crate::curator::state::{self, Refusal, Request};
use polis_base::cause;
use polis_base::sys::clock;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::is_consensus_member;
use polis_wire::pki::Reason;

/// The number of calls that may wait for one another.
const WAITING_MAX: usize = 16;

/// The delay between two attempts at what a call or a leader has begun.
const RETRY: Duration = Duration::from_secs(1);

/// How long a curator that should leave and leads once more leads first.
const TERM_MIN: Duration = Duration::from_secs(10);

/// The content of a request.
#[derive(Debug)]
pub struct Asked {
    node: NodeId,
    departure: v1::Departure,
    answer: oneshot::Sender<Result<(), Status>>,
}

/// The handle to request a departure. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Departures(mpsc::Sender<Asked>);

/// The other end of [`Departures`]; every run of [`Service`] takes it in turn.
pub(super) type Queue = Arc<Mutex<mpsc::Receiver<Asked>>>;

impl Departures {
    /// Both ends.
    #[must_use]
    pub fn channel() -> (Self, Queue) {
        let (asks, queue) = mpsc::channel(WAITING_MAX);
        (Self(asks), Arc::new(Mutex::new(queue)))
    }

    /// Waits until a node is out, or is refused.
    pub(super) async fn ask(&self, node: NodeId, departure: v1::Departure) -> Result<(), Status> {
        let (answer, answered) = oneshot::channel();
        let many = |_full| {
            let text = "too many nodes are leaving at once; try again in a minute";
            Status::unavailable(text)
        };
        self.0.try_send(Asked { node, departure, answer }).map_err(many)?;
        let lost = |_lost| Status::unavailable("this curator has stopped; try again");
        answered.await.map_err(lost)?
    }
}

/// What the last attempts failed with. They are a second apart, for as long as another voter is
/// away, and the log has a cause once until it changes.
#[derive(Debug, Default)]
struct Hindered {
    nodes: BTreeMap<NodeId, cause::Last>,
    learners: cause::Last,
}

impl Hindered {
    /// Whether the last attempt to take this node out has failed.
    fn has(&self, id: NodeId) -> bool {
        self.nodes.contains_key(&id)
    }

    /// Notes how the attempt to take a node out ended; returns whether it failed with another cause
    /// than the one before.
    fn is_new(&mut self, id: NodeId, done: &Result<(), Status>) -> bool {
        match done {
            Ok(()) => {
                self.nodes.remove(&id);
                false
            }
            Err(status) => self.nodes.entry(id).or_default().is_new(status.message()),
        }
    }
}

/// Carries out requests, and what an earlier leader has left. Cloned into every run.
#[derive(Clone, Debug)]
pub struct Service {
    /// The parts that handlers share.
    pub handlers: Handlers,
    /// The requests of calls.
    pub queue: Queue,
    /// Whether this curator leads.
    pub leadership: watch::Receiver<Leadership>,
    /// The nodes that leave.
    pub directory: watch::Receiver<Directory>,
    /// The members of etcd.
    pub consensus: watch::Receiver<consensus::Status>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        ctx.until_cancelled(Box::pin(self.work())).await.unwrap_or(Ok(()))
    }

    async fn work(&mut self) -> Result<(), Closed> {
        let queue = Arc::clone(&self.queue);
        let mut queue = queue.lock().await;
        let mut hindered = Hindered::default();
        loop {
            let failed = self.clear_up(&mut hindered).await;
            let Self { leadership, directory, consensus, .. } = &mut *self;
            tokio::select! {
                // Cancel-safe, all of them: they wait for values or for the time.
                asked = queue.recv() => {
                    let asked = asked.ok_or(Closed("the curator"))?;
                    // A caller that left before it began may have changed its mind by now.
                    if !asked.answer.is_closed() {
                        let done = self.take_out(asked.node, asked.departure).await;
                        // The caller does not wait for it any more, and it is done all the same.
                        let _unheard = asked.answer.send(done);
                    }
                }
                next_change = next_change(leadership, directory, consensus, failed) => next_change?,
            }
        }
    }

    /// Continues every departure that was begun, and takes out learners without a node that
    /// wants them. Returns whether an attempt has to be repeated.
    async fn clear_up(&mut self, hindered: &mut Hindered) -> bool {
        if self.leadership.borrow_and_update().term.is_none() {
            *hindered = Hindered::default();
            return false;
        }
        let leaving: Vec<_> = {
            let directory = self.directory.borrow_and_update();
            let leaving = |(id, known): (NodeId, &Known)| known.node.leaving.map(|_departure| id);
            directory.nodes().filter_map(leaving).collect()
        };
        hindered.nodes.retain(|id, _| leaving.contains(id));
        let mut failed = false;
        for id in leaving {
            let done = self.go_on(id, hindered).await;
            let is_new = hindered.is_new(id, &done);
            if let Err(status) = done {
                if is_new {
                    warn!(node = %id, %status, "a node cannot leave yet");
                }
                failed = true;
            }
        }
        let learns = self.consensus.borrow_and_update().members.iter().any(|one| one.learner);
        let swept = if learns { self.sweep().await } else { Ok(()) };
        match swept {
            Ok(()) => hindered.learners.clear(),
            Err(status) => {
                if hindered.learners.is_new(status.message()) {
                    warn!(%status, "cannot determine the node of a learner");
                }
                failed = true;
            }
        }
        failed
    }

    async fn take_out(&self, id: NodeId, departure: v1::Departure) -> Result<(), Status> {
        let lead = self.handlers.lead()?;
        let _changing = self.handlers.0.changing.lock().await;
        let node = lead.store().node(id).await.map_err(|error| lead.refuse(error))?;
        // The departure that goes further contains the other.
        let departure = match node.leaving {
            Some(begun) if begun.then > departure.then => begun,
            _ => departure,
        };
        lead.take_out(id, &node, departure).await
    }

    /// Continues the departure in a record, if the record still has it.
    async fn go_on(&self, id: NodeId, hindered: &Hindered) -> Result<(), Status> {
        let lead = self.handlers.lead()?;
        let _changing = self.handlers.0.changing.lock().await;
        let node = match lead.store().node(id).await {
            Err(Error::Refused(Refusal::Unknown)) => return Ok(()),
            node => node.map_err(|error| lead.refuse(error))?,
        };
        let Some(departure) = node.leaving else { return Ok(()) };
        if id == self.handlers.0.node && lead.term.since.elapsed() < TERM_MIN {
            // Where it steps down again and again, no other curator would lead.
            return Err(Status::unavailable("this curator has just started to lead"));
        }
        if !hindered.has(id) {
            info!(node = %id, "continuing to remove a node");
        }
        lead.take_out(id, &node, departure).await
    }

    /// Takes learners out whose node does not have the role.
    async fn sweep(&self) -> Result<(), Status> {
        let lead = self.handlers.lead()?;
        let parts = &self.handlers.0;
        // An entering node has the role in the records before its member is added, and both
        // happen under this lock.
        let _changing = parts.changing.lock().await;
        let directory = lead.current().await?;
        let untrusted: Vec<Member> = {
            let directory = directory.borrow();
            let wanted = |member: &Member| {
                directory.nodes().any(|(id, known)| {
                    let role = is_consensus_member(known.node.roles.as_ref());
                    role && member.is_of(id, &parts.peer(id, &known.node))
                })
            };
            let members = parts.consensus.borrow().members.clone();
            members.into_iter().filter(|one| one.learner && !wanted(one)).collect()
        };
        for learner in untrusted {
            warn!(node = learner.called(), "removing a learner without the role");
            let removed = parts.members.remove(&learner).await;
            removed.map_err(|error| lead.refuse(error))?;
            if let Some(node) = learner.node() {
                let pki = lead.fenced(User::EtcdPki).map_err(|error| lead.refuse(error))?;
                let revoked = parts.members.revoke(node, pki).await;
                revoked.map_err(|error| lead.refuse(error))?;
            }
        }
        Ok(())
    }
}

impl Lead {
    /// Takes `node` out of etcd, if it is in there, and then what `departure` names out of
    /// its record. The caller holds the lock of the members.
    async fn take_out(
        &self,
        id: NodeId,
        node: &v1::Node,
        departure: v1::Departure,
    ) -> Result<(), Status> {
        let parts = &self.handlers.0;
        let refuse = |error: Error| self.refuse(error);
        // The journal of an update may be that of another leader.
        self.current().await?;
        let leaving = match self.may_leave(id, node).await {
            // One that has begun waits for a voter that restarts, which a new leader knows only
            // by its next heartbeat.
            Err(error @ Error::Members(MembersError::Refused(_))) => {
                if let Some(begun) = node.leaving {
                    // The caller may be gone: this line is the only report of it.
                    warn!(
                        node = %id,
                        error = &error as &dyn std::error::Error,
                        "{} is withdrawn: request it again",
                        withdrawn(begun)
                    );
                    self.store().change(id, Request::Stay).await.map_err(refuse)?;
                }
                return Err(self.refuse(error));
            }
            leaving => leaving.map_err(refuse)?,
        };
        if node.leaving != Some(departure) {
            if departure.then() == Then::Roles {
                // A departure that the record refuses must not begin.
                let (add, remove) = changes(departure);
                let tried = state::step(Some(node.clone()), Request::Roles { add, remove });
                tried.map_err(|refused| self.refuse(refused))?;
            }
            self.store().change(id, Request::Leave(departure)).await.map_err(refuse)?;
        }
        let own = parts.consensus.borrow().member;
        if own.is_some() && own == leaving.as_ref().map(|member| member.id) {
            info!("stepping down, for the next leader to remove this member");
            self.term.step_down();
            return Err(self.handlers.not_leader());
        }
        let pki = self.fenced(User::EtcdPki).map_err(refuse)?;
        let evicted = parts.members.evict(id, leaving.as_ref(), pki).await;
        evicted.map_err(|error| self.refuse(error))?;
        self.strike(id, departure).await.map_err(refuse)
    }

    /// The member of `node` that may leave etcd now; `None` without one.
    async fn may_leave(&self, id: NodeId, node: &v1::Node) -> Result<Option<Member>, Error> {
        let parts = &self.handlers.0;
        // Before etcd is asked, which finds a member missing whose start has begun by now.
        let ordered = *parts.restart.borrow();
        let leaving = parts.members.may_leave(id, &parts.peer(id, node)).await?;
        if leaving.as_ref().is_none_or(|member| member.learner) {
            return Ok(leaving);
        }
        // The node that restarts may itself leave: etcd misses it already.
        let other = |restarts: &NodeId| *restarts != id;
        if let Some(node) = ordered.filter(other) {
            return Err(Error::StartsAgain { node });
        }
        match self.restarting().await.filter(other) {
            Some(node) => Err(Error::Restarting { node }),
            None => Ok(leaving),
        }
    }

    /// Takes what `departure` names out of the record of a node.
    async fn strike(&self, id: NodeId, departure: v1::Departure) -> Result<(), Error> {
        let (store, name) = (self.store(), id.to_string());
        // The node has left etcd, and can make no other.
        store.revoke_curator(id, clock::now()).await?;
        let revoke = || store.revoke(&name, Reason::Left, clock::now());
        match departure.then() {
            Then::Roles | Then::Unspecified => {
                let (add, remove) = changes(departure);
                let changed = store.change(id, Request::Roles { add, remove }).await;
                // The node is out of etcd, whatever becomes of the rest.
                if matches!(changed, Ok(_) | Err(Error::Refused(_))) {
                    store.change(id, Request::Stay).await?;
                }
                changed?;
            }
            Then::Decommission => {
                // From here on the CA signs nothing for it any more.
                store.change(id, Request::Decommission).await?;
                revoke().await?;
                store.change(id, Request::Stay).await?;
                info!(event = "left", node = %id, "a node was decommissioned");
            }
            Then::Delete => {
                if store.node(id).await?.state() == v1::NodeState::Up {
                    store.change(id, Request::Decommission).await?;
                }
                // A record that still exists can be deleted again; without a record, its
                // certificates could not be found and revoked.
                revoke().await?;
                store.change(id, Request::Delete { force: false }).await?;
                info!(event = "left", node = %id, "a node was deleted");
            }
        }
        Ok(())
    }
}

/// Waits for news, or after a `failed` attempt, for the time of the next. An attempt
/// writes, which is news itself, and ten of them in a second help nothing.
async fn next_change(
    leadership: &mut watch::Receiver<Leadership>,
    directory: &mut watch::Receiver<Directory>,
    consensus: &mut watch::Receiver<consensus::Status>,
    failed: bool,
) -> Result<(), Closed> {
    tokio::select! {
        // Cancel-safe, all of them: they wait for values or for the time.
        changed = leadership.changed() => changed.map_err(|_closed| Closed("the election")),
        changed = directory.changed(), if !failed => {
            changed.map_err(|_closed| Closed("the directory"))
        }
        changed = consensus.changed(), if !failed => {
            changed.map_err(|_closed| Closed("the etcd member"))
        }
        () = sleep(RETRY), if failed => Ok(()),
    }
}

/// The roles that `departure` gives and takes.
fn changes(departure: v1::Departure) -> (v1::NodeRoles, v1::NodeRoles) {
    (departure.add.unwrap_or_default(), departure.remove.unwrap_or_default())
}

/// The purpose of `departure`, for people.
fn withdrawn(departure: v1::Departure) -> &'static str {
    match departure.then() {
        Then::Roles | Then::Unspecified => "removing a node from etcd",
        Then::Decommission => "decommissioning a node",
        Then::Delete => "deleting a node",
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_node_that_cannot_leave_is_in_the_log_once_for_each_cause() {
        let [one, two] = [1, 2].map(|seed| NodeId::from_public_key(&[seed; 32]));
        let mut hindered = Hindered::default();
        let mut lines = 0;
        for _second in 0..600 {
            for (id, why) in [(one, "polis-3 restarts"), (two, "polis-4 restarts")] {
                let done = Err(Status::unavailable(why));
                lines += u32::from(hindered.is_new(id, &done));
                assert!(hindered.has(id));
            }
        }
        assert_eq!(lines, 2);
        assert!(hindered.is_new(one, &Err(Status::unavailable("etcd has no leader"))));
        // The next failure after an attempt that succeeded is new.
        assert!(!hindered.is_new(two, &Ok(())) && !hindered.has(two));
        assert!(hindered.is_new(two, &Err(Status::unavailable("polis-4 restarts"))));
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_failed_is_tried_after_its_time_whatever_changes_meanwhile() {
        let reported = watch::Sender::<Leadership>::default();
        let listed = watch::Sender::<Directory>::default();
        let looked = watch::Sender::<consensus::Status>::default();
        let (mut leadership, mut directory) = (reported.subscribe(), listed.subscribe());
        let mut consensus = looked.subscribe();
        let mut waited = async |failed| {
            let begun = Instant::now();
            next_change(&mut leadership, &mut directory, &mut consensus, failed).await.unwrap();
            begun.elapsed()
        };
        listed.send_modify(|_same| ());
        looked.send_modify(|_same| ());
        assert_eq!(waited(true).await, RETRY);
        assert_eq!(waited(false).await, Duration::ZERO);
        // A change of leader is not a matter of patience.
        reported.send_modify(|_same| ());
        assert_eq!(waited(true).await, Duration::ZERO);
    }
}
