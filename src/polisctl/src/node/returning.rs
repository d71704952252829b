//! The request of a node for a new certificate, since its own ended while it was off: as an
//! operator reads it and decides about it.

use polis_proto::v1;
use serde::Serialize;

use crate::output::or_dash;
use crate::text::clean;
use crate::units;
use polis_wire::identity::Fingerprint;

/// The request of a node whose certificate ended while it was off.
#[derive(Debug, Serialize)]
pub(super) struct Returning {
    /// When its present boot asked first.
    asked_at: Option<units::Time>,
    address: String,
    /// Whether an operator has approved that boot.
    approved: bool,
}

impl Returning {
    pub(super) fn of(asks: &v1::Returning) -> Self {
        Self {
            asked_at: units::since_1970(asks.asked_at).map(units::Time),
            address: clean(&asks.address),
            approved: asks.approved,
        }
    }

    /// Whether no operator has approved it.
    pub(super) fn waits(&self) -> bool {
        !self.approved
    }

    /// The same as a line.
    pub(super) fn text(&self, id: &str) -> String {
        let Self { asked_at, address, approved } = self;
        let asks = format!(
            "asks for a new certificate since {}, from {}",
            or_dash(&units::text(*asked_at)),
            or_dash(address)
        );
        match approved {
            true => format!("{asks}; approved"),
            false => format!("{asks}: `polisctl node approve {id}`"),
        }
    }
}

/// The node as an operator decides about it: with the nonce and the proof of its request for a new
/// certificate, if there is one.
pub(super) fn asking(node: &v1::NodeInfo) -> v1::NodeInfo {
    let node = node.clone();
    match node.returning.clone() {
        None => node,
        Some(v1::Returning { nonce, attestation, .. }) => {
            // It has not reported the boot that asks.
            let of = |status: v1::NodeStatus| v1::NodeStatus { boot_id: String::new(), ..status };
            let status = node.status.clone().map(of);
            v1::NodeInfo { nonce, attestation, status, ..node }
        }
    }
}

/// Whether a node asks for a new certificate with another TPM than the one in its record.
pub(super) fn has_another_tpm(node: &v1::NodeInfo) -> bool {
    let key =
        |proof: &v1::TpmAttestation| proof.keys.as_ref().map(|keys| keys.endorsement_key.clone());
    let known = node.attestation.as_ref().and_then(key);
    let proof = node.returning.as_ref().and_then(|asks| asks.attestation.as_ref());
    matches!((known, proof.and_then(key)), (Some(known), Some(new)) if known != new)
}

/// The fingerprint of a node's key.
pub(super) fn fingerprint(node: &v1::NodeInfo) -> Option<Fingerprint> {
    let nonce = node.returning.as_ref().map_or(&node.nonce, |returning| &returning.nonce);
    Fingerprint::of_registration(&node.public_key, nonce)
}
