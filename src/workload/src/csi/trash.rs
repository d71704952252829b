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

/// Whether something is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swept {
    /// There was nothing to remove.
    Nothing,
    /// Something is left.
    Part,
    /// This call has removed the last of it.
    All,
}

/// Removes the next entries of everything in `volumes` that is to be removed. Blocks.
///
/// # Errors
///
/// The first entry that the kernel does not remove; the others are removed all the same.
pub(super) fn sweep(volumes: &Path) -> io::Result<Swept> {
    let root = match openat(rustix::fs::CWD, volumes, FLAGS, Mode::empty()) {
        Ok(root) => root,
        Err(Errno::NOENT) => return Ok(Swept::Nothing),
        Err(error) => return Err(error.into()),
    };
    let mut sweep = Sweep { root, left: ENTRIES_MAX, moved: true, refused: None };
    let mut begun = false;
    // The same call removes the entries that moved up, so that it knows when nothing is left.
    while std::mem::take(&mut sweep.moved) && sweep.refused.is_none() {
        for entry in Dir::read_from(&sweep.root)? {
            let entry = entry?;
            if entry.file_name().to_bytes().starts_with(PREFIX.as_bytes()) {
                begun = true;
                if !sweep.remove(entry.file_name())? {
                    return Ok(Swept::Part);
                }
            }
        }
    }
    match (sweep.refused, begun) {
        (Some(error), _) => Err(error.into()),
        (None, true) => Ok(Swept::All),
        (None, false) => Ok(Swept::Nothing),
    }
}

const FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Sweep {
    root: OwnedFd,
    /// Entries that may still be removed.
    left: usize,
    /// A directory has moved up.
    moved: bool,
    /// The first error of an entry.
    refused: Option<Errno>,
}

impl Sweep {
    /// Removes one thing beside the volumes; returns whether the call may go on.
    fn remove(&mut self, name: &CStr) -> io::Result<bool> {
        match unlinkat(&self.root, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(true),
            Err(Errno::ISDIR) => {}
            Err(error) => {
                self.refused.get_or_insert(error);
                return Ok(true);
            }
        }
        let directory = openat(&self.root, name, FLAGS, Mode::empty())?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            if self.left == 0 {
                return Ok(false);
            }
            self.left -= 1;
            if let Err(error) = self.entry(&directory, entry.file_name()) {
                self.refused.get_or_insert(error);
            }
        }
        match unlinkat(&self.root, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            // An entry stays, or a process has made one meanwhile.
            Err(Errno::NOTEMPTY | Errno::EXIST) => self.moved = true,
            Err(error) => {
                self.refused.get_or_insert(error);
            }
        }
        Ok(true)
    }

    /// Removes one entry of a directory, or moves it up.
    fn entry(&mut self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        match unlinkat(directory, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            done => return done,
        }
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
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

    use super::*;

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
}
