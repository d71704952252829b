//! The update of this node: takes another system, tries it, and keeps it or goes back.
//!
//! ```text
//! bundle --> [install] --> the other slot, read back --> polis-V+1.efi --> reboot
//!                                                             |
//!   the loader takes the try: polis-V+0-1.efi <---------------+
//!         |                        |
//!         | ready, cluster healthy,| never ready, an unhealthy cluster, a workload lost, a
//!         | workloads as before:   | guru, a panic: the loader starts the system before, which
//!         v polis-V.efi            v reports it
//!       [kept]                  [gone back]
//! ```
//!
//! Everything that is known of a system beside the running one is the name of its kernel
//! image on the ESP ([`entry`]), so no record can contradict it. One file says what the node was
//! before: the workloads that were ready ([`workload`]).
//!
//! Invariants:
//! - Nothing of the running system is written to: neither its partition nor its kernel image.
//! - A kernel image gets a name that the loader lists only when it and its system were read
//!   back from the disk; while a slot is written, no kernel image names its system.
//! - The try is taken by the loader, before the system runs.
//!
//! In an update of the whole cluster, one node keeps the bundle for the others ([`Store`]).
//!
//! What this module does not do: take the pieces of a bundle from the network (`management`, and
//! `agent` in an update of the cluster), reboot (the same), and choose the slot at a start (`init`
//! finds the system by its root hash).

mod entry;
mod install;
mod pieces;
mod receive;
mod service;
mod store;
pub mod workload;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ed25519_dalek::VerifyingKey;
use polis_bundle::{EtcdRefusal, Refusal};
use semver::Version;
use tokio::sync::{OwnedMutexGuard, watch};

pub use self::entry::{Entry, Standing};
pub use self::install::Installed;
pub use self::pieces::{PIECES, Pieces};
use self::receive::Left;
pub use self::receive::{Purpose, Unfinished};
pub use self::service::{ClusterHealth, NO_REPORT, Service, TRIAL};
pub use self::store::{Kept, Store};
use self::workload::Workload;
use crate::storage::slot;
use polis_base::environment::Environment;
use polis_base::serial::EventLine;
use polis_base::sys::{command_line, efivar};
use polis_base::{files, hex};
use polis_runtime::lines::Lines;

/// The word of the command line with the release key; zeros where the image has none.
const RELEASE_KEY: &str = "polis.release-key";
/// The line of `os-release` with the variant; a base image has none.
const VARIANT: &str = "POLIS_VARIANT=";
const BASE: &str = "base";
/// The line of `os-release` with the version of Kubernetes; a base image has none.
const KUBERNETES: &str = "POLIS_KUBERNETES=";

/// The machine, as far as an update concerns it. Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk that the machine was booted from.
    pub disk: PathBuf,
    /// The slot that it runs from: `A` or `B`.
    pub slot: String,
    /// The version that runs.
    pub version: String,
    /// Which programs its image has.
    pub variant: String,
    /// The version of Kubernetes in its image; `None` in an image without workloads.
    pub kubernetes: Option<Version>,
    /// The key whose bundles it takes; `None` in an image without keys, which takes no bundle.
    pub release_key: Option<VerifyingKey>,
    /// The kernel images on the ESP.
    pub kernels: PathBuf,
    /// The variables of the firmware.
    pub efivars: PathBuf,
    /// The workloads that were ready when an update was installed.
    pub before: files::File,
}

impl Config {
    /// The machine that this process runs on. Reads two small files of the kernel and the
    /// system.
    #[must_use]
    pub fn live(environment: &Environment, tree: &files::Root) -> Self {
        let line = command_line::read().unwrap_or_default();
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        Self {
            disk: environment.disk.clone(),
            slot: environment.slot.clone(),
            version: environment.version.clone(),
            variant: variant(&release).to_owned(),
            kubernetes: kubernetes(&release),
            release_key: release_key(&line),
            kernels: tree.esp.kernels.path().to_owned(),
            efivars: efivar::DIRECTORY.into(),
            before: tree.data.node.trial.clone(),
        }
    }

