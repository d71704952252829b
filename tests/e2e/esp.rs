//! The ESP of a machine that is off, as a person with its disk can change it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::{Result, anyhow};
use fatfs::{FileSystem, FsOptions, LossyOemCpConverter, NullTimeProvider, StdIoWrapper};
use polis_base::files::in_place;

use crate::table::partition;

/// Its name in the partition table.
const NAME: &str = "POLIS-ESP";

type Fat = FileSystem<StdIoWrapper<Part>, NullTimeProvider, LossyOemCpConverter>;

/// The content of a file that the machine writes, in two copies; `None` if it has none.
pub(crate) fn record(disk: &Path, path: &str) -> Result<Option<Vec<u8>>> {
    let Some(bytes) = bytes(disk, path)? else { return Ok(None) };
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), bytes)?;
    Ok(in_place::read(file.path())?.content)
}

/// Gives a file that the machine writes this content, as the machine does.
pub(crate) fn write_record(disk: &Path, path: &str, content: &[u8]) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    in_place::write(file.path(), Some(content))?;
    write(disk, path, &std::fs::read(file.path())?)
}

/// The bytes of the file, if there is one.
pub(crate) fn bytes(disk: &Path, path: &str) -> Result<Option<Vec<u8>>> {
    with(disk, |fat| {
        let mut file = match fat.root_dir().open_file(path) {
            Ok(file) => file,
            Err(fatfs::Error::NotFound) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut content = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            match fatfs::Read::read(&mut file, &mut chunk)? {
                0 => return Ok(Some(content)),
                count => content.extend_from_slice(&chunk[..count]),
            }
        }
    })
}

/// Replaces the file; makes its folder.
pub(crate) fn write(disk: &Path, path: &str, content: &[u8]) -> Result<()> {
    with(disk, |fat| {
        if let Some((folder, _name)) = path.rsplit_once('/') {
            fat.root_dir().create_dir(folder)?;
        }
        let mut file = fat.root_dir().create_file(path)?;
        file.truncate()?;
        fatfs::Write::write_all(&mut file, content)?;
        fatfs::Write::flush(&mut file)
    })
}

/// Where the disk has the partition, in bytes.
pub(crate) fn extent(disk: &Path) -> Result<Range<u64>> {
    let part = part(disk)?;
    Ok(part.start..part.start + part.length)
}

/// Where the disk has both tables of the file system, in bytes.
pub(crate) fn tables(disk: &Path) -> Result<Range<u64>> {
    let mut part = part(disk)?;
    let mut boot = [0; 512];
    part.read_exact(&mut boot)?;
    let short = |at: usize| u64::from(u16::from_le_bytes([boot[at], boot[at + 1]]));
    let (sector, reserved, tables) = (short(11), short(14), u64::from(boot[16]));
    let length = short(36) | short(38) << 16;
    let start = part.start + reserved * sector;
    Ok(start..start + tables * length * sector)
}

/// Removes the file.
pub(crate) fn remove(disk: &Path, path: &str) -> Result<()> {
    with(disk, |fat| fat.root_dir().remove(path))
}

fn with<T>(
    disk: &Path,
    work: impl FnOnce(&Fat) -> Result<T, fatfs::Error<io::Error>>,
) -> Result<T> {
    let failed =
        |error: fatfs::Error<io::Error>| anyhow!("the ESP of {}: {error:?}", disk.display());
    let options = FsOptions::new().time_provider(NullTimeProvider::new());
    let part = StdIoWrapper::new(part(disk)?);
    let fat: Fat = FileSystem::new(part, options).map_err(failed)?;
    let done = work(&fat).map_err(failed)?;
    fat.unmount().map_err(failed)?;
    Ok(done)
}

fn part(disk: &Path) -> Result<Part> {
    let (start, length) = partition(disk, NAME)?;
    let file = File::options().read(true).write(true).open(disk)?;
    Ok(Part { file, start, length, at: 0 })
}

/// A stretch of a file.
struct Part {
    file: File,
    start: u64,
    length: u64,
    at: u64,
}

impl Part {
    fn seek_file(&mut self) -> io::Result<u64> {
        self.file.seek(SeekFrom::Start(self.start + self.at))?;
        Ok(self.length - self.at)
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.seek_file()?;
        let count = (&self.file).take(left).read(buffer)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Write for Part {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let left = usize::try_from(self.seek_file()?).unwrap_or(usize::MAX);
        let count = self.file.write(&buffer[..buffer.len().min(left)])?;
        self.at += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Part {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
        };
        let at = at.filter(|at| *at <= self.length).ok_or(io::ErrorKind::InvalidInput)?;
        self.at = at;
        Ok(at)
    }
}
