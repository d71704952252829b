//! The partition table of the disk that the machine runs from: reads and writes it.
//!
//! `storage::plan` decides on a [`Table`]; `storage::apply` writes it with
//! [`write`]. The `gpt` crate knows the format; this module gives it a view of
//! the disk in memory (`view`), checks what it would trust, and decides the order in
//! which blocks reach the disk.
//!
//! ```text
//! LBA 0     1       2..33            ...           -33..-2          -1
//! [MBR][header][entries]   partitions   [backup entries][backup header]
//!  `------- third write ------'            `first write--' `second write-'
//! ```
//!
//! Invariants:
//! - One of the two copies on the disk is whole at every moment: the backup is
//!   flushed before the primary is touched.
//! - On a disk without a table, no header of the backup stands without its entries: they are
//!   flushed before it, and [`read_headless`] reads the entries that a cut leaves.
//! - The primary copy goes to the disk in one write.
//! - Where a power cut tore the primary copy, or the disk does not read it, the backup
//!   counts, and stays as it is until the primary is whole again: see [`restore`].
//! - A copy that cannot be read is one that is not sound. It is an error only where the other
//!   one is not sound, or where the question is what it was: see [`find_backup`].
//! - A table with anything unusual in it is refused, never repaired by guess.

mod view;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;

use gpt::GptConfig;
use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use uuid::Uuid;

use self::view::{Ends, Geometry, View, read_at};

/// Both copies of the table hold 128 entries of 128 bytes, as on every disk.
const ENTRIES: u32 = 128;
const ENTRY_SIZE: u32 = 128;

/// A smaller disk has no room for two copies and an ESP.
const DISK_SIZE_MIN: u64 = 1 << 20;

/// Why a table cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The disk failed.
    #[error("cannot {operation} the disk")]
    Io {
        /// The attempted operation.
        operation: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Blocks of a size that no disk has.
    #[error("the disk has blocks of {0} bytes; supported are 512 and 4096")]
    BlockSize(u32),
    /// No disk at all.
    #[error("the disk has {0} bytes")]
    TooSmall(u64),
    /// Neither copy is a table that we could have written.
    #[error("the partition table is damaged or unusual: {0}")]
    Unusual(String),
    /// The crate that knows the format refused.
    #[error("cannot {operation} the partition table")]
    Format {
        /// The attempted operation.
        operation: &'static str,
        /// Why not.
        source: gpt::GptError,
    },
}

/// One partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Counted from 1; the kernel's device ends with it.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its purpose.
    pub type_id: Uuid,
    /// Its ID.
    pub id: Uuid,
    /// Its first block.
    pub first: u64,
    /// Its last block.
    pub last: u64,
    /// The attribute bits; 48 to 63 belong to the type.
    pub attributes: u64,
}

impl Partition {
    /// How many blocks it has.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.last - self.first + 1
    }
}

/// The table of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The disk's ID.
    pub disk: Uuid,
    /// Bytes in a block.
    pub block_size: u64,
    /// Blocks of the disk.
    pub blocks: u64,
    /// The partitions by number, without a gap in the numbers.
    pub partitions: Vec<Partition>,
}

impl Table {
    /// Blocks that one copy of the entries takes.
    fn entry_blocks(&self) -> u64 {
        entry_blocks(self.block_size)
    }

    /// The first block that a partition may have.
    #[must_use]
    pub fn first_usable(&self) -> u64 {
        2 + self.entry_blocks()
    }

    /// The last block that a partition may have, once the backup is at the end.
    #[must_use]
    pub fn last_usable(&self) -> u64 {
        self.blocks - 2 - self.entry_blocks()
    }
}

/// An identity for a disk or a partition, which no other has.
#[must_use]
pub fn new_id() -> Uuid {
    uuid::Builder::from_random_bytes(rand::random()).into_uuid()
}

/// Where the first copy of a table ends, in bytes.
#[must_use]
pub fn end(block_size: u64) -> u64 {
    (2 + entry_blocks(block_size)) * block_size
}

fn entry_blocks(block_size: u64) -> u64 {
    u64::from(ENTRIES * ENTRY_SIZE).div_ceil(block_size)
}

/// Reads the table of `disk`: the primary copy, or the backup where the primary
/// is torn or cannot be read.
///
/// # Errors
///
/// [`Error`] if neither copy is sound.
pub fn read(disk: &File) -> Result<Table, Error> {
    let (opened, geometry) = open(disk)?;
    table_of(&opened, geometry)
}

