//! The errors of the cluster manager, with a code for each cause.

use super::probe::Interrupted;
use super::record::Damage;
use crate::curator::store;
use polis_base::files;
use polis_base::recovery;
use polis_base::trapdoor::{Code, Report, code};
use polis_machine::storage::Kind;
use polis_machine::{install, tpm};
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
    #[error("the share of the disk's key cannot be read back from the {0}")]
    ShareNotKept(&'static str),
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
    /// A curator answers that its cluster does not have this node, and the node parameters do not
    /// say to wipe it.
    #[error(
        "the cluster refuses this node: {}; nothing was wiped, since the node parameters name {}",
        refused.text, naming(*named)
    )]
    TurnedAway {
        /// Its ID.
        node: identity::NodeId,
        /// The node in the parameters.
        named: Option<identity::NodeId>,
        /// The answer.
        refused: Refused,
    },
    /// The cluster has removed this node.
    #[error("the cluster has removed this node: it was decommissioned or deleted")]
    Disowned {
        /// Its ID.
        node: Option<identity::NodeId>,
    },
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
    /// The system is not installed to another disk.
    #[error(transparent)]
    Install(#[from] install::Error),
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
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// Why this machine does nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The machine is a member, and cannot read of which cluster.
    #[error("the sealed configuration is damaged: {0}")]
    SealedDamaged(Damage),
    /// The machine is a member, and its data partition is missing.
    #[error("this machine is a member of a cluster, but its data partition is missing")]
    DataLost,
    /// The data of a member exists, and its sealed configuration is missing.
    #[error("there is a data partition, but its sealed configuration is missing")]
    SealedLost,
    /// A bootstrap or a registration was under way, and its journal cannot be read.
    #[error("an entry into a cluster was started, but its journal is damaged: {0}")]
    JournalDamaged(Damage),
    /// The parameters say to wipe a node that this machine was not.
    #[error(
        "the node parameters say to wipe {named}, but the data partition of this machine belongs to \
         {found}"
    )]
    WipesOther {
        /// The node in the parameters.
        named: identity::NodeId,
        /// The node of this machine.
        found: identity::NodeId,
    },
    /// The parameters do not say what this machine should become.
    #[error("this machine has no cluster and no node parameters")]
    NothingToDo,
}

/// The decision of a curator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The reason code.
    pub reason: String,
    /// The curator's own text.
    pub text: String,
}

impl Refused {
    /// Whether the cluster of the curator does not have the node. Of a node without a record, the
    /// records may be older than the node: only an operator knows that it was removed.
    pub(super) fn is_removal(&self) -> bool {
        matches!(self.reason.as_str(), UNKNOWN | DECOMMISSIONED)
    }

    fn code(&self) -> Code {
        match self.reason.as_str() {
            "ticket-wrong" | "ticket-rotated" | "ticket-ended" => code::CLUSTER_TICKET,
            "known" | "join-key-taken" | "joined" => code::CLUSTER_KNOWN,
            DECOMMISSIONED => code::CLUSTER_REMOVED,
            UNKNOWN | "not-up" | "other-join-key" => code::CLUSTER_UNKNOWN,
            _ => code::CLUSTER_REFUSED,
        }
    }
}