    /// The name of the other slot.
    #[must_use]
    pub fn other_slot(&self) -> &'static str {
        slot::other(&self.slot).unwrap_or("-")
    }
}

/// The variant that the text of an `os-release` names.
fn variant(os_release: &str) -> &str {
    os_release.lines().find_map(|line| line.strip_prefix(VARIANT)).unwrap_or(BASE)
}

/// The version of Kubernetes that the text of an `os-release` names.
fn kubernetes(os_release: &str) -> Option<Version> {
    let version = os_release.lines().find_map(|line| line.strip_prefix(KUBERNETES))?;
    Version::parse(version).ok()
}

/// The release key on a command line.
fn release_key(line: &str) -> Option<VerifyingKey> {
    let bytes: [u8; 32] = hex::decode(command_line::value(line, RELEASE_KEY)?)?.try_into().ok()?;
    // Zeros are a valid point of the curve, and stand for an image without keys.
    VerifyingKey::from_bytes(&bytes).ok().filter(|_key| bytes != [0; 32])
}

/// Why an update was not installed. Nothing that runs was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The image knows no signer.
    #[error("the image of this node was built without keys, so it takes no update")]
    NoKey,
    /// The kernel image was not chosen by the loader: it could not choose another.
    #[error("this machine was started by {0}, and not by the loader on its disk")]
    NoLoader(String),
    /// One at a time.
    #[error("another update of this node is going on")]
    Busy,
    /// The system that runs is new itself.
    #[error("the system of this node is on trial, and the one before it is the way back")]
    OnTrial,
    /// The version that runs is not one.
    #[error("the version of this node, {0:?}, is not a valid version number")]
    Version(String),
    /// The bundle breaks a rule.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another system has no place.
    #[error("no place for another system")]
    Slot(#[from] slot::Error),
    /// The data partition has no room for a bundle.
    #[error("the bundle has {needs} bytes, and the data partition of this node has {has} to spare")]
    Space {
        /// Bytes of the bundle.
        needs: u64,
        /// Bytes that are free, without those that are kept for the cluster.
        has: u64,
    },
    /// It could not be received, written, or read back.
    #[error("cannot {operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// The disk does not keep what was written.
    #[error("the {0} reads back from the disk other than it was written")]
    Differs(polis_bundle::PartName),
    /// The thread that did the work ended with a panic.
    #[error("the thread of the update was lost")]
    Lost,
}

impl Error {
    /// The word for the cause, for programs.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::NoKey => "update-no-key",
            Self::NoLoader(_) => "update-no-loader",
            Self::Busy => "update-busy",
            Self::OnTrial => "update-trial",
            Self::Refused(Refusal::Etcd(EtcdRefusal::OneWay { .. })) => "update-one-way",
            Self::Refused(_) => "update-refused",
            Self::Version(_) | Self::Slot(_) => "update-no-place",
            Self::Space { .. } => "update-no-space",
            Self::Io { .. } | Self::Differs(_) | Self::Lost => "update-failed",
        }
    }

    fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }
}

/// The systems of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether this node has looked at its systems: until then, the rest is not known.
    pub known: bool,
    /// Whether the one that runs is on trial.
    pub trial: bool,
    /// The one in the other slot, if it can be started.
    pub other: Option<Other>,
}

/// A system that can be started and does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// Its version.
    pub version: Version,
    /// Its image, as bundles name it; `None` unless this boot wrote it.
    pub image: Option<String>,
    /// Its slot.
    pub slot: &'static str,
    /// What became of it.
    pub standing: Standing,
    /// Why it was left, where that is known.
    pub cause: Option<String>,
}

impl std::fmt::Display for Other {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { version, image: _, slot, standing, cause } = self;
        write!(f, "{version} in slot {slot}, {standing}")?;
        cause.iter().try_for_each(|cause| write!(f, ": {cause}"))
    }
}

/// What is being done with the bytes of a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// They are received, and written.
    #[default]
    Write,
    /// They are read back.
    Verify,
}

