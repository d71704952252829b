//! The update of a whole cluster: three voters take the next version one at a time, while every
//! node writes.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use polis_image::signing::Keys;
use polis_qemu::fleet::Part;
use polis_qemu::history::longest_gap;
use polis_qemu::image::Flash;
use polis_qemu::patience::Deadline;
use polis_qemu::{Config, Fleet};
use polis_tests::{Story, story};
use prost::Message as _;
use serde_json::Value;

use crate::fleet::{APPEND, acknowledged_at, checked, of, writes_go_on};
use crate::newcomer::leaders;
use crate::update::{bundle, next};
use crate::world::{World, bootstrap};

const VOTERS: [usize; 3] = [0, 1, 2];
/// How long all turns may take together.
const TURNS: Duration = Duration::from_secs(20 * 60);

/// Between two questions: each costs the leader a handshake.
const LOOK: Duration = Duration::from_secs(2);

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(three_voters_take_the_next_version_one_at_a_time_while_all_write)
        .cluster()
        .at_most(Duration::from_secs(40 * 60))
        .takes(500)];

fn three_voters_take_the_next_version_one_at_a_time_while_all_write() -> Result<()> {
    let world = World::new("cluster_update")?;
    let (next, keys) = (next()?, Keys::generate()?);
    // Cheaper for a translated machine; `update` shows the product's words.
    let words = format!("{APPEND} mitigations=off highres=off");
    let mut configs = Vec::new();
    for number in VOTERS {
        let flash = world.path(&format!("flash-{number}"));
        configs.push(Config {
            firmware: world.image.uefi(Flash::Plain, &flash, &words)?,
            disk: Some(world.signed_disk(&format!("disk-{number}.img"), &keys)?),
            ..world.bare("")
        });
    }
    configs[0].fw_cfg = world.fw_cfg(&bootstrap().encode_to_vec())?;
    let mut cluster = of(&world, configs)?;
    cluster.found()?;
    cluster.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    cluster.wait_whole(VOTERS.len())?;
    writes_go_on(&mut cluster, &VOTERS)?;
    let (_etcd, leader) = leaders(&cluster)?;

    // A plan changes nothing.
    let file = bundle(&world, "next.update", &next, &keys)?.display().to_string();
    let planned = cluster.operator.run(&["cluster", "update", &file, "--dry-run"])?;
    ensure!(planned.contains(&format!("3 nodes get version {}", next.version)), "{planned}");
    ensure!(planned.contains("Nothing was changed"), "{planned}");

    // Paused in the first turn: that node goes on, and no other begins.
    let since = Instant::now();
    cluster.operator.run(&["--timeout", "5m", "cluster", "update", &file, "--yes"])?;
    until(&cluster, "a node has its turn", |update| !named(update, "turn").is_empty())?;
    cluster.operator.run(&["--timeout", "2m", "cluster", "update", "pause"])?;
    let paused = until(&cluster, "the paused update waits for its owner", |update| {
        update["waits_for"].as_str().is_some_and(|what| what.contains("paused"))
    })?;
    let first = named(&paused, "done");
    ensure!(first.len() == 1 && named(&paused, "waiting").len() == 2, "{paused}");
    ensure!(first[0] != cluster.nodes[leader].id, "the leader was the first: {paused}");
    eprintln!("{:6.1} s  the first node runs the new version", since.elapsed().as_secs_f64());
    writes_go_on(&mut cluster, &VOTERS)?;

    cluster.operator.run(&["--timeout", "2m", "cluster", "update", "resume"])?;
    let done =
        until(&cluster, "every node runs the new version", |update| update["state"] == "done")?;
    let end = Instant::now();
    eprintln!("{:6.1} s  {done}", since.elapsed().as_secs_f64());
    cluster.wait_whole(VOTERS.len())?;
    writes_go_on(&mut cluster, &VOTERS)?;

    let mut times = Vec::new();
    for number in VOTERS {
        let machine = cluster.machine(number)?;
        let kept = machine.seen(|event| {
            event.word == "update" && event.is("phase", "commit") && event.is("result", "done")
        });
        ensure!(kept.len() == 1 && kept[0].is("version", &next.version), "{number}: {kept:?}");
        let boots = machine.seen(|event| event.word == "boot").len();
        ensure!(boots == 2, "node {} was started {boots} times", number + 1);
        times.extend(acknowledged_at(machine));
    }
    let gap = longest_gap(times, since, end);
    eprintln!("without an acknowledged write for {gap:.1?}");
    let summary = checked(&world, VOTERS.len())?;
    eprintln!("{summary:?}");
    ensure!(summary.acknowledged.len() == VOTERS.len(), "not all wrote: {summary:?}");
    Ok(())
}

/// The nodes whose step is in this state.
fn named(update: &Value, state: &str) -> Vec<String> {
    let steps = update["steps"].as_array().into_iter().flatten();
    let steps = steps.filter(|step| step["state"] == state);
    steps.filter_map(|step| step["node"].as_str().map(str::to_owned)).collect()
}

/// Asks for the update until it is as expected; one that stops is an error.
#[expect(clippy::disallowed_methods, reason = "a story's thread may wait between two questions")]
fn until(cluster: &Fleet, what: &str, expected: impl Fn(&Value) -> bool) -> Result<Value> {
    let mut deadline = Deadline::within(TURNS);
    loop {
        let read = ["--timeout", "1m", "cluster", "update", "status"];
        // While the leader changes, the question may stay without an answer.
        let update = cluster.operator.document(&read);
        if let Ok(update) = &update {
            if expected(update) {
                return Ok(update.clone());
            }
            ensure!(update["state"] != "failed", "{what}: the update has stopped: {update}");
        }
        if deadline.is_over() {
            let last = update.map(|update| update.to_string());
            bail!("{what}: not within {TURNS:?}: {last:?}");
        }
        std::thread::sleep(LOOK);
    }
}
