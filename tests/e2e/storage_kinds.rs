//! Each kind of data partition: it begins, comes back, keeps acknowledged writes at any
//! power cut, grows with its disk, and hides what it should.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_image::Sizes;
use polis_qemu::{Config, disk};
use polis_tests::{Story, cuts, seed, share, story};

use crate::storage::{
    COUNT, Kind, PLAINTEXT, acknowledged, bootstrap_config, bootstrap_config_small, count_and_cut,
    file, home_and_counting, search,
};
use crate::world::{SOON, World};

/// Power cuts of each kind in an ordinary run, unless `POLIS_CUTS` says another number:
/// with them, three boots of each kind are cold.
const DRAWN: u32 = 2;

/// The same with `--all`: twenty of them together, and one more.
const ALL: u32 = 7;

/// Longest that a node counts before its power goes.
const COUNTING: f64 = 6.0;

/// Printed when a file system has grown, before its new size.
const GROWN: &str = "the file system has grown mib=";

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(an_insecure_disk_keeps_what_was_acknowledged_shows_it_to_everybody_and_grows).takes(120),
    story!(an_encrypted_disk_keeps_acknowledged_writes_hides_them_and_grows).takes(140),
    story!(an_authenticated_disk_keeps_acknowledged_writes_and_hides_them).takes(160),
    story!(an_authenticated_disk_that_has_grown_has_room_once_that_was_written).takes(130),
];

fn an_insecure_disk_keeps_what_was_acknowledged_shows_it_to_everybody_and_grows() -> Result<()> {
    cut(Kind::Insecure)
}

fn an_encrypted_disk_keeps_acknowledged_writes_hides_them_and_grows() -> Result<()> {
    cut(Kind::Encrypted)
}

fn an_authenticated_disk_keeps_acknowledged_writes_and_hides_them() -> Result<()> {
    cut(Kind::Authenticated)
}

fn cut(kind: Kind) -> Result<()> {
    let world = World::new(&format!("storage-cuts-{}", kind.name()))?;
    // These boots are cold and as the product's are: the packed kernel and its boot stub,
    // a random address, mitigations.
    let firmware = world.image.direct(COUNT);
    let config = Config { firmware, ..bootstrap_config(&world, kind, COUNT)? };
    let mut last = 0;
    let (seed, cuts) = (seed()?, cuts(DRAWN, ALL)?);
    println!("POLIS_SEED={seed} POLIS_CUTS={cuts}");
    for cut in 0..cuts {
        let mut machine = world.boot(&config)?;
        let mut found = home_and_counting(&mut machine, kind)?;
        if cut == 0 {
            // The first time it ends in good order, and comes back by itself.
            acknowledged(&mut machine, 3)?;
            machine.qmp.press(&["ctrl", "alt", "delete"])?;
            machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
            found = home_and_counting(&mut machine, kind)?;
            ensure!(found >= 3, "3 was acknowledged, and {found} is there after a reboot");
        }
        ensure!(found >= last, "before cut {cut} {last} was acknowledged, and {found} is there");
        // Each cut has its own part of the time, and each kind its own moments.
        let after = COUNTING * share(seed.rotate_left(kind as u32), cut + 1, cuts);
        last = count_and_cut(machine, Duration::from_secs_f64(after))?.max(found);
        println!("cut {cut} after {after:.1} s of counting: {last} was acknowledged");
    }
    let mut machine = world.boot(&config)?;
    let found = home_and_counting(&mut machine, kind)?;
    ensure!(found >= last, "{last} was acknowledged, and {found} is there");
    acknowledged(&mut machine, found + 5)?;
    machine.kill();

    let places = search(&file(&config)?, PLAINTEXT)?;
    match kind {
        Kind::Insecure => ensure!(!places.is_empty(), "what was written is not on the disk"),
        Kind::Encrypted | Kind::Authenticated => {
            ensure!(places.is_empty(), "what was written can be read at {places:?}");
        }
    }
    match kind {
        Kind::Insecure | Kind::Encrypted => grow(&world, &config, kind, 4 << 10, found + 5),
        // All that a disk has grown by is written, at the pace of an emulated cipher, and the
        // rest of this disk before: a smaller one shows it.
        Kind::Authenticated => Ok(()),
    }
}

fn an_authenticated_disk_that_has_grown_has_room_once_that_was_written() -> Result<()> {
    const KIND: Kind = Kind::Authenticated;
    let world = World::new("storage-grows-authenticated")?;
    let config = bootstrap_config_small(&world, KIND, COUNT)?;
    let mut machine = world.boot(&world.past_stage_1(config.clone())?)?;
    home_and_counting(&mut machine, KIND)?;
    acknowledged(&mut machine, 5)?;
    machine.kill();
    grow(&world, &config, KIND, 128, 5)
}

/// Makes the disk of a machine that is off so many MiB larger: its file system has them after
/// the next boot, with `counted`, which was acknowledged.
fn grow(world: &World, config: &Config, kind: Kind, mib: u64, counted: u64) -> Result<()> {
    let image = file(config)?;
    let before = fs::metadata(&image)?.len() >> 20;
    // Of the quick kernel; the parameters have done their work.
    let quick = Config { disk: config.disk.clone(), ..world.bare(COUNT) };
    let config = world.past_stage_1(quick)?;
    disk::resize(&image, (before + mib) << 20)?;
    let mut machine = world.boot(&config)?;
    let found = home_and_counting(&mut machine, kind)?;
    ensure!(found >= counted, "{counted} was acknowledged, and {found} is there");
    // It may have grown before it counts.
    machine.wait_until_text(GROWN, 4 * SOON)?;
    let lines = machine.lines();
    let size = lines.iter().find_map(|line| Some(line.text.split_once(GROWN)?.1));
    let size = size.context("no size")?;
    let size: u64 = size.trim().parse().with_context(|| format!("a size of {size}"))?;
    // Integrity keeps less than a fiftieth for itself, headers and the journal a little.
    let Sizes { esp_partition, system_partition, .. } = world.manifest.sizes;
    let parts = (esp_partition + 2 * system_partition) >> 20;
    let least = before - parts - 400 + mib * 49 / 50;
    ensure!(size >= least, "{size} MiB, at least {least} were expected");
    // It stays so, and the earlier writes are there.
    machine.kill();
    let mut machine = world.boot(&config)?;
    let again = home_and_counting(&mut machine, kind)?;
    ensure!(again >= found, "{found} was there, and {again} is there");
    Ok(())
}
