//! The two ends of a disk in memory: both copies of a partition table, for the `gpt` crate to read
//! and write.
//!
//! ```text
//! disk --Ends--> View <--read, written by the crate--> both copies in memory --commit--> disk
//! ```
//!
//! Invariants:
//! - The crate writes to the copies in memory alone, and only `commit` and `commit_head` write to
//!   the disk: the entries of the backup, its header, then the primary copy.
//! - A header is checked before the crate sees it.
//!
//! What this module does not do: read what the entries say (`table`).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;

use super::{DISK_SIZE_MIN, ENTRIES, ENTRY_SIZE, Error, entry_blocks};
use polis_base::sys::block;

/// How a header begins.
const SIGNATURE: &[u8] = b"EFI PART";

/// The size of a disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) block_size: u64,
    pub(super) blocks: u64,
}

impl Geometry {
    pub(super) fn of(disk: &File) -> Result<Self, Error> {
        let io = |source| Error::Io { operation: "measure", source };
        let size = block::size(disk).map_err(io)?;
        let block_size = block::logical_block_size(disk).map_err(io)?;
        if !matches!(block_size, 512 | 4096) {
            return Err(Error::BlockSize(block_size));
        }
        if size < DISK_SIZE_MIN {
            return Err(Error::TooSmall(size));
        }
        let block_size = u64::from(block_size);
        Ok(Self { block_size, blocks: size / block_size })
    }

    /// Bytes of the disk, in whole blocks.
    fn size(self) -> u64 {
        self.blocks * self.block_size
    }

    /// Bytes of a copy of the table: its header and its entries.
    pub(super) fn copy(self) -> u64 {
        (1 + entry_blocks(self.block_size)) * self.block_size
    }
}

/// The two ends of a disk, where the copies of the table are. One that cannot be read is
/// zeros, beside the error.
pub(super) struct Ends {
    pub(super) head: Vec<u8>,
    pub(super) tail: Vec<u8>,
    pub(super) head_error: Option<io::Error>,
    pub(super) tail_error: Option<io::Error>,
}

impl Ends {
    pub(super) fn read(disk: &File, geometry: Geometry) -> Self {
        let copy = geometry.copy();
        let head = read_at(disk, 0, copy + geometry.block_size);
        let tail = read_at(disk, geometry.size() - copy, copy);
        Self::of(geometry, head, tail)
    }

    pub(super) fn of(
        geometry: Geometry,
        head: io::Result<Vec<u8>>,
        tail: io::Result<Vec<u8>>,
    ) -> Self {
        let copy = geometry.copy();
        let or_zeros = |end: io::Result<Vec<u8>>, length| match end {
            Ok(bytes) => (bytes, None),
            Err(error) => (zeros(length), Some(error)),
        };
        let (head, head_error) = or_zeros(head, copy + geometry.block_size);
        let (tail, tail_error) = or_zeros(tail, copy);
        Self { head, tail, head_error, tail_error }
    }
}

fn zeros(length: u64) -> Vec<u8> {
    vec![0; usize::try_from(length).unwrap_or_default()]
}

/// The disk as the crate sees it: both copies of the table in memory, all else
/// out of reach for writing.
#[derive(Clone)]
pub(super) struct View<'a> {
    disk: &'a File,
    head: Vec<u8>,
    pub(super) tail: Vec<u8>,
    pub(super) tail_start: u64,
    size: u64,
    position: u64,
}

impl<'a> View<'a> {
    /// The disk as it is without a table.
    pub(super) fn blank(disk: &'a File) -> Result<(Self, Geometry), Error> {
        let geometry = Geometry::of(disk)?;
        let (size, copy) = (geometry.size(), geometry.copy());
        let (head, tail) = (zeros(copy + geometry.block_size), zeros(copy));
        Ok((Self { disk, head, tail, tail_start: size - copy, size, position: 0 }, geometry))
    }

