//! The calls of a node whose certificate ended while it was off: it asks for another one by its
//! key, and receives it once an operator has approved it.
//!
//! What this module does not do: keep the request, or issue the certificate (`readmission`).

use std::net::IpAddr;

use polis_proto::v1;
use tonic::Status;
use tracing::warn;

use super::{Lead, seconds};
use crate::curator::error::Error;
use crate::curator::returning::{Refused, Return};
use crate::curator::state::{Refusal, Request as Change};
use crate::curator::{attesting, bounds, convert, nodes};
use polis_base::sys::clock;
use polis_wire::attestation;
use polis_wire::identity::{Identity, NodeId};
use polis_wire::pki::Facts;

impl Lead {
    /// Takes the request of a node for a new certificate; returns how it stands.
    pub(super) async fn ask_to_return(
        &self,
        identity: Identity,
        from: Option<IpAddr>,
        request: v1::RegisterNodeRequest,
    ) -> Result<v1::RegisterNodeResponse, Status> {
        let boot_id = boot(request.boot_id)?;
        let facts = Facts::read(&request.certificate)
            .filter(|facts| facts.public_key == identity.public_key)
            .ok_or_else(|| {
                Error::Field("certificate is not one of the key of the caller".to_owned())
            })?;
        let address = convert::address(&request.external_address, "external_address")?;
        let answer = request.tpm_answer;
        let attestation = answer.and_then(|sent| self.judged(identity.id, &boot_id, sent));
        let answered = attestation.is_some();
        let keys = request.tpm_keys.filter(|_keys| !answered);
        let request = Return {
            boot_id,
            nonce: nodes::nonce().map_err(|error| self.refuse(error))?,
            address: address.map(|address| address.to_string()).unwrap_or_default(),
            now: seconds(),
            attestation,
        };
        let allowed = self.store().may_return(identity, &request).await;
        allowed.map_err(|error| self.reject(identity, from, error))?;
        // A node that runs has a certificate.
        self.check_off(identity.id, from).await?;
        let asked = async {
            let now = clock::now();
            if facts.not_after > now {
                let ends = facts.not_after;
                return Err(Error::Refused(Refused::NotEnded { ends, now }.into()));
            }
            self.handlers.take_change(identity.id, Change::Return(request.clone()))?;
            self.store().ask_to_return(identity, request).await
        };
        let node = asked.await.map_err(|error| self.reject(identity, from, error))?;
        let returning = node.returning.unwrap_or_default();
        let state = match returning.approved {
            true => v1::NodeState::Up,
            false => v1::NodeState::New,
        };
        let questions = &self.handlers.0.questions;
        let tpm_question = keys.and_then(|keys| questions.ask(identity.id, keys).ok());
        Ok(v1::RegisterNodeResponse {
            state: state.into(),
            configuration: None,
            nonce: returning.nonce,
            tpm_question,
        })
    }

    /// The certificate of a node whose boot was approved.
    pub(super) async fn returned(
        &self,
        identity: Identity,
        from: Option<IpAddr>,
        boot_id: String,
    ) -> Result<Vec<u8>, Status> {
        let boot_id = boot(boot_id)?;
        let returned = Box::pin(self.store().returned(identity, &boot_id, clock::now())).await;
        let issued = returned.map_err(|error| self.reject(identity, from, error))?;
        Ok(issued.der)
    }

    /// Fails while the node runs, or may run: one machine at a time is the node.
    pub(super) async fn check_off(&self, id: NodeId, from: Option<IpAddr>) -> Result<(), Status> {
        let health = self.current().await?.borrow().node(id).map(|known| known.health);
        if !matches!(health, Some(v1::NodeHealth::Healthy | v1::NodeHealth::Unknown)) {
            return Ok(());
        }
        // The first question may follow the last heartbeat before a quick restart.
        if self.handlers.0.heartbeats.ask(id) {
            let address = from.map_or_else(String::new, |from| from.to_string());
            warn!(
                event = "copied", node = %id, address,
                "a machine asks as a node, for the key of its disk or a certificate, while the \
                 node runs"
            );
        }
        Err(self.refuse(Refusal::Running))
    }

    /// What an answer of a TPM proves of this boot; `None` if this leader has not asked.
    pub(super) fn judged(
        &self,
        id: NodeId,
        boot_id: &str,
        sent: v1::TpmAnswer,
    ) -> Option<v1::TpmAttestation> {
        let judged = self.handlers.0.questions.judge(id, boot_id, sent, seconds())?;
        let failed =
            |error: attestation::Error| attesting::failed(boot_id, error.to_string(), seconds());
        Some(judged.unwrap_or_else(failed))
    }
}

/// The boot of a node that returns: without a name, each boot would be that of another machine.
fn boot(boot_id: String) -> Result<String, Error> {
    let boot_id = bounds::boot_id(boot_id, "boot_id")?;
    match boot_id.is_empty() {
        true => Err(Error::Field("boot_id is missing".to_owned())),
        false => Ok(boot_id),
    }
}
