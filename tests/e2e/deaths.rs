//! Deaths inside a running node: of a child process, of a service, of the node.
//!
//! No shell reaches a machine from the outside, so the node kills itself: the
//! word `polis.fault=` on the kernel command line names what dies, once the
//! node is ready.

use anyhow::{Result, ensure};
use polis_qemu::Machine;
use polis_tests::{Sample, Story, story};

use crate::world::{SOON, World, guru_within, home};

/// Each opens the trapdoor.
const TRAPDOOR: Sample = Sample { of: "deaths", drawn: 2 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(etcd_that_is_killed_is_restarted_with_its_membership),
    story!(an_etcd_with_a_damaged_database_opens_the_trapdoor_after_three_deaths)
        .takes(45)
        .one_of(TRAPDOOR),
    story!(a_service_that_panics_is_restarted_and_says_why),
    story!(a_service_that_dies_past_its_bound_opens_the_trapdoor).one_of(TRAPDOOR),
    story!(a_node_that_is_killed_opens_the_trapdoor).one_of(TRAPDOOR),
    story!(a_node_whose_main_panics_opens_the_trapdoor).one_of(TRAPDOOR),
    story!(a_node_that_hangs_opens_the_trapdoor).takes(50).one_of(TRAPDOOR),
];

fn etcd_that_is_killed_is_restarted_with_its_membership() -> Result<()> {
    let (_world, mut machine, before) = faulty("kill-etcd")?;
    let death = machine.wait_for("service", SOON, |event| !event.is("state", "healthy"))?;
    ensure!(death.text("name").contains("consensus"), "another service died: {death}");
    ensure!(death.text("cause").contains("signal"), "not killed by a signal: {death}");
    // It reports itself healthy once it votes.
    let etcd = machine.wait_for("etcd", SOON, |event| event.is("state", "voter"))?;
    machine.wait_for("service", SOON, |event| {
        event.is("name", death.text("name")) && event.is("state", "healthy")
    })?;
    ensure!(etcd.is("member", &before.member), "another member came back: {etcd}");
    Ok(())
}

fn an_etcd_with_a_damaged_database_opens_the_trapdoor_after_three_deaths() -> Result<()> {
    let (_world, mut machine, _) = faulty("damage-etcd")?;
    let guru = guru_within(&mut machine, SOON, "0803")?;
    ensure!(guru.text("cause").contains("damaged"), "the cause is not the damage: {guru}");
    Ok(())
}

fn a_service_that_panics_is_restarted_and_says_why() -> Result<()> {
    let (_world, mut machine, _) = faulty("service-panic")?;
    let death = machine.wait_for("service", SOON, |event| event.text("cause").contains("panic"))?;
    let back = machine.wait_for("service", SOON, |event| {
        event.is("name", death.text("name")) && event.is("state", "healthy")
    })?;
    ensure!(back.text("restarts").parse::<u32>()? >= 1, "recovered without a restart: {back}");
    Ok(())
}

fn a_service_that_dies_past_its_bound_opens_the_trapdoor() -> Result<()> {
    let (_world, mut machine, _) = faulty("service-flaps")?;
    let guru = guru_within(&mut machine, SOON, "0331")?;
    let deaths = machine.seen(|event| event.is("name", "root.fault") && event.is("state", "dead"));
    ensure!(deaths.len() >= 2, "it was not started again twice: {deaths:?}, {guru}");
    Ok(())
}

fn a_node_that_is_killed_opens_the_trapdoor() -> Result<()> {
    let (_world, mut machine, _) = faulty("kill-node")?;
    let guru = guru_within(&mut machine, SOON, "0302")?;
    ensure!(guru.text("cause").contains("signal"), "the cause is not the signal: {guru}");
    Ok(())
}

fn a_node_whose_main_panics_opens_the_trapdoor() -> Result<()> {
    let (_world, mut machine, _) = faulty("main-panic")?;
    let guru = guru_within(&mut machine, SOON, "0332")?;
    ensure!(guru.text("cause").contains("panic"), "the cause is not the panic: {guru}");
    Ok(())
}

fn a_node_that_hangs_opens_the_trapdoor() -> Result<()> {
    let (_world, mut machine, _) = faulty("node-hangs polis.node-deadline=15")?;
    // Where in the program they are, before they end.
    machine.wait_until_text("stack of thread node: 0x", SOON)?;
    let guru = guru_within(&mut machine, SOON, "0309")?;
    // It prints the state of its threads, and the guru meditation has ended all of
    // them.
    ensure!(guru.text("cause").contains("threads: "), "the threads are missing: {guru}");
    Ok(())
}

/// A machine that was home and now does `fault` to itself.
fn faulty(fault: &str) -> Result<(World, Machine, crate::world::Identity)> {
    let world = World::new(&format!("death-{}", fault.split(' ').next().unwrap_or(fault)))?;
    let mut machine = world.boot(&world.bootstrap_config(&format!("polis.fault={fault}"))?)?;
    let identity = home(&mut machine)?;
    Ok((world, machine, identity))
}
