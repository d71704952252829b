//! The recording of a disk: every write, discard and flush that reached it, in order.
//!
//! QEMU's block driver `blklogwrites` writes it, in the format of the kernel's target
//! dm-log-writes (`Documentation/admin-guide/device-mapper/log-writes.rst`):
//!
//! ```text
//! sector 0         super: magic, version, number of entries, bytes of a sector
//! sector 1         entry: first sector, sectors, flags, bytes of its own data
//! sector 2 ...     what was written, whole sectors; nothing for a discard
//! ...              the next entry
//! ```
//!
//! The super is written now and then, so its number of entries is not used: a
//! recording ends where an entry is all zeros, or where the file ends.
//!
//! Invariants:
//! - Each entry lies within the disk, and its data within the recording: a recording
//!   that violates this is rejected.
//!
//! What this module does not do: make disks out of a recording (`cut`).

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

/// The first bytes of a recording.
const MAGIC: u64 = 0x006a_7366_7773_6872;

/// The only version of the format.
const VERSION: u64 = 1;

/// Bytes of the super that are used.
const SUPER: usize = 28;

/// Bytes of an entry that are used.
const ENTRY: usize = 32;

/// A sector holds an entry, and no disk has larger ones.
const SECTOR_BYTES: [u32; 4] = [512, 1024, 2048, 4096];

/// A boot has some hundreds; one that fills a disk of gigabytes, some ten thousands.
const ENTRIES_MAX: usize = 1 << 20;

mod flag {
    pub(super) const FLUSH: u64 = 1;
    pub(super) const FUA: u64 = 2;
    pub(super) const DISCARD: u64 = 4;
    pub(super) const ALL: u64 = FLUSH | FUA | DISCARD;
}

/// Why a recording cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file.
    #[error("cannot read the recording")]
    Read(#[from] io::Error),
    /// It lacks the magic number.
    #[error("the file is not a recording of a disk")]
    Foreign,
    /// An entry that is impossible on the disk.
    #[error("entry {number} of the recording {why}")]
    Entry {
        /// Counted from 0.
        number: usize,
        /// The fault.
        why: &'static str,
    },
    /// More than a machine writes in a test.
    #[error("the recording has more than {ENTRIES_MAX} entries")]
    Long,
}

/// A request that reached the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Bytes, which are in the recording from here on.
    Write {
        /// Their place in the recording.
        data: u64,
        /// Whether the data was durable when the disk answered.
        durable: bool,
    },
    /// The place was given back, and reads as zeros.
    Discard,
    /// Everything before it is durable on the disk.
    Flush,
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The request.
    pub request: Request,
    /// First byte on the disk.
    pub at: u64,
    /// Bytes.
    pub length: u64,
    /// Its end in the recording.
    pub end: u64,
}

/// A whole recording, without the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    entries: Vec<Entry>,
}

impl Recording {
    /// Reads the recording of a disk of `disk` bytes.
    ///
    /// # Errors
    /// When `log` cannot be read, or holds an entry that is impossible on that disk.
    pub fn read(log: &mut (impl Read + Seek), disk: u64) -> Result<Self, Error> {
        let length = log.seek(SeekFrom::End(0))?;
        log.rewind()?;
        let mut head = [0; SUPER];
        if !filled(log, &mut head)? || number(&head, 0) != MAGIC || number(&head, 8) != VERSION {
            return Err(Error::Foreign);
        }
        let sector = u32::from_le_bytes([head[24], head[25], head[26], head[27]]);
        if !SECTOR_BYTES.contains(&sector) {
            return Err(Error::Foreign);
        }
        let sector = u64::from(sector);

        let mut entries = Vec::new();
        let mut at = sector;
        loop {
            log.seek(SeekFrom::Start(at))?;
            let mut head = [0; ENTRY];
            if !filled(log, &mut head)? || head == [0; ENTRY] {
                return Ok(Self { entries });
            }
            let read = entry(&head, sector, at, disk);
            let entry = read.map_err(|why| Error::Entry { number: entries.len(), why })?;
            if entry.end > length {
                // The machine ended while it was written.
                return Ok(Self { entries });
            }
            if entries.len() == ENTRIES_MAX {
                return Err(Error::Long);
            }
            at = entry.end;
            entries.push(entry);
        }
    }

