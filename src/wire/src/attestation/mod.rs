//! Attestation: proves to somebody else which TPM a machine has, and what it was started with.
//!
//! The verifier's side, which needs no TPM, and the formats that it shares with the node's
//! side (`tpm` of the machine). `polisctl` verifies.
//!
//! ```text
//! verifier                                         node, with its TPM
//!    <-- endorsement key, its certificate, attestation key
//!    --> credential for both keys, nonce, registers
//!    <-- the secret in it, quote, values of the registers
//!
//! certificate --maker signed--> endorsement key    is in a TPM of that maker
//! credential  --was opened----> attestation key    is in the same TPM, and never leaves it
//! quote       --it signed-----> registers          as they are now: the nonce is ours
//! ```
//!
//! Invariants:
//! - Nothing that a node says counts before it is proved: a register counts after the quote,
//!   the quote after the attestation key, and that key after the credential.
//! - A quote for one node is refused for another: the node's ID is a part of the question.
//!
//! What this module does not do: know the values that registers should have, or speak to a
//! TPM.

mod certificate;
mod credential;
pub mod derive;
pub mod format;
mod key;
mod messages;
mod quote;
#[cfg(any(test, feature = "testing"))]
pub mod software;

use ring::rand::{SecureRandom as _, SystemRandom};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

pub use self::certificate::Certificate;
pub use self::credential::Credential;
use self::derive::SIZE;
pub use self::key::{
    AttestationKey, EndorsementKey, Kind, attestation_template, endorsement_template, name,
};
pub use self::messages::{Invalid, Question, from_messages, to_messages};
pub use self::quote::Registers;

/// The registers that an attestation of a node is about: those of the firmware, and those that
/// boot stub and kernel extend.
pub const REGISTERS: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13];

/// The use of the hash that binds a question to a node.
const QUESTION: &[u8] = b"polis attestation 1\0";

/// Why an attestation proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The endorsement key is of another kind than those that makers certify.
    #[error("the endorsement key is not one by the templates of the TCG")]
    EndorsementKey,
    /// The attestation key could leave its TPM, or sign what others have made.
    #[error("the attestation key is not one that stays in its TPM and signs only for it")]
    AttestationKey,
    /// The credential was not opened.
    #[error("the attestation key is not in the TPM that has the endorsement key")]
    Activation,
    /// The statement is not a quote of a TPM.
    #[error("the signed statement is not a quote of a TPM")]
    Quote,
    /// Another key signed it, or it has no signature.
    #[error("the attestation key has not signed the quote")]
    Signature,
    /// The quote is for another nonce, or for another node.
    #[error("the quote answers another question: it is an old one, or of another node")]
    Question,
    /// The quote is about other registers.
    #[error("the quote covers other registers than it was asked for")]
    Selection,
    /// The values are not those that the TPM signed.
    #[error("the values of the registers are not those that the TPM signed")]
    Registers,
    /// The certificate cannot be read.
    #[error("the certificate of the endorsement key cannot be read")]
    CertificateMalformed,
    /// The certificate is not for an endorsement key.
    #[error("the certificate is not one for an endorsement key")]
    CertificatePurpose,
    /// The certificate is for another key.
    #[error("the certificate is for another endorsement key")]
    CertificateKey,
    /// It is not signed by a given authority.
    #[error("the certificate of the endorsement key is not signed by a given maker")]
    CertificateIssuer,
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    Random,
}

/// The report of a node about its keys. Nothing of it is proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The public area of the endorsement key.
    pub endorsement: Vec<u8>,
    /// Its certificate in DER, if the TPM has one.
    pub certificate: Option<Vec<u8>>,
    /// The public area of the attestation key.
    pub attestation: Vec<u8>,
}

/// The answer of a node to a [`Challenge`].
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    /// The content of the credential.
    pub secret: Vec<u8>,
    /// The signed statement.
    pub quote: Vec<u8>,
    /// Its signature.
    pub signature: Vec<u8>,
    /// The values of the registers.
    pub registers: Registers,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("registers", &self.registers).finish_non_exhaustive()
    }
}

/// The question of a verifier: for one node, and answered once.
pub struct Challenge {
    /// Random.
    pub nonce: [u8; SIZE],
    /// For both keys of the TPM.
    pub credential: Credential,
    attestation: AttestationKey,
    secret: Zeroizing<[u8; SIZE]>,
}

impl std::fmt::Debug for Challenge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Challenge").field("nonce", &self.nonce).finish_non_exhaustive()
    }
}

impl Challenge {
    /// Makes a question for the TPM that has these keys.
    ///
    /// # Errors
    ///
    /// [`Error::EndorsementKey`], [`Error::AttestationKey`], [`Error::Random`].
    pub fn new(keys: &Keys) -> Result<Self, Error> {
        let endorsement = EndorsementKey::read(&keys.endorsement)?;
        let attestation = AttestationKey::read(&keys.attestation)?;
        let (mut nonce, mut secret) = ([0; SIZE], Zeroizing::new([0; SIZE]));
        let random = SystemRandom::new();
        random.fill(&mut nonce).map_err(|_unspecified| Error::Random)?;
        random.fill(&mut *secret).map_err(|_unspecified| Error::Random)?;
        let credential = credential::make(&endorsement, &attestation.name, &secret)?;
        Ok(Self { nonce, credential, attestation, secret })
    }

    /// Checks the answer of a node to this question about these registers. Afterwards the
    /// values in the answer are those that the TPM had.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub fn check(&self, node: &str, registers: &[u32], answer: &Answer) -> Result<(), Error> {
        // A secret is guessed once: the time that this takes tells nothing of use.
        if answer.secret != *self.secret {
            return Err(Error::Activation);
        }
        let mut asked = registers.to_vec();
        asked.sort_unstable();
        if !answer.registers.keys().eq(&asked) {
            return Err(Error::Selection);
        }
        let qualifier = qualifier(&self.nonce, node);
        let Answer { quote, signature, registers, .. } = answer;
        quote::check(&self.attestation, quote, signature, &qualifier, registers)
    }
}

/// The signature of this node's TPM for this nonce.
#[must_use]
pub fn qualifier(nonce: &[u8], node: &str) -> [u8; SIZE] {
    let hash = Sha256::new_with_prefix(QUESTION).chain_update(node).chain_update([0]);
    hash.chain_update(nonce).finalize().into()
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tests;
