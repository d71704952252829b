//! The calls `GetAttestationKeys` and `Attest`: have the TPM of this machine prove its keys and
//! its registers to the caller.
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
use polis_wire::attestation::{Answer, Credential, Keys, qualifier};
use polis_wire::rpc::REASON;

/// Bytes of a nonce.
const NONCE: usize = 32;
/// How many registers a TPM has.
const REGISTERS: u32 = 24;

/// The TPM of this machine, as those who attest share it.
#[derive(Clone, Debug)]
pub(super) struct Tpm {
    /// The directory of devices.
    dev: PathBuf,
    turn: Arc<Semaphore>,
}

/// What a caller asks for.
#[derive(Debug)]
pub(super) struct Asked {
    credential: Credential,
    nonce: [u8; NONCE],
    registers: Vec<u32>,
}

/// Reads a request.
///
/// # Errors
///
/// INVALID_ARGUMENT.
pub(super) fn asked(request: v1::AttestRequest) -> Result<Asked, Status> {
    let v1::AttestRequest { credential, encrypted_secret, nonce, registers } = request;
    let nonce = nonce.try_into().map_err(|_length| {
        Status::invalid_argument(format!("nonce does not have {NONCE} bytes"))
    })?;
    let ascending = registers.windows(2).all(|two| two[0] < two[1]);
    if registers.is_empty() || !ascending || registers.iter().any(|number| *number >= REGISTERS) {
        let text = format!("registers are not ascending numbers below {REGISTERS}");
        return Err(Status::invalid_argument(text));
    }
    Ok(Asked {
        credential: Credential { blob: credential, secret: encrypted_secret },
        nonce,
        registers,
    })
}

impl Tpm {
    /// The TPM in this directory of devices.
    pub(super) fn new(dev: PathBuf) -> Self {
        Self { dev, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Its keys.
    ///
    /// # Errors
    ///
    /// A status with the reason.
    pub(super) async fn keys(&self) -> Result<v1::GetAttestationKeysResponse, Status> {
        let Keys { endorsement, certificate, attestation } = self.run(tpm::keys).await?;
        Ok(v1::GetAttestationKeysResponse {
            endorsement_key: endorsement,
            endorsement_certificate: certificate.unwrap_or_default(),
            attestation_key: attestation,
        })
    }

    /// Its answer to a request, as that of the node with this ID.
    ///
    /// # Errors
    ///
    /// A status with the reason.
    pub(super) async fn attest(
        &self,
        node: &str,
        asked: Asked,
    ) -> Result<v1::AttestResponse, Status> {
        let Asked { credential, nonce, registers } = asked;
        let question = qualifier(&nonce, node);
        let proved =
            move |device: &mut Device| tpm::prove(device, &credential, &question, &registers);
        let Answer { secret, quote, signature, registers } = self.run(proved).await?;
        let register = |(number, value): (u32, [u8; 32])| v1::attest_response::Register {
            number,
            value: value.to_vec(),
        };
        let registers = registers.into_iter().map(register).collect();
        Ok(v1::AttestResponse { secret, quote, signature, registers })
    }

    /// Runs `work` with the TPM, on a thread that may block, once nobody else does.
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

/// The status of a failure.
fn refused(error: &Error) -> Status {
    let (code, reason) = match error {
        Error::Absent => (Code::FailedPrecondition, "no-tpm"),
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
        v1::AttestRequest { nonce: vec![1; 32], registers: vec![0, 7, 23], ..Default::default() }
    }

    #[test]
    fn a_question_names_each_register_once() {
        assert_eq!(asked(request()).unwrap().registers, [0, 7, 23]);
        for registers in [vec![], vec![7, 7], vec![8, 7], vec![24]] {
            let refused = asked(v1::AttestRequest { registers, ..request() }).unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        }
        let short = asked(v1::AttestRequest { nonce: vec![1; 31], ..request() }).unwrap_err();
        assert_eq!(short.code(), Code::InvalidArgument);
    }

    #[tokio::test]
    async fn a_machine_without_a_tpm_says_so() {
        let dev = tempfile::tempdir().unwrap();
        let tpm = Tpm::new(dev.path().to_owned());
        let keys = tpm.keys().await.unwrap_err();
        let answer = tpm.attest("polis-1", asked(request()).unwrap()).await.unwrap_err();
        for refused in [keys, answer] {
            assert_eq!(refused.code(), Code::FailedPrecondition);
            assert_eq!(refused.metadata().get(REASON).unwrap(), "no-tpm");
            assert_eq!(refused.message(), "this machine has no TPM 2.0");
        }
    }
}
