//! The cache of costly objects that are the same for every story: a folder of entries,
//! each keyed by its inputs.
//!
//! Stories run in several threads and processes at once. The first that asks for an
//! entry makes it; the others wait for it and use the same.
//!
//! ```text
//! [absent] --make, under an exclusive lock--> [there] --used, under shared locks
//!     ^                                          |
//!     +--- too old, or another key of its kind --+   (once no user is left)
//! ```
//!
//! Invariants:
//! - An entry is complete: it is made under another name and then renamed.
//! - An entry in use is not removed: its user holds a shared lock.
//!
//! What this module does not do: interpret an entry (`kernel`, `template`).

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

/// Digits of a key: enough for the few entries of a kind.
const KEY_DIGITS: usize = 16;

/// Why an entry cannot be provided, apart from its maker's errors.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep {path}")]
pub struct Error {
    /// The entry.
    path: String,
    /// The system's complaint.
    source: io::Error,
}

/// A folder of entries.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
}

/// The name of an entry and its lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The folder holds, of each kind, the keys that are in use.
    pub kind: &'a str,
    /// From [`Key`].
    pub key: String,
    /// An older one is made again; `None` for any age.
    pub age_max: Option<Duration>,
}

/// An entry that stays while this value lives.
#[derive(Debug)]
pub struct Entry {
    /// The folder with what the maker put there.
    pub dir: PathBuf,
    /// Shared.
    _lock: File,
}

/// The hash of all inputs of an entry.
#[derive(Clone, Debug, Default)]
pub struct Key(Sha256);

