//! Single files of the tree, read within bounds and written so that a power cut never leaves half
//! of one.
//!
//! `files::tree` gives every file of the node a [`File`] and every directory
//! a [`Dir`]; only that module makes them, so no other module spells out a path.
//!
//! ```text
//! data, memory: temporary sibling --write, fsync--> rename over the name --> fsync of directory
//! ESP:          in place, two copies: `in_place`
//! ```
//!
//! Invariants:
//! - After a write that returned, the new content survives a power cut; before
//!   that a reader sees all of the old content or all of the new.
//! - A read never takes more than `size_max` bytes, follows no link and opens only
//!   regular files.
//! - Writers of one file take turns; a write that hangs with its disk keeps no other file waiting.
//!
//! What this module does not do: classify content.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

use super::error::Error;
use super::owner::Group;
use super::regular::open;
use super::{atomic, in_place, owner};
use crate::users::User;

/// The bound of a file unless its place in the tree sets another: far above
/// any key, certificate or record, far below what would hurt memory.
pub(crate) const SIZE_MAX: u64 = 1 << 20;

/// The part that is overwritten last, and shows whether a file has content: the first page
/// of a snapshot of etcd is never zero.
const HEAD: usize = 4096;

/// How much is overwritten at a time.
const CHUNK: usize = 1 << 20;

/// The files that are being written, and the signal that one is not any more.
static WRITING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static WRITTEN: Condvar = Condvar::new();

fn writing() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    WRITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The turn of one writer of a file: it has one temporary sibling, or two copies.
struct Turn<'a>(&'a Path);

impl<'a> Turn<'a> {
    /// Waits for the end of the turns before.
    fn of(path: &'a Path) -> Self {
        let mut writing = writing();
        while !writing.insert(path.to_owned()) {
            writing = WRITTEN.wait(writing).unwrap_or_else(PoisonError::into_inner);
        }
        Self(path)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        writing().remove(self.0);
        WRITTEN.notify_all();
    }
}

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteMode {
    /// A new file takes the name of the old one.
    Replaced,
    /// See [`in_place`].
    InPlace,
    /// By a person, before the machine starts; the node can only overwrite it with zeros.
    Given,
}

/// One file of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    path: PathBuf,
    mode: u32,
    /// The group that may read it, beside root.
    group: Group,
    size_max: u64,
    write_mode: WriteMode,
}

impl File {
    /// A file for the node alone.
    pub fn private(path: PathBuf) -> Self {
        Self {
            path,
            mode: 0o600,
            group: Group::Root,
            size_max: SIZE_MAX,
            write_mode: WriteMode::Replaced,
        }
    }

    /// A file that child processes of any user may read.
    pub fn public(path: PathBuf) -> Self {
        Self {
            path,
            mode: 0o644,
            group: Group::Root,
            size_max: SIZE_MAX,
            write_mode: WriteMode::Replaced,
        }
    }

    /// A file of the ESP that the node or `init` writes.
    pub(super) fn in_place(path: PathBuf) -> Self {
        Self {
            path,
            mode: 0o600,
            group: Group::Root,
            size_max: in_place::CONTENT_MAX as u64,
            write_mode: WriteMode::InPlace,
        }
    }

    /// A file of the ESP that a person puts there.
    pub(super) fn given(path: PathBuf, size_max: u64) -> Self {
        Self { path, mode: 0o600, group: Group::Root, size_max, write_mode: WriteMode::Given }
    }

