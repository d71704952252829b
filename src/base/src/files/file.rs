//! Single files of the tree, read within bounds and written so that a power cut never leaves half
//! of one.
//!
//! `files::tree` gives every file of the node a [`File`] and every directory
//! a [`Dir`]; only that module makes them, so no other module spells out a path.
//!
//! ```text
//! write:  temporary sibling --write, fsync--> rename over the name --fsync--> fsync of the directory
//! ```
//!
//! Invariants:
//! - After a write that returned, the new content survives a power cut; before
//!   that a reader sees all of the old content or all of the new.
//! - A read never takes more than `size_max` bytes, follows no link and opens only
//!   regular files.
//!
//! What this module does not do: classify content. FAT has no journal: after a power
//! cut in the middle of a write to the ESP a name may stand for an empty file, or for
//! another file's blocks. A file there that must be trusted carries a checksum of its
//! own.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

use super::atomic;

/// The bound of a file unless its place in the tree sets another: far above
/// any key, certificate or record, far below what would hurt memory.
pub(crate) const SIZE_MAX: u64 = 1 << 20;

/// One temporary sibling a file: writers take turns. Writes are rare and small.
static WRITING: Mutex<()> = Mutex::new(());

/// Why a file or directory of the tree cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused.
    #[error("cannot {operation} {path}")]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// Its object.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file is larger than its bound.
    #[error("{path} is larger than the {size_max} bytes it may have")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its bound.
        size_max: u64,
    },
    /// A directory, a device or a socket stands where a file should.
    #[error("{path} is not a regular file")]
    NotAFile {
        /// The place.
        path: PathBuf,
    },
    /// The thread that did the work ended with a panic.
    #[error("the writer of {path} was lost")]
    Lost {
        /// The file.
        path: PathBuf,
    },
}

impl Error {
    /// The operation that failed, and its path.
    pub fn io(operation: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, path: path.to_owned(), source: source.into() }
    }

    /// The same for callers whose own error names operation and file.
    pub fn into_io(self) -> io::Error {
        match self {
            Self::Io { source, .. } => source,
            other => io::Error::other(other),
        }
    }
}

/// One file of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    path: PathBuf,
    mode: u32,
    size_max: u64,
}

impl File {
    /// A file for the node alone.
    pub fn private(path: PathBuf) -> Self {
        Self { path, mode: 0o600, size_max: SIZE_MAX }
    }

    /// A file that child processes of any user may read.
    pub fn public(path: PathBuf) -> Self {
        Self { path, mode: 0o644, size_max: SIZE_MAX }
    }

    /// The same file with another bound.
    pub fn at_most(self, size_max: u64) -> Self {
        Self { size_max, ..self }
    }

    /// Where it is, for messages and for the command lines of child processes.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many bytes it may have.
    #[must_use]
    pub fn size_max(&self) -> u64 {
        self.size_max
    }

    /// The content, or `None` if the file does not exist.
    ///
    /// # Errors
    ///
    /// [`Error`] if an existing file cannot be read whole.
    pub fn read(&self) -> Result<Option<Vec<u8>>, Error> {
        // Without NONBLOCK, opening a pipe with this name would block without end.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => std::fs::File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(Error::io("open", &self.path, error)),
        };
        let metadata = file.metadata().map_err(|e| Error::io("look at", &self.path, e))?;
        if !metadata.is_file() {
            return Err(Error::NotAFile { path: self.path.clone() });
        }
        let too_large = || Error::TooLarge { path: self.path.clone(), size_max: self.size_max };
        if metadata.len() > self.size_max {
            return Err(too_large());
        }
        let mut content = Vec::new();
        file.take(self.size_max + 1)
            .read_to_end(&mut content)
            .map_err(|e| Error::io("read", &self.path, e))?;
        // The length from above may be wrong; the length read is checked.
        if content.len() as u64 > self.size_max {
            return Err(too_large());
        }
        Ok(Some(content))
    }

    /// Replaces the content, whole and for good. Blocks on the disk: from a
    /// service, call [`File::save`].
    ///
    /// # Errors
    ///
    /// [`Error`] if the new content is not known to be on the disk; the old
    /// content is then still there, or the new is.
    pub fn write(&self, content: &[u8]) -> Result<(), Error> {
        if content.len() as u64 > self.size_max {
            return Err(Error::TooLarge { path: self.path.clone(), size_max: self.size_max });
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let name = self.path.file_name().unwrap_or_default();
        let mut sibling = std::ffi::OsString::from(".");
        sibling.push(name);
        sibling.push(".new");
        let _turn = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        atomic::replace(&self.path, &directory.join(sibling), self.mode, content)
    }

    /// Removes the file like [`File::remove`], and overwrites its content before:
    /// FAT keeps the blocks of a removed file as they are. A flash disk may have
    /// copies all the same.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn erase(&self) -> Result<(), Error> {
        let _turn = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => std::fs::File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => return Err(Error::io("open", &self.path, error)),
        };
        let metadata = file.metadata().map_err(|e| Error::io("look at", &self.path, e))?;
        if metadata.is_file() {
            // Zeros over content that was written here; never a larger file.
            let zeros = vec![0; usize::try_from(metadata.len().min(self.size_max)).unwrap_or(0)];
            (&file).write_all(&zeros).map_err(|e| Error::io("overwrite", &self.path, e))?;
            file.sync_all().map_err(|e| Error::io("flush", &self.path, e))?;
        }
        drop(file);
        self.remove()
    }

    /// Removes the file; a missing file is not an error.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn remove(&self) -> Result<(), Error> {
        match rustix::fs::unlink(&self.path) {
            Ok(()) => atomic::flush_directory(self.path.parent().unwrap_or(Path::new("/"))),
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::io("remove", &self.path, error)),
        }
    }
}

