//! The system partitions of a disk. The one that the machine does not run from is the place
//! for another system.
//!
//! ```text
//! | ESP | POLIS-SYSTEM-A | POLIS-SYSTEM-B | data |
//!          runs             other
//! ```
//!
//! Invariants:
//! - The partition that the machine runs from is never opened for writing: the other one is
//!   chosen by name, and the kernel, in which dm-verity holds the running one, refuses to
//!   open that one exclusively.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use polis_layout::partitions::{ESP, SYSTEM_A, SYSTEM_B};

use super::backing::is_mirrored;
use super::table;
use polis_base::sys::block;

/// The names of both in the partition table, and what each is called.
const SLOTS: [(&str, &str); 2] = [("A", SYSTEM_A.name), ("B", SYSTEM_B.name)];

/// Why another system has no place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `init` named neither.
    #[error("the machine runs from slot {0:?}, and there are A and B")]
    Unknown(String),
    /// The disk has only one.
    #[error("the disk has no partition {0}")]
    Absent(&'static str),
    /// The disk of the mounted ESP is another one: that of a mirror that is left.
    #[error(
        "the disk that this machine was started from was lost, and it runs from the other one of \
         its mirror; reboot it first"
    )]
    Left,
    /// The table cannot be read.
    #[error(transparent)]
    Table(#[from] table::Error),
    /// The disk cannot be opened.
    #[error("cannot open {path}")]
    Disk {
        /// The disk.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// A system partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// `A` or `B`.
    pub name: &'static str,
    /// Its device.
    pub device: PathBuf,
    /// Its size in bytes.
    pub size: u64,
}

impl Slot {
    /// The one beside the `running` one on the disk.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn beside(running: &str, disk: &Path) -> Result<Self, Error> {
        Self::of(other(running).unwrap_or(running), disk)
    }

    /// The one of this name on the disk.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn of(name: &str, disk: &Path) -> Result<Self, Error> {
        let known = SLOTS.into_iter().find(|(known, _)| *known == name);
        let (name, partition) = known.ok_or_else(|| Error::Unknown(name.to_owned()))?;
        let failed = |source| Error::Disk { path: disk.to_owned(), source };
        let table = table::read(&File::open(disk).map_err(failed)?)?;
        let mut found = table.partitions.iter().filter(|entry| entry.name == partition);
        let entry = found.next().filter(|_one| found.next().is_none());
        let entry = entry.ok_or(Error::Absent(partition))?;
        let device = block::partition_path(disk, entry.number);
        Ok(Self { name, device, size: entry.blocks() * table.block_size })
    }

    /// Fails if the ESP that is mounted at `esp` is of another disk than that of a mirror.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn check(disk: &Path, esp: &Path) -> Result<(), Error> {
        let failed = |source| Error::Disk { path: disk.to_owned(), source };
        let table = table::read(&File::open(disk).map_err(failed)?)?;
        if !is_mirrored(&table) {
            return Ok(());
        }
        let entry = table.partitions.iter().find(|entry| entry.name == ESP.name);
        let device = entry
            .and_then(|entry| std::fs::metadata(block::partition_path(disk, entry.number)).ok());
        match (device, std::fs::metadata(esp)) {
            (Some(device), Ok(esp)) if device.rdev() != esp.dev() => Err(Error::Left),
            _ => Ok(()),
        }
    }

    /// Opens it for reading and writing, for this process alone.
    ///
    /// # Errors
    ///
    /// The kernel's error: EBUSY while something uses it.
    pub fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(&self.device)
    }
}

/// The name of the other one.
#[must_use]
pub fn other(running: &str) -> Option<&'static str> {
    let known = SLOTS.iter().any(|(name, _)| *name == running);
    SLOTS.iter().map(|(name, _)| *name).find(|name| known && *name != running)
}

#[cfg(test)]
pub(crate) mod tests {
    use polis_image::layout;
    use uuid::Uuid;

    use super::*;

    /// Makes a disk as the builder of images lays it out, in a plain file.
    pub(crate) fn disk(path: &Path) {
        let layout = layout::plan("seed", 1 << 20, 4 << 30).unwrap();
        let file = File::options().create(true).truncate(true).read(true).write(true).open(path);
        let file = file.unwrap();
        file.set_len(layout.size).unwrap();
        let mut gpt = gpt::GptConfig::new()
            .writable(true)
            .logical_block_size(gpt::disk::LogicalBlockSize::Lb512)
            .create_from_device(file, Some(Uuid::from_u128(1)))
            .unwrap();
        let entries = (1..).zip(&layout.partitions).map(|(number, partition)| {
            let entry = gpt::partition::Partition {
                part_type_guid: partition.kind.type_guid.into(),
                part_guid: partition.guid,
                first_lba: partition.start / 512,
                last_lba: (partition.start + partition.length) / 512 - 1,
                flags: 0,
                name: partition.kind.name.to_owned(),
            };
            (number, entry)
        });
        gpt.update_partitions(entries.collect()).unwrap();
        gpt.write().unwrap();
    }

    #[test]
    fn the_other_slot_is_the_one_that_does_not_run() {
        assert_eq!(
            (other("A"), other("B"), other("C"), other("")),
            (Some("B"), Some("A"), None, None)
        );
    }

    #[test]
    fn it_is_found_by_its_name_on_a_disk_as_the_builder_lays_it_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        disk(&path);
        let device = |number| block::partition_path(&path, number);
        let b = Slot::beside("A", &path).unwrap();
        assert_eq!(b, Slot { name: "B", device: device(3), size: layout::SYSTEM_SIZE });
        let a = Slot::beside("B", &path).unwrap();
        assert_eq!((a.name, a.device), ("A", device(2)));
        assert!(matches!(Slot::beside("C", &path), Err(Error::Unknown(_))));
        let blank = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(Slot::beside("A", blank.path()), Err(Error::Table(_))));
    }
}
