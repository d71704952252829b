//! The update of the cluster: begins it, gives each node its turn, and continues with the journal
//! while this curator leads.
//!
//! ```text
//! BeginUpdate --plan--> cluster/update --> directory --> answers to heartbeats
//!                             ^                |
//!                             \--- step -------+--- heartbeats
//! ```
//!
//! Invariants:
//! - Every change of the journal is a fenced write over the record that it was made of, so two
//!   leaders never both give a turn.
//! - A leader whose copy of the records may be behind gives no turn.
//! - The leave to restart rests on facts of the last seconds, and ends with the term.
//! - No node gets it while another one leaves, or the members of etcd change otherwise; and no
//!   voter leaves while another one has it, or is not back (`departures`).

use std::convert::Infallible;
use std::time::Duration;

use polis_bundle::EtcdTarget;
use polis_proto::v1;
use polis_proto::v1::cluster_update::State;
use polis_proto::v1::cluster_update::step::State as Progress;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::{Handlers, Lead, seconds};
use crate::curator::directory::Directory;
use crate::curator::error::Error;
use crate::curator::store::{Outcome, UPDATE};
use crate::curator::update::plan::plan;
use crate::curator::update::{Bundle, Control, Fact, Facts, Next, journal};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{HEARTBEAT, is_consensus_member};

/// Between two looks at the journal, and between two heartbeats of a node that an update waits
/// for.
const EVERY: Duration = Duration::from_secs(1);

/// How long the leave to restart counts: what it rests on may have changed since.
const LEAVE: Duration = Duration::from_secs(3);

/// The reason why an update waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    what: String,
    /// Seconds since 1970.
    since: i64,
}

/// Goes on with the journal. A service of every curator.
#[derive(Clone)]
pub(in crate::curator) struct Updating {
    pub(in crate::curator) handlers: Handlers,
}

impl Updating {
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        ctx.healthy();
        loop {
            let pass = async {
                if let Err(error) = self.pass().await {
                    // The next pass sees what was written.
                    debug!(
                        error = &error as &dyn std::error::Error,
                        "cannot go on with the update"
                    );
                }
                self.show();
                sleep(EVERY).await;
            };
            if ctx.until_cancelled(Box::pin(pass)).await.is_none() {
                // Last of all: without a curator this node knows nothing of it.
                self.handlers.0.update.send_replace(None);
                return Ok(());
            }
        }
    }

    async fn pass(&self) -> Result<(), Error> {
        let Ok(lead) = self.handlers.lead() else {
            self.rest();
            return Ok(());
        };
        let known = {
            let directory = self.handlers.0.directory.borrow();
            // In a copy that is behind, a node that has entered since would count as gone. A leave
            // that was found before ends by itself.
            if !lead.is_current(&directory) {
                return Ok(());
            }
            directory.update()
        };
        let Some(known) = known.filter(|known| journal::is_open(known)) else {
            self.rest();
            return Ok(());
        };
        let spare = lead.spare().await;
        let (facts, now) = (Facts { nodes: lead.facts(), spare }, seconds());
        let leave = journal::leave(&known, &facts).map(|node| (node, Instant::now()));
        self.handlers.0.leave.send_replace(leave);
        match journal::step(&known, &facts, now) {
            Next::Rest => self.rest(),
            Next::Wait(what) => self.wait(Some(what)),
            Next::Write(_) => {
                // Over the record itself, which the copy may be behind.
                let stepped = |old: Option<v1::ClusterUpdate>| {
                    let old = old.unwrap_or_default();
                    Ok::<_, Error>(match journal::step(&old, &facts, now) {
                        Next::Write(new) => Outcome::Put(*new, Vec::new(), Vec::new()),
                        Next::Wait(_) | Next::Rest => Outcome::Keep(old),
                    })
                };
                let new = lead.store().update(UPDATE, stepped).await?;
                said(&known, &new);
            }
        }
        Ok(())
    }

    fn rest(&self) {
        self.wait(None);
        self.handlers.0.leave.send_replace(None);
    }

    /// Shows the update to the rest of this node. Only the leader knows what it waits for.
    fn show(&self) {
        let parts = &self.handlers.0;
        let update = parts.directory.borrow().update();
        let now = update.map(|update| with_wait(&update, parts.waiting.borrow().clone()));
        parts.update.send_if_modified(|shown| {
            let changed = *shown != now;
            *shown = now;
            changed
        });
    }

    fn wait(&self, what: Option<String>) {
        self.handlers.0.waiting.send_if_modified(|waiting| {
            if waiting.as_ref().map(|waiting| &waiting.what) == what.as_ref() {
                return false;
            }
            *waiting = what.map(|what| Waiting { what, since: seconds() });
            true
        });
    }
}

