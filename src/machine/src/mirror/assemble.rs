//! The start of a mirror: finds its disks, decides which have the newest data, and makes the
//! device over them.
//!
//! ```text
//! disks, variable --plan--> the next use is noted on each disk, then in the variable --> device
//! ```
//!
//! Invariants:
//! - Nothing is written to the data before every disk in use, and then the variable, has the
//!   record of this use.
//! - Of data that was given up, only the disk that the machine was started from is used; on the
//!   other disk, its keys and then its start are overwritten before.
//! - Only an error of the disk that the machine was started from ends the boot.
//! - A new mirror is begun on a disk that storage would make a data partition on, and nothing is
//!   written before the last look: a write of the table replaces the backup of an earlier one.
//!
//! What this module does not do: wait for disks (the service in `mod`).

use std::fs::File;

use tracing::{info, warn};
use uuid::Uuid;

use super::disks::{Disk, at, open};
use super::plan::{self, Leg, Record, Used};
use super::{Config, Error, device, esp, record};
use crate::storage::backing::{self, Backing};
use crate::storage::detached::name_of;
use crate::storage::plan::{Plan, place, reserve, spare};
use crate::storage::{machine, service, table, wipe};
use polis_base::sys::block;

/// A mirror in use.
#[derive(Clone, Debug)]
pub(super) struct Mirror {
    /// The disks that are there, by their place.
    pub(super) disks: [Option<Disk>; 2],
    /// Those with all data.
    pub(super) used: Used,
    /// The one that the machine was started from, or runs from since that one was lost.
    pub(super) started: Leg,
    /// One that failed: it is not taken again before it was pulled.
    pub(super) dropped: Option<Disk>,
}

impl Mirror {
    /// The disk at this place, if it is there.
    pub(super) fn disk(&self, leg: Leg) -> Option<&Disk> {
        self.disks[leg.index()].as_ref()
    }

    /// The disk whose data counts.
    pub(super) fn source(&self) -> Option<&Disk> {
        let leg = match self.used {
            Used::Both => self.started,
            Used::Only(leg) => leg,
        };
        self.disk(leg)
    }

    /// On what the data lies; `last` for a data partition that is still to be made.
    pub(super) fn backing(&self, last: Option<u64>) -> Backing {
        let alone = match self.used {
            Used::Both => None,
            Used::Only(_) => self.source().map(Disk::name),
        };
        let used = Leg::ALL.into_iter().filter(|leg| self.used.has(*leg));
        let disks = used.filter_map(|leg| Some(self.disk(leg)?.path.clone())).collect();
        Backing::Mirror { last, alone, disks }
    }

    /// The disk from which the machine should be started: the one with the newest data, and of
    /// two with that the one whose ESP the node wrote last, if it is there.
    pub(super) fn newest(&self) -> Leg {
        match self.used {
            Used::Only(leg) => leg,
            Used::Both => self.source().map_or(self.started, |disk| disk.seen.record.esp),
        }
    }

    /// Whether the data of a disk in use was given up.
    fn is_given_up(&self) -> bool {
        let mut used = self.disks.iter().flatten().filter(|disk| self.used.has(disk.leg()));
        self.disk(self.started).is_some_and(|own| used.any(|disk| disk.is_given_up(own)))
    }

    /// The disk beside the one that the machine was started from, if [`start`] writes to it.
    pub(super) fn written(&self) -> Option<&Disk> {
        let other = self.disk(self.started.other());
        other.filter(|_| self.used == Used::Both || self.is_given_up())
    }

    /// Goes on without the disk at this place, and from the other one.
    pub(super) fn drop_disk(&mut self, leg: Leg) {
        self.dropped = self.disks[leg.index()].take();
        self.started = leg.other();
    }

    /// Takes into use one of two disks with all data, without the one at this place.
    pub(super) fn go_on_without(&mut self, leg: Leg) {
        self.drop_disk(leg);
        self.used = Used::Only(self.started);
    }

