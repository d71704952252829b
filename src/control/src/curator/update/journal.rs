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
//!           \--the node is down----------> gone           \--gave up, or is not back--> failed
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
//! - The next step depends on the present leader, not on the leader at the time of the plan.
//! - A turn that failed and a turn that is repeated have different numbers.
//! - A turn ends within [`RESTART_MAX`] of the leave to restart.

use std::time::Duration;

use polis_machine::update::TRIAL;
use polis_proto::v1;
use polis_proto::v1::cluster_update::step::State as Progress;
use polis_proto::v1::cluster_update::{State, Step};
use polis_proto::v1::update_report::Phase;
use semver::Version;

use super::facts::{Fact, Facts, Fault};
use super::plan::{place, spares_one, voters};
use polis_wire::identity::NodeId;

/// Bytes of the longest cause that is kept.
const CAUSE_MAX: usize = 512;

/// Longest from the leave to restart until the node runs the new version and is ready: a trial
/// that fails, which has this time once for the node and once for its workloads, the start of the
/// former system, and the firmware before each.
const RESTART_MAX: Duration = TRIAL.saturating_mul(3);

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
    let noted = !step.left.is_empty() && step.left == boot_id(fact);
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
                && !runs(journal, fact);
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
    let holder = facts.iter().find(|fact| fact.id.to_string() == journal.holder);
    let has = holder.and_then(|fact| fact.report.as_ref()).map(|report| report.keeps.as_str());
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
    let next = waiting.min_by_key(|(_, fact)| place(fact));
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
    if let Some(what) = fact.fault().map(|fault| format!("{}: {fault}", fact.id)) {
        return Next::Wait(what);
    }
    if let Some(what) = obstacle(fact, facts) {
        return Next::Wait(what);
    }
    if journal.paused {
        return Next::Wait("an owner has paused it: resume or abort it".to_owned());
    }
    // Two turns within a second would have the same number.
    let last = journal.steps.iter().map(|step| step.since).max().unwrap_or_default();
    let mut journal = written(at, Progress::Turn, "");
    journal.steps[at].since = now.max(last.saturating_add(1));
    journal.steps[at].boot_id = boot_id(fact);
    (journal.steps[at].left, journal.steps[at].left_at) = (String::new(), 0);
    Next::Write(Box::new(journal))
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
    let has_leave = step.left == boot_id(fact);
    match taking(journal, step, fact) {
        Taking::Done => Next::Write(Box::new(written(journal, at, Progress::Done, "", now))),
        Taking::Failed(cause) => failed(&cause),
        Taking::On(what) if passed(step, RESTART_MAX, now) => failed(&overdue(&what)),
        Taking::On(what) => Next::Wait(format!("{}: {what}", fact.id)),
        Taking::Ready => match obstacle(fact, facts) {
            // The time while it is held back does not count.
            Some(_) if has_leave && passed(step, HELD, now) => leave(step.left.clone()),
            Some(what) => Next::Wait(format!("{what}, before {} may restart", fact.id)),
            // By this the node knows a restart that did not start the new system.
            None if !has_leave => leave(boot_id(fact)),
            None if passed(step, RESTART_MAX, now) => failed(&overdue("it does not restart")),
            None => Next::Wait(format!("{}: it is to restart", fact.id)),
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

/// The boot of a node, as it says; empty before it has.
fn boot_id(fact: &Fact) -> String {
    fact.report.as_ref().map(|report| report.boot_id.clone()).unwrap_or_default()
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
    if runs(journal, fact) {
        return match fact.fault() {
            None => Taking::Done,
            Some(fault) => Taking::On(format!("it runs the new version; {fault}")),
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

/// Whether a node runs the version of the bundle.
fn runs(journal: &v1::ClusterUpdate, fact: &Fact) -> bool {
    let version = journal.bundle.as_ref().and_then(|bundle| Version::parse(&bundle.version).ok());
    version.is_some() && fact.version() == version
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
mod tests {
    use polis_proto::v1::NodeHealth;
    use proptest::prelude::*;

    use super::super::plan::tests::{bundle, fact, five, id, planned, report};
    use super::*;

    fn message() -> v1::UpdateBundle {
        v1::UpdateBundle {
            version: "1.1.0".to_owned(),
            from: "1.0.0".to_owned(),
            image: "00ff".to_owned(),
            variant: "base".to_owned(),
            signer: "aa11".to_owned(),
            etcd: "3.5.16".to_owned(),
        }
    }

    /// A cluster under an update, and the clock.
    struct World {
        facts: Vec<Fact>,
        spare: u32,
        journal: v1::ClusterUpdate,
        now: i64,
    }

    impl World {
        fn new(facts: Vec<Fact>) -> Self {
            let turns = planned(&facts, &bundle()).unwrap();
            let journal = begun(message(), id(1), &turns, &facts, 100);
            Self { facts, spare: 1, journal, now: 100 }
        }

        /// One that has the bundle.
        fn loaded(facts: Vec<Fact>) -> Self {
            let mut world = Self::new(facts);
            world.report(id(1), |report| report.keeps = "00ff".to_owned());
            assert_eq!(world.pass(), None);
            assert_eq!(world.journal.state(), State::Running);
            world
        }

        fn fact(&mut self, node: NodeId) -> &mut Fact {
            self.facts.iter_mut().find(|fact| fact.id == node).unwrap()
        }

        fn report(&mut self, node: NodeId, change: impl FnOnce(&mut v1::UpdateReport)) {
            change(self.fact(node).report.as_mut().unwrap());
        }

        fn seen(&self) -> Facts {
            Facts { nodes: self.facts.clone(), spare: self.spare }
        }

        /// One step of the leader; what it waits for, if it writes nothing.
        fn pass(&mut self) -> Option<String> {
            self.now += 1;
            match step(&self.journal, &self.seen(), self.now) {
                Next::Write(journal) => {
                    assert_ne!(*journal, self.journal, "a write that changes nothing");
                    self.journal = *journal;
                    None
                }
                Next::Wait(what) => Some(what),
                Next::Rest => Some(String::new()),
            }
        }

        /// Steps until the leader waits.
        fn settle(&mut self) -> String {
            (0..20).find_map(|_| self.pass()).expect("it waits at some time")
        }

        /// The node whose turn it is.
        fn turn(&self) -> Option<(NodeId, v1::UpdateTurn)> {
            let of = |fact: &Fact| Some((fact.id, turn(&self.journal, fact.id, |_| None)?));
            let turns: Vec<_> = self.facts.iter().filter_map(of).collect();
            assert!(turns.len() <= 1, "{turns:?}");
            turns.into_iter().next()
        }

        fn takes(&mut self, node: NodeId) {
            let voter = self.fact(node).voter;
            let leads = self.fact(node).leads;
            let keeps = self.fact(node).report.clone().unwrap_or_default().keeps;
            let seed = (1..=9).find(|seed| id(*seed) == node).unwrap();
            *self.fact(node) = Fact { leads, ..fact(seed, voter, "1.1.0") };
            self.report(node, |report| report.keeps = keeps);
        }
    }

    #[test]
    fn nodes_take_turns_until_all_are_done() {
        let mut world = World::new(five(2));
        world.journal.one_way = true;
        assert!(world.settle().ends_with("does not have the bundle yet"));
        assert_eq!(world.turn(), None);
        assert_eq!(keeps(&world.journal, id(1)), "00ff");
        world.report(id(1), |report| report.keeps = "00ff".to_owned());
        let mut order = Vec::new();
        while world.journal.state() != State::Done {
            let waits = world.settle();
            let Some((node, turn)) = world.turn() else { break };
            assert!(waits.ends_with("it is to begin"), "{waits}");
            assert_eq!(turn.boot_id, "boot of 1.0.0");
            assert!(turn.one_way, "the consent of the owner goes to the node");
            assert_eq!(keeps(&world.journal, id(1)), "00ff");
            // It is away, and the others have no turn.
            world.fact(node).health = NodeHealth::Late;
            assert!(world.settle().ends_with("it sends no heartbeats"));
            world.takes(node);
            world.report(node, |report| report.trial = true);
            assert!(world.settle().ends_with("it runs the new version; its system is on trial"));
            world.takes(node);
            order.push(node);
        }
        assert_eq!(world.journal.state(), State::Done);
        assert_eq!(order.len(), 5);
        assert_eq!(order[4], id(2), "the leader is the last");
        assert!(world.facts.iter().all(|fact| keeps(&world.journal, fact.id).is_empty()));
        assert_eq!(world.settle(), "");
    }

    #[test]
    fn the_leader_of_the_moment_is_the_last_also_after_a_change() {
        let mut world = World::loaded(five(1)[..3].to_vec());
        world.settle();
        let (first, _) = world.turn().unwrap();
        world.takes(first);
        // The node that was to be last no longer leads.
        let heir = [id(2), id(3)].into_iter().find(|node| *node != first).unwrap();
        world.fact(id(1)).leads = false;
        world.fact(heir).leads = true;
        world.settle();
        assert_eq!(world.turn().unwrap().0, id(1));
    }

    #[test]
    fn a_node_that_gives_up_stops_the_update_until_an_owner_resumes_it() {
        let mut world = World::loaded(five(1));
        world.settle();
        let (node, turn) = world.turn().unwrap();
        world.report(node, |report| {
            (report.turn, report.cause) = (turn.began, "guru 0310".to_owned());
            report.set_phase(Phase::Failed);
        });
        assert!(world.settle().starts_with("an owner"));
        assert_eq!(world.journal.state(), State::Failed);
        assert_eq!(world.turn(), None);
        let failed = world.journal.steps.iter().find(|step| step.state() == Progress::Failed);
        assert_eq!(failed.map(|step| &*step.cause), Some("guru 0310"));
        assert_eq!(keeps(&world.journal, id(1)), "00ff", "the bundle is needed again");
        // The report of the first turn says nothing of the second one, however soon it comes.
        world.journal = controlled(&world.journal, Control::Resume, turn.began);
        assert!(world.settle().ends_with("it is to begin"));
        let (again, next) = world.turn().unwrap();
        assert_eq!(again, node);
        assert_ne!(next.began, turn.began);
    }

    #[test]
    fn a_paused_update_lets_the_node_finish_and_gives_no_other_turn() {
        let mut world = World::loaded(five(1));
        world.settle();
        let (node, _) = world.turn().unwrap();
        world.journal = controlled(&world.journal, Control::Pause, world.now);
        assert_eq!(world.turn().unwrap().0, node);
        world.takes(node);
        assert!(world.settle().starts_with("an owner has paused it"));
        assert_eq!(world.turn(), None);
        let same = controlled(&world.journal, Control::Pause, world.now + 9);
        assert_eq!(same, world.journal);
        world.journal = controlled(&world.journal, Control::Resume, world.now);
        world.settle();
        assert_ne!(world.turn().unwrap().0, node);
    }

    #[test]
    fn an_update_that_was_ended_gives_no_turn_and_keeps_no_bundle() {
        let mut world = World::loaded(five(1));
        world.settle();
        world.journal = controlled(&world.journal, Control::Abort, world.now);
        assert!(!is_open(&world.journal));
        assert_eq!((world.turn(), world.settle()), (None, String::new()));
        assert_eq!(keeps(&world.journal, id(1)), "");
    }

    #[test]
    fn no_turn_begins_while_a_node_is_not_as_it_should_be() {
        let mut world = World::loaded(five(1));
        world.fact(id(3)).quorum = false;
        assert!(world.settle().ends_with("its member of etcd knows no leader"));
        assert_eq!(world.turn(), None);
        world.fact(id(3)).quorum = true;
        world.settle();
        assert!(world.turn().is_some());
    }

    #[test]
    fn a_node_restarts_only_while_the_others_are_as_they_should_be() {
        let mut world = World::loaded(five(1)[..3].to_vec());
        world.settle();
        let (node, turn) = world.turn().unwrap();
        assert_eq!(leave(&world.journal, &world.seen()), None, "it has nothing to start yet");
        world.report(node, |report| {
            report.turn = turn.began;
            report.set_phase(Phase::Ready);
        });
        assert_eq!(leave(&world.journal, &world.seen()), None, "the leave is noted first");
        assert!(world.settle().ends_with("it is to restart"));
        assert_eq!(world.turn().unwrap().1.left, turn.boot_id);
        assert_eq!(leave(&world.journal, &world.seen()), Some(node));
        // One of another boot needs another leave.
        world.report(node, |report| report.boot_id = "second".to_owned());
        assert_eq!(leave(&world.journal, &world.seen()), None);
        assert!(world.settle().ends_with("it is to restart"));
        assert_eq!(world.turn().unwrap().1.left, "second");
        assert_eq!(leave(&world.journal, &world.seen()), Some(node));
        let other = world.facts.iter().map(|fact| fact.id).find(|other| *other != node).unwrap();
        world.fact(other).health = NodeHealth::Late;
        assert_eq!(leave(&world.journal, &world.seen()), None);
        assert!(world.settle().ends_with(&format!("before {node} may restart")));
        world.fact(other).health = NodeHealth::Healthy;
        // etcd misses a member before its heartbeats do.
        world.spare = 0;
        assert_eq!(leave(&world.journal, &world.seen()), None);
        assert!(world.settle().contains("etcd cannot spare one"));
        world.spare = 1;
        // A report about another turn does not ask for one.
        world.report(node, |report| report.turn += 1);
        assert_eq!(leave(&world.journal, &world.seen()), None);
        world.journal = controlled(&world.journal, Control::Abort, world.now);
        world.report(node, |report| report.turn -= 1);
        assert_eq!(leave(&world.journal, &world.seen()), None);
    }

    /// A turn in which the node had its leave to restart.
    fn left() -> (World, NodeId) {
        let mut world = World::loaded(five(1)[..3].to_vec());
        world.settle();
        let (node, turn) = world.turn().unwrap();
        world.report(node, |report| {
            report.turn = turn.began;
            report.set_phase(Phase::Ready);
        });
        assert!(world.settle().ends_with("it is to restart"));
        (world, node)
    }

    #[test]
    fn etcd_misses_a_voter_from_its_leave_to_restart_until_it_is_back() {
        let (mut world, node) = left();
        let restarting = |world: &World, leave| restarting(&world.journal, &world.seen(), leave);
        assert_eq!(restarting(&world, None), Some(node), "it may restart at any moment");
        let other = world.facts.iter().map(|fact| fact.id).find(|other| *other != node).unwrap();
        world.fact(other).health = NodeHealth::Late;
        assert_eq!(restarting(&world, None), None, "it is held back");
        assert_eq!(restarting(&world, Some(node)), Some(node), "it had its leave just now");
        world.fact(other).health = NodeHealth::Healthy;
        world.report(node, |report| report.set_phase(Phase::Restart));
        assert_eq!(restarting(&world, None), Some(node));
        world.fact(node).health = NodeHealth::Late;
        assert_eq!(restarting(&world, None), Some(node), "it is away");
        world.fact(node).report = None;
        assert_eq!(restarting(&world, None), Some(node), "the leader is a new one");
        world.takes(node);
        world.report(node, |report| report.trial = true);
        assert_eq!(restarting(&world, None), Some(node), "it may go back");
        world.report(node, |report| report.trial = false);
        assert_eq!(restarting(&world, None), None, "it is back");
        // Power was lost in between, and it prepares again.
        let (mut world, node) = left();
        world.report(node, |report| {
            report.boot_id = "second".to_owned();
            report.set_phase(Phase::Drain);
        });
        assert_eq!(restarting(&world, None), None);
        // An update that was ended gives no leave, and takes none back.
        let (mut world, node) = left();
        world.journal = controlled(&world.journal, Control::Abort, world.now);
        assert_eq!(restarting(&world, None), None);
        assert_eq!(restarting(&world, Some(node)), Some(node));
        world.report(node, |report| report.set_phase(Phase::Restart));
        assert_eq!(restarting(&world, None), Some(node));
        world.fact(node).health = NodeHealth::Late;
        assert_eq!(restarting(&world, None), None, "etcd knows by itself whether it answers");
        // etcd does not miss a node that does not vote.
        let (mut world, node) = left();
        world.fact(node).voter = false;
        assert_eq!(restarting(&world, None), None);
    }

    #[test]
    fn a_node_that_does_not_come_back_from_its_restart_stops_the_update() {
        let minutes = |count: i64| count * 60;
        // It is away, its new system is never ready, or it does not even restart.
        for (at, says) in [
            (0, "it sends no heartbeats, 30 minutes after it was to restart: see the screen"),
            (1, "it runs the new version; it is not ready, 30 minutes after"),
            (2, "it does not restart, 30 minutes after"),
        ] {
            let (mut world, node) = left();
            match at {
                0 => {
                    world.fact(node).health = NodeHealth::Late;
                    world.report(node, |report| report.set_phase(Phase::Unspecified));
                }
                1 => {
                    world.takes(node);
                    world.report(node, |report| report.ready = false);
                }
                _ => {}
            }
            world.now += minutes(29);
            world.settle();
            assert!(world.turn().is_some(), "{says}");
            world.now += minutes(1);
            assert!(world.settle().starts_with("an owner"), "{says}");
            assert_eq!((world.journal.state(), world.turn()), (State::Failed, None));
            let failed = world.journal.steps.iter().find(|step| step.state() == Progress::Failed);
            let failed = failed.unwrap();
            assert_eq!(failed.node_id, node.to_string());
            assert!(failed.cause.starts_with(says), "{}", failed.cause);
            // It came back after all.
            world.takes(node);
            world.journal = controlled(&world.journal, Control::Resume, world.now);
            world.settle();
            assert_ne!(world.turn().unwrap().0, node, "it needs no other turn");
        }
    }

    #[test]
    fn the_time_of_a_turn_does_not_count_while_the_node_is_held_back() {
        let (mut world, node) = left();
        let other = world.facts.iter().map(|fact| fact.id).find(|other| *other != node).unwrap();
        world.fact(other).health = NodeHealth::Late;
        for _minute in 0..60 {
            world.now += 60;
            assert!(world.settle().ends_with("may restart"));
        }
        world.fact(other).health = NodeHealth::Healthy;
        world.fact(node).health = NodeHealth::Late;
        world.now += 28 * 60;
        assert!(world.settle().ends_with("it sends no heartbeats"));
        world.takes(node);
        world.settle();
        assert_ne!(world.turn().unwrap().0, node);
        // Another turn has its own time.
        let steps = &world.journal.steps;
        assert_eq!(steps.iter().filter(|step| step.state() == Progress::Turn).count(), 1);
        assert!(in_turn(&world.journal).is_some_and(|step| step.left_at == 0));
    }

    #[test]
    fn a_voter_gets_no_turn_where_voters_have_left_meanwhile() {
        let mut world = World::loaded(five(1)[..3].to_vec());
        world.facts.retain(|fact| fact.id != id(2));
        assert!(world.settle().ends_with("etcd cannot spare one"));
        assert_eq!(world.turn(), None);
        assert!(world.journal.steps.iter().any(|step| step.state() == Progress::Gone));
    }

    #[test]
    fn a_node_that_is_deleted_in_its_turn_does_not_hold_the_others() {
        let mut world = World::loaded(five(1));
        world.settle();
        let (node, _) = world.turn().unwrap();
        world.facts.retain(|fact| fact.id != node);
        world.settle();
        assert_ne!(world.turn().unwrap().0, node);
    }

    #[test]
    fn a_cluster_that_needs_nothing_is_done_at_once() {
        let facts = vec![fact(1, true, "1.1.0")];
        let journal = begun(message(), id(1), &[], &facts, 7);
        assert_eq!((journal.state(), is_open(&journal)), (State::Done, false));
    }

    /// An event at a node while an update goes on.
    #[derive(Clone, Debug)]
    enum Happens {
        Late(usize),
        Back(usize),
        Trial(usize),
        Takes(usize),
        GivesUp(usize),
        Leads(usize),
        Control(Control),
    }

    fn happens() -> impl Strategy<Value = Happens> {
        let control = prop_oneof![Just(Control::Pause), Just(Control::Resume)];
        prop_oneof![
            (0_usize..5).prop_map(Happens::Late),
            (0_usize..5).prop_map(Happens::Back),
            (0_usize..5).prop_map(Happens::Trial),
            (0_usize..5).prop_map(Happens::Takes),
            (0_usize..5).prop_map(Happens::GivesUp),
            (0_usize..3).prop_map(Happens::Leads),
            control.prop_map(Happens::Control),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_one_healthy_node_at_a_time_gets_its_turn_and_the_update_ends(
            events in prop::collection::vec(happens(), 0..60),
        ) {
            let mut world = World::loaded(five(1));
            for event in events {
                let before = world.turn().map(|(node, turn)| (node, turn.began));
                match event {
                    Happens::Late(at) => world.facts[at].health = NodeHealth::Late,
                    Happens::Back(at) => world.facts[at].health = NodeHealth::Healthy,
                    Happens::Trial(at) => world.facts[at].report.as_mut().unwrap().trial ^= true,
                    // Only a node whose turn it is changes its version.
                    Happens::Takes(at) => if before.is_some_and(|(node, _)| node == world.facts[at].id) {
                        world.takes(world.facts[at].id);
                    },
                    Happens::GivesUp(at) => if let Some((node, began)) = before.filter(|(node, _)| *node == world.facts[at].id) {
                        world.report(node, |report| {
                            report.turn = began;
                            report.set_phase(Phase::Failed);
                        });
                    },
                    Happens::Leads(at) => for (other, fact) in world.facts.iter_mut().enumerate() {
                        fact.leads = other == at;
                    },
                    Happens::Control(control) => world.journal = controlled(&world.journal, control, world.now),
                }
                for _ in 0..3 {
                    let before = world.turn().map(|(node, turn)| (node, turn.began));
                    world.pass();
                    let after = world.turn().map(|(node, turn)| (node, turn.began));
                    if let Some((node, _)) = after.filter(|_| after != before) {
                        prop_assert!(world.facts.iter().all(|fact| fact.fault().is_none()));
                        prop_assert!(!world.journal.paused);
                        let fact = world.facts.iter().find(|fact| fact.id == node).unwrap();
                        let others = world.journal.steps.iter().any(|step| {
                            step.state() == Progress::Waiting && step.node_id != node.to_string()
                        });
                        prop_assert!(!(fact.leads && others), "the leader is the last");
                        let workers = world.journal.steps.iter().any(|step| {
                            step.state() == Progress::Waiting && !step.voter
                        });
                        prop_assert!(!(fact.voter && workers), "a voter after the others");
                    }
                }
            }
            // All is well from here on.
            for _ in 0..60 {
                world.journal = controlled(&world.journal, Control::Resume, world.now);
                for fact in &mut world.facts {
                    (fact.health, fact.quorum) = (NodeHealth::Healthy, fact.voter);
                    fact.report.as_mut().unwrap().trial = false;
                }
                if let Some((node, _)) = world.turn() {
                    world.takes(node);
                }
                world.pass();
            }
            prop_assert_eq!(world.journal.state(), State::Done);
            prop_assert!(world.facts.iter().all(|fact| runs(&world.journal, fact)));
        }

        #[test]
        fn arbitrary_reports_do_no_harm(
            version in ".{0,40}", phase in any::<i32>(), turn in any::<i64>(), cause in ".{0,900}",
        ) {
            let mut world = World::loaded(five(1));
            world.settle();
            let (node, _) = world.turn().unwrap();
            world.fact(node).report =
                Some(v1::UpdateReport { version, phase, turn, cause, ..report("1.0.0") });
            world.settle();
            prop_assert!(world.journal.steps.iter().all(|step| step.cause.len() <= CAUSE_MAX));
        }
    }
}
