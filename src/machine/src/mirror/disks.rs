//! A disk of a mirror: reads and writes its record, its table and the start of its ESP.
//!
//! Invariants:
//! - A disk is one of the mirror by the identity of its partition POLIS-MIRROR, as long as nothing
//!   else begins at its start.
//!
//! What this module does not do: decide which disk has the newest data (`plan`), or take an empty
//! disk (`take`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use polis_layout::partitions::ESP;
use uuid::Uuid;

use super::Error;
use super::plan::{Leg, Record, Seen};
use super::record;
use crate::install::content;
use crate::storage::detached::{name_of, sequence};
use crate::storage::plan::{BEING_MADE, GIVEN_UP, TYPE_ID};
use crate::storage::table::{self, Partition, Table};
use crate::storage::{backing, machine, wipe};
use polis_base::sys::block;

/// How much of an ESP is cleared, so that firmware starts nothing from it.
const BOOT: usize = 64 << 10;

/// A disk of a mirror.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    /// Below `/dev`.
    pub(super) path: PathBuf,
    /// The kernel's number of this device, which no other one gets: a name may be used again.
    pub(super) sequence: Option<u64>,
    pub(super) table: Table,
    /// The partition with its record.
    pub(super) notes: Partition,
    /// The data partition, once there is one.
    pub(super) data: Option<Partition>,
    pub(super) seen: Seen,
}

impl Disk {
    /// The disk of a mirror at `path`, which sysfs at `sys` describes; `None` for any other, also
    /// for one that was part of a mirror and whose start is used for something else. Blocks.
    pub(super) fn read(sys: &Path, path: &Path) -> Result<Option<Self>, Error> {
        let sequence = sequence(sys, &name_of(path));
        let file = open(path)?;
        let failed = |source| Error::Table { disk: name_of(path), source };
        let table = table::read(&file).map_err(failed)?;
        let Some(notes) = backing::record(&table).cloned() else { return Ok(None) };
        if !content::is_table_current(&file).map_err(at(path, "read"))? {
            return Ok(None);
        }
        let start = notes.first * table.block_size;
        let seen = record::read(&file, start, notes.id).map_err(at(path, "read"))?;
        let seen = seen.ok_or_else(|| Error::Record { disk: name_of(path) })?;
        let data = table.partitions.iter().find(|entry| entry.type_id == TYPE_ID).cloned();
        Ok(Some(Self { path: path.to_owned(), sequence, table, notes, data, seen }))
    }

    /// Whether it is still in the machine.
    pub(super) fn is_there(&self, sys: &Path) -> bool {
        let name = self.name();
        sys.join("block").join(&name).exists() && sequence(sys, &name) == self.sequence
    }

    /// The kernel's name of it.
    pub(super) fn name(&self) -> String {
        name_of(&self.path)
    }

    pub(super) fn mirror(&self) -> Uuid {
        self.notes.id
    }

    pub(super) fn leg(&self) -> Leg {
        self.seen.record.leg
    }

    /// The devices of the kernel's notes and of the data.
    pub(super) fn devices(&self) -> (PathBuf, PathBuf) {
        let data = self.data.as_ref().map_or(0, |data| data.number);
        (self.device(self.notes.number), self.device(data))
    }

    fn device(&self, number: u32) -> PathBuf {
        block::partition_path(&self.path, number)
    }

    /// The device of the partition with this name, and the partition.
    pub(super) fn named(&self, name: &str) -> Option<(PathBuf, &Partition)> {
        let entry = self.table.partitions.iter().find(|entry| entry.name == name)?;
        Some((self.device(entry.number), entry))
    }

    /// Whether its data partition is complete, and not given up: a table that was copied with
    /// such a mark would end the data at the next start from that disk.
    pub(super) fn is_complete(&self) -> bool {
        self.data.as_ref().is_some_and(is_complete)
    }

    /// Whether its data was given up, which is that of `started`.
    pub(super) fn is_given_up(&self, started: &Self) -> bool {
        let id = |disk: &Self| disk.data.as_ref().map(|data| data.id);
        let given_up = |data: &Partition| data.attributes & GIVEN_UP != 0;
        id(self) == id(started) && self.data.as_ref().is_some_and(given_up)
    }

    /// Bytes of the data.
    pub(super) fn length(&self) -> u64 {
        self.data.as_ref().map_or(0, |data| data.blocks() * self.table.block_size)
    }

    /// Writes its record. Blocks.
    pub(super) fn put(&mut self, record: &Record) -> Result<(), Error> {
        let start = self.notes.first * self.table.block_size;
        let written = record::write(&open(&self.path)?, start, self.mirror(), record);
        written.map_err(at(&self.path, "write the mirror's record to"))?;
        self.seen.record = *record;
        Ok(())
    }

