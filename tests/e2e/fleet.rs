//! Clusters of several machines, and the requests of stories to each.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ed25519_dalek::SigningKey;
use polis_qemu::args::{Devices, Disk, FwCfg};
use polis_qemu::deadline::Deadline;
use polis_qemu::disk::copy;
use polis_qemu::fleet::{PARAMETERS, Part};
use polis_qemu::history::{History, Summary};
use polis_qemu::{Config, Fleet, Machine, Operator};
use polis_tests::polisctl;
use polis_wire::pki;
use serde_json::Value;

use crate::owner::{SECRET, private};
use crate::world::{SOON, World, comes, on_esp};

/// Has every node write a history that can be checked.
pub(crate) const APPEND: &str = "polis.exercise=trickle";

/// Between two questions.
pub(crate) const LOOK: Duration = Duration::from_millis(300);

/// Acknowledgements that prove that writes go on: a node has one write on its way at a
/// time, so all but the first were asked for after the outage began.
const MANY: usize = 5;

/// A fleet of `machines` machines, all off. The first founds a cluster; `append`
/// goes behind the kernel command line of each. All but the first go on from one that was
/// saved in stage 1, see [`World::past_stage_1`].
pub(crate) fn fleet(world: &World, machines: usize, append: &str) -> Result<Fleet> {
    joined_by(world, world.bootstrap_config(append)?, machines, append)
}

/// The same, around a first node with parameters of its own.
pub(crate) fn joined_by(
    world: &World,
    bootstrap_config: Config,
    machines: usize,
    append: &str,
) -> Result<Fleet> {
    of(world, joining(world, bootstrap_config, machines, append)?)
}

/// The machines of such a fleet.
fn joining(
    world: &World,
    bootstrap_config: Config,
    machines: usize,
    append: &str,
) -> Result<Vec<Config>> {
    let blank = bootstrap_config.disk.clone().context("no disk")?;
    let mut configs = vec![bootstrap_config];
    for number in 1..machines {
        let disk = blank_disk(world, &blank, number)?;
        let config = Config { disk: Some(disk), ..world.bare(append) };
        configs.push(world.past_stage_1(config)?);
    }
    Ok(configs)
}

/// The machines of these configurations, all off. The first has parameters that found a cluster.
pub(crate) fn of(world: &World, configs: Vec<Config>) -> Result<Fleet> {
    made(world, configs, Fleet::new)
}

/// The same on a segment with IPv6 only.
pub(crate) fn with_ipv6_only(world: &World, machines: usize) -> Result<Fleet> {
    made(world, joining(world, world.bootstrap_config("")?, machines, "")?, Fleet::with_ipv6_only)
}

/// The same for one machine that gets its address by DHCPv6.
pub(crate) fn with_dhcpv6(world: &World) -> Result<Fleet> {
    made(world, vec![world.bootstrap_config("")?], Fleet::with_dhcpv6)
}

type Make = fn(&Path, Vec<Config>, Operator, &Path) -> Result<Fleet, polis_qemu::Error>;

fn made(world: &World, configs: Vec<Config>, make: Make) -> Result<Fleet> {
    let key = pki::key_pem(&SigningKey::from_bytes(&SECRET));
    let key = private(&world.path("owner.key"), &key)?;
    let operator = Operator::new(&polisctl()?, &world.path("operator"), "story");
    let fleet = make(&world.path(""), configs, operator, &key)?;
    let fleet = fleet.handing(hand);
    Ok(fleet.reporting(|milestone| {
        let seconds = milestone.at.as_secs_f64();
        eprintln!("{seconds:6.1} s  node {} {}", milestone.node + 1, milestone.what);
    }))
}

/// Parameters on the ESP for a machine that was saved in stage 1, and by fw_cfg for another.
fn hand(config: &mut Config, file: &Path) -> io::Result<()> {
    let item = FwCfg { name: PARAMETERS.to_owned(), file: file.to_owned() };
    let given = Config { fw_cfg: vec![item], ..config.clone() };
    *config = match config.devices {
        Devices::Plugged(_) => on_esp(given).map_err(io::Error::other)?,
        Devices::FromStart | Devices::Absent => given,
    };
    Ok(())
}

/// A disk like `blank`, not booted yet, for the machine `number`.
pub(crate) fn blank_disk(world: &World, blank: &Disk, number: usize) -> Result<Disk> {
    let file = world.path(&format!("disk-{number}.img"));
    copy(&blank.file, &file)?;
    Ok(Disk { file, ..blank.clone() })
}