    /// Notes the next use, of `used`: on the disk whose data counts first. What was written before
    /// an error is known after it: the next record must count it. Blocks.
    pub(super) fn raise(&mut self, config: &Config, used: Used) -> Result<(), Error> {
        let first = match (self.used, used) {
            (_, Used::Only(leg)) | (Used::Only(leg), Used::Both) => leg,
            (Used::Both, Used::Both) => self.started,
        };
        let Some(disk) = self.disk(first) else { return Ok(()) };
        let (before, mirror) = (disk.seen.record, disk.mirror());
        // After a cut it has the use before this one, and may never be two behind.
        if record::last(&config.variable, mirror) != Some(before.stamp) {
            keep(config, mirror, before.stamp);
        }
        let mut next = plan::next(&before, used, first, rand::random());
        // Where the firmware has no room for a later use, the record keeps the use that it has.
        if record::last(&config.variable, mirror) == Some(before.before) {
            next.before = before.before;
        }
        for leg in [first, first.other()].into_iter().filter(|leg| used.has(*leg)) {
            if let Some(disk) = &mut self.disks[leg.index()] {
                disk.put(&Record { leg, ..next })?;
            }
        }
        self.used = used;
        keep(config, mirror, next.stamp);
        Ok(())
    }
}

/// Has the firmware keep the use; without it, a lone disk with old data is not noticed.
fn keep(config: &Config, mirror: Uuid, stamp: plan::Stamp) {
    if !config.variable.possible() {
        return;
    }
    if let Err(error) = record::keep(&config.variable, mirror, stamp) {
        let error = &error as &dyn std::error::Error;
        warn!(error, "the firmware does not keep the last use of the mirror");
    }
}

/// The disks of the mirror: `own` and, of those that were found, the one that counts in the other
/// place.
pub(super) fn pair(
    config: &Config,
    own: &Disk,
    found: Vec<Disk>,
) -> Result<[Option<Disk>; 2], Error> {
    let other = |disk: &Disk| disk.mirror() == own.mirror() && disk.leg() != own.leg();
    let others: Vec<Disk> = found.into_iter().filter(other).collect();
    let seen: Vec<_> = others.iter().map(|disk| disk.seen).collect();
    let mut pair = [const { None }; 2];
    pair[own.leg().index()] = Some(own.clone());
    let last = record::last(&config.variable, own.mirror());
    let Some(at) = plan::beside(own.seen, &seen, last) else { return Ok(pair) };
    let chosen = &others[at];
    pair[chosen.leg().index()] = Some(chosen.clone());
    let copy = |disk: &&Disk| {
        disk.path != chosen.path && plan::are_copies(&disk.seen.record, &chosen.seen.record)
    };
    let counts = || decide(config, &pair).is_ok_and(|used| used.has(chosen.leg()));
    match others.iter().find(copy).filter(|_copy| counts()) {
        Some(copy) => Err(Error::Copies { one: chosen.name(), other: copy.name() }),
        None => Ok(pair),
    }
}

/// Decides which of the disks are used. Blocks.
pub(super) fn decide(config: &Config, disks: &[Option<Disk>; 2]) -> Result<Used, Error> {
    let [first, second] = disks.each_ref().map(|disk| disk.as_ref().map(|disk| disk.seen));
    let mirror = disks.iter().flatten().next().map(Disk::mirror);
    let last = mirror.and_then(|mirror| record::last(&config.variable, mirror));
    if last.is_none() {
        info!("the firmware knows no use of the mirror: the disks alone say which is the newest");
    }
    plan::plan(first, second, last).map_err(|source| {
        let names: Vec<String> = disks.iter().flatten().map(Disk::name).collect();
        Error::Refused { disks: names.join(" and "), source }
    })
}

/// Takes the mirror into use, from the disk that the machine was started from; without the other
/// one if that fails. Blocks.
pub(super) fn start(config: &Config, mut mirror: Mirror) -> Result<Mirror, Error> {
    if mirror.is_given_up() {
        end(&mirror)?;
    } else if mirror.used == Used::Both {
        match enter(config, &mut mirror, Used::Both) {
            Ok(()) => return Ok(mirror),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(
                    error,
                    "a disk of the mirror fails: the machine starts without the other one"
                );
                mirror.drop_disk(mirror.started.other());
            }
        }
    }
    let alone = Used::Only(mirror.started);
    enter(config, &mut mirror, alone)?;
    Ok(mirror)
}

