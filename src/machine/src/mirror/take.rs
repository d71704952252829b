//! Takes a disk that comes as the other one of the mirror: one that was part of it before, or an
//! empty one that fits the selector.
//!
//! Invariants:
//! - A disk that is neither empty nor of this mirror is never written.
//! - An empty disk gets its record before its table: until then it is still an empty disk.
//! - The table of the source is read from the disk, and not copied while its data has a mark.

use std::path::{Path, PathBuf};

use polis_layout::partitions::{ESP, SYSTEM_A, SYSTEM_B};
use polis_runtime::supervisor::blocking;
use polis_wire::parameters::Selector;

use super::disks::{Disk, at};
use super::plan::{self, Record, Seen};
use super::reads::Reads;
use super::{Config, Error, assemble};
use crate::install::{self, content, select};
use crate::storage::deadline::SMALL;
use crate::storage::detached::{detached, name_of, sequence};
use crate::storage::plan::{INSTALLED, TYPE_ID, spare};
use crate::storage::steps::Steps;
use crate::storage::table::{self, Partition, Table};
use crate::storage::{backing, machine};
use polis_base::sys::block;

/// Makes a disk the other one of the mirror of `source`, if there is one to take, which has no data
/// yet. Returns `source` as it is now on the disk, and that one: storage may have made the data
/// anew since the start. `steps` says that the disk hangs meanwhile.
pub(super) async fn claim(
    config: Config,
    selector: Option<Selector>,
    source: Disk,
    reads: &mut Reads,
    steps: &Steps,
) -> Result<Option<(Disk, Disk)>, Error> {
    let (sys, path) = (config.sys.clone(), source.path.clone());
    let now = blocking(move || Disk::read(&sys, &path)).await?;
    let same = |now: &Disk| (now.mirror(), now.leg()) == (source.mirror(), source.leg());
    let Some(source) = now.filter(|now| same(now) && now.is_complete()) else { return Ok(None) };
    let found = reads.find(&config, &source.name()).await;
    let all = match selector {
        Some(_) => reads.all.list(&config.sys, &source.name()).await,
        None => Vec::new(),
    };
    let (sys, from) = (config.sys.clone(), source.clone());
    let chosen = blocking(move || choose(&config, selector.as_ref(), &from, found, &all)).await?;
    let Some(chosen) = chosen else { return reads.fault().map_or(Ok(None), Err) };
    let (name, from) = (chosen.name(), source.clone());
    let taking = detached(move || chosen.take(&sys, &from));
    let taken = steps.during(&name, "taking it for the mirror", SMALL, taking).await;
    let failed = |source| Error::Disk { operation: "work on", disk: name.clone(), source };
    Ok(Some((source, taken.map_err(failed)??)))
}

/// A disk that is to be the other one.
enum Chosen {
    /// It was part of the mirror before.
    Former(Box<Disk>),
    /// An empty one, below `/dev`.
    Empty(PathBuf),
}

impl Chosen {
    /// The kernel's name of it.
    fn name(&self) -> String {
        match self {
            Self::Former(disk) => disk.name(),
            Self::Empty(path) => name_of(path),
        }
    }

    /// Makes it the other disk of the mirror of `source`. Blocks.
    fn take(self, sys: &Path, source: &Disk) -> Result<Disk, Error> {
        let record = plan::filling(&source.seen.record);
        let mut old = match self {
            Self::Former(old) => *old,
            Self::Empty(path) => return take(sys, &path, source, &record),
        };
        old.put(&record)?;
        old.forget()?;
        old.renew(source)?;
        old.announce()?;
        Ok(old)
    }
}

/// Chooses the disk to take. Blocks.
fn choose(
    config: &Config,
    selector: Option<&Selector>,
    source: &Disk,
    found: Vec<Disk>,
    all: &[install::disks::Disk],
) -> Result<Option<Chosen>, Error> {
    if let Some(old) = former(config, source, found)? {
        return Ok(Some(Chosen::Former(Box::new(old))));
    }
    let Some(selector) = selector else { return Ok(None) };
    match select::choose(all, selector) {
        Ok(disk) => Ok(Some(Chosen::Empty(config.dev.join(&disk.name)))),
        Err(select::Refusal::NoDisk { .. } | select::Refusal::Medium { .. }) => Ok(None),
        Err(refusal) => Err(Error::Unfit { disk: selector.to_string(), why: refusal.to_string() }),
    }
}

