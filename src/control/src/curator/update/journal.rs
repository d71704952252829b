//! The journal of an update: what the leader does next, by the record in etcd and by what it
//! knows of the nodes.
//!
//! ```text
//! [loading] --holder has the bundle--> [running] --every step done or gone--> [done]
//!     |                                 |     ^
//!     |            a node did not take it     | resume: that node waits for another turn
//!     |                                 v     |
//!     +----------- abort ------------> [failed]
//!                                       |
//!                          [aborted] <--+ abort
//!
//! step:  waiting --every node healthy, etcd spares it--> turn --runs it, ready--> done
//!           \--the node is down----------> gone           \--gave up, is not back, or
//!                                                            runs another system--> failed
//!
//! turn:  fetched, installed, drained --every other node healthy, etcd spares it--> restarts
//! ```
//!
//! `paused` holds the edge from *waiting* to *turn*, and nothing else.
//!
//! Invariants:
//! - At most one step has its turn.
//! - A step gets its turn, and its node the leave to restart, only while every node that is up is
//!   healthy and ready, and a voter only while etcd keeps its quorum without it.
//! - The next step depends on the present leader and on the versions of Kubernetes that run now,
//!   not on those at the time of the plan.
//! - A turn that failed and a turn that is repeated have different numbers.
//! - A turn ends within [`RESTART_MAX`] of the leave to restart. That time begins anew where the
//!   clock was set back to before the leave, or where the clock of another leader is behind it.
//! - Without the node that keeps the bundle, no node gets a turn.

use std::time::Duration;

use polis_machine::update::TRIAL;
use polis_proto::v1;
use polis_proto::v1::cluster_update::step::State as Progress;
use polis_proto::v1::cluster_update::{State, Step};
use polis_proto::v1::update_report::Phase;
use semver::Version;

use super::facts::{Fact, Facts, Fault};
use super::plan::{Order, Refusal, same_content, spares_one, voters};
use polis_wire::identity::NodeId;

/// Bytes of the longest cause that is kept.
const CAUSE_MAX: usize = 512;

/// Longest from the leave to restart until the node runs the new version and is ready: a trial
/// that fails, which has this time once for the node and once for its workloads, the start of the
/// former system, and the firmware before each.
const RESTART_MAX: Duration = TRIAL.saturating_mul(3);

/// The wait for the number of a boot: an absent number cannot be compared.
const BOOT_UNKNOWN: &str = "it has not reported the number of its boot yet";

/// Between two notes that a node which had its leave is held back.
const HELD: Duration = Duration::from_secs(60);

/// What the leader does next.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// The journal becomes this.
    Write(Box<v1::ClusterUpdate>),
    /// Nothing, until this has happened.
    Wait(String),
    /// Nothing goes on.
    Rest,
}

/// What an owner wants of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// No further node gets a turn.
    Pause,
    /// The turns go on.
    Resume,
    /// It ends.
    Abort,
}

/// Whether an update goes on.
#[must_use]
pub fn is_open(journal: &v1::ClusterUpdate) -> bool {
    match journal.state() {
        State::Loading | State::Running | State::Failed => true,
        State::Done | State::Aborted | State::Unspecified => false,
    }
}

/// The words for the states of an update, in their order.
pub const WORDS: [&str; 6] = ["loading", "running", "paused", "failed", "done", "aborted"];

/// The word for the state of an update, one of [`WORDS`]; `unknown` for that of a newer version.
#[must_use]
pub fn word(journal: &v1::ClusterUpdate) -> &'static str {
    match journal.state() {
        State::Loading => "loading",
        State::Running if journal.paused => "paused",
        State::Running => "running",
        State::Failed => "failed",
        State::Done => "done",
        State::Aborted => "aborted",
        State::Unspecified => "unknown",
    }
}

/// How many steps are done.
#[must_use]
pub fn done(journal: &v1::ClusterUpdate) -> usize {
    journal.steps.iter().filter(|step| step.state() == Progress::Done).count()
}

/// The step that has its turn.
#[must_use]
pub fn in_turn(journal: &v1::ClusterUpdate) -> Option<&Step> {
    journal.steps.iter().find(|step| step.state() == Progress::Turn)
}