/// Takes these disks into use.
fn enter(config: &Config, mirror: &mut Mirror, used: Used) -> Result<(), Error> {
    for disk in mirror.disks.iter().flatten().filter(|disk| used.has(disk.leg())) {
        disk.announce()?;
    }
    mirror.raise(config, used)?;
    if mirror.source().is_some_and(|disk| disk.data.is_some()) {
        make(mirror)?;
    }
    Ok(())
}

/// Makes the device over the disks in use, unless it is there. Blocks.
fn make(mirror: &Mirror) -> Result<(), Error> {
    let failed = |source| Error::Device { operation: "make", source };
    let table = match (mirror.used, &mirror.disks) {
        (Used::Both, [Some(first), Some(second)]) => device::both(first, second, None),
        _ => match mirror.source() {
            Some(disk) => backing::linear(&disk.devices().1, disk.length()),
            None => return Ok(()),
        },
    };
    backing::make(&table).map_err(failed)
}

/// The data was given up: its keys and it end on the other disk, and it is marked on this one. The
/// other disk is old after this boot, whether that succeeds or not.
fn end(mirror: &Mirror) -> Result<(), Error> {
    let finish = |other: &Disk| {
        other.announce()?;
        other.wipe_esp()?;
        wipe::heads(&other.devices().1, other.length())
            .map_err(at(&other.path, "overwrite the start of the data of"))
    };
    if let Some(other) = mirror.disk(mirror.started.other()) {
        match finish(other) {
            Ok(()) => info!(disk = other.name(), "the data that was given up ends on this disk"),
            Err(error) => warn!(
                disk = other.name(),
                error = &error as &dyn std::error::Error,
                "the data that was given up stays on this disk"
            ),
        }
    }
    mark(mirror)
}

/// Marks the data on the disk that the machine was started from as given up.
fn mark(mirror: &Mirror) -> Result<(), Error> {
    let Some(started) = mirror.disk(mirror.started) else { return Ok(()) };
    machine::give_up(&started.path).map_err(|source| Error::Table { disk: started.name(), source })
}

/// Leaves the other disk, which takes no writes. Data that was given up on that one alone is given
/// up on this one from then on. Blocks.
pub(super) fn leave(mut mirror: Mirror) -> Result<Mirror, Error> {
    if mirror.is_given_up() {
        mark(&mirror)?;
    }
    mirror.go_on_without(mirror.started.other());
    Ok(mirror)
}

/// Puts the records of a new mirror on the disk that the machine was started from, unless it has a
/// data partition. Blocks.
pub(super) fn begin(config: &Config) -> Result<(), Error> {
    let path = &config.disk;
    let unusable = |source| Error::Table { disk: name_of(path), source };
    let looked = service::look(path.clone(), &Backing::Partition, Uuid::nil());
    let (table, decided) = looked.map_err(|error| Error::Look(Box::new(error)))?;
    let Plan::Create { .. } = decided else { return Ok(()) };
    let id = table::new_id();
    let (table, partition) = reserve(&table, id)?;
    // The data partition follows the records.
    let data = place(&table, Uuid::nil())?;
    spare(&machine::read_content(path, &table, data.partition()).map_err(at(path, "read"))?)?;
    let file = open(path)?;
    let start = partition.first * table.block_size;
    let record = plan::begun(rand::random());
    let writing = || at(path, "write the mirror's record to");
    record::clear_notes(&file, start).map_err(writing())?;
    record::write(&file, start, id, &record).map_err(writing())?;
    table::write(&file, &table).map_err(unusable)?;
    let length = partition.blocks() * table.block_size;
    block::add_partition(&file, partition.number, start, length)
        .map_err(at(path, "announce the partitions of"))
}

