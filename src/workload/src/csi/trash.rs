//! Removes what is left of volumes: entry by entry, without recursion, and within bounds.
//!
//! Pods made these trees, so their depth and their number of entries are not known. A directory
//! below the one that is being removed moves up beside it and is then removed like it; so the
//! work needs the same few descriptors and the same stack for any tree, and may be interrupted
//! anywhere.
//!
//! ```text
//! volumes/.trash-UID/a/b/c   -->   volumes/.trash-UID   volumes/.trash-i77 (a)/b/c   --> ...
//! ```
//!
//! Invariants:
//! - Each step names an entry relative to an open directory, and follows no link.
//! - Nothing is removed but what is named `.trash-...`, and what is inside.
//! - A call that leaves a part has removed something, so a caller that repeats it comes to an
//!   end; what the kernel refuses to remove is an error once nothing else is left
//!   (`what_stays_keeps_neither_the_caller_nor_the_rest`).

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

/// The beginning of the names of directories to remove.
pub(super) const PREFIX: &str = ".trash-";

/// Entries that one call removes: it takes some milliseconds.
const ENTRIES_MAX: usize = 1000;

/// Entries that the kernel may refuse to remove in one call. After these the call leaves each
/// directory at its first one, so it stays short, and every directory has its turn.
const REFUSED_MAX: usize = 5000;

/// Whether something is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swept {
    /// There was nothing to remove.
    Nothing,
    /// This call has removed something, and something is left.
    Part,
    /// This call has removed the last of it.
    All,
}

/// Removes the next entries of everything in `volumes` that is to be removed. Blocks.
///
/// # Errors
///
/// The first refusal of the kernel, once it refuses to remove anything that is left.
pub(super) fn sweep(volumes: &Path) -> io::Result<Swept> {
    sweep_by(volumes, unlink)
}

/// The system call that removes one entry; tests have one that refuses.
type Unlink = fn(&OwnedFd, &CStr, AtFlags) -> Result<(), Errno>;

fn unlink(directory: &OwnedFd, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
    unlinkat(directory, name, flags)
}

fn sweep_by(volumes: &Path, unlink: Unlink) -> io::Result<Swept> {
    let root = match openat(rustix::fs::CWD, volumes, FLAGS, Mode::empty()) {
        Ok(root) => root,
        Err(Errno::NOENT) => return Ok(Swept::Nothing),
        Err(error) => return Err(error.into()),
    };
    let mut sweep = Sweep {
        root,
        unlink,
        left: ENTRIES_MAX,
        patience: REFUSED_MAX,
        moved: true,
        refused: None,
    };
    let mut begun = false;
    // The same call removes the entries that moved up, so that it knows when nothing is left.
    while std::mem::take(&mut sweep.moved) && sweep.refused.is_none() {
        for entry in Dir::read_from(&sweep.root)? {
            let entry = entry?;
            if !entry.file_name().to_bytes().starts_with(PREFIX.as_bytes()) {
                continue;
            }
            begun = true;
            match sweep.remove(entry.file_name()) {
                Ok(true) => {}
                Ok(false) => return Ok(Swept::Part),
                // The next directory has its turn.
                Err(error) => {
                    sweep.refused.get_or_insert(error);
                }
            }
        }
    }
    match sweep.refused {
        // The next call reaches what this one has moved up.
        Some(_) if sweep.left < ENTRIES_MAX => Ok(Swept::Part),
        Some(error) => Err(error.into()),
        None if begun => Ok(Swept::All),
        None => Ok(Swept::Nothing),
    }
}

const FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Sweep {
    root: OwnedFd,
    unlink: Unlink,
    /// Entries that may still be removed.
    left: usize,
    /// Entries that the kernel may still refuse to remove.
    patience: usize,
    /// A directory has moved up.
    moved: bool,
    /// The first error of an entry.
    refused: Option<Errno>,
}

