//! What a TPM proves to somebody else: its keys, and a quote of its registers.
//!
//! ```text
//! keys:  certificate in the TPM? -> endorsement key -> attestation key
//! prove: both keys -> the credential's secret -> values of the registers -> quote
//! ```
//!
//! Both keys are primary keys: the TPM makes them of its seed and of a template, the same
//! each time. A restart, another system on the disk, or a person that clears the owner's
//! hierarchy changes neither.
//!
//! Invariants:
//! - Nothing is believed of the TPM's answers, and need not be: the verifier checks them.
//!
//! What this module does not do: choose the registers, or judge their values.

use std::collections::BTreeSet;

use super::command::{ALG_NULL, ALG_SHA256, Auth, Code, Object, SessionKind, Tpm, selection};
use super::{Error, PART_MAX, Transport};
use polis_wire::attestation::format::{Reader, Writer};
use polis_wire::attestation::{
    Answer, Credential, Keys, Kind, Registers, attestation_template, endorsement_template,
};

/// The hierarchy that belongs to the maker of the TPM.
const ENDORSEMENT: u32 = 0x4000_000b;
/// The owner's: it may read the certificate that the maker stored.
const OWNER: u32 = 0x4000_0001;

/// Where makers store the certificates of endorsement keys.
const CERTIFICATES: [(Kind, u32); 2] = [(Kind::Ecc, 0x01c0_000a), (Kind::Rsa, 0x01c0_0002)];

/// `TPMA_NV`: readable with the (empty) password of the place; was written.
const AUTH_READ: u32 = 1 << 18;
const WRITTEN: u32 = 1 << 29;

/// How much of a certificate is read at once: well below the buffer of any TPM.
const PIECE: u16 = 256;

/// Bytes of the longest certificate.
const CERTIFICATE_MAX: u16 = 8192;

/// The public areas of the keys of this TPM, and the certificate that its maker stored.
///
/// # Errors
///
/// [`Error`].
pub fn keys(transport: &mut (impl Transport + ?Sized)) -> Result<Keys, Error> {
    let mut tpm = Tpm(transport);
    let Endorsement { object, public: endorsement, certificate } = tpm.endorsement()?;
    tpm.flush(object.handle);
    let (key, attestation) = tpm.primary(ENDORSEMENT, &attestation_template())?;
    tpm.flush(key.handle);
    Ok(Keys { endorsement, certificate, attestation })
}

/// Opens a credential, and signs the registers `pcrs` as they are now, and `qualifier`.
///
/// # Errors
///
/// [`Error::Credential`] for a credential of other keys, [`Error::NoBank`], or what stands
/// between.
pub fn prove(
    transport: &mut (impl Transport + ?Sized),
    credential: &Credential,
    qualifier: &[u8; 32],
    pcrs: &[u32],
) -> Result<Answer, Error> {
    if credential.blob.len().max(credential.secret.len()) > PART_MAX {
        return Err(Error::Credential);
    }
    let mut tpm = Tpm(transport);
    let endorsement = tpm.endorsement()?.object;
    let made = tpm.primary(ENDORSEMENT, &attestation_template());
    let answer = made.and_then(|(attestation, _public)| {
        let secret = tpm.activate(&attestation, &endorsement, credential);
        let answer = secret.and_then(|secret| {
            let registers = tpm.registers(pcrs)?;
            let (quote, signature) = tpm.quote(&attestation, qualifier, pcrs)?;
            Ok(Answer { secret, quote, signature, registers })
        });
        tpm.flush(attestation.handle);
        answer
    });
    tpm.flush(endorsement.handle);
    answer
}

/// The key that the maker of the TPM put into it.
struct Endorsement {
    object: Object,
    public: Vec<u8>,
    certificate: Option<Vec<u8>>,
}

