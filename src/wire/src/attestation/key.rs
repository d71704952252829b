//! The two keys of a TPM that an attestation needs, as templates and as public areas
//! (`TPMT_PUBLIC`).
//!
//! The TPM makes a key of its own seed and of a template, so a template is all that a node
//! keeps of a key. A public area is the template with the key in its last field; any other
//! difference is another kind of key, and refused.
//!
//! The templates of the endorsement key are those of the TCG's profile for its certificates
//! (L-1 and L-2 of the *EK Credential Profile*). That of the attestation key is ours.

use sha2::{Digest as _, Sha256};

use super::Error;
use super::derive::{Point, SIZE, coordinate};
use super::format::{Reader, Writer};

const ALG_RSA: u16 = 0x0001;
const ALG_AES: u16 = 0x0006;
pub(super) const ALG_SHA256: u16 = 0x000b;
const ALG_NULL: u16 = 0x0010;
pub(super) const ALG_ECDSA: u16 = 0x0018;
const ALG_ECC: u16 = 0x0023;
const ALG_CFB: u16 = 0x0043;
const CURVE_P256: u16 = 0x0003;

/// Bytes of the modulus of the endorsement key, if it is one of RSA.
pub(super) const MODULUS: usize = 256;

/// A restricted decryption key that the TPM made and never exports, usable by its policy.
const ENDORSEMENT_ATTRIBUTES: u32 = 0x0003_00b2;
/// A restricted signing key that the TPM made and never exports, usable with its (empty)
/// password: it signs nothing that could be taken for the TPM's own words, except those.
const ATTESTATION_ATTRIBUTES: u32 = 0x0005_0472;

/// The policy of the endorsement key: the password of its hierarchy (`PolicySecret`).
const ENDORSEMENT_POLICY: [u8; SIZE] = [
    0x83, 0x71, 0x97, 0x67, 0x44, 0x84, 0xb3, 0xf8, 0x1a, 0x90, 0xcc, 0x8d, 0x46, 0xa5, 0xd7, 0x24,
    0xfd, 0x52, 0xd7, 0x6e, 0x06, 0x52, 0x0b, 0x64, 0xf2, 0xa1, 0xda, 0x1b, 0x33, 0x14, 0x69, 0xaa,
];

/// The kinds of endorsement keys that makers of TPMs certify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// NIST P-256.
    Ecc,
    /// RSA with 2048 bits.
    Rsa,
}

/// The template of the endorsement key.
#[must_use]
pub fn endorsement_template(kind: Kind) -> Vec<u8> {
    let template = Writer::default().bytes(&endorsement(kind));
    match kind {
        Kind::Ecc => template.sized(&[0; SIZE]).sized(&[0; SIZE]).done(),
        Kind::Rsa => template.sized(&[0; MODULUS]).done(),
    }
}

/// The template of the attestation key.
#[must_use]
pub fn attestation_template() -> Vec<u8> {
    Writer::default().bytes(&attestation()).sized(&[]).sized(&[]).done()
}

/// The properties that all endorsement keys of a kind have in common.
fn endorsement(kind: Kind) -> Vec<u8> {
    let algorithm = if kind == Kind::Ecc { ALG_ECC } else { ALG_RSA };
    let common = Writer::default()
        .u16(algorithm)
        .u16(ALG_SHA256)
        .u32(ENDORSEMENT_ATTRIBUTES)
        .sized(&ENDORSEMENT_POLICY)
        .u16(ALG_AES)
        .u16(128)
        .u16(ALG_CFB)
        .u16(ALG_NULL);
    match kind {
        Kind::Ecc => common.u16(CURVE_P256).u16(ALG_NULL).done(),
        // The exponent that is not named is 65537.
        Kind::Rsa => common.u16(2048).u32(0).done(),
    }
}

/// The properties that all attestation keys have in common.
fn attestation() -> Vec<u8> {
    Writer::default()
        .u16(ALG_ECC)
        .u16(ALG_SHA256)
        .u32(ATTESTATION_ATTRIBUTES)
        .sized(&[])
        .u16(ALG_NULL)
        .u16(ALG_ECDSA)
        .u16(ALG_SHA256)
        .u16(CURVE_P256)
        .u16(ALG_NULL)
        .done()
}

/// The key that its maker put into a TPM, and that decrypts credentials only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndorsementKey {
    /// A point of P-256.
    Ecc(Point),
    /// A modulus; the exponent is 65537.
    Rsa(Box<[u8; MODULUS]>),
}

impl EndorsementKey {
    /// Reads a public area.
    ///
    /// # Errors
    ///
    /// [`Error::EndorsementKey`].
    pub fn read(public: &[u8]) -> Result<Self, Error> {
        if let Some(rest) = public.strip_prefix(&*endorsement(Kind::Ecc)) {
            return Ok(Self::Ecc(point(rest).ok_or(Error::EndorsementKey)?));
        }
        let rest = public.strip_prefix(&*endorsement(Kind::Rsa)).ok_or(Error::EndorsementKey)?;
        let mut reader = Reader(rest);
        let modulus = reader.sized().map_err(|_short| Error::EndorsementKey)?;
        let modulus = modulus.try_into().map_err(|_length| Error::EndorsementKey)?;
        reader.end().map_err(|_short| Error::EndorsementKey)?;
        Ok(Self::Rsa(Box::new(modulus)))
    }
}

/// The key that signs quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttestationKey {
    pub(super) point: Point,
    /// The name of the key for the TPM: it covers what the key may be used for.
    pub(super) name: Vec<u8>,
}

impl AttestationKey {
    /// Reads a public area: of a key that never leaves its TPM, and signs only what the TPM
    /// itself has made. A [credential](super::Challenge) shows whether there is such a TPM.
    ///
    /// # Errors
    ///
    /// [`Error::AttestationKey`].
    pub fn read(public: &[u8]) -> Result<Self, Error> {
        let rest = public.strip_prefix(&*attestation()).ok_or(Error::AttestationKey)?;
        let point = point(rest).ok_or(Error::AttestationKey)?;
        Ok(Self { point, name: name(public) })
    }
}

/// The name of an object: which digest, and the digest of its public area.
#[must_use]
pub fn name(public: &[u8]) -> Vec<u8> {
    Writer::default().u16(ALG_SHA256).bytes(&Sha256::digest(public)).done()
}

/// The last field of a key of P-256. Its use shows whether it is on the curve.
fn point(bytes: &[u8]) -> Option<Point> {
    let mut reader = Reader(bytes);
    let point = (coordinate(reader.sized().ok()?)?, coordinate(reader.sized().ok()?)?);
    reader.end().ok()?;
    Some(point)
}