impl Sweep {
    /// Removes one thing beside the volumes; returns whether the call may go on.
    fn remove(&mut self, name: &CStr) -> Result<bool, Errno> {
        if self.left == 0 {
            return Ok(false);
        }
        match (self.unlink)(&self.root, name, AtFlags::empty()) {
            Ok(()) => {
                self.left -= 1;
                return Ok(true);
            }
            Err(Errno::NOENT) => return Ok(true),
            Err(Errno::ISDIR) => {}
            Err(error) => return Err(error),
        }
        let directory = openat(&self.root, name, FLAGS, Mode::empty())?;
        let before = self.left;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            if self.left == 0 {
                return Ok(false);
            }
            match self.entry(&directory, entry.file_name()) {
                Ok(()) => self.left -= 1,
                Err(error) if self.patience == 0 => return Err(error),
                Err(error) => {
                    self.patience -= 1;
                    self.refused.get_or_insert(error);
                }
            }
        }
        match (self.unlink)(&self.root, name, AtFlags::REMOVEDIR) {
            Ok(()) => self.left = self.left.saturating_sub(1),
            Err(Errno::NOENT) => {}
            // A process has made an entry meanwhile. One that stays is an error: a damaged
            // directory counts entries that it does not show.
            Err(Errno::NOTEMPTY | Errno::EXIST) if self.left < before => self.moved = true,
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Removes one entry of a directory, or moves it up.
    fn entry(&mut self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        match (self.unlink)(directory, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            done => return done,
        }
        match (self.unlink)(directory, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            done => return done,
        }
        // Two directories never have the same number at once.
        let number = statat(directory.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)?.st_ino;
        renameat(directory, name, &self.root, format!("{PREFIX}i{number}"))?;
        self.moved = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// As the kernel does with a file that is immutable.
    fn stubborn(directory: &OwnedFd, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
        match name.to_bytes().starts_with(b"stuck") {
            true => Err(Errno::PERM),
            false => unlink(directory, name, flags),
        }
    }

    /// Makes so many files that `stubborn` refuses to remove.
    fn stuck(directory: &Path, files: usize) {
        for number in 0..files {
            std::fs::write(directory.join(format!("stuck-{number}")), "").unwrap();
        }
    }

    /// Sweeps until nothing is left; the number of calls.
    fn all(volumes: &Path) -> usize {
        for calls in 1..10_000 {
            match sweep(volumes).unwrap() {
                Swept::Part => {}
                Swept::All | Swept::Nothing => return calls,
            }
        }
        panic!("it never ends");
    }

    fn names(volumes: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(volumes).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_what_is_to_be_removed_goes() {
        let volumes = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("etcd"), "data").unwrap();
        let trash = volumes.path().join(".trash-1");
        std::fs::create_dir_all(trash.join("content/a/b")).unwrap();
        std::fs::write(trash.join("content/a/b/file"), "x").unwrap();
        std::fs::write(trash.join("claim"), "x").unwrap();
        symlink(outside.path(), trash.join("content/link")).unwrap();
        symlink(outside.path(), volumes.path().join(".trash-2")).unwrap();
        std::fs::create_dir_all(volumes.path().join("pvc-1/content/a")).unwrap();
        assert_eq!(sweep(Path::new("/nowhere/at/all")).unwrap(), Swept::Nothing);
        all(volumes.path());
        assert_eq!(names(volumes.path()), ["pvc-1"]);
        assert!(volumes.path().join("pvc-1/content/a").is_dir());
        assert!(outside.path().join("etcd").is_file(), "a link was followed");
        assert_eq!(sweep(volumes.path()).unwrap(), Swept::Nothing);
    }

    #[test]
    fn a_tree_of_any_depth_goes_without_recursion() {
        const DEPTH: usize = 5000;
        let volumes = tempfile::tempdir().unwrap();
        // Longer than any path may be: made from the inside, as a pod would.
        let mut inner = openat(rustix::fs::CWD, volumes.path(), FLAGS, Mode::empty()).unwrap();
        for depth in 0..DEPTH {
            let name = if depth == 0 { ".trash-1" } else { "d" };
            rustix::fs::mkdirat(&inner, name, Mode::RWXU).unwrap();
            inner = openat(&inner, name, FLAGS, Mode::empty()).unwrap();
        }
        drop(inner);
        all(volumes.path());
        assert_eq!(names(volumes.path()), [""; 0]);
    }

    #[test]
    fn a_call_removes_a_bounded_number_of_entries() {
        let volumes = tempfile::tempdir().unwrap();
        let trash = volumes.path().join(".trash-1");
        std::fs::create_dir(&trash).unwrap();
        for number in 0..ENTRIES_MAX * 2 + 1 {
            std::fs::write(trash.join(number.to_string()), "").unwrap();
        }
        assert_eq!(sweep(volumes.path()).unwrap(), Swept::Part);
        assert_eq!(std::fs::read_dir(&trash).unwrap().count(), ENTRIES_MAX + 1);
        assert_eq!(all(volumes.path()), 2);
    }

    #[test]
    fn what_stays_keeps_neither_the_caller_nor_the_rest() {
        let volumes = tempfile::tempdir().unwrap();
        for name in [".trash-1", ".trash-2", ".trash-3"] {
            let content = volumes.path().join(name).join("content");
            std::fs::create_dir_all(&content).unwrap();
            std::fs::write(content.join("file"), "").unwrap();
        }
        // More than a call removes.
        stuck(&volumes.path().join(".trash-2/content"), ENTRIES_MAX + 1);
        let mut calls = 0;
        let error = loop {
            match sweep_by(volumes.path(), stubborn) {
                Ok(swept) => assert_eq!(swept, Swept::Part),
                Err(error) => break error,
            }
            calls += 1;
            assert!(calls < 10, "it never ends");
        };
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        // One directory is left, with nothing else in it.
        let left = names(volumes.path());
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(names(&volumes.path().join(&left[0])).len(), ENTRIES_MAX + 1);
        sweep_by(volumes.path(), stubborn).unwrap_err();
        // Trash that comes later goes, too.
        std::fs::create_dir(volumes.path().join(".trash-4")).unwrap();
        assert_eq!(sweep_by(volumes.path(), stubborn).unwrap(), Swept::Part);
        assert_eq!(names(volumes.path()), left);
        all(volumes.path());
        assert_eq!(names(volumes.path()), [""; 0]);
    }

    #[test]
    fn a_directory_that_hides_its_entries_keeps_no_caller() {
        /// As the kernel does with a directory whose count of entries is damaged.
        fn hiding(directory: &OwnedFd, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
            match flags == AtFlags::REMOVEDIR {
                true => Err(Errno::NOTEMPTY),
                false => unlink(directory, name, flags),
            }
        }
        let volumes = tempfile::tempdir().unwrap();
        let trash = volumes.path().join(".trash-1");
        std::fs::create_dir(&trash).unwrap();
        std::fs::write(trash.join("file"), "").unwrap();
        assert_eq!(sweep_by(volumes.path(), hiding).unwrap(), Swept::Part);
        let error = sweep_by(volumes.path(), hiding).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::DirectoryNotEmpty);
    }

    #[test]
    fn a_call_asks_a_bounded_number_of_times_for_what_stays() {
        static REFUSED: AtomicUsize = AtomicUsize::new(0);
        fn counted(directory: &OwnedFd, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
            let done = stubborn(directory, name, flags);
            REFUSED.fetch_add(usize::from(done == Err(Errno::PERM)), Ordering::Relaxed);
            done
        }
        let volumes = tempfile::tempdir().unwrap();
        for name in [".trash-1", ".trash-2"] {
            let trash = volumes.path().join(name);
            std::fs::create_dir(&trash).unwrap();
            stuck(&trash, REFUSED_MAX);
        }
        sweep_by(volumes.path(), counted).unwrap_err();
        // All of one directory, and the first one of the other.
        assert_eq!(REFUSED.load(Ordering::Relaxed), REFUSED_MAX + 1);
    }
}