/// Makes the primary copy whole again where it is torn or cannot be read, and the backup is
/// sound; returns whether that was so. The backup is not touched: [`write`] replaces one that
/// is not sound, and until then it may be the only sign of an earlier table.
///
/// # Errors
///
/// [`Error`] if neither copy is sound, or the disk cannot be written.
pub fn restore(disk: &File) -> Result<bool, Error> {
    let (opened, geometry) = open(disk)?;
    mend(opened, geometry)
}

fn mend(opened: gpt::GptDisk<View<'_>>, geometry: Geometry) -> Result<bool, Error> {
    if opened.primary_header().is_ok() {
        return Ok(false);
    }
    table_of(&opened, geometry)?;
    into_view(opened, geometry)?.commit_head()?;
    Ok(true)
}

/// Reads the primary copy alone; `None` where it is not sound.
#[must_use]
pub fn read_primary(disk: &File) -> Option<Table> {
    let (opened, geometry) = open(disk).ok()?;
    opened.primary_header().ok()?;
    table_of(&opened, geometry).ok()
}

/// Reads the backup alone: where an image was written over a disk that was in use, the
/// backup is the earlier table. `None` if no sound one exists.
#[must_use]
pub fn read_backup(disk: &File) -> Option<Table> {
    find_backup(disk).ok().flatten()
}

/// The same for a caller that must not take a backup for absent because it cannot be read.
///
/// # Errors
///
/// [`Error`] if the end of the disk cannot be read.
pub fn find_backup(disk: &File) -> Result<Option<Table>, Error> {
    let geometry = Geometry::of(disk)?;
    backup_of(disk, geometry, Ends::read(disk, geometry))
}

fn backup_of(disk: &File, geometry: Geometry, ends: Ends) -> Result<Option<Table>, Error> {
    let Ends { head, tail, tail_error, .. } = ends;
    if let Some(source) = tail_error {
        return Err(unread(source));
    }
    let found = View::new(disk, geometry, head, tail)
        .and_then(|view| parse(view.without_primary(geometry), geometry))
        .and_then(|opened| table_of(&opened, geometry));
    Ok(found.ok())
}

/// Reads the entries of a backup that has no header: what a cut leaves of [`create`]. `None`
/// where the end of the disk is anything else. The disk has no identity yet.
#[must_use]
pub fn read_headless(disk: &File) -> Option<Table> {
    let (view, geometry) = View::blank(disk).ok()?;
    let found = read_at(disk, view.tail_start, geometry.copy()).ok()?;
    let (_entries, header) = found.split_last_chunk::<512>()?;
    if header.iter().any(|byte| *byte != 0) {
        return None;
    }
    // The crate reads entries by a header only: they get one, in memory.
    let created = config(geometry).create_from_device(view, Some(Uuid::nil())).ok()?;
    let size = *created.logical_block_size();
    let mut header = created.backup_header().ok()?.clone();
    let mut view = created.write().ok()?;
    view.tail = found;
    header.write_backup(&mut view, size).ok()?;
    let opened = parse(view.without_primary(geometry), geometry).ok()?;
    table_of(&opened, geometry).ok()
}

/// The value of a table that the crate has read.
fn table_of(opened: &gpt::GptDisk<View<'_>>, geometry: Geometry) -> Result<Table, Error> {
    let mut partitions = Vec::new();
    for (number, entry) in opened.partitions() {
        if !entry.is_used() {
            continue;
        }
        partitions.push(Partition {
            number: *number,
            name: entry.name.clone(),
            type_id: entry.part_type_guid.guid,
            id: entry.part_guid,
            first: entry.first_lba,
            last: entry.last_lba,
            attributes: entry.flags,
        });
    }
    let Geometry { block_size, blocks } = geometry;
    let table = Table { disk: *opened.guid(), block_size, blocks, partitions };
    check(&table).map_err(Error::Unusual)?;
    Ok(table)
}

/// Puts `table` on `disk`, both copies, the backup at the very end.
///
/// # Errors
///
/// [`Error`] if the disk cannot be written, or its primary copy is not sound:
/// then the backup must not be touched before [`restore`].
pub fn write(disk: &File, table: &Table) -> Result<(), Error> {
    check(table).map_err(Error::Unusual)?;
    let (mut opened, geometry) = open(disk)?;
    if let Err(error) = opened.primary_header() {
        return Err(Error::Unusual(format!("its header is invalid: {error}")));
    }

    opened.update_guid(Some(table.disk));
    // Also puts the backup where the disk ends now.
    opened.update_partitions(entries(table)).map_err(unwritten)?;
    into_view(opened, geometry)?.commit(geometry)
}

