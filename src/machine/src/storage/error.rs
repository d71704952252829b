//! The errors of storage, with a code for each cause.

use std::io;
use std::path::PathBuf;

use super::health::Fault;
use super::{apply, plan, table};
use polis_base::files;
use polis_base::trapdoor::{Code, Report, code};

/// The reason why the machine has no data partition.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The disk or its table cannot be used.
    #[error("cannot use the disk {}", disk.display())]
    Disk {
        /// Which one.
        disk: PathBuf,
        /// Why.
        source: table::Error,
    },
    /// The data partition would be used without its mirror.
    #[error(
        "the partition table of {} makes it a disk of a mirror, and no mirror was started",
        disk.display()
    )]
    Unmirrored {
        /// The disk.
        disk: PathBuf,
    },
    /// A part of the disk cannot be read.
    #[error("cannot read the {what} of the disk")]
    Content {
        /// Which part.
        what: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The next step would destroy something, or the disk has not enough room.
    #[error(transparent)]
    Refused(#[from] plan::Refusal),
    /// A step failed.
    #[error(transparent)]
    Apply(#[from] apply::Error),
    /// A step failed; the kernel named the place.
    #[error("cannot use the data partition: {fault}")]
    Failed {
        /// The error of the kernel.
        fault: Fault,
        /// The step.
        source: Box<apply::Error>,
    },
    /// The partition was in use, and cannot be used any more.
    #[error("the data partition failed while it was in use: {0}")]
    Failing(Fault),
    /// A directory or file of the tree cannot be made.
    #[error(transparent)]
    File(#[from] files::Error),
}

impl Error {
    /// The code of this failure.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Content { source, .. } => code::STORAGE_DISK.with_error(source),
            Self::Disk { source, .. } => table_code(source),
            Self::Unmirrored { .. } => code::STORAGE_PARTITION_TABLE,
            Self::Refused(refusal) => refusal_code(refusal),
            Self::Apply(error) => step_code(error),
            Self::Failed { .. } => code::STORAGE_MOUNT,
            Self::Failing(_) => code::STORAGE_FAILING,
            Self::File(_) => code::STORAGE_FILE,
        }
    }

    /// This failure for the trapdoor.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::from_error(self.code(), self)
    }
}

/// The code of a partition table that cannot be used, also where the mirror reads it.
pub(crate) fn table_code(error: &table::Error) -> Code {
    match error {
        table::Error::Io { source, .. } => code::STORAGE_DISK.with_error(source),
        table::Error::Unusual(_) | table::Error::Format { .. } => code::STORAGE_PARTITION_TABLE,
        table::Error::BlockSize(_) | table::Error::TooSmall(_) => code::STORAGE_DISK,
    }
}

/// The code of a disk that is left alone, also where the mirror looks at it.
pub(crate) fn refusal_code(refusal: &plan::Refusal) -> Code {
    match refusal {
        plan::Refusal::TooSmall { .. } | plan::Refusal::OtherTooSmall { .. } => {
            code::STORAGE_TOO_SMALL
        }
        plan::Refusal::TableFull => code::STORAGE_PARTITION_TABLE,
        plan::Refusal::Ambiguous { .. } => code::STORAGE_AMBIGUOUS,
        plan::Refusal::Occupied { .. } => code::STORAGE_OCCUPIED,
        plan::Refusal::Foreign { .. } => code::STORAGE_FOREIGN,
        plan::Refusal::Damaged { .. } | plan::Refusal::Weakened { .. } => code::STORAGE_DAMAGED,
    }
}

/// The code of a step that failed, also where the mirror takes it.
pub(crate) fn step_code(error: &apply::Error) -> Code {
    match error {
        apply::Error::Table(_)
        | apply::Error::Register { .. }
        | apply::Error::Clear { .. }
        | apply::Error::Lost => code::STORAGE_DISK,
        apply::Error::Format { .. } | apply::Error::Wipe { .. } => code::STORAGE_FORMAT,
        apply::Error::Protect { .. } | apply::Error::Open { .. } | apply::Error::OwnKey { .. } => {
            code::STORAGE_CIPHER
        }
        apply::Error::Weakened { .. } => code::STORAGE_DAMAGED,
        apply::Error::Late { .. } => code::STORAGE_LATE,
        apply::Error::Random { .. } => code::STORAGE_RANDOM,
        apply::Error::Mount(_) | apply::Error::Grow { .. } => code::STORAGE_MOUNT,
    }
}