/// Whether the update waits for the heartbeats of this node: it has its turn, or it keeps the
/// bundle.
#[must_use]
pub fn waits_for(journal: &v1::ClusterUpdate, node: NodeId) -> bool {
    let node = node.to_string();
    journal.holder == node || in_turn(journal).is_some_and(|step| step.node_id == node)
}

/// The journal of an update that begins.
#[must_use]
pub fn begun(
    bundle: v1::UpdateBundle,
    holder: NodeId,
    turns: &[NodeId],
    facts: &[Fact],
    now: i64,
) -> v1::ClusterUpdate {
    let is_voter = |id: &NodeId| facts.iter().any(|fact| fact.id == *id && fact.voter);
    let steps = turns.iter().map(|id| Step {
        node_id: id.to_string(),
        state: Progress::Waiting.into(),
        voter: is_voter(id),
        since: now,
        ..Step::default()
    });
    v1::ClusterUpdate {
        bundle: Some(bundle),
        holder: holder.to_string(),
        // Without a node to update, there is nothing to wait for.
        state: if turns.is_empty() { State::Done } else { State::Loading }.into(),
        paused: false,
        steps: steps.collect(),
        began_at: now,
        changed_at: now,
        ..v1::ClusterUpdate::default()
    }
}

/// Whether an owner may ask this of an update: one that goes on, or to end one that was aborted,
/// since the answer to the first request may have been lost.
#[must_use]
pub fn takes(journal: &v1::ClusterUpdate, control: Control) -> bool {
    is_open(journal) || (control == Control::Abort && journal.state() == State::Aborted)
}

/// The journal after an owner's request; the same one where it is so already.
#[must_use]
pub fn controlled(journal: &v1::ClusterUpdate, control: Control, now: i64) -> v1::ClusterUpdate {
    let mut journal = journal.clone();
    let before = journal.clone();
    match control {
        Control::Pause => journal.paused = true,
        Control::Resume => {
            journal.paused = false;
            if journal.state() == State::Failed {
                journal.set_state(State::Running);
            }
            let failed = |step: &&mut Step| step.state() == Progress::Failed;
            for step in journal.steps.iter_mut().filter(failed) {
                change(step, Progress::Waiting, "", now);
            }
        }
        Control::Abort => journal.set_state(State::Aborted),
    }
    if journal != before {
        journal.changed_at = now;
    }
    journal
}

/// The next change, or what it waits for.
#[must_use]
pub fn step(journal: &v1::ClusterUpdate, facts: &Facts, now: i64) -> Next {
    match journal.state() {
        State::Loading => loading(journal, &facts.nodes, now),
        State::Running => running(journal, facts, now),
        State::Failed => Next::Wait("an owner: resume or abort it".to_owned()),
        State::Done | State::Aborted | State::Unspecified => Next::Rest,
    }
}

/// The turn of a node, if it is its turn. `address` finds the holder.
#[must_use]
pub fn turn(
    journal: &v1::ClusterUpdate,
    node: NodeId,
    address: impl FnOnce(NodeId) -> Option<String>,
) -> Option<v1::UpdateTurn> {
    let open = journal.state() == State::Running;
    let step = in_turn(journal).filter(|step| open && step.node_id == node.to_string())?;
    let holder_address = journal.holder.parse().ok().and_then(address).unwrap_or_default();
    Some(v1::UpdateTurn {
        began: step.since,
        bundle: journal.bundle.clone(),
        holder: journal.holder.clone(),
        holder_address,
        boot_id: step.boot_id.clone(),
        left: step.left.clone(),
        one_way: journal.one_way,
    })
}

/// The node that may restart now, if one is to.
#[must_use]
pub fn leave(journal: &v1::ClusterUpdate, facts: &Facts) -> Option<NodeId> {
    let step = in_turn(journal).filter(|_| journal.state() == State::Running)?;
    let fact = facts.nodes.iter().find(|fact| fact.id.to_string() == step.node_id)?;
    let ready = matches!(taking(journal, step, fact), Taking::Ready);
    let noted = fact.boot_id() == Some(step.left.as_str());
    (ready && noted && obstacle(fact, facts).is_none()).then_some(fact.id)
}

