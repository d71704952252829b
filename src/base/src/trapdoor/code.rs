//! The codes of all failures that open the trapdoor: `#SSCC.DDDD`.
//!
//! `SS` is the stage, `CC` the cause within it, both decimal and never changed; `DDDD`
//! is a detail of the occurrence in hexadecimal (an error number, a field number, an
//! exit status), zero without a detail. Each constant has a section in
//! `docs/errors.md`, headed by its code without the detail; a test checks that.

use std::fmt;

use crate::stage::Stage;

/// The code of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    stage: u8,
    cause: u8,
    detail: u16,
}

impl Code {
    /// The code of cause number `cause` in `stage`, without a detail.
    #[must_use]
    pub const fn new(stage: Stage, cause: u8) -> Self {
        // `Stage::number` is not const; a fieldless enum's discriminant is.
        Self { stage: stage as u8 + 1, cause, detail: 0 }
    }

    /// The same code with a detail of this occurrence.
    #[must_use]
    pub const fn with_detail(self, detail: u16) -> Self {
        Self { detail, ..self }
    }

    /// Whether the recovery key of the disk helps, independent of the reporting
    /// service.
    #[must_use]
    pub fn is_locked(self) -> bool {
        LOCKED.contains(&self.with_detail(0))
    }

    /// `SSCC`: the heading of its section in `docs/errors.md`.
    #[must_use]
    pub fn anchor(self) -> String {
        format!("{:02}{:02}", self.stage, self.cause)
    }

    /// Reads `#SSCC.DDDD`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (head, detail) = text.strip_prefix('#')?.split_once('.')?;
        let stage = head.get(..2)?.parse().ok()?;
        let cause = head.get(2..)?.parse().ok()?;
        Some(Self { stage, cause, detail: u16::from_str_radix(detail, 16).ok()? })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02}{:02}.{:04X}", self.stage, self.cause, self.detail)
    }
}

/// The kernel's own file systems cannot be mounted in the initramfs.
pub const INITRAMFS_PREPARATION: Code = Code::new(Stage::Initramfs, 1);
/// The kernel command line lacks a word that Polis needs.
pub const COMMAND_LINE_INVALID: Code = Code::new(Stage::Initramfs, 2);
/// No disk has appeared.
pub const DISK_ABSENT: Code = Code::new(Stage::Initramfs, 3);
/// No disk has the ESP that the machine was started from.
pub const ESP_ABSENT: Code = Code::new(Stage::Initramfs, 4);
/// The disk has no system partition.
pub const SYSTEM_ABSENT: Code = Code::new(Stage::Initramfs, 5);
/// A block of the system partition is damaged.
pub const SYSTEM_DAMAGED: Code = Code::new(Stage::Initramfs, 6);
/// The kernel refuses to verify the system partition.
pub const VERITY_REFUSED: Code = Code::new(Stage::Initramfs, 7);
/// The system cannot be mounted.
pub const SYSTEM_UNMOUNTABLE: Code = Code::new(Stage::Initramfs, 8);
/// The system cannot become the root.
pub const SWITCH_FAILED: Code = Code::new(Stage::Initramfs, 9);

