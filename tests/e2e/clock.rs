//! Clocks that are wrong when a machine starts.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use polis_base::sys::clock;
use polis_qemu::args::Devices;
use polis_qemu::fleet::Part;
use polis_qemu::{Config, Event, Fleet, Machine};
use polis_tests::{Story, draws_all, pick, seed, story};

use crate::fleet::{ask_until, document, fleet, run};
use crate::samples;
use crate::world::{BOOT, SOON, World, comes, home_with, this_boot};

/// How far the clock of a voter is ahead: two hours, and what it takes to begin the search.
const AHEAD: Duration = Duration::from_secs(7900);

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_machine_whose_clock_stands_in_1970_boots_at_the_date_of_its_image),
    story!(a_single_voter_serves_its_owner_with_a_wrong_clock_and_after_it).takes(60).at_most(LONG),
    story!(voters_come_to_the_time_of_the_others_and_form_a_quorum_with_the_same_wrong_clock)
        .cluster()
        .takes(240)
        .at_most(LONG)
        .one_of(samples::VOTERS),
];

/// With `--all`, each shows five clocks.
const LONG: Duration = Duration::from_secs(40 * 60);

/// A clock that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    DayBehind,
    DayAhead,
    SeasonBehind,
    SeasonAhead,
    In1970,
}

impl Wrong {
    const ALL: [Self; 5] =
        [Self::DayBehind, Self::DayAhead, Self::SeasonBehind, Self::SeasonAhead, Self::In1970];

    /// The time that it shows.
    fn time(self) -> SystemTime {
        let now = clock::now();
        match self {
            Self::DayBehind => now - DAY,
            Self::DayAhead => now + DAY,
            Self::SeasonBehind => now - 90 * DAY,
            Self::SeasonAhead => now + 90 * DAY,
            Self::In1970 => SystemTime::UNIX_EPOCH + DAY,
        }
    }

    /// Those of this run: one that the seed draws, and every one with `--all`.
    fn drawn(what: &str) -> Result<Vec<Self>> {
        if draws_all() {
            return Ok(Self::ALL.into());
        }
        let seed = seed()?;
        let drawn = pick(seed, what, Self::ALL.len(), 1);
        let drawn: Vec<_> = drawn.into_iter().map(|number| Self::ALL[number]).collect();
        println!("POLIS_SEED={seed}: {what}: {drawn:?}");
        Ok(drawn)
    }
}

fn a_machine_whose_clock_stands_in_1970_boots_at_the_date_of_its_image() -> Result<()> {
    let world = World::new("clock-1970")?;
    let config = Config { clock: Some(Wrong::In1970.time()), ..world.bootstrap_config("")? };
    let mut machine = world.boot(&config)?;
    let (_identity, events) = home_with(&mut machine, this_boot)?;
    let time = events.iter().find(|event| event.word == "time").context("no `POLIS time`")?;
    ensure!(time.is("state", "floor") && time.is("source", "image"), "not the floor: {time}");
    // The only voter follows no source, and lends the others what it has.
    stands(&mut machine, |time| time.is("state", "cluster") && time.is("source", "own"))?;
    Ok(())
}

fn a_single_voter_serves_its_owner_with_a_wrong_clock_and_after_it() -> Result<()> {
    let world = World::new("clock-single")?;
    let mut cluster = fleet(&world, 1, "")?;
    let founded = cluster.found()?;
    let ca = founded.text("ca").to_owned();
    for wrong in Wrong::drawn("the clock of a single voter")? {
        cluster.cut_power(0);
        set(&mut cluster, 0, Some(wrong));
        let ready = cluster.boot_again(0)?;
        ensure!(ready.is("ca", &ca), "{wrong:?}: another cluster: {ready}");
        serves(&cluster, wrong, &ca).with_context(|| format!("{wrong:?}"))?;
    }
    cluster.cut_power(0);
    set(&mut cluster, 0, None);
    cluster.boot_again(0)?;
    is_up(&cluster, 0)
}

fn voters_come_to_the_time_of_the_others_and_form_a_quorum_with_the_same_wrong_clock() -> Result<()>
{
    let world = World::new("clock-cluster")?;
    let mut cluster = fleet(&world, 3, "")?;
    let ca = cluster.found()?.text("ca").to_owned();
    // The clock of a saved machine stands where it was.
    cluster.nodes[2].config.devices = Devices::FromStart;
    cluster.nodes[2].config.clock = Some(clock::now() + AHEAD);
    cluster.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    is_stepped(&cluster, 2, |seconds| (-8000..-7000).contains(&seconds))?;
    agree(&mut cluster)?;

    for wrong in Wrong::drawn("the clock of one voter of three")? {
        cluster.cut_power(2);
        set(&mut cluster, 2, Some(wrong));
        cluster.boot_again(2).with_context(|| format!("{wrong:?}"))?;
        agree(&mut cluster)?;
        was_set(&mut cluster, 2, wrong).with_context(|| format!("{wrong:?}"))?;
        is_up(&cluster, 2).with_context(|| format!("{wrong:?}"))?;
    }

    for wrong in Wrong::drawn("the clocks of three voters")? {
        restart_all(&mut cluster, Some(wrong), &ca).with_context(|| format!("{wrong:?}"))?;
        serves(&cluster, wrong, &ca).with_context(|| format!("{wrong:?}"))?;
    }
    restart_all(&mut cluster, None, &ca)?;
    (0..3).try_for_each(|number| is_up(&cluster, number))
}