    /// Removes the kernel's notes. Blocks.
    pub(super) fn forget(&mut self) -> Result<(), Error> {
        let start = self.notes.first * self.table.block_size;
        let cleared = record::clear_notes(&open(&self.path)?, start);
        cleared.map_err(at(&self.path, "write the kernel's notes to"))?;
        self.seen.dropped_other = false;
        Ok(())
    }

    /// Makes the kernel know the partitions. Blocks.
    pub(super) fn announce(&self) -> Result<(), Error> {
        let file = open(&self.path)?;
        let failed = at(&self.path, "announce the partitions of");
        let announce = |entry: &Partition| {
            let size = self.table.block_size;
            match block::known_extent(&self.device(entry.number))? {
                Some(_) => Ok(()),
                None => {
                    let (start, length) = (entry.first * size, entry.blocks() * size);
                    block::add_partition(&file, entry.number, start, length)
                }
            }
        };
        self.table.partitions.iter().try_for_each(announce).map_err(failed)
    }

    /// Puts the data partition as `source` has it into the table of a disk that was part of the
    /// mirror before, and clears the start of its ESP. Blocks.
    pub(super) fn renew(&mut self, source: &Self) -> Result<(), Error> {
        // Mends what a power cut has left of the table.
        machine::read_table(&self.path)
            .map_err(|source| Error::Table { disk: self.name(), source })?;
        let (Some(old), Some(new)) = (&self.data, &source.data) else {
            return Err(self.unfit("it has no data partition"));
        };
        if old.blocks() != new.blocks() || self.table.block_size != source.table.block_size {
            return Err(self.unfit("its data partition has another size"));
        }
        let renewed = Partition { id: new.id, attributes: new.attributes, ..old.clone() };
        if *old != renewed {
            let mut table = self.table.clone();
            table.partitions.iter_mut().filter(|it| it.number == renewed.number).for_each(
                |entry| {
                    entry.clone_from(&renewed);
                },
            );
            let written = table::write(&open(&self.path)?, &table);
            written.map_err(|source| Error::Table { disk: self.name(), source })?;
            (self.table, self.data) = (table, Some(renewed));
        }
        self.clear_esp()
    }

    /// Mends the first copies of both tables where a power cut has torn one, so that firmware
    /// starts either disk; fails unless both have the same data partition, without a mark. Blocks.
    pub(super) fn confirm(&self, source: &Self) -> Result<(), Error> {
        let entry = |disk: &Self| {
            let table = machine::read_table(&disk.path)
                .map_err(|source| Error::Table { disk: disk.name(), source })?;
            Ok::<_, Error>(table.partitions.into_iter().find(|entry| entry.type_id == TYPE_ID))
        };
        let (Some(one), Some(other)) = (entry(self)?, entry(source)?) else {
            return Err(self.unfit("it has no data partition"));
        };
        if (one.id, one.attributes, one.blocks()) == (other.id, other.attributes, other.blocks())
            && is_complete(&one)
        {
            return Ok(());
        }
        Err(self.unfit("its data partition is not that of the other disk"))
    }

    fn unfit(&self, why: &str) -> Error {
        Error::Unfit { disk: self.name(), why: why.to_owned() }
    }

    /// Removes everything from its ESP, the keys of the disk, too. Blocks.
    pub(super) fn wipe_esp(&self) -> Result<(), Error> {
        self.clear_esp()?;
        let Some((device, esp)) = self.named(ESP.name) else { return Ok(()) };
        let wiped = wipe::all(&device, esp.blocks() * self.table.block_size);
        wiped.map_err(at(&self.path, "wipe the ESP of"))
    }

    pub(super) fn clear_esp(&self) -> Result<(), Error> {
        let Some((_, esp)) = self.named(ESP.name) else { return Ok(()) };
        let file = open(&self.path)?;
        clear(&file, esp.first * self.table.block_size).map_err(at(&self.path, "write to"))
    }
}

fn is_complete(data: &Partition) -> bool {
    data.attributes & (BEING_MADE | GIVEN_UP) == 0
}

/// Opens a disk for reading and writing. Blocks.
pub(super) fn open(path: &Path) -> Result<File, Error> {
    File::options().read(true).write(true).open(path).map_err(at(path, "open"))
}

fn clear(disk: &File, start: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    disk.write_all_at(&[0; BOOT], start)?;
    disk.sync_data()
}

pub(super) fn at(path: &Path, operation: &'static str) -> impl Fn(io::Error) -> Error {
    let disk = name_of(path);
    move |source| Error::Disk { operation, disk: disk.clone(), source }
}

#[cfg(test)]
#[path = "disks_tests.rs"]
pub(super) mod tests;
