//! Folders for sockets, in the host's folder for temporary files: a socket's path has at most 107
//! bytes.
//!
//! A folder is removed with its value. A process that is killed, as by Ctrl-C, removes nothing;
//! the next process that makes a folder removes those of it.
//!
//! ```text
//! [locked] --dropped--------------------------------------> [removed]
//!     |                                                         ^
//!     +--its process is killed--> [free] --another one is made--+
//! ```
//!
//! Invariants:
//! - A folder in use is never removed: its process holds the lock on it (`flock(2)`), which the
//!   kernel releases with that process. The programs that it starts do not inherit the lock.
//! - Only this user enters a folder: another user could hold its lock, or connect to its sockets.

use std::env;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;
use tempfile::TempDir;

/// The beginning of each name. No folder without a lock has such a name.
const PREFIX: &str = "polis-run-";

/// A folder that is removed when it is dropped.
#[derive(Debug)]
pub struct Scratch {
    dir: TempDir,
    /// Released behind the removal: fields are dropped in their order.
    _lock: File,
}

impl Scratch {
    /// Makes a folder, and removes those that killed processes have left.
    ///
    /// # Errors
    /// When the folder for temporary files cannot be used.
    pub fn new() -> io::Result<Self> {
        Self::make_in(&env::temp_dir())
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    fn make_in(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        loop {
            let dir = tempfile::Builder::new()
                .prefix(PREFIX)
                .permissions(Permissions::from_mode(0o700))
                .tempdir_in(parent)?;
            // Until it is locked, another process may take it for one that was left.
            let lock = match opened(dir.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            lock.lock()?;
            if dir.path().exists() {
                return Ok(Self { dir, _lock: lock });
            }
        }
    }
}

/// Removes the folders that no process holds. One that cannot be removed, as that of another
/// user, stays.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_named = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        if !is_named {
            continue;
        }
        let Ok(lock) = opened(&entry.path()) else { continue };
        if lock.try_lock().is_ok() {
            let _stays = fs::remove_dir_all(entry.path());
        }
    }
}

/// Opens a folder, and nothing else in its place: every user may put a link there, which leads
/// anywhere, or a pipe, which would be waited for.
fn opened(folder: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::thread;

    #[test]
    fn a_folder_that_a_killed_process_left_is_removed_and_one_in_use_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let [left, other, link] = ["polis-run-left", "polis-other", "polis-run-link"]
            .map(|name| parent.path().join(name));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("qmp"), "").unwrap();
        fs::create_dir(&other).unwrap();
        symlink(&other, &link).unwrap();
        let first = Scratch::make_in(parent.path()).unwrap();
        assert!(!left.exists(), "no process holds it");
        assert!(other.exists() && link.exists(), "they are of something else");
        let second = Scratch::make_in(parent.path()).unwrap();
        assert!(first.path().is_dir(), "it is in use");
        assert_eq!(fs::metadata(first.path()).unwrap().permissions().mode() & 0o777, 0o700);
        let gone = first.path().to_owned();
        drop(first);
        assert!(!gone.exists() && second.path().is_dir());
    }

    #[test]
    fn folders_that_are_made_at_once_do_not_take_each_other_for_left() {
        let parent = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        let made = Scratch::make_in(parent.path()).unwrap();
                        fs::write(made.path().join("qmp"), "").unwrap();
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
