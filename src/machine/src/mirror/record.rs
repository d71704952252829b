//! The record of a disk of a mirror, on a partition of its own, and the firmware's variable.
//!
//! ```text
//! POLIS-MIRROR: 0                  2 MiB      3 MiB
//!               | kernel's notes ..| record .. | its copy ..|
//! ```
//!
//! The kernel's notes are those of its target `raid`: a superblock, and the map of the regions
//! that are being written.
//!
//! Invariants:
//! - A power cut at any moment of a write leaves the record of before, or the new one.
//! - The record is read and written through the disk, never through the partition: the kernel
//!   keeps what it has read of each apart.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::plan::{Leg, Record, Seen, Stamp, Used};
use polis_base::sys::efivar::Variable;
use polis_base::sys::files::forget;

/// The name of the variable.
pub(super) const VARIABLE: &str = "PolisMirror";

/// Where both copies are in the partition, and how long each is.
const PLACES: [u64; 2] = [2 << 20, 3 << 20];
const BLOCK: usize = 4096;
/// The checksum at the start of a copy, and the length behind it.
const CHECKSUM: usize = 32;
const HEADER: usize = CHECKSUM + 4;

/// What the kernel's notes begin with, and where they name the disks that were dropped.
const MAGIC: &[u8] = b"DmRd";
const DROPPED: usize = 24;
/// The notes that are removed: superblock and map.
const NOTES: usize = 1 << 20;

/// A record as it is stored; a form without a field of it is none of ours.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    mirror: [u8; 16],
    /// 1 or 2.
    leg: u8,
    stamp: (u64, u64),
    before: (u64, u64),
    together: (u64, u64),
    both: (u64, u64),
    /// The legs with all data.
    used: Vec<u8>,
    /// The leg whose ESP is written.
    esp: u8,
}

/// The bytes of a copy.
fn encode(mirror: Uuid, record: &Record) -> io::Result<Vec<u8>> {
    let number = |leg: &Leg| if *leg == Leg::First { 1 } else { 2 };
    let pair = |stamp: Stamp| (stamp.generation, stamp.nonce);
    let stored = Stored {
        mirror: mirror.into_bytes(),
        leg: number(&record.leg),
        stamp: pair(record.stamp),
        before: pair(record.before),
        together: pair(record.together),
        both: pair(record.both),
        used: Leg::ALL.iter().filter(|leg| record.used.has(**leg)).map(number).collect(),
        esp: number(&record.esp),
    };
    let text = serde_json::to_vec(&stored)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    let content = [&length.to_le_bytes()[..], &text].concat();
    let mut bytes = [&Sha256::digest(&content)[..], &content].concat();
    bytes.resize(BLOCK, 0);
    Ok(bytes)
}

/// The record in a copy, if it is one of this mirror.
fn decode(mirror: Uuid, bytes: &[u8]) -> Option<Record> {
    let (checksum, content) = bytes.split_at_checked(CHECKSUM)?;
    let length = u32::from_le_bytes(content.get(..4)?.try_into().ok()?);
    let end = usize::try_from(length).ok()?.checked_add(HEADER)?;
    let content = bytes.get(CHECKSUM..end)?;
    if Sha256::digest(content)[..] != *checksum {
        return None;
    }
    let stored: Stored = serde_json::from_slice(&content[4..]).ok()?;
    let stamp = |(generation, nonce)| Stamp { generation, nonce };
    let leg = |number| match number {
        1 => Some(Leg::First),
        2 => Some(Leg::Second),
        _ => None,
    };
    let used = match stored.used[..] {
        [1, 2] => Used::Both,
        [only] => Used::Only(leg(only)?),
        _ => return None,
    };
    let record = Record {
        leg: leg(stored.leg)?,
        stamp: stamp(stored.stamp),
        before: stamp(stored.before),
        together: stamp(stored.together),
        both: stamp(stored.both),
        used,
        esp: leg(stored.esp)?,
    };
    (stored.mirror == mirror.into_bytes()).then_some(record)
}

/// What a disk says whose partition of `mirror` begins at byte `start`; `None` if neither copy is
/// whole. Blocks.
pub(super) fn read(disk: &File, start: u64, mirror: Uuid) -> io::Result<Option<Seen>> {
    forget(disk)?;
    let [first, second] = PLACES.map(|place| copy(disk, start + place));
    let found = match (first, second) {
        (Err(error), Err(_)) => return Err(error),
        (first, second) => [first, second].into_iter().flatten().find_map(|it| decode(mirror, &it)),
    };
    let Some(record) = found else { return Ok(None) };
    let notes = copy(disk, start)?;
    let dropped = notes[DROPPED..].first().copied().unwrap_or_default();
    let other = 1_u8 << record.leg.other().index();
    let dropped_other = notes.starts_with(MAGIC) && dropped & other != 0;
    Ok(Some(Seen { record, dropped_other }))
}

fn copy(disk: &File, at: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; BLOCK];
    disk.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// Writes the record, so that it survives a power cut once this returns. Blocks.