impl Error {
    /// The failure for the trapdoor; `None` where a restart may help.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        if let Self::Install(error) = self {
            return Some(error.report());
        }
        let report = Report::from_error(self.code()?, self);
        let next = match self {
            Self::Disowned { node: Some(node) } => wipes(*node),
            Self::TurnedAway { node, refused, .. } if refused.reason == UNKNOWN => format!(
                "ask an operator whether this node was deleted; if it was not, press U and type \
                 the recovery key of this machine; if it was, {}",
                wipes(*node)
            ),
            Self::TurnedAway { node, .. } => wipes(*node),
            Self::Refused(Refusal::WipesOther { found, .. }) => {
                format!("check which machine this is; if its data is to go, {}", wipes(*found))
            }
            Self::Configuration(_) => {
                "install the version of Polis that the cluster runs, then reboot".to_owned()
            }
            Self::Store(store::Error::StoragePolicy { .. }) => {
                "make parameters with the storage policy of the snapshot's cluster (`polisctl \
                 parameters bootstrap --storage`), wipe the first 16 MiB of the data partition and \
                 delete it, then reboot; the snapshot is still on the EFI system partition"
                    .to_owned()
            }
            _ => return Some(report),
        };
        Some(Report { next, ..report })
    }

    fn code(&self) -> Option<Code> {
        Some(match self {
            Self::Refused(refusal) => match refusal {
                Refusal::SealedDamaged(_) => code::CLUSTER_SEALED_DAMAGED,
                Refusal::SealedLost => code::CLUSTER_SEALED_LOST,
                Refusal::DataLost => code::CLUSTER_DATA_LOST,
                Refusal::JournalDamaged(_) => code::CLUSTER_JOURNAL_DAMAGED,
                // `parameters::absent` has the better text where the searched places are known.
                Refusal::NothingToDo => code::PARAMETERS_ABSENT,
                Refusal::WipesOther { .. } => code::CLUSTER_WIPES_OTHER,
            },
            Self::Tpm(error) => match error {
                tpm::Error::Changed(_) | tpm::Error::Unapproved(_) => code::STORAGE_TPM_REFUSES,
                tpm::Error::Cleared | tpm::Error::Mismatch => code::STORAGE_TPM_CLEARED,
                tpm::Error::Absent => code::STORAGE_TPM_ABSENT,
                _ => code::STORAGE_TPM_FAILS,
            },
            Self::NoShare => code::STORAGE_SHARE_ABSENT,
            Self::KeyWrong { .. } => code::STORAGE_KEY_WRONG,
            Self::RecoveryUnreadable(_)
            | Self::RecoveryMalformed(_)
            | Self::RecoveryKeyWrong { .. } => code::STORAGE_RECOVERY_KEY_WRONG,
            Self::KindDiffers { .. } => code::STORAGE_KIND_DIFFERS,
            Self::Key(_) | Self::KeyLost | Self::CaLost | Self::OtherNode { .. } => {
                code::CLUSTER_NODE_KEY
            }
            Self::Curator(refused) | Self::TurnedAway { refused, .. } => refused.code(),
            Self::Disowned { .. } => code::CLUSTER_REMOVED,
            Self::Untrusted { .. } => code::CLUSTER_UNTRUSTED,
            Self::Configuration(_) | Self::Store(store::Error::StoragePolicy { .. }) => {
                code::CLUSTER_REFUSED
            }
            Self::OtherCluster => code::CLUSTER_STORE,
            Self::Store(error) if !error.retriable() => code::CLUSTER_STORE,
            Self::File(_) | Self::ShareNotKept(_) => code::CLUSTER_FILE,
            Self::Store(_)
            | Self::Unreachable(_)
            // It has a report of its own.
            | Self::Install(_)
            | Self::Closed(_)
            | Self::Changed
            | Self::Random
            | Self::Interrupted(_) => return None,
        })
    }
}

/// How a machine whose node was removed is used again.
fn wipes(node: identity::NodeId) -> String {
    format!(
        "to use the machine again, give it parameters that wipe its disk (`polisctl parameters \
         register --wipes {node}`), then reboot"
    )
}

/// The node that the parameters say to wipe, in words.
fn naming(named: Option<identity::NodeId>) -> String {
    named.map_or_else(
        || "no node that is to be wiped (`wipes`)".to_owned(),
        |named| format!("another node that is to be wiped (`wipes`), {named}"),
    )
}

/// The curator's reason code for a node without a record.
pub(super) const UNKNOWN: &str = "unknown";
/// The curator's reason code for a node that was decommissioned.
const DECOMMISSIONED: &str = "decommissioned";

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(reason: &str) -> Refused {
        Refused { reason: reason.to_owned(), text: "no".to_owned() }
    }

    #[test]
    fn only_a_removed_node_gets_the_advice_to_wipe_its_disk() {
        let report = |reason: &str| Error::Curator(refused(reason)).report().unwrap();
        assert_eq!(report("decommissioned").code, code::CLUSTER_REMOVED);
        for reason in ["unknown", "not-up", "other-join-key"] {
            let report = report(reason);
            assert_eq!(report.code, code::CLUSTER_UNKNOWN);
            assert!(report.code.is_locked(), "its recovery key opens the disk");
        }
    }

    #[test]
    fn only_the_answer_that_the_cluster_lacks_the_node_is_a_removal() {
        let removals = ["unknown", "decommissioned"];
        assert!(removals.iter().all(|reason| refused(reason).is_removal()));
        let others = ["", "not-up", "known", "joined", "ticket-wrong", "storage-policy", "running"];
        assert!(others.iter().all(|reason| !refused(reason).is_removal()));
        assert!(!refused("other-join-key").is_removal());
    }

    #[test]
    fn a_node_that_was_turned_away_names_what_is_missing_for_its_wipe() {
        let [node, other] = [1, 2].map(|seed| identity::NodeId::from_public_key(&[seed; 32]));
        for (reason, code) in
            [("unknown", code::CLUSTER_UNKNOWN), ("decommissioned", code::CLUSTER_REMOVED)]
        {
            for (named, missing) in
                [(None, "name no node".to_owned()), (Some(other), other.to_string())]
            {
                let refused = refused(reason);
                let report = Error::TurnedAway { node, named, refused }.report().unwrap();
                assert_eq!(report.code, code);
                assert!(report.cause().contains(&missing), "{}", report.cause());
                assert!(report.next.contains(&format!("--wipes {node}")), "{}", report.next);
            }
        }
    }
}
