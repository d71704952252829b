//! The return of a node whose certificate ended while it was off: which requests lead to a new
//! certificate, and how they change the record of the node. Pure.
//!
//! ```text
//!           ask                  approve               commit of this boot: a certificate
//! [none] ---------> [this boot] ---------> [approved] ---+
//!    ^                |  ^  another boot       |   ^-----+
//!    |                +--+---------------------+
//!    +--------- first status by a certificate, or decommissioned
//! ```
//!
//! Only nodes that are up ask: `state` checks that.
//!
//! Invariants:
//! - An approval is of one boot of one machine. A copy of its disk has its key, and neither the
//!   name of that boot nor its fingerprint.
//! - Another boot always ends the approval, and has another fingerprint.
//! - A consensus member never receives a certificate this way: the old key must not give
//!   access to the data of etcd.
//!
//! What this module does not do: check the key of the caller or policies, or make certificates
//! (`readmission`).

use std::time::SystemTime;

use polis_proto::v1;
use subtle::ConstantTimeEq as _;

use super::attesting;
use polis_wire::identity::Nonce;
use polis_wire::node_roles::is_consensus_member;
use polis_wire::pki::moment;

/// The fields of a request for a new certificate.
#[derive(Clone, Debug, PartialEq)]
pub struct Return {
    /// The boot that asks.
    pub boot_id: String,
    /// Chosen after the request was received; the first request of a boot keeps it.
    pub nonce: Nonce,
    /// The address of the node.
    pub address: String,
    /// Seconds since 1970.
    pub now: i64,
    /// The proof of its TPM since the last time; `None`: nothing new.
    pub attestation: Option<v1::TpmAttestation>,
}

/// The reason why a node receives no new certificate, or no role meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The node has the role consensus member.
    #[error(
        "the node has the role consensus-member, and renews its certificate itself once its etcd \
         serves; if its etcd is lost, an owner takes that role away first"
    )]
    RenewsItself,
    /// Its certificate has not ended.
    #[error(
        "the certificate of the node ends at {} by the clock of the leader, which is {}: set the \
         clock of the node",
        moment(*ends), moment(*now)
    )]
    NotEnded {
        /// The end of the certificate.
        ends: SystemTime,
        /// The time of the leader.
        now: SystemTime,
    },
    /// It should become a consensus member meanwhile.
    #[error(
        "the node asks for a new certificate: it can be given the role consensus-member once it is \
         back"
    )]
    Asks,
}

/// The record after a request. An approval stays only for the boot that was approved.
///
/// # Errors
///
/// [`Refused::RenewsItself`].
pub(super) fn asked(node: v1::Node, request: Return) -> Result<v1::Node, Refused> {
    may_ask(&node)?;
    let Return { boot_id, nonce, address, now, attestation } = request;
    let returning = match node.returning.clone() {
        Some(known) if is_of(&known, &boot_id) => {
            let attestation = match known.approved {
                true => attesting::after_approval(known.attestation.clone(), attestation),
                false => attestation.or_else(|| known.attestation.clone()),
            };
            v1::Returning { address, attestation, ..known }
        }
        Some(_) | None => v1::Returning {
            boot_id,
            nonce: nonce.to_vec(),
            address,
            asked_at: now,
            attestation,
            approved: false,
        },
    };
    Ok(v1::Node { returning: Some(returning), ..node })
}

/// The record after the approval of its request, if it has one.
pub(super) fn approved(node: v1::Node) -> v1::Node {
    let returning = node.returning.clone();
    let returning = returning.map(|known| v1::Returning { approved: true, ..known });
    v1::Node { returning, ..node }
}

/// Whether an operator has approved this boot.
///
/// # Errors
///
/// [`Refused::RenewsItself`].
pub(super) fn is_approved(node: &v1::Node, boot_id: &str) -> Result<bool, Refused> {
    may_ask(node)?;
    let known = node.returning.as_ref();
    Ok(known.is_some_and(|known| known.approved && is_of(known, boot_id)))
}

/// The record with the nonce and the proof that an operator looks at: those of the request, if
/// there is one. The boot is secret.
pub(super) fn as_shown(node: &v1::Node) -> v1::Node {
    let node = node.clone();
    let Some(known) = shown(node.returning.clone()) else { return node };
    v1::Node { nonce: known.nonce, attestation: known.attestation, ..node }
}

/// A request as callers see it.
pub(super) fn shown(returning: Option<v1::Returning>) -> Option<v1::Returning> {
    let known = returning?;
    let attestation = known.attestation.map(|proof| v1::TpmAttestation {
        // The same name: a copy of the disk must not learn it.
        boot_id: String::new(),
        ..proof
    });
    Some(v1::Returning { boot_id: String::new(), attestation, ..known })
}

/// Fails for a node that renews its certificate without a leader.
fn may_ask(node: &v1::Node) -> Result<(), Refused> {
    match is_consensus_member(node.roles.as_ref()) {
        true => Err(Refused::RenewsItself),
        false => Ok(()),
    }
}

/// Whether the request is of this boot. In a time that does not depend on where the two differ.
fn is_of(known: &v1::Returning, boot_id: &str) -> bool {
    !boot_id.is_empty() && bool::from(known.boot_id.as_bytes().ct_eq(boot_id.as_bytes()))
}
