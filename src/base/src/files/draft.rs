//! Large files of a directory: written in pieces under a temporary name, which ends when the
//! caller has checked the content.
//!
//! ```text
//! Dir::draft --write, write, ..--> flush --(the caller reads it again)--> keep: rename, flush
//!                                     \--dropped: the temporary file stays for the next draft
//! ```
//!
//! Invariants:
//! - A file has its final name only once all of its content survives a power cut.
//! - Only regular files are opened, and no link is followed.
//!
//! What this module does not do: check content, or remove what an earlier attempt left, unless
//! another draft takes the same temporary name.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::error::Error;
use super::file::Dir;
use super::{atomic, regular};
use crate::sys;

/// Bytes between two flushes: other programs wait for the disk as long as one takes.
const STEP: u64 = 32 << 20;

/// The room of the file system below a directory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All of it.
    pub size: u64,
    /// The part that is free.
    pub free: u64,
}

/// A file under a temporary name.
#[derive(Debug)]
pub struct Draft {
    file: File,
    path: PathBuf,
    unflushed: u64,
}

impl Draft {
    /// Where it is, for the command lines of child processes.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends to it. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the disk takes no more.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, e))?;
        self.unflushed += bytes.len() as u64;
        if self.unflushed >= STEP {
            self.unflushed = 0;
            self.file.sync_data().map_err(|e| Error::io("flush", &self.path, e))?;
        }
        Ok(())
    }

    /// Makes its content survive a power cut, and the next read of it come from the disk. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the disk refuses.
    pub fn flush(&self) -> Result<(), Error> {
        let flushed = self.file.sync_all().and_then(|()| sys::files::forget(&self.file));
        flushed.map_err(|e| Error::io("flush", &self.path, e))
    }

    /// Gives it its final name in the same directory, for good. Call [`Draft::flush`] before.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn keep(self, name: &str) -> Result<(), Error> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let path = directory.join(name);
        rustix::fs::rename(&self.path, &path).map_err(|e| Error::io("put in place", &path, e))?;
        atomic::flush_directory(directory)
    }
}

impl Dir {
    /// Begins a file under this temporary name, for the node alone; removes one of that name.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn draft(&self, temporary: &str) -> Result<Draft, Error> {
        self.remove(temporary)?;
        let path = self.path().join(temporary);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| Error::io("create", &path, e))?;
        Ok(Draft { file: file.into(), path, unflushed: 0 })
    }

    /// Opens the regular file of this name for reading; `None` if it does not exist. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if it cannot be opened, or is not a file.
    pub fn open(&self, name: &str) -> Result<Option<File>, Error> {
        regular::open(&self.path().join(name))
    }

    /// Removes the file of this name, for good; a missing file is not an error. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let path = self.path().join(name);
        match rustix::fs::unlink(&path) {
            Ok(()) => atomic::flush_directory(self.path()),
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::io("remove", &path, error)),
        }
    }

    /// The names of all that is in it, in order. A name that is not UTF-8 has `�` in it. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if it cannot be read.
    pub fn names(&self) -> Result<Vec<String>, Error> {
        let failed = |e| Error::io("list", self.path(), e);
        let entries = std::fs::read_dir(self.path()).map_err(failed)?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<std::io::Result<Vec<_>>>().map_err(failed)?;
        names.sort();
        Ok(names)
    }

    /// The room of its file system. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn space(&self) -> Result<Space, Error> {
        let found = rustix::fs::statvfs(self.path())
            .map_err(|e| Error::io("look at the room of", self.path(), e))?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(Space { size: bytes(found.f_blocks), free: bytes(found.f_bavail) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_draft_has_its_name_only_once_it_is_kept() {
        let base = tempfile::tempdir().unwrap();
        let dir = Dir::private(base.path().join("dir"));
        dir.create().unwrap();
        let outside = base.path().join("outside");
        std::fs::write(&outside, "kept").unwrap();
        // An earlier attempt, or a trap.
        std::os::unix::fs::symlink(&outside, dir.path().join("temporary")).unwrap();
        let mut draft = dir.draft("temporary").unwrap();
        draft.write(b"one ").unwrap();
        draft.write(b"two").unwrap();
        draft.flush().unwrap();
        assert_eq!(dir.names().unwrap(), ["temporary"]);
        assert_eq!(std::fs::read(draft.path()).unwrap(), b"one two");
        draft.keep("final").unwrap();
        assert_eq!(dir.names().unwrap(), ["final"]);
        let file = dir.open("final").unwrap().unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read(&outside).unwrap(), b"kept");
        dir.remove("final").unwrap();
        dir.remove("final").unwrap();
        assert!(dir.open("final").unwrap().is_none() && dir.names().unwrap().is_empty());
    }

    #[test]
    fn a_link_and_a_directory_are_not_opened() {
        let base = tempfile::tempdir().unwrap();
        let dir = Dir::private(base.path().to_owned());
        std::fs::write(dir.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        std::fs::create_dir(dir.path().join("directory")).unwrap();
        assert!(dir.open("file").unwrap().is_some());
        assert!(dir.open("link").is_err() && dir.open("directory").is_err());
    }

    #[test]
    fn the_room_of_a_file_system_is_known() {
        let base = tempfile::tempdir().unwrap();
        let space = Dir::private(base.path().to_owned()).space().unwrap();
        assert!(space.size > 0 && space.free <= space.size, "{space:?}");
    }
}
