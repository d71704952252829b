//! Clocks that are wrong when a machine starts.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use polis_base::sys::clock;
use polis_qemu::args::Devices;
use polis_qemu::fleet::Part;
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Story, story};

use crate::fleet::{ask_until, fleet};
use crate::world::{SOON, World, home_with, this_boot};

/// How far the clock of a voter is ahead: two hours, and what it takes to begin the search.
const AHEAD: Duration = Duration::from_secs(7900);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_machine_whose_clock_stands_in_1970_boots_at_the_date_of_its_image),
    story!(a_voter_two_hours_ahead_comes_to_the_time_of_the_others),
];

fn a_machine_whose_clock_stands_in_1970_boots_at_the_date_of_its_image() -> Result<()> {
    let world = World::new("clock-1970")?;
    let day = Duration::from_secs(24 * 60 * 60);
    let config =
        Config { clock: Some(SystemTime::UNIX_EPOCH + day), ..world.bootstrap_config("")? };
    let mut machine = world.boot(&config)?;
    let (_identity, events) = home_with(&mut machine, this_boot)?;
    let time = events.iter().find(|event| event.word == "time").context("no `POLIS time`")?;
    ensure!(time.is("state", "floor") && time.is("source", "image"), "not the floor: {time}");
    // The only voter follows no source, and lends the others what it has.
    stands(&mut machine, |time| time.is("state", "cluster") && time.is("source", "own"))?;
    Ok(())
}

fn a_voter_two_hours_ahead_comes_to_the_time_of_the_others() -> Result<()> {
    let world = World::new("clock-ahead")?;
    let mut cluster = fleet(&world, 3, "")?;
    cluster.found()?;
    // The clock of a saved machine stands where it was.
    cluster.nodes[2].config.devices = Devices::FromStart;
    cluster.nodes[2].config.clock = Some(clock::now() + AHEAD);
    cluster.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    let id = cluster.nodes[2].id.clone();
    ask_until("a clock that was set back", || {
        let log = cluster.operator.run(&["node", "logs", &id, "--name", "time"]);
        // chronyd's own words, with the seconds behind.
        Ok(log.ok().filter(|log| log.contains("System clock was stepped by -7")).map(drop))
    })?;
    for number in 0..3 {
        stands(cluster.machine(number)?, |time| time.is("state", "cluster"))?;
    }
    Ok(())
}

/// Waits for a standing of the clock that the machine may have reported already.
fn stands(machine: &mut Machine, wanted: impl Fn(&Event) -> bool) -> Result<()> {
    let reported = |event: &Event| event.word == "time" && wanted(event);
    if machine.seen(reported).is_empty() {
        machine.wait_for("time", SOON, wanted)?;
    }
    Ok(())
}
