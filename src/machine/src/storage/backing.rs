//! The backing device of the data partition: the block device on which its encryption and its file
//! system lie. That is the partition itself, or a device over the partitions of two disks.
//!
//! `mirror` decides and publishes a [`Backing`]; `storage::machine` uses the device. The device is
//! there in a mirror of one disk, too, so that another disk can come under a file system that is
//! in use.
//!
//! ```text
//! one disk          /dev/vda5 ----------------------------------> encryption, file system
//! mirror, one left  /dev/vda5 --linear--> polis-mirror ----------> the same
//! mirror            /dev/vda5, /dev/vdb5 --raid1--> polis-mirror -> the same
//! ```
//!
//! Invariants:
//! - A mirrored data partition is only read and written through the device.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use uuid::{Uuid, uuid};

use super::table::{Partition, Table};
use polis_base::sys::dm::{self, DeviceMapper};

/// The name of the device.
pub const NAME: &str = "polis-mirror";

/// The type of the partition with the records of a mirror; its identity is the mirror's.
pub const TYPE_ID: Uuid = uuid!("9d3f7a1e-64b5-4b0e-8c15-2f7de0a6c4b9");
/// The name of that partition.
pub const PARTITION: &str = "POLIS-MIRROR";
/// Its size.
pub const SIZE: u64 = 4 << 20;

/// Bytes of a sector in tables of the device mapper.
const SECTOR: u64 = 512;

/// Where the data partition lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// On the partition.
    Partition,
    /// On the device.
    Mirror {
        /// A new partition may be made, and its device: the last block that it may have, since
        /// the other disk may be smaller. `None`: the device is there.
        last: Option<u64>,
        /// The disk whose errors are those of the data, as the kernel calls it: the only one.
        alone: Option<String>,
        /// The disks with all data.
        disks: Vec<PathBuf>,
    },
}

/// Whether the disk with this table belongs to a mirror.
#[must_use]
pub fn is_mirrored(table: &Table) -> bool {
    record(table).is_some()
}

/// The partition with the records of the mirror.
#[must_use]
pub fn record(table: &Table) -> Option<&Partition> {
    table.partitions.iter().find(|partition| partition.type_id == TYPE_ID)
}

/// Where the device is found, once it is there.
#[must_use]
pub fn path() -> PathBuf {
    Path::new("/dev/mapper").join(NAME)
}

/// The kernel's name of the device.
#[must_use]
pub fn kernel_name() -> Option<String> {
    let real = fs::canonicalize(path()).ok()?;
    Some(real.file_name()?.to_string_lossy().into_owned())
}

/// Makes the device with this table, unless it is there. Blocks.
///
/// # Errors
///
/// The error of the kernel.
pub fn make(table: &dm::Table) -> io::Result<()> {
    if path().exists() {
        return Ok(());
    }
    let node = DeviceMapper::open()?.create(NAME, table)?;
    // The machine has no udev that would do it.
    match fs::remove_file(path()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::os::unix::fs::symlink(node, path())
}

/// Removes the device, which nothing uses. Blocks.
///
/// # Errors
///
/// The error of the kernel.
pub fn remove() -> io::Result<()> {
    DeviceMapper::open()?.remove(NAME)?;
    fs::remove_file(path())
}

/// The table over one partition of so many bytes.
#[must_use]
pub fn linear(partition: &Path, length: u64) -> dm::Table {
    dm::Table {
        length: length / SECTOR,
        kind: "linear",
        parameters: format!("{} 0", partition.display()),
    }
}

/// The table over the partitions of two disks, each with its device for the kernel's own notes;
/// `fill` is the place of one whose data is copied from the other.
#[must_use]
pub fn raid(legs: [(&Path, &Path); 2], length: u64, fill: Option<usize>) -> dm::Table {
    let options = fill.map_or("1 0".to_owned(), |leg| format!("3 0 rebuild {leg}"));
    let devices = legs.map(|(notes, data)| format!("{} {}", notes.display(), data.display()));
    dm::Table {
        length: length / SECTOR,
        kind: "raid",
        parameters: format!("raid1 {options} 2 {}", devices.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_read_as_the_kernel_wants_them() {
        let linear = linear(Path::new("/dev/vda5"), 1 << 20);
        assert_eq!((linear.length, &*linear.parameters), (2048, "/dev/vda5 0"));
        let [a, b, c, d] = ["/dev/a4", "/dev/a5", "/dev/b4", "/dev/b5"].map(Path::new);
        let both = |fill| raid([(a, b), (c, d)], 1 << 20, fill).parameters;
        assert_eq!(both(None), "raid1 1 0 2 /dev/a4 /dev/a5 /dev/b4 /dev/b5");
        assert_eq!(both(Some(1)), "raid1 3 0 rebuild 1 2 /dev/a4 /dev/a5 /dev/b4 /dev/b5");
    }
}
