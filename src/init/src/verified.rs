//! The verified system: the partition that has it, its mount through dm-verity, and every other
//! step that reads from it before `node` runs.
//!
//! Invariants:
//! - The system partition is mounted only through dm-verity.
//! - No step waits for the disk without a deadline.
//!
//! What this module does not do: make the system the root (`stage1`).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::mount::MountFlags;

use polis_base::stage::Stage;
use polis_base::sys::clock;
use polis_base::sys::dm::{DeviceMapper, Table};
use polis_base::sys::mount::{self, Mount};

use super::command_line::Verity;
use super::deadline::{self, TABLE};
use super::disk::{self, Device, Found, Slot};
use super::error::Error;
use super::machine::{Machine, System};

/// Where the system is mounted before it becomes the root.
pub(super) const SYSTEM: &str = "/system";
/// The name of the verified device.
const VERIFIED: &str = "polis-system";

/// Data and hash blocks, as every image is made with.
const BLOCK: u64 = BLOCK_BYTES as u64;
const BLOCK_BYTES: usize = 4096;
/// The unit of the device mapper.
const SECTOR: u64 = 512;

/// The system partition that has the system of this kernel, by the top of its hash tree. Waits for
/// `time` at most, and a little longer for a second partition.
///
/// # Errors
///
/// No partition has it, or one that may have it does not answer.
pub(super) fn system(
    machine: &mut Machine,
    found: &Found,
    verity: &Verity,
    time: Duration,
) -> Result<(Slot, Device), Error> {
    let devices: Vec<(Slot, Device)> = found
        .systems
        .iter()
        .filter_map(|(slot, number)| Some((*slot, disk::device(&found.disk, *number)?)))
        .collect();
    if devices.is_empty() {
        return Err(Error::NoSystem { disk: found.disk.clone() });
    }
    let (mut reasons, mut silent) = (Vec::new(), None);
    for (slot, device) in devices {
        // Behind a partition that does not answer, another one answers at once or not at all.
        let time = if silent.is_some() { time.min(TABLE) } else { time };
        let system = slot_system(slot, &device);
        let (path, blocks) = (device.path.clone(), verity.blocks);
        let read =
            bounded(machine, Stage::Initramfs, &system, "read the hash tree", time, move || {
                top(&path, blocks)
            });
        match read {
            Ok(Ok(top)) if verity.fits(&top) => return Ok((slot, device)),
            Ok(Ok(_)) => reasons.push(format!("{} has another system or none", slot.partition())),
            Ok(Err(error)) => reasons.push(format!("{} cannot be read: {error}", slot.partition())),
            Err(error) => drop(silent.get_or_insert(error)),
        }
    }
    let other = || Error::OtherSystem { disk: found.disk.clone(), reasons: reasons.join(", ") };
    Err(silent.unwrap_or_else(other))
}

/// The system in `slot`.
pub(super) fn slot_system(slot: Slot, device: &Device) -> System {
    let Device { path, numbers } = device.clone();
    System { partition: slot.partition(), device: path, numbers }
}

/// Does one step that reads from the running system.
///
/// # Errors
///
/// Its disk does not answer.
pub(super) fn step<T: Send + 'static>(
    machine: &mut Machine,
    step: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let system = machine.system.clone().unwrap_or_default();
    let done = bounded(machine, Stage::System, &system, step, deadline::SYSTEM, work);
    machine.system_silent |= matches!(done, Err(Error::NoAnswer { .. }));
    done
}

fn bounded<T: Send + 'static>(
    machine: &mut Machine,
    stage: Stage,
    system: &System,
    step: &'static str,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let since = clock::uptime();
    let System { partition, device, .. } = system.clone();
    let what = format!("{partition} ({}), to {step}", device.display());
    match deadline::named(machine, stage, &what, time, work) {
        Ok(done) => Ok(done),
        Err(deadline::Error::Overdue { waited }) => {
            Err(Error::NoAnswer { stage, step, partition, device, since, waited })
        }
        Err(error @ deadline::Error::Lost) => {
            Err(Error::Own { what: step, source: io::Error::other(error) })
        }
    }
}

/// The block that the hash tree begins with, behind `blocks` of data.
fn top(device: &Path, blocks: u64) -> io::Result<[u8; BLOCK_BYTES]> {
    let mut block = [0; BLOCK_BYTES];
    File::open(device)?.read_exact_at(&mut block, blocks.saturating_mul(BLOCK))?;
    Ok(block)
}

