//! The errors of the curator, and their form on the wire.
//!
//! Each rejection has a reason of its own, which programs read in the trailer [`REASON`];
//! the text is for people. Reasons are never renamed.

use polis_bundle::EtcdRefusal;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use super::attesting;
use super::capacity::Shortage;
use super::fenced::Deposed;
use super::returning::Refused;
use super::state::Refusal;
use super::store;
use super::update::Refusal as Against;
use crate::consensus::{MembersError, Refusal as Quorum, client};
use polis_wire::identity::NodeId;
use polis_wire::pki;
use polis_wire::rpc::REASON;

/// The reason why a call was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The node's record does not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The ticket is not the one of this cluster.
    #[error("the register ticket belongs to another cluster; ask an owner for this cluster's")]
    TicketWrong,
    /// The ticket was valid before.
    #[error("the register ticket was replaced by a newer one; ask an owner for it")]
    TicketRotated,
    /// The ticket has expired.
    #[error("the register ticket has ended; ask an owner for a new one")]
    TicketEnded,
    /// A leaked ticket must not fill etcd.
    #[error(
        "the limit of pending registrations is reached ({waiting}, with {} KiB): ask an operator",
        bytes >> 10
    )]
    WaitingRoom {
        /// The number of machines that wait.
        waiting: usize,
        /// The bytes of their records.
        bytes: usize,
    },
    /// Another node has registered with this join key.
    #[error("the join key belongs to another node")]
    JoinKeyTaken,
    /// Another node has this key in the mesh.
    #[error(
        "the key of this node in the mesh is that of {by}: one disk may be a copy of the other; \
         decommission the node that is the copy, and give the machine a new disk"
    )]
    MeshKeyTaken {
        /// The node that has it.
        by: String,
    },
    /// The version of the node supports only the default networks.
    #[error(
        "{node} runs version {version}, which supports only the default networks of pods and \
         Services, and this cluster has others: update the node to the version of the leader first"
    )]
    EarlierVersion {
        /// The node.
        node: NodeId,
        /// What it runs.
        version: String,
    },
    /// The fingerprint that the operator compared belongs to another machine.
    #[error("the fingerprint is not that of {node}: another machine may have taken its place")]
    Fingerprint {
        /// The node to approve.
        node: String,
    },
    /// The record has another proof of the TPM than the operator looked at.
    #[error("{node} has proved another start, or another TPM, since its proof was read")]
    ProvedAnew {
        /// The node to approve.
        node: String,
    },
    /// The disk is not as the cluster demands.
    #[error("the cluster's storage policy is {policy}, and the disk of the node is {kind}")]
    StoragePolicy {
        /// The demanded protection.
        policy: &'static str,
        /// The actual protection.
        kind: &'static str,
    },
    /// The node keeps its half of the disk's key without a TPM.
    #[error("the cluster requires a TPM, and the node has registered without one")]
    TpmRequired,
    /// The node says that it has a TPM, and the TPM has not proved it.
    #[error("the cluster requires a TPM, and that of the node has proved nothing: {why}")]
    TpmUnproved {
        /// The fault in the proof.
        why: String,
    },
    /// The TPM of the machine has not proved what the cluster wants of machines that enter.
    #[error("the attestation policy of the cluster keeps the machine out: {why}")]
    AttestationPolicy {
        /// Each difference, with *expected* and *actual*.
        why: String,
    },
    /// As many questions to TPMs of members wait as may.
    #[error("as many TPMs are questioned as the leader can remember; the node asks again")]
    TpmQuestions,
    /// A member has begun more proofs than its budget has.
    #[error(
        "a member begins at most {max} proofs of its TPM in a row, and one each {pace} s after \
         that; the node asks again",
        max = attesting::PROOFS_MAX,
        pace = attesting::PROOFS_PACE.as_secs()
    )]
    TpmProofs,
    /// A node has changed as many keys of its worker as it may.
    #[error(
        "public_key is another one than the last, and a node changes at most {max} keys of its \
         worker in a row, and one each {minutes} min after that; it asks again until it may, in \
         {minutes} min at the latest"
    )]
    WorkerKeys {
        /// How many in a row.
        max: u32,
        /// The time after which it may change one more.
        minutes: u64,
    },
    /// A machine that is no member yet has changed its record as often as it may.
    #[error(
        "a machine changes its registration at most {max} times in a row, and once each {seconds} \
         s after that; it asks again until it may, in {seconds} s at the latest"
    )]
    Registrations {
        /// How often in a row.
        max: u32,
        /// The time after which it may once more.
        seconds: u64,
    },
    /// The check of an answer decided nothing; another question may.
    #[error("the answer of the TPM could not be checked: {why}")]
    TpmUndecided {
        /// The reason.
        why: String,
    },
    /// A field is not valid.
    #[error("{0}")]
    Field(String),
    /// The key does not belong to an owner with access.
    #[error(
        "this key is not the owner's: use the key with which the cluster was founded, or that of \
         another owner who is not revoked"
    )]
    NotOwner,
    /// The user's access was ended.
    #[error("the access of user {name} was revoked")]
    UserRevoked {
        /// The user.
        name: String,
    },
    /// No entry for the registry.
    #[error("registry {host:?} does not exist")]
    RegistryUnknown {
        /// Its host.
        host: String,
    },
    /// The user exists with another key or role.
    #[error("the user {name} exists with another {what}; revoke it first")]
    UserTaken {
        /// The user.
        name: String,
        /// Key or role.
        what: &'static str,
    },
    /// Another user has the key.
    #[error("the key for {name} is the key of the user {by}; each user needs a key of its own")]
    KeyTaken {
        /// The user that was to be made.
        name: String,
        /// The user that has it.
        by: String,
    },
    /// The user does not exist.
    #[error("user {name} does not exist")]
    UserUnknown {
        /// The user.
        name: String,
    },
    /// The cluster must keep an owner who can manage it.
    #[error("{name} is the last owner and cannot be revoked")]
    LastOwner {
        /// The user.
        name: String,
    },
    /// Another node has the name.
    #[error("the name {name} belongs to {by}; a name belongs to one node")]
    NameTaken {
        /// The name.
        name: String,
        /// The node that has it.
        by: String,
    },
    /// A part of the configuration that is fixed for the life of a cluster.
    #[error("{field} cannot change in a running cluster: it is {value:?}")]
    Fixed {
        /// The field.
        field: &'static str,
        /// The value that it keeps.
        value: String,
    },
    /// The firewall to confirm is not on trial.
    #[error(
        "this firewall is not tried now: its time is over, or another one was set since; set it \
         again with `polisctl cluster configure`"
    )]
    NoTrial,
    /// The update cannot be planned.
    #[error(transparent)]
    Plan(#[from] Against),
    /// One update at a time.
    #[error("an update to version {version} goes on: it is {state}")]
    UpdateGoesOn {
        /// Its version.
        version: String,
        /// Its state.
        state: &'static str,
    },
    /// etcd must not miss two voters at once.
    #[error(
        "{node} restarts for the update of the cluster, and etcd must not miss another voter \
         meanwhile: wait until it is back, or pause the update before the turn of the next one"
    )]
    Restarting {
        /// The voter that restarts.
        node: NodeId,
    },
    /// The same, for a rotation of the authorities.
    #[error(
        "{node} starts its member of etcd again for the rotation of the authorities, and etcd must \
         not miss another voter meanwhile: ask again in a minute"
    )]
    StartsAgain {
        /// The node of the member.
        node: NodeId,
    },
    /// There is none to show, or none that goes on.
    #[error("no update of the cluster {0}")]
    NoUpdate(&'static str),
    /// The authorities were never rotated.
    #[error("the authorities of this cluster were never rotated")]
    NoRotation,
    /// The recovery key was saved, or never existed.
    #[error(
        "the cluster has no recovery key of this node: it was confirmed as saved, or the disk is \
         not encrypted"
    )]
    NoRecoveryKey,
    /// etcd ended a snapshot before its checksum.
    #[error("etcd sent only {size} bytes of its snapshot; take another one")]
    CutSnapshot {
        /// The bytes that it sent.
        size: u64,
    },
    /// etcd keeps what it deletes while one is taken.
    #[error("another snapshot is being taken; one at a time")]
    SnapshotGoesOn,
    /// The caller reads too slowly, or etcd does.
    #[error("the snapshot took longer than half an hour; take one over a faster network")]
    SlowSnapshot,
    /// The node is not allowed to become that.
    #[error("the node does not have the role consensus member")]
    NoRole,
    /// The node gets no certificates of a worker.
    #[error("the node does not have the role Kubernetes worker")]
    NoWorker,
    /// etcd did not carry out a request, outside the records.
    #[error(transparent)]
    Etcd(#[from] client::Error),
    /// The change of etcd's membership was rejected.
    #[error(transparent)]
    Members(#[from] MembersError),
}

impl From<pki::Error> for Error {
    fn from(error: pki::Error) -> Self {
        Self::Store(error.into())
    }
}

impl Error {
    /// The code and the reason of a rejection.
    fn class(&self) -> (Code, &'static str) {
        use Code::{
            Aborted, AlreadyExists, FailedPrecondition, Internal, InvalidArgument, NotFound,
            PermissionDenied, ResourceExhausted, Unavailable,
        };
        match self {
            Self::Store(error) if error.retriable() => (Unavailable, "store"),
            Self::Store(_) => (Internal, "damaged"),
            Self::Refused(refusal) => match refusal {
                Refusal::Unknown => (NotFound, "unknown"),
                Refusal::Decommissioned => (FailedPrecondition, "decommissioned"),
                Refusal::NotApproved => (FailedPrecondition, "not-approved"),
                Refusal::NotUp => (FailedPrecondition, "not-up"),
                Refusal::Joined => (FailedPrecondition, "joined"),
                Refusal::Known => (FailedPrecondition, "known"),
                Refusal::OtherJoinKey => (FailedPrecondition, "other-join-key"),
                Refusal::StillUp => (FailedPrecondition, "still-up"),
                Refusal::Running => (Unavailable, "running"),
                Refusal::Leaving => (FailedPrecondition, "leaving"),
                Refusal::NoMember => (FailedPrecondition, "no-member"),
                Refusal::Controls => (FailedPrecondition, "controller"),
                Refusal::Labels | Refusal::Taints => (InvalidArgument, "field"),
                Refusal::PodNetworkFull { .. } => (ResourceExhausted, "pod-network-full"),
                Refusal::InPodNetwork { .. } => (FailedPrecondition, "pod-network"),
                Refusal::NoIpv4 { .. } => (FailedPrecondition, "no-ipv4"),
                Refusal::Shortage(Shortage::Memory { .. }) => (FailedPrecondition, "memory"),
                Refusal::Shortage(Shortage::Disk { .. }) => (FailedPrecondition, "disk"),
                Refusal::Returning(Refused::RenewsItself) => (FailedPrecondition, "voter"),
                Refusal::Returning(Refused::NotEnded { .. }) => (FailedPrecondition, "not-ended"),
                Refusal::Returning(Refused::Asks) => (FailedPrecondition, "returning"),
            },
            Self::TicketWrong => (PermissionDenied, "ticket-wrong"),
            Self::TicketRotated => (PermissionDenied, "ticket-rotated"),
            Self::TicketEnded => (PermissionDenied, "ticket-ended"),
            Self::WaitingRoom { .. } => (ResourceExhausted, "waiting-room"),
            Self::JoinKeyTaken => (PermissionDenied, "join-key-taken"),
            Self::MeshKeyTaken { .. } => (AlreadyExists, "mesh-key-taken"),
            Self::EarlierVersion { .. } => (FailedPrecondition, "earlier-version"),
            Self::Fingerprint { .. } => (FailedPrecondition, "fingerprint"),
            Self::ProvedAnew { .. } => (FailedPrecondition, "proved-anew"),
            Self::StoragePolicy { .. } => (FailedPrecondition, "storage-policy"),
            Self::TpmRequired => (FailedPrecondition, "tpm-required"),
            Self::TpmUnproved { .. } => (FailedPrecondition, "tpm-unproved"),
            Self::AttestationPolicy { .. } => (FailedPrecondition, "attestation-policy"),
            Self::TpmQuestions => (ResourceExhausted, "tpm-questions"),
            Self::TpmProofs => (ResourceExhausted, "tpm-proofs"),
            Self::WorkerKeys { .. } => (ResourceExhausted, "worker-keys"),
            Self::Registrations { .. } => (ResourceExhausted, "registrations"),
            Self::TpmUndecided { .. } => (Aborted, "tpm-undecided"),
            Self::Field(_) => (InvalidArgument, "field"),
            Self::NotOwner => (PermissionDenied, "not-owner"),
            Self::UserRevoked { .. } => (PermissionDenied, "user-revoked"),
            Self::UserTaken { .. } => (AlreadyExists, "user-taken"),
            Self::KeyTaken { .. } => (AlreadyExists, "key-taken"),
            Self::UserUnknown { .. } | Self::RegistryUnknown { .. } => (NotFound, "unknown"),
            Self::LastOwner { .. } => (FailedPrecondition, "last-owner"),
            Self::NameTaken { .. } => (FailedPrecondition, "name-taken"),
            Self::Fixed { .. } => (FailedPrecondition, "fixed"),
            Self::NoTrial => (FailedPrecondition, "no-trial"),
            Self::Plan(Against::Etcd(EtcdRefusal::OneWay { .. })) => {
                (FailedPrecondition, "update-one-way")
            }
            Self::Plan(_) => (FailedPrecondition, "update-plan"),
            Self::UpdateGoesOn { .. } => (FailedPrecondition, "update-going-on"),
            Self::Restarting { .. } => (FailedPrecondition, "update-restarts"),
            Self::StartsAgain { .. } => (FailedPrecondition, "rotation-restarts"),
            Self::NoUpdate(_) => (NotFound, "no-update"),
            Self::NoRotation => (NotFound, "no-rotation"),
            Self::NoRecoveryKey => (NotFound, "no-recovery-key"),
            Self::CutSnapshot { .. } => (Unavailable, "cut-snapshot"),
            Self::SnapshotGoesOn => (FailedPrecondition, "snapshot-going-on"),
            Self::SlowSnapshot => (Unavailable, "slow-snapshot"),
            Self::NoRole => (FailedPrecondition, "no-role"),
            Self::NoWorker => (FailedPrecondition, "no-worker"),
            Self::Etcd(_) => (Unavailable, "etcd"),
            Self::Members(error) => match error {
                MembersError::Turn { .. } => (Unavailable, "turn"),
                MembersError::Refused(Quorum::Last { .. } | Quorum::Quorum { .. }) => {
                    (FailedPrecondition, "quorum")
                }
                _ => (Unavailable, "members"),
            },
        }
    }

    /// The reason of a decision; `None` if the curator did not decide.
    pub(super) fn decided(&self) -> Option<&'static str> {
        (!self.is_trouble()).then(|| self.class().1)
    }

    /// Whether the error means that another curator leads.
    #[must_use]
    pub fn deposed(&self) -> bool {
        let (Self::Store(
            store::Error::Store(source) | store::Error::Pki(pki::Error::Store { source, .. }),
        )
        | Self::Members(MembersError::Pki(pki::Error::Store { source, .. }))) = self
        else {
            return false;
        };
        source.downcast_ref::<Deposed>().is_some()
    }

    /// Whether this node logs the error: calls of untrusted callers must not make lines in its log.
    /// A refusal by a record is a decision, also one after which the caller asks again.
    fn is_trouble(&self) -> bool {
        let failed = matches!(self.class().0, Code::Internal | Code::Unavailable);
        failed && !matches!(self, Self::Refused(_))
    }

    /// Whether the store is full, or its members have different data: all writes fail, and an
    /// operator must act.
    fn refuses_writes(&self) -> bool {
        let Self::Store(store::Error::Store(source)) = self else { return false };
        let refused = source.downcast_ref();
        matches!(refused, Some(client::Error::Full { .. } | client::Error::Corrupt { .. }))
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let (code, word) = error.class();
        let code = if error.refuses_writes() { Code::ResourceExhausted } else { code };
        // The causes are for the log of this node, except where the caller may do something
        // about them.
        let text = match &error {
            Error::Members(MembersError::Refused(refusal)) => refusal.to_string(),
            Error::Members(turn @ MembersError::Turn { .. }) => turn.to_string(),
            error => error.to_string(),
        };
        if error.is_trouble() {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "cannot answer a call");
        }
        let mut status = Self::new(code, text);
        status.metadata_mut().insert(REASON, MetadataValue::from_static(word));
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with a copied disk asks as often as it likes.
    #[test]
    fn a_machine_that_asks_for_the_key_of_a_node_that_runs_makes_no_line_in_the_log() {
        let refused = Error::Refused(Refusal::Running);
        assert!(!refused.is_trouble());
        assert_eq!(Status::from(refused).code(), Code::Unavailable, "it asks again");
    }

    #[test]
    fn a_full_waiting_room_is_for_the_caller_and_a_store_that_refuses_writes_for_the_log() {
        let full = client::Error::Full { what: "register a node" };
        let full = Error::Store(store::Error::Store(anyhow::Error::new(full)));
        let room = Error::WaitingRoom { waiting: 1024, bytes: 4 << 20 };
        let corrupt = client::Error::Corrupt { what: "register a node" };
        let corrupt = Error::Store(store::Error::Store(anyhow::Error::new(corrupt)));
        let stores = [(full, true), (corrupt, true)];
        for (error, trouble) in
            stores.into_iter().chain([(room, false), (Error::TicketWrong, false)])
        {
            assert_eq!(error.is_trouble(), trouble, "{error:?}");
            if !matches!(error, Error::TicketWrong) {
                assert_eq!(Status::from(error).code(), Code::ResourceExhausted);
            }
        }
        let damaged = store::Error::Damaged { key: "node".to_owned() };
        assert!(Error::Store(damaged).is_trouble());
    }
}
