//! The storage of the node: a disk, mounted, as a typed tree for everything that the
//! node keeps.
//!
//! `root` starts [`Service`]; each service that keeps something waits for
//! [`Status::Ready`] and uses the [`Root`](files::Root) in it.
//!
//! ```text
//! probe, header  what does a stretch of the disk carry?  bytes -> name
//! table  partition table                             disk <-> value
//! plan   what is to be done?                         (table, content) -> plan
//! apply  in which steps                              plan -> steps
//! machine  how a step is taken                       partitions, mkfs.xfs, mount
//! deadline  how long a step may take
//! detached  work on a disk that may hang, in threads of its own
//! steps  which step on another disk is late
//! service  when                                      event values
//! maintenance, health  what is done and noticed while it is mounted
//! key, luks, unlock  what opens an encrypted partition, how, and in which steps
//! slot   where another system goes
//! fat    a new name on the ESP
//! backing  the device under the encryption: the partition, or one over two disks
//! wipe   blocks of an authenticated device are written before they are used
//! ```
//!
//! Invariants:
//! - Recognised content of the disk is never formatted; see `plan`.
//! - A power cut at any moment of the first boot is followed by a boot that finishes.
//!
//! What this module does not do: decide the purpose of this machine (`cluster`).

pub mod apply;
pub mod backing;
pub mod deadline;
pub(crate) mod detached;
pub mod error;
pub(crate) mod fat;
pub mod header;
pub mod health;
pub mod key;
pub mod luks;
pub mod machine;
pub mod maintenance;
pub mod plan;
pub mod probe;
pub mod service;
pub mod slot;
pub mod stall;
pub mod steps;
pub mod table;
mod unlock;
pub mod wipe;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use self::backing::Backing;
pub use self::error::Error;
pub use self::health::Health;
pub use self::key::{Make, Wanted};
pub use self::service::{Config, RunError, Service};
use polis_base::files;

/// How the data partition is protected. Ordered: a greater kind protects more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// No protection: a person with the disk reads it.
    Insecure,
    /// Encrypted: a person with the disk but without the keys reads nothing.
    Encrypted,
    /// Encrypted, and data that somebody else has changed does not read.
    Authenticated,
}

impl Kind {
    /// All kinds, from the least protection to the most.
    pub const ALL: [Self; 3] = [Self::Insecure, Self::Encrypted, Self::Authenticated];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Insecure => "insecure",
            Self::Encrypted => "encrypted",
            Self::Authenticated => "authenticated",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The data partition, mounted, with the tree on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The tree; every directory exists.
    pub root: files::Root,
    /// How the partition is protected.
    pub kind: Kind,
    /// The GUID of the partition.
    pub partition: Uuid,
    /// The block device that is mounted.
    pub device: PathBuf,
    /// The size of the partition in bytes.
    pub size: u64,
}

/// The published status.
///
/// The GUID of the partition goes into its passphrase. It is chosen before the
/// partition is made and stays: `Absent` holds the one that a new partition will have,
/// `Locked` and `Refused` the one that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Looking at the disk, or at work on it.
    Starting,
    /// The disk has no data partition, or one that was never complete and holds
    /// nothing: it is made on request, with [`Wanted::Make`].
    Absent {
        /// The GUID that it will have.
        partition: Uuid,
    },
    /// The data partition is there, and waits for [`Wanted::Open`].
    Locked {
        /// How it is protected, as its own header says. A caller that knows better,
        /// from the sealed configuration, must refuse a kind that protects less.
        kind: Kind,
        /// Its GUID.
        partition: Uuid,
    },
    /// The key that was given does not fit; another [`Wanted::Open`] may.
    Refused {
        /// How it is protected.
        kind: Kind,
        /// Its GUID.
        partition: Uuid,
        /// Why, for people.
        reason: String,
    },
    /// The data partition is mounted.
    Ready(Arc<Ready>),
    /// The data partition is marked: the next boot wipes it.
    GivenUp,
}

impl Status {
    /// The mounted partition, once it is mounted.
    #[must_use]
    pub fn ready(&self) -> Option<&Ready> {
        match self {
            Self::Ready(ready) => Some(ready),
            Self::Starting
            | Self::Absent { .. }
            | Self::Locked { .. }
            | Self::Refused { .. }
            | Self::GivenUp => None,
        }
    }
}
