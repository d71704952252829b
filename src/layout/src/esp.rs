//! The EFI system partition: writing one, and reading files from one.
//!
//! The file system is made in memory, up to the last byte that is not zero: it holds a
//! handful of files, and a sparse file does not store the rest either.
//!
//! Every file that the machine writes later is there from the beginning, at its full size
//! and without content: the machine writes in place only, so that no power cut can harm the
//! file system (`files::in_place` of `polis-base`).
//!
//! Invariants:
//! - Every time stamp is the earliest that FAT can express; the volume's ID follows
//!   from the seed.
//! - A sector of the file system is one of the disk: Linux and firmware mount no other.

use std::io::{self, Read, Seek, SeekFrom, Write};

use fatfs::{
    FatType, FileSystem, FormatVolumeOptions, FsOptions, LossyOemCpConverter, NullTimeProvider,
    StdIoWrapper,
};

use polis_base::files::{Esp, in_place};
use sha2::{Digest as _, Sha256};

use crate::partitions::ESP_SIZE;

/// Why an ESP cannot be made or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} on the ESP")]
pub struct Error {
    /// The operation, with its object.
    pub what: String,
    /// The error of the file system's library.
    pub source: io::Error,
}

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The path of the program that firmware starts.
pub const LOADER: &str = "EFI/BOOT/BOOTX64.EFI";
/// The path of the node's parameters.
pub const PARAMETERS: &str = "polis/parameters.pb";

/// Volume label, padded as FAT wants it.
const LABEL: [u8; 11] = *b"POLIS-ESP  ";
/// Bytes a cluster, which are a sector of a disk of either kind or several: FAT32 needs at
/// least 65,525 clusters, and this gives 131,000.
const CLUSTER: u32 = 4096;

/// A file: its path and its content.
pub type Entry = (String, Vec<u8>);

type Fat<D> = FileSystem<StdIoWrapper<D>, NullTimeProvider, LossyOemCpConverter>;

/// The bytes of an ESP with these files, and with room for those that the machine writes, for
/// a disk with sectors of so many bytes; the rest of the partition may have any content.
///
/// # Errors
///
/// The files do not fit, or have names that FAT does not.
pub fn build(seed: &str, sector: u64, files: &[Entry]) -> Result<Vec<u8>> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: fatfs::Error<io::Error>| Error { what, source: error.into() }
    };
    let sectors = u32::try_from(ESP_SIZE / sector).unwrap_or(u32::MAX);
    let sector = u16::try_from(sector).unwrap_or_default();
    let mut disk = StdIoWrapper::new(Memory::new(ESP_SIZE));
    let options = FormatVolumeOptions::new()
        .fat_type(FatType::Fat32)
        .bytes_per_sector(sector)
        .bytes_per_cluster(CLUSTER)
        .total_sectors(sectors)
        .volume_id(volume_id(seed))
        .volume_label(LABEL);
    fatfs::format_volume(&mut disk, options).map_err(failed("make the file system"))?;
    let mut storage = disk.into_inner();
    storage.position = 0;
    {
        let fat: Fat<&mut Memory> = mount(&mut storage).map_err(failed("mount what was made"))?;
        for (path, content) in files {
            let what = format!("write {path}");
            add(&fat, path, content).map_err(failed(&what))?;
        }
        let blank = vec![0; usize::try_from(in_place::SIZE).unwrap_or_default()];
        for path in Esp::in_place() {
            let path = path.display().to_string();
            add(&fat, &path, &blank).map_err(failed(&format!("reserve {path}")))?;
        }
        // Counts the free clusters, and stores the count for other readers.
        fat.stats().map_err(failed("count what is free"))?;
        fat.unmount().map_err(failed("finish"))?;
    }
    Ok(storage.bytes)
}

/// A disk in memory that keeps what was written, and has zeros behind it.
struct Memory {
    bytes: Vec<u8>,
    size: u64,
    position: u64,
}

impl Memory {
    fn new(size: u64) -> Self {
        Self { bytes: Vec::new(), size, position: 0 }
    }

    /// How many of `wanted` bytes the disk has from the position on.
    fn clamp(&self, wanted: usize) -> usize {
        usize::try_from(self.size.saturating_sub(self.position)).unwrap_or(wanted).min(wanted)
    }

    /// The position in what is kept.
    fn at(&self) -> io::Result<usize> {
        usize::try_from(self.position).map_err(io::Error::other)
    }
}

