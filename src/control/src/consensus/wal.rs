//! The reader of etcd's write-ahead log: finds out whether its member ever got an entry, and
//! removes the copies that etcd leaves beside the log.
//!
//! A member that joins asks the others for the list of members at its very first start, and
//! keeps the answer in memory; the list reaches the disk with its first entries. A member
//! that lost its power in between has a log and does not ask again: it refuses the streams
//! of members that it does not know, and the few other messages may never be enough. But a
//! member without an entry has not acknowledged any, so it can start over, and ask. So can
//! a member that received the state of its cluster and whose log does not show yet that all
//! of that is decided: etcd does not use that state, and starts as if it had nothing.
//!
//! ```text
//! [ length, 8 bytes | record | padding ] ... [ 0 ... 0 ]     the file is longer than its records
//! ```
//!
//! The lower 56 bits of a length, little-endian, are the record's; where the topmost
//! bit is set, the three lowest of that byte are the padding's. Source: the packages
//! `wal` and `walpb` of etcd 3.5.
//!
//! Invariants:
//! - A part that cannot be read for certain counts as an entry.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;

use prost::Message as _;

use polis_base::files::{Dir, Error};

/// How much of a log is read: without an entry, it holds the head of a log, and a new state
/// for each term that the member saw.
const HEAD_MAX: u64 = 64 << 10;

const LENGTH: usize = 8;

/// The end of the name of a copy: etcd makes one of the last file, before it cuts off a record
/// that a power cut has torn. Source: the function `Repair` of the package `wal`.
const COPY: &str = ".wal.broken";

/// `walpb.Record`, without its checksum: a damaged record is not a reason to throw a log
/// away, and counts as an entry or not by its type field.
#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(bytes = "vec", optional, tag = "3")]
    data: Option<Vec<u8>>,
}

/// The kinds of records in a log without entries.
const METADATA: i64 = 1;
const STATE: i64 = 3;
const CHECKSUM: i64 = 4;
const SNAPSHOT: i64 = 5;

/// `walpb.Snapshot`, the needed fields.
#[derive(Clone, PartialEq, prost::Message)]
struct Snapshot {
    /// The last entry that it covers; 0 without one.
    #[prost(uint64, tag = "1")]
    index: u64,
}

/// `raftpb.HardState`, the needed fields.
#[derive(Clone, PartialEq, prost::Message)]
struct State {
    /// The last entry of which the member knows that it is decided.
    #[prost(uint64, tag = "3")]
    commit: u64,
}

/// Whether the member with this log may ever have got an entry. A missing log holds no
/// entry. Blocks.
///
/// # Errors
///
/// [`Error`] if the directory or a file cannot be read.
pub fn holds_entries(log: &Dir) -> Result<bool, Error> {
    // The next file is begun when one is full.
    let head = match &files(log).map_err(|error| Error::io("list", log.path(), error))?[..] {
        [] => return Ok(false),
        [only] => {
            let mut head = Vec::new();
            let read = File::open(only).and_then(|file| file.take(HEAD_MAX).read_to_end(&mut head));
            read.map_err(|error| Error::io("read", only, error))?;
            head
        }
        [_, _, ..] => return Ok(true),
    };
    Ok(!is_bare(&head))
}

/// Removes the copies of files with a torn end. Nothing reads them, etcd never removes them, and
/// each has up to 64 MB, as a file of the log has. A missing log has none. Blocks.
///
/// # Errors
///
/// [`Error`] if the directory cannot be read, or a copy cannot be removed.
pub(super) fn remove_copies(log: &Dir) -> Result<(), Error> {
    if !log.path().is_dir() {
        return Ok(());
    }
    for name in log.names()?.iter().filter(|name| name.ends_with(COPY)) {
        log.remove(name)?;
    }
    Ok(())
}

fn files(log: &Dir) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(log.path()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| Ok(entry?.path()));
    let paths = paths.collect::<io::Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "wal")).collect())
}

