//! The errors of an installation, with a code for each kind.

use polis_layout::esp;

use super::{plan, select};
use crate::storage::{slot, table};
use polis_base::trapdoor::{Code, Report, code};

/// Why nothing, or not everything, was installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No single disk fits.
    #[error("this machine has no disk to install to")]
    Select {
        /// Why not.
        source: select::Refusal,
        /// Each disk, and why it does not fit.
        disks: Vec<String>,
    },
    /// The list of disks does not settle: another one that fits may come.
    #[error(
        "disks of this machine come and go: {}; check the cables of these disks, or pull them",
        disks.join(", ")
    )]
    Restless {
        /// The kernel's names of those that came or went last.
        disks: Vec<String>,
    },
    /// The disk that fits has no place.
    #[error("cannot install to {disk}")]
    Place {
        /// The disk.
        disk: String,
        /// Why not.
        source: plan::Refusal,
    },
    /// The disk carries data that the parameters do not give up.
    #[error("cannot install to {name}: it carries {found}, which the parameters do not give up")]
    Occupied {
        /// The kernel's name of the disk.
        name: String,
        /// The disk in words.
        disk: String,
        /// Its content.
        found: String,
        /// The word of `--install-wipe` for it.
        word: &'static str,
    },
    /// The command line of the kernel does not describe the system.
    #[error("the kernel command line has no usable {0}")]
    CommandLine(&'static str),
    /// The system of the medium has no partition.
    #[error("cannot find the system of the medium")]
    Medium(#[from] slot::Error),
    /// The partition table.
    #[error("cannot use the partition table")]
    Table(#[source] table::Error),
    /// The new ESP cannot be made.
    #[error("cannot make the new EFI system partition")]
    Esp(#[from] esp::Error),
    /// The kernel refuses.
    #[error("cannot {operation} {object}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// Its object.
        object: &'static str,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// The writes do not go on.
    #[error("the disk {disk}, or the medium, has not answered for {seconds} seconds")]
    Silent {
        /// The kernel's name of the disk.
        disk: String,
        /// How long they were waited for.
        seconds: u64,
    },
    /// The disk does not keep what was written, or the medium does not have what it should.
    #[error("the {0} reads back from the disk other than it must be")]
    Differs(&'static str),
}

impl Error {
    pub(super) fn io(
        operation: &'static str,
        object: &'static str,
    ) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { operation, object, source }
    }

    /// The failure for the trapdoor.
    #[must_use]
    pub fn report(&self) -> Report {
        let report = Report::from_error(self.code(), self);
        match self {
            Self::Select { disks, .. } => Report { tried: disks.clone(), ..report },
            Self::Occupied { disk, word, .. } => Report {
                tried: vec![disk.clone()],
                next: report.next.replace("{word}", word),
                ..report
            },
            _ => report,
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Select { .. } | Self::Restless { .. } | Self::Place { .. } => code::INSTALL_DISK,
            Self::Occupied { .. } => code::INSTALL_OCCUPIED,
            Self::Io { source, .. } => code::INSTALL_FAILED.with_error(source),
            Self::CommandLine(_)
            | Self::Medium(_)
            | Self::Table(_)
            | Self::Esp(_)
            | Self::Silent { .. }
            | Self::Differs(_) => code::INSTALL_FAILED,
        }
    }
}