/// The voter that etcd misses for its update, or is about to: it has `leave` to restart, or is not
/// back from its restart.
#[must_use]
pub fn restarting(
    journal: &v1::ClusterUpdate,
    facts: &Facts,
    leave: Option<NodeId>,
) -> Option<NodeId> {
    let step = in_turn(journal)?;
    let fact = facts.nodes.iter().find(|fact| fact.id.to_string() == step.node_id)?;
    let phase = fact.report.as_ref().map(v1::UpdateReport::phase);
    let healthy = fact.health == v1::NodeHealth::Healthy;
    let restarts = match taking(journal, step, fact) {
        // One that has its leave goes, although the update was ended; then it does not answer.
        _ if journal.state() != State::Running => {
            leave == Some(fact.id) || (healthy && phase == Some(Phase::Restart))
        }
        Taking::Done | Taking::Failed(_) => false,
        Taking::Ready => leave.or_else(|| self::leave(journal, facts)) == Some(fact.id),
        // After a restart that was not for its update, a node prepares again for another leave.
        Taking::On(_) => {
            let prepares = phase.is_some_and(|phase| phase != Phase::Restart)
                && healthy
                && content(journal, fact).is_none();
            !step.left.is_empty() && !prepares
        }
    };
    (restarts && fact.voter).then_some(fact.id)
}

/// The image of the bundle that a node keeps for the others; empty: none.
#[must_use]
pub fn keeps(journal: &v1::ClusterUpdate, node: NodeId) -> String {
    let holds = is_open(journal) && journal.holder == node.to_string();
    let image = journal.bundle.as_ref().map(|bundle| bundle.image.clone());
    image.filter(|_| holds).unwrap_or_default()
}

fn loading(journal: &v1::ClusterUpdate, facts: &[Fact], now: i64) -> Next {
    let bundle = journal.bundle.clone().unwrap_or_default();
    let Some(holder) = facts.iter().find(|fact| fact.id.to_string() == journal.holder) else {
        return Next::Wait(orphaned(journal));
    };
    let has = holder.report.as_ref().map(|report| report.keeps.as_str());
    if has == Some(bundle.image.as_str()) {
        let mut journal = journal.clone();
        journal.set_state(State::Running);
        journal.changed_at = now;
        return Next::Write(Box::new(journal));
    }
    Next::Wait(format!("{} does not have the bundle yet", journal.holder))
}

fn running(journal: &v1::ClusterUpdate, facts: &Facts, now: i64) -> Next {
    let Facts { nodes, .. } = facts;
    let at = |state: Progress| journal.steps.iter().position(|step| step.state() == state);
    if let Some(at) = at(Progress::Turn) {
        return turn_goes_on(journal, at, facts, now);
    }
    let written = |at, state, cause: &str| written(journal, at, state, cause, now);
    let fact_of = |step: &Step| nodes.iter().find(|fact| fact.id.to_string() == step.node_id);
    // Removed by an operator meanwhile, or updated by itself.
    for (at, step) in
        (0..).zip(&journal.steps).filter(|(_, step)| step.state() == Progress::Waiting)
    {
        match fact_of(step) {
            None => {
                return Next::Write(Box::new(written(at, Progress::Gone, "it left the cluster")));
            }
            Some(fact) if fact.fault().is_none() && runs(journal, fact) => {
                return Next::Write(Box::new(written(at, Progress::Done, "")));
            }
            Some(_) => {}
        }
    }
    let waiting = (0..).zip(&journal.steps).filter(|(_, step)| step.state() == Progress::Waiting);
    let waiting = waiting.filter_map(|(at, step)| Some((at, fact_of(step)?)));
    let order = order(journal, nodes);
    let next = waiting.min_by_key(|(_, fact)| order.place(fact));
    let Some((at, fact)) = next else {
        // The last one may have gone; the others are to be well after it, too.
        if let Some((node, fault)) = nodes.iter().find_map(|fact| Some((fact.id, fact.fault()?))) {
            return Next::Wait(format!("{node}: {fault}"));
        }
        let mut journal = journal.clone();
        journal.set_state(State::Done);
        journal.changed_at = now;
        return Next::Write(Box::new(journal));
    };
    if !nodes.iter().any(|fact| fact.id.to_string() == journal.holder) {
        return Next::Wait(orphaned(journal));
    }
    if let Some(what) = fact.fault().map(|fault| format!("{}: {fault}", fact.id)) {
        return Next::Wait(what);
    }
    if let Some(what) = obstacle(fact, facts) {
        return Next::Wait(what);
    }
    if journal.paused {
        return Next::Wait("an owner has paused it: resume or abort it".to_owned());
    }
    // The number of this boot tells it from the next one.
    let Some(boot_id) = fact.boot_id() else {
        return Next::Wait(format!("{}: {BOOT_UNKNOWN}", fact.id));
    };
    // Two turns within a second would have the same number.
    let last = journal.steps.iter().map(|step| step.since).max().unwrap_or_default();
    let mut journal = written(at, Progress::Turn, "");
    journal.steps[at].since = now.max(last.saturating_add(1));
    journal.steps[at].boot_id = boot_id.to_owned();
    (journal.steps[at].left, journal.steps[at].left_at) = (String::new(), 0);
    Next::Write(Box::new(journal))
}

