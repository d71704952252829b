//! The files of the ring: their names, and how they are listed, read and removed.
//!
//! `00000007-000002.log` is the third segment of the seventh boot. Other files in the
//! directory are left in place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::SEGMENT_MAX;
use super::record::{Head, Record};

/// A segment may exceed its size by one batch; a larger file is foreign.
const READ_MAX: u64 = 4 * SEGMENT_MAX;

/// The identity of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id {
    /// The number of the boot, counted since the disk was made.
    pub(super) boot: u64,
    /// The number of the segment in its boot.
    pub(super) number: u64,
}

impl Id {
    fn parse(name: &str) -> Option<Self> {
        let (boot, number) = name.strip_suffix(".log")?.split_once('-')?;
        let digits = |text: &str| {
            let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            // Behind the largest number there is none for the next segment.
            plain.then(|| text.parse().ok().filter(|number| *number < u64::MAX))?
        };
        let id = Self { boot: digits(boot)?, number: digits(number)? };
        // One name per segment: another spelling would be a second one.
        (id.name() == name).then_some(id)
    }

    fn name(self) -> String {
        format!("{:08}-{:06}.log", self.boot, self.number)
    }

    /// Its path.
    pub(super) fn path(self, dir: &Path) -> PathBuf {
        dir.join(self.name())
    }

    /// Creates it, readable by the node alone.
    pub(super) fn create(self, dir: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).create_new(true).mode(0o600).open(self.path(dir))
    }
}

/// One segment on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) id: Id,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// All segments in `dir`, in order.
pub(super) fn list(dir: &Path) -> io::Result<Vec<Segment>> {
    let mut segments = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(Id::parse) else { continue };
        match entry.metadata() {
            Ok(metadata) if metadata.is_file() => {
                let bytes = metadata.len();
                segments.push(Segment { id, path: entry.path(), bytes });
            }
            // Gone meanwhile, or foreign.
            Ok(_) | Err(_) => {}
        }
    }
    segments.sort_by_key(|segment| segment.id);
    Ok(segments)
}

impl Segment {
    /// Every valid record; empty for a segment that was removed meanwhile.
    pub(super) fn records(&self) -> io::Result<impl DoubleEndedIterator<Item = Record>> {
        let bytes = self.read(0, READ_MAX)?;
        let mut records = Vec::new();
        records.extend(bytes.split(|byte| *byte == b'\n').filter_map(Record::parse));
        Ok(records.into_iter())
    }

    /// The content of its first line.
    pub(super) fn head(&self) -> io::Result<Option<Head>> {
        /// Longer than any head.
        const HEAD_MAX: u64 = 4096;
        let bytes = self.read(0, HEAD_MAX)?;
        let line = bytes.split(|byte| *byte == b'\n').next().and_then(Record::parse);
        Ok(line.and_then(|record| match record {
            Record::Head(head) => Some(head),
            Record::Entry(_) | Record::Lost(_) => None,
        }))
    }

    /// When its last entry was written.
    pub(super) fn last(&self) -> io::Result<Option<Duration>> {
        let bytes = self.read(0, READ_MAX)?;
        let mut lines = bytes.rsplit(|byte| *byte == b'\n').filter_map(Record::parse);
        Ok(lines.find_map(|record| match record {
            Record::Entry(line) => Some(line.at()),
            Record::Head(_) | Record::Lost(_) => None,
        }))
    }

    /// At most `max` bytes from `offset` on; no byte if the segment was removed meanwhile.
    pub(super) fn read(&self, offset: u64, max: u64) -> io::Result<Vec<u8>> {
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.take(max).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// Removes a segment; a missing one is not an error.
pub(super) fn remove(dir: &Path, id: Id) -> io::Result<()> {
    match fs::remove_file(id.path(dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_our_names_are_segments_and_they_are_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "00000002-000000.log",
            "00000001-000010.log",
            "00000001-000009.log",
            "1-1.log",
            "notes.txt",
            "-.log",
        ] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        fs::create_dir(dir.path().join("00000009-000000.log")).unwrap();
        let found: Vec<_> =
            list(dir.path()).unwrap().iter().map(|it| (it.id.boot, it.id.number)).collect();
        assert_eq!(found, [(1, 9), (1, 10), (2, 0)]);
    }

    proptest! {
        #[test]
        fn a_name_reads_back_and_arbitrary_text_never_panics(boot: u64, number: u64, input in any::<String>()) {
            let id = Id { boot, number };
            prop_assert_eq!(Id::parse(&id.name()), Some(id));
            let _id = Id::parse(&input);
            let _id = Id::parse(&format!("{input}.log"));
        }
    }
}

#[cfg(test)]
#[path = "segment_fuzz_tests.rs"]
mod fuzz_tests;