/// The other disk of the mirror where it was part of it before: all of its data is on `source`,
/// too.
fn former(config: &Config, source: &Disk, found: Vec<Disk>) -> Result<Option<Disk>, Error> {
    let disks = assemble::pair(config, source, found)?;
    if disks.iter().any(Option::is_none) {
        return Ok(None);
    }
    // Refuses where both were used alone.
    let used = assemble::decide(config, &disks)?;
    let other = disks.into_iter().flatten().find(|disk| disk.leg() != source.leg());
    Ok(other.filter(|other| !used.has(other.leg())))
}

/// Makes an empty disk the other one of the mirror that `source` is of, with the record `record`,
/// by which it has no data yet. Blocks.
pub(super) fn take(sys: &Path, path: &Path, source: &Disk, record: &Record) -> Result<Disk, Error> {
    let sequence = sequence(sys, &name_of(path));
    let name = name_of(path);
    let unfit = |why: String| Error::Unfit { disk: name.clone(), why };
    let file = content::open(path).map_err(at(path, "open"))?;
    let size = block::size(&file).map_err(at(path, "measure"))?;
    let block_size = u64::from(block::logical_block_size(&file).map_err(at(path, "measure"))?);
    if block_size != source.table.block_size {
        return Err(unfit(format!("it has blocks of {block_size} bytes, the other disk has not")));
    }
    let table = copied(source, size / block_size).map_err(unfit)?;
    let ours = |table: &Table| backing::record(table).is_some_and(|it| it.id == source.mirror());
    let begun = content::is_begun(&file, ours).map_err(at(path, "read"))?;
    if !begun && let Some(found) = content::found(&file).map_err(at(path, "read"))? {
        return Err(unfit(format!("it has {found}; wipe it, or choose another one")));
    }
    let entry = |kind| table.partitions.iter().find(|entry| entry.type_id == kind);
    let (Some(notes), Some(data)) = (backing::record(&table).cloned(), entry(TYPE_ID).cloned())
    else {
        return Err(unfit("the other disk has no data partition".to_owned()));
    };
    // Behind the blank start there may be the data of an earlier use.
    let found = machine::read_content(path, &table, &data).map_err(at(path, "read"))?;
    spare(&found)?;
    let seen = Seen { record: *record, dropped_other: false };
    let mut disk = Disk { path: path.to_owned(), sequence, table, notes, data: Some(data), seen };
    disk.clear_esp()?;
    disk.forget()?;
    disk.put(record)?;
    table::create(&file, &disk.table).map_err(|source| Error::Table { disk: name, source })?;
    disk.announce()?;
    Ok(disk)
}

/// The table of another disk of the mirror, with so many blocks.
fn copied(source: &Disk, blocks: u64) -> Result<Table, String> {
    let named = |name| source.named(name).map(|(_, entry)| entry.clone());
    let shared = [Some(source.notes.clone()), source.data.clone()];
    let mut partitions = Vec::new();
    for (number, entry) in
        (1..).zip([ESP, SYSTEM_A, SYSTEM_B].map(|kind| named(kind.name)).into_iter().chain(shared))
    {
        let entry = entry.ok_or("the other disk lacks a partition")?;
        // Firmware distinguishes disks by these; the other two are those of the mirror.
        let own = number <= 3;
        let installed = if entry.name == SYSTEM_A.name { INSTALLED } else { 0 };
        partitions.push(Partition {
            number,
            id: if own { table::new_id() } else { entry.id },
            attributes: if own { installed } else { entry.attributes },
            ..entry
        });
    }
    let (disk, block_size) = (table::new_id(), source.table.block_size);
    let table = Table { disk, block_size, blocks, partitions };
    let end = table.partitions.iter().map(|entry| entry.last).max().unwrap_or_default();
    if blocks < source.table.first_usable() * 2 || end > table.last_usable() {
        return Err("it is too small".to_owned());
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::super::disks::tests::{BLOCKS, source};
    use super::*;
    use crate::storage::plan::is_installed;

    #[test]
    fn another_disk_has_the_places_and_the_identity_of_the_mirror_and_guids_of_its_own() {
        let source = source();
        let table = copied(&source, BLOCKS * 2).unwrap();
        for (one, other) in table.partitions.iter().zip(&source.table.partitions) {
            assert_eq!((one.first, one.last, &one.name), (other.first, other.last, &other.name));
            assert_eq!(one.id == other.id, one.number > 3, "{}", one.name);
        }
        assert!(is_installed(&table), "its GUIDs would change at its first boot");
        let end = source.data.as_ref().unwrap().last;
        assert_eq!(copied(&source, end).unwrap_err(), "it is too small");
    }
}