/// Whether a log with this beginning ends without any entry, and without a snapshot that
/// etcd would begin with.
fn is_bare(mut log: &[u8]) -> bool {
    let (mut snapshot, mut decided) = (0, 0);
    while let Some((length, rest)) = log.split_first_chunk::<LENGTH>() {
        let length = u64::from_le_bytes(*length);
        if length == 0 {
            return snapshot == 0 || decided < snapshot;
        }
        let [.., top] = length.to_le_bytes();
        let padding = if top & 0x80 == 0 { 0 } else { usize::from(top & 0b111) };
        let Ok(length) = usize::try_from(length & !(0xff << 56)) else { return false };
        let Some((record, rest)) = rest.split_at_checked(length) else { return false };
        let Ok(record) = Record::decode(record) else { return false };
        let data = record.data.as_deref().unwrap_or_default();
        match record.kind {
            METADATA | CHECKSUM => {}
            STATE => match State::decode(data) {
                Ok(state) => decided = state.commit,
                Err(_damaged) => return false,
            },
            SNAPSHOT => match Snapshot::decode(data) {
                Ok(taken) => snapshot = snapshot.max(taken.index),
                Err(_damaged) => return false,
            },
            _ => return false,
        }
        log = rest.get(padding..).unwrap_or_default();
    }
    // More than the head, or torn.
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) const ENTRY: i64 = 2;

    /// In etcd's format: padded to eight bytes.
    pub(super) fn frame(kind: i64, data: &[u8]) -> Vec<u8> {
        let record = Record { kind, data: Some(data.to_vec()) }.encode_to_vec();
        let padding = record.len().next_multiple_of(8) - record.len();
        let mut length = u64::try_from(record.len()).unwrap();
        if padding > 0 {
            length |= (0x80 | u64::try_from(padding).unwrap()) << 56;
        }
        let mut frame = length.to_le_bytes().to_vec();
        frame.extend(record);
        frame.resize(frame.len() + padding, 0);
        frame
    }

    pub(super) fn snapshot(index: u64) -> Vec<u8> {
        frame(SNAPSHOT, &Snapshot { index }.encode_to_vec())
    }

    /// A log as it is made, before any entry is in it.
    pub(super) fn new() -> Vec<u8> {
        [frame(CHECKSUM, b""), frame(METADATA, b"member and cluster"), snapshot(0)].concat()
    }

    fn is_fresh(records: &[Vec<u8>]) -> bool {
        is_bare(&[&new()[..], &records.concat(), &[0; 64]].concat())
    }

    pub(super) fn state(commit: u64) -> Vec<u8> {
        frame(STATE, &State { commit }.encode_to_vec())
    }

    #[test]
    fn a_log_is_bare_until_an_entry_or_a_snapshot_is_in_it() {
        assert!(is_fresh(&[]));
        assert!(is_fresh(&[state(0), state(0)]));
        assert!(!is_fresh(&[state(0), frame(ENTRY, b"entry")]));
        assert!(!is_fresh(&[state(0), snapshot(7), state(7)]));
        assert!(!is_fresh(&[frame(6, b"of a later etcd")]));
    }

    #[test]
    fn a_snapshot_counts_once_its_last_entry_is_known_to_be_decided() {
        assert!(is_fresh(&[snapshot(7)]));
        assert!(is_fresh(&[state(0), snapshot(7)]));
        assert!(is_fresh(&[snapshot(7), state(6)]));
        assert!(!is_fresh(&[snapshot(7), state(8)]));
    }

    #[test]
    fn what_cannot_be_read_counts_as_an_entry() {
        assert!(!is_bare(b""));
        assert!(!is_bare(&new()), "nothing says that it ends there");
        let log = [&new()[..], &state(1)].concat();
        for torn in new().len()..log.len() {
            assert!(!is_bare(&log[..torn]), "{torn}");
        }
        assert!(!is_bare(&[0xff; 64]));
    }

    #[test]
    fn no_log_holds_nothing_and_two_files_hold_something() {
        let directory = tempfile::tempdir().unwrap();
        let log = Dir::private(directory.path().join("wal"));
        assert!(!holds_entries(&log).unwrap());
        log.create().unwrap();
        std::fs::write(log.path().join("0.tmp"), [0; 64]).unwrap();
        assert!(!holds_entries(&log).unwrap());
        let bare = [&new()[..], &[0; 64]].concat();
        std::fs::write(log.path().join("0000000000000000-0000000000000000.wal"), &bare).unwrap();
        assert!(!holds_entries(&log).unwrap());
        std::fs::write(log.path().join("0000000000000001-0000000000000008.wal"), &bare).unwrap();
        assert!(holds_entries(&log).unwrap());
    }

    #[test]
    fn the_copies_of_torn_files_are_removed_and_the_log_stays() {
        let directory = tempfile::tempdir().unwrap();
        let log = Dir::private(directory.path().join("wal"));
        remove_copies(&log).unwrap();
        assert!(!log.path().exists());
        log.create().unwrap();
        let [first, second] = [0, 1].map(|number| format!("{number:016x}-{number:016x}.wal"));
        let copies = [&first, &second].map(|name| format!("{name}.broken"));
        for name in ["0.tmp", &first, &second, &copies[0], &copies[1]] {
            std::fs::write(log.path().join(name), [0; 64]).unwrap();
        }
        remove_copies(&log).unwrap();
        assert_eq!(log.names().unwrap(), ["0.tmp", &first, &second]);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(log in proptest::collection::vec(any::<u8>(), 0..256)) {
            is_bare(&log);
            is_bare(&[new(), log].concat());
        }
    }
}

#[cfg(test)]
#[path = "wal_fuzz_tests.rs"]
mod fuzz_tests;
