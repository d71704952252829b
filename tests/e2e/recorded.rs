//! Power cuts of a disk that loses unflushed writes, made from a recording.
//!
//! Killing QEMU, as `power_cut` and `storage_kinds` do, keeps every write that the guest
//! has made, in its order. A disk with a volatile cache may lose each write since the last
//! flush, keep a later one, and have half of one. So each story here records every write
//! and flush of one machine that founds a cluster and counts in etcd, and boots disks on
//! which the power went at a drawn place of the recording: all writes that no flush had
//! covered are gone, or any of them, or one is torn into sectors (on a data partition without
//! authentication into blocks of 4 KiB, which XFS needs whole). Each of these disks must
//! boot to ready, with every number that etcd acknowledged before the last flush, and as
//! the same node if that was home before the last flush. The tables of the file system of
//! the ESP are never written, and a cut while its files are written leaves each of them whole.
//!
//! A place is drawn by the window between two flushes, the largest most often: that of
//! the file system that is made. Some places lie before `ready` and some behind it.
//! One recording serves all places of a kind, so a place costs one boot instead of three.
//!
//! The stories draw a few places each, and [`ALL`] where `POLIS_ALL` is set; `POLIS_CUTS`
//! draws another number. `POLIS_SEED` draws the same places again from the recording of
//! another run, which is much the same recording. A story that fails leaves its recording
//! (`disk.log`), from which the disk can be made again.

use std::fs::{self, File};
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use polis_base::files::{Esp, in_place};
use polis_qemu::cut::{Cut, Random};
use polis_qemu::recording::{Recording, Request};
use polis_qemu::{Config, Event, disk};
use polis_tests::{Sample, Story, cuts, seed, story};

use crate::esp;
use crate::storage::{COUNT, Kind, acknowledged, bootstrap_config_small, counting, file, number};
use crate::table::partition;
use crate::world::{BOOT, Identity, World, home, home_with};

/// Places of each kind in an ordinary run, unless `POLIS_CUTS` says another number.
const FEW: u32 = 2;

/// Places of each kind with `POLIS_ALL`: a hundred for the three kinds.
const ALL: u32 = 34;

/// Cuts of the power while the ESP is written; these need no boot.
const ESP_CUTS: usize = 24;

/// How far the recorded machine counts: some 200 flushes.
const COUNTED: u64 = 60;

/// The same promise for each kind of disk.
const KINDS: Sample = Sample { of: "recorded", drawn: 1 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(an_insecure_disk_without_its_unflushed_writes_boots_to_ready).takes(90).one_of(KINDS),
    story!(an_encrypted_disk_without_its_unflushed_writes_boots_to_ready).takes(90).one_of(KINDS),
    story!(an_authenticated_disk_without_its_unflushed_writes_boots_to_ready)
        .takes(90)
        .one_of(KINDS),
];

fn an_insecure_disk_without_its_unflushed_writes_boots_to_ready() -> Result<()> {
    comes_home(Kind::Insecure)
}

fn an_encrypted_disk_without_its_unflushed_writes_boots_to_ready() -> Result<()> {
    comes_home(Kind::Encrypted)
}

fn an_authenticated_disk_without_its_unflushed_writes_boots_to_ready() -> Result<()> {
    comes_home(Kind::Authenticated)
}

/// A machine that was recorded from its first boot on.
struct Recorded {
    /// The disk as it was before, and the file of the recording.
    before: PathBuf,
    log: PathBuf,
    recording: Recording,
    /// Where the disk writes blocks of 4 KiB whole.
    blocks: Range<u64>,
    identity: Identity,
    /// The flush that covers the identity.
    ready: usize,
    /// Numbers that were acknowledged, each with the flush that covers it.
    counted: Vec<(usize, u64)>,
}

fn comes_home(kind: Kind) -> Result<()> {
    let world = World::new(&format!("recorded-{}", kind.name()))?;
    let seed = seed()?;
    fs::write(world.path("seed"), format!("{seed}\n"))?;
    // All that is written is recorded, and each place copies it: the disk is small.
    let config = world.past_stage_1(bootstrap_config_small(&world, kind, COUNT)?)?;
    let recorded = record(&world, &config, kind)?;
    let mut random = Random::new(seed);
    recorded.esp_is_whole(&file(&config)?, &mut random)?;
    let places = cuts(FEW, ALL)?;
    let mut random = Random::new(seed);
    for place in 1..=places {
        // Two of three while the machine founds: the one-time writes are over after that.
        let among = match place % 3 {
            0 => recorded.ready + 1..recorded.recording.entries().len(),
            _ => 0..recorded.ready,
        };
        let cut = Cut::draw(&recorded.recording, &among, &mut random).context("no writes")?;
        let cut = cut.with_whole_blocks(recorded.blocks.clone());
        let named = format!("POLIS_SEED={seed}, place {place} of {places}: {cut}");
        println!("{named}");
        recorded.boot(&world, &config, kind, &cut).context(named)?;
    }
    // Only a story that failed needs its recording.
    fs::remove_file(&recorded.log)?;
    Ok(())
}

