//! The disk image: partition table, ESP, system.
//!
//! Invariants:
//! - The file is sparse: zeros are not stored.
//! - The file appears whole or not at all; a file that a machine has open keeps its
//!   content.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Seek as _, SeekFrom, Write as _},
    path::Path,
};

use gpt::{
    GptConfig,
    disk::LogicalBlockSize,
    mbr::ProtectiveMBR,
    partition::Partition,
    partition_types::{OperatingSystem, Type},
};

use crate::{
    atomic,
    error::{At as _, Error, Result},
    layout::{Layout, SECTOR},
};

/// Zeros are looked for in pieces of this size.
const PIECE: usize = 64 << 10;

/// Writes an image to `path`.
pub(crate) fn write(path: &Path, layout: &Layout, parts: &mut [&mut dyn io::Read]) -> Result<()> {
    atomic::replace(path, |draft| write_draft(draft, layout, parts))
}

fn write_draft(path: &Path, layout: &Layout, parts: &mut [&mut dyn io::Read]) -> Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .at("create", path)?;
    file.set_len(layout.size).at("size", path)?;
    for (partition, part) in layout.partitions.iter().zip(parts) {
        copy(&mut **part, &mut file, partition.start).at("write", path)?;
    }
    write_table(path, &mut file, layout)
}

/// Copies a part to its place, leaving holes for zeros.
fn copy(part: &mut dyn io::Read, file: &mut File, start: u64) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    let mut place = start;
    loop {
        let count = fill(part, &mut piece)?;
        if count == 0 {
            return Ok(());
        }
        if piece[..count].iter().any(|byte| *byte != 0) {
            file.seek(SeekFrom::Start(place))?;
            file.write_all(&piece[..count])?;
        }
        place += count as u64;
    }
}

/// Reads until the buffer is full or the source is at its end.
fn fill(source: &mut dyn io::Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match source.read(&mut buffer[count..])? {
            0 => break,
            more => count += more,
        }
    }
    Ok(count)
}

fn write_table(path: &Path, file: &mut File, layout: &Layout) -> Result<()> {
    let failed = |source| Error::Gpt { path: path.to_owned(), source };
    let sectors = u32::try_from(layout.size / SECTOR - 1).unwrap_or(u32::MAX);
    ProtectiveMBR::with_lb_size(sectors)
        .overwrite_lba0(file)
        .map_err(|error| failed(gpt::GptError::from(io::Error::other(error.to_string()))))?;
    let mut table = GptConfig::new()
        .writable(true)
        .logical_block_size(LogicalBlockSize::Lb512)
        .create_from_device(file, Some(layout.disk_guid))
        .map_err(failed)?;
    let entries: BTreeMap<u32, Partition> = (1..)
        .zip(&layout.partitions)
        .map(|(index, partition)| {
            let entry = Partition {
                part_type_guid: Type { guid: partition.kind.type_guid, os: OperatingSystem::None },
                part_guid: partition.guid,
                first_lba: partition.start / SECTOR,
                last_lba: (partition.start + partition.length) / SECTOR - 1,
                flags: 0,
                name: partition.kind.name.to_owned(),
            };
            (index, entry)
        })
        .collect();
    table.update_partitions(entries).map_err(failed)?;
    table.write().map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read as _, os::unix::fs::MetadataExt as _};

    use polis_layout::Window;

    use super::*;
    use crate::layout;

    #[test]
    fn an_image_has_its_parts_in_place_and_stores_no_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let layout = layout::plan("seed", 1 << 20, 4 << 30).unwrap();
        write(&path, &layout, &mut [&mut &b"esp"[..], &mut &[7; 1 << 20][..]]).unwrap();
        let disk = GptConfig::new().open(&path).unwrap();
        assert_eq!(*disk.guid(), layout.disk_guid);
        let names: Vec<_> = disk.partitions().values().map(|entry| entry.name.clone()).collect();
        assert_eq!(names, ["POLIS-ESP", "POLIS-SYSTEM-A", "POLIS-SYSTEM-B"]);
        let system = &layout.partitions[1];
        let mut window = Window::new(File::open(&path).unwrap(), system.start, 10);
        let mut read = Vec::new();
        window.read_to_end(&mut read).unwrap();
        assert_eq!(read, [7; 10]);
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 4 << 30);
        assert!(metadata.blocks() * 512 < 4 << 20, "{} blocks", metadata.blocks());
    }

    /// A disk with an ESP and nothing else.
    fn small() -> Layout {
        let layout = layout::plan("seed", 1 << 20, 4 << 30).unwrap();
        let esp = layout.partitions[0];
        Layout { partitions: vec![esp], size: esp.start + esp.length + (1 << 20), ..layout }
    }

    #[test]
    fn the_same_parts_give_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let layout = small();
        let [one, two] = ["one", "two"].map(|name| {
            let path = folder.path().join(name);
            write(&path, &layout, &mut [&mut &b"esp"[..]]).unwrap();
            crate::digest::sha256(&path).unwrap()
        });
        assert_eq!(one, two);
    }

    #[test]
    fn a_part_that_cannot_be_read_leaves_nothing_behind() {
        struct Broken;
        impl io::Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let layout = small();
        assert!(write(&folder.path().join("disk"), &layout, &mut [&mut Broken]).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