/// `node` returned without a request to stop.
pub const NODE_EXITED: Code = Code::new(Stage::System, 1);
/// A signal killed `node`.
pub const NODE_KILLED: Code = Code::new(Stage::System, 2);
/// The kernel was out of memory and killed `node`.
pub const NODE_OUT_OF_MEMORY: Code = Code::new(Stage::System, 3);
/// `node` cannot be started.
pub const NODE_NOT_STARTED: Code = Code::new(Stage::System, 4);
/// A block of the system partition is damaged, seen while the machine ran.
pub const SYSTEM_DAMAGED_RUNNING: Code = Code::new(Stage::System, 5);
/// A file system that `node` needs cannot be mounted.
pub const TREE_INCOMPLETE: Code = Code::new(Stage::System, 6);
/// A bug in `init`.
pub const INIT_PANICKED: Code = Code::new(Stage::System, 7);
/// The kernel refuses `init` a resource that it requires.
pub const INIT_IMPAIRED: Code = Code::new(Stage::System, 8);
/// `node` runs and gives no sign of life any more.
pub const NODE_HUNG: Code = Code::new(Stage::System, 9);
/// A service of `node` died more often than it may, up to the root of the tree.
pub const SERVICE_GAVE_UP: Code = Code::new(Stage::System, 31);
/// The main task of `node` panicked.
pub const NODE_PANICKED: Code = Code::new(Stage::System, 32);
/// The disk cannot be read or written.
pub const STORAGE_DISK: Code = Code::new(Stage::Storage, 1);
/// The partition table is damaged, unusual or full.
pub const STORAGE_PARTITION_TABLE: Code = Code::new(Stage::Storage, 2);
/// The disk has no room for a data partition.
pub const STORAGE_TOO_SMALL: Code = Code::new(Stage::Storage, 3);
/// The free space for the data partition carries foreign data.
pub const STORAGE_OCCUPIED: Code = Code::new(Stage::Storage, 4);
/// The data partition carries a foreign file system.
pub const STORAGE_FOREIGN: Code = Code::new(Stage::Storage, 5);
/// The data partition has no readable file system any more.
pub const STORAGE_DAMAGED: Code = Code::new(Stage::Storage, 6);
/// More than one partition claims to be the data partition.
pub const STORAGE_AMBIGUOUS: Code = Code::new(Stage::Storage, 7);
/// The file system of the data partition cannot be made.
pub const STORAGE_FORMAT: Code = Code::new(Stage::Storage, 8);
/// The data partition cannot be mounted.
pub const STORAGE_MOUNT: Code = Code::new(Stage::Storage, 9);
/// A directory or file of the node cannot be made.
pub const STORAGE_FILE: Code = Code::new(Stage::Storage, 10);
/// The TPM holds the node's half of the key and refuses it: the machine started
/// other software, or with other settings.
pub const STORAGE_TPM_REFUSES: Code = Code::new(Stage::Storage, 12);
/// The TPM was cleared or is another one: it cannot load the sealed data.
pub const STORAGE_TPM_CLEARED: Code = Code::new(Stage::Storage, 13);
/// The node's half of the key is sealed to a TPM, but the machine has no TPM.
pub const STORAGE_TPM_ABSENT: Code = Code::new(Stage::Storage, 14);
/// Both halves of the key are present, but do not open the disk.
pub const STORAGE_KEY_WRONG: Code = Code::new(Stage::Storage, 15);
/// The recovery key that a person gave is mistyped, or another disk's.
pub const STORAGE_RECOVERY_KEY_WRONG: Code = Code::new(Stage::Storage, 16);
/// The data partition can neither be encrypted nor opened, and the key is not the
/// cause.
pub const STORAGE_CIPHER: Code = Code::new(Stage::Storage, 17);
/// A step of storage exceeded its deadline.
pub const STORAGE_LATE: Code = Code::new(Stage::Storage, 18);
/// The data partition failed while it was in use.
pub const STORAGE_FAILING: Code = Code::new(Stage::Storage, 19);

/// The TPM that holds the node's half of the key fails, or does not answer.
pub const STORAGE_TPM_FAILS: Code = Code::new(Stage::Storage, 21);
/// The cluster's half of the key is missing on a machine that is alone.
pub const STORAGE_SHARE_ABSENT: Code = Code::new(Stage::Storage, 22);
/// The data partition has another kind of protection than this node's.
pub const STORAGE_KIND_DIFFERS: Code = Code::new(Stage::Storage, 23);

/// Neither fw_cfg nor the ESP carries node parameters.
pub const PARAMETERS_ABSENT: Code = Code::new(Stage::Parameters, 1);

