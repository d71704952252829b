//! The health of each node, by the heartbeats that the leader receives.
//!
//! Heartbeats live in the memory of the leader only: a write for each would be
//! the largest load on etcd, for a fact that is old after five seconds.
//!
//! ```text
//!             heartbeat                        two heartbeats are missing
//! [unknown] ------------> [healthy] <----------------------------> [late]
//!     |                                   heartbeat                   ^
//!     +---- the leader has led for as long, or etcd does not reach ---+
//!           the node's member at the start of the term
//! [absent]: never home, approved to return, or removed: sends none
//! ```
//!
//! A new leader has received no heartbeat. etcd noticed a dead member before the
//! election, so the leader asks its own member once: a dead machine is late at once, and
//! not only after the time that heartbeats need.
//!
//! Beside a heartbeat the leader notes when a machine asked for the key of the node's disk: a
//! heartbeat after that comes from another machine.
//!
//! What this module does not do: act on a late node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1::{self, NodeHealth, NodeState};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::directory::Directory;
use super::leader::Leadership;
use crate::consensus::Members;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::LATE;

/// The time between two checks for late nodes; small beside [`LATE`].
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How long the first question of a machine without an open disk counts; it asks again within
/// seconds. A second machine is reported once in that time.
const ASKED: Duration = Duration::from_secs(60);

/// The questions of a machine without an open disk.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// The first one.
    at: Instant,
    /// Whether a second machine was reported since.
    reported: bool,
}

/// A heartbeat.
#[derive(Clone, Debug)]
struct Beat {
    at: Instant,
    /// The status of the node's member of etcd, if it has one.
    consensus: Option<v1::ConsensusFigures>,
    /// The node's clock.
    clock: Option<v1::ClockFigures>,
    /// The systems of the node.
    update: Option<Arc<v1::UpdateReport>>,
    /// SHA-256 of the authorities that the node keeps.
    authorities: Vec<u8>,
    /// How far the node's log has reached each target.
    log_deliveries: Vec<v1::LogDelivery>,
    /// Which snapshot of etcd its target has, if the node sends them.
    snapshot_delivery: Option<v1::SnapshotDelivery>,
    /// Whether a machine without an open disk asked as this node, while the node was healthy.
    asked: Option<Asked>,
}

/// The time of each node's last heartbeat. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Heartbeats(Arc<Mutex<BTreeMap<NodeId, Beat>>>);

impl Heartbeats {
    /// Records a heartbeat of a node.
    pub fn record(&self, id: NodeId, request: v1::HeartbeatRequest) {
        let v1::HeartbeatRequest {
            consensus,
            clock,
            update,
            authorities,
            log_deliveries,
            snapshot_delivery,
        } = request;
        let (at, update) = (Instant::now(), update.map(Arc::new));
        let mut record = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = record.get(&id).and_then(|beat| beat.asked);
        let beat = Beat {
            at,
            consensus,
            clock,
            update,
            authorities,
            log_deliveries,
            snapshot_delivery,
            asked,
        };
        record.insert(id, beat);
    }

    /// Records that a machine without an open disk asks as this node; returns whether to report
    /// that the node has sent a heartbeat since the first time, so that there are two machines.
    /// The second one may ask many times a second: there is one report a minute at most.
    pub fn ask(&self, id: NodeId) -> bool {
        let mut record = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(beat) = record.get_mut(&id) else { return false };
        let known = beat.asked.filter(|asked| asked.at.elapsed() < ASKED);
        let asked = known.unwrap_or_else(|| Asked { at: Instant::now(), reported: false });
        let report = beat.at > asked.at && !asked.reported;
        beat.asked = Some(Asked { reported: asked.reported || report, ..asked });
        report
    }

    /// The machine that asks is the node's.
    pub fn given(&self, id: NodeId) {
        let mut record = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        record.get_mut(&id).into_iter().for_each(|beat| beat.asked = None);
    }

    /// The time of a node's last heartbeat in this term.
    #[must_use]
    pub fn last(&self, id: NodeId) -> Option<Instant> {
        self.beat(id).map(|beat| beat.at)
    }

