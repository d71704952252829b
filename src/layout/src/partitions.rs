//! The layout of the disk: sizes in, partition table out.
//!
//! Pure: it opens nothing and writes nothing. The builder of images and the installer carry
//! a plan out, and `storage` on the machine adds the data partition behind it.
//!
//! ```text
//! LBA 0  1 MiB     + 512 MiB        + 1 GiB          + 1 GiB
//! |GPT...|POLIS-ESP|POLIS-SYSTEM-A  |POLIS-SYSTEM-B  |free: POLIS-DATA is made here|GPT'|
//! ```
//!
//! Invariants:
//! - Every partition starts on a boundary of [`ALIGNMENT`].
//! - Every GUID follows from the seed: the same content has the same table.
//! - The places of partitions do not depend on the content: every disk has room for a
//!   second system, and for systems that grow.
//!
//! What this module does not do: create POLIS-DATA, and give the disk of an image and its
//! partitions GUIDs of their own (the machine does both, at its first boot).

use uuid::{Uuid, uuid};

/// Sector size of an image. The installer writes the table for that of its disk; every
/// partition begins and ends on a boundary of both.
pub const SECTOR: u64 = 512;

/// Partitions start at multiples of this, which suits every disk's own blocks.
pub const ALIGNMENT: u64 = 1 << 20;

/// Size of the EFI system partition: three unified kernel images (the one that runs, a new
/// one and one that is being written), each with room to grow to several times its 43 MB,
/// and what a node keeps there.
pub const ESP_SIZE: u64 = 512 << 20;

/// Size of each of the two system partitions: several times that of a system with
/// workloads, since it can never change on a disk that is in use.
pub const SYSTEM_SIZE: u64 = 1 << 30;

/// The size of the table's backup at the end of the disk: 33 sectors, aligned.
const TAIL: u64 = ALIGNMENT;

/// Namespace of the GUIDs that are derived from an image's content.
const NAMESPACE: Uuid = uuid!("e227505c-02e7-4756-ac9f-ba785c39a948");

/// Name and type of the EFI system partition. The type is UEFI's own: firmware
/// looks for it.
pub const ESP: Kind =
    Kind { name: "POLIS-ESP", type_guid: uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b") };
/// Name and type of the first system partition.
pub const SYSTEM_A: Kind =
    Kind { name: "POLIS-SYSTEM-A", type_guid: uuid!("59c6e635-c906-46a2-aaf4-09696edc0b9a") };
/// Name and type of the second system partition.
pub const SYSTEM_B: Kind =
    Kind { name: "POLIS-SYSTEM-B", type_guid: uuid!("5de5d1a7-9151-49c6-880f-b31c963f6241") };
/// Name and type of the data partition.
pub const DATA: Kind =
    Kind { name: "POLIS-DATA", type_guid: uuid!("5141e997-d959-497c-b0e8-f6f81294567c") };

/// The purpose of a partition: the name and the type GUID by which it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Name in the partition table.
    pub name: &'static str,
    /// Type in the partition table.
    pub type_guid: Uuid,
}

/// One entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Name and type.
    pub kind: Kind,
    /// The partition's own GUID.
    pub guid: Uuid,
    /// Offset of its first byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
}

/// The whole table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// GUID of the disk.
    pub disk_guid: Uuid,
    /// The entries, in order of their place on the disk.
    pub partitions: Vec<Partition>,
    /// Size of the disk in bytes.
    pub size: u64,
}

/// Why the disk cannot be laid out.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The disk is smaller than its required content.
    #[error("a disk of {size} bytes is too small: ESP and two systems need {needed} bytes")]
    TooSmall {
        /// Bytes asked for.
        size: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The system is larger than its partition.
    #[error("the system has {system} bytes, and its partition {SYSTEM_SIZE}")]
    SystemTooLarge {
        /// Bytes of the system.
        system: u64,
    },
    /// The size is not a whole number of sectors.
    #[error("a disk of {size} bytes is not a multiple of {SECTOR}")]
    Ragged {
        /// Bytes asked for.
        size: u64,
    },
}