    /// Every entry, in order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The runs of entries between two flushes: until the flush that ends one, the disk
    /// may lose any of its writes. The last may have no flush at its end.
    #[must_use]
    pub fn windows(&self) -> Vec<Range<usize>> {
        let flushes = self.entries.iter().enumerate();
        let flushes = flushes.filter(|(_, entry)| entry.request == Request::Flush);
        let ends = flushes.map(|(number, _)| number).chain([self.entries.len()]);
        let mut start = 0;
        let windows = ends.map(|end| {
            let window = start..end;
            start = end + 1;
            window
        });
        windows.filter(|window| !window.is_empty()).collect()
    }

    /// The last flush in the first `length` bytes of the recording: writes acknowledged
    /// at this length need no later flush.
    #[must_use]
    pub fn flushed(&self, length: u64) -> Option<usize> {
        let there = self.entries.partition_point(|entry| entry.end <= length);
        self.entries[..there].iter().rposition(|entry| entry.request == Request::Flush)
    }
}

/// Decodes an entry whose head is at `at` in the recording.
fn entry(head: &[u8; ENTRY], sector: u64, at: u64, disk: u64) -> Result<Entry, &'static str> {
    let [first, sectors, flags, own] = [0, 8, 16, 24].map(|field| number(head, field));
    if flags & !flag::ALL != 0 {
        return Err("has a flag that is not known");
    }
    if own != 0 {
        return Err("has data of its own, which is not supported");
    }
    let bytes = |sectors: u64| sectors.checked_mul(sector);
    let (first, length) = bytes(first).zip(bytes(sectors)).ok_or("is beyond any disk")?;
    if first.checked_add(length).is_none_or(|end| end > disk) {
        return Err("is beyond the end of the disk");
    }
    let data = at.checked_add(sector).ok_or("is beyond any recording")?;
    let (request, data_end) = match (flags & flag::FLUSH != 0, flags & flag::DISCARD != 0) {
        (true, false) if length == 0 => (Request::Flush, Some(data)),
        (true, _) => return Err("is a flush and another operation"),
        (false, true) => (Request::Discard, Some(data)),
        (false, false) => {
            let durable = flags & flag::FUA != 0;
            (Request::Write { data, durable }, data.checked_add(length))
        }
    };
    let end = data_end.ok_or("is beyond any recording")?;
    Ok(Entry { request, at: first, length, end })
}

