//! Why a file of the tree cannot be used, for every way that reads or writes one.

use std::io;
use std::path::{Path, PathBuf};

/// Why a file or directory of the tree cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused.
    #[error("cannot {operation} {path}")]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// Its object.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file is larger than its bound.
    #[error("{path} is larger than the {size_max} bytes it may have")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its bound.
        size_max: u64,
    },
    /// No copy of a file of the ESP is whole.
    #[error("{path} is damaged: its checksums do not match")]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// A directory, a device or a socket stands where a file should.
    #[error("{path} is not a regular file")]
    NotAFile {
        /// The place.
        path: PathBuf,
    },
    /// The thread that did the work ended with a panic.
    #[error("the writer of {path} was lost")]
    Lost {
        /// The file.
        path: PathBuf,
    },
}

impl Error {
    /// The operation that failed, and its path.
    pub fn io(operation: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io { operation, path: path.to_owned(), source: source.into() }
    }

    /// The same for callers whose own error names operation and file.
    pub fn into_io(self) -> io::Error {
        match self {
            Self::Io { source, .. } => source,
            other => io::Error::other(other),
        }
    }
}
