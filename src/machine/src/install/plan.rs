//! The places of an installation on its disk. Pure.
//!
//! ```text
//! 0  table end     1 MiB
//! |GPT|  cleared  |ESP|SYSTEM-A: the system|SYSTEM-B|free, its ends cleared|GPT'|
//! ```
//!
//! Identities: that of the disk is random, and those of its partitions follow from it and from
//! the ID of the installation. So a disk says by its table alone whether an installation has
//! made it ([`is_of`]).
//!
//! Invariants:
//! - Nothing that an earlier use left is recognised after the places to clear are zero.

use std::ops::Range;

use polis_layout::partitions::{self, ALIGNMENT, ESP_SIZE, SYSTEM_SIZE};
use uuid::Uuid;

use crate::storage::plan::{INSTALLED, SIZE_MIN};
use crate::storage::table::{self, Partition, Table};
use polis_base::hex;

/// How much is cleared at the start and at the end of a place: more than a probe looks at.
const CLEARED: u64 = 1 << 20;

/// Why a disk has no place for an installation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is too small.
    #[error("the disk is too small: it has {has} bytes, and an installation needs {needed}")]
    TooSmall {
        /// Bytes of the disk.
        has: u64,
        /// Bytes of the two systems, the ESP and the smallest data partition.
        needed: u64,
    },
    /// Blocks of a size that no disk has.
    #[error("the disk has blocks of {0} bytes; supported are 512 and 4096")]
    BlockSize(u64),
    /// The running system does not fit in a partition of this version.
    #[error("the system has {0} bytes, and its partition {SYSTEM_SIZE}")]
    System(u64),
}

/// Where everything goes. Offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The partition table.
    pub(super) table: Table,
    /// The ESP.
    pub(super) esp: Range<u64>,
    /// Where the system begins.
    pub(super) system: u64,
    /// The ranges that are overwritten with zeros once the table is there.
    pub(super) clear: Vec<Range<u64>>,
}

/// Plans the installation `id` of a system of `system` bytes on a disk of `size` bytes, which
/// gets the identity `disk`.
pub(super) fn plan(
    size: u64,
    block_size: u64,
    system: u64,
    disk: Uuid,
    id: &[u8],
) -> Result<Plan, Refusal> {
    if !matches!(block_size, 512 | 4096) {
        return Err(Refusal::BlockSize(block_size));
    }
    // Both tables with their alignment.
    let needed = 2 * ALIGNMENT + ESP_SIZE + 2 * SYSTEM_SIZE + SIZE_MIN;
    if size < needed {
        return Err(Refusal::TooSmall { has: size, needed });
    }
    let whole = size / block_size * block_size;
    let layout = partitions::plan(&seed(disk, id), system, whole)
        .map_err(|_large| Refusal::System(system))?;
    let entry = |(number, partition): (u32, &partitions::Partition)| Partition {
        number,
        name: partition.kind.name.to_owned(),
        type_id: partition.kind.type_guid,
        id: partition.guid,
        first: partition.start / block_size,
        last: (partition.start + partition.length) / block_size - 1,
        attributes: if partition.kind == partitions::SYSTEM_A { INSTALLED } else { 0 },
    };
    let table = Table {
        disk,
        block_size,
        blocks: whole / block_size,
        partitions: (1..).zip(&layout.partitions).map(entry).collect(),
    };
    let [esp, first, second] = [0, 1, 2].map(|at| layout.partitions[at]);
    let free = second.start + second.length;
    let end = (table.last_usable() + 1) * block_size;
    let start = |at: u64| at..at + CLEARED;
    Ok(Plan {
        clear: vec![
            table::end(block_size)..ALIGNMENT,
            start(second.start),
            start(free),
            end - CLEARED..end,
        ],
        table,
        esp: esp.start..esp.start + esp.length,
        system: first.start,
    })
}

/// Whether the installation `id` has made the disk with this table.
pub(super) fn is_of(table: &Table, id: &[u8]) -> bool {
    let esp = partitions::derive(&seed(table.disk, id), partitions::ESP.name);
    table.partitions.iter().any(|partition| partition.id == esp)
}

/// From which the identities of the partitions follow.
fn seed(disk: Uuid, id: &[u8]) -> String {
    format!("{disk}/{}", hex::encode(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 8 << 30;
    const DISK: Uuid = Uuid::from_u128(5);

    #[test]
    fn the_places_are_those_of_an_image_for_blocks_of_either_size() {
        for block_size in [512, 4096] {
            let plan = plan(SIZE, block_size, 1 << 20, DISK, b"id").unwrap();
            let image = partitions::plan("seed", 1 << 20, SIZE).unwrap();
            for (entry, partition) in plan.table.partitions.iter().zip(&image.partitions) {
                assert_eq!(entry.first * block_size, partition.start);
                assert_eq!(entry.blocks() * block_size, partition.length);
                assert_eq!(
                    (&*entry.name, entry.type_id),
                    (partition.kind.name, partition.kind.type_guid)
                );
            }
            assert_eq!(plan.esp, ALIGNMENT..ALIGNMENT + ESP_SIZE);
            assert_eq!(plan.system, ALIGNMENT + ESP_SIZE);
            let marks: Vec<u64> = plan.table.partitions.iter().map(|it| it.attributes).collect();
            assert_eq!(marks, [0, INSTALLED, 0]);
        }
    }

    #[test]
    fn nothing_is_cleared_within_the_table_or_the_system() {
        for block_size in [512, 4096] {
            let plan = plan(SIZE, block_size, 1 << 20, DISK, b"id").unwrap();
            let end = SIZE - (table::end(block_size) - block_size);
            for range in &plan.clear {
                assert!(range.start >= table::end(block_size) && range.end <= end, "{range:?}");
                let system = plan.system..plan.system + SYSTEM_SIZE;
                assert!(range.end <= system.start || range.start >= system.end, "{range:?}");
            }
        }
    }

    #[test]
    fn a_disk_without_room_for_data_is_refused_with_what_it_has_and_needs() {
        let needed = 2 * ALIGNMENT + ESP_SIZE + 2 * SYSTEM_SIZE + SIZE_MIN;
        let refused = plan(needed - 1, 512, 1, DISK, b"id").unwrap_err();
        assert_eq!(refused, Refusal::TooSmall { has: needed - 1, needed });
        assert!(plan(needed, 512, 1, DISK, b"id").is_ok());
        assert_eq!(plan(SIZE, 520, 1, DISK, b"id"), Err(Refusal::BlockSize(520)));
        let large = SYSTEM_SIZE + 1;
        assert_eq!(plan(SIZE, 512, large, DISK, b"id"), Err(Refusal::System(large)));
    }

    #[test]
    fn a_disk_says_which_installation_made_it() {
        let table = |disk, id: &[u8]| plan(SIZE, 512, 1, disk, id).unwrap().table;
        let one = table(DISK, b"one");
        assert!(is_of(&one, b"one") && !is_of(&one, b"other"));
        // Two disks of one installation have no identity in common.
        let other = table(Uuid::from_u128(6), b"one");
        assert!(is_of(&other, b"one"));
        for (one, other) in one.partitions.iter().zip(&other.partitions) {
            assert_ne!(one.id, other.id);
        }
    }
}
