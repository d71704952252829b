//! The leave of a node to restart in its turn, and the time that it then has to be back.

use super::*;

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
fn another_system_of_the_same_version_is_not_that_of_the_bundle() {
    // It has another build of the version on its disk, and starts it in its turn.
    let (mut world, node) = left();
    world.takes(node);
    world.report(node, |report| (report.image, report.trial) = ("ab12".to_owned(), true));
    assert!(world.settle().ends_with("it runs the new version; its system is on trial"));
    assert_eq!(restarting(&world.journal, &world.seen(), None), Some(node), "it may go back");
    world.report(node, |report| report.trial = false);
    // The second time it has that system before its turn.
    for _turn in 0..2 {
        assert!(world.settle().starts_with("an owner"));
        let failed = world.journal.steps.iter().find(|step| step.state() == Progress::Failed);
        let cause = &failed.unwrap().cause;
        let expected = "another system of version 1.1.0: its image is ab12, and that of the bundle";
        assert!(cause.contains(expected), "{cause}");
        world.journal = controlled(&world.journal, Control::Resume, world.now);
    }
    world.report(node, |report| report.image = "00ff".to_owned());
    world.settle();
    assert_ne!(world.turn().unwrap().0, node, "it needs no other turn");
}

#[test]
fn a_node_without_the_number_of_its_boot_gets_no_turn_and_no_leave() {
    let says = "it has not reported the number of its boot yet";
    let mut world = World::loaded(five(1)[..3].to_vec());
    (1..=3).for_each(|seed| world.report(id(seed), |report| report.boot_id.clear()));
    assert!(world.settle().ends_with(says));
    assert_eq!(world.turn(), None);
    let (mut world, node) = left();
    world.report(node, |report| report.boot_id.clear());
    assert!(world.settle().ends_with(says));
    // A turn without a leave has no number, either.
    world.journal.steps.iter_mut().for_each(|step| step.left.clear());
    assert!(world.settle().ends_with(says));
    assert_eq!(leave(&world.journal, &world.seen()), None);
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
fn a_turn_ends_in_time_also_where_the_clock_was_set_back() {
    let (mut world, node) = left();
    world.fact(node).health = NodeHealth::Late;
    world.now -= 24 * 60 * 60;
    assert!(world.settle().ends_with("it sends no heartbeats"));
    assert_eq!(in_turn(&world.journal).map(|step| &*step.left), Some("boot of 1.0.0"));
    world.now += 29 * 60;
    world.settle();
    assert!(world.turn().is_some());
    world.now += 60;
    assert!(world.settle().starts_with("an owner"));
    assert_eq!(world.journal.state(), State::Failed);
}
