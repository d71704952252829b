//! The plan for the disk: decides whether to mount, make, finish or refuse.
//!
//! Pure: `storage::apply` looks at the disk and carries out what comes from here.
//!
//! ```text
//!                    no POLIS-DATA            POLIS-DATA
//!                         |                  /          \
//!                       [Free]       [Made, marked]   [Made]
//!                         |            |        |       |
//!   nothing recognised: Create      Finish    Mount   Mount    (our XFS, complete)
//!   our LUKS header:    refuse      Finish            Unlock
//!   anything else:      refuse      refuse            refuse
//!
//! [Made, given up]: Clear, whatever of ours it carries; then the table has [Made, marked]
//! ```
//!
//! The content behind a LUKS header cannot be seen, and behind a header on a marked
//! partition there is nothing: the mark goes before the partition is published.
//!
//! The mark is an attribute of the partition, [`BEING_MADE`]: it comes to the
//! disk in the same write as the partition and goes when the file system on it
//! is complete. So a power cut at any moment leaves one of these pictures.
//!
//! [`GIVEN_UP`] is a mark, too: the cluster manager asked for the end of the data, and the
//! next boot, at which nothing uses the partition, clears it.
//!
//! Invariants:
//! - A partition with recognised content is never formatted, except our own unfinished
//!   file system on a partition that carries the mark, and our own content on one that was
//!   given up.
//! - An unmarked partition is never formatted.
//! - No partition is made while the backup of an older table shows one with data.
//! - A plan is total: it needs no look at the disk while it is carried out.

use polis_layout::partitions::DATA;
use uuid::Uuid;

use super::Kind;
use super::backing;
use super::header::{Luks, SUBSYSTEM};
use super::probe::{Content, Xfs};
use super::table::{Partition, Table};

/// The name of the data partition.
pub const NAME: &str = DATA.name;
/// How the names of all partitions of ours begin.
pub(crate) const NAMES: &str = "POLIS-";

/// The type of the partition.
pub const TYPE_ID: Uuid = DATA.type_guid;

/// The label of the file system. XFS has room for twelve bytes.
pub const LABEL: &str = "polis-data";

/// The attribute of a partition whose file system is not complete. Bits 48 to
/// 63 mean what the partition's type says; no other program knows this one.
pub const BEING_MADE: u64 = 1 << 48;

/// The attribute of a partition whose content the cluster manager has given up: it is
/// cleared before anything uses it.
pub const GIVEN_UP: u64 = 1 << 49;

/// The attribute of the first system partition of a disk that an installer has made: all of
/// its identities are its own from the beginning, and stay.
pub const INSTALLED: u64 = 1 << 50;

/// The smallest data partition: etcd preallocates 123 MiB and keeps snapshots
/// beside them, and `mkfs.xfs` refuses less than 300 MB.
pub const SIZE_MIN: u64 = 512 << 20;

/// Partitions begin and end at multiples of this, as every tool does it.
const ALIGNMENT: u64 = 1 << 20;

/// Less than this at the end is not worth a change of the partition table.
pub(super) const GROWTH_MIN: u64 = 64 << 20;

/// Where the data partition is, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It does not exist yet; it would be this one.
    Free(Partition),
    /// It is there.
    Made(Partition),
}

impl Place {
    /// The stretch of the disk that this is about.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        match self {
            Self::Free(partition) | Self::Made(partition) => partition,
        }
    }
}

/// The action, in the order of the variants' names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Write `table`, inform the kernel, format, mount, take off the mark.
    Create {
        /// The table with the marked partition and with identities of its own.
        table: Table,
        /// The partition.
        partition: Partition,
    },
    /// Format, mount, take off the mark: an earlier boot got only this far.
    Finish {
        /// The partition.
        partition: Partition,
    },
    /// Overwrite what is recognised of it, give it a new identity and the mark of one that
    /// is being made, and look again: it was given up.
    Clear {
        /// The partition.
        partition: Partition,
    },
    /// Mount.
    Mount {
        /// The partition.
        partition: Partition,
        /// Take off the mark: an earlier boot was cut just before that.
        unmark: bool,
        /// Let partition and file system grow to this last block: the disk is larger now.
        grow: Option<u64>,
    },
    /// Let the partition grow, wait for a key, open, mount.
    Unlock {
        /// The partition.
        partition: Partition,
        /// How it is protected.
        kind: Kind,
        /// Let the partition grow to this last block: the disk is larger now.
        grow: Option<u64>,
    },
}

