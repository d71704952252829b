//! Power cuts while a machine takes another system, made from a recording of its disk.
//!
//! The story of `update` records every write and flush of its machine. Here the power goes at
//! drawn places between the first byte of a bundle and the moment at which the new system is
//! kept, and behind it; a disk with a volatile cache may lose each write since the last flush.
//! Every third place is in a window in which the ESP was written: the kernel image and its names
//! are there, in a file system without a journal, which the loader changes, too.
//!
//! Each of these disks has every kernel image whole that the loader lists, as another
//! implementation of the file system reads it, and boots one of the two systems as the same
//! node: the new one, if it was kept before the last flush.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::cut::{Cut, Random};
use polis_qemu::image::Flash;
use polis_qemu::recording::Recording;
use polis_qemu::{Config, Machine, disk};
use polis_tests::{cuts, seed};

use crate::esp;
use crate::recorded::{length, whole_blocks};
use crate::storage::{Kind, file};
use crate::world::{BOOT, Identity, World, home};

/// Places in an ordinary run, unless `POLIS_CUTS` says another number.
const FEW: u32 = 3;

/// Places with `POLIS_ALL`.
const ALL: u32 = 100;

/// The folder of the kernel images.
const KERNELS: &str = "EFI/Linux";

/// The recording of a machine, from its first boot on.
pub(crate) struct Record {
    before: PathBuf,
    log: PathBuf,
}

/// The two systems of the update.
pub(crate) struct Versions<'a> {
    pub(crate) old: &'a str,
    pub(crate) new: &'a str,
}

/// The records of the story of an update.
pub(crate) struct Recorded {
    record: Record,
    recording: Recording,
    /// How long the recording was before the first byte was sent, and once the new system
    /// was kept.
    began: u64,
    kept: u64,
    identity: Identity,
}

impl Record {
    /// Has the machine of this configuration record what it writes.
    pub(crate) fn begin(world: &World, config: &mut Config) -> Result<Self> {
        let (before, log) = (world.path("disk-before.img"), world.path("disk.log"));
        disk::copy(&file(config)?, &before)?;
        File::create(&log)?;
        config.recording = Some(log.clone());
        Ok(Self { before, log })
    }

    /// How long the recording is.
    pub(crate) fn length(&self) -> Result<u64> {
        length(&self.log)
    }

    /// Ends the machine, whose update is between these lengths of the recording.
    pub(crate) fn end(
        self,
        mut machine: Machine,
        identity: Identity,
        [began, kept]: [u64; 2],
    ) -> Result<Recorded> {
        // Waits for every write that is under way, so that the recording is whole.
        machine.qmp.stop()?;
        machine.kill();
        let size = fs::metadata(&self.before)?.len();
        let recording = Recording::read(&mut File::open(&self.log)?, size)?;
        Ok(Recorded { record: self, recording, began, kept, identity })
    }
}