    /// The same file, which this group may read too.
    pub(super) fn shared_with(self, group: Group) -> Self {
        Self { mode: 0o640, group, ..self }
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

    /// The content, or `None` if the file does not exist or was cleared.
    ///
    /// # Errors
    ///
    /// [`Error`] if an existing file cannot be read whole.
    pub fn read(&self) -> Result<Option<Vec<u8>>, Error> {
        if self.write_mode != WriteMode::InPlace {
            return self.read_plain();
        }
        match in_place::read(&self.path) {
            Ok(found) if found.alike => return Ok(found.content),
            Ok(_) | Err(Error::Damaged { .. }) => {}
            Err(error) => return Err(error),
        }
        // Beside a writer, each copy was perhaps read while it changed: only what is read
        // when no writer is at work says that the file is damaged.
        let _turn = Turn::of(&self.path);
        let found = in_place::read(&self.path)?;
        if !found.alike {
            // Where the disk refuses, the content counts all the same. A damaged file stays
            // as it is: it says that something was lost.
            in_place::mend(&self.path).ok();
        }
        Ok(found.content)
    }

    fn read_plain(&self) -> Result<Option<Vec<u8>>, Error> {
        let Some(file) = open(&self.path)? else { return Ok(None) };
        let metadata = file.metadata().map_err(|e| Error::io("look at", &self.path, e))?;
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

    /// Gives a file that an earlier system wrote the mode and the group of its place in the
    /// tree; a missing file is not an error.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn settle(&self) -> Result<(), Error> {
        owner::settle(&self.path, self.mode, self.group.number())
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
        let _turn = Turn::of(&self.path);
        if self.write_mode == WriteMode::InPlace {
            return in_place::write(&self.path, Some(content));
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let name = self.path.file_name().unwrap_or_default();
        let mut sibling = std::ffi::OsString::from(".");
        sibling.push(name);
        sibling.push(".new");
        atomic::replace(
            &self.path,
            &directory.join(sibling),
            self.mode,
            self.group.number(),
            content,
        )
    }

    /// Removes the file like [`File::remove`], and overwrites its content before: the
    /// blocks of a removed file stay as they are. A flash disk may have copies all the
    /// same. A file that a person put on the ESP stays there, full of zeros: see
    /// [`File::is_filled`].
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn erase(&self) -> Result<(), Error> {
        if self.write_mode == WriteMode::InPlace {
            return self.remove();
        }
        let turn = Turn::of(&self.path);
        self.overwrite()?;
        drop(turn);
        if self.write_mode == WriteMode::Given { Ok(()) } else { self.remove() }
    }

    /// Zeros over content that was written here; never a larger file.
    fn overwrite(&self) -> Result<(), Error> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => std::fs::File::from(file),
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => return Err(Error::io("open", &self.path, error)),
        };
        let metadata = file.metadata().map_err(|e| Error::io("look at", &self.path, e))?;
        if !metadata.is_file() {
            return Ok(());
        }
        let size = usize::try_from(metadata.len().min(self.size_max)).unwrap_or(0);
        // The head last: a head of zeros says that all of the rest is overwritten.
        let zeros = vec![0; CHUNK];
        let rest = (HEAD..size).step_by(CHUNK).map(|at| (at, CHUNK.min(size - at)));
        let fail = |e| Error::io("overwrite", &self.path, e);
        for (at, length) in rest {
            file.write_all_at(&zeros[..length], at as u64).map_err(fail)?;
        }
        file.sync_all().map_err(|e| Error::io("flush", &self.path, e))?;
        file.write_all_at(&zeros[..HEAD.min(size)], 0).map_err(fail)?;
        file.sync_all().map_err(|e| Error::io("flush", &self.path, e))
    }

    /// Whether the file has content at its start: false for one that does not exist, or
    /// that [`File::erase`] has overwritten.
    ///
    /// # Errors
    ///
    /// [`Error`] if it cannot be read, or is not a file.
    pub fn is_filled(&self) -> Result<bool, Error> {
        Ok(self.head()?.iter().any(|byte| *byte != 0))
    }

    /// The first bytes of the file, 4 KiB at most; none of a missing file.
    ///
    /// # Errors
    ///
    /// [`Error`] if it cannot be read, or is not a file.
    pub fn head(&self) -> Result<Vec<u8>, Error> {
        let mut head = Vec::with_capacity(HEAD);
        let Some(file) = open(&self.path)? else { return Ok(head) };
        file.take(HEAD as u64)
            .read_to_end(&mut head)
            .map_err(|e| Error::io("read", &self.path, e))?;
        Ok(head)
    }

    /// Removes the file, or clears a file of the ESP; a missing file is not an error.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn remove(&self) -> Result<(), Error> {
        if self.write_mode == WriteMode::InPlace {
            let _turn = Turn::of(&self.path);
            return in_place::write(&self.path, None);
        }
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
    /// The group that may pass through it, beside root.
    group: Group,
}

impl Dir {
    /// A directory for the node alone.
    pub fn private(path: PathBuf) -> Self {
        Self { path, mode: 0o700, group: Group::Root }
    }

    /// A directory that child processes of any user may enter.
    pub fn public(path: PathBuf) -> Self {
        Self { path, mode: 0o755, group: Group::Root }
    }

    /// The same directory, through which this group may pass to what it may read.
    pub(super) fn passed_by(self, group: Group) -> Self {
        Self { mode: 0o710, group, ..self }
    }

    /// The same directory, through which this group may pass, and in which it may list and
    /// watch what there is.
    pub(super) fn watched_by(self, group: Group) -> Self {
        Self { mode: 0o750, group, ..self }
    }

    /// The same directory, for sockets of a program that this group may reach: they have the
    /// group from their first moment.
    pub(super) fn for_sockets_of(self, group: Group) -> Self {
        Self { mode: 0o2710, group, ..self }
    }

    /// Where it is, for messages and for the command lines of child processes.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives a directory that an earlier system made the mode and the group of its place in
    /// the tree; a missing directory is not an error.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn settle(&self) -> Result<(), Error> {
        owner::settle(&self.path, self.mode, self.group.number())
    }

    /// Makes `user` the owner of the directory and of everything below it, and follows no
    /// link. The directory keeps the group of its place in the tree, if that is not root's. No
    /// program of this user may run. Safe to repeat, after an end anywhere; does nothing unless
    /// this process is root. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn give(&self, user: User) -> Result<(), Error> {
        owner::give(&self.path, user, self.group.number())
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
#[path = "file_tests.rs"]
mod tests;
