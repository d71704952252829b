//! The bundle that this node keeps for the others while a cluster updates itself: one file on
//! the data partition.
//!
//! ```text
//! pieces --checked on the way--> unfinished --flushed, renamed--> <image>.bundle --> other nodes
//!                      \--the transfer breaks: the next one goes on
//!                                                              \--no update needs it: removed
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
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use polis_bundle::Bundle;
use semver::Version;
use tokio::sync::watch;
use tracing::{info, warn};

use super::receive::{self, Unfinished};
use super::{Error, Progress, Turn};
use polis_base::files::Dir;

/// Bytes that stay free beside a bundle: what etcd and the logs write during an update.
const RESERVE: u64 = 128 << 20;
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
        self.images().into_iter().min()
    }

    /// The images of all bundles: several only where one could not be removed.
    fn images(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter_map(|name| Some(name.strip_suffix(END)?.to_owned())).collect()
    }

    /// Opens the bundle of an image; `None` where this node does not keep it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn open(&self, image: &str) -> Result<Option<File>, Error> {
        // The name of the caller is compared, and never becomes a path.
        let Some(image) = self.images().into_iter().find(|kept| kept == image) else {
            return Ok(None);
        };
        let path = self.path(&image);
        File::open(&path).map(Some).map_err(Error::io(format!("open {}", path.display())))
    }

    /// Removes every bundle but that of `image`; an empty word means all.
    pub(super) fn keep_only(&self, image: &str) {
        for other in self.images().into_iter().filter(|kept| kept != image) {
            let path = self.path(&other);
            match fs::remove_file(&path) {
                Ok(()) => {
                    info!(image = other, "the bundle of an update is not needed here any more");
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(error, "cannot remove {}", path.display());
                }
            }
        }
    }

    fn unfinished(&self) -> PathBuf {
        self.0.path().join(UNFINISHED)
    }

    /// Whether there is a bundle that did not come whole.
    pub(super) fn has_unfinished(&self) -> bool {
        self.unfinished().exists()
    }

    /// Removes a bundle that did not come whole. One that stays is overwritten by the next.
    pub(super) fn clear_unfinished(&self) {
        fs::remove_file(self.unfinished()).unwrap_or_default();
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

    /// Writes a bundle, but for the first `written` bytes of its parts, which are there.
    fn receive<R: Read>(
        &self,
        bundle: Bundle<R>,
        written: &mut u64,
        progress: &watch::Sender<Progress>,
    ) -> Result<Kept, Error> {
        let path = self.unfinished();
        let creating = || Error::io(format!("create {}", path.display()));
        self.0.create().map_err(|error| creating()(io::Error::other(error)))?;
        let resumes = *written > 0;
        if !resumes {
            // Another one makes room.
            self.clear_unfinished();
        }
        // The same one stays until this one is whole.
        let manifest = bundle.manifest();
        self.keep_only(&manifest.image);
        self.room(receive::total(manifest).saturating_sub(*written))?;
        let kernel = bundle.head().len() as u64;
        let system = kernel + manifest.kernel.size;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(!resumes);
        let file = options.open(&path).map_err(creating())?;
        // Also of one that goes on: the parts alone are hashed again.
        file.write_all_at(bundle.head(), 0).map_err(Error::io("write the bundle"))?;
        let places = [kernel, system].map(|at| receive::Place { file: &file, at });
        let manifest = receive::parts(bundle, places, written, progress)?;
        file.sync_all().map_err(Error::io("flush the bundle"))?;
        let named = self.path(&manifest.image);
        let naming = || Error::io(format!("make {}", named.display()));
        fs::rename(&path, &named).map_err(naming())?;
        self.0.flush().map_err(|error| naming()(io::Error::other(error)))?;
        info!(version = %manifest.version, image = manifest.image, "a bundle is kept for others");
        Ok(Kept { version: manifest.version })
    }
}

