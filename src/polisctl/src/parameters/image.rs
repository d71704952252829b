//! Disk images with user data: writes one for NoCloud, and reads those with FAT.
//!
//! An image is whole in memory: it has a megabyte, or some.
//!
//! Invariants:
//! - The same content gives the same bytes.
//! - A damaged image is an error, and never an endless search.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};

use fatfs::{
    FileSystem, FormatVolumeOptions, FsOptions, LossyOemCpConverter, NullTimeProvider, StdIoWrapper,
};
use polis_wire::parameters::{BYTES_MAX, Source, disk};

/// The most bytes of an image that are read. Tools make some megabytes.
pub(super) const SIZE_MAX: u64 = 64 << 20;

/// The size of an image that is written: the largest parameters fit several times.
const SIZE: usize = 1 << 20;

/// The label of NoCloud, padded as FAT wants it.
const LABEL: [u8; 11] = *b"CIDATA     ";

type Fat<D> = FileSystem<StdIoWrapper<D>, NullTimeProvider, LossyOemCpConverter>;

/// The kind of disk whose first bytes these are, if it is one with user data.
pub(super) fn recognise(head: &[u8]) -> Option<(Source, disk::FileSystem)> {
    disk::recognise(|buffer, at| {
        let mut head = Cursor::new(head);
        head.set_position(at);
        head.read_exact(buffer)
    })
}

/// A NoCloud disk with this user data and empty metadata.
pub(super) fn nocloud(user_data: &[u8]) -> io::Result<Vec<u8>> {
    let mut image = StdIoWrapper::new(Cursor::new(vec![0; SIZE]));
    fatfs::format_volume(&mut image, FormatVolumeOptions::new().volume_label(LABEL))?;
    let mut image = image.into_inner();
    image.set_position(0);
    {
        let fat = mount(&mut image)?;
        for (name, content) in [("meta-data", &b""[..]), ("user-data", user_data)] {
            let mut file = fat.root_dir().create_file(name)?;
            fatfs::Write::write_all(&mut file, content)?;
            fatfs::Write::flush(&mut file)?;
        }
        fat.unmount()?;
    }
    Ok(image.into_inner())
}

/// A file of a disk with FAT, up to a byte more than node parameters may have; `None` if the
/// disk does not have it.
pub(super) fn file(image: Vec<u8>, path: &str) -> io::Result<Option<Vec<u8>>> {
    /// A search reads each part of a sound image a few times at most.
    const TIMES: u64 = 16;
    let left = image.len() as u64 * TIMES;
    let fat = mount(Patient { image: Cursor::new(image), left })?;
    let mut file = match fat.root_dir().open_file(path) {
        Ok(file) => file,
        Err(fatfs::Error::NotFound) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut content = Vec::new();
    let mut chunk = [0; 4096];
    while content.len() as u64 <= BYTES_MAX {
        match fatfs::Read::read(&mut file, &mut chunk)? {
            0 => break,
            count => content.extend_from_slice(&chunk[..count]),
        }
    }
    Ok(Some(content))
}

fn mount<D: Read + Write + Seek>(disk: D) -> io::Result<Fat<D>> {
    // As the kernel, which reads what tools of others write.
    let options = FsOptions::new().time_provider(NullTimeProvider::new()).strict(false);
    Ok(FileSystem::new(disk, options)?)
}

/// An image that ends a search which runs in circles.
struct Patient {
    image: Cursor<Vec<u8>>,
    /// The bytes that may still be read.
    left: u64,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.checked_sub(buffer.len() as u64);
        self.left = left.ok_or_else(|| io::Error::other("the file system is damaged"))?;
        match self.image.read(buffer)? {
            0 if !buffer.is_empty() => Err(io::Error::other("the image is cut short")),
            count => Ok(count),
        }
    }
}

impl Write for Patient {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.image.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Patient {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.image.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_same_content_gives_the_same_disk_with_both_files() {
        let image = nocloud(b"abc").unwrap();
        assert!(image == nocloud(b"abc").unwrap());
        assert_eq!(recognise(&image), Some((Source::NoCloud, disk::FileSystem::Fat)));
        assert_eq!(file(image.clone(), "user-data").unwrap().unwrap(), b"abc");
        assert_eq!(file(image.clone(), "meta-data").unwrap().unwrap(), b"");
        assert_eq!(file(image, "openstack/latest/user_data").unwrap(), None);
    }

    #[test]
    fn the_largest_parameters_fit() {
        let content = vec![7; usize::try_from(BYTES_MAX).unwrap()];
        let image = nocloud(&content).unwrap();
        assert!(file(image, "user-data").unwrap().unwrap() == content);
    }

    proptest! {
        #[test]
        fn a_damaged_image_ends_in_a_content_or_an_error(
            damage in prop::collection::vec((0..16_384_usize, any::<u8>()), 1..8)
        ) {
            let mut image = nocloud(&[b'x'; 9000]).unwrap();
            for (at, byte) in damage {
                image[at] = byte;
            }
            let _ended = file(image, "user-data");
        }

        #[test]
        fn a_damaged_boot_sector_ends_in_a_content_or_an_error(
            damage in prop::collection::vec((0..90_usize, any::<u8>()), 1..8)
        ) {
            let mut image = nocloud(&[b'x'; 9000]).unwrap();
            for (at, byte) in damage {
                image[at] = byte;
            }
            let _ended = file(image, "user-data");
        }
    }
}
