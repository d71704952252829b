//! The errors that stop a machine before `node` runs, with a code for each cause.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use polis_base::stage::Stage;
use polis_base::sys::mount;
use polis_base::trapdoor::{Code, Report, code};

use super::command_line;

/// Why stage 1 or the start of stage 2 ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file systems of the kernel cannot be mounted.
    #[error("cannot prepare the initramfs")]
    Prepare(#[source] mount::Error),
    /// The kernel command line can't be read.
    #[error("cannot read the kernel command line")]
    ReadCommandLine(#[source] io::Error),
    /// The kernel command line is wrong.
    #[error("this kernel was not started with what Polis needs")]
    CommandLine(#[source] command_line::Error),
    /// No disk has appeared.
    #[error("no disk has appeared within {} s", .waited.as_secs())]
    NoDisk {
        /// How long stage 1 waited.
        waited: Duration,
    },
    /// Disks are present, but not the one that the machine was started from.
    #[error("{wanted}, from which this machine was started, has not appeared within {} s; disks: {disks}", .waited.as_secs())]
    NoEsp {
        /// The awaited device.
        wanted: String,
        /// The disks that are present.
        disks: String,
        /// How long stage 1 waited.
        waited: Duration,
    },
    /// The disk that the machine was started from is missing, and one does not answer.
    #[error("{wanted}, from which this machine was started, has not appeared within {} s, and a disk does not answer; disks: {disks}", .waited.as_secs())]
    Silent {
        /// The awaited device.
        wanted: String,
        /// The disks that are present; those that do not answer with the time since then.
        disks: String,
        /// How long stage 1 waited.
        waited: Duration,
    },
    /// The disk of the system does not answer.
    #[error("cannot {step}: the disk of {partition} ({device}) has not answered for {} s, since {:.1} s after the start", .waited.as_secs(), .since.as_secs_f64())]
    NoAnswer {
        /// The stage that waited.
        stage: Stage,
        /// The step that waited for the disk.
        step: &'static str,
        /// The partition.
        partition: &'static str,
        /// Its device.
        device: PathBuf,
        /// When the step began.
        since: Duration,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Several disks may be the one that the machine was started from.
    #[error(
        "disks {disks} look alike, and the firmware does not tell which of them this machine was started from"
    )]
    DisksAlike {
        /// Their names.
        disks: String,
    },
    /// The disk is present, its system partitions are missing.
    #[error("disk {disk} has neither POLIS-SYSTEM-A nor POLIS-SYSTEM-B")]
    NoSystem {
        /// The disk.
        disk: String,
    },
    /// No system partition has the system that belongs to this kernel.
    #[error("disk {disk} does not have the system that this kernel belongs to: {reasons}")]
    OtherSystem {
        /// The disk.
        disk: String,
        /// The content of each partition.
        reasons: String,
    },
    /// The device mapper rejected the device.
    #[error("cannot set up the verification of {partition} ({device})")]
    Verity {
        /// The partition.
        partition: &'static str,
        /// Its device.
        device: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A block does not match its hash.
    #[error("{partition} ({device}) is damaged: {kind} block {block} does not match its hash")]
    Corrupt {
        /// The partition.
        partition: &'static str,
        /// Its device.
        device: PathBuf,
        /// `data` or `metadata`.
        kind: String,
        /// Blocks of 4096 bytes from the start of the partition.
        block: u64,
    },
    /// The system can't be mounted, though every block read so far is valid.
    #[error("cannot mount the system from {partition} ({device})")]
    MountSystem {
        /// The partition.
        partition: &'static str,
        /// Its device.
        device: PathBuf,
        /// The kernel's error.
        source: mount::Error,
    },
    /// The system cannot become the root.
    #[error("cannot switch to the system: {step}")]
    Switch {
        /// The step that failed.
        step: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file system that `node` requires cannot be mounted.
    #[error("cannot build the tree of file systems")]
    Tree(#[source] mount::Error),
    /// `node` can't be started.
    #[error("cannot start {program}")]
    StartNode {
        /// Its file.
        program: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// `init` lacks a resource that it needs.
    #[error("cannot {what}")]
    Own {
        /// The purpose of the resource.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Error {
    fn code(&self) -> Code {
        match self {
            Self::Prepare(_) => code::INITRAMFS_PREPARATION,
            Self::ReadCommandLine(_) | Self::CommandLine(_) => code::COMMAND_LINE_INVALID,
            Self::NoDisk { .. } => code::DISK_ABSENT,
            Self::NoEsp { .. } => code::ESP_ABSENT,
            Self::Silent { .. } => code::DISK_SILENT,
            Self::NoAnswer { stage: Stage::Initramfs, .. } => code::DISK_SILENT,
            Self::NoAnswer { .. } => code::SYSTEM_SILENT,
            Self::DisksAlike { .. } => code::DISKS_ALIKE,
            Self::NoSystem { .. } | Self::OtherSystem { .. } => code::SYSTEM_ABSENT,
            Self::Verity { source, .. } => code::VERITY_REFUSED.with_error(source),
            Self::Corrupt { .. } => code::SYSTEM_DAMAGED,
            Self::MountSystem { .. } => code::SYSTEM_UNMOUNTABLE,
            Self::Switch { source, .. } => code::SWITCH_FAILED.with_error(source),
            Self::Tree(_) => code::TREE_INCOMPLETE,
            Self::StartNode { source, .. } => code::NODE_NOT_STARTED.with_error(source),
            Self::Own { source, .. } => code::INIT_IMPAIRED.with_error(source),
        }
    }

    /// The error as a report for the trapdoor.
    #[must_use]
    pub fn report(&self) -> Report {
        Report::from_error(self.code(), self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_system_never_advises_to_overwrite_the_esp() {
        let damaged = Error::Corrupt {
            partition: "POLIS-SYSTEM-A",
            device: PathBuf::from("/dev/vda2"),
            kind: "data".to_owned(),
            block: 7,
        };
        assert!(
            damaged.report().next.contains("write the system partition of the same image again")
        );
    }

    #[test]
    fn a_disk_that_does_not_answer_says_what_was_waited_for_and_what_helps() {
        let error = |stage| Error::NoAnswer {
            stage,
            step: "mount the system",
            partition: "POLIS-SYSTEM-A",
            device: PathBuf::from("/dev/vda2"),
            since: Duration::from_millis(3240),
            waited: Duration::from_secs(90),
        };
        insta::assert_snapshot!(error(Stage::Initramfs), @"cannot mount the system: the disk of POLIS-SYSTEM-A (/dev/vda2) has not answered for 90 s, since 3.2 s after the start");
        for (stage, code) in
            [(Stage::Initramfs, code::DISK_SILENT), (Stage::System, code::SYSTEM_SILENT)]
        {
            let report = error(stage).report();
            assert_eq!((report.code, report.stage), (code, stage));
            for word in ["cable", "replace", "other slot"] {
                assert!(report.next.contains(word), "{word} is not in {}", report.next);
            }
        }
    }
}