    /// The status of a node's etcd member in its last heartbeat, and the age of that heartbeat.
    #[must_use]
    pub fn consensus(&self, id: NodeId) -> Option<(v1::ConsensusFigures, Duration)> {
        let beat = self.beat(id)?;
        Some((beat.consensus?, Instant::now().saturating_duration_since(beat.at)))
    }

    /// The clock of a node in its last heartbeat.
    #[must_use]
    pub fn clock(&self, id: NodeId) -> Option<v1::ClockFigures> {
        self.beat(id)?.clock
    }

    /// How far the log of a node had reached each target at its last heartbeat.
    #[must_use]
    pub fn log_deliveries(&self, id: NodeId) -> Vec<v1::LogDelivery> {
        self.beat(id).map(|beat| beat.log_deliveries).unwrap_or_default()
    }

    /// Which snapshot of etcd its target had at the last heartbeat, if the node sends them.
    #[must_use]
    pub fn snapshot_delivery(&self, id: NodeId) -> Option<v1::SnapshotDelivery> {
        self.beat(id)?.snapshot_delivery
    }

    /// The systems of a node, by its last heartbeat.
    #[must_use]
    pub fn update(&self, id: NodeId) -> Option<Arc<v1::UpdateReport>> {
        self.beat(id)?.update
    }

    /// SHA-256 of the authorities of the cluster that a node kept at its last heartbeat.
    #[must_use]
    pub fn authorities(&self, id: NodeId) -> Option<Vec<u8>> {
        Some(self.beat(id)?.authorities)
    }

    fn beat(&self, id: NodeId) -> Option<Beat> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Forgets every heartbeat.
    fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Forgets the nodes that do not exist any more.
    fn retain(&self, keep: impl Fn(NodeId) -> bool) {
        let mut record = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        record.retain(|id, _| keep(*id));
    }
}

/// Whether etcd reached the member of a node at the start of the term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The node has no member, its member answers, or etcd was not asked yet.
    Assumed,
    /// Its member does not answer.
    Unreachable,
}

/// The health of a node: `silent` since its last heartbeat, if there was one in a term that
/// is `term` old.
#[must_use]
pub fn health(
    node: &v1::Node,
    silent: Option<Duration>,
    term: Duration,
    reach: Reach,
) -> NodeHealth {
    match (node.state(), silent) {
        (NodeState::Up, Some(silent)) if silent < LATE => NodeHealth::Healthy,
        (NodeState::Up, None) if !node.joined => NodeHealth::Absent,
        (NodeState::Up, _) if is_to_return(node) => NodeHealth::Absent,
        (NodeState::Up, None) if term < LATE && reach == Reach::Assumed => NodeHealth::Unknown,
        (NodeState::Up, _) => NodeHealth::Late,
        (
            NodeState::Unspecified
            | NodeState::New
            | NodeState::Standby
            | NodeState::Decommissioned,
            _,
        ) => NodeHealth::Absent,
    }
}

/// Whether an operator has approved its request for a new certificate, and it has sent no status
/// with that one yet: it is awaited like a node that was approved to enter.
fn is_to_return(node: &v1::Node) -> bool {
    node.returning.as_ref().is_some_and(|returning| returning.approved)
}

/// Marks a node as healthy whose heartbeat has just arrived. The next check would do so, too, half
/// a second later.
pub(super) fn answers(directory: &watch::Sender<Directory>, id: NodeId) {
    directory.send_if_modified(|directory| set(directory, id, NodeHealth::Healthy));
}

/// Sets the health of a node, and logs that its heartbeat is missing or back. Returns whether its
/// health changed.
fn set(directory: &mut Directory, id: NodeId, health: NodeHealth) -> bool {
    let before = directory.node(id).map(|known| known.health);
    if !directory.set_health(id, health) {
        return false;
    }
    match (before, health) {
        (Some(NodeHealth::Late), NodeHealth::Healthy) => {
            info!(event = "answers", node = %id, "a node's heartbeat is back");
        }
        (_, NodeHealth::Late) => {
            warn!(event = "failed", node = %id, "a node's heartbeat is missing");
        }
        (_, _) => {}
    }
    true
}

