//! The errors of a mirror, with a code for each that ends the boot.

use std::io;

use super::plan;
use crate::storage;
use crate::storage::steps;
use crate::storage::table;
use polis_base::trapdoor::{Code, Report, code};

/// Why a mirror cannot be used, or a disk of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A disk fails.
    #[error("cannot {operation} the disk {disk}")]
    Disk {
        /// The attempted operation.
        operation: &'static str,
        /// The kernel's name of it.
        disk: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The table of a disk cannot be used.
    #[error("cannot use the partition table of {disk}")]
    Table {
        /// The kernel's name of it.
        disk: String,
        /// Why not.
        source: table::Error,
    },
    /// No data may be used.
    #[error("the mirror is not used, with {disks}")]
    Refused {
        /// The disks of it that are there.
        disks: String,
        /// Why not.
        source: plan::Refusal,
    },
    /// The record of the disk that the machine was started from cannot be read.
    #[error("neither copy of the mirror's record on {disk} is whole")]
    Record {
        /// The kernel's name of it.
        disk: String,
    },
    /// The machine was started from a disk with old data or an older ESP.
    #[error("this machine was started from {started}, and {newest} is newer")]
    Started {
        /// The disk that it was started from.
        started: String,
        /// The other disk.
        newest: String,
    },
    /// Two disks say that they are the same one.
    #[error("{one} and {other} are copies of one disk of the mirror")]
    Copies {
        /// One of them.
        one: String,
        /// The other.
        other: String,
    },
    /// The disk that the machine was started from does not answer.
    #[error(transparent)]
    Late(#[from] storage::apply::Error),
    /// A step on another disk is late.
    #[error(transparent)]
    Slow(steps::Late),
    /// Each disk is gone, or was dropped by the kernel: none has all data.
    #[error("each disk of the mirror is gone, or has missed writes")]
    NoneLeft,
    /// The disk has no place for the records and the data partition behind them.
    #[error(transparent)]
    Place(#[from] storage::plan::Refusal),
    /// The disk that the machine was started from has data, or cannot be read.
    #[error(transparent)]
    Look(Box<storage::Error>),
    /// The kernel does not make the device, or does not change it.
    #[error("cannot {operation} the device of the mirror")]
    Device {
        /// The attempted operation.
        operation: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A disk that could be taken is not.
    #[error("the disk {disk} is not taken: {why}")]
    Unfit {
        /// The kernel's name of it.
        disk: String,
        /// Why not.
        why: String,
    },
    /// The boot files cannot be copied.
    #[error("cannot {operation} of {disk}")]
    Copy {
        /// The attempted operation, with its object.
        operation: &'static str,
        /// The kernel's name of the disk.
        disk: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl Error {
    /// The code of this failure.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Refused { source: plan::Refusal::Split { .. }, .. } | Self::Copies { .. } => {
                code::MIRROR_SPLIT
            }
            Self::Refused { .. } | Self::Record { .. } | Self::Started { .. } => code::MIRROR_OLD,
            Self::Table { source, .. } => storage::error::table_code(source),
            Self::Late(error) => storage::error::step_code(error),
            Self::Slow(_) => code::STORAGE_LATE,
            Self::Look(error) => error.code(),
            Self::Place(refusal) => storage::error::refusal_code(refusal),
            Self::Disk { .. }
            | Self::NoneLeft
            | Self::Device { .. }
            | Self::Unfit { .. }
            | Self::Copy { .. } => code::STORAGE_DISK,
        }
    }

    /// This failure for the trapdoor.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::from_error(self.code(), self)
    }
}