/// Logs what has changed.
fn said(before: &v1::ClusterUpdate, after: &v1::ClusterUpdate) {
    let version = after.bundle.as_ref().map_or("", |bundle| &bundle.version);
    for (old, new) in before.steps.iter().zip(&after.steps) {
        if old.state == new.state {
            continue;
        }
        let node = &new.node_id;
        match new.state() {
            Progress::Turn => info!(%node, version, "it is this node's turn to update"),
            Progress::Done => info!(%node, version, "the node runs the new version"),
            Progress::Gone => info!(%node, version, "the node left before its update"),
            Progress::Failed => {
                let cause = &new.cause;
                warn!(%node, version, cause, "the node did not take the new version");
            }
            Progress::Waiting | Progress::Unspecified => {}
        }
    }
    if before.state != after.state {
        info!(version, state = state(after.state()), "the update of the cluster");
    }
}

/// The word for a state.
fn state(state: State) -> &'static str {
    match state {
        State::Loading => "waiting for its bundle",
        State::Running => "running",
        State::Failed => "stopped by a node that did not take it",
        State::Done => "done",
        State::Aborted => "aborted",
        State::Unspecified => "unknown",
    }
}

impl Lead {
    fn facts(&self) -> Vec<Fact> {
        let parts = &self.handlers.0;
        Fact::all(&parts.directory.borrow(), &parts.heartbeats, parts.node)
    }

    /// The part of a node in an update; `None` while the copy may be behind.
    pub(super) fn orders(&self, node: NodeId) -> Option<v1::UpdateOrders> {
        let directory = self.handlers.0.directory.borrow();
        if !self.is_current(&directory) {
            return None;
        }
        let Some(known) = directory.update() else { return Some(v1::UpdateOrders::default()) };
        let address = |holder| {
            let status = directory.node(holder)?.node.status.as_ref()?;
            Some(status.external_address.clone())
        };
        let turn = journal::turn(&known, node, address);
        // Also where the leave was found before a departure began.
        let changing = self.members_change(&directory);
        let restart = turn.is_some() && self.leave() == Some(node) && !changing;
        Some(v1::UpdateOrders { turn, keep: journal::keeps(&known, node), restart })
    }

    /// The node whose leave to restart still counts.
    fn leave(&self) -> Option<NodeId> {
        let leave = *self.handlers.0.leave.borrow();
        leave.filter(|(_, found)| found.elapsed() < LEAVE).map(|(node, _)| node)
    }

    /// The voter that restarts for its update. A departure asks while it holds the lock of the
    /// members.
    pub(super) async fn restarting(&self) -> Option<NodeId> {
        let update = self.handlers.0.directory.borrow().update();
        let update = update.filter(|update| journal::in_turn(update).is_some())?;
        let spare = self.spare().await;
        let facts = Facts { nodes: self.facts(), spare };
        journal::restarting(&update, &facts, self.leave())
    }

    /// Between two heartbeats of a node.
    pub(super) fn pace(&self, node: NodeId) -> Duration {
        pace(&self.handlers.0.directory.borrow(), node)
    }

    /// Plans an update, and begins it unless it is a trial run.
    pub(super) async fn begin_update(
        &self,
        request: v1::BeginUpdateRequest,
    ) -> Result<v1::ClusterUpdate, Error> {
        let v1::BeginUpdateRequest { bundle, dry_run, one_way } = request;
        let message = bundle.ok_or_else(|| Error::Field("bundle is missing".to_owned()))?;
        let bundle = Bundle::read(&message).map_err(|invalid| Error::Field(invalid.to_string()))?;
        let (facts, now) = (self.facts(), seconds());
        let runs = self.handlers.0.consensus.borrow().cluster_version;
        // A plan says what it asks for.
        let etcd = EtcdTarget { runs, one_way: one_way || dry_run };
        let begin = |old: Option<&v1::ClusterUpdate>| {
            if let Some(old) = old.filter(|old| journal::is_open(old)) {
                let same = old.bundle.as_ref() == Some(&message);
                if same && old.state() == State::Loading {
                    return Ok(None);
                }
                let version = old.bundle.clone().unwrap_or_default().version;
                return Err(Error::UpdateGoesOn { version, state: state(old.state()) });
            }
            let turns = plan(&facts, &bundle, etcd)?;
            let own = self.handlers.0.node;
            Ok(Some(v1::ClusterUpdate {
                etcd: runs.map(|runs| runs.to_string()).unwrap_or_default(),
                one_way,
                ..journal::begun(message.clone(), own, &turns, &facts, now)
            }))
        };
        if dry_run {
            let known = self.handlers.0.directory.borrow().update();
            let planned = begin(known.as_deref())?;
            return Ok(planned.or_else(|| known.as_deref().cloned()).unwrap_or_default());
        }
        self.store()
            .update(UPDATE, |old: Option<v1::ClusterUpdate>| {
                Ok::<_, Error>(match begin(old.as_ref())? {
                    Some(new) => {
                        info!(version = message.version, "an update of the cluster begins");
                        Outcome::Put(new, Vec::new(), Vec::new())
                    }
                    None => Outcome::Keep(old.unwrap_or_default()),
                })
            })
            .await
    }

