//! The kernel's log, read one record at a time.
//!
//! `init` searches it for the cause of a failure, and `node` copies it into the log
//! tree.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use rustix::fs::OFlags;

/// The kernel never hands out a longer record.
const RECORD_MAX: usize = 8192;

/// Where reading starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// The oldest record that the kernel still has.
    Start,
    /// The next one to be written.
    Now,
}

/// One record of the kernel's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// `syslog` level: 0 is an emergency, 7 is for debugging.
    pub level: u8,
    /// `syslog` facility: 0 is the kernel, anything else wrote to `/dev/kmsg`.
    pub facility: u32,
    /// Consecutive, so a gap shows what was overwritten.
    pub sequence: u64,
    /// Since the kernel started.
    pub time: Duration,
    /// One line.
    pub text: String,
}

impl Record {
    /// Reads a record as `/dev/kmsg` gives it. `None` if it is not one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let (head, body) = text.split_once(';')?;
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let sequence = fields.next()?.parse().ok()?;
        let time = Duration::from_micros(fields.next()?.parse().ok()?);
        // Lines after the first are the record's dictionary, not its text.
        let text = body.lines().next().unwrap_or("").to_owned();
        let level = u8::try_from(priority & 7).ok()?;
        Some(Self { level, facility: priority >> 3, sequence, time, text })
    }
}

/// The open log of the kernel.
#[derive(Debug)]
pub struct Reader {
    file: File,
}

impl Reader {
    /// Opens the log. Reading never blocks.
    ///
    /// # Errors
    ///
    /// When `/dev/kmsg` is not there or not allowed.
    pub fn open(from: From) -> io::Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open("/dev/kmsg")?;
        if from == From::Now {
            file.seek(SeekFrom::End(0))?;
        }
        Ok(Self { file })
    }

    /// The next record, or `None` after the newest one. Records that the kernel
    /// overwrote, and malformed ones, are skipped.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_record(&mut self) -> io::Result<Option<Record>> {
        let mut buffer = [0; RECORD_MAX];
        loop {
            match self.file.read(&mut buffer) {
                Ok(length) => {
                    if let Some(record) = Record::parse(&buffer[..length]) {
                        return Ok(Some(record));
                    }
                    if length == 0 {
                        return Ok(None);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    // EPIPE: the record was overwritten before it was read.
                    io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
    }
}

impl AsFd for Reader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_is_read_without_its_dictionary() {
        let bytes =
            b"3,412,1234567,-;virtio_blk virtio1: [vda] 1024\n SUBSYSTEM=virtio\n DEVICE=+v";
        let record = Record::parse(bytes).unwrap();
        assert_eq!((record.level, record.facility, record.sequence), (3, 0, 412));
        assert_eq!(record.time, Duration::from_micros(1_234_567));
        assert_eq!(record.text, "virtio_blk virtio1: [vda] 1024");
    }

    #[test]
    fn the_facility_tells_writers_from_the_kernel() {
        assert_eq!(Record::parse(b"30,7,1,-;hello").unwrap().facility, 3);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _record = Record::parse(&bytes);
        }
    }
}