impl Turn {
    /// Reads a bundle and keeps it for other nodes, in place of any other. Blocks for as long as
    /// the disk and the sender take.
    ///
    /// `bundle` begins at the byte `at` of the bundle: zero, or where the unfinished one of this
    /// purpose ends.
    ///
    /// # Errors
    ///
    /// [`Error`]: no bundle is kept.
    pub fn keep(
        mut self,
        bundle: impl Read,
        at: u64,
        store: &Store,
        progress: &watch::Sender<Progress>,
    ) -> Result<Kept, Error> {
        let unfinished = self.left.bundle.as_ref();
        let (bundle, mut written) = receive::open(unfinished, at, bundle, &self.key)?;
        let (head, image) = (bundle.head().to_vec(), bundle.manifest().image.clone());
        self.left.bundle = None;
        let kept = store.receive(bundle, &mut written, progress);
        if let Err(error) = &kept {
            self.left.bundle = Unfinished::after(error, &head, &image, written);
            if self.left.bundle.is_none() {
                store.clear_unfinished();
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::SigningKey;
    use polis_bundle::Refusal;

    use super::*;
    use crate::update::Purpose;
    use crate::update::install::tests::{Machine, bundle, key};

    const IMAGE: &str = "0123456789abcdef";

    fn store(folder: &tempfile::TempDir) -> Store {
        Store::new(polis_base::files::Root::at(folder.path()).data.update)
    }

    fn keep(machine: &Machine, store: &Store, bundle: &[u8]) -> Result<Kept, Error> {
        machine.enter().keep(bundle, 0, store, &watch::Sender::default())
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
    fn a_bundle_is_found_beside_others_and_all_others_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (store, bundles) = (store(&folder), folder.path().join("data/update"));
        fs::create_dir_all(&bundles).unwrap();
        for image in ["0a", "0b", "0c"] {
            fs::write(bundles.join(format!("{image}{END}")), image).unwrap();
        }
        assert!(store.open("0c").unwrap().is_some());
        store.keep_only("0b");
        assert_eq!(store.images(), ["0b"]);
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
        for wrong in [&flipped[..], &whole[..20], &foreign, &longer] {
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

    #[test]
    fn a_transfer_that_broke_goes_on_where_it_was_for_as_long_as_its_update_does() {
        let folder = tempfile::tempdir().unwrap();
        let (machine, store) = (Machine::new("polis-1.0.0.efi"), store(&folder));
        fs::create_dir_all(folder.path().join("data")).unwrap();
        let whole = bundle("1.1.0", &key());
        let half = whole.len() - (1 << 20) - 1;
        let at = || machine.enter().unfinished(Purpose::Keep).map_or(0, Unfinished::at);
        let breaks = || {
            let error = keep(&machine, &store, &whole[..half]).unwrap_err();
            assert!(matches!(error, Error::Refused(Refusal::Short { .. })), "{error:?}");
            assert!(at() > 0 && store.kept().is_none() && store.has_unfinished());
        };
        breaks();
        machine.door.keep_only(&store, IMAGE);
        let from = at();
        let turn = machine.enter();
        machine.door.keep_only(&store, "00");
        assert!(store.has_unfinished(), "a transfer goes on");
        let rest = &whole[usize::try_from(from).unwrap()..];
        // A byte of the signature that changed on the disk would reach every other node.
        let mut bytes = fs::read(store.unfinished()).unwrap();
        bytes[60] ^= 1;
        fs::write(store.unfinished(), bytes).unwrap();
        turn.keep(rest, from, &store, &watch::Sender::default()).unwrap();
        let mut bytes = Vec::new();
        store.open(IMAGE).unwrap().unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes == whole && at() == 0);
        // Bytes that changed on the disk are not kept.
        store.keep_only("");
        breaks();
        let from = at();
        let mut bytes = fs::read(store.unfinished()).unwrap();
        bytes[1 << 20] ^= 1;
        fs::write(store.unfinished(), bytes).unwrap();
        let kept = machine.enter().keep(rest, from, &store, &watch::Sender::default());
        assert!(matches!(kept, Err(Error::Differs(_))), "{kept:?}");
        assert!(at() == 0 && store.kept().is_none() && !store.has_unfinished());
        // Another update, or none, needs its room; and so it is after a loss of power.
        breaks();
        machine.door.keep_only(&store, "");
        assert!(at() == 0 && !store.has_unfinished());
        fs::write(store.unfinished(), "of an earlier start").unwrap();
        machine.door.keep_only(&store, IMAGE);
        assert!(!store.has_unfinished());
    }
}
