//! The running system on both disks of a mirror: the kernel reads it from either, so that the
//! disk that the machine was started from may be lost while it runs.
//!
//! ```text
//! start   system A of vda ------------------------> dm-verity --> /
//! joined  system A of vda, of vdb --raid1, reads--> dm-verity --> /
//! left    system A of vdb --linear----------------> dm-verity --> /
//! ```
//!
//! Only bytes that were compared are joined, and the verification is above the two disks.
//!
//! Invariants:
//! - The table of the verification changes in its devices alone, and in one call: no page of a
//!   program is read between two tables.

use std::io;
use std::path::{Path, PathBuf};

use super::Error;
use super::disks::Disk;
use crate::storage::backing;
use polis_base::sys::dm::{DeviceMapper, SYSTEM_DISKS, Table};

/// The name of the verified device, which `init` has made.
const VERIFIED: &str = "polis-system";

/// Bytes of a sector in tables of the device mapper.
const SECTOR: u64 = 512;

/// Has the kernel read the system in `slot` from both disks, which have the same. Blocks.
pub(super) fn join(slot: &str, first: &Disk, second: &Disk) -> Result<(), Error> {
    let (Some((first, length)), Some((second, _))) = (place(slot, first), place(slot, second))
    else {
        return Ok(());
    };
    put(&raid([&first, &second], length)).map_err(failed("join the systems of"))
}

/// Has the kernel read it from this disk alone. Does nothing where it was never joined. Blocks.
pub(super) fn leave(slot: &str, disk: &Disk) -> Result<(), Error> {
    let Some((device, length)) = place(slot, disk) else { return Ok(()) };
    if below().is_none() {
        return Ok(());
    }
    put(&backing::linear(&device, length)).map_err(failed("take a system from"))
}

/// Whether both disks are read.
pub(super) fn is_joined() -> bool {
    below().is_some_and(|below| below.starts_with("raid"))
}

/// What the kernel says of the device below the verified one, if there is one.
fn below() -> Option<String> {
    DeviceMapper::open().and_then(|mapper| mapper.status(SYSTEM_DISKS)).ok()
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Device { operation, source }
}

/// The partition of a system, and its length.
fn place(slot: &str, disk: &Disk) -> Option<(PathBuf, u64)> {
    let (device, entry) = disk.named(&format!("POLIS-SYSTEM-{slot}"))?;
    Some((device, entry.blocks() * disk.table.block_size))
}

/// Both have the same, and nothing is ever written: the kernel keeps no notes. It reads the second
/// one where the first one fails: a second disk that stalls keeps no program waiting.
fn raid([first, second]: [&Path; 2], length: u64) -> Table {
    let parameters =
        format!("raid1 4 0 nosync write_mostly 1 2 - {} - {}", first.display(), second.display());
    Table { length: length / SECTOR, kind: "raid", parameters }
}

/// Puts this table below the verified device.
fn put(table: &Table) -> io::Result<()> {
    let mapper = DeviceMapper::open()?;
    if mapper.status(SYSTEM_DISKS).is_ok() {
        return mapper.replace(SYSTEM_DISKS, table);
    }
    let device = mapper.create(SYSTEM_DISKS, table)?;
    let over = over(&mapper.table(VERIFIED)?, &device, mapper.length(VERIFIED)?);
    let over = over.ok_or_else(|| io::Error::other("the system is verified in another way"))?;
    mapper.replace_read_only(VERIFIED, &over)
}

/// The table of the verification with both of its devices replaced.
fn over(table: &str, device: &Path, length: u64) -> Option<Table> {
    let mut words = table.split_whitespace();
    let (kind, version) = (words.next()?, words.next()?);
    let (data, hashes) = (words.next()?, words.next()?);
    let rest: Vec<&str> = words.collect();
    if (kind, version) != ("verity", "1") || data != hashes || rest.is_empty() {
        return None;
    }
    let device = device.display();
    let parameters = format!("{version} {device} {device} {}", rest.join(" "));
    Some(Table { length, kind: "verity", parameters })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verification_changes_in_its_devices_alone() {
        let table = "verity 1 254:2 254:2 4096 4096 100 100 sha256 ab cd";
        let over = over(table, Path::new("/dev/dm-2"), 800).unwrap();
        assert_eq!(over.parameters, "1 /dev/dm-2 /dev/dm-2 4096 4096 100 100 sha256 ab cd");
        assert_eq!((over.kind, over.length), ("verity", 800));
        for other in ["", "linear 254:2 0", "verity 1 254:2 254:3 4096", "verity 1 a a"] {
            assert_eq!(super::over(other, Path::new("/dev/dm-2"), 8), None, "{other}");
        }
    }
}