/// Node parameters are present and cannot be read.
pub const PARAMETERS_UNREADABLE: Code = Code::new(Stage::Parameters, 2);
/// Node parameters are larger than the allowed maximum.
pub const PARAMETERS_TOO_LARGE: Code = Code::new(Stage::Parameters, 3);
/// Node parameters are damaged or cut short.
pub const PARAMETERS_MALFORMED: Code = Code::new(Stage::Parameters, 4);
/// Node parameters have a field that this version does not know.
pub const PARAMETERS_UNKNOWN_FIELD: Code = Code::new(Stage::Parameters, 5);
/// Node parameters choose neither bootstrap nor register.
pub const PARAMETERS_NOTHING_CHOSEN: Code = Code::new(Stage::Parameters, 6);
/// Node parameters choose bootstrap and register at once.
pub const PARAMETERS_BOTH_CHOSEN: Code = Code::new(Stage::Parameters, 7);
/// A field of the node parameters has a value that is not allowed.
pub const PARAMETERS_FIELD: Code = Code::new(Stage::Parameters, 8);
/// The owner's key in the node parameters is not usable.
pub const PARAMETERS_OWNER_KEY: Code = Code::new(Stage::Parameters, 9);
/// The register ticket in the node parameters is empty or too long.
pub const PARAMETERS_TICKET: Code = Code::new(Stage::Parameters, 10);
/// The CA certificate in the node parameters is not one.
pub const PARAMETERS_CA_CERTIFICATE: Code = Code::new(Stage::Parameters, 11);

/// This node was a member, but its disk does not hold one.
pub const CONSENSUS_MEMBER_ABSENT: Code = Code::new(Stage::Consensus, 1);
/// The member on the disk lacks a part.
pub const CONSENSUS_MEMBER_DAMAGED: Code = Code::new(Stage::Consensus, 2);
/// etcd itself reports that its database is damaged.
pub const CONSENSUS_DATABASE_DAMAGED: Code = Code::new(Stage::Consensus, 3);
/// A cluster was to be founded from a file that is not a snapshot.
pub const CONSENSUS_SNAPSHOT: Code = Code::new(Stage::Consensus, 4);
/// The sealed configuration on the ESP is damaged.
pub const CLUSTER_SEALED_DAMAGED: Code = Code::new(Stage::Cluster, 1);
/// A data partition is in use, but the sealed configuration is missing.
pub const CLUSTER_SEALED_LOST: Code = Code::new(Stage::Cluster, 2);
/// The sealed configuration is present, but the data partition is missing.
pub const CLUSTER_DATA_LOST: Code = Code::new(Stage::Cluster, 3);
/// A bootstrap or a registration was under way, and its journal is damaged.
pub const CLUSTER_JOURNAL_DAMAGED: Code = Code::new(Stage::Cluster, 4);
/// The register ticket is wrong, was replaced, or has ended.
pub const CLUSTER_TICKET: Code = Code::new(Stage::Cluster, 5);
/// The key of this node is lost, damaged or another node's.
pub const CLUSTER_NODE_KEY: Code = Code::new(Stage::Cluster, 6);
/// The node's own records cannot be read or written.
pub const CLUSTER_FILE: Code = Code::new(Stage::Cluster, 7);
/// The cluster's store is damaged or another cluster's.
pub const CLUSTER_STORE: Code = Code::new(Stage::Cluster, 8);
/// The directory leads to another cluster than the CA.
pub const CLUSTER_UNTRUSTED: Code = Code::new(Stage::Cluster, 9);
/// The cluster knows this node, with other keys.
pub const CLUSTER_KNOWN: Code = Code::new(Stage::Cluster, 10);
/// The node was decommissioned or deleted.
pub const CLUSTER_REMOVED: Code = Code::new(Stage::Cluster, 11);
/// The cluster refuses the node for another reason.
pub const CLUSTER_REFUSED: Code = Code::new(Stage::Cluster, 12);
/// The cluster's records lack this member.
pub const CLUSTER_UNKNOWN: Code = Code::new(Stage::Cluster, 13);