impl Plan {
    /// The partition that it is about.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        match self {
            Self::Create { partition, .. }
            | Self::Finish { partition }
            | Self::Clear { partition }
            | Self::Mount { partition, .. }
            | Self::Unlock { partition, .. } => partition,
        }
    }
}

/// Why the disk is left alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Not enough room behind the system.
    #[error(
        "the disk is too small: it has {free} MiB free, and {needed} MiB are needed",
        free = free >> 20,
        needed = SIZE_MIN >> 20
    )]
    TooSmall {
        /// The largest free stretch, in bytes.
        free: u64,
    },
    /// Not enough room on the other disk of the mirror.
    #[error(
        "the other disk of the mirror is too small: it has room for {free} MiB of the data \
         partition, and {needed} MiB are needed",
        free = free >> 20,
        needed = SIZE_MIN >> 20
    )]
    OtherTooSmall {
        /// How much room both disks have, in bytes.
        free: u64,
    },
    /// The table has no entry left.
    #[error("the partition table has no entry left for the data partition")]
    TableFull,
    /// More than one partition claims to be it.
    #[error("partitions {first} and {second} both are {NAME}")]
    Ambiguous {
        /// One of them.
        first: u32,
        /// The other.
        second: u32,
    },
    /// Somebody's data occupies the place of the partition.
    #[error("the free space of the disk, where the partition belongs, carries {found}")]
    Occupied {
        /// The recognised content.
        found: String,
    },
    /// The data partition carries something that we never put there.
    #[error("partition {number} carries {found}, not the file system of this node")]
    Foreign {
        /// The partition.
        number: u32,
        /// The recognised content.
        found: String,
    },
    /// The header of the data partition is ours, and not as we make it.
    #[error(
        "the LUKS header of partition {number} was changed: a copy of it is not one that this node \
         makes"
    )]
    Weakened {
        /// The partition.
        number: u32,
    },
    /// A partition that was complete once has no readable file system.
    #[error("partition {number} was complete and is unreadable now")]
    Damaged {
        /// The partition.
        number: u32,
    },
}

/// Finds the data partition in `table`, or the place for it. A new partition
/// gets the identity `id`.
///
/// # Errors
///
/// [`Refusal`] where there is neither.
pub fn place(table: &Table, id: Uuid) -> Result<Place, Refusal> {
    // The type alone decides: labels are for people.
    let mut ours = table.partitions.iter().filter(|partition| partition.type_id == TYPE_ID);
    if let Some(first) = ours.next() {
        if let Some(second) = ours.next() {
            return Err(Refusal::Ambiguous { first: first.number, second: second.number });
        }
        return Ok(Place::Made(first.clone()));
    }
    // The table keeps numbers without a gap, so the next is free if any is.
    let number = u32::try_from(table.partitions.len() + 1).unwrap_or(u32::MAX);
    if number > 128 {
        return Err(Refusal::TableFull);
    }
    let (first, last) = largest_gap(table);
    let free = (last + 1).saturating_sub(first) * table.block_size;
    if free < SIZE_MIN {
        return Err(Refusal::TooSmall { free });
    }
    Ok(Place::Free(Partition {
        number,
        name: NAME.to_owned(),
        type_id: TYPE_ID,
        id,
        first,
        last,
        attributes: BEING_MADE,
    }))
}

/// Places the records of the mirror `id` where the data partition would begin, on a disk without
/// one. Returns the table with that partition, which the data partition follows.
///
/// # Errors
///
/// [`Refusal`].
pub fn reserve(table: &Table, id: Uuid) -> Result<(Table, Partition), Refusal> {
    let place = place(table, id)?;
    let (number, first) = (place.partition().number, place.partition().first);
    let partition = Partition {
        number,
        name: backing::PARTITION.to_owned(),
        type_id: backing::TYPE_ID,
        id,
        first,
        last: first + backing::SIZE / table.block_size - 1,
        attributes: 0,
    };
    let mut table = table.clone();
    table.partitions.push(partition.clone());
    Ok((table, partition))
}

/// The last block that the data partition may have on two disks with so many usable blocks.
#[must_use]
pub fn last_of_both(table: &Table, other: Option<u64>) -> u64 {
    let usable = table.last_usable();
    align_end(table, usable.min(other.unwrap_or(usable)))
}

