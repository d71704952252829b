//! Gives the node a place for everything it keeps: a disk, mounted, as a typed tree.
//!
//! `root` starts [`Service`]; everyone who keeps something waits for
//! [`Status::Ready`] and uses the [`Root`] in it.
//!
//! ```text
//! probe  what does a stretch of the disk carry?      bytes -> name
//! table  partition table                             disk <-> value
//! plan   what is to be done?                         (table, content) -> plan
//! apply  in which steps                              plan -> steps
//! machine  how a step is taken                       partitions, mkfs.xfs, mount
//! service  when                                      event values
//! tree, file  the places and the atomic writes
//! ```
//!
//! Invariants:
//! - What is recognised on the disk is never formatted; see `plan`.
//! - A power cut at any moment of the first boot is followed by a boot that finishes.
//!
//! What this module does not do: decide what this machine is to be (`cluster`).

pub mod apply;
pub mod error;
pub mod file;
pub mod machine;
pub mod plan;
pub mod probe;
pub mod service;
pub mod table;
pub mod tree;

use std::path::PathBuf;
use std::sync::Arc;

pub use self::error::Error;
pub use self::service::{Config, RunError, Service};
pub use self::tree::Root;

/// How the data partition is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Not at all: whoever has the disk reads it.
    Insecure,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Insecure => "insecure",
        })
    }
}

/// The data partition, mounted, with the tree on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The tree; every directory exists.
    pub root: Root,
    /// How the partition is protected.
    pub kind: Kind,
    /// The block device that is mounted.
    pub device: PathBuf,
    /// Its size in bytes.
    pub size: u64,
}

/// What everyone else may know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Looking at the disk, or at work on it.
    Starting,
    /// The disk has no data partition; it is made once somebody wants a kind.
    Absent,
    /// The data partition is mounted.
    Ready(Arc<Ready>),
}

impl Status {
    /// What is mounted, once it is.
    #[must_use]
    pub fn ready(&self) -> Option<&Ready> {
        match self {
            Self::Ready(ready) => Some(ready),
            Self::Starting | Self::Absent => None,
        }
    }
}
