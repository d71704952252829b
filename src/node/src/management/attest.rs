//! The calls `GetAttestationKeys` and `Attest`: have the TPM of this machine prove its keys and
//! its registers to the caller. The agent proves them to the leader by the same [`Tpm`].
//!
//! Nothing is kept between the two calls: the TPM makes both keys anew for each.
//!
//! Invariants:
//! - One call at a time uses the TPM, however many callers ask.
//! - The TPM signs the ID of this node with the caller's nonce, so that another machine cannot
//!   pass the answer off as its own.
//!
//! What this module does not do: judge anything. The caller does.

use std::path::PathBuf;
use std::sync::Arc;

use polis_base::cause;
use polis_proto::v1;
use tokio::sync::Semaphore;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use polis_machine::tpm::{self, Device, Error};
use polis_wire::attestation::{Question, qualifier};
use polis_wire::rpc::REASON;

/// The reason of a machine without a TPM.
const NO_TPM: &str = "no-tpm";

/// The TPM of this machine, shared by all who attest.
#[derive(Clone, Debug)]
pub struct Tpm {
    /// The directory of devices.
    dev: PathBuf,
    turn: Arc<Semaphore>,
}

/// Reads a request.
///
/// # Errors
///
/// INVALID_ARGUMENT.
pub(super) fn asked(request: v1::AttestRequest) -> Result<Question, Status> {
    let question = Question::from_message(request.question.unwrap_or_default());
    question.map_err(|invalid| Status::invalid_argument(invalid.to_string()))
}

impl Tpm {
    /// The TPM in this directory of devices.
    #[must_use]
    pub fn new(dev: PathBuf) -> Self {
        Self { dev, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Its keys.
    ///
    /// # Errors
    ///
    /// A status with the reason.
    pub async fn keys(&self) -> Result<v1::GetAttestationKeysResponse, Status> {
        let keys = self.run(tpm::keys).await?.into_message();
        Ok(v1::GetAttestationKeysResponse { keys: Some(keys) })
    }

    /// Its answer to a request, as that of the node with this ID.
    ///
    /// # Errors
    ///
    /// A status with the reason.
    pub async fn attest(&self, node: &str, asked: Question) -> Result<v1::AttestResponse, Status> {
        let Question { credential, nonce, registers } = asked;
        let question = qualifier(&nonce, node);
        let proved =
            move |device: &mut Device| tpm::prove(device, &credential, &question, &registers);
        let answer = self.run(proved).await?.into_message();
        Ok(v1::AttestResponse { answer: Some(answer) })
    }

    /// Runs `work` with the TPM, on a thread that may block, one call after the other.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Device) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Status> {
        let turn = Arc::clone(&self.turn).acquire_owned().await;
        let dev = self.dev.clone();
        let done = tokio::task::spawn_blocking(move || {
            // Held to the end, also when the caller has gone away.
            let _turn = turn;
            work(&mut Device::open(&dev)?)
        });
        let done = done.await.map_err(|_panic| Status::internal("the attestation failed"))?;
        done.map_err(|error| refused(&error))
    }
}

/// Whether this is the failure of a machine that has no TPM.
#[must_use]
pub(crate) fn is_absent(failure: &Status) -> bool {
    failure.metadata().get(REASON).is_some_and(|reason| reason == NO_TPM)
}

/// The status of a failure.
fn refused(error: &Error) -> Status {
    let (code, reason) = match error {
        Error::Absent => (Code::FailedPrecondition, NO_TPM),
        Error::Credential => (Code::FailedPrecondition, "tpm-keys"),
        Error::NoBank => (Code::FailedPrecondition, "tpm-bank"),
        error if error.retriable() => (Code::Unavailable, "tpm-silent"),
        _ => (Code::Internal, "tpm-failed"),
    };
    let mut status = Status::new(code, cause::line(error));
    status.metadata_mut().insert(REASON, MetadataValue::from_static(reason));
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> v1::AttestRequest {
        let (nonce, registers) = (vec![1; 32], vec![7]);
        let question = v1::TpmQuestion { nonce, registers, ..Default::default() };
        v1::AttestRequest { question: Some(question) }
    }

    #[tokio::test]
    async fn a_machine_without_a_tpm_says_so() {
        let dev = tempfile::tempdir().unwrap();
        let tpm = Tpm::new(dev.path().to_owned());
        let refused = asked(v1::AttestRequest::default()).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        let keys = tpm.keys().await.unwrap_err();
        let answer = tpm.attest("polis-1", asked(request()).unwrap()).await.unwrap_err();
        for refused in [keys, answer] {
            assert_eq!(refused.code(), Code::FailedPrecondition);
            assert_eq!(refused.metadata().get(REASON).unwrap(), "no-tpm");
            assert!(is_absent(&refused));
            assert_eq!(refused.message(), "this machine has no TPM 2.0");
        }
    }
}