    /// The disk with these two ends.
    pub(super) fn new(
        disk: &'a File,
        geometry: Geometry,
        head: Vec<u8>,
        mut tail: Vec<u8>,
    ) -> Result<Self, Error> {
        let Geometry { block_size, .. } = geometry;
        let (size, copy) = (geometry.size(), geometry.copy());
        let tail_start = size - copy;
        let header = bytes_at(&head, block_size, block_size).unwrap_or_default();
        let primary = plain_header(header);
        // The content of the end may be older than the disk's use for us. It is
        // replaced whenever we write, and must not mislead the crate before.
        let backup = bytes_at(&tail, copy - block_size, block_size).unwrap_or_default();
        let no_backup = plain_header(backup).is_err();
        if no_backup {
            tail.fill(0);
        }
        match primary {
            // A lost header; one that is there and strange is somebody's.
            Err(_lost) if !header.starts_with(SIGNATURE) && !no_backup => {}
            primary => primary.map_err(Error::Unusual)?,
        }
        Ok(Self { disk, head, tail, tail_start, size, position: 0 })
    }

    /// The same without the primary header, for the crate to read the backup.
    pub(super) fn without_primary(mut self, geometry: Geometry) -> Self {
        let length = usize::try_from(geometry.block_size).unwrap_or_default();
        if let Some(header) = slice(&mut self.head, geometry.block_size, length) {
            header.fill(0);
        }
        self
    }

    /// Puts both copies on the disk.
    pub(super) fn commit(self, geometry: Geometry) -> Result<(), Error> {
        let entries = geometry.copy() - geometry.block_size;
        let (entries, header) = self.tail.split_at(usize::try_from(entries).unwrap_or_default());
        self.put(entries, self.tail_start)?;
        self.put(header, self.tail_start + entries.len() as u64)?;
        self.commit_head()
    }

    /// Puts the primary copy on the disk.
    pub(super) fn commit_head(self) -> Result<(), Error> {
        self.put(&self.head, 0)
    }

    fn put(&self, bytes: &[u8], at: u64) -> Result<(), Error> {
        let io = |source| Error::Io { operation: "write the partition table to", source };
        self.disk.write_all_at(bytes, at).map_err(io)?;
        self.disk.sync_data().map_err(io)
    }

    /// The window that `length` bytes from the position on lie in.
    fn window(&mut self, length: usize) -> Option<&mut [u8]> {
        let position = self.position;
        if let Some(offset) = position.checked_sub(self.tail_start) {
            return slice(&mut self.tail, offset, length);
        }
        slice(&mut self.head, position, length)
    }
}

fn slice(bytes: &mut [u8], offset: u64, length: usize) -> Option<&mut [u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get_mut(start..start.checked_add(length)?)
}

fn bytes_at(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(length).ok()?)?)
}

pub(super) fn read_at(disk: &File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    disk.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// Refuses headers whose counts the crate would trust too far.
fn plain_header(header: &[u8]) -> Result<(), String> {
    if !header.starts_with(SIGNATURE) {
        return Err("it has no GPT header".to_owned());
    }
    let number = |offset| {
        let bytes = header.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        u32::from_le_bytes(bytes.unwrap_or_default())
    };
    let (entries, entry_size) = (number(80), number(84));
    if (entries, entry_size) != (ENTRIES, ENTRY_SIZE) {
        return Err(format!(
            "it has {entries} entries of {entry_size} bytes instead of {ENTRIES} of {ENTRY_SIZE}"
        ));
    }
    Ok(())
}

impl std::fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Read for View<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size.saturating_sub(self.position)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let buffer = &mut buffer[..length];
        match self.window(length) {
            Some(window) => buffer.copy_from_slice(window),
            // A backup that the disk has outgrown.
            None => self.disk.read_exact_at(buffer, self.position)?,
        }
        self.position += length as u64;
        Ok(length)
    }
}

impl Write for View<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let window = self.window(bytes.len());
        let window = window.ok_or_else(|| io::Error::other("a write outside the table"))?;
        window.copy_from_slice(bytes);
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for View<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
            SeekFrom::End(offset) => self.size.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}