/// Makes a machine found and count, and records the writes that reach its disk.
fn record(world: &World, config: &Config, kind: Kind) -> Result<Recorded> {
    let (before, log) = (world.path("disk-before.img"), world.path("disk.log"));
    disk::copy(&file(config)?, &before)?;
    File::create(&log)?;
    let config = Config { recording: Some(log.clone()), ..config.clone() };
    let mut machine = world.boot(&config)?;
    // A line comes after the flush that it rests on: the recording contains that flush by
    // now.
    let (identity, ready) = home_with(&mut machine, |_| length(&log))?;
    let ready = ready?;
    let mut counts = Vec::new();
    while counts.last().is_none_or(|(_, number)| *number < COUNTED) {
        let counted = machine.wait_for("exercise", BOOT, is_acknowledged)?;
        counts.push((length(&log)?, number(&counted, "acknowledged")?));
    }
    // Waits for every write that is under way, so that the recording is whole.
    machine.qmp.stop()?;
    machine.kill();

    let size = fs::metadata(&before)?.len();
    let recording = Recording::read(&mut File::open(&log)?, size)?;
    println!("{}: {}", kind.name(), summary(&recording));
    let flushed = |length| recording.flushed(length).context("acknowledged without a flush");
    let ready = flushed(ready)?;
    let counted = counts.into_iter().map(|(length, number)| anyhow::Ok((flushed(length)?, number)));
    let counted = counted.collect::<Result<_>>()?;

    // All of it played back is the disk: nothing passed the recording by.
    let replayed = world.path("disk-replayed.img");
    Cut::none(&recording).disk(&recording, &log, &before, &replayed)?;
    let place = differ(&replayed, &file(&config)?)?;
    ensure!(place.is_none(), "the recording and the disk differ in the MiB {place:?}");
    let blocks = whole_blocks(&replayed, kind)?;
    fs::remove_file(&replayed)?;
    // The machine writes the files of its ESP in place: a lost write can harm no table.
    let tables = esp::tables(&before)?;
    let changed = recording.entries().iter().find(|entry| {
        entry.request != Request::Flush
            && entry.at < tables.end
            && tables.start < entry.at + entry.length
    });
    ensure!(changed.is_none(), "the tables of the ESP at {tables:?} were written: {changed:?}");
    Ok(Recorded { before, log, recording, blocks, identity, ready, counted })
}

impl Recorded {
    /// Cuts the power while the ESP is written, and looks at every file of the machine there
    /// with another implementation of the file system. No machine boots, so this can be often.
    fn esp_is_whole(&self, disk: &Path, random: &mut Random) -> Result<()> {
        let esp = esp::extent(&self.before)?;
        let mut windows = self.recording.windows();
        windows.retain(|window| {
            let entries = &self.recording.entries()[window.clone()];
            entries.iter().any(|entry| esp.contains(&entry.at))
        });
        ensure!(windows.len() > 4, "the ESP was hardly written: {windows:?}");
        for number in 0..ESP_CUTS {
            let window = &windows[number % windows.len()];
            let cut = Cut::draw(&self.recording, window, random).context("no writes")?;
            cut.disk(&self.recording, &self.log, &self.before, disk)?;
            for path in Esp::in_place() {
                let path = path.display().to_string();
                let size = esp::bytes(disk, &path)?.map(|bytes| bytes.len() as u64);
                ensure!(size == Some(in_place::SIZE), "{path} has {size:?} bytes: {cut}");
                esp::record(disk, &path).with_context(|| format!("{path}: {cut}"))?;
            }
        }
        println!("{ESP_CUTS} cuts in {} windows of the ESP: every file is whole", windows.len());
        Ok(())
    }

    /// Boots the disk as the cut leaves it.
    fn boot(&self, world: &World, config: &Config, kind: Kind, cut: &Cut) -> Result<()> {
        cut.disk(&self.recording, &self.log, &self.before, &file(config)?)?;
        let covered = |flush: usize| flush < cut.window.start;
        let least = self.counted.iter().rev().find(|(flush, _)| covered(*flush));
        let least = least.map_or(0, |(_, number)| *number);

        let mut machine = world.boot(config)?;
        let identity = home(&mut machine)?;
        let found = counting(&mut machine, kind)?;
        println!("home as {}: {least} was acknowledged, {found} is there", identity.node);
        if covered(self.ready) {
            let before = &self.identity;
            ensure!(identity == *before, "it was home as {before:?}, and is {identity:?}");
        }
        ensure!(found >= least, "{least} was acknowledged, and {found} is there");
        acknowledged(&mut machine, found + 1)?;
        machine.kill();
        Ok(())
    }
}

/// Where a disk of this kind, complete in `disk`, has to write blocks of 4 KiB whole: XFS does
/// not repair every torn block, and only authenticated storage has a journal below it.
pub(crate) fn whole_blocks(disk: &Path, kind: Kind) -> Result<Range<u64>> {
    if kind == Kind::Authenticated {
        return Ok(0..0);
    }
    let (start, length) = partition(disk, "POLIS-DATA")?;
    Ok(start..start + length)
}

fn is_acknowledged(event: &Event) -> bool {
    event.get("acknowledged").is_some()
}

pub(crate) fn length(file: &Path) -> Result<u64> {
    Ok(fs::metadata(file)?.len())
}

/// In words, for the log of the run.
fn summary(recording: &Recording) -> String {
    let mut sizes: Vec<usize> = recording.windows().iter().map(Range::len).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let entries = recording.entries();
    let mib = entries.last().map_or(0, |entry| entry.end >> 20);
    let largest = &sizes[..sizes.len().min(5)];
    format!(
        "{} entries, {mib} MiB, {} windows, the largest of {largest:?}",
        entries.len(),
        sizes.len()
    )
}

/// The first MiB in which two files are not the same.
fn differ(one: &Path, other: &Path) -> Result<Option<u64>> {
    const MIB: usize = 1 << 20;
    let (one, other) = (File::open(one)?, File::open(other)?);
    ensure!(one.metadata()?.len() == other.metadata()?.len(), "they are not as long");
    for place in 0.. {
        let part = |file: &File| {
            let mut part = Vec::with_capacity(MIB);
            file.take(MIB as u64).read_to_end(&mut part).map(|_| part)
        };
        let (one, other) = (part(&one)?, part(&other)?);
        if one != other {
            return Ok(Some(place));
        }
        if one.is_empty() {
            break;
        }
    }
    Ok(None)
}