/// Lets a new `partition` end at `last`, where the other disk of a mirror has no room for more.
///
/// # Errors
///
/// [`Refusal::OtherTooSmall`] if too little is left of it.
pub fn limit(partition: &mut Partition, last: u64, block_size: u64) -> Result<(), Refusal> {
    partition.last = partition.last.min(last);
    let blocks = (partition.last + 1).saturating_sub(partition.first);
    let free = blocks * block_size;
    if free < SIZE_MIN { Err(Refusal::OtherTooSmall { free }) } else { Ok(()) }
}

/// Data partitions of a `former` table that nothing in `table` has taken the room
/// of. An image that was written over a disk brings a table of its own, and its
/// system may end elsewhere: then no new partition would begin where the data is.
pub fn former<'a>(table: &'a Table, former: &'a Table) -> impl Iterator<Item = &'a Partition> {
    former.partitions.iter().filter(|partition| {
        partition.type_id == TYPE_ID
            && table
                .partitions
                .iter()
                .all(|taken| taken.last < partition.first || partition.last < taken.first)
    })
}

/// Refuses to make anything while a former data partition carries `content`.
///
/// # Errors
///
/// [`Refusal::Occupied`] by the recognised content.
pub fn spare(content: &Content) -> Result<(), Refusal> {
    match content {
        // Also where a power cut came between the two copies of the first table.
        Content::Blank | Content::Unknown => Ok(()),
        Content::Xfs(xfs) => Err(Refusal::Occupied { found: describe(xfs) }),
        Content::Luks(luks) => Err(Refusal::Occupied { found: describe_luks(luks) }),
        Content::Other(name) => Err(Refusal::Occupied { found: (*name).to_owned() }),
    }
}

/// Decides, given the content of the stretch of `place`. A new data partition comes to the disk
/// together with new identities, from `id`, of all that is there: one write of the table.
///
/// # Errors
///
/// [`Refusal`] where going on would destroy something.
pub fn plan(
    table: &Table,
    place: Place,
    content: &Content,
    id: impl FnMut() -> Uuid,
) -> Result<Plan, Refusal> {
    match place {
        Place::Free(partition) => match content {
            Content::Blank | Content::Unknown => {
                let mut table = identified(table.clone(), id);
                table.partitions.push(partition.clone());
                Ok(Plan::Create { table, partition })
            }
            Content::Xfs(xfs) => Err(Refusal::Occupied { found: describe(xfs) }),
            Content::Luks(luks) => Err(Refusal::Occupied { found: describe_luks(luks) }),
            Content::Other(name) => Err(Refusal::Occupied { found: (*name).to_owned() }),
        },
        Place::Made(partition) => made(table, partition, content),
    }
}

/// `table` with identities from `id` for the disk and for the partitions that came with the
/// image: every disk with that image has the same until then. The data partition has its
/// own already, and keeps it, as partitions do that are not ours.
fn identified(mut table: Table, mut id: impl FnMut() -> Uuid) -> Table {
    // A boot entry of the firmware names the ESP of such a disk by its identity.
    if is_installed(&table) {
        return table;
    }
    table.disk = id();
    let image = |partition: &&mut Partition| {
        ![TYPE_ID, backing::TYPE_ID].contains(&partition.type_id)
            && partition.name.starts_with(NAMES)
    };
    for partition in table.partitions.iter_mut().filter(image) {
        partition.id = id();
    }
    table
}

/// Whether an installer has made the disk with this table.
#[must_use]
pub fn is_installed(table: &Table) -> bool {
    table
        .partitions
        .iter()
        .any(|partition| partition.name.starts_with(NAMES) && partition.attributes & INSTALLED != 0)
}

/// `table` with the mark on its data partition that ends it at the next boot; `None`
/// without a data partition.
#[must_use]
pub fn given_up(table: &Table) -> Option<Table> {
    let mut table = table.clone();
    let ours = table.partitions.iter_mut().find(|partition| partition.type_id == TYPE_ID)?;
    ours.attributes |= GIVEN_UP;
    Some(table)
}

