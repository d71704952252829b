//! The volumes on the data partition: makes, enlarges and removes their directories.
//!
//! ```text
//! /data/volumes/pvc-UID/           the node's own; its project is that of the volume
//!               |  claim           NAMESPACE/NAME of the claim it was made for
//!               `- content/        what pods see
//! /data/volumes/.trash-...         what is being removed (`trash`)
//! ```
//!
//! All that is known of a volume is here: its name, its project, and in the file system the
//! limits of the project, which are its size. Pods see `content` only. A process in a pod
//! that owns its files may give them another project; it reaches neither the directory
//! above nor the limits.
//!
//! ```text
//! make    room -> directory -> claim -> limits -> project -> content -> flushed
//! trash   renamed -> flushed
//! ```
//!
//! Invariants:
//! - A step that was done is recognised, so each operation may be repeated from its start
//!   after a power cut between any two steps.
//! - `content` exists only in a directory with a project that has limits.
//! - A project belongs to one volume, also while that is being removed.
//! - A volume is removed by its name only, and never becomes one of another name.
//! - The room of the volumes is taken from workloads first (`host::quota`).
//!
//! What this module does not do: decide which volumes exist (`reconcile`).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polis_base::files::{self, Data, Dir};
use polis_base::sys::quota::{Limits, Project, Usage};
use tracing::info;

use super::disk::Disk;
use super::trash::{self, Swept};
use super::volume_id::VolumeId;
use crate::host::quota::{self, Kernel, Turn, VOLUME_FIRST};

/// The directory that pods see, and the file that says whose it is.
const CONTENT: &str = "content";
const CLAIM: &str = "claim";

/// As in a volume without a name: which user writes is the matter of the pod, and other pods
/// do not see the directory.
const CONTENT_MODE: u32 = 0o777;
/// Of the directory above, the node's own.
const VOLUME_MODE: u32 = 0o700;

/// The name of a claim with its namespace is much shorter.
const CLAIM_MAX: u64 = 1024;

/// Sizes are whole multiples of this.
pub(super) const UNIT: u64 = 1 << 20;

/// More projects than volumes that a node can have.
const PROJECTS_MAX: u32 = 1 << 20;

/// Removals of volumes with one name that are under way at once: each claim has one volume.
const TRASH_MAX: u32 = 16;