/// The table of dm-verity: data, then its hash tree, on the same device.
fn table(device: &Path, verity: &Verity) -> Table {
    let device = device.display();
    let Verity { root_hash, salt, blocks } = verity;
    Table {
        length: blocks * (BLOCK / SECTOR),
        kind: "verity",
        parameters: format!(
            "1 {device} {device} {BLOCK} {BLOCK} {blocks} {blocks} blake2b-256 {root_hash} {salt}"
        ),
    }
}

/// Mounts the system at [`SYSTEM`], and brings the directories into memory that `names` a mount
/// is to be moved to.
///
/// # Errors
///
/// The kernel refuses the device or the file system, the system is damaged, or its disk does not
/// answer.
pub(super) fn mount(
    machine: &mut Machine,
    system: &System,
    verity: &Verity,
    names: &'static [&'static str],
) -> Result<(), Error> {
    let table = table(&system.device, verity);
    let made = bounded(machine, Stage::Initramfs, system, "mount the system", deadline::SYSTEM, {
        move || make(&table, names)
    });
    let System { partition, device, .. } = system.clone();
    match made? {
        Ok(()) => Ok(()),
        Err(Refused::Device(source)) => Err(Error::Verity { partition, device, source }),
        Err(Refused::Mount(source)) => Err(blame(machine, system, source)),
    }
}

/// A refusal of the kernel.
enum Refused {
    Device(io::Error),
    Mount(mount::Error),
}

fn make(table: &Table, names: &[&str]) -> Result<(), Refused> {
    let mapper = DeviceMapper::open().map_err(Refused::Device)?;
    let verified = mapper.create_read_only(VERIFIED, table).map_err(Refused::Device)?;
    fs::create_dir_all(SYSTEM).ok();
    let flags = MountFlags::RDONLY | MountFlags::NODEV;
    let mount = Mount::new(verified.display().to_string(), SYSTEM, "erofs").flags(flags);
    mount.apply().map_err(Refused::Mount)?;
    // A directory that cannot be read is reported by the move.
    names.iter().for_each(|name| drop(fs::metadata(Path::new(SYSTEM).join(name))));
    Ok(())
}

/// Why the system can't be mounted: the kernel's log names damaged blocks.
fn blame(machine: &mut Machine, system: &System, source: mount::Error) -> Error {
    machine.investigate();
    let System { partition, device, .. } = system.clone();
    match machine.damage() {
        Some((_system, kind, block)) => {
            Error::Corrupt { partition, device, kind: kind.to_owned(), block }
        }
        None => Error::MountSystem { partition, device, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_where_the_hash_tree_starts() {
        let verity = Verity { root_hash: "ab".repeat(32), salt: "706f".to_owned(), blocks: 512 };
        let table = table(Path::new("/dev/vda2"), &verity);
        assert_eq!(table.length, 4096);
        let hash = "ab".repeat(32);
        let expected = format!("1 /dev/vda2 /dev/vda2 4096 4096 512 512 blake2b-256 {hash} 706f");
        assert_eq!(table.parameters, expected);
    }

    #[test]
    fn a_system_that_does_not_answer_says_what_was_waited_for_and_since_when() {
        let mut machine = Machine::default();
        let system = System {
            partition: "POLIS-SYSTEM-A",
            device: "/dev/vda2".into(),
            numbers: "254:2".to_owned(),
        };
        let (end, never) = std::sync::mpsc::channel::<()>();
        let time = Duration::from_millis(50);
        let stage = Stage::Initramfs;
        let read = move || never.recv().is_ok();
        let error = bounded(&mut machine, stage, &system, "mount the system", time, read);
        let error = error.unwrap_err();
        let Error::NoAnswer { step, waited, .. } = &error else { panic!("{error}") };
        assert_eq!((*step, *waited), ("mount the system", time));
        assert_eq!(bounded(&mut machine, stage, &system, "read it", time, || 7).unwrap(), 7);
        drop(end);
    }

    #[test]
    fn a_step_that_panics_does_not_blame_the_disk() {
        let mut machine = Machine::default();
        let error = step(&mut machine, "start node", || -> u8 { panic!("on purpose") });
        assert!(matches!(error, Err(Error::Own { what: "start node", .. })), "{error:?}");
        assert!(!machine.system_silent);
    }
}