impl Read for Memory {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.clamp(buffer.len());
        let kept = self.bytes.get(self.at()?..).unwrap_or_default();
        let kept = &kept[..kept.len().min(count)];
        let (written, blank) = buffer[..count].split_at_mut(kept.len());
        written.copy_from_slice(kept);
        blank.fill(0);
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for Memory {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let buffer = &buffer[..self.clamp(buffer.len())];
        let start = self.at()?;
        let end = start + buffer.len();
        if end > self.bytes.len() {
            // Zeros at the end are what the disk has anyway.
            if buffer.iter().all(|byte| *byte == 0) && start >= self.bytes.len() {
                self.position += buffer.len() as u64;
                return Ok(buffer.len());
            }
            self.bytes.resize(end, 0);
        }
        self.bytes[start..end].copy_from_slice(buffer);
        self.position += buffer.len() as u64;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Memory {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.size.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// The files without content, in one text: an input of the image.
#[must_use]
pub fn reserved() -> String {
    format!("{:?} of {} bytes", Esp::in_place(), in_place::SIZE)
}

fn mount<D: Read + Write + Seek>(disk: D) -> Result<Fat<D>, fatfs::Error<io::Error>> {
    FileSystem::new(disk, FsOptions::new().time_provider(NullTimeProvider::new()))
}

fn add<D: Read + Write + Seek>(
    fat: &Fat<D>,
    path: &str,
    content: &[u8],
) -> Result<(), fatfs::Error<io::Error>> {
    let root = fat.root_dir();
    for (slash, _) in path.match_indices('/') {
        // Creating an existing folder opens it.
        root.create_dir(&path[..slash])?;
    }
    let mut file = root.create_file(path)?;
    fatfs::Write::write_all(&mut file, content)?;
    fatfs::Write::flush(&mut file)
}

/// The bytes of a file on an ESP; `None` if the file does not exist.
///
/// # Errors
///
/// The disk cannot be read, or has no FAT file system.
pub fn read(disk: impl Read + Write + Seek, path: &str) -> Result<Option<Vec<u8>>> {
    let failed = |error: fatfs::Error<io::Error>| Error {
        what: format!("read {path}"),
        source: error.into(),
    };
    let fat = mount(disk).map_err(failed)?;
    let root = fat.root_dir();
    let mut file = match root.open_file(path) {
        Ok(file) => file,
        Err(fatfs::Error::NotFound) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut content = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    loop {
        match fatfs::Read::read(&mut file, &mut chunk).map_err(failed)? {
            0 => return Ok(Some(content)),
            count => content.extend_from_slice(&chunk[..count]),
        }
    }
}

/// The names in a folder of an ESP, sorted; a folder that does not exist has none.
///
/// # Errors
///
/// The disk cannot be read, or has no FAT file system.
pub fn list(disk: impl Read + Write + Seek, path: &str) -> Result<Vec<String>> {
    let failed = |error: fatfs::Error<io::Error>| Error {
        what: format!("list {path}"),
        source: error.into(),
    };
    let fat = mount(disk).map_err(failed)?;
    let folder = match fat.root_dir().open_dir(path) {
        Ok(folder) => folder,
        Err(fatfs::Error::NotFound) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let names = folder.iter().map(|entry| Ok(entry?.file_name()));
    let mut names: Vec<String> = names.collect::<Result<_, _>>().map_err(failed)?;
    names.retain(|name| name != "." && name != "..");
    names.sort();
    Ok(names)
}

/// The volume's ID: 32 bits of the seed's hash.
fn volume_id(seed: &str) -> u32 {
    let hash = Sha256::digest(seed.as_bytes());
    u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The disk that `build` made, with the zeros behind it.
    fn disk(bytes: Vec<u8>) -> Memory {
        Memory { bytes, ..Memory::new(ESP_SIZE) }
    }

    #[test]
    fn files_are_read_back_and_the_same_files_give_the_same_bytes() {
        let loader = vec![5; 300_000];
        let files = [(LOADER, loader.clone()), (PARAMETERS, b"parameters".to_vec())];
        let files = files.map(|(path, content)| (path.to_owned(), content));
        let esp = build("seed", 512, &files).unwrap();
        assert!(esp.len() < 16 << 20, "{} bytes", esp.len());
        let content = |path: &str| read(disk(esp.clone()), path).unwrap();
        assert_eq!(content(LOADER), Some(loader.clone()));
        assert_eq!(content(PARAMETERS).unwrap(), b"parameters");
        assert_eq!(content("polis/other"), None);
        assert_eq!(list(disk(esp.clone()), "EFI/BOOT").unwrap(), ["BOOTX64.EFI"]);
        assert!(list(disk(esp.clone()), "EFI/Linux").unwrap().is_empty());
        for path in Esp::in_place() {
            let content = content(path.to_str().unwrap()).unwrap();
            assert!(content == vec![0; 256 << 10], "{}", path.display());
        }
        assert!(esp == build("seed", 512, &files).unwrap(), "two builds differ");
    }

    #[test]
    fn the_files_that_outsiders_know_have_their_names() {
        assert_eq!((LOADER, PARAMETERS), ("EFI/BOOT/BOOTX64.EFI", "polis/parameters.pb"));
        let files: Vec<_> = Esp::in_place().iter().map(|path| path.display().to_string()).collect();
        for promised in ["polis/sealed_configuration.pb", "polis/cluster_directory.pb"] {
            assert!(files.iter().any(|file| file == promised), "{promised}");
        }
        let reports = files.iter().filter(|file| file.starts_with("polis/guru/guru-"));
        assert_eq!(reports.count(), 8);
    }

    #[test]
    fn a_disk_with_large_sectors_gets_a_file_system_with_large_sectors() {
        let esp = build("seed", 4096, &[(LOADER.to_owned(), vec![5; 300_000])]).unwrap();
        assert_eq!(esp[11..13], 4096_u16.to_le_bytes());
        assert_eq!(read(disk(esp), LOADER).unwrap(), Some(vec![5; 300_000]));
    }

    #[test]
    fn more_than_fits_is_an_error() {
        let content = vec![1; usize::try_from(ESP_SIZE).unwrap()];
        assert!(build("seed", 512, &[(LOADER.to_owned(), content)]).is_err());
    }
}