/// The mirror that an earlier run of the service has taken into use, of the disks that were found:
/// those below the device. Blocks.
pub(super) fn resume(config: &Config, found: Vec<Disk>) -> Result<Mirror, Error> {
    let below = device::below()?;
    let mut disks: [Option<Disk>; 2] = [None, None];
    for disk in found.into_iter().filter(|disk| device::is_on(&below, &disk.devices().1)) {
        let place = disk.leg().index();
        disks[place] = Some(disk);
    }
    let newest = disks.iter().flatten().max_by_key(|disk| disk.seen.record.stamp.generation);
    let newest = newest.map(|disk| disk.seen.record);
    let missing = || Error::Device {
        operation: "find the disks of",
        source: std::io::ErrorKind::NotFound.into(),
    };
    let used = newest.ok_or_else(missing)?.used;
    let mounted = disks.iter().flatten().find(|disk| esp::is_mounted(&config.esp, disk));
    let started = match (used, mounted.or(disks.iter().flatten().next())) {
        (Used::Only(leg), _) => leg,
        (Used::Both, disk) => disk.map_or(Leg::First, Disk::leg),
    };
    Ok(Mirror { disks, used, started, dropped: None })
}

/// The disk that the machine was started from, if it is one of a mirror. Blocks.
pub(super) fn started(config: &Config) -> Result<Option<Disk>, Error> {
    let failed = |source| Error::Table { disk: name_of(&config.disk), source };
    if !backing::is_mirrored(&look(config)?) {
        return Ok(None);
    }
    // Mends the table where a power cut tore it: that of another disk is storage's.
    machine::read_table(&config.disk).map_err(failed)?;
    Disk::read(&config.sys, &config.disk)
}

