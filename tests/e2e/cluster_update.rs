//! The update of a whole cluster: all nodes take the next version one at a time, while every
//! voter writes.
//!
//! At the end the same cluster rotates its authorities (`rotation`).
//!
//! In an ordinary run the cluster has three voters; with `--all` two workers, too, and another
//! cluster is updated through a system that fails, two dead leaders, and a power cut of all.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_image::Manifest;
use polis_image::signing::Keys;
use polis_qemu::history::longest_gap;
use polis_qemu::image::{CHEAP, Flash};
use polis_qemu::plug::Port;
use polis_qemu::{Config, Fleet, Machine};
use polis_tests::{Story, draws_all, story};
use prost::Message as _;
use serde_json::Value;

use crate::fleet::{
    APPEND, acknowledged_at, ask_until, ask_within, checked, document, of, raise, run, writes_go_on,
};
use crate::newcomer::leaders;
use crate::rotation::rotates;
use crate::samples;
use crate::update::{bundle, next, panicking, refused};
use crate::world::{BOOT, SOON, World, bootstrap};

const VOTERS: [usize; 3] = [0, 1, 2];
/// Workers in an ordinary run, and with `--all`.
const WORKERS: [usize; 2] = [0, 2];
/// How long all turns may take together.
const TURNS: Duration = Duration::from_secs(20 * 60);

/// Between two questions: each costs the leader a handshake.
const LOOK: Duration = Duration::from_secs(2);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_cluster_takes_the_next_version_one_node_at_a_time_while_its_voters_write)
        .cluster()
        .at_most(Duration::from_secs(40 * 60))
        .takes(500)
        .one_of(samples::VOTERS),
    story!(an_update_outlives_a_failed_turn_dead_leaders_and_a_power_cut_of_all)
        .cluster()
        .at_most(Duration::from_secs(40 * 60))
        .takes(500)
        .of_all(),
];

fn a_cluster_takes_the_next_version_one_node_at_a_time_while_its_voters_write() -> Result<()> {
    let world = World::new("cluster_update")?;
    let (next, keys) = (next()?, Keys::generate()?);
    let machines = VOTERS.len() + WORKERS[usize::from(draws_all())];
    let mut cluster = raised(&world, &keys, machines)?;
    let (_etcd, leader) = leaders(&cluster)?;

    // A plan changes nothing.
    let file = bundle(&world, "next.update", &next, &keys)?;
    let size = std::fs::metadata(&file)?.len();
    let file = file.display().to_string();
    let planned = planned(&cluster, &file)?;
    let whole = format!("{machines} nodes get version {}", next.version);
    ensure!(planned.contains(&whole) && planned.contains("Nothing was changed"), "{planned}");

    // Paused in the first turn: that node goes on, and no other begins.
    let (links, since) = (cluster.segment.links(), Instant::now());
    let before = links.bytes_from(Port::Gateway);
    begin(&cluster, &file)?;
    let begun = links.bytes_from(Port::Gateway);
    until(&cluster, "a node has its turn", |update| !named(update, "turn").is_empty())?;
    run(&cluster, &["cluster", "update", "pause"])?;
    let paused = until(&cluster, "the paused update waits for its owner", |update| {
        update["waits_for"].as_str().is_some_and(|what| what.contains("paused"))
    })?;
    let first = named(&paused, "done");
    ensure!(first.len() == 1 && named(&paused, "waiting").len() == machines - 1, "{paused}");
    ensure!(first[0] != cluster.nodes[leader].id, "the leader was the first: {paused}");
    eprintln!("{:6.1} s  the first node runs the new version", since.elapsed().as_secs_f64());
    writes_go_on(&mut cluster, &VOTERS)?;

    run(&cluster, &["cluster", "update", "resume"])?;
    let done = finished(&mut cluster, machines)?;
    let end = Instant::now();
    let (sent, later) = (begun - before, links.bytes_from(Port::Gateway) - begun);
    let (sent, later) = (share(sent, size), share(later, size));
    eprintln!("{:6.1} s  {done}", since.elapsed().as_secs_f64());
    eprintln!("of the bundle of {size} bytes {sent:.3} came from the operator, later {later:.3}");
    // The story's own questions follow, more of them on a slow host.
    ensure!(sent <= 1.1 && later < 0.5, "the bundle left the operator more than once");

    let mut times = Vec::new();
    for number in 0..machines {
        let machine = cluster.machine(number)?;
        let kept = machine.seen(|event| {
            event.word == "update" && event.is("phase", "commit") && event.is("result", "done")
        });
        ensure!(kept.len() == 1 && kept[0].is("version", &next.version), "{number}: {kept:?}");
        let boots = machine.seen(|event| event.word == "boot").len();
        ensure!(boots == 2, "node {} was started {boots} times", number + 1);
        times.extend(acknowledged_at(machine));
        eprintln!("node {} was away for {:.1?}", number + 1, away(machine)?);
    }
    let gap = longest_gap(times, since, end);
    eprintln!("without an acknowledged write for {gap:.1?}");

    // By the images in their heartbeats, the nodes do not run another build of the version.
    let other = Manifest { image_version: "another".to_owned(), ..next };
    let other = bundle(&world, "other.update", &other, &keys)?.display().to_string();
    refused(self::planned(&cluster, &other), "runs another system of version")?;

    // Beside it, a reboot without an update.
    let last = machines - 1;
    let id = cluster.nodes[last].id.clone();
    run(&cluster, &["node", "reboot", &id, "--yes"])?;
    let machine = cluster.machine(last)?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    machine.wait_for("ready", BOOT, |_| true)?;
    eprintln!("node {machines} rebooted in {:.1?}", away(machine)?);
    cluster.wait_whole(machines)?;
    writes_go_on(&mut cluster, &VOTERS)?;

    let gap = rotates(&mut cluster, &VOTERS)?;
    eprintln!("in the rotation, without an acknowledged write for {gap:.1?}");

    let summary = checked(&world, machines)?;
    eprintln!("{summary:?}");
    ensure!(summary.acknowledged.len() == VOTERS.len(), "not all wrote: {summary:?}");
    Ok(())
}

