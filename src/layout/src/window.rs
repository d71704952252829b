//! A range of a disk, as a disk of its own that is only read: a partition in an image file.
//!
//! Invariants:
//! - Nothing outside of the range is read, whatever the reader seeks.
//! - A range that goes beyond the end of the disk is an error where it is read, and no end of a
//!   file.

use std::io::{self, Read, Seek, SeekFrom, Write};

/// A range of bytes of a disk.
#[derive(Debug)]
pub struct Window<D> {
    disk: D,
    start: u64,
    length: u64,
    at: u64,
    left: u64,
}

impl<D> Window<D> {
    /// `length` bytes from the byte `start` on.
    pub const fn new(disk: D, start: u64, length: u64) -> Self {
        Self { disk, start, length, at: 0, left: u64::MAX }
    }

    /// The same, of which at most so many bytes are read in all: a damaged file system may have
    /// circles.
    #[must_use]
    pub fn at_most(self, bytes: u64) -> Self {
        Self { left: bytes, ..self }
    }
}

impl<D: Read + Seek> Read for Window<D> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.length.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(room);
        if wanted == 0 {
            return Ok(0);
        }
        let left = self.left.checked_sub(wanted as u64);
        self.left = left.ok_or_else(|| io::Error::other("its file system is damaged"))?;
        let place = self.start.checked_add(self.at).ok_or(io::ErrorKind::InvalidInput)?;
        self.disk.seek(SeekFrom::Start(place))?;
        let count = self.disk.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut short"));
        }
        self.at += count as u64;
        Ok(count)
    }
}

/// The library that reads a FAT requires a writer; this one rejects every write.
impl<D> Write for Window<D> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "opened to be looked at"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<D> Seek for Window<D> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> io::Cursor<Vec<u8>> {
        io::Cursor::new((0..100).collect())
    }

    #[test]
    fn a_range_is_read_from_its_beginning_to_its_end_and_no_further() {
        let mut window = Window::new(disk(), 10, 20);
        let mut read = Vec::new();
        window.read_to_end(&mut read).unwrap();
        assert_eq!(read, (10..30).collect::<Vec<_>>());
        assert_eq!(window.seek(SeekFrom::End(-2)).unwrap(), 18);
        read.clear();
        window.read_to_end(&mut read).unwrap();
        assert_eq!(read, [28, 29]);
        assert_eq!(window.seek(SeekFrom::Start(u64::MAX)).unwrap(), u64::MAX);
        assert_eq!(window.read(&mut [0; 4]).unwrap(), 0);
        assert!(window.seek(SeekFrom::Current(1)).is_err());
        assert!(window.seek(SeekFrom::End(-21)).is_err());
        assert!(window.write(&[1]).is_err());
    }

    #[test]
    fn a_disk_that_ends_within_the_range_and_a_range_without_end_are_errors() {
        let mut cut = Window::new(disk(), 90, 20);
        let mut read = Vec::new();
        let error = cut.read_to_end(&mut read).unwrap_err();
        assert_eq!((error.kind(), read.len()), (io::ErrorKind::UnexpectedEof, 10));
        let mut far = Window::new(disk(), u64::MAX, 20);
        far.seek(SeekFrom::Start(5)).unwrap();
        assert!(far.read(&mut [0; 4]).is_err());
    }

    #[test]
    fn a_bound_counts_what_is_read_in_all() {
        let mut window = Window::new(disk(), 0, 100).at_most(10);
        for _ in 0..2 {
            window.seek(SeekFrom::Start(0)).unwrap();
            window.read_exact(&mut [0; 5]).unwrap();
        }
        window.seek(SeekFrom::Start(0)).unwrap();
        let error = window.read(&mut [0; 1]).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
    }
}
