//! The wait for an operator's approval, of a machine that registers or of a node that asks for a
//! new certificate: proves the TPM to the leader, and shows the words that the operator compares.
//!
//! What this module does not do: ask the leader (`register`, `returning`).

use std::time::Duration;

use polis_proto::v1;
use tokio::time::sleep;
use tracing::info;

use super::error::Error;
use super::state::Event;
use super::unlock::sealer::Sealer;
use super::writer::Writer;
use polis_base::stage::{self, Stage};
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::{Fingerprint, NodeId, NodeKey, NodeName};

/// The time between two checks of whether an operator has approved this node.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// How often a leader may question the TPM in a boot: each new leader asks anew.
const PROOFS_MAX: u32 = 5;

/// A request that waits for an operator.
pub(super) struct Approval<'a> {
    key: &'a NodeKey,
    name: Option<&'a NodeName>,
    sealer: &'a Sealer,
    /// The questions to the TPM so far.
    proofs: u32,
    /// The fingerprint that is shown, and its words.
    shown: Option<(Fingerprint, String)>,
}

impl<'a> Approval<'a> {
    /// A request of the node with this key, which its parameters may give a name.
    pub(super) fn new(key: &'a NodeKey, name: Option<&'a NodeName>, sealer: &'a Sealer) -> Self {
        Self { key, name, sealer, proofs: 0, shown: None }
    }

    /// The keys of the TPM, with which the leader questions it; `None` without a TPM.
    pub(super) async fn tpm_keys(&self) -> Option<v1::TpmKeys> {
        let sealer = self.sealer.clone();
        blocking(move || sealer.keys()).await
    }

    /// Puts the answer of the TPM to the question of the leader into the next request; returns
    /// whether there is one, which the leader should receive at once.
    pub(super) async fn proves(
        &mut self,
        request: &mut v1::RegisterNodeRequest,
        answer: &mut v1::RegisterNodeResponse,
    ) -> bool {
        let question = answer.tpm_question.take().filter(|_question| self.proofs < PROOFS_MAX);
        request.tpm_answer = match question {
            None => None,
            Some(question) => {
                self.proofs += 1;
                let (sealer, node) = (self.sealer.clone(), self.key.id().to_string());
                blocking(move || sealer.prove(&node, question)).await
            }
        };
        if request.tpm_answer.is_none() {
            request.tpm_keys = None;
        }
        request.tpm_answer.is_some()
    }

    /// Shows what the operator compares, and waits for the next request.
    pub(super) async fn wait(
        &mut self,
        ctx: &Context,
        status: &Writer,
        answer: &v1::RegisterNodeResponse,
    ) -> Result<(), Error> {
        let fingerprint = fingerprint(self.key, answer)?;
        let words = match self.shown.take() {
            Some((of, words)) if of == fingerprint => words,
            _ => blocking(move || fingerprint.words()).await,
        };
        self.shown = Some((fingerprint, words.clone()));
        status.shows(fingerprint);
        let id = self.key.id();
        if status.happened(Event::Contacted, ctx.lines(), |_foreign| {}) {
            info!(node = %id, fingerprint = words, "waiting for an operator's approval");
        }
        ctx.stage(Stage::Cluster, stage::State::Waiting(awaited(&words, id, self.name)));
        sleep(POLL_INTERVAL).await;
        Ok(())
    }
}

/// The fingerprint that an operator compares: the leader chose a part of it.
fn fingerprint(key: &NodeKey, answer: &v1::RegisterNodeResponse) -> Result<Fingerprint, Error> {
    let why = || "the nonce of the registration has not 16 bytes".to_owned();
    Fingerprint::of_registration(&key.public_key(), &answer.nonce)
        .ok_or_else(|| Error::Configuration(why()))
}

/// The text of the wait for approval. Tools take the words from between `fingerprint is `
/// and the semicolon.
fn awaited(words: &str, id: NodeId, name: Option<&NodeName>) -> String {
    let named = name.map(|name| format!(" ({name})")).unwrap_or_default();
    format!(
        "an operator who approves this node{named}: its fingerprint is {words}; compare it with \
         that of `polisctl node approve {id}`"
    )
}

#[cfg(test)]
mod tests {
    use polis_qemu::Event;
    use polis_qemu::fleet::{Asks, asks};

    use super::*;

    #[test]
    fn the_fingerprint_is_in_the_reason_on_the_serial_line() {
        let name = "web-1".parse().unwrap();
        let awaited =
            awaited("able-acid-aged-also", NodeId::from_public_key(&[1; 32]), Some(&name));
        assert!(awaited.contains("this node (web-1)"), "{awaited}");
        let line = format!("POLIS stage name=cluster state=waiting for=\"{awaited}\" t=9.0");
        let event = Event::parse(&line, Duration::ZERO).unwrap();
        assert_eq!(asks(&event), Some(Asks::Approval("able-acid-aged-also".to_owned())));
    }
}
