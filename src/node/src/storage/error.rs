//! The errors of storage, with a code and the next step for each cause.

use std::io;
use std::path::PathBuf;

use super::health::Fault;
use super::{apply, plan, table};
use polis_base::files;
use polis_base::stage::Stage;
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
            Self::Disk { source: table::Error::Io { source, .. }, .. }
            | Self::Content { source, .. } => code::STORAGE_DISK.with_detail(errno(source)),
            Self::Disk { source, .. } => match source {
                table::Error::Unusual(_) | table::Error::Format { .. } => {
                    code::STORAGE_PARTITION_TABLE
                }
                table::Error::Io { .. }
                | table::Error::BlockSize(_)
                | table::Error::TooSmall(_) => code::STORAGE_DISK,
            },
            Self::Refused(refusal) => match refusal {
                plan::Refusal::TooSmall { .. } => code::STORAGE_TOO_SMALL,
                plan::Refusal::TableFull => code::STORAGE_PARTITION_TABLE,
                plan::Refusal::Ambiguous { .. } => code::STORAGE_AMBIGUOUS,
                plan::Refusal::Occupied { .. } => code::STORAGE_OCCUPIED,
                plan::Refusal::Foreign { .. } => code::STORAGE_FOREIGN,
                plan::Refusal::Damaged { .. } | plan::Refusal::Weakened { .. } => {
                    code::STORAGE_DAMAGED
                }
            },
            Self::Apply(error) => match error {
                apply::Error::Table(_) | apply::Error::Register { .. } | apply::Error::Lost => {
                    code::STORAGE_DISK
                }
                apply::Error::Format { .. } | apply::Error::Wipe { .. } => code::STORAGE_FORMAT,
                apply::Error::Protect { .. }
                | apply::Error::Open { .. }
                | apply::Error::OwnKey { .. } => code::STORAGE_CIPHER,
                apply::Error::Late { .. } => code::STORAGE_LATE,
                apply::Error::Mount(_) | apply::Error::Grow { .. } => code::STORAGE_MOUNT,
            },
            Self::Failed { .. } => code::STORAGE_MOUNT,
            Self::Failing(_) => code::STORAGE_FAILING,
            Self::File(_) => code::STORAGE_FILE,
        }
    }

    /// The next step of a person.
    #[must_use]
    pub fn help(&self) -> &'static str {
        let code = self.code().with_detail(0);
        if code == code::STORAGE_TOO_SMALL {
            "give the machine a larger disk, or write the image to one, then reboot"
        } else if code == code::STORAGE_OCCUPIED {
            "save its data if you need it, wipe the free space of the disk, then reboot"
        } else if code == code::STORAGE_FOREIGN || code == code::STORAGE_AMBIGUOUS {
            "save its data if you need it, delete the partition, then reboot"
        } else if code == code::STORAGE_DAMAGED || code == code::STORAGE_MOUNT {
            "repair the file system with xfs_repair from another system, or delete the partition \
             to start over; nothing was changed"
        } else if code == code::STORAGE_CIPHER {
            "read the output of cryptsetup, check the disk and its cable, then reboot: an \
             unfinished partition is made again, any other is left unchanged"
        } else if code == code::STORAGE_LATE {
            "check the disk and its cable: it does not answer, or far too slowly; then reboot"
        } else if code == code::STORAGE_FAILING {
            "check the disk named in the cause and its cable, then reboot: the next mount \
             replays acknowledged writes from the journal of the file system"
        } else if code == code::STORAGE_PARTITION_TABLE {
            "repair the partition table from another system, then reboot; writing the image \
             again resets the machine"
        } else {
            "check the disk and its cable, replace it if it fails again, then reboot"
        }
    }

    /// This failure for the trapdoor.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::from_error(self.code(), Stage::Storage, self, self.help())
    }
}

/// The kernel's error number, as far as it fits into a detail.
fn errno(error: &io::Error) -> u16 {
    error.raw_os_error().and_then(|number| u16::try_from(number).ok()).unwrap_or(0)
}