/// One directory of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dir {
    path: PathBuf,
    mode: u32,
}

impl Dir {
    /// A directory for the node alone.
    pub fn private(path: PathBuf) -> Self {
        Self { path, mode: 0o700 }
    }

    /// A directory that child processes of any user may enter.
    pub fn public(path: PathBuf) -> Self {
        Self { path, mode: 0o755 }
    }

    /// Where it is, for messages and for the command lines of child processes.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the directory and its parents, if missing.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses, or something else has the name.
    pub fn create(&self) -> Result<(), Error> {
        if self.path.is_dir() {
            return Ok(());
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .create(&self.path)
            .map_err(|e| Error::io("make directory", &self.path, e))?;
        // Exact, independent of the umask. FAT refuses modes it cannot keep;
        // its mount options decide there.
        match rustix::fs::chmodat(
            CWD,
            &self.path,
            Mode::from_raw_mode(self.mode),
            rustix::fs::AtFlags::empty(),
        ) {
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(Error::io("set the mode of", &self.path, error)),
        }
        atomic::flush_directory(self.path.parent().unwrap_or(Path::new("/")))
    }

    /// Makes the directory empty, with everything below it gone for good. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if something cannot be removed.
    pub fn clear(&self) -> Result<(), Error> {
        match std::fs::remove_dir_all(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("clear", &self.path, error)),
        }
        self.create()
    }

    /// Makes all writes to its file system, by any process, survive a power cut.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the disk refuses.
    pub fn flush(&self) -> Result<(), Error> {
        let directory =
            std::fs::File::open(&self.path).map_err(|e| Error::io("open", &self.path, e))?;
        rustix::fs::syncfs(&directory).map_err(|e| Error::io("flush", &self.path, e))
    }

    /// Whether nothing is in it; an absent directory is empty.
    ///
    /// # Errors
    ///
    /// [`Error`] if it cannot be read.
    pub fn is_empty(&self) -> Result<bool, Error> {
        match std::fs::read_dir(&self.path) {
            Ok(mut entries) => Ok(entries.next().is_none()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) => Err(Error::io("list", &self.path, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn file(directory: &tempfile::TempDir) -> File {
        File::private(directory.path().join("key.pem"))
    }

    #[test]
    fn a_file_reads_back_and_others_cannot_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        assert_eq!(file.read().unwrap(), None);
        file.write(b"first").unwrap();
        file.write(b"second").unwrap();
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"second"[..]));
        let mode = std::fs::metadata(file.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_write_leaves_nothing_beside_the_file_even_after_an_interrupted_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        std::fs::write(directory.path().join(".key.pem.new"), "half").unwrap();
        file.write(b"whole").unwrap();
        let names: Vec<_> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["key.pem"]);
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"whole"[..]));
    }

    #[test]
    fn a_directory_in_the_place_of_the_temporary_file_stops_no_write() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        let debris = directory.path().join(".key.pem.new");
        std::fs::create_dir_all(debris.join("deep")).unwrap();
        std::fs::write(debris.join("deep/file"), "x").unwrap();
        file.write(b"whole").unwrap();
        assert_eq!(file.read().unwrap().as_deref(), Some(&b"whole"[..]));
        assert!(!debris.exists());
    }

    #[test]
    fn a_file_above_its_bound_is_refused_both_ways() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory).at_most(4);
        file.write(b"four").unwrap();
        assert!(matches!(file.write(b"fives"), Err(Error::TooLarge { size_max: 4, .. })));
        std::fs::write(file.path(), "fives").unwrap();
        assert!(matches!(file.read(), Err(Error::TooLarge { size_max: 4, .. })));
    }

    #[test]
    fn a_link_and_a_pipe_are_refused_and_do_not_hang() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        std::os::unix::fs::symlink("/etc/passwd", file.path()).unwrap();
        assert!(matches!(file.read(), Err(Error::Io { operation: "open", .. })));
        std::fs::remove_file(file.path()).unwrap();
        rustix::fs::mknodat(
            CWD,
            file.path(),
            rustix::fs::FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(matches!(file.read(), Err(Error::NotAFile { .. })));
    }

    #[test]
    fn many_writers_at_once_leave_one_whole_content() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(&directory);
        std::thread::scope(|scope| {
            for letter in b'a'..=b'h' {
                let file = &file;
                scope.spawn(move || file.write(&[letter; 4096]).unwrap());
            }
        });
        let content = file.read().unwrap().unwrap();
        assert_eq!(content.len(), 4096);
        assert!(content.iter().all(|byte| *byte == content[0]));
    }

    #[test]
    fn a_directory_is_made_with_its_mode_and_may_be_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let made = Dir::private(directory.path().join("a/b"));
        assert!(made.is_empty().unwrap());
        made.create().unwrap();
        made.create().unwrap();
        let mode = std::fs::metadata(made.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::write(made.path().join("file"), "").unwrap();
        assert!(!made.is_empty().unwrap());
    }
}