fn an_update_outlives_a_failed_turn_dead_leaders_and_a_power_cut_of_all() -> Result<()> {
    let world = World::new("cluster_update_faults")?;
    let (next, keys) = (next()?, Keys::generate()?);
    let machines = VOTERS.len();
    let mut cluster = raised(&world, &keys, machines)?;

    // A system whose kernel panics: its node is back on the one before, and no other begins.
    let broken = bundle(&world, "broken.update", &panicking(&world, &next)?, &keys)?;
    begin(&cluster, &broken.display().to_string())?;
    let stopped = until(&cluster, "the update stops", |update| update["state"] == "failed")?;
    eprintln!("{stopped}");
    let tried = of_one(&cluster, &stopped, "failed")?;
    ensure!(named(&stopped, "waiting").len() == machines - 1, "{stopped}");
    for number in VOTERS {
        let machine = cluster.machine(number)?;
        let boots = machine.seen(|event| event.word == "boot").len();
        let back = machine.seen(|event| event.is("phase", "rollback")).len();
        let expected = if number == tried { (2, 1) } else { (1, 0) };
        ensure!((boots, back) == expected, "node {}: {boots} starts, {back} back", number + 1);
    }
    cluster.wait_whole(machines)?;
    writes_go_on(&mut cluster, &VOTERS)?;
    run(&cluster, &["cluster", "update", "abort", "--yes"])?;

    // The leader dies while the first node writes the new system, and while the second starts it.
    let good = bundle(&world, "good.update", &next, &keys)?;
    begin(&cluster, &good.display().to_string())?;
    for (turn, moment) in [Moment::Writes, Moment::Restarts].into_iter().enumerate() {
        let number = turns(&cluster, turn)?;
        moment.reached(cluster.machine(number)?)?;
        let (_etcd, leader) = leaders(&cluster)?;
        ensure!(leader != number, "the leader had its turn before others");
        eprintln!("node {} leads and dies: {moment:?} of node {}", leader + 1, number + 1);
        cluster.cut_power(leader);
        cluster.boot_again(leader)?;
    }

    // The power of all goes while the last node writes.
    let number = turns(&cluster, 2)?;
    Moment::Writes.reached(cluster.machine(number)?)?;
    VOTERS.into_iter().for_each(|number| cluster.cut_power(number));
    eprintln!("all are off while node {} writes", number + 1);
    for number in VOTERS {
        cluster.boot(number)?;
    }
    eprintln!("{}", finished(&mut cluster, machines)?);
    for number in VOTERS {
        let id = cluster.nodes[number].id.clone();
        let described = document(&cluster, &["node", "describe", &id])?;
        ensure!(described["slot"] == "B" && described["trial"] != true, "{described}");
    }
    let summary = checked(&world, machines)?;
    eprintln!("{summary:?}");
    ensure!(summary.acknowledged.len() == machines, "not all wrote: {summary:?}");
    Ok(())
}

