//! The messages of an attestation, and the values that they carry.

use polis_proto::v1;

use super::derive::SIZE;
use super::{Answer, Challenge, Credential, Error, Keys, Registers};

impl Keys {
    /// As a message.
    #[must_use]
    pub fn into_message(self) -> v1::TpmKeys {
        v1::TpmKeys {
            endorsement_key: self.endorsement,
            endorsement_certificate: self.certificate.unwrap_or_default(),
            attestation_key: self.attestation,
        }
    }

    /// As a node sent them.
    #[must_use]
    pub fn from_message(message: v1::TpmKeys) -> Self {
        let certificate = message.endorsement_certificate;
        Self {
            endorsement: message.endorsement_key,
            certificate: (!certificate.is_empty()).then_some(certificate),
            attestation: message.attestation_key,
        }
    }
}

impl Challenge {
    /// The question about these registers.
    #[must_use]
    pub fn question(&self, registers: &[u32]) -> v1::TpmQuestion {
        v1::TpmQuestion {
            credential: self.credential.blob.clone(),
            encrypted_secret: self.credential.secret.clone(),
            nonce: self.nonce.to_vec(),
            registers: registers.to_vec(),
        }
    }
}

/// A question as a verifier sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// For both keys of the TPM.
    pub credential: Credential,
    /// Random.
    pub nonce: [u8; SIZE],
    /// Ascending.
    pub registers: Vec<u32>,
}

/// A question that no verifier asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The nonce has another length.
    #[error("nonce does not have {SIZE} bytes")]
    Nonce,
    /// The registers are none, out of order, or not those of a TPM.
    #[error("registers are not ascending numbers below 24")]
    Registers,
}

impl Question {
    /// How many registers a TPM has.
    const REGISTERS: u32 = 24;

    /// Reads a question.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn from_message(message: v1::TpmQuestion) -> Result<Self, Invalid> {
        let v1::TpmQuestion { credential, encrypted_secret, nonce, registers } = message;
        let nonce = nonce.try_into().map_err(|_length| Invalid::Nonce)?;
        let ascending = registers.windows(2).all(|two| two[0] < two[1]);
        let known = registers.last().is_some_and(|last| *last < Self::REGISTERS);
        if !(ascending && known) {
            return Err(Invalid::Registers);
        }
        let credential = Credential { blob: credential, secret: encrypted_secret };
        Ok(Self { credential, nonce, registers })
    }
}

impl Answer {
    /// As a message.
    #[must_use]
    pub fn into_message(self) -> v1::TpmAnswer {
        let Self { secret, quote, signature, registers } = self;
        v1::TpmAnswer { secret, quote, signature, registers: to_messages(registers) }
    }

    /// As a node sent it.
    ///
    /// # Errors
    ///
    /// [`Error::Registers`] for values that no register has.
    pub fn from_message(message: v1::TpmAnswer) -> Result<Self, Error> {
        let v1::TpmAnswer { secret, quote, signature, registers } = message;
        Ok(Self { secret, quote, signature, registers: from_messages(registers)? })
    }
}

/// Registers as messages, in the order of their numbers.
#[must_use]
pub fn to_messages(registers: Registers) -> Vec<v1::TpmRegister> {
    let register =
        |(number, value): (u32, [u8; SIZE])| v1::TpmRegister { number, value: value.to_vec() };
    registers.into_iter().map(register).collect()
}

/// Registers from messages.
///
/// # Errors
///
/// [`Error::Registers`] for values that no register has.
pub fn from_messages(registers: Vec<v1::TpmRegister>) -> Result<Registers, Error> {
    let register = |register: v1::TpmRegister| {
        let value = register.value.try_into().map_err(|_length| Error::Registers)?;
        Ok((register.number, value))
    };
    registers.into_iter().map(register).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_names_each_register_once() {
        let message = || v1::TpmQuestion {
            nonce: vec![1; SIZE],
            registers: vec![0, 7, 23],
            ..Default::default()
        };
        assert_eq!(Question::from_message(message()).unwrap().registers, [0, 7, 23]);
        for registers in [vec![], vec![7, 7], vec![8, 7], vec![24]] {
            let message = v1::TpmQuestion { registers, ..message() };
            assert_eq!(Question::from_message(message), Err(Invalid::Registers));
        }
        let short = v1::TpmQuestion { nonce: vec![1; SIZE - 1], ..message() };
        assert_eq!(Question::from_message(short), Err(Invalid::Nonce));
    }

    #[test]
    fn a_value_of_another_length_is_no_register() {
        let registers = vec![v1::TpmRegister { number: 7, value: vec![0; 31] }];
        assert_eq!(from_messages(registers), Err(Error::Registers));
        let whole = Registers::from([(7, [7; SIZE]), (11, [11; SIZE])]);
        assert_eq!(from_messages(to_messages(whole.clone())), Ok(whole));
    }
}
