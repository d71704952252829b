//! The nodes of the cluster on the console: folds the received nodes into what the console
//! shows of them.
//!
//! The words of a fingerprint are slow on purpose, so the service makes them once for a
//! node, on a thread of their own, and only for nodes that a person compares: those that
//! wait for approval, to enter or to come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::cluster_update::State as Journal;
use polis_proto::v1::cluster_update::step::State as Progress;
use polis_tui::snapshot::{Health, MemberStatus, Node, NodeState, Nodes, Update, UpdateState};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use tokio::sync::watch;

use super::ClusterNodes;
use polis_base::sys::clock;
use polis_control::cluster::State;
use polis_control::consensus;
use polis_control::curator::update::journal;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::{Fingerprint, NodeId};
use polis_wire::node_roles::{self, LATE, Role};

/// Nodes that wait for approval and have their words shown: a screen does not hold more.
const WORDS_MAX: usize = 32;

/// The beginning of a turn: not an age, so that a page with it stands still.
const MINUTE: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute] UTC");

/// Inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The received nodes.
    pub nodes: watch::Receiver<Option<Arc<node_roles::Nodes>>>,
    /// The present leader.
    pub leader: watch::Receiver<Option<NodeId>>,
    /// The members of etcd.
    pub consensus: watch::Receiver<consensus::Status>,
    /// This node.
    pub own: watch::Receiver<polis_control::cluster::Status>,
    /// The update of the cluster that goes on, or the last one.
    pub update: watch::Receiver<Option<v1::GetUpdateResponse>>,
    /// The displayed state.
    pub shown: watch::Sender<ClusterNodes>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when an owner of an input ended.
    pub async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut words = BTreeMap::new();
        // When the nodes were last received; when this node was cut off from the leader.
        let (mut updated_at, mut cut_off) = (clock::uptime(), None);
        let mut changed_nodes = true;
        loop {
            let now = clock::uptime();
            if changed_nodes {
                updated_at = now;
            }
            let received = self.nodes.borrow_and_update().clone();
            let own = self.own.borrow_and_update().clone();
            cut_off = match own.state {
                State::Split => cut_off.or(Some(now)),
                _ => None,
            };
            let members = self.consensus.borrow_and_update().members.clone();
            let goes_on = self.update.borrow_and_update().as_ref().and_then(update);
            if let Some(received) = received {
                spell(&received, &mut words).await;
                let leader = *self.leader.borrow_and_update();
                let nodes = fold(&received, &words, leader, own.node, &members);
                let nodes = Nodes { update: goes_on, ..nodes };
                let nodes = aged(nodes, now.saturating_sub(updated_at), cut_off.map(|at| now - at));
                self.shown.send_replace(ClusterNodes { at: now, nodes: Some(nodes) });
            }
            let changed = async {
                let Self { nodes, leader, own: standing, consensus, update, .. } = &mut self;
                let differs = |status: &consensus::Status| status.members != members;
                let moved = |status: &polis_control::cluster::Status| *status != own;
                tokio::select! {
                    // Cancel-safe, all of them: they wait for event values.
                    changed = nodes.changed() => {
                        changed.map(|()| true).map_err(|_closed| Closed("the nodes"))
                    }
                    changed = leader.changed() => {
                        changed.map(|()| false).map_err(|_closed| Closed("the leader"))
                    }
                    changed = standing.wait_for(moved) => {
                        changed.map(|_| false).map_err(|_closed| Closed("this node"))
                    }
                    changed = update.changed() => {
                        changed.map(|()| false).map_err(|_closed| Closed("the cluster's update"))
                    }
                    changed = consensus.wait_for(differs) => {
                        changed.map(|_| false).map_err(|_closed| Closed("the etcd member"))
                    }
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed_nodes = changed?,
                None => return Ok(()),
            }
        }
    }
}

/// The nodes received `age` ago, as they are now; `cut_off` is the time since the
/// connection was lost.
fn aged(mut nodes: Nodes, age: Duration, cut_off: Option<Duration>) -> Nodes {
    for node in &mut nodes.nodes {
        node.heartbeat = node.heartbeat.map(|heartbeat| heartbeat.saturating_add(age));
    }
    nodes.stale = cut_off;
    nodes
}

/// The words of the nodes that wait for approval, and of which fingerprint they are.
type Words = BTreeMap<NodeId, (Fingerprint, String)>;

/// Makes the words that are missing, and drops those that are not needed any more.
async fn spell(received: &node_roles::Nodes, words: &mut Words) {
    let asks = |node: &v1::NodeInfo| nonce(node).is_some();
    words.retain(|id, _| received.get(id).is_some_and(asks));
    for (id, node) in received.iter().filter(|(_, node)| asks(node)).take(WORDS_MAX) {
        let nonce = nonce(node).unwrap_or_default();
        let fingerprint = Fingerprint::of_registration(&node.public_key, nonce);
        let Some(fingerprint) = fingerprint else { continue };
        if words.get(id).is_some_and(|(of, _words)| *of == fingerprint) {
            continue;
        }
        let spelt = tokio::task::spawn_blocking(move || fingerprint.words()).await;
        if let Ok(spelt) = spelt {
            words.insert(*id, (fingerprint, spelt));
        }
    }
}

