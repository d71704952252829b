//! The verified system: the partition that has it, and its mount through dm-verity.
//!
//! Invariants:
//! - The system partition is mounted only through dm-verity.
//!
//! What this module does not do: make the system the root (`stage1`).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::mount::MountFlags;

use polis_base::sys::dm::{DeviceMapper, Table};
use polis_base::sys::mount::{self, Mount};

use super::command_line::Verity;
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

/// The system partition that has the system of this kernel, by the top of its hash tree.
pub(super) fn system(found: &Found, verity: &Verity) -> Result<(Slot, Device), Error> {
    let devices: Vec<(Slot, Device)> = found
        .systems
        .iter()
        .filter_map(|(slot, number)| Some((*slot, disk::device(&found.disk, *number)?)))
        .collect();
    if devices.is_empty() {
        return Err(Error::NoSystem { disk: found.disk.clone() });
    }
    let mut reasons = Vec::new();
    for (slot, device) in devices {
        match top(&device.path, verity) {
            Ok(top) if verity.fits(&top) => return Ok((slot, device)),
            Ok(_) => reasons.push(format!("{} has another system or none", slot.partition())),
            Err(error) => reasons.push(format!("{} cannot be read: {error}", slot.partition())),
        }
    }
    Err(Error::OtherSystem { disk: found.disk.clone(), reasons: reasons.join(", ") })
}

/// The block that the hash tree begins with, behind the data.
fn top(device: &Path, verity: &Verity) -> io::Result<[u8; BLOCK_BYTES]> {
    let mut block = [0; BLOCK_BYTES];
    File::open(device)?.read_exact_at(&mut block, verity.blocks.saturating_mul(BLOCK))?;
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

/// Mounts the system at [`SYSTEM`].
///
/// # Errors
///
/// The kernel refuses the device or the file system, or the system is damaged.
pub(super) fn mount(machine: &mut Machine, system: &System, verity: &Verity) -> Result<(), Error> {
    let System { partition, device, .. } = system;
    let refused = |source| Error::Verity { partition, device: device.clone(), source };
    let mapper = DeviceMapper::open().map_err(refused)?;
    let table = table(device, verity);
    let verified = mapper.create_read_only(VERIFIED, &table).map_err(refused)?;
    fs::create_dir_all(SYSTEM).ok();
    let flags = MountFlags::RDONLY | MountFlags::NODEV;
    let mount = Mount::new(verified.display().to_string(), SYSTEM, "erofs").flags(flags);
    mount.apply().map_err(|source| blame(machine, system, source))
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
}