/// Checks how a voter that has the time of the others came to it.
fn was_set(cluster: &mut Fleet, number: usize, wrong: Wrong) -> Result<()> {
    match wrong {
        Wrong::DayAhead => is_stepped(cluster, number, |by| (-90_000..-80_000).contains(&by)),
        Wrong::SeasonAhead => is_stepped(cluster, number, |by| by < -7_000_000),
        Wrong::DayBehind => is_stepped(cluster, number, |by| (80_000..90_000).contains(&by)),
        // Set to the date of the image at first, and then by the last known time or by a voter,
        // whichever is there first.
        Wrong::SeasonBehind | Wrong::In1970 => {
            let kept = |event: &Event| event.word == "time" && event.is("source", "kept");
            if cluster.machine(number)?.seen(kept).is_empty() {
                is_stepped(cluster, number, |by| by > 3600)?;
            }
            Ok(())
        }
    }
}

/// Cuts the power of all, and starts all with this clock; they come to a quorum and to one time.
fn restart_all(cluster: &mut Fleet, wrong: Option<Wrong>, ca: &str) -> Result<()> {
    for number in 0..3 {
        cluster.cut_power(number);
        set(cluster, number, wrong);
    }
    for number in 0..3 {
        cluster.boot(number)?;
    }
    for number in 0..3 {
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("ca", ca), "another cluster: {ready}");
    }
    agree(cluster)
}

/// Gives a machine that is off this clock, or the right one.
fn set(cluster: &mut Fleet, number: usize, wrong: Option<Wrong>) {
    let config = &mut cluster.nodes[number].config;
    config.clock = wrong.map(Wrong::time);
    config.devices = Devices::FromStart;
}

/// Checks what a person gets whose own clock is right, from a cluster with such a clock: an
/// answer, or a refusal that names the clock; and that an owner is served again.
fn serves(cluster: &Fleet, wrong: Wrong, ca: &str) -> Result<()> {
    let id = &cluster.nodes[0].id;
    // By its own timeout: a program that is ended from outside says no cause.
    let describe = ["node", "describe", id];
    match wrong {
        Wrong::DayBehind | Wrong::DayAhead => is_up(cluster, 0),
        Wrong::SeasonAhead => {
            // The certificate of the owner ends in thirty days.
            ask_until("a refusal that names the clock", || {
                match cluster.operator.run(&describe) {
                    Ok(answer) => bail!("an ended certificate is served: {answer}"),
                    // Behind its first call, a caller may lose the reason.
                    Err(error) => Ok(error.to_string().contains("by its clock").then_some(())),
                }
            })?;
            run(cluster, &["cluster", "take-ownership", "--fingerprint", ca])?;
            is_up(cluster, 0)
        }
        // The certificate of a curator ends ten days behind the date of the image, so the age of
        // the image decides whether an owner is served now.
        Wrong::SeasonBehind | Wrong::In1970 => {
            ask_until("an answer, or a refusal that names the clock", || {
                let served = cluster.operator.run(&describe);
                Ok(match served {
                    Ok(_answer) => Some(()),
                    Err(error) => error.to_string().contains("clock").then_some(()),
                })
            })
        }
    }
}

/// Waits until the leader counts this node as up.
fn is_up(cluster: &Fleet, number: usize) -> Result<()> {
    let id = &cluster.nodes[number].id;
    ask_until("a node that is up", || {
        let node = document(cluster, &["node", "describe", id]);
        Ok(node.ok().filter(|node| node["state"] == "up").map(drop))
    })
}

/// Waits until each of three voters follows the time of the cluster.
fn agree(cluster: &mut Fleet) -> Result<()> {
    (0..3)
        .try_for_each(|number| stands(cluster.machine(number)?, |time| time.is("state", "cluster")))
}

/// Waits until chronyd has set a clock at once, by so many whole seconds.
fn is_stepped(cluster: &Fleet, number: usize, by: impl Fn(i64) -> bool) -> Result<()> {
    // chronyd's own words, with the seconds behind.
    const STEPPED: &str = "System clock was stepped by ";
    let id = &cluster.nodes[number].id;
    ask_until("a clock that was set", || {
        let log = cluster.operator.run(&["node", "logs", id, "--name", "time"]);
        let log = log.unwrap_or_default();
        let steps = log.lines().filter_map(|line| line.split_once(STEPPED));
        let mut seconds = steps.filter_map(|(_, step)| step.split('.').next()?.parse().ok());
        Ok(seconds.any(&by).then_some(()))
    })
}

/// Waits for a standing of the clock that the machine may have reported already.
fn stands(machine: &mut Machine, wanted: impl Fn(&Event) -> bool) -> Result<()> {
    comes(machine, "time", SOON, wanted).map(drop)
}