/// A partition that was given up. A power cut while it was cleared leaves half a header.
fn ended(partition: Partition, content: &Content) -> Result<Plan, Refusal> {
    let number = partition.number;
    match content {
        Content::Xfs(xfs) if xfs.id != partition.id => {
            Err(Refusal::Foreign { number, found: describe(xfs) })
        }
        Content::Luks(luks) if luks.id.is_some_and(|id| id != partition.id) => {
            Err(Refusal::Foreign { number, found: describe_luks(luks) })
        }
        Content::Other(name) => Err(Refusal::Foreign { number, found: (*name).to_owned() }),
        Content::Blank | Content::Unknown | Content::Xfs(_) | Content::Luks(_) => {
            Ok(Plan::Clear { partition })
        }
    }
}

fn made(table: &Table, partition: Partition, content: &Content) -> Result<Plan, Refusal> {
    if partition.attributes & GIVEN_UP != 0 {
        return ended(partition, content);
    }
    let number = partition.number;
    let marked = partition.attributes & BEING_MADE != 0;
    match content {
        Content::Xfs(xfs) if xfs.id != partition.id => {
            Err(Refusal::Foreign { number, found: describe(xfs) })
        }
        Content::Xfs(xfs) if !xfs.in_progress => {
            let grow = growth(table, &partition, xfs.size);
            Ok(Plan::Mount { partition, unmark: marked, grow })
        }
        Content::Luks(luks) if luks.id == Some(partition.id) && luks.subsystem == SUBSYSTEM => {
            match luks.kind {
                _ if marked => Ok(Plan::Finish { partition }),
                Some(kind) => {
                    let size = partition.blocks() * table.block_size;
                    let grow = growth(table, &partition, size);
                    Ok(Plan::Unlock { partition, kind, grow })
                }
                None if luks.whole => Err(Refusal::Weakened { number }),
                None => Err(Refusal::Damaged { number }),
            }
        }
        Content::Luks(luks) => Err(Refusal::Foreign { number, found: describe_luks(luks) }),
        Content::Blank | Content::Unknown | Content::Xfs(_) if marked => {
            Ok(Plan::Finish { partition })
        }
        Content::Blank | Content::Unknown | Content::Xfs(_) => Err(Refusal::Damaged { number }),
        Content::Other(name) => Err(Refusal::Foreign { number, found: (*name).to_owned() }),
    }
}

/// The facts by which a person distinguishes file systems.
fn describe(xfs: &Xfs) -> String {
    let state = if xfs.in_progress { "an unfinished XFS" } else { "XFS" };
    format!("{state} \"{}\" ({}, {} MiB)", xfs.label, xfs.id, xfs.size >> 20)
}

fn describe_luks(luks: &Luks) -> String {
    let id = luks.id.map_or_else(|| "without an identity".to_owned(), |id| id.to_string());
    format!("a LUKS2 header \"{}\" ({id})", luks.label)
}

/// The last block that the partition could have, if that is worth it; `used` bytes
/// of it are in use.
fn growth(table: &Table, partition: &Partition, used: u64) -> Option<u64> {
    // The other disk has not grown.
    if backing::is_mirrored(table) {
        return None;
    }
    let end = table
        .partitions
        .iter()
        .filter(|other| other.first > partition.last)
        .map(|other| other.first)
        .min();
    let last = align_end(table, end.map_or(table.last_usable(), |first| first - 1));
    let size = (last + 1).saturating_sub(partition.first) * table.block_size;
    (size >= used.saturating_add(GROWTH_MIN)).then_some(last.max(partition.last))
}

/// The largest aligned stretch without a partition: first and last block.
fn largest_gap(table: &Table) -> (u64, u64) {
    let mut taken: Vec<_> = table.partitions.iter().map(|p| (p.first, p.last)).collect();
    taken.sort_unstable();
    taken.push((table.last_usable() + 1, table.last_usable() + 1));
    let mut start = table.first_usable();
    // Empty, so that any gap is larger.
    let mut largest = (start, start - 1);
    for (first, last) in taken {
        let aligned = start.next_multiple_of(ALIGNMENT / table.block_size);
        let end = align_end(table, first - 1);
        if (end + 1).saturating_sub(aligned) > largest.1 + 1 - largest.0 {
            largest = (aligned, end);
        }
        start = last + 1;
    }
    largest
}

/// The last block at or before `last` after which an aligned block follows.
fn align_end(table: &Table, last: u64) -> u64 {
    let unit = ALIGNMENT / table.block_size;
    ((last + 1) / unit * unit).saturating_sub(1)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
