//! A TPM without hardware, for tests: its endorsement key is one of RSA, and both keys are in
//! memory, where no real one may be.

use std::sync::LazyLock;

use rand::rngs::SysRng;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, SubjectPublicKeyInfo,
};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use rsa::rand_core::UnwrapErr;
use rsa::traits::PublicKeyParts as _;
use rsa::{Oaep, RsaPrivateKey};
use sha2::{Digest as _, Sha256};

use super::derive::{BLOCK, Direction, Point, SIZE, cfb, kdfa, uncompressed};
use super::format::{Reader, Writer};
use super::key::{ALG_ECDSA, ALG_SHA256, MODULUS};
use super::{
    Answer, AttestationKey, Credential, EndorsementKey, Keys, Kind, Registers,
    attestation_template, endorsement_template,
};

/// One key for all: to make one takes a second.
static ENDORSEMENT: LazyLock<RsaPrivateKey> = LazyLock::new(|| {
    RsaPrivateKey::new(&mut UnwrapErr(SysRng), MODULUS * 8).expect("2048 bits are allowed")
});

/// An attestation key with its public area.
#[derive(Debug)]
pub(crate) struct Pair {
    pair: EcdsaKeyPair,
    pub(crate) public: Vec<u8>,
}

/// A pair of P-256, and its point.
fn pair() -> (EcdsaKeyPair, Vec<u8>) {
    let (random, scheme) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
    let document = EcdsaKeyPair::generate_pkcs8(scheme, &random).expect("there is randomness");
    let pair = EcdsaKeyPair::from_pkcs8(scheme, document.as_ref(), &random);
    let pair = pair.expect("it was just made");
    let point = pair.public_key().as_ref()[1..].to_vec();
    (pair, point)
}

/// A template with this key in its last fields, which have this length.
fn with_point(template: &[u8], unique: usize, point: &[u8]) -> Vec<u8> {
    let head = &template[..template.len() - unique];
    Writer::default().bytes(head).sized(&point[..SIZE]).sized(&point[SIZE..]).done()
}

/// The public area of an endorsement key of P-256.
pub(crate) fn endorsement() -> Vec<u8> {
    with_point(&endorsement_template(Kind::Ecc), 2 * (2 + SIZE), &pair().1)
}

impl Pair {
    pub(crate) fn new() -> Self {
        let (pair, point) = pair();
        Self { pair, public: with_point(&attestation_template(), 4, &point) }
    }

    /// Signs any statement, as a TPM would not.
    pub(crate) fn sign(&self, statement: &[u8]) -> Vec<u8> {
        let signature = self.pair.sign(&SystemRandom::new(), statement);
        let signature = signature.expect("there is randomness");
        let (r, s) = signature.as_ref().split_at(SIZE);
        Writer::default().u16(ALG_ECDSA).u16(ALG_SHA256).sized(r).sized(s).done()
    }

    pub(crate) fn key(&self) -> AttestationKey {
        AttestationKey::read(&self.public).expect("it is made of the template")
    }
}

/// A statement with this mark and kind, about these registers.
pub(crate) fn statement(magic: u32, kind: u16, qualifier: &[u8], registers: &Registers) -> Vec<u8> {
    let digest = registers.values().fold(Sha256::new(), Sha256::chain_update).finalize();
    let mut bits = [0_u8; 3];
    registers.keys().for_each(|number| bits[*number as usize / 8] |= 1 << (number % 8));
    Writer::default()
        .u32(magic)
        .u16(kind)
        .sized(&[7; 34])
        .sized(qualifier)
        .bytes(&[0; 25])
        .u32(1)
        .u16(ALG_SHA256)
        .u8(3)
        .bytes(&bits)
        .sized(&digest)
        .done()
}

/// The purpose of the certificate of an endorsement key.
pub(crate) const PURPOSE: [u64; 5] = [2, 23, 133, 8, 1];

/// A maker of TPMs.
#[derive(Debug)]
pub struct Maker {
    issuer: Issuer<'static, KeyPair>,
    /// The certificate of its authority.
    pub der: Vec<u8>,
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

impl Maker {
    /// A maker with this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("there is randomness");
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let der = params.self_signed(&key).expect("the key signs").der().to_vec();
        Self { issuer: Issuer::new(params, key), der }
    }

    /// The report of a TPM of this maker about its keys.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let endorsement = endorsement();
        let certificate = match EndorsementKey::read(&endorsement) {
            Ok(EndorsementKey::Ecc(point)) => Some(self.certify(&point, &PURPOSE)),
            Ok(EndorsementKey::Rsa(_)) | Err(_) => None,
        };
        Keys { endorsement, certificate, attestation: Pair::new().public }
    }

    /// A certificate for the key with this point.
    pub(crate) fn certify(&self, point: &Point, purpose: &[u64]) -> Vec<u8> {
        // SubjectPublicKeyInfo of a key of P-256, up to its point.
        const HEAD: &str = "3059301306072a8648ce3d020106082a8648ce3d030107034200";
        let head = polis_base::hex::decode(HEAD).expect("digits");
        let der = [head, uncompressed(point)].concat();
        let key = SubjectPublicKeyInfo::from_der(&der).expect("a key of P-256");
        let mut params = named("");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(purpose.to_vec())];
        params.signed_by(&key, &self.issuer).expect("the key signs").der().to_vec()
    }
}

/// The TPM.
#[derive(Debug)]
pub struct Software(Pair);

impl Default for Software {
    fn default() -> Self {
        Self(Pair::new())
    }
}

impl Software {
    /// Its report about its keys.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let template = endorsement_template(Kind::Rsa);
        let modulus = ENDORSEMENT.n().to_be_bytes();
        let head = &template[..template.len() - MODULUS];
        Keys {
            endorsement: [head, &modulus].concat(),
            certificate: None,
            attestation: self.0.public.clone(),
        }
    }

    /// Opens a credential and signs these values; `None` if the credential is for other keys.
    #[must_use]
    pub fn prove(
        &self,
        credential: &Credential,
        qualifier: &[u8],
        registers: Registers,
    ) -> Option<Answer> {
        let secret = self.open(credential)?;
        let quote = statement(0xff54_4347, 0x8018, qualifier, &registers);
        Some(Answer { secret, signature: self.0.sign(&quote), quote, registers })
    }

    /// `TPM2_ActivateCredential`.
    fn open(&self, credential: &Credential) -> Option<Vec<u8>> {
        let padding = Oaep::<rsa::sha2::Sha256>::new_with_label(b"IDENTITY\0".to_vec());
        let seed = ENDORSEMENT.decrypt(padding, &credential.secret).ok()?;
        let name = self.0.key().name;
        let mut reader = Reader(&credential.blob);
        let proof = reader.sized().ok()?;
        let mut identity = reader.0.to_vec();
        let integrity = kdfa::<SIZE>(&seed, b"INTEGRITY", &[], &[]);
        let integrity = hmac::Key::new(hmac::HMAC_SHA256, &*integrity);
        hmac::verify(&integrity, &[&*identity, &*name].concat(), proof).ok()?;
        let storage = kdfa::<BLOCK>(&seed, b"STORAGE", &name, &[]);
        cfb(&storage, [0; BLOCK], &mut identity, Direction::Decrypt);
        Some(Reader(&identity).sized().ok()?.to_vec())
    }
}
