//! The bundle that this node keeps for the others while a cluster updates itself: one file on
//! the data partition.
//!
//! ```text
//! pieces --checked on the way--> unfinished --flushed, renamed--> <image>.bundle --> other nodes
//!                                                                       \--no update needs it: removed
//! ```
//!
//! Invariants:
//! - A file with the name of a bundle was checked from its first to its last byte.
//! - The bundle leaves etcd, which is on the same partition, its room.
//!
//! What this module does not do: choose the holder of a bundle, or how long it keeps it
//! (`curator`). A file of this size is written as it arrives, so it does not go through
//! `files::File`.

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use polis_bundle::Bundle;
use semver::Version;
use tokio::sync::watch;
use tracing::{info, warn};

use super::install::{total, unread};
use super::{Error, Phase, Progress, Turn};
use polis_base::files::Dir;

/// Bytes that stay free beside a bundle: what etcd and the logs write during an update.
const RESERVE: u64 = 128 << 20;
/// Bytes between two flushes: etcd waits for the disk as long as one takes.
const STEP: u64 = 32 << 20;
/// The end of the name of a bundle.
const END: &str = ".bundle";
/// The name of one that is not whole.
const UNFINISHED: &str = "unfinished";

/// Where the bundle is. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store(Arc<Dir>);

/// A bundle that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its version.
    pub version: Version,
}

impl Store {
    /// The bundles in a directory, which need not exist yet.
    #[must_use]
    pub fn new(dir: Dir) -> Self {
        Self(Arc::new(dir))
    }

    /// The image of the bundle that is kept. Reads the directory.
    #[must_use]
    pub fn kept(&self) -> Option<String> {
        let entries = fs::read_dir(self.0.path()).ok()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| Some(name.strip_suffix(END)?.to_owned())).min()
    }

    /// Opens the bundle of an image; `None` where this node does not keep it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn open(&self, image: &str) -> Result<Option<File>, Error> {
        // The name is compared, and never becomes a path.
        if self.kept().as_deref() != Some(image) {
            return Ok(None);
        }
        let path = self.path(image);
        File::open(&path).map(Some).map_err(Error::io(format!("open {}", path.display())))
    }

    /// Removes every bundle but that of `image`; an empty word means all.
    pub fn keep_only(&self, image: &str) {
        while let Some(other) = self.kept().filter(|kept| kept != image) {
            let path = self.path(&other);
            if let Err(error) = fs::remove_file(&path) {
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot remove {}", path.display());
                return;
            }
            info!(image = other, "the bundle of an update is not needed here any more");
        }
    }

    fn path(&self, image: &str) -> PathBuf {
        self.0.path().join(format!("{image}{END}"))
    }

    /// Fails unless there is room for so many bytes.
    fn room(&self, needs: u64) -> Result<(), Error> {
        let path = self.0.path();
        let space = rustix::fs::statvfs(path).map_err(io::Error::from);
        let space = space.map_err(Error::io(format!("look at {}", path.display())))?;
        let has = (space.f_bavail * space.f_frsize).saturating_sub(RESERVE);
        if needs > has { Err(Error::Space { needs, has }) } else { Ok(()) }
    }
}

impl Turn {
    /// Reads a bundle and keeps it for other nodes, in place of any other. Blocks for as long as
    /// the disk and the sender take.
    ///
    /// # Errors
    ///
    /// [`Error`]: no bundle is kept.
    pub fn keep(
        self,
        bundle: impl Read,
        store: &Store,
        progress: &watch::Sender<Progress>,
    ) -> Result<Kept, Error> {
        let unfinished = store.0.path().join(UNFINISHED);
        let creating = || Error::io(format!("create {}", unfinished.display()));
        store.0.create().map_err(|error| creating()(io::Error::other(error)))?;
        let file = File::create(&unfinished).map_err(creating())?;
        let written = self.keep_in(Copied { from: bundle, file, unflushed: 0 }, store, progress);
        if written.is_err() {
            // Useless, and the next one begins anew.
            fs::remove_file(&unfinished).unwrap_or_default();
        }
        written
    }

