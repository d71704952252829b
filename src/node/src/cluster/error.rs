//! The errors of the cluster manager: each cause has a code and a next step.

use super::decide::Refusal;
use super::membership::Step;
use super::remote::Refused;
use super::unlock::keeper::Keeper;
use crate::curator::store;
use crate::storage::Kind;
use crate::tpm;
use polis_base::files;
use polis_base::recovery;
use polis_base::stage::Stage;
use polis_base::trapdoor::{Code, Report, code};
use polis_runtime::event::Closed;
use polis_wire::identity;

/// The reason why a run of the cluster manager ended, or the machine stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine has nothing sensible to do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The kernel returned no random bytes.
    #[error("cannot generate a key: no random bytes")]
    Random,
    /// The TPM does not seal, or does not unseal what it sealed.
    #[error("the TPM does not keep the node's half of the disk's key")]
    Tpm(#[source] tpm::Error),
    /// No keeper has the cluster's half of the key.
    #[error("the cluster's half of the disk's key is missing: no key store of this machine has it")]
    NoShare,
    /// A keeper reported that it stored a share, and does not return it.
    #[error("the share of the disk's key cannot be read back from the {}", .0.name())]
    ShareNotKept(Keeper),
    /// Both halves exist, and do not open the disk.
    #[error("both halves of the disk's key are present but do not open it: {reason}")]
    KeyWrong {
        /// The error that storage reports.
        reason: String,
    },
    /// A recovery key was given and cannot be read.
    #[error("the given recovery key cannot be read")]
    RecoveryUnreadable(#[source] recovery::Error),
    /// The given text is not a recovery key.
    #[error("the given recovery key is mistyped")]
    RecoveryMalformed(#[source] recovery::form::Error),
    /// The given recovery key belongs to another disk.
    #[error("the given recovery key does not open the disk: {reason}")]
    RecoveryKeyWrong {
        /// The error that storage reports.
        reason: String,
    },
    /// This node's data partition was replaced by one of another kind.
    #[error("the data partition is {found}, but this node's is {expected}")]
    KindDiffers {
        /// The kind in the sealed configuration.
        expected: Kind,
        /// The kind on the disk.
        found: Kind,
    },
    /// The certificate of the cluster's CA is not on the data partition.
    #[error("the certificate of the cluster's CA is missing from the data partition")]
    CaLost,
    /// The node's key cannot be made, read or written.
    #[error("cannot use the key of this node")]
    Key(#[source] identity::Error),
    /// The node's key is missing.
    #[error("the key of this node is missing from the data partition")]
    KeyLost,
    /// The key on the data partition is another node's.
    #[error("the sealed configuration belongs to {expected}, but the data partition to {found}")]
    OtherNode {
        /// The node that the sealed configuration names.
        expected: identity::NodeId,
        /// The node whose key is on the data partition.
        found: identity::NodeId,
    },
    /// A curator rejects this node.
    #[error("the cluster refuses this node: {}", .0.text)]
    Curator(Refused),
    /// The cluster has removed this node.
    #[error("the cluster has removed this node: it was decommissioned or deleted")]
    Disowned,
    /// The machine at the addresses of the directory belongs to another cluster.
    #[error("the machine at {who} has no certificate of the CA that this node was given")]
    Untrusted {
        /// The addresses.
        who: String,
    },
    /// No curator answers.
    #[error("no curator of the cluster answers: {0}")]
    Unreachable(String),
    /// The configuration that the cluster sends is not valid here.
    #[error("the configuration of the cluster cannot be read: {0}")]
    Configuration(String),
    /// The store belongs to another cluster.
    #[error("the cluster's store has another CA than the sealed configuration names")]
    OtherCluster,
    /// A record is missing in the cluster's store.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The ESP or the data partition.
    #[error("cannot store the state of this node")]
    File(#[from] files::Error),
    /// A service that this one depends on has ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The disk is in another state than an earlier check found.
    #[error("the data partition changed during this run")]
    Changed,
    /// A test ended the run.
    #[error("interrupted after the step {0:?}")]
    Interrupted(Step),
}

impl Error {
    /// The failure for the trapdoor; `None` where a restart may help.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        let (code, stage, next) = match self {
            Self::Refused(refusal) => refused(refusal),
            Self::Tpm(error) => tpm_step(error),
            Self::NoShare => (
                code::STORAGE_SHARE_ABSENT,
                Stage::Storage,
                "press U and type the recovery key of this machine; if the firmware stored the \
                 key, restore its settings and reboot",
            ),
            Self::KeyWrong { .. } => (
                code::STORAGE_KEY_WRONG,
                Stage::Storage,
                "restore the disk and the EFI system partition that belong together, or press U \
                 and type the recovery key of this machine; nothing was changed",
            ),
            Self::RecoveryUnreadable(_)
            | Self::RecoveryMalformed(_)
            | Self::RecoveryKeyWrong { .. } => (
                code::STORAGE_RECOVERY_KEY_WRONG,
                Stage::Storage,
                "press U, check that the recovery key is this machine's and type it again; \
                 nothing was changed",
            ),
            Self::KindDiffers { .. } => (
                code::STORAGE_KIND_DIFFERS,
                Stage::Storage,
                "insert the disk of this machine; this one was not used",
            ),
            Self::Key(_) | Self::KeyLost | Self::CaLost | Self::OtherNode { .. } => (
                code::CLUSTER_NODE_KEY,
                Stage::Cluster,
                "insert the disk of this machine; if its data is lost, delete the data partition \
                 and polis/sealed_configuration.pb to start over",
            ),
            Self::Curator(refused) => refused_by_curator(refused),
            Self::Disowned => (code::CLUSTER_REMOVED, Stage::Cluster, REMOVED_NEXT),
            Self::Untrusted { .. } => (
                code::CLUSTER_UNTRUSTED,
                Stage::Cluster,
                "give this machine the CA of the cluster that the directory leads to (`polisctl \
                 parameters register`), then reboot; the ticket was not sent",
            ),
            Self::Configuration(_) => (
                code::CLUSTER_REFUSED,
                Stage::Cluster,
                "install the version of Polis that the cluster runs, then reboot",
            ),
            Self::OtherCluster => (code::CLUSTER_STORE, Stage::Cluster, STORE_NEXT),
            Self::Store(store::Error::StoragePolicy { .. }) => (
                code::CLUSTER_REFUSED,
                Stage::Cluster,
                "make parameters with the storage policy of the snapshot's cluster (`polisctl \
                 parameters bootstrap --storage`), delete the data partition, then reboot; the \
                 snapshot is still on the EFI system partition",
            ),
            Self::Store(error) if !error.retriable() => {
                (code::CLUSTER_STORE, Stage::Cluster, STORE_NEXT)
            }
            Self::File(_) | Self::ShareNotKept(_) => (
                code::CLUSTER_FILE,
                Stage::Cluster,
                "check the disk, and that the EFI system partition is not full or write-protected, \
                 then reboot",
            ),
            Self::Store(_)
            | Self::Unreachable(_)
            | Self::Closed(_)
            | Self::Changed
            | Self::Random
            | Self::Interrupted(_) => {
                return None;
            }
        };
        Some(Report::from_error(code, stage, self, next))
    }
}

/// The curator's reason code for a node without a record.
pub(super) const UNKNOWN: &str = "unknown";

/// The next step after a curator's rejection, by its reason code.
fn refused_by_curator(refused: &Refused) -> (Code, Stage, &'static str) {
    let (code, next) = match refused.reason.as_str() {
        "ticket-wrong" | "ticket-rotated" | "ticket-ended" => (
            code::CLUSTER_TICKET,
            "make new parameters for this machine with the ticket that is valid now (`polisctl parameters \
                 register`), then reboot",
        ),
        "known" | "join-key-taken" | "joined" => (
            code::CLUSTER_KNOWN,
            "insert the disk of this node; if it is lost, remove the node from the cluster \
             (`polisctl node delete`), then reboot",
        ),
        "decommissioned" => (code::CLUSTER_REMOVED, REMOVED_NEXT),
        // The records may be older than the disk: only an operator knows.
        UNKNOWN | "not-up" => (
            code::CLUSTER_UNKNOWN,
            "ask an operator whether this node was deleted; if it was not, press U and type the \
             recovery key of this machine; wipe only a deleted node and give it new parameters",
        ),
        _ => (code::CLUSTER_REFUSED, "correct the cause, then reboot"),
    };
    (code, Stage::Cluster, next)
}

/// The next step for a TPM.
fn tpm_step(error: &tpm::Error) -> (Code, Stage, &'static str) {
    let (code, next) = match error {
        tpm::Error::Changed(_) => (
            code::STORAGE_TPM_REFUSES,
            "undo the change of the firmware's settings or of the kernel's command line and \
             reboot, or press U and type the recovery key of this machine",
        ),
        tpm::Error::Cleared | tpm::Error::Mismatch => (
            code::STORAGE_TPM_CLEARED,
            "insert the disk into its machine, or press U and type the recovery key of this \
             machine",
        ),
        tpm::Error::Absent => (
            code::STORAGE_TPM_ABSENT,
            "switch the TPM on in the firmware's settings and reboot, or press U and type the \
             recovery key of this machine",
        ),
        _ => (
            code::STORAGE_TPM_FAILS,
            "switch the machine off and on again; if the TPM still fails, press U and type the \
             recovery key of this machine",
        ),
    };
    (code, Stage::Storage, next)
}

const REMOVED_NEXT: &str = "this node was removed from its cluster and cannot return; to use the \
                            machine again, wipe its disk and give it new parameters";

const STORE_NEXT: &str = "restore etcd from a snapshot, or delete the data partition and \
                          polis/sealed_configuration.pb to start over";

fn refused(refusal: &Refusal) -> (Code, Stage, &'static str) {
    let (code, next) = match refusal {
        Refusal::SealedDamaged(_) => (
            code::CLUSTER_SEALED_DAMAGED,
            "restore polis/sealed_configuration.pb on the EFI system partition from a backup, or, \
             where the disk is encrypted, press U and type the recovery key of this machine; \
             nothing was changed",
        ),
        Refusal::SealedLost => (
            code::CLUSTER_SEALED_LOST,
            "restore polis/sealed_configuration.pb on the EFI system partition from a backup, \
             or, where the disk is encrypted, press U and type the recovery key of this machine, \
             or delete the data partition to start over; nothing was changed",
        ),
        Refusal::DataLost => (
            code::CLUSTER_DATA_LOST,
            "insert the disk of this machine, or delete polis/sealed_configuration.pb to start \
             over",
        ),
        Refusal::JournalDamaged(_) => (
            code::CLUSTER_JOURNAL_DAMAGED,
            "delete the data partition, which was never used, to start over",
        ),
        // `parameters::absent` has the better text where the searched places are known.
        Refusal::NothingToDo => {
            (code::PARAMETERS_ABSENT, "put node parameters on the ESP, then reboot")
        }
    };
    (code, Stage::Cluster, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_removed_node_gets_the_advice_to_wipe_its_disk() {
        let report = |reason: &str| {
            let refused = Refused { reason: reason.to_owned(), text: "no".to_owned() };
            Error::Curator(refused).report().unwrap()
        };
        assert_eq!(report("decommissioned").code, code::CLUSTER_REMOVED);
        for reason in ["unknown", "not-up"] {
            let report = report(reason);
            assert_eq!(report.code, code::CLUSTER_UNKNOWN);
            assert!(report.code.is_locked(), "its recovery key opens the disk");
        }
    }
}
