//! The rotation of the authorities of a cluster, while its voters write.
//!
//! In an ordinary run, the cluster that `cluster_update` has updated rotates them. With `--all`, a
//! cluster with a voter and a worker that are off does, and machines lose their power on the way.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::history::longest_gap;
use polis_tests::{Story, cuts, seed, story};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::fleet::{
    APPEND, acknowledged_at, ask_within, checked, document, fleet, raise, run, writes_go_on,
};
use crate::world::World;

const MACHINES: usize = 5;
const VOTERS: [usize; 3] = [0, 1, 2];
/// A voter and a worker that are off during the first rotation.
const AWAY: [usize; 2] = [2, 4];

/// Cuts, unless `POLIS_CUTS` says another number.
const CUTS: u32 = 10;

/// The usual length of a rotation: a cut comes at a share of it.
const LENGTH: Duration = Duration::from_secs(40);

/// How long a rotation may take.
const ROTATION: Duration = Duration::from_secs(10 * 60);

/// Between two questions: each costs the leader a handshake.
const LOOK: Duration = Duration::from_secs(2);

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_cluster_gets_another_ca_while_machines_are_off_and_lose_their_power)
        .cluster()
        .at_most(Duration::from_secs(60 * 60))
        .takes(770)
        .of_all()];

fn a_cluster_gets_another_ca_while_machines_are_off_and_lose_their_power() -> Result<()> {
    let (seed, wanted) = (seed()?, cuts(CUTS, CUTS)?);
    eprintln!("POLIS_SEED={seed} POLIS_CUTS={wanted}");
    let world = World::new("rotation")?;
    let mut cluster = fleet(&world, MACHINES, APPEND)?;
    raise(&mut cluster, VOTERS.len())?;

    AWAY.into_iter().for_each(|number| cluster.cut_power(number));
    let on: Vec<_> = (0..MACHINES).filter(|number| !AWAY.contains(number)).collect();
    let gap = rotates(&mut cluster, &[0, 1])?;
    eprintln!("with a voter and a worker off: without an acknowledged write for {gap:.1?}");
    for number in AWAY {
        cluster.boot_again(number)?;
    }
    cluster.wait_whole(MACHINES)?;
    writes_go_on(&mut cluster, &VOTERS)?;
    eprintln!("those that were off are back");

    let mut dice = StdRng::seed_from_u64(seed);
    let mut done = 0;
    while done < wanted {
        run(&cluster, &["cluster", "rotate-ca", "--yes", "--no-wait"])?;
        let begun = Instant::now();
        for _cut in 0..2.min(wanted - done) {
            done += 1;
            sleep(LENGTH.mul_f64(dice.random::<f64>() / 2.0));
            let victim = on[dice.random_range(0..on.len())];
            eprintln!("cut {done} after {:.1?}: node {}", begun.elapsed(), victim + 1);
            cluster.cut_power(victim);
            cluster.boot_again(victim)?;
        }
        until_over(&cluster)?;
        cluster.wait_whole(MACHINES)?;
        writes_go_on(&mut cluster, &VOTERS)?;
    }
    let summary = checked(&world, VOTERS.len())?;
    eprintln!("{summary:?}");
    ensure!(summary.acknowledged.len() == VOTERS.len(), "not all wrote: {summary:?}");
    Ok(())
}

/// Rotates the authorities, and returns the longest time in which none of the `writers` had a write
/// acknowledged.
pub(crate) fn rotates(cluster: &mut Fleet, writers: &[usize]) -> Result<Duration> {
    let info = ["cluster", "info"];
    let before = document(cluster, &info)?["ca_words"].clone();
    let since = Instant::now();
    let rotate = ["--timeout", "10m", "cluster", "rotate-ca", "--yes"];
    let rotated = cluster.operator.document(&rotate)?;
    let end = Instant::now();
    eprintln!("rotated in {:.1?}: {rotated}", end - since);
    ensure!(rotated["step"] == "none" && rotated["ended"].is_string(), "{rotated}");
    // By the context that the command has left: it trusts the next CA alone.
    let after = document(cluster, &info)?["ca_words"].clone();
    ensure!(after != before && after == rotated["ca_words"], "{before} and {after}: {rotated}");
    let mut times = Vec::new();
    for &number in writers {
        times.extend(acknowledged_at(cluster.machine(number)?));
        let id = cluster.nodes[number].id.clone();
        // The port of the node itself.
        run(cluster, &["node", "status", &id])?;
    }
    writes_go_on(cluster, writers)?;
    Ok(longest_gap(times, since, end))
}

/// Waits until the rotation that goes on has ended.
fn until_over(cluster: &Fleet) -> Result<()> {
    let read = ["--timeout", "1m", "cluster", "rotate-ca", "status"];
    let mut last = String::new();
    let ended = ask_within("the rotation has ended", ROTATION, LOOK, || {
        // While the leader changes, the question may stay without an answer.
        let rotation = cluster.operator.document(&read);
        last = rotation.as_ref().map_or_else(ToString::to_string, ToString::to_string);
        Ok(rotation.ok().filter(|rotation| rotation["ended"].is_string()).map(drop))
    });
    ended.with_context(|| format!("the last answer: {last}"))
}

#[expect(clippy::disallowed_methods, reason = "a story's thread may wait for a drawn moment")]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}