/// Puts `table` on a `disk` in place of whatever is there, the backup first.
///
/// # Errors
///
/// [`Error`] if the disk cannot be written.
pub fn create(disk: &File, table: &Table) -> Result<(), Error> {
    check(table).map_err(Error::Unusual)?;
    let (view, geometry) = View::blank(disk)?;
    let mut created =
        config(geometry).create_from_device(view, Some(table.disk)).map_err(unwritten)?;
    created.update_partitions(entries(table)).map_err(unwritten)?;
    into_view(created, geometry)?.commit(geometry)
}

/// The partitions as the crate has them.
fn entries(table: &Table) -> BTreeMap<u32, gpt::partition::Partition> {
    let entry = |partition: &Partition| gpt::partition::Partition {
        part_type_guid: partition.type_id.into(),
        part_guid: partition.id,
        first_lba: partition.first,
        last_lba: partition.last,
        flags: partition.attributes,
        name: partition.name.clone(),
    };
    table.partitions.iter().map(|partition| (partition.number, entry(partition))).collect()
}

/// Gives the crate the memory for both copies.
fn into_view(opened: gpt::GptDisk<View<'_>>, geometry: Geometry) -> Result<View<'_>, Error> {
    let mut view = opened.write().map_err(unwritten)?;
    let protective = u32::try_from(geometry.blocks - 1).unwrap_or(u32::MAX);
    ProtectiveMBR::with_lb_size(protective)
        .overwrite_lba0(&mut view)
        .map_err(|e| unwritten(gpt::GptError::Io(io::Error::other(e))))?;
    Ok(view)
}

fn unwritten(source: gpt::GptError) -> Error {
    Error::Format { operation: "write", source }
}

/// The conditions that every table of ours fulfils.
fn check(table: &Table) -> Result<(), String> {
    let mut taken: Vec<Range<u64>> = Vec::new();
    for (index, partition) in table.partitions.iter().enumerate() {
        let number = partition.number;
        // The crate closes gaps between numbers when it writes.
        if usize::try_from(number).ok() != Some(index + 1) {
            return Err(format!("partition {} is missing, {number} is there", index + 1));
        }
        let usable = table.first_usable()..=table.last_usable();
        if partition.first > partition.last
            || !usable.contains(&partition.first)
            || !usable.contains(&partition.last)
        {
            return Err(format!(
                "partition {number} goes from block {} to {}, the disk from {} to {}",
                partition.first,
                partition.last,
                usable.start(),
                usable.end(),
            ));
        }
        let range = partition.first..partition.last + 1;
        if taken.iter().any(|other| range.start < other.end && other.start < range.end) {
            return Err(format!("partition {number} overlaps another"));
        }
        taken.push(range);
    }
    Ok(())
}

/// Has the crate read a table whose trusted fields were checked. Where the primary copy
/// is torn or cannot be read, its header is an error and all else is the backup's.
fn open(disk: &File) -> Result<(gpt::GptDisk<View<'_>>, Geometry), Error> {
    let geometry = Geometry::of(disk)?;
    Ok((open_at(disk, geometry, Ends::read(disk, geometry))?, geometry))
}

fn open_at(disk: &File, geometry: Geometry, ends: Ends) -> Result<gpt::GptDisk<View<'_>>, Error> {
    let Ends { head, tail, head_error, tail_error } = ends;
    let opened = View::new(disk, geometry, head, tail).and_then(|view| {
        parse(view.clone(), geometry).or_else(|torn| {
            // The crate turns to the backup for a bad header, not for bad entries.
            parse(view.without_primary(geometry), geometry).map_err(|_neither| torn)
        })
    });
    opened.map_err(|error| head_error.or(tail_error).map_or(error, unread))
}

fn unread(source: io::Error) -> Error {
    Error::Io { operation: "read", source }
}

fn parse(view: View<'_>, geometry: Geometry) -> Result<gpt::GptDisk<View<'_>>, Error> {
    config(geometry)
        .open_from_device(view)
        .map_err(|source| Error::Format { operation: "read", source })
}

fn config(geometry: Geometry) -> GptConfig {
    let size = match geometry.block_size {
        4096 => LogicalBlockSize::Lb4096,
        _ => LogicalBlockSize::Lb512,
    };
    GptConfig::new().writable(true).logical_block_size(size)
}

#[cfg(test)]
pub(super) mod tests;

#[cfg(test)]
mod fuzz_tests;