/// The part of a fingerprint beside the key, of a node that waits for approval.
fn nonce(node: &v1::NodeInfo) -> Option<&[u8]> {
    let returns = node.returning.as_ref().filter(|returning| !returning.approved);
    let nonce = returns.map(|returning| &*returning.nonce);
    nonce.or_else(|| (node.state() == v1::NodeState::New).then_some(&*node.nonce))
}

fn fold(
    received: &node_roles::Nodes,
    words: &Words,
    leader: Option<NodeId>,
    own: Option<NodeId>,
    members: &[consensus::Member],
) -> Nodes {
    let shown = |(id, node): (&NodeId, &v1::NodeInfo)| {
        let status = node.status.clone().unwrap_or_default();
        let named = id.to_string();
        let member = members.iter().find(|member| member.name == named);
        let some = |text: String| (!text.is_empty()).then_some(text);
        Node {
            name: some(node.name.clone()),
            address: some(status.external_address),
            state: match node.state() {
                v1::NodeState::Unspecified => NodeState::Unknown,
                v1::NodeState::New => NodeState::New,
                v1::NodeState::Standby => NodeState::Standby,
                // It waits for the same approval by the same words.
                v1::NodeState::Up if nonce(node).is_some() => NodeState::New,
                v1::NodeState::Up => NodeState::Up,
                v1::NodeState::Decommissioned => NodeState::Decommissioned,
            },
            health: match node.health() {
                v1::NodeHealth::Healthy => Health::Healthy,
                v1::NodeHealth::Late => Health::Late,
                v1::NodeHealth::Unknown | v1::NodeHealth::Absent => Health::Unknown,
            },
            // The leader reports a change of health, not each beat: the age of the last
            // one is known only where no other has come since. Of a healthy node, it is
            // known to be below [`LATE`].
            heartbeat: u64::try_from(node.heartbeat_age_ms)
                .ok()
                .filter(|_| node.health() == v1::NodeHealth::Late)
                .map(Duration::from_millis),
            roles: roles(node.roles.as_ref()),
            etcd: member.map(|member| match member.learner {
                true => MemberStatus::Learner { caught_up: None },
                false => MemberStatus::Voter,
            }),
            labels: node.labels.iter().map(|(key, value)| format!("{key}={value}")).collect(),
            words: words.get(id).map(|(_of, words)| words.clone()),
            version: some(status.version),
            clock: node.clock.as_ref().and_then(clock),
            former_voter: node.former_voter,
            leader: leader == Some(*id),
            own: own == Some(*id),
            id: named,
        }
    };
    Nodes {
        nodes: received.iter().map(shown).collect(),
        leader: leader.map(|id| id.to_string()),
        stale: None,
        late_after: Some(LATE),
        update: None,
    }
}

/// The update of the cluster, while it goes on.
fn update(known: &v1::GetUpdateResponse) -> Option<Update> {
    let update = known.update.as_ref()?;
    let state = match update.state() {
        Journal::Loading => UpdateState::Loading,
        Journal::Running if update.paused => UpdateState::Paused,
        Journal::Running => UpdateState::Running,
        Journal::Failed => UpdateState::Failed,
        Journal::Done | Journal::Aborted | Journal::Unspecified => return None,
    };
    let failed = update.steps.iter().find(|step| step.state() == Progress::Failed);
    let step = journal::in_turn(update).or(failed);
    let cause = failed.map(|step| step.cause.clone()).filter(|cause| !cause.is_empty());
    let since = step.and_then(|step| OffsetDateTime::from_unix_timestamp(step.since).ok());
    Some(Update {
        version: update.bundle.clone().unwrap_or_default().version,
        state,
        done: journal::done(update),
        total: update.steps.len(),
        node: step.map(|step| step.node_id.clone()),
        since: since.and_then(|since| since.format(MINUTE).ok()),
        waits_for: cause.unwrap_or_else(|| known.waits_for.clone()),
    })
}

/// How a clock stands, for a person; `None` before its node has reported it.
fn clock(figures: &v1::ClockFigures) -> Option<String> {
    let offset = figures.offset_us.map(|offset| {
        let side = if offset < 0 { "behind" } else { "ahead" };
        format!("{} {side}", polis_tui::duration(Duration::from_micros(offset.unsigned_abs())))
    });
    match (figures.state(), offset) {
        (v1::ClockState::Unspecified, _) => None,
        (v1::ClockState::Unset | v1::ClockState::Floor, _) => Some("not set".to_owned()),
        (v1::ClockState::Cluster | v1::ClockState::Synced, offset) => offset,
        (v1::ClockState::Lost, None) => Some("without a source".to_owned()),
        (v1::ClockState::Lost, Some(offset)) => Some(format!("without a source, {offset}")),
    }
}