/// The order of the turns that are left.
fn order(journal: &v1::ClusterUpdate, nodes: &[Fact]) -> Order {
    let brings = journal.bundle.as_ref().map(|bundle| Version::parse(&bundle.kubernetes));
    Order::of(nodes, brings.and_then(Result::ok).as_ref())
}

/// What the update waits for where the holder of the bundle has left the cluster.
fn orphaned(journal: &v1::ClusterUpdate) -> String {
    format!(
        "an owner: {}, which was to keep the bundle, left the cluster: abort the update, and begin \
         it again",
        journal.holder
    )
}

/// The journal with another state of a step.
fn written(
    journal: &v1::ClusterUpdate,
    at: usize,
    state: Progress,
    cause: &str,
    now: i64,
) -> v1::ClusterUpdate {
    let mut journal = journal.clone();
    change(&mut journal.steps[at], state, cause, now);
    journal.changed_at = now;
    journal
}

/// The next change while the node of a step has its turn.
fn turn_goes_on(journal: &v1::ClusterUpdate, at: usize, facts: &Facts, now: i64) -> Next {
    let step = &journal.steps[at];
    let Some(fact) = facts.nodes.iter().find(|fact| fact.id.to_string() == step.node_id) else {
        let gone = written(journal, at, Progress::Gone, "it left the cluster", now);
        return Next::Write(Box::new(gone));
    };
    let failed = |cause: &str| {
        let mut journal = written(journal, at, Progress::Failed, cause, now);
        journal.set_state(State::Failed);
        Next::Write(Box::new(journal))
    };
    let leave = |left: String| {
        let mut journal = journal.clone();
        (journal.steps[at].left, journal.steps[at].left_at) = (left, now);
        journal.changed_at = now;
        Next::Write(Box::new(journal))
    };
    let has_leave = fact.boot_id() == Some(step.left.as_str());
    // The clock was set back since, or is that of another leader: the time begins anew.
    if !step.left.is_empty() && step.left_at > now {
        return leave(step.left.clone());
    }
    match taking(journal, step, fact) {
        Taking::Done => Next::Write(Box::new(written(journal, at, Progress::Done, "", now))),
        Taking::Failed(cause) => failed(&cause),
        Taking::On(what) if passed(step, RESTART_MAX, now) => failed(&overdue(&what)),
        Taking::On(what) => Next::Wait(format!("{}: {what}", fact.id)),
        Taking::Ready => match obstacle(fact, facts) {
            // The time while it is held back does not count.
            Some(_) if has_leave && passed(step, HELD, now) => leave(step.left.clone()),
            Some(what) => Next::Wait(format!("{what}, before {} may restart", fact.id)),
            None => match fact.boot_id() {
                // By this the node knows a restart that did not start the new system.
                Some(boot_id) if !has_leave => leave(boot_id.to_owned()),
                Some(_) | None if passed(step, RESTART_MAX, now) => {
                    failed(&overdue("it does not restart"))
                }
                Some(_) => Next::Wait(format!("{}: it is to restart", fact.id)),
                None => Next::Wait(format!("{}: {BOOT_UNKNOWN}", fact.id)),
            },
        },
    }
}