pub(super) fn write(disk: &File, start: u64, mirror: Uuid, record: &Record) -> io::Result<()> {
    let new = encode(mirror, record)?;
    let [first, second] = PLACES.map(|place| start + place);
    let put = |bytes: &[u8], at| {
        disk.write_all_at(bytes, at)?;
        disk.sync_data()
    };
    // What a write that was cut has left: the first copy counts, and is about to be overwritten.
    let whole = copy(disk, first).ok().filter(|bytes| decode(mirror, bytes).is_some());
    if let Some(bytes) = whole.filter(|bytes| copy(disk, second).ok().as_ref() != Some(bytes)) {
        put(&bytes, second)?;
    }
    put(&new, first)?;
    put(&new, second)
}

/// Removes the kernel's notes: what they say is of an earlier pair of disks. Blocks.
pub(super) fn clear_notes(disk: &File, start: u64) -> io::Result<()> {
    disk.write_all_at(&vec![0; NOTES], start)?;
    disk.sync_data()?;
    forget(disk)
}

/// The last use of `mirror` that this machine's firmware knows.
pub(super) fn last(variable: &Variable, mirror: Uuid) -> Option<Stamp> {
    let bytes = variable.read().ok()??;
    let (id, stamp) = bytes.split_at_checked(16)?;
    let (generation, nonce) = stamp.split_at_checked(8)?;
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    let stamp = Stamp { generation: number(generation)?, nonce: number(nonce)? };
    (id == mirror.as_bytes()).then_some(stamp)
}

/// Has the firmware keep the use.
pub(super) fn keep(variable: &Variable, mirror: Uuid, stamp: Stamp) -> io::Result<()> {
    let numbers = [stamp.generation.to_le_bytes(), stamp.nonce.to_le_bytes()].concat();
    variable.write(&[&mirror.as_bytes()[..], &numbers].concat())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::plan::{begun, filling, next};
    use super::*;

    const MIRROR: Uuid = Uuid::from_u128(7);
    const START: u64 = 1 << 20;

    fn disk() -> File {
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(8 << 20).unwrap();
        disk
    }

    fn found(disk: &File) -> Option<Record> {
        read(disk, START, MIRROR).unwrap().map(|seen| seen.record)
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_by_its_mirror_alone() {
        let disk = disk();
        assert_eq!(found(&disk), None);
        let first = begun(5);
        let both = next(&first, Used::Both, Leg::Second, 6);
        let alone = next(&both, Used::Only(Leg::First), Leg::First, u64::MAX);
        for record in [first, both, filling(&first), alone] {
            write(&disk, START, MIRROR, &record).unwrap();
            assert_eq!(found(&disk), Some(record));
            assert_eq!(read(&disk, START, Uuid::from_u128(8)).unwrap(), None);
        }
    }

    #[test]
    fn one_damaged_copy_costs_nothing_and_a_cut_write_leaves_one_of_the_two() {
        let disk = disk();
        let (old, new) = (begun(1), next(&begun(1), Used::Both, Leg::First, 2));
        for place in PLACES {
            write(&disk, START, MIRROR, &old).unwrap();
            disk.write_all_at(&[0xff; 50], START + place).unwrap();
            assert_eq!(found(&disk), Some(old));
            // The next write mends it first.
            write(&disk, START, MIRROR, &new).unwrap();
            assert_eq!(found(&disk), Some(new));
        }
        write(&disk, START, MIRROR, &old).unwrap();
        disk.write_all_at(&encode(MIRROR, &new).unwrap(), START + PLACES[0]).unwrap();
        assert_eq!(found(&disk), Some(new));
    }

    #[test]
    fn the_kernel_s_notes_say_whether_it_dropped_the_other_disk() {
        let disk = disk();
        let record = begun(1);
        write(&disk, START, MIRROR, &record).unwrap();
        let dropped = |failed: u8| {
            disk.write_all_at(MAGIC, START).unwrap();
            disk.write_all_at(&[failed], START + DROPPED as u64).unwrap();
            read(&disk, START, MIRROR).unwrap().unwrap().dropped_other
        };
        assert_eq!([0, 1, 2, 3].map(dropped), [false, false, true, true]);
        clear_notes(&disk, START).unwrap();
        assert!(!read(&disk, START, MIRROR).unwrap().unwrap().dropped_other);
        assert_eq!(found(&disk), Some(record));
    }

    #[test]
    fn the_variable_is_that_of_one_mirror() {
        let folder = tempfile::tempdir().unwrap();
        let variable = Variable::new(folder.path(), VARIABLE);
        assert_eq!(last(&variable, MIRROR), None);
        keep(&variable, MIRROR, begun(3).stamp).unwrap();
        assert_eq!(last(&variable, MIRROR), Some(begun(3).stamp));
        assert_eq!(last(&variable, Uuid::from_u128(8)), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_record_or_none(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(decode(MIRROR, &bytes), None);
        }
    }
}