/// The table of the disk that the machine was started from, as it is. Blocks.
pub(super) fn look(config: &Config) -> Result<table::Table, Error> {
    let failed = |source| Error::Table { disk: name_of(&config.disk), source };
    let opened = File::open(&config.disk);
    let opened = opened.map_err(|source| table::Error::Io { operation: "open", source });
    opened.and_then(|disk| table::read(&disk)).map_err(failed)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::{FileExt as _, symlink};
    use std::path::{Path, PathBuf};

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use tempfile::TempDir;

    use super::super::disks::tests::{BLOCKS, source, taken};
    use super::*;
    use crate::storage::plan::{BEING_MADE, GIVEN_UP, Refusal};
    use crate::storage::table::Table;
    use polis_base::sys::efivar::Variable;
    use polis_base::trapdoor::code;

    pub(in super::super) fn config(folder: &Path) -> Config {
        Config {
            disk: folder.join("vda"),
            sys: folder.join("sys"),
            dev: folder.to_owned(),
            slot: "A".to_owned(),
            esp: folder.join("esp"),
            other_esp: folder.join("other"),
            efivars: folder.to_owned(),
            variable: Variable::new(folder, record::VARIABLE),
        }
    }

    /// The disk that the machine was started from, with this table.
    fn started_from(config: &Config, table: &Table) -> File {
        let file = File::options().create_new(true).read(true).write(true).open(&config.disk);
        let file = file.unwrap();
        file.set_len(BLOCKS * 512).unwrap();
        table::create(&file, table).unwrap();
        file
    }

    #[test]
    fn a_disk_with_data_of_an_earlier_table_keeps_the_backup_of_that() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let all = source().table;
        let image = Table { partitions: all.partitions[..3].to_vec(), ..all.clone() };
        let file = started_from(&config, &image);
        let mut start = vec![0; 34 * 512];
        file.read_exact_at(&mut start, 0).unwrap();
        // The data is 2 GiB behind what the image has.
        let first = 4 << 20;
        let (number, last) = (4, first + (1 << 21) - 1);
        let data = table::Partition { number, first, last, ..all.partitions[4].clone() };
        let mut former = image.clone();
        former.partitions.push(data);
        table::write(&file, &former).unwrap();
        file.write_all_at(&start, 0).unwrap();
        file.write_all_at(b"XFSB", first * 512).unwrap();

        let refused = begin(&config).unwrap_err();
        let Error::Look(look) = &refused else { panic!("{refused:?}") };
        assert_eq!((look.code(), refused.code()), (code::STORAGE_OCCUPIED, code::STORAGE_OCCUPIED));
        assert_eq!(table::read_backup(&file), Some(former));
        assert_eq!(table::read_primary(&file), Some(image));
        // Without data, the mirror is begun; a file has no partitions in the kernel.
        file.write_all_at(&[0; 4], first * 512).unwrap();
        let begun = begin(&config).unwrap_err();
        let operation = "announce the partitions of";
        assert!(matches!(begun, Error::Disk { operation: it, .. } if it == operation), "{begun}");
        assert!(backing::is_mirrored(&table::read_primary(&file).unwrap()));
    }

    #[test]
    fn a_disk_with_data_where_its_data_partition_would_be_gets_no_mirror() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let mut image = source().table;
        image.partitions.truncate(3);
        let file = started_from(&config, &image);
        let (_table, records) = reserve(&image, Uuid::nil()).unwrap();
        file.write_all_at(b"XFSB", (records.last + 1) * 512).unwrap();
        let refused = begin(&config).unwrap_err();
        assert!(matches!(refused, Error::Place(Refusal::Occupied { .. })), "{refused:?}");
        assert_eq!(refused.code(), code::STORAGE_OCCUPIED);
        assert_eq!(table::read(&file).unwrap(), image);
    }

    #[test]
    fn a_disk_with_a_data_partition_gets_no_mirror_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let mut with_data = source().table;
        let data = with_data.partitions.remove(4);
        with_data.partitions[3] =
            table::Partition { number: 4, attributes: BEING_MADE, ..data.clone() };
        let file = started_from(&config, &with_data);
        file.write_all_at(b"precious", data.first * 512).unwrap();
        begin(&config).unwrap();
        assert_eq!(table::read(&file).unwrap(), with_data);
        let mut kept = [0; 8];
        file.read_exact_at(&mut kept, data.first * 512).unwrap();
        assert_eq!(&kept, b"precious");
    }

    /// A mirror of one disk, with its first record. The folder has the disk.
    fn begun() -> (TempDir, Config, Disk) {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        File::create(&config.disk).unwrap().set_len(BLOCKS * 512).unwrap();
        let mut one = taken(&config.disk, &source());
        one.put(&plan::begun(1)).unwrap();
        (folder, config, one)
    }

    #[test]
    fn a_record_that_one_disk_took_and_the_other_did_not_counts_in_the_next_one() {
        let (folder, config, one) = begun();
        let mut other = Disk { path: folder.path().join("pulled"), ..one.clone() };
        other.seen.record = plan::filling(&one.seen.record);
        let (used, started) = (Used::Only(Leg::First), Leg::First);
        let disks = [Some(one), Some(other)];
        let mut mirror = Mirror { disks, used, started, dropped: None };
        mirror.raise(&config, Used::Both).unwrap_err();
        assert_eq!(mirror.used, used);
        let half = mirror.disk(started).unwrap().seen.record;
        assert_eq!((half.stamp.generation, half.used), (2, Used::Both));
        mirror.raise(&config, used).unwrap();
        let read = Disk::read(&config.sys, &config.disk).unwrap().unwrap().seen.record;
        assert_eq!(Some(read), mirror.disk(started).map(|disk| disk.seen.record));
        // By this the other one is known, should it have that record.
        assert_eq!((read.both, read.used, read.stamp.generation), (half.stamp, used, 3));
        assert_eq!(
            record::last(&config.variable, mirror.disk(started).unwrap().mirror()),
            Some(read.stamp)
        );
        mirror.drop_disk(Leg::Second);
        assert!(mirror.dropped.is_some() && mirror.newest() == started);
    }

    /// Has the firmware keep the first use of the mirror, and no later one.
    fn fill_firmware(folder: &Path, variable: &Variable, mirror: Uuid) -> File {
        let before = names(folder);
        record::keep(variable, mirror, plan::begun(1).stamp).unwrap();
        let path = names(folder).difference(&before).next().unwrap().clone();
        let sealed = memfd_create("variable", MemfdFlags::ALLOW_SEALING).unwrap();
        let sealed = File::from(sealed);
        sealed.write_all_at(&std::fs::read(&path).unwrap(), 0).unwrap();
        fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
        std::fs::remove_file(&path).unwrap();
        symlink(format!("/proc/self/fd/{}", sealed.as_raw_fd()), &path).unwrap();
        sealed
    }

    fn names(folder: &Path) -> BTreeSet<PathBuf> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn a_lone_disk_is_used_start_after_start_where_the_firmware_keeps_no_later_use() {
        let (folder, config, one) = begun();
        let _kept = fill_firmware(folder.path(), &config.variable, one.mirror());
        let (used, started) = (Used::Only(Leg::First), Leg::First);
        let mut mirror = Mirror { disks: [Some(one), None], used, started, dropped: None };
        for start in 1..5 {
            let decided = decide(&config, &mirror.disks);
            assert_eq!(decided.unwrap(), used, "start {start}");
            mirror.raise(&config, used).unwrap();
            let record = mirror.disk(started).unwrap().seen.record;
            assert_eq!((record.stamp.generation, record.before), (start + 1, plan::begun(1).stamp));
        }
        // A use that this disk never had counts as before.
        let mut other = mirror.clone();
        other.disks[0].as_mut().unwrap().seen.record.before.nonce = 7;
        let refused = decide(&config, &other.disks).unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    }

    #[test]
    fn data_that_was_given_up_on_a_disk_that_takes_no_writes_is_given_up_without_it() {
        let folder = tempfile::tempdir().unwrap();
        let both = plan::next(&plan::begun(1), Used::Both, Leg::First, 2);
        let disk = |name: &str, leg| {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
            let mut disk = taken(&path, &source());
            disk.seen.record = Record { leg, ..both };
            disk
        };
        let (own, mut other) = (disk("vda", Leg::First), disk("vdb", Leg::Second));
        let given_up = || {
            let read = Disk::read(folder.path(), &folder.path().join("vda")).unwrap().unwrap();
            read.is_given_up(&read)
        };
        let with = |other: &Disk| Mirror {
            disks: [Some(own.clone()), Some(other.clone())],
            used: Used::Both,
            started: Leg::First,
            dropped: None,
        };
        let left = leave(with(&other)).unwrap();
        assert_eq!((left.used, given_up()), (Used::Only(Leg::First), false));
        assert_eq!(left.dropped.map(|disk| disk.path).as_ref(), Some(&other.path));
        other.data.as_mut().unwrap().attributes |= GIVEN_UP;
        leave(with(&other)).unwrap();
        assert!(given_up());
        let alone = Mirror { used: Used::Only(Leg::First), ..with(&other) };
        assert!(with(&other).written().is_some() && alone.written().is_none());
    }

    #[test]
    fn of_two_disks_with_all_data_the_machine_starts_from_the_one_whose_esp_was_written() {
        let one = source();
        let both = plan::next(&plan::begun(1), Used::Both, Leg::First, 2);
        let at = |leg| {
            let mut disk = Disk { path: format!("/dev/{leg:?}").into(), ..one.clone() };
            disk.seen.record = Record { leg, ..both };
            Some(disk)
        };
        let disks = Leg::ALL.map(at);
        let mirror = Mirror { disks, used: Used::Both, started: Leg::Second, dropped: None };
        assert_eq!(mirror.newest(), Leg::First);
        let old = Mirror { used: Used::Only(Leg::Second), ..mirror };
        assert_eq!(old.newest(), Leg::Second);
    }

    #[test]
    fn two_copies_of_the_disk_that_counts_are_refused_and_unfilled_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let own = source();
        let with = |name: &str, used| {
            let mut disk = Disk { path: name.into(), ..own.clone() };
            disk.seen.record = Record { leg: Leg::Second, used, ..own.seen.record };
            disk
        };
        let found = |used| vec![with("/dev/vdb", used), with("/dev/vdc", used)];
        let unfilled = pair(&config, &own, found(Used::Only(Leg::First))).unwrap();
        assert!(unfilled[1].is_some());
        let refused = pair(&config, &own, found(Used::Both)).unwrap_err();
        assert!(matches!(refused, Error::Copies { .. }), "{refused}");
        let another = Disk {
            notes: crate::storage::table::Partition { id: Uuid::nil(), ..own.notes.clone() },
            ..with("/dev/vdd", Used::Both)
        };
        assert!(pair(&config, &own, vec![another]).unwrap()[1].is_none());
    }
}