fn roles(roles: Option<&v1::NodeRoles>) -> Vec<String> {
    roles.into_iter().flat_map(Role::given).map(|role| role.name().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_that_waits_for_approval_is_shown_with_its_words() {
        let key = [1; 32];
        let id = NodeId::from_public_key(&key);
        let mut info = v1::NodeInfo {
            id: id.to_string(),
            public_key: key.to_vec(),
            nonce: vec![2; 16],
            state: v1::NodeState::New.into(),
            ..Default::default()
        };
        let mut words = BTreeMap::new();
        let received = node_roles::Nodes::from([(id, info.clone())]);
        spell(&received, &mut words).await;
        let shown = fold(&received, &words, None, None, &[]);
        let of = Fingerprint::of_registration(&key, &[2; 16]).unwrap();
        assert_eq!(shown.nodes[0].words, Some(of.words()));
        info.state = v1::NodeState::Up.into();
        info.roles = Some(v1::NodeRoles {
            consensus_member: Some(v1::node_roles::ConsensusMember {}),
            ..Default::default()
        });
        let received = node_roles::Nodes::from([(id, info.clone())]);
        spell(&received, &mut words).await;
        let shown = fold(&received, &words, Some(id), Some(id), &[]);
        assert!(words.is_empty());
        let node = &shown.nodes[0];
        assert!(node.leader && node.own && node.words.is_none());
        assert_eq!((node.state, node.roles.join(",")), (NodeState::Up, "consensus member".into()));
        assert_eq!(shown.leader, Some(id.to_string()));

        // It was off for so long that it asks for a new certificate.
        info.returning = Some(v1::Returning { nonce: vec![3; 16], ..Default::default() });
        let received = node_roles::Nodes::from([(id, info)]);
        spell(&received, &mut words).await;
        let shown = fold(&received, &words, None, None, &[]);
        let of = Fingerprint::of_registration(&key, &[3; 16]).unwrap();
        let node = &shown.nodes[0];
        assert_eq!((node.state, node.words.clone()), (NodeState::New, Some(of.words())));
    }

    #[test]
    fn an_update_of_the_cluster_is_shown_while_it_goes_on() {
        use polis_proto::v1::cluster_update::{State, Step};
        let step = |node: &str, state: Progress, cause: &str| Step {
            node_id: node.to_owned(),
            state: state.into(),
            since: 86_400,
            cause: cause.to_owned(),
            ..Step::default()
        };
        let shown = |state: State, steps: Vec<Step>| {
            let (waits_for, state) = ("b: it restarts".to_owned(), state.into());
            let journal = v1::ClusterUpdate { state, steps, ..Default::default() };
            update(&v1::GetUpdateResponse { update: Some(journal), waits_for, waits_since: 7 })
        };
        let steps = |state, cause| vec![step("a", Progress::Done, ""), step("b", state, cause)];
        let running = shown(State::Running, steps(Progress::Turn, "")).unwrap();
        let expected = Update {
            version: String::new(),
            state: UpdateState::Running,
            done: 1,
            total: 2,
            node: Some("b".to_owned()),
            since: Some("1970-01-02 00:00 UTC".to_owned()),
            waits_for: "b: it restarts".to_owned(),
        };
        assert_eq!(running, expected);
        let failed = shown(State::Failed, steps(Progress::Failed, "guru 0310")).unwrap();
        let waits_for = "guru 0310".to_owned();
        assert_eq!(failed, Update { state: UpdateState::Failed, waits_for, ..expected });
        assert_eq!(shown(State::Done, steps(Progress::Done, "")), None);
    }

    #[test]
    fn an_age_counts_from_its_report_and_not_from_its_display() {
        let late = Node { heartbeat: Some(Duration::from_secs(16)), ..Node::default() };
        let nodes = || Nodes { nodes: vec![late.clone(), Node::default()], ..Nodes::default() };
        let minute = Duration::from_secs(60);
        let shown = aged(nodes(), minute, None);
        assert_eq!(shown.nodes[0].heartbeat, Some(Duration::from_secs(76)));
        assert_eq!((shown.nodes[1].heartbeat, shown.stale), (None, None));
        assert_eq!(aged(nodes(), minute, Some(minute)).stale, Some(minute));
    }

    #[test]
    fn the_age_of_a_heartbeat_is_shown_where_it_is_known() {
        let id = NodeId::from_public_key(&[1; 32]);
        let age = |health: v1::NodeHealth, heartbeat_age_ms| {
            let health = health.into();
            let info = v1::NodeInfo { health, heartbeat_age_ms, ..Default::default() };
            let received = node_roles::Nodes::from([(id, info)]);
            fold(&received, &BTreeMap::new(), None, None, &[]).nodes[0].heartbeat
        };
        // Another heartbeat has followed since, so this is not its age: the age is below
        // this.
        assert_eq!(age(v1::NodeHealth::Healthy, 400), None);
        assert_eq!(
            fold(&node_roles::Nodes::new(), &BTreeMap::new(), None, None, &[]).late_after,
            Some(LATE)
        );
        assert_eq!(age(v1::NodeHealth::Late, 16_000), Some(Duration::from_secs(16)));
        assert_eq!(age(v1::NodeHealth::Unknown, -1), None);
    }
}
