//! Readmission: gives a node a new certificate if its own ended while it was off, and an operator
//! has approved the boot that asks.
//!
//! ```text
//! node key --ask--> the record: returning --approve (`nodes`)--> --commit--> certificate
//! ```
//!
//! Invariants:
//! - A key alone receives nothing, not even the existing certificate: both together give access.
//! - A certificate that was revoked is not made again.
//! - The policies for TPMs hold at the approval and again at the commit.
//!
//! What this module does not do: decide what becomes of the record (`returning`), or whether the
//! node runs (`serve`).

use std::time::SystemTime;

use polis_proto::v1::{self, cluster_configuration::TpmMode};
use tracing::{info, warn};

use super::attestation_policy;
use super::error::Error;
use super::nodes::{applied, check_tpm, present};
use super::returning::Return;
use super::state::{self, Refusal, Request};
use super::store::{Store, node_key};
use polis_wire::identity::Identity;
use polis_wire::pki::{self, Issued};

/// Two boots that ask within these seconds are probably of two machines with the same disk: one
/// machine takes longer to start again.
const BOOT_MIN: i64 = 60;

impl<S: pki::Store + Clone> Store<S> {
    /// Checks that the node with this key may ask for a new certificate.
    ///
    /// # Errors
    ///
    /// [`Refusal::Known`] for another key, and the refusals of `state`.
    pub(super) async fn may_return(
        &self,
        identity: Identity,
        request: &Return,
    ) -> Result<(), Error> {
        let node = self.node(identity.id).await?;
        step(node, identity, Request::Return(request.clone()))
    }

    /// Puts the request of a node for a new certificate into its record; returns the record.
    ///
    /// # Errors
    ///
    /// As [`Self::may_return`].
    pub(super) async fn ask_to_return(
        &self,
        identity: Identity,
        request: Return,
    ) -> Result<v1::Node, Error> {
        let id = identity.id;
        let key = node_key(id);
        let mut before = None;
        let node = self.update(&key, |old: Option<v1::Node>| {
            let old = old.ok_or(Refusal::Unknown)?;
            check_key(&old, identity)?;
            before.clone_from(&old.returning);
            applied(id, Some(old), Request::Return(request.clone()), None)
        });
        let node = node.await?;
        let same = before.as_ref().is_some_and(|before| before.boot_id == request.boot_id);
        if !same {
            let address = &request.address;
            info!(
                event = "returns", node = %id, address,
                "a node asks for a new certificate: its own ended while it was off"
            );
            if before.is_some_and(|before| request.now - before.asked_at < BOOT_MIN) {
                warn!(
                    event = "copied", node = %id, address,
                    "two boots of a node ask for a new certificate: its disk was copied, or the \
                     machine restarts again and again; compare the fingerprint with its screen"
                );
            }
        }
        Ok(node)
    }

    /// The new certificate of a node whose present boot was approved.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotApproved`] for another boot, [`Refusal::NotUp`] for a node whose certificate
    /// was revoked, [`Error::TpmRequired`], [`Error::TpmUnproved`], [`Error::AttestationPolicy`],
    /// and as [`Self::may_return`].
    pub(super) async fn returned(
        &self,
        identity: Identity,
        boot_id: &str,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        let id = identity.id;
        let request = || Request::Returned { boot_id: boot_id.to_owned() };
        let node = self.node(id).await?;
        step(node.clone(), identity, request())?;
        let configuration = self.configuration().await?;
        let attestation = node.returning.as_ref().and_then(|known| known.attestation.clone());
        let proof = present(&v1::Node { attestation, ..node.clone() }, boot_id);
        if configuration.tpm_mode() == TpmMode::Required {
            check_tpm(&node, proof.as_ref())?;
        }
        attestation_policy::check(configuration.attestation.as_ref(), proof.as_ref())?;
        let issued = self.renew_node_certificate(identity, now).await?;
        let issued = issued.ok_or(Refusal::NotUp)?;
        // Only now: a removal changes the record before it revokes what was issued until then, and
        // another boot may have asked meanwhile.
        step(self.node(id).await?, identity, request())?;
        info!(event = "readmitted", node = %id, "a node received a new certificate");
        Ok(issued)
    }
}

/// Checks that `request` of the holder of this key is possible.
fn step(node: v1::Node, identity: Identity, request: Request) -> Result<(), Error> {
    check_key(&node, identity)?;
    Ok(state::step(Some(node), request).map(drop)?)
}

/// An ID has half of the key: the caller must have proved all of it. The refusal is not that of a
/// removed node, which may wipe its disk.
fn check_key(node: &v1::Node, identity: Identity) -> Result<(), Refusal> {
    match node.public_key == identity.public_key {
        true => Ok(()),
        false => Err(Refusal::Known),
    }
}
