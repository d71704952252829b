//! The steps of a cluster's update, by the reports of nodes. `restart_tests` has the restarts.

#[path = "restart_tests.rs"]
mod restarts;

use polis_bundle::KubernetesProgram;
use polis_proto::v1::NodeHealth;
use proptest::prelude::*;

use super::super::plan::tests::{bundle, fact, five, id, planned, report, with};
use super::*;

fn message() -> v1::UpdateBundle {
    v1::UpdateBundle {
        version: "1.1.0".to_owned(),
        from: "1.0.0".to_owned(),
        image: "00ff".to_owned(),
        variant: "base".to_owned(),
        signer: "aa11".to_owned(),
        etcd: "3.5.16".to_owned(),
        kubernetes: String::new(),
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
        let kubernetes = self.fact(node).kubernetes;
        let brings = self.journal.bundle.clone().unwrap_or_default().kubernetes;
        *self.fact(node) = Fact { leads, kubernetes, ..fact(seed, voter, "1.1.0") };
        self.report(node, |report| (report.keeps, report.kubernetes) = (keeps, brings));
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
fn workers_have_their_turns_after_every_api_server_where_the_minor_version_rises() {
    let facts = five(1).into_iter().map(|fact| match fact.voter {
        true => with(KubernetesProgram::ApiServer, "1.37.2", fact),
        false => with(KubernetesProgram::Kubelet, "1.37.2", fact),
    });
    let mut world = World::loaded(facts.collect());
    world.journal.bundle.as_mut().unwrap().kubernetes = "1.38.0".to_owned();
    let mut order = Vec::new();
    while world.journal.state() != State::Done {
        world.settle();
        let Some((node, _)) = world.turn() else { break };
        world.takes(node);
        order.push(node);
    }
    assert_eq!(world.journal.state(), State::Done);
    assert_eq!(order[2], id(1), "the leader is the last voter");
    let voters: Vec<_> = order.iter().map(|node| world.fact(*node).voter).collect();
    assert_eq!(voters, [true, true, true, false, false]);
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
    // The answer may be lost, and the request repeated.
    assert!(takes(&world.journal, Control::Abort));
    assert_eq!(controlled(&world.journal, Control::Abort, world.now + 9), world.journal);
    assert!(!takes(&world.journal, Control::Resume) && !takes(&world.journal, Control::Pause));
    world.journal.set_state(State::Done);
    assert!(!takes(&world.journal, Control::Abort));
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
fn no_node_gets_a_turn_once_the_node_with_the_bundle_has_left() {
    let says = "left the cluster: abort the update, and begin it again";
    // A worker keeps it, so that etcd misses nothing.
    let mut workers = [id(4), id(5)];
    workers.sort();
    let [first, holder] = workers;
    let begin = || {
        let mut world = World::new(five(1));
        world.journal.holder = holder.to_string();
        world
    };
    let mut world = begin();
    world.facts.retain(|fact| fact.id != holder);
    assert!(world.settle().ends_with(says));
    let mut world = begin();
    world.report(holder, |report| report.keeps = "00ff".to_owned());
    world.settle();
    assert_eq!(world.turn().unwrap().0, first);
    // The node in its turn may have the system on its disk already.
    world.facts.retain(|fact| fact.id != holder);
    world.settle();
    assert_eq!(world.turn().unwrap().0, first);
    world.takes(first);
    assert!(world.settle().ends_with(says));
    assert_eq!(world.turn(), None);
    // The bundle is not needed for the rest.
    for node in [1, 2, 3].map(id) {
        world.takes(node);
    }
    assert_eq!(world.settle(), "");
    assert_eq!(world.journal.state(), State::Done);
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