/// Plans a disk of `size` bytes that holds an ESP, a system of `system` bytes, and room for
/// a second one.
///
/// # Errors
///
/// The disk is too small or not a whole number of sectors, or the system is too large.
pub fn plan(seed: &str, system: u64, size: u64) -> Result<Layout, Error> {
    if !size.is_multiple_of(SECTOR) {
        return Err(Error::Ragged { size });
    }
    if system > SYSTEM_SIZE {
        return Err(Error::SystemTooLarge { system });
    }
    let mut next = ALIGNMENT;
    let mut place = |kind: Kind, length: u64| {
        let partition = Partition { kind, guid: derive(seed, kind.name), start: next, length };
        next += length;
        partition
    };
    let partitions =
        vec![place(ESP, ESP_SIZE), place(SYSTEM_A, SYSTEM_SIZE), place(SYSTEM_B, SYSTEM_SIZE)];
    let needed = next + TAIL;
    if size < needed {
        return Err(Error::TooSmall { size, needed });
    }
    Ok(Layout { disk_guid: derive(seed, "disk"), partitions, size })
}

/// The GUID that belongs to `name` on the disk with this seed: the content of an image, or
/// what an installer has chosen.
#[must_use]
pub fn derive(seed: &str, name: &str) -> Uuid {
    Uuid::new_v5(&NAMESPACE, format!("{seed}/{name}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_any_version_has_partitions_of_these_names_and_types() {
        let all = [ESP, SYSTEM_A, SYSTEM_B, DATA];
        assert_eq!(
            all.map(|kind| format!("{} {}", kind.name, kind.type_guid)),
            [
                "POLIS-ESP c12a7328-f81f-11d2-ba4b-00a0c93ec93b",
                "POLIS-SYSTEM-A 59c6e635-c906-46a2-aaf4-09696edc0b9a",
                "POLIS-SYSTEM-B 5de5d1a7-9151-49c6-880f-b31c963f6241",
                "POLIS-DATA 5141e997-d959-497c-b0e8-f6f81294567c",
            ]
        );
    }

    #[test]
    fn partitions_are_aligned_and_follow_each_other() {
        let layout = plan("seed", 70_000_001, 4 << 30).unwrap();
        let [esp, one, other] = &layout.partitions[..] else { panic!("three partitions") };
        assert_eq!((esp.start, esp.length), (ALIGNMENT, ESP_SIZE));
        assert_eq!((one.start, one.length), (ALIGNMENT + ESP_SIZE, SYSTEM_SIZE));
        assert_eq!((other.start, other.length), (one.start + SYSTEM_SIZE, SYSTEM_SIZE));
        assert!(layout.partitions.iter().all(|entry| entry.start.is_multiple_of(ALIGNMENT)));
    }

    #[test]
    fn a_snapshot_is_overwritten_whole_whatever_its_size_on_the_esp() {
        let root = polis_base::files::Root::at(std::path::Path::new("/"));
        assert!(root.esp.etcd_snapshot.size_max() >= ESP_SIZE);
    }

    #[test]
    fn a_system_that_grows_moves_nothing_until_it_no_longer_fits() {
        let [before, after] =
            [69_000_000, SYSTEM_SIZE].map(|system| plan("seed", system, 4 << 30).unwrap());
        assert_eq!(before, after);
        let system = SYSTEM_SIZE + 1;
        assert_eq!(plan("seed", system, 4 << 30), Err(Error::SystemTooLarge { system }));
    }

    #[test]
    fn the_same_content_has_the_same_table_and_other_content_another() {
        let one = plan("a", 1 << 20, 4 << 30).unwrap();
        assert_eq!(one, plan("a", 1 << 20, 4 << 30).unwrap());
        let other = plan("b", 1 << 20, 4 << 30).unwrap();
        assert_ne!(one.disk_guid, other.disk_guid);
        for (one, other) in one.partitions.iter().zip(&other.partitions) {
            assert_ne!(one.guid, other.guid, "{}", one.kind.name);
        }
    }

    #[test]
    fn a_disk_that_cannot_hold_the_systems_is_refused_with_what_it_needs() {
        let needed = 2 * ALIGNMENT + ESP_SIZE + 2 * SYSTEM_SIZE;
        assert_eq!(
            plan("a", 64 << 20, needed - 512),
            Err(Error::TooSmall { size: needed - 512, needed })
        );
        assert!(plan("a", 64 << 20, needed).is_ok());
        assert_eq!(plan("a", 1, needed + 1), Err(Error::Ragged { size: needed + 1 }));
    }
}
