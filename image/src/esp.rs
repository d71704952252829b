//! The EFI system partition: writing one, and reading files from one.
//!
//! The file system is made in memory and is small: a step or a test needs a handful of
//! files, and the rest of it is zero, which a sparse file does not store.
//!
//! Every file that the machine writes later is there from the beginning, at its full size
//! and without content: the machine writes in place only, so that no power cut can harm the
//! file system (`files::in_place` of `polis-base`).
//!
//! Invariants:
//! - Every time stamp is the earliest that FAT can express; the volume's ID follows
//!   from the seed.

use std::io::{self, Cursor, Read, Seek, Write};

use fatfs::{
    FatType, FileSystem, FormatVolumeOptions, FsOptions, LossyOemCpConverter, NullTimeProvider,
    StdIoWrapper,
};

use polis_base::files::{Esp, in_place};

use crate::{
    digest,
    error::{Error, Result},
    layout::{ESP_SIZE, SECTOR},
};

/// The path of the program that firmware starts.
pub(crate) const LOADER: &str = "EFI/BOOT/BOOTX64.EFI";
/// The path of the node's parameters.
pub(crate) const PARAMETERS: &str = "polis/parameters.pb";

/// Volume label, padded as FAT wants it.
const LABEL: [u8; 11] = *b"POLIS-ESP  ";
/// Bytes a cluster: FAT32 needs at least 65,525 clusters, and this gives 98,000.
const CLUSTER: u32 = 1024;

type Fat<D> = FileSystem<StdIoWrapper<D>, NullTimeProvider, LossyOemCpConverter>;

/// The bytes of an ESP with these files, and with room for those that the machine writes.
pub(crate) fn build(seed: &str, files: &[(&str, &[u8])]) -> Result<Vec<u8>> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: fatfs::Error<io::Error>| Error::Esp { what, source: error.into() }
    };
    let size = usize::try_from(ESP_SIZE).unwrap_or(usize::MAX);
    let sectors = u32::try_from(ESP_SIZE / SECTOR).unwrap_or(u32::MAX);
    let mut disk = StdIoWrapper::new(Cursor::new(vec![0; size]));
    let options = FormatVolumeOptions::new()
        .fat_type(FatType::Fat32)
        .bytes_per_cluster(CLUSTER)
        .total_sectors(sectors)
        .volume_id(volume_id(seed))
        .volume_label(LABEL);
    fatfs::format_volume(&mut disk, options).map_err(failed("make the file system"))?;
    let mut storage = disk.into_inner();
    storage.set_position(0);
    {
        let fat: Fat<&mut Cursor<Vec<u8>>> =
            mount(&mut storage).map_err(failed("mount what was made"))?;
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
    Ok(storage.into_inner())
}

/// The files without content, in one text: an input of the image.
pub(crate) fn reserved() -> String {
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
pub(crate) fn read(disk: impl Read + Write + Seek, path: &str) -> Result<Option<Vec<u8>>> {
    let failed = |error: fatfs::Error<io::Error>| Error::Esp {
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

/// The volume's ID: 32 bits of the seed's hash.
fn volume_id(seed: &str) -> u32 {
    u32::from_str_radix(&digest::hash(seed.as_bytes())[..8], 16).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_back_and_the_same_files_give_the_same_bytes() {
        let loader = vec![5; 300_000];
        let files: [(&str, &[u8]); 2] = [(LOADER, &loader), (PARAMETERS, b"parameters")];
        let esp = build("seed", &files).unwrap();
        assert_eq!(read(Cursor::new(esp.clone()), LOADER).unwrap(), Some(loader.clone()));
        assert_eq!(read(Cursor::new(esp.clone()), PARAMETERS).unwrap().unwrap(), b"parameters");
        assert_eq!(read(Cursor::new(esp.clone()), "polis/other").unwrap(), None);
        for path in Esp::in_place() {
            let content = read(Cursor::new(esp.clone()), path.to_str().unwrap()).unwrap().unwrap();
            assert!(content == vec![0; 256 << 10], "{}", path.display());
        }
        assert!(esp == build("seed", &files).unwrap(), "two builds differ");
    }

    #[test]
    fn more_than_fits_is_an_error() {
        let content = vec![1; usize::try_from(ESP_SIZE).unwrap()];
        assert!(matches!(build("seed", &[(LOADER, &content)]), Err(Error::Esp { .. })));
    }
}