/// A cluster of three voters and the rest workers, whose disks take bundles of these keys.
fn raised(world: &World, keys: &Keys, machines: usize) -> Result<Fleet> {
    // Cheaper for a translated machine; `update` shows the product's words.
    let words = format!("{APPEND} {CHEAP}");
    let mut configs = Vec::new();
    for number in 0..machines {
        let flash = world.path(&format!("flash-{number}"));
        configs.push(Config {
            firmware: world.image.uefi(Flash::Plain, &flash, &words)?,
            disk: Some(world.signed_disk(&format!("disk-{number}.img"), keys)?),
            ..world.bare("")
        });
    }
    configs[0].fw_cfg = world.fw_cfg(&bootstrap().encode_to_vec())?;
    let mut cluster = of(world, configs)?;
    raise(&mut cluster, VOTERS.len())?;
    Ok(cluster)
}

/// The plan of an update, once the leader makes one: it refuses while a member of etcd last
/// reported an election.
fn planned(cluster: &Fleet, bundle: &str) -> Result<String> {
    let dry_run = ["--timeout", "5m", "cluster", "update", bundle, "--dry-run"];
    ask_until("the leader plans the update", || match cluster.operator.run(&dry_run) {
        Ok(plan) => Ok(Some(plan)),
        Err(refused) if refused.to_string().contains("knows no leader") => Ok(None),
        Err(error) => Err(error.into()),
    })
}

/// Begins an update.
fn begin(cluster: &Fleet, bundle: &str) -> Result<()> {
    planned(cluster, bundle)?;
    cluster.operator.run(&["--timeout", "5m", "cluster", "update", bundle, "--yes"])?;
    Ok(())
}

/// Waits until the update is done and all is well.
fn finished(cluster: &mut Fleet, machines: usize) -> Result<Value> {
    // The leader and each connection to it go meanwhile. It fails if a turn does.
    let done = cluster.operator.document(&["--timeout", "20m", "cluster", "update", "wait"])?;
    cluster.wait_whole(machines)?;
    writes_go_on(cluster, &VOTERS)?;
    Ok(done)
}

#[expect(clippy::cast_precision_loss, reason = "it is printed")]
fn share(bytes: u64, of: u64) -> f64 {
    bytes as f64 / of as f64
}

/// How long a machine was away at its last restart: from its end to ready.
fn away(machine: &Machine) -> Result<Duration> {
    let last = |word: &str| machine.seen(|event| event.word == word).last().map(|event| event.at);
    let (off, ready) = (last("off").context("no end")?, last("ready").context("not ready")?);
    Ok(ready.saturating_sub(off))
}

/// A moment of a node's turn.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// It writes the new system to its disk.
    Writes,
    /// It restarts.
    Restarts,
}

impl Moment {
    fn reached(self, machine: &mut Machine) -> Result<()> {
        match self {
            Self::Writes => machine.wait_for("update", SOON, |event| {
                event.is("phase", "write") && event.is("result", "started")
            })?,
            Self::Restarts => machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?,
        };
        Ok(())
    }
}

/// Waits until `done` nodes run the new version and another has its turn: which.
fn turns(cluster: &Fleet, done: usize) -> Result<usize> {
    let update = until(cluster, "the next node has its turn", |update| {
        named(update, "done").len() == done && named(update, "turn").len() == 1
    })?;
    of_one(cluster, &update, "turn")
}

/// The number of the only node whose step is in this state.
fn of_one(cluster: &Fleet, update: &Value, state: &str) -> Result<usize> {
    let [id] = &named(update, state)[..] else { bail!("not one node is {state}: {update}") };
    let number = cluster.nodes.iter().position(|node| node.id == *id);
    number.with_context(|| format!("{id} is not a node of the story"))
}

/// The nodes whose step is in this state.
fn named(update: &Value, state: &str) -> Vec<String> {
    let steps = update["steps"].as_array().into_iter().flatten();
    let steps = steps.filter(|step| step["state"] == state);
    steps.filter_map(|step| step["node"].as_str().map(str::to_owned)).collect()
}

/// Asks for the update until it is as expected; one that stops is an error.
fn until(cluster: &Fleet, what: &str, expected: impl Fn(&Value) -> bool) -> Result<Value> {
    let read = ["--timeout", "1m", "cluster", "update", "status"];
    let mut last = String::new();
    let found = ask_within(what, TURNS, LOOK, || {
        // While the leader changes, the question may stay without an answer.
        let update = cluster.operator.document(&read);
        last = update.as_ref().map_or_else(ToString::to_string, ToString::to_string);
        let Ok(update) = update else { return Ok(None) };
        if expected(&update) {
            return Ok(Some(update));
        }
        ensure!(update["state"] != "failed", "{what}: the update has stopped");
        Ok(None)
    });
    found.with_context(|| format!("the last answer: {last}"))
}
