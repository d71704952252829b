//! The disks of machines: copies of an image, larger, smaller or damaged.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Copies `from` to `to` and keeps its holes. On a file system that shares
/// extents the copy takes no time and no space.
///
/// # Errors
/// When either file cannot be opened, read or written.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let mut target = File::create(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(());
    }
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
        (&source).seek(io::SeekFrom::Start(start))?;
        target.seek(io::SeekFrom::Start(start))?;
        io::copy(&mut (&source).take(end - start), &mut target)?;
        at = end;
    }
    target.flush()
}

/// Makes the disk `bytes` long, as a larger or smaller medium would be.
///
/// # Errors
/// When the file cannot be opened or resized.
pub fn resize(file: &Path, bytes: u64) -> io::Result<()> {
    File::options().write(true).open(file)?.set_len(bytes)
}

/// Turns over the lowest bit of the byte at `offset`.
///
/// # Errors
/// When the file cannot be read or written there.
pub fn flip(file: &Path, offset: u64) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(file)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset)?;
    byte[0] ^= 1;
    file.write_all_at(&byte, offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_copy_has_the_same_bytes_and_keeps_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        file.write_all_at(b"middle", 20 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(to.metadata().unwrap().blocks() * 512 < 8 << 20);
    }

    #[test]
    fn a_byte_that_is_flipped_twice_is_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, b"abc").unwrap();
        flip(&path, 1).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"acc");
        flip(&path, 1).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abc");
    }

    #[test]
    fn a_resized_disk_has_the_new_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap();
        resize(&path, 4096).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 4096);
    }
}