/// Whether so much time has passed since the node of a step had its leave to restart.
fn passed(step: &Step, time: Duration, now: i64) -> bool {
    let passed = u64::try_from(now.saturating_sub(step.left_at)).unwrap_or_default();
    !step.left.is_empty() && passed >= time.as_secs()
}

/// The cause of a turn that has taken too long.
fn overdue(what: &str) -> String {
    let minutes = RESTART_MAX.as_secs() / 60;
    bounded(format!(
        "{what}, {minutes} minutes after it was to restart: see the screen of the machine, and \
         repair it or delete the node"
    ))
}

/// The obstacle to the restart of a node: another one is not as it should be, or etcd would
/// stop.
fn obstacle(fact: &Fact, facts: &Facts) -> Option<String> {
    if fact.leaving {
        return Some(format!("{}: {}", fact.id, Fault::Leaving));
    }
    let mut others = facts.nodes.iter().filter(|other| other.id != fact.id);
    if let Some((node, fault)) = others.find_map(|other| Some((other.id, other.fault()?))) {
        return Some(format!("{node}: {fault}"));
    }
    let spared = spares_one(voters(&facts.nodes)) && facts.spare > 0;
    (fact.voter && !spared).then(|| format!("{} is a voter, and etcd cannot spare one", fact.id))
}

/// How a turn goes.
enum Taking {
    Done,
    Failed(String),
    Ready,
    On(String),
}

fn taking(journal: &v1::ClusterUpdate, step: &Step, fact: &Fact) -> Taking {
    // A report from before the turn says nothing of it, and a node that restarts sends none.
    let Some(report) = &fact.report else { return Taking::On("it sends no heartbeats".to_owned()) };
    if let Some(same) = content(journal, fact) {
        return match (fact.fault(), same) {
            (None, Ok(())) => Taking::Done,
            (None, Err(other)) => Taking::Failed(bounded(other.to_string())),
            // A system on trial may go back, whichever it is.
            (Some(fault), _) => Taking::On(format!("it runs the new version; {fault}")),
        };
    }
    let own = report.turn == step.since;
    let because = match report.cause.as_str() {
        "" => String::new(),
        cause => format!(": {cause}"),
    };
    let phase = if own { report.phase() } else { Phase::Unspecified };
    if phase == Phase::Failed {
        return Taking::Failed(bounded(report.cause.clone()));
    }
    if fact.health != v1::NodeHealth::Healthy {
        return Taking::On(match phase {
            Phase::Restart => "it restarts".to_owned(),
            _ => "it sends no heartbeats".to_owned(),
        });
    }
    Taking::On(match phase {
        Phase::Ready => return Taking::Ready,
        Phase::Unspecified | Phase::Failed => "it is to begin".to_owned(),
        Phase::Fetch => format!("it waits for the node that has the bundle{because}"),
        Phase::Install => "it writes the new system to its disk".to_owned(),
        Phase::Drain => format!("it moves its pods away{because}"),
        Phase::Restart => "it restarts".to_owned(),
    })
}

/// Whether a node runs the system of the bundle.
fn runs(journal: &v1::ClusterUpdate, fact: &Fact) -> bool {
    matches!(content(journal, fact), Some(Ok(())))
}

/// Whether a node with the version of the bundle has its system; the error names another one.
/// `None` for a node with another version.
fn content(journal: &v1::ClusterUpdate, fact: &Fact) -> Option<Result<(), Refusal>> {
    let bundle = journal.bundle.as_ref()?;
    let version = Version::parse(&bundle.version).ok()?;
    let is_version = fact.version()? == version;
    is_version.then(|| same_content(fact, &version, &bundle.variant, &bundle.image))
}

fn change(step: &mut Step, state: Progress, cause: &str, now: i64) {
    step.set_state(state);
    step.since = now;
    step.cause = cause.to_owned();
}

fn bounded(mut cause: String) -> String {
    let end = (0..=cause.len().min(CAUSE_MAX)).rev().find(|end| cause.is_char_boundary(*end));
    cause.truncate(end.unwrap_or_default());
    cause
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