/// How far an update is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes that this was done with.
    pub bytes: u64,
    /// Bytes in all; zero until the manifest has come.
    pub total: u64,
}

/// Lets one update at a time in. Cheap to clone; all clones are of one door.
#[derive(Clone, Debug)]
pub struct Door {
    config: Arc<Config>,
    workload: watch::Receiver<Workload>,
    status: watch::Sender<Status>,
    turn: Arc<tokio::sync::Mutex<Left>>,
}

impl Door {
    /// The door of this machine.
    #[must_use]
    pub fn new(
        config: Config,
        workload: watch::Receiver<Workload>,
        status: watch::Sender<Status>,
    ) -> Self {
        Self { config: Arc::new(config), workload, status, turn: Arc::default() }
    }

    /// The machine.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Begins an update, unless one goes on or the image takes none.
    ///
    /// # Errors
    ///
    /// [`Error::NoKey`], [`Error::Busy`].
    pub fn enter(&self, lines: Lines) -> Result<Turn, Error> {
        let key = self.config.release_key.ok_or(Error::NoKey)?;
        let left = Arc::clone(&self.turn).try_lock_owned().map_err(|_taken| Error::Busy)?;
        Ok(Turn { door: self.clone(), key, lines, left })
    }

    /// Removes every bundle but that of `image` from the store, also one that did not come
    /// whole; an empty word means all. A transfer that goes on keeps its bytes.
    pub fn keep_only(&self, store: &Store, image: &str) {
        store.keep_only(image);
        if !store.has_unfinished() {
            return;
        }
        let Ok(mut left) = self.turn.try_lock() else { return };
        // One of an earlier start of the machine is of no use.
        if left.bundle.as_ref().is_none_or(|bundle| bundle.image() != image) {
            left.bundle = None;
            store.clear_unfinished();
        }
    }
}

/// An update that has begun.
#[derive(Debug)]
pub struct Turn {
    door: Door,
    key: VerifyingKey,
    lines: Lines,
    left: OwnedMutexGuard<Left>,
}

impl Turn {
    /// The bundle of this purpose that did not come whole.
    #[must_use]
    pub fn unfinished(&self, purpose: Purpose) -> Option<&Unfinished> {
        match purpose {
            Purpose::Install => self.left.system.as_ref(),
            Purpose::Keep => self.left.bundle.as_ref(),
        }
    }
}

/// The steps of an update, as the serial line has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Write,
    Verify,
    Boot,
    Commit,
    Rollback,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Verify => "verify",
            Self::Boot => "boot",
            Self::Commit => "commit",
            Self::Rollback => "rollback",
        }
    }

    /// The line that says how the step goes: `started`, `done`, or `failed` by a cause.
    fn line(self, version: &Version, slot: &str, result: &str) -> EventLine {
        EventLine::new("update")
            .field("phase", self.name())
            .field("version", version)
            .field("slot", slot)
            .field("result", result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_says_whose_bundles_it_takes() {
        let key = ed25519_dalek::SigningKey::from_bytes(&[1; 32]).verifying_key();
        let line = |digits: &str| format!("quiet {RELEASE_KEY}={digits} {RELEASE_KEY}=other");
        let digits = hex::encode(key.as_bytes());
        assert_eq!(release_key(&line(&digits)), Some(key));
        assert_eq!(release_key(&line(&"0".repeat(64))), None);
        for wrong in ["", "00", &digits[1..], "quiet"] {
            assert_eq!(release_key(&line(wrong)), None, "{wrong}");
        }
        assert_eq!(release_key("quiet"), None);
        assert_eq!(variant("ID=polis\nPOLIS_VARIANT=full\n"), "full");
        assert_eq!(variant("ID=polis\n"), "base");
        let found = kubernetes("ID=polis\nPOLIS_KUBERNETES=1.37.2\n");
        assert_eq!(found, Some(Version::new(1, 37, 2)));
        for none in ["ID=polis\n", "POLIS_KUBERNETES=v1.37.2\n", "POLIS_KUBERNETES=\n"] {
            assert_eq!(kubernetes(none), None, "{none}");
        }
    }
}