    /// Holds, continues or ends the update that goes on.
    pub(super) async fn control_update(
        &self,
        request: v1::ControlUpdateRequest,
    ) -> Result<v1::ClusterUpdate, Error> {
        use v1::control_update_request::Control as Asked;
        let control = match request.control() {
            Asked::Pause => Control::Pause,
            Asked::Resume => Control::Resume,
            Asked::Abort => Control::Abort,
            Asked::Unspecified => {
                let text = "control is missing; allowed are PAUSE, RESUME, ABORT";
                return Err(Error::Field(text.to_owned()));
            }
        };
        let written = self.store().update(UPDATE, |old: Option<v1::ClusterUpdate>| {
            let old = old.filter(|old| journal::takes(old, control));
            let old = old.ok_or(Error::NoUpdate("goes on"))?;
            let new = journal::controlled(&old, control, seconds());
            if new == old {
                return Ok(Outcome::Keep(old));
            }
            info!(?control, "an owner controls the update of the cluster");
            Ok(Outcome::Put(new, Vec::new(), Vec::new()))
        });
        written.await
    }

    /// The update that goes on, or the last one.
    pub(super) async fn read_update(&self) -> Result<v1::GetUpdateResponse, tonic::Status> {
        let directory = self.current().await?;
        let update = directory.borrow().update();
        let update = update.ok_or_else(|| self.refuse(Error::NoUpdate("was ever begun")))?;
        Ok(with_wait(&update, self.handlers.0.waiting.borrow().clone()))
    }

    /// The update that goes on.
    pub(super) fn update_that_goes_on(
        &self,
        directory: &Directory,
    ) -> Option<v1::GetUpdateResponse> {
        let update = directory.update().filter(|update| journal::is_open(update))?;
        Some(with_wait(&update, self.handlers.0.waiting.borrow().clone()))
    }
}

/// Between two heartbeats of a node: shorter while an update goes on, for the voters and the nodes
/// that it waits for. More heartbeats of the others would only load the leader.
fn pace(directory: &Directory, node: NodeId) -> Duration {
    let Some(update) = directory.update().filter(|update| journal::is_open(update)) else {
        return HEARTBEAT;
    };
    let known = directory.node(node);
    let votes = known.is_some_and(|known| is_consensus_member(known.node.roles.as_ref()));
    if votes || journal::waits_for(&update, node) { EVERY } else { HEARTBEAT }
}

/// The update, with what it waits for while it goes on.
fn with_wait(update: &v1::ClusterUpdate, waiting: Option<Waiting>) -> v1::GetUpdateResponse {
    let waiting = waiting.filter(|_| journal::is_open(update));
    let (waits_for, waits_since) =
        waiting.map(|waiting| (waiting.what, waiting.since)).unwrap_or_default();
    let update = Some(update.clone());
    v1::GetUpdateResponse { update, waits_for, waits_since }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::consensus::client::{Change, Kv, Mirror};
    use crate::curator::store;

    fn id(seed: u8) -> NodeId {
        NodeId::from_public_key(&[seed; 32])
    }

    fn put(key: String, value: Vec<u8>) -> Change {
        Change::Put(Kv { key, value, created: 1, modified: 1, lease: 0 })
    }

    #[test]
    fn only_voters_and_nodes_that_an_update_waits_for_send_more_heartbeats() {
        let [voter, holder, first, second] = [1, 2, 3, 4].map(id);
        let roles = v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        };
        let record = v1::Node { roles: Some(roles), ..Default::default() };
        let paces = |update: &v1::ClusterUpdate| {
            let mut directory = Directory::default();
            let changes = [
                put(store::node_key(voter), record.encode_to_vec()),
                put(UPDATE.to_owned(), update.encode_to_vec()),
            ];
            directory.apply(&Mirror::default(), &changes);
            [voter, holder, first, second].map(|node| pace(&directory, node))
        };
        let step = |node: NodeId, state: Progress| v1::cluster_update::Step {
            node_id: node.to_string(),
            state: state.into(),
            ..Default::default()
        };
        let mut update = v1::ClusterUpdate {
            holder: holder.to_string(),
            state: State::Loading.into(),
            steps: vec![step(first, Progress::Waiting), step(second, Progress::Waiting)],
            ..Default::default()
        };
        assert_eq!(paces(&update), [EVERY, EVERY, HEARTBEAT, HEARTBEAT]);
        update.set_state(State::Running);
        update.steps[0].set_state(Progress::Turn);
        assert_eq!(paces(&update), [EVERY, EVERY, EVERY, HEARTBEAT]);
        update.steps[0].set_state(Progress::Done);
        update.steps[1].set_state(Progress::Turn);
        assert_eq!(paces(&update), [EVERY, EVERY, HEARTBEAT, EVERY]);
        update.set_state(State::Aborted);
        assert_eq!(paces(&update), [HEARTBEAT; 4]);
    }
}