/// The disk is whole and locked, and its recovery key opens it: a person at the guru
/// meditation may type it. A damaged or lost sealed configuration locks the disk, too,
/// where the disk is encrypted; the reporting service (`cluster`) decides that.
const LOCKED: &[Code] = &[
    STORAGE_TPM_REFUSES,
    STORAGE_TPM_CLEARED,
    STORAGE_TPM_ABSENT,
    STORAGE_KEY_WRONG,
    STORAGE_RECOVERY_KEY_WRONG,
    STORAGE_TPM_FAILS,
    STORAGE_SHARE_ABSENT,
    CLUSTER_UNKNOWN,
];

/// Every code, for the check against `docs/errors.md`.
pub const ALL: &[Code] = &[
    INITRAMFS_PREPARATION,
    COMMAND_LINE_INVALID,
    DISK_ABSENT,
    ESP_ABSENT,
    SYSTEM_ABSENT,
    SYSTEM_DAMAGED,
    VERITY_REFUSED,
    SYSTEM_UNMOUNTABLE,
    SWITCH_FAILED,
    NODE_EXITED,
    NODE_KILLED,
    NODE_OUT_OF_MEMORY,
    NODE_NOT_STARTED,
    SYSTEM_DAMAGED_RUNNING,
    TREE_INCOMPLETE,
    INIT_PANICKED,
    INIT_IMPAIRED,
    NODE_HUNG,
    SERVICE_GAVE_UP,
    NODE_PANICKED,
    STORAGE_DISK,
    STORAGE_PARTITION_TABLE,
    STORAGE_TOO_SMALL,
    STORAGE_OCCUPIED,
    STORAGE_FOREIGN,
    STORAGE_DAMAGED,
    STORAGE_AMBIGUOUS,
    STORAGE_FORMAT,
    STORAGE_MOUNT,
    STORAGE_FILE,
    STORAGE_TPM_REFUSES,
    STORAGE_TPM_CLEARED,
    STORAGE_TPM_ABSENT,
    STORAGE_KEY_WRONG,
    STORAGE_RECOVERY_KEY_WRONG,
    STORAGE_CIPHER,
    STORAGE_LATE,
    STORAGE_FAILING,
    STORAGE_TPM_FAILS,
    STORAGE_SHARE_ABSENT,
    STORAGE_KIND_DIFFERS,
    PARAMETERS_ABSENT,
    PARAMETERS_UNREADABLE,
    PARAMETERS_TOO_LARGE,
    PARAMETERS_MALFORMED,
    PARAMETERS_UNKNOWN_FIELD,
    PARAMETERS_NOTHING_CHOSEN,
    PARAMETERS_BOTH_CHOSEN,
    PARAMETERS_FIELD,
    PARAMETERS_OWNER_KEY,
    PARAMETERS_TICKET,
    PARAMETERS_CA_CERTIFICATE,
    CONSENSUS_MEMBER_ABSENT,
    CONSENSUS_MEMBER_DAMAGED,
    CONSENSUS_DATABASE_DAMAGED,
    CONSENSUS_SNAPSHOT,
    CLUSTER_SEALED_DAMAGED,
    CLUSTER_SEALED_LOST,
    CLUSTER_DATA_LOST,
    CLUSTER_JOURNAL_DAMAGED,
    CLUSTER_TICKET,
    CLUSTER_NODE_KEY,
    CLUSTER_FILE,
    CLUSTER_STORE,
    CLUSTER_UNTRUSTED,
    CLUSTER_KNOWN,
    CLUSTER_REMOVED,
    CLUSTER_REFUSED,
    CLUSTER_UNKNOWN,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_reads_as_it_is_written() {
        let code = PARAMETERS_ABSENT.with_detail(0x1f);
        assert_eq!(code.to_string(), "#0601.001F");
        assert_eq!(Code::parse("#0601.001F"), Some(code));
    }

    #[test]
    fn each_code_has_one_number_and_one_section() {
        let page = include_str!("../../../../docs/errors.md");
        let sections: Vec<_> =
            page.lines().filter_map(|line| line.strip_prefix("## ")?.split(' ').next()).collect();
        let mut anchors: Vec<_> = ALL.iter().map(|code| code.anchor()).collect();
        anchors.sort();
        assert_eq!(sections, anchors);
    }
}
