//! The proof of a member's start: its node asks to prove it, gets a question for its TPM and
//! answers it.
//!
//! What this module does not do: judge an answer (`attesting`), or keep the proof (`state`).

use polis_proto::v1;

use super::{Lead, seconds};
use crate::curator::error::Error;
use crate::curator::state::Request as Change;
use crate::curator::{attested, attesting, bounds};
use polis_wire::attestation;
use polis_wire::identity::NodeId;

impl Lead {
    /// Takes the next step of the proof of a member's start; returns the question to its TPM, if
    /// there is one.
    pub(super) async fn prove(
        &self,
        id: NodeId,
        boot_id: &str,
        keys: Option<v1::TpmKeys>,
        answer: Option<v1::TpmAnswer>,
        fault: String,
    ) -> Result<Option<v1::TpmQuestion>, Error> {
        let questions = &self.handlers.0.member_questions;
        let failed = |fault| attesting::failed(boot_id, bounds::tpm_fault(fault), seconds());
        let decided = |error: attestation::Error| match attesting::is_undecided(&error) {
            true => Err(Error::TpmUndecided { why: error.to_string() }),
            false => Ok(failed(error.to_string())),
        };
        // An answer needs none: its question had one.
        let begin = || match self.handlers.0.proofs.take(id, 1) {
            true => Ok(()),
            false => Err(Error::TpmProofs),
        };
        let proof = match (answer, fault.is_empty()) {
            // Without a question the answer says nothing: another leader asked. The node
            // learns with its next heartbeat that it is asked anew.
            (Some(answer), _) => match questions.judge(id, boot_id, answer, seconds()) {
                Some(judged) => Some(judged.or_else(decided)?),
                None => None,
            },
            (None, false) => {
                begin()?;
                Some(failed(fault))
            }
            (None, true) => {
                let node = self.store().node(id).await?;
                let Some(keys) = keys.filter(|_keys| attested::awaits(&node, boot_id)) else {
                    return Ok(None);
                };
                if !questions.has_room(id) {
                    return Err(Error::TpmQuestions);
                }
                begin()?;
                match questions.ask(id, keys) {
                    Ok(question) => return Ok(Some(question)),
                    Err(error) => Some(decided(error)?),
                }
            }
        };
        if let Some(proof) = proof {
            self.store().change(id, Change::Prove(proof)).await?;
        }
        Ok(None)
    }
}