/// Whether the input had enough bytes to fill `buffer`.
fn filled(log: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match log.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// The eight bytes at `at`, which the caller knows to be there.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    const SECTOR: u64 = 512;

    /// An entry as a test writes it down: sector, what is written there.
    #[derive(Clone, Debug)]
    pub(crate) enum Operation {
        Write(u64, Vec<u8>),
        Durable(u64, Vec<u8>),
        Discard(u64, u64),
        Flush,
    }

    /// The file that QEMU would have written.
    pub(crate) fn log(operations: &[Operation]) -> Vec<u8> {
        let mut log = Vec::new();
        let mut sector = |fields: &[u64], data: &[u8]| {
            let mut head: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
            head.resize(512, 0);
            log.extend(head);
            log.extend(data);
        };
        sector(&[MAGIC, VERSION, 0, SECTOR], &[]);
        for operation in operations {
            match operation {
                Operation::Write(at, data) => sector(&[*at, data.len() as u64 / 512, 0, 0], data),
                Operation::Durable(at, data) => sector(&[*at, data.len() as u64 / 512, 2, 0], data),
                Operation::Discard(at, sectors) => sector(&[*at, *sectors, 4, 0], &[]),
                Operation::Flush => sector(&[0, 0, 1, 0], &[]),
            }
        }
        log
    }

    fn read(log: &[u8], disk: u64) -> Result<Recording, Error> {
        Recording::read(&mut Cursor::new(log), disk)
    }

    fn written() -> Vec<Operation> {
        vec![
            Operation::Write(1, vec![b'a'; 1024]),
            Operation::Flush,
            Operation::Flush,
            Operation::Write(4, vec![b'b'; 512]),
            Operation::Discard(0, 2),
            Operation::Durable(7, vec![b'c'; 512]),
        ]
    }

    #[test]
    fn entries_are_where_qemu_puts_them() {
        let log = log(&written());
        let recording = read(&log, 8 * SECTOR).unwrap();
        let requests: Vec<_> = recording.entries().iter().map(|entry| entry.request).collect();
        assert_eq!(
            requests,
            [
                Request::Write { data: 1024, durable: false },
                Request::Flush,
                Request::Flush,
                Request::Write { data: 3584, durable: false },
                Request::Discard,
                Request::Write { data: 5120, durable: true },
            ]
        );
        let first = recording.entries()[0];
        assert_eq!((first.at, first.length, first.end), (512, 1024, 2048));
        assert_eq!(recording.entries().last().unwrap().end, log.len() as u64);
    }

    #[test]
    fn a_window_holds_what_no_flush_has_covered() {
        let recording = read(&log(&written()), 8 * SECTOR).unwrap();
        assert_eq!(recording.windows(), [0..1, 3..6]);
        assert_eq!(read(&log(&[]), 0).unwrap().windows(), Vec::<Range<usize>>::new());
    }

    #[test]
    fn the_last_flush_of_a_length_is_whole_within_it() {
        let recording = read(&log(&written()), 8 * SECTOR).unwrap();
        let [first, second] = [recording.entries()[1].end, recording.entries()[2].end];
        assert_eq!(recording.flushed(first - 1), None);
        assert_eq!(recording.flushed(first), Some(1));
        assert_eq!(recording.flushed(second), Some(2));
        assert_eq!(recording.flushed(u64::MAX), Some(2));
    }

    #[test]
    fn a_recording_ends_at_zeros_or_at_an_entry_that_was_not_finished() {
        let mut unfinished = log(&written());
        unfinished.pop();
        assert_eq!(read(&unfinished, 8 * SECTOR).unwrap().entries().len(), 5);
        let mut zeros = log(&written());
        zeros.extend([0; 4096]);
        assert_eq!(read(&zeros, 8 * SECTOR).unwrap().entries().len(), 6);
    }

    #[test]
    fn what_cannot_have_happened_is_refused() {
        let why = |change: &[(usize, u64)], disk: u64| {
            let mut log = log(&written());
            for (at, number) in change {
                log[*at..*at + 8].copy_from_slice(&number.to_le_bytes());
            }
            read(&log, disk).unwrap_err().to_string()
        };
        let whole = 8 * SECTOR;
        assert!(why(&[(0, 7)], whole).contains("not a recording"));
        assert!(why(&[(8, 2)], whole).contains("not a recording"));
        assert!(why(&[(24, 100)], whole).contains("not a recording"));
        assert_eq!(
            why(&[], 8 * SECTOR - 1),
            "entry 5 of the recording is beyond the end of the disk"
        );
        assert!(why(&[(512, u64::MAX)], whole).contains("beyond any disk"));
        assert!(why(&[(520, u64::MAX / 512)], whole).contains("beyond the end"));
        assert!(why(&[(528, 8)], whole).contains("flag"));
        assert!(why(&[(528, 1)], whole).contains("flush and another operation"));
        assert!(why(&[(536, 1)], whole).contains("data of its own"));
        assert!(matches!(read(b"", 0), Err(Error::Foreign)));
    }

    proptest! {
        #[test]
        fn entries_stay_within_disk_and_recording_whatever_the_file_holds(
            changes in proptest::collection::vec((512_usize..5632, any::<u8>()), 0..8),
            length in 512_usize..6000,
        ) {
            let mut log = log(&written());
            for (at, byte) in changes {
                log[at] = byte;
            }
            log.truncate(length);
            let Ok(recording) = read(&log, 8 * SECTOR) else { return Ok(()) };
            for entry in recording.entries() {
                prop_assert!(entry.at + entry.length <= 8 * SECTOR);
                prop_assert!(entry.end <= log.len() as u64);
                if let Request::Write { data, .. } = entry.request {
                    prop_assert!(data + entry.length <= entry.end);
                }
            }
        }
    }
}