    fn keep_in<R: Read>(
        &self,
        mut copied: Copied<R>,
        store: &Store,
        progress: &watch::Sender<Progress>,
    ) -> Result<Kept, Error> {
        let bundle = Bundle::open(&mut copied, Some(&self.key)).map_err(unread)?;
        // Another one makes room; the same one stays until this one is whole.
        store.keep_only(&bundle.manifest().image);
        let total = total(bundle.manifest());
        store.room(total)?;
        let mut bytes = 0;
        let mut more = |count| {
            bytes += count;
            progress.send_replace(Progress { phase: Phase::Write, bytes, total });
        };
        let manifest = bundle.parts([&mut io::sink(), &mut io::sink()], &mut more);
        let manifest = manifest.map_err(unread)?;
        copied.file.sync_all().map_err(Error::io("flush the bundle"))?;
        let path = store.path(&manifest.image);
        let naming = || Error::io(format!("make {}", path.display()));
        fs::rename(store.0.path().join(UNFINISHED), &path).map_err(naming())?;
        store.0.flush().map_err(|error| naming()(io::Error::other(error)))?;
        info!(version = %manifest.version, image = manifest.image, "a bundle is kept for others");
        Ok(Kept { version: manifest.version })
    }
}

/// A reader whose bytes go to a file, too.
struct Copied<R> {
    from: R,
    file: File,
    unflushed: u64,
}

impl<R: Read> Read for Copied<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.file.write_all(&buffer[..count])?;
        self.unflushed += count as u64;
        if self.unflushed >= STEP {
            self.file.sync_data()?;
            self.unflushed = 0;
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use polis_bundle::Refusal;

    use super::*;
    use crate::update::install::tests::{Machine, bundle, key};

    const IMAGE: &str = "0123456789abcdef";

    fn store(folder: &tempfile::TempDir) -> Store {
        Store::new(polis_base::files::Root::at(folder.path()).data.update)
    }

    fn keep(machine: &Machine, store: &Store, bundle: &[u8]) -> Result<Kept, Error> {
        machine.enter().keep(bundle, store, &watch::Sender::default())
    }

    #[test]
    fn a_bundle_is_kept_byte_for_byte_until_no_update_needs_it() {
        let folder = tempfile::tempdir().unwrap();
        let (machine, store) = (Machine::new("polis-1.0.0.efi"), store(&folder));
        fs::create_dir_all(folder.path().join("data")).unwrap();
        assert_eq!(store.kept(), None);
        let whole = bundle("1.1.0", &key());
        let kept = keep(&machine, &store, &whole).unwrap();
        assert_eq!(kept.version, Version::new(1, 1, 0));
        assert_eq!(store.kept().as_deref(), Some(IMAGE));
        let mut bytes = Vec::new();
        store.open(IMAGE).unwrap().unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes == whole);
        for other in ["", "00", "../update/0123456789abcdef"] {
            assert!(store.open(other).unwrap().is_none(), "{other}");
        }
        store.keep_only(IMAGE);
        assert_eq!(store.kept().as_deref(), Some(IMAGE));
        store.keep_only("");
        assert_eq!(store.kept(), None);
        assert!(fs::read_dir(folder.path().join("data/update")).unwrap().next().is_none());
    }

    #[test]
    fn a_bundle_that_breaks_a_rule_or_has_no_room_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (machine, store) = (Machine::new("polis-1.0.0.efi"), store(&folder));
        fs::create_dir_all(folder.path().join("data")).unwrap();
        let whole = bundle("1.1.0", &key());
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let foreign = bundle("1.1.0", &SigningKey::from_bytes(&[2; 32]));
        let longer = [&whole[..], &[0]].concat();
        for wrong in [&flipped[..], &whole[..whole.len() - 1], &foreign, &longer] {
            let error = keep(&machine, &store, wrong).unwrap_err();
            assert!(matches!(error, Error::Refused(_)), "{error:?}");
            assert_eq!(store.kept(), None);
            assert!(fs::read_dir(folder.path().join("data/update")).unwrap().next().is_none());
        }
        let refused = keep(&machine, &store, &foreign).unwrap_err();
        assert!(matches!(refused, Error::Refused(Refusal::Signer { .. })));
        let error = store.room(u64::MAX).unwrap_err();
        assert_eq!(error.word(), "update-no-space");
    }
}