/// Why the disk is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The room does not suffice.
    #[error(transparent)]
    Room(#[from] quota::Error),
    /// The node does not have the volume.
    #[error("the volume {id} is not on this node")]
    Missing {
        /// The volume.
        id: VolumeId,
    },
    /// Every project has a volume.
    #[error("every project of the file system has a volume")]
    NoProject,
    /// The kernel refused.
    #[error("cannot {operation} {}", path.display())]
    Disk {
        /// The request that it refused.
        operation: &'static str,
        /// On which path.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// A file of the tree cannot be used.
    #[error(transparent)]
    Files(#[from] files::Error),
}

impl Error {
    /// Whether the volume does not fit, and may fit later.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Room(quota::Error::NoRoom { .. } | quota::Error::InUse { .. }))
    }
}

/// The volumes of this node. Cheap to clone; every method blocks.
#[derive(Clone, Debug)]
pub struct Store {
    volumes: Dir,
    disk: Arc<dyn Disk>,
}

impl Store {
    /// The volumes of a running node.
    #[must_use]
    pub fn live(data: &Data) -> Self {
        let kernel = Kernel { mount: data.mount.path().to_owned() };
        Self::new(data.volumes.clone(), Arc::new(kernel))
    }

    /// The volumes in a directory of this disk.
    #[must_use]
    pub fn new(volumes: Dir, disk: Arc<dyn Disk>) -> Self {
        Self { volumes, disk }
    }

    /// The directory that pods see.
    pub(super) fn content(&self, id: &VolumeId) -> PathBuf {
        self.place(id).join(CONTENT)
    }

    fn place(&self, id: &VolumeId) -> PathBuf {
        self.volumes.path().join(id.as_str())
    }

    fn claim_file(&self, id: &VolumeId) -> files::File {
        files::File::private(self.place(id).join(CLAIM)).at_most(CLAIM_MAX)
    }

    /// Makes a volume of at least `bytes` for the claim with this name, unless it exists;
    /// returns its size, a multiple of [`UNIT`].
    ///
    /// # Errors
    ///
    /// [`Error`]: nothing is lost, and the call may be repeated.
    pub fn make(&self, id: &VolumeId, claim: &str, bytes: u64) -> Result<u64, Error> {
        let turn = quota::turn();
        self.volumes.create()?;
        let place = self.place(id);
        let bytes = whole(bytes);
        let present = self.found(id)?;
        let has = present.as_ref().and_then(|found| found.usage);
        let has = has.map_or(0, |usage| usage.limits.bytes);
        let bytes = bytes.max(has);
        let project = match present {
            // Each step was done, and is perhaps not flushed.
            Some(Found { project: Some(project), whole: true, .. }) if has == bytes => project,
            present => self.begin(&turn, id, claim, present, bytes)?,
        };
        let (disk, content) = (&self.disk, self.content(id));
        self.step("set the project of", &content, |path| disk.set_project(path, project))?;
        self.step("flush", &place, |path| disk.flush(path))?;
        self.step("flush", self.volumes.path(), |path| disk.flush(path))?;
        info!(volume = %id, claim, project = project.number(), mib = bytes / UNIT, "made");
        Ok(bytes)
    }

    /// The steps up to the directory that pods see; returns the project.
    fn begin(
        &self,
        turn: &Turn,
        id: &VolumeId,
        claim: &str,
        present: Option<Found>,
        bytes: u64,
    ) -> Result<Project, Error> {
        let (disk, place) = (&self.disk, self.place(id));
        let has = present.as_ref().and_then(|found| found.usage);
        self.divide(turn, bytes - has.map_or(0, |usage| usage.limits.bytes))?;
        self.step("make", &place, |path| disk.make(path, VOLUME_MODE))?;
        let label = self.claim_file(id);
        self.step("write", label.path(), |_| disk.write(&label, claim.as_bytes()))?;
        let project = match present.and_then(|found| found.project) {
            Some(project) => project,
            None => self.free_project()?,
        };
        let limits = quota::limits_of(bytes);
        self.step("set the quota of", &place, |_| disk.set_limits(project, limits))?;
        self.step("set the project of", &place, |path| disk.set_project(path, project))?;
        let content = self.content(id);
        self.step("make", &content, |path| disk.make(path, CONTENT_MODE))?;
        Ok(project)
    }

    /// Gives a volume at least `bytes`; returns its size. It never becomes smaller.
    ///
    /// # Errors
    ///
    /// [`Error`]: the volume is as it was, or larger.
    pub fn enlarge(&self, id: &VolumeId, bytes: u64) -> Result<u64, Error> {
        let turn = quota::turn();
        let missing = || Error::Missing { id: id.clone() };
        let found = self.found(id)?.filter(|found| found.whole).ok_or_else(missing)?;
        let project = found.project.ok_or_else(missing)?;
        let has = found.usage.map_or(0, |usage| usage.limits.bytes);
        let bytes = whole(bytes);
        if has >= bytes {
            return Ok(has);
        }
        self.divide(&turn, bytes - has)?;
        let place = self.place(id);
        self.step("set the quota of", &place, |_| {
            self.disk.set_limits(project, quota::limits_of(bytes))
        })?;
        // A power cut may take the new limits back: the next pass sees the size in the
        // object, and enlarges the volume again.
        info!(volume = %id, mib = bytes / UNIT, "enlarged");
        Ok(bytes)
    }

    /// The size that a new volume could have now, a multiple of [`UNIT`].
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn room(&self) -> Result<u64, Error> {
        Ok(quota::room(&quota::turn(), &*self.disk, self.volumes.path(), UNIT)?)
    }

    /// The usage and the limits of a volume; `None` if it is not on this node.
    ///
    /// # Errors
    ///
    /// [`Error::Disk`].
    pub fn usage(&self, id: &VolumeId) -> Result<Option<Usage>, Error> {
        let found = self.found(id)?.filter(|found| found.whole);
        Ok(found.and_then(|found| found.usage))
    }

    /// Begins to remove a volume with all its content; a missing one is not an error.
    /// After a return it is never seen again, not even after a power cut.
    ///
    /// # Errors
    ///
    /// [`Error::Disk`].
    pub fn trash(&self, id: &VolumeId) -> Result<(), Error> {
        let _turn = quota::turn();
        let place = self.place(id);
        for number in 0..TRASH_MAX {
            let name = match number {
                0 => format!("{}{}", trash::PREFIX, id.claim()),
                number => format!("{}{}-{number}", trash::PREFIX, id.claim()),
            };
            match self.disk.rename(&place, &self.volumes.path().join(name)) {
                Ok(()) => {
                    info!(volume = %id, "is being removed");
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                // The name belongs to a volume whose removal goes on.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                    ) && number + 1 < TRASH_MAX => {}
                Err(source) => {
                    return Err(Error::Disk { operation: "remove", path: place, source });
                }
            }
        }
        // Also when it was renamed before: that may have been cut off.
        match self.disk.flush(self.volumes.path()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => {
                let path = self.volumes.path().to_owned();
                Err(Error::Disk { operation: "flush", path, source })
            }
        }
    }

    /// Removes a volume if nothing was ever written to it; returns whether it is gone.
    ///
    /// # Errors
    ///
    /// [`Error::Disk`].
    pub fn abandon(&self, id: &VolumeId) -> Result<bool, Error> {
        match self.disk.remove(&self.content(id)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(false),
            Err(source) => {
                return Err(Error::Disk { operation: "remove", path: self.content(id), source });
            }
        }
        self.trash(id).map(|()| true)
    }

    /// The volumes without content, and the claims they were made for: those that a power cut
    /// may have left behind.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn empty(&self) -> Result<Vec<(VolumeId, String)>, Error> {
        let mut empty = Vec::new();
        for id in self.ids()? {
            let content = self.content(&id);
            let entry = match std::fs::read_dir(&content) {
                Ok(mut entries) => entries.next().is_some(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(source) => {
                    return Err(Error::Disk { operation: "list", path: content, source });
                }
            };
            if !entry {
                let claim = self.claim_file(&id).read()?.unwrap_or_default();
                empty.push((id, String::from_utf8_lossy(&claim).into_owned()));
            }
        }
        Ok(empty)
    }

    /// Every volume of this node.
    ///
    /// # Errors
    ///
    /// [`Error::Disk`].
    pub fn ids(&self) -> Result<Vec<VolumeId>, Error> {
        let mut ids = Vec::new();
        for name in self.names()? {
            ids.extend(name.parse::<VolumeId>());
        }
        Ok(ids)
    }

    /// Removes the next part of what is to be removed, and gives its room back to workloads
    /// once all of it is gone.
    ///
    /// # Errors
    ///
    /// [`Error`]: the next call tries the rest again. The room of the removed volumes is
    /// given back all the same.
    pub fn sweep(&self) -> Result<Swept, Error> {
        let swept = self.step("sweep", self.volumes.path(), |path| self.disk.sweep(path));
        if matches!(swept, Ok(Swept::Nothing | Swept::Part)) {
            return swept;
        }
        let divided = self.divide(&quota::turn(), 0);
        let swept = swept?;
        let (volumes, workloads_mib) = (self.names()?.len(), divided?.bytes / UNIT);
        info!(volumes, workloads_mib, "removed all that was left of volumes");
        Ok(swept)
    }

    /// The object in the place of a volume.
    fn found(&self, id: &VolumeId) -> Result<Option<Found>, Error> {
        let place = self.place(id);
        if !is_there(&place)? {
            return Ok(None);
        }
        let project = self.step("read the project of", &place, |path| self.disk.project(path))?;
        let project = project.filter(|project| project.number() >= VOLUME_FIRST);
        let usage = match project {
            Some(project) => {
                self.step("read the quota of", &place, |_| self.disk.usage(project))?
            }
            None => None,
        };
        let limited = usage.is_some_and(|usage| usage.limits.bytes > 0);
        let whole = limited && is_there(&self.content(id))?;
        Ok(Some(Found { project, usage, whole }))
    }

    /// A project that no volume has, nor has any file on the disk.
    fn free_project(&self) -> Result<Project, Error> {
        let mut taken = BTreeSet::new();
        for name in self.names()? {
            let path = self.volumes.path().join(name);
            if path.symlink_metadata().is_ok_and(|entry| entry.is_dir()) {
                let read = self.step("read the project of", &path, |path| self.disk.project(path));
                taken.extend(read?);
            }
        }
        for number in VOLUME_FIRST..VOLUME_FIRST.saturating_add(PROJECTS_MAX) {
            let Some(project) = Project::new(number) else { continue };
            if taken.contains(&project) {
                continue;
            }
            let path = self.volumes.path();
            let usage = self.step("read the quotas of", path, |_| self.disk.usage(project))?;
            // A file that was removed counts while a process has it open.
            if usage.is_none_or(|usage| usage.inodes == 0) {
                return Ok(project);
            }
        }
        Err(Error::NoProject)
    }

    /// The names in the directory of volumes, those that are UTF-8.
    fn names(&self) -> Result<Vec<String>, Error> {
        let path = self.volumes.path();
        let failed = |source| Error::Disk { operation: "list", path: path.to_owned(), source };
        let entries = match std::fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed(source)),
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    fn divide(&self, turn: &Turn, more: u64) -> Result<Limits, Error> {
        Ok(quota::divide(turn, &*self.disk, self.volumes.path(), more)?)
    }

    fn step<T>(
        &self,
        operation: &'static str,
        path: &Path,
        step: impl FnOnce(&Path) -> io::Result<T>,
    ) -> Result<T, Error> {
        step(path).map_err(|source| Error::Disk { operation, path: path.to_owned(), source })
    }
}

/// Whether there is a directory at this path. A directory that the disk does not read is not
/// missing: an operator gives up the object of a missing volume.
fn is_there(path: &Path) -> Result<bool, Error> {
    match path.metadata() {
        Ok(entry) => Ok(entry.is_dir()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(Error::Disk { operation: "look at", path: path.to_owned(), source }),
    }
}

/// The object in the place of a volume.
#[derive(Debug)]
struct Found {
    project: Option<Project>,
    usage: Option<Usage>,
    /// Each step of its making was done.
    whole: bool,
}

/// A size as volumes have it.
pub(super) fn whole(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT).saturating_mul(UNIT)
}

#[cfg(test)]
#[path = "store_tests.rs"]
pub(super) mod tests;
