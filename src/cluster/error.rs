//! Says why this machine does not become a member, with a code and the next
//! step for each cause.

use super::decide::Refusal;
use super::membership::Step;
use crate::curator::store;
use crate::event::Closed;
use crate::identity;
use crate::stage::Stage;
use crate::storage::file;
use crate::trapdoor::{Code, Report, code};

/// Why a run of the cluster manager ended, or the machine stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing sensible to do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The policy asks for what this version cannot do.
    #[error("the cluster's storage policy demands encryption, and this version cannot encrypt")]
    CannotEncrypt,
    /// The node's key cannot be made, read or written.
    #[error("cannot use the key of this node")]
    Key(#[source] identity::Error),
    /// The node has no key any more.
    #[error("the key of this node has gone from the data partition")]
    KeyLost,
    /// The key on the data partition is another node's.
    #[error("the sealed configuration belongs to {expected}, and the data partition to {found}")]
    OtherNode {
        /// Whom the sealed configuration names.
        expected: identity::NodeId,
        /// Whose key is on the data partition.
        found: identity::NodeId,
    },
    /// The store is another cluster's.
    #[error("the cluster's store has another CA than the sealed configuration names")]
    OtherCluster,
    /// The cluster's store does not have what it should.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The ESP or the data partition.
    #[error("cannot keep what this node must remember")]
    File(#[from] file::Error),
    /// A service that this one waits for is gone.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// A thread ended with a panic.
    #[error("the thread that works on the files was lost")]
    Lost,
    /// A test ended the run.
    #[error("interrupted after the step {0:?}")]
    Interrupted(Step),
}

impl Error {
    /// The failure for the trapdoor; `None` where starting again may help.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        let (code, stage, next) = match self {
            Self::Refused(refusal) => refused(refusal),
            Self::CannotEncrypt => (
                code::STORAGE_CANNOT_ENCRYPT,
                Stage::Storage,
                "set storage_security_policy to NEEDS_INSECURE or PERMISSIVE in the node \
                 parameters, or use a version that encrypts, then reboot",
            ),
            Self::Key(_) | Self::KeyLost | Self::OtherNode { .. } => (
                code::CLUSTER_NODE_KEY,
                Stage::Cluster,
                "put the disk back that belongs to this machine; if its data is lost, delete the \
                 data partition and polis/sealed_configuration.pb to begin anew",
            ),
            Self::OtherCluster => (code::CLUSTER_STORE, Stage::Cluster, STORE_NEXT),
            Self::Store(error) if !error.retriable() => {
                (code::CLUSTER_STORE, Stage::Cluster, STORE_NEXT)
            }
            Self::File(_) => (
                code::CLUSTER_FILE,
                Stage::Cluster,
                "check the disk, and that the EFI system partition is not full or write-protected, \
                 then reboot",
            ),
            Self::Store(_) | Self::Closed(_) | Self::Lost | Self::Interrupted(_) => return None,
        };
        Some(Report::from_error(code, stage, self, next))
    }
}

const STORE_NEXT: &str = "restore etcd from a snapshot, or delete the data partition and \
                          polis/sealed_configuration.pb to begin anew";

fn refused(refusal: &Refusal) -> (Code, Stage, &'static str) {
    let (code, next) = match refusal {
        Refusal::SealedDamaged(_) => (
            code::CLUSTER_SEALED_DAMAGED,
            "restore polis/sealed_configuration.pb on the EFI system partition from a backup; \
             nothing was changed",
        ),
        Refusal::SealedLost => (
            code::CLUSTER_SEALED_LOST,
            "restore polis/sealed_configuration.pb on the EFI system partition from a backup, or \
             delete the data partition to begin anew; nothing was changed",
        ),
        Refusal::DataLost => (
            code::CLUSTER_DATA_LOST,
            "put the disk back that belongs to this machine, or delete \
             polis/sealed_configuration.pb to begin anew",
        ),
        Refusal::JournalDamaged(_) => (
            code::CLUSTER_JOURNAL_DAMAGED,
            "delete the data partition, which never was in use, to begin anew",
        ),
        // `parameters::absent` says it better where it is known what was looked at.
        Refusal::NothingToDo => {
            (code::PARAMETERS_ABSENT, "put node parameters on the ESP, then reboot")
        }
        Refusal::CannotRegister => (
            code::CLUSTER_CANNOT_REGISTER,
            "give this machine parameters with cluster_bootstrap, or use a version that registers, \
             then reboot",
        ),
    };
    (code, Stage::Cluster, next)
}