/// Finds late nodes while this curator leads. A service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Whether it leads.
    pub leadership: watch::Receiver<Leadership>,
    /// The received heartbeats.
    pub heartbeats: Heartbeats,
    /// The members of etcd, and whether they answer.
    pub members: Members,
    /// The directory that it writes health to.
    pub directory: watch::Sender<Directory>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        ctx.until_cancelled(self.work()).await.unwrap_or(Ok(()))
    }

    async fn work(&mut self) -> Result<(), Closed> {
        loop {
            let term =
                polis_runtime::event::until(&mut self.leadership, "the election", |leadership| {
                    leadership.term.clone()
                });
            let term = term.await?;
            self.heartbeats.clear();
            let (mut unreachable, mut asked) = (BTreeSet::new(), false);
            let members = self.members.clone();
            let mut asking = std::pin::pin!(members.unreachable());
            loop {
                self.look(term.since.elapsed(), &unreachable);
                tokio::select! {
                    // Cancel-safe: only waits.
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                    // Cancel-safe: the future is polled on in the next round.
                    found = &mut asking, if !asked => {
                        asked = true;
                        // Without an answer the heartbeats decide, a little later.
                        unreachable = found.unwrap_or_default();
                    }
                }
                if self.leadership.borrow().term.as_ref() != Some(&term) {
                    break;
                }
            }
            // The next leader knows the health; this one does not any more.
            self.heartbeats.clear();
            self.publish(|_, _| NodeHealth::Unknown);
        }
    }

    fn look(&self, term: Duration, unreachable: &BTreeSet<NodeId>) {
        let now = Instant::now();
        self.publish(|id, node| {
            let silent = self.heartbeats.last(id).map(|last| now.saturating_duration_since(last));
            let reach = match unreachable.contains(&id) {
                true => Reach::Unreachable,
                false => Reach::Assumed,
            };
            health(node, silent, term, reach)
        });
        let directory = self.directory.borrow();
        self.heartbeats.retain(|id| directory.node(id).is_some());
    }

    fn publish(&self, health: impl Fn(NodeId, &v1::Node) -> NodeHealth) {
        self.directory.send_if_modified(|directory| {
            let differs = directory.nodes().filter_map(|(id, known)| {
                let now = health(id, &known.node);
                (now != known.health).then_some((id, now))
            });
            let differs: Vec<_> = differs.collect();
            for (id, now) in &differs {
                set(directory, *id, *now);
            }
            !differs.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use polis_wire::identity::NodeKey;
    use prost::Message as _;
    use tracing::field::{Field, Visit};
    use tracing::span;

    use super::*;
    use crate::consensus::client::{Change, Kv, Mirror};
    use crate::curator::store::node_key;

    /// The events that are logged.
    #[derive(Default)]
    struct Events(Mutex<Vec<String>>);

    impl tracing::Subscriber for Events {
        fn enabled(&self, _metadata: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

        fn record_follows_from(&self, _span: &span::Id, _other: &span::Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            let mut named = Named(Vec::new());
            event.record(&mut named);
            self.0.lock().unwrap().extend(named.0);
        }

        fn enter(&self, _span: &span::Id) {}

        fn exit(&self, _span: &span::Id) {}
    }

    /// The value of the field `event` of a line.
    struct Named(Vec<String>);

    impl Visit for Named {
        fn record_str(&mut self, field: &Field, value: &str) {
            if field.name() == "event" {
                self.0.push(value.to_owned());
            }
        }

        fn record_debug(&mut self, _field: &Field, _value: &dyn Debug) {}
    }

    fn node(state: NodeState, joined: bool) -> v1::Node {
        v1::Node { state: state.into(), joined, ..Default::default() }
    }

    #[test]
    fn a_member_is_healthy_late_or_not_known_yet() {
        let up = node(NodeState::Up, true);
        let second = Duration::from_secs(1);
        let assumed = Reach::Assumed;
        assert_eq!(health(&up, Some(second), second, assumed), NodeHealth::Healthy);
        assert_eq!(health(&up, Some(LATE), LATE, assumed), NodeHealth::Late);
        assert_eq!(health(&up, None, LATE - second, assumed), NodeHealth::Unknown);
        assert_eq!(health(&up, None, LATE, assumed), NodeHealth::Late);
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_is_of_a_second_machine_once_the_node_sends_another_heartbeat() {
        let (heartbeats, id) = (Heartbeats::default(), NodeKey::generate().unwrap().id());
        let beat = || heartbeats.record(id, v1::HeartbeatRequest::default());
        assert!(!heartbeats.ask(id), "a node without a heartbeat in this term");
        let pass = async |seconds| tokio::time::advance(Duration::from_secs(seconds)).await;
        // It was restarted right after a heartbeat, and waits until it is late.
        beat();
        for _ in 0..5 {
            pass(2).await;
            assert!(!heartbeats.ask(id));
        }
        heartbeats.given(id);
        for _ in 0..3 {
            pass(5).await;
            beat();
        }
        // Now a copy of its disk asks.
        pass(1).await;
        assert!(!heartbeats.ask(id));
        pass(4).await;
        beat();
        assert!(heartbeats.ask(id));
        // However often it asks, and the node sends heartbeats.
        for _ in 0..10 {
            pass(5).await;
            beat();
            assert!(!heartbeats.ask(id), "it was reported in this minute");
        }
        // A question that was never followed by another is forgotten.
        pass(61).await;
        assert!(!heartbeats.ask(id));
        pass(5).await;
        beat();
        assert!(heartbeats.ask(id), "it lasts");
    }

    #[test]
    fn two_missing_heartbeats_make_a_node_late() {
        use polis_wire::node_roles::HEARTBEAT;
        assert!(LATE > 2 * HEARTBEAT, "the second one may still be on its way");
        assert!(LATE <= 3 * HEARTBEAT, "a dead machine must not look well for longer");
    }

    #[test]
    fn a_new_leader_believes_etcd_about_a_dead_member_until_a_heartbeat_arrives() {
        let up = node(NodeState::Up, true);
        let second = Duration::from_secs(1);
        assert_eq!(health(&up, None, second, Reach::Unreachable), NodeHealth::Late);
        assert_eq!(health(&up, Some(second), second, Reach::Unreachable), NodeHealth::Healthy);
        // A node on its way in owes nothing.
        let entering = node(NodeState::Up, false);
        assert_eq!(health(&entering, None, second, Reach::Unreachable), NodeHealth::Absent);
    }

    #[test]
    fn a_node_that_was_approved_to_return_is_awaited_and_not_late() {
        let returns = |approved| {
            let returning = Some(v1::Returning { approved, ..Default::default() });
            v1::Node { returning, ..node(NodeState::Up, true) }
        };
        let second = Duration::from_secs(1);
        for silent in [None, Some(LATE)] {
            for reach in [Reach::Assumed, Reach::Unreachable] {
                assert_eq!(health(&returns(true), silent, LATE, reach), NodeHealth::Absent);
            }
            assert_eq!(health(&returns(false), silent, LATE, Reach::Assumed), NodeHealth::Late);
        }
        let home = health(&returns(true), Some(second), LATE, Reach::Assumed);
        assert_eq!(home, NodeHealth::Healthy);
    }

    #[test]
    fn a_heartbeat_that_is_back_is_an_event_although_no_check_has_seen_it() {
        let id = NodeKey::generate().unwrap().id();
        let value = node(NodeState::Up, true).encode_to_vec();
        let record = Kv { key: node_key(id), value, created: 1, modified: 1, lease: 0 };
        let mut known = Directory::default();
        known.apply(&Mirror { revision: 1, ..Mirror::default() }, &[Change::Put(record)]);
        let directory = watch::Sender::new(known);
        let events = Arc::new(Events::default());
        let of_now = || directory.borrow().node(id).unwrap().health;
        tracing::subscriber::with_default(Arc::clone(&events), || {
            // The first heartbeat of a term follows no missing one.
            answers(&directory, id);
            directory.send_modify(|directory| {
                set(directory, id, NodeHealth::Late);
                set(directory, id, NodeHealth::Late);
            });
            assert_eq!(of_now(), NodeHealth::Late);
            answers(&directory, id);
            answers(&directory, id);
        });
        assert_eq!(of_now(), NodeHealth::Healthy);
        assert_eq!(*events.0.lock().unwrap(), ["failed", "answers"]);
    }

    #[test]
    fn a_node_that_never_committed_owes_no_heartbeat() {
        let assumed = Reach::Assumed;
        assert_eq!(health(&node(NodeState::Up, false), None, LATE, assumed), NodeHealth::Absent);
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            assert_eq!(health(&node(state, true), Some(LATE), LATE, assumed), NodeHealth::Absent);
        }
    }
}