impl Key {
    /// Adds a part; the same parts in the same order make the same key.
    #[must_use]
    pub fn part(mut self, bytes: &[u8]) -> Self {
        self.0.update(bytes.len().to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// In digits.
    #[must_use]
    pub fn digits(self) -> String {
        let mut digits: String = self.0.finalize().iter().map(|b| format!("{b:02x}")).collect();
        digits.truncate(KEY_DIGITS);
        digits
    }
}

impl Cache {
    /// Entries are stored in `dir`, which is made if missing.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The entry; if it is missing, `make` makes it in the folder that it is given. An
    /// entry of the same kind with another key is removed unless it is in use.
    ///
    /// # Errors
    /// When `make` fails, or the folder cannot be used.
    pub fn entry<E: From<Error>>(
        &self,
        wanted: &Wanted<'_>,
        mut make: impl FnMut(&Path) -> Result<(), E>,
    ) -> Result<Entry, E> {
        let dir = self.dir.join(format!("{}-{}", wanted.kind, wanted.key));
        let kept = |source| Error { path: dir.display().to_string(), source };
        fs::create_dir_all(&self.dir).map_err(kept)?;
        loop {
            let shared = locked(&lock_of(&dir), File::lock_shared).map_err(kept)?;
            if good(&dir, wanted.age_max) {
                return Ok(Entry { dir, _lock: shared });
            }
            drop(shared);
            // Waits for another maker, and for the users of an entry that is too old.
            let exclusive = locked(&lock_of(&dir), File::lock).map_err(kept)?;
            if !good(&dir, wanted.age_max) {
                let new = dir.with_extension("new");
                remove(&new).map_err(kept)?;
                fs::create_dir(&new).map_err(kept)?;
                make(&new)?;
                remove(&dir).map_err(kept)?;
                fs::rename(&new, &dir).map_err(kept)?;
                self.forget_others(wanted.kind, &dir).map_err(kept)?;
            }
            // Another run may remove it before the next check: then it is made again.
            drop(exclusive);
        }
    }

    /// Removes the entries of a kind except `keep` and those in use.
    fn forget_others(&self, kind: &str, keep: &Path) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // `home-2-KEY` is not of the kind `home`: a key has no dash.
            let of_kind = name.rsplit_once('-').is_some_and(|(of, _)| of == kind);
            if path == keep || !of_kind || !path.is_dir() || path.extension().is_some() {
                continue;
            }
            let lock = File::options().create(true).append(true).open(lock_of(&path))?;
            match lock.try_lock() {
                Ok(()) => {
                    remove(&path)?;
                    fs::remove_file(lock_of(&path))?;
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

fn lock_of(entry: &Path) -> PathBuf {
    entry.with_extension("lock")
}

/// Whether the entry exists, and is not older than allowed.
fn good(dir: &Path, age_max: Option<Duration>) -> bool {
    let Ok(made) = fs::metadata(dir).and_then(|found| found.modified()) else { return false };
    // By the clock that the file system stamps with; a file from the future is new.
    age_max.is_none_or(|max| made.elapsed().unwrap_or_default() <= max)
}

/// Takes the lock in this file, which the remover of an entry removes too.
fn locked(path: &Path, lock: fn(&File) -> io::Result<()>) -> io::Result<File> {
    loop {
        let file = File::options().create(true).append(true).open(path)?;
        lock(&file)?;
        // A lock on a removed file excludes no other process.
        match fs::metadata(path) {
            Ok(there) if there.ino() == file.metadata()?.ino() => return Ok(file),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    fn wanted(key: &str) -> Wanted<'_> {
        Wanted { kind: "thing", key: key.to_owned(), age_max: None }
    }

    fn write(dir: &Path) -> Result<(), Error> {
        let failed = |source| Error { path: "thing".to_owned(), source };
        fs::write(dir.join("it"), "whole").map_err(failed)
    }

    #[test]
    fn many_that_ask_at_once_get_the_same_that_was_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(&folder.path().join("not there yet"));
        let made = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let entry = cache.entry(&wanted("1"), |dir| {
                        made.fetch_add(1, Ordering::Relaxed);
                        write(dir)
                    });
                    let it = fs::read_to_string(entry.unwrap().dir.join("it")).unwrap();
                    assert_eq!(it, "whole");
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn another_key_replaces_an_entry_that_has_no_user() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let first = cache.entry(&wanted("1"), write).unwrap();
        let second = cache.entry(&wanted("2"), write).unwrap();
        assert!(first.dir.join("it").exists(), "it is in use");
        let gone = [first.dir.clone(), second.dir.clone()];
        drop((first, second));
        let third = cache.entry(&wanted("3"), write).unwrap();
        assert!(!gone[0].exists() && !gone[1].exists());
        assert!(!lock_of(&gone[0]).exists());
        let other = Wanted { kind: "other-thing", ..wanted("4") };
        cache.entry(&other, write).unwrap();
        assert!(third.dir.exists(), "it is of another kind");
    }

    #[test]
    fn an_entry_that_is_too_old_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let wanted = Wanted { age_max: Some(Duration::from_secs(60)), ..wanted("1") };
        let dir = cache.entry(&wanted, write).unwrap().dir;
        fs::write(dir.join("it"), "old").unwrap();
        drop(cache.entry(&wanted, |_| -> Result<(), Error> { panic!("it is there") }).unwrap());
        File::open(&dir).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        drop(cache.entry(&wanted, write).unwrap());
        assert_eq!(fs::read_to_string(dir.join("it")).unwrap(), "whole");
    }

    #[test]
    fn what_could_not_be_made_is_not_there_and_can_be_made_later() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let failed = cache.entry(&wanted("1"), |dir| {
            write(dir)?;
            Err(Error { path: "thing".to_owned(), source: io::Error::other("no") })
        });
        assert!(failed.is_err());
        let entry = cache.entry(&wanted("1"), write).unwrap();
        assert!(entry.dir.join("it").exists());
    }

    #[test]
    fn parts_of_a_key_do_not_run_together() {
        let key = |parts: &[&str]| {
            parts.iter().fold(Key::default(), |key, part| key.part(part.as_bytes())).digits()
        };
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["a"]), key(&["a"]));
        assert_eq!(key(&["a"]).len(), KEY_DIGITS);
    }
}
