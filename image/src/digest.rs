//! Content hashes, cached by the file metadata that the kernel reports.
//!
//! Hashing hundreds of megabytes each time would cost more than a build without work
//! may take, so a file with unchanged size, times and inode keeps its known hash.
//!
//! Invariants:
//! - The change time is part of the stamp: programs cannot set it back, so a file
//!   written in place never matches its earlier stamp.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Mutex,
};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{At as _, Result};

/// How much of a file is read at a time.
const CHUNK: usize = 1 << 20;

/// The kernel's metadata of a file; changes whenever the file does.
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
    /// Opens the cache kept in `store`; an unreadable one counts as empty.
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
        let digest = sha256(path)?;
        self.known().insert(path.to_owned(), (stamp, digest.clone()));
        Ok(digest)
    }

    /// Saves the known hashes.
    pub(crate) fn save(&self) -> Result<()> {
        let entries: Vec<_> = self.known().clone().into_iter().collect();
        let bytes = serde_json::to_vec(&entries).map_err(std::io::Error::from);
        fs::write(&self.store, bytes.at("describe", &self.store)?).at("write", &self.store)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, (Stamp, String)>> {
        // A panic while the lock was held leaves the map consistent: it is only ever
        // changed by entry.
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The SHA-256 of a file, in hexadecimal, read again.
///
/// # Errors
///
/// The file cannot be read.
pub fn sha256(path: &Path) -> Result<String> {
    hash_sparse(&File::open(path).at("open", path)?).at("read", path)
}

/// Hashes a file without reading its holes: that would fill the host's memory
/// with gigabytes of zeros, which takes several times as long as hashing them.
fn hash_sparse(file: &File) -> io::Result<String> {
    let length = file.metadata()?.len();
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < length {
        let (start, end) = next_data(file, at, length)?;
        buffer.fill(0);
        while at < start {
            let count = chunk(start - at);
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
        while at < end {
            let count = chunk(end - at);
            file.read_exact_at(&mut buffer[..count], at)?;
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Where data comes next from `at` on, and where it ends.
fn next_data(file: &File, at: u64, length: u64) -> io::Result<(u64, u64)> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        // Only a hole follows.
        Err(Errno::NXIO) => return Ok((length, length)),
        // Not every file system reports its holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at, length)),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(start))?;
    Ok((start.min(length), end.min(length)))
}

/// The next piece of a range: as much as the buffer holds.
fn chunk(left: u64) -> usize {
    usize::try_from(left).unwrap_or(CHUNK).min(CHUNK)
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
    fn holes_are_hashed_as_the_zeros_that_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        file.set_len(5_000_001).unwrap();
        assert_eq!(sha256(&path).unwrap(), hash(&[0; 5_000_001]));
        file.write_all_at(b"in the middle", 2_100_000).unwrap();
        file.write_all_at(b"first", 0).unwrap();
        assert_eq!(sha256(&path).unwrap(), hash(&fs::read(&path).unwrap()));
    }

    #[test]
    fn a_saved_digest_is_found_again_and_invalid_text_is_ignored() {
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