/// Makes all machines one cluster, of which the first `voters` vote and write.
pub(crate) fn raise(fleet: &mut Fleet, voters: usize) -> Result<()> {
    let machines = fleet.nodes.len();
    fleet.found()?;
    let part = |number| if number < voters { Part::Voter } else { Part::Worker };
    let others: Vec<_> = (1..machines).map(|number| (number, part(number))).collect();
    fleet.admit(&others)?;
    fleet.wait_whole(machines)?;
    writes_go_on(fleet, &(0..voters).collect::<Vec<_>>())
}

/// Waits until all machines vote.
pub(crate) fn all_vote(fleet: &mut Fleet) -> Result<()> {
    let members = fleet.nodes.len().to_string();
    for number in 0..fleet.nodes.len() {
        comes(fleet.machine(number)?, "etcd", SOON, |etcd| {
            etcd.is("state", "voter") && etcd.is("members", &members)
        })?;
    }
    Ok(())
}

/// Runs a command of the owner; returns its output.
pub(crate) fn run(fleet: &Fleet, args: &[&str]) -> Result<String> {
    Ok(fleet.operator.run(&[&["--timeout", "2m"][..], args].concat())?)
}

/// The same, with the document that it prints for programs.
pub(crate) fn document(fleet: &Fleet, args: &[&str]) -> Result<Value> {
    Ok(fleet.operator.document(&[&["--timeout", "2m"][..], args].concat())?)
}

/// The address of a node on a segment with IPv4.
pub(crate) fn ipv4(fleet: &Fleet, number: usize) -> Result<Ipv4Addr> {
    match fleet.nodes[number].address {
        IpAddr::V4(address) => Ok(address),
        IpAddr::V6(address) => bail!("{address} is one of IPv6"),
    }
}

/// Skips all output of a machine so far.
pub(crate) fn catch_up(machine: &mut Machine) {
    while machine.next_line(Duration::ZERO).is_some() {}
}

/// Waits until each of these nodes has had [`MANY`] more writes acknowledged.
pub(crate) fn writes_go_on(fleet: &mut Fleet, numbers: &[usize]) -> Result<()> {
    for &number in numbers {
        catch_up(fleet.machine(number)?);
    }
    for &number in numbers {
        let machine = fleet.machine(number)?;
        for _ in 0..MANY {
            machine
                .wait_for("exercise", SOON, |event| event.get("acknowledged").is_some())
                .with_context(|| format!("node {}: writes do not go on", number + 1))?;
        }
    }
    Ok(())
}

/// Waits until a node has had two failed writes in a row, and no success between.
pub(crate) fn writes_have_stopped(fleet: &mut Fleet, number: usize) -> Result<()> {
    let machine = fleet.machine(number)?;
    catch_up(machine);
    for _ in 0..2 {
        let went_on = machine.wait("a write that is not acknowledged", SOON, |line| {
            let acknowledged =
                line.event().is_some_and(|event| event.get("acknowledged").is_some());
            let failed = line.text.contains("not acknowledged");
            (acknowledged || failed).then_some(acknowledged)
        })?;
        ensure!(!went_on, "node {} writes without a quorum", number + 1);
    }
    Ok(())
}

/// When a machine that is on has had writes acknowledged, since it was switched on.
pub(crate) fn acknowledged_at(machine: &Machine) -> Vec<Instant> {
    let acknowledged = machine.seen(|event| event.get("acknowledged").is_some());
    acknowledged.into_iter().map(|event| machine.started() + event.at).collect()
}

/// Waits until a node reports this state.
pub(crate) fn becomes(fleet: &mut Fleet, number: usize, state: &str) -> Result<()> {
    let machine = fleet.machine(number)?;
    let seen = machine.wait_for("cluster", SOON, |event| event.is("state", state));
    seen.with_context(|| format!("node {} is not {state}", number + 1)).map(drop)
}

/// Checks the history that all nodes have written to their logs.
pub(crate) fn checked(world: &World, machines: usize) -> Result<Summary> {
    let mut history = History::default();
    for number in 1..=machines {
        let log = world.path(&number.to_string()).join("serial.log");
        history.read(&std::fs::read_to_string(log)?);
    }
    history.check().context("the history has a lie in it")
}

/// Asks until `found` makes something of the answer.
pub(crate) fn ask_until<T>(what: &str, found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    ask_within(what, SOON, LOOK, found)
}

/// The same, within a time of its own and with other pauses.
#[expect(clippy::disallowed_methods, reason = "a story's thread may wait between two questions")]
pub(crate) fn ask_within<T>(
    what: &str,
    within: Duration,
    pause: Duration,
    mut found: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut deadline = Deadline::within(within);
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        if deadline.is_over() {
            bail!("{what}: not within {within:?}");
        }
        std::thread::sleep(pause);
    }
}