impl Recorded {
    /// Cuts the power at drawn places, and boots each disk.
    pub(crate) fn survives(&self, world: &World, config: &Config, of: &Versions<'_>) -> Result<()> {
        let Self { record: Record { before, log }, recording, identity, .. } = self;
        let entries = recording.entries();
        let [began, kept] = [self.began, self.kept]
            .map(|length| entries.partition_point(|entry| entry.end <= length));
        let covered = recording.flushed(self.kept).context("kept without a flush")?;
        let cut_disk = world.path("disk-cut.img");
        let flash = world.path("flash-cut");
        let mut config = Config { recording: None, forwards: Vec::new(), ..config.clone() };
        if let Some(disk) = &mut config.disk {
            disk.file.clone_from(&cut_disk);
        }
        let make = |cut: &Cut| cut.disk(recording, log, before, &cut_disk);
        make(&Cut::none(recording))?;
        let kernels = Kernels::of(before, &cut_disk, of)?;
        let blocks = whole_blocks(&cut_disk, Kind::Insecure)?;

        let esp = esp::extent(before)?;
        let mut windows = recording.windows();
        windows.retain(|window| window.start >= began);
        let (all, on_esp): (Vec<_>, Vec<_>) = (windows.clone(), {
            windows.retain(|window| entries[window.clone()].iter().any(|e| esp.contains(&e.at)));
            windows
        });
        ensure!(on_esp.len() > 4, "the ESP was hardly written: {on_esp:?}");
        println!("{} windows, {} of them on the ESP", all.len(), on_esp.len());
        let seed = seed()?;
        let mut random = Random::new(seed);
        let places = cuts(FEW, ALL)?;
        for place in 1..=places {
            let cut = match place % 3 {
                // Behind the flush that keeps the new system: the next boot, and what follows.
                0 => Cut::draw(recording, &(covered + 1..entries.len()), &mut random),
                2 => Cut::draw(recording, &(began..kept), &mut random),
                _ => {
                    let window = random.below(on_esp.len());
                    Cut::draw(recording, &on_esp[window], &mut random)
                }
            };
            let cut = cut.context("no writes")?.with_whole_blocks(blocks.clone());
            let named = format!("POLIS_SEED={seed}, place {place} of {places}: {cut}");
            println!("{named}");
            make(&cut)?;
            kernels.are_whole(&cut_disk).with_context(|| named.clone())?;
            // Reading it has left a mark on it.
            make(&cut)?;
            config.firmware = world.image.uefi(Flash::Plain, &flash, "")?;
            let must = cut.window.start > covered;
            comes_home(world, &config, of, must, identity).context(named)?;
        }
        // Only a story that failed needs its recording.
        fs::remove_file(log)?;
        Ok(())
    }
}

/// Boots one of the two systems, the new one where it `must`, as the same node.
fn comes_home(
    world: &World,
    config: &Config,
    of: &Versions<'_>,
    must: bool,
    identity: &Identity,
) -> Result<()> {
    let mut machine = world.boot(config)?;
    let booted = machine.wait_for("boot", BOOT, |_| true)?;
    let is = |version, slot| booted.is("version", version) && booted.is("slot", slot);
    let new = is(of.new, "B");
    ensure!(new || is(of.old, "A"), "neither of the two: {booted}");
    ensure!(new || !must, "the new system was kept, and is gone: {booted}");
    let home = home(&mut machine)?;
    ensure!(home == *identity, "it was {identity:?}, and is {home:?}");
    println!("home with {}", if new { of.new } else { of.old });
    machine.kill();
    Ok(())
}

/// The kernel images that may have a name.
struct Kernels {
    /// Paths on the ESP, each with the only bytes that it may have.
    known: Vec<(String, Vec<u8>)>,
    /// The one that is always there.
    old: String,
}

impl Kernels {
    /// From the disk as it was before all updates, and behind them.
    fn of(before: &Path, after: &Path, of: &Versions<'_>) -> Result<Self> {
        let path = |name: String| format!("{KERNELS}/polis-{name}.efi");
        let (old, new) = (path(of.old.to_owned()), path(of.new.to_owned()));
        let read = |disk, path: &str| {
            esp::bytes(disk, path)?.with_context(|| format!("{path} is not on the ESP"))
        };
        let (first, second) = (read(before, &old)?, read(after, &new)?);
        let untried = path(format!("{}+1", of.new));
        let known = vec![(old.clone(), first), (new, second.clone()), (untried, second)];
        Ok(Self { known, old })
    }

    /// Compares each that is on the ESP of a disk.
    fn are_whole(&self, disk: &Path) -> Result<()> {
        for (path, wanted) in &self.known {
            let found = esp::bytes(disk, path)?;
            let absent = found.is_none() && *path != self.old;
            ensure!(absent || found.as_ref() == Some(wanted), "{path} is not whole");
        }
        Ok(())
    }
}
