//! The device over the disks of a mirror: its tables, which change while it is in use.
//!
//! What this module does not do: read what the kernel says of it (`kernel`).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::Error;
use super::disks::Disk;
use super::plan::Leg;
use crate::storage::backing;
use polis_base::sys::dm::{DeviceMapper, Table};

/// The table over both disks; `fill` is the place of the one that is filled.
pub(super) fn both(first: &Disk, second: &Disk, fill: Option<Leg>) -> Table {
    let devices = [first.devices(), second.devices()];
    let legs = [0, 1].map(|at| (devices[at].0.as_path(), devices[at].1.as_path()));
    backing::raid(legs, first.length(), fill.map(Leg::index))
}

/// Puts another table under the device. Blocks.
pub(super) fn replace(table: &Table) -> Result<(), Error> {
    let replaced = DeviceMapper::open().and_then(|mapper| mapper.replace(backing::NAME, table));
    replaced.map_err(|source| Error::Device { operation: "change", source })
}

/// Puts this disk alone under the device, unless it is. Blocks.
pub(super) fn alone(disk: &Disk) -> Result<(), Error> {
    if below()?.starts_with("linear") {
        return Ok(());
    }
    replace(&backing::linear(&disk.devices().1, disk.length()))
}

/// Whether the kernel's table names this device, by its numbers.
pub(super) fn is_on(table: &str, device: &Path) -> bool {
    let Ok(id) = std::fs::metadata(device).map(|metadata| metadata.rdev()) else { return false };
    names(table, rustix::fs::major(id), rustix::fs::minor(id))
}

fn names(table: &str, major: u32, minor: u32) -> bool {
    let numbers = format!("{major}:{minor}");
    table.split_whitespace().any(|word| word == numbers)
}

/// The kernel's table of the device: which disks are below it.
pub(super) fn below() -> Result<String, Error> {
    let table = DeviceMapper::open().and_then(|mapper| mapper.table(backing::NAME));
    table.map_err(|source| Error::Device { operation: "read", source })
}

/// What the kernel says of the device.
pub(super) fn status() -> Result<String, Error> {
    let status = DeviceMapper::open().and_then(|mapper| mapper.status(backing::NAME));
    status.map_err(|source| Error::Device { operation: "read", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_names_the_devices_below_it() {
        let table = "raid raid1 3 0 region_size 1024 2 254:4 254:5 254:20 254:21";
        assert!(names(table, 254, 5) && names(table, 254, 21));
        assert!(!names(table, 254, 2) && !names(table, 54, 5));
        assert!(names("linear 8:5 0", 8, 5));
    }
}