impl<T: Transport + ?Sized> Tpm<'_, T> {
    /// The endorsement key that has a certificate, else the one that the TPM can have.
    fn endorsement(&mut self) -> Result<Endorsement, Error> {
        for (kind, place) in CERTIFICATES {
            if let Some(certificate) = self.stored(place)? {
                let (object, public) = self.primary(ENDORSEMENT, &endorsement_template(kind))?;
                return Ok(Endorsement { object, public, certificate: Some(certificate) });
            }
        }
        let made = self.primary(ENDORSEMENT, &endorsement_template(Kind::Ecc));
        let (object, public) = match made {
            Err(Error::Refused { .. }) => {
                self.primary(ENDORSEMENT, &endorsement_template(Kind::Rsa))?
            }
            made => made?,
        };
        Ok(Endorsement { object, public, certificate: None })
    }

    /// What is stored at this place of the TPM; `None` if it has no such place.
    fn stored(&mut self, place: u32) -> Result<Option<Vec<u8>>, Error> {
        /// `TPM_RC_HANDLE`, for any handle.
        const HANDLE: u32 = 0x08b;
        let place = Object::of(place);
        let described = match self.run(Code::NvReadPublic, &[&place], Auth::None, Vec::new()) {
            Err(Error::Refused { rc, .. }) if rc & 0xbf == HANDLE => return Ok(None),
            described => described?,
        };
        let mut reader = Reader(Reader(&described.parameters).sized()?);
        let (_place, _digest, attributes) = (reader.u32()?, reader.u16()?, reader.u32()?);
        let _policy = reader.sized()?;
        let length = reader.u16()?;
        if attributes & WRITTEN == 0 {
            return Ok(None);
        }
        if length > CERTIFICATE_MAX {
            return Err(Error::Malformed("the certificate in it is too long"));
        }
        let owner = Object::of(OWNER);
        let reading = if attributes & AUTH_READ == 0 { &owner } else { &place };
        let mut content = Vec::new();
        for start in (0..length).step_by(usize::from(PIECE)) {
            let parameters = Writer::default().u16(PIECE.min(length - start)).u16(start).done();
            let read = self.run(Code::NvRead, &[reading, &place], Auth::Password, parameters)?;
            content.extend(Reader(&read.parameters).sized()?);
        }
        Ok(Some(content))
    }

    /// The secret of a credential for these two keys.
    fn activate(
        &mut self,
        attestation: &Object,
        endorsement: &Object,
        credential: &Credential,
    ) -> Result<Vec<u8>, Error> {
        let session = Object::of(self.session(SessionKind::Policy, None)?.handle);
        // The policy of the endorsement key is the (empty) password of its hierarchy.
        let hierarchy = Object::of(ENDORSEMENT);
        let parameters = Writer::default().sized(&[]).sized(&[]).sized(&[]).u32(0).done();
        let permitted =
            self.run(Code::PolicySecret, &[&hierarchy, &session], Auth::Password, parameters);
        let opened = permitted.and_then(|_ticket| {
            let Credential { blob, secret } = credential;
            let parameters = Writer::default().sized(blob).sized(secret).done();
            let auth = Auth::PasswordThenPolicy(&session);
            self.run(Code::ActivateCredential, &[attestation, endorsement], auth, parameters)
                .map_err(activating)
        });
        self.flush(session.handle);
        Ok(Reader(&opened?.parameters).sized()?.to_vec())
    }

    /// The values of registers. A TPM reads some at a time, and says which.
    fn registers(&mut self, pcrs: &[u32]) -> Result<Registers, Error> {
        let mut left: BTreeSet<_> = pcrs.iter().copied().collect();
        let mut registers = Registers::new();
        while !left.is_empty() {
            let wanted: Vec<_> = left.iter().copied().collect();
            let answer = self.run(Code::PcrRead, &[], Auth::None, selection(&wanted)?)?;
            let mut reader = Reader(&answer.parameters);
            let _updates = reader.u32()?;
            // One bank was asked for: in the answer it may be absent, or empty.
            if reader.u32()? != 1 || reader.u16()? != ALG_SHA256 {
                return Err(Error::NoBank);
            }
            let length = usize::from(reader.u8()?);
            let bits = reader.take(length)?;
            let has = |pcr: u32| {
                bits.get((pcr / 8) as usize).is_some_and(|byte| byte >> (pcr % 8) & 1 == 1)
            };
            let read: Vec<_> = wanted.into_iter().filter(|pcr| has(*pcr)).collect();
            if read.is_empty() {
                return Err(Error::NoBank);
            }
            let _count = reader.u32()?;
            for pcr in read {
                let value = reader.sized()?.try_into();
                let value = value.map_err(|_length| Error::Malformed("a register is too short"))?;
                left.remove(&pcr);
                registers.insert(pcr, value);
            }
        }
        Ok(registers)
    }

    /// A statement about registers, and its signature.
    fn quote(
        &mut self,
        key: &Object,
        qualifier: &[u8],
        pcrs: &[u32],
    ) -> Result<(Vec<u8>, Vec<u8>), Error> {
        // With the scheme of the key itself.
        let parameters =
            Writer::default().sized(qualifier).u16(ALG_NULL).bytes(&selection(pcrs)?).done();
        let answer = self.run(Code::Quote, &[key], Auth::Password, parameters)?;
        let mut reader = Reader(&answer.parameters);
        let quote = reader.sized()?.to_vec();
        Ok((quote, reader.0.to_vec()))
    }
}

/// A credential that does not open is not for these keys.
fn activating(error: Error) -> Error {
    match error {
        // The answer refers to a parameter: the credential, or the encrypted secret.
        Error::Refused { rc, .. } if rc & 0xc0 == 0xc0 => Error::Credential,
        other => other,
    }
}
