//! Gives the node a place for everything it keeps: a typed tree of files.

pub mod file;
pub mod plan;
pub mod probe;
pub mod table;
pub mod tree;

use std::path::PathBuf;
use std::sync::Arc;

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
    /// Cannot go on before something happens: what.
    Waiting(String),
    /// The data partition is mounted.
    Ready(Arc<Ready>),
}

impl Status {
    /// What is mounted, once it is.
    #[must_use]
    pub fn ready(&self) -> Option<&Ready> {
        match self {
            Self::Ready(ready) => Some(ready),
            Self::Starting | Self::Waiting(_) => None,
        }
    }
}
