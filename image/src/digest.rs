//! Content hashes, remembered by what the kernel says about a file.
//!
//! Hashing hundreds of megabytes each time would cost more than a build that
//! has nothing to do may take, so a file whose size, times and inode are as
//! they were is taken to have the hash it had.
//!
//! Invariants:
//! - The change time is part of the stamp: nobody can set it back, so a file
//!   written in place is never mistaken for its past self.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{At as _, Result};

/// How much of a file is read at a time.
const CHUNK: usize = 1 << 20;

/// What the kernel says about a file; changes whenever the file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    size: u64,
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path).at("look at", path)?;
        Ok(Self {
            size: metadata.size(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// The hashes known so far.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    store: PathBuf,
    known: Mutex<BTreeMap<PathBuf, (Stamp, String)>>,
}

impl Digests {
    /// Opens the memory kept in `store`; one that cannot be read is empty.
    pub(crate) fn open(store: PathBuf) -> Self {
        let known = fs::read(&store)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Vec<_>>(&bytes).ok())
            .map(|entries: Vec<(PathBuf, (Stamp, String))>| entries.into_iter().collect())
            .unwrap_or_default();
        Self { store, known: Mutex::new(known) }
    }

    /// The SHA-256 of a file, in hexadecimal.
    pub(crate) fn of(&self, path: &Path) -> Result<String> {
        let stamp = Stamp::of(path)?;
        if let Some((known, digest)) = self.known().get(path)
            && *known == stamp
        {
            return Ok(digest.clone());
        }
        let digest = hash_file(path)?;
        self.known().insert(path.to_owned(), (stamp, digest.clone()));
        Ok(digest)
    }

    /// Writes down what is known.
    pub(crate) fn save(&self) -> Result<()> {
        let entries: Vec<_> = self.known().clone().into_iter().collect();
        let bytes = serde_json::to_vec(&entries).map_err(std::io::Error::from);
        fs::write(&self.store, bytes.at("describe", &self.store)?).at("write", &self.store)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, (Stamp, String)>> {
        // A panic while the lock was held leaves the map whole: it is only ever replaced by entry.
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The SHA-256 of a file, in hexadecimal, read anew.
pub(crate) fn hash_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).at("open", path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = file.read(&mut buffer).at("read", path)?;
        if count == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..count]);
    }
}

/// The SHA-256 of a file, in hexadecimal, read anew.
///
/// # Errors
///
/// The file cannot be read.
pub fn sha256(path: &Path) -> Result<String> {
    hash_file(path)
}

/// The SHA-256 of bytes, in hexadecimal.
pub(crate) fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_written_in_place_has_a_new_hash() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let digests = Digests::open(folder.path().join("store"));
        fs::write(&path, "one").unwrap();
        let one = digests.of(&path).unwrap();
        assert_eq!(one, hash(b"one"));
        fs::remove_file(&path).unwrap();
        fs::write(&path, "two").unwrap();
        assert_eq!(digests.of(&path).unwrap(), hash(b"two"));
    }

    #[test]
    fn what_was_saved_is_known_again_and_noise_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (path, store) = (folder.path().join("file"), folder.path().join("store"));
        fs::write(&path, "one").unwrap();
        let digests = Digests::open(store.clone());
        let digest = digests.of(&path).unwrap();
        digests.save().unwrap();
        let again = Digests::open(store.clone());
        assert_eq!(again.known().get(&path).unwrap().1, digest);
        fs::write(&store, b"\0noise").unwrap();
        assert!(Digests::open(store).known().is_empty());
    }
}
