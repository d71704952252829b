//! Tests of the verifier, with a key of this test in the place of a TPM's. `tests/tpm` has a
//! TPM.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, SubjectPublicKeyInfo,
};
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use super::format::Writer;
use super::*;

/// The registers of the tests.
const ASKED: [u32; 3] = [7, 11, 12];

/// A key like that of a TPM, with its public area.
pub(super) struct Software {
    pair: EcdsaKeyPair,
    pub(super) public: Vec<u8>,
}

/// A pair of P-256, and its point.
fn pair() -> (EcdsaKeyPair, Vec<u8>) {
    let random = SystemRandom::new();
    let scheme = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let document = EcdsaKeyPair::generate_pkcs8(scheme, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(scheme, document.as_ref(), &random).unwrap();
    let point = pair.public_key().as_ref()[1..].to_vec();
    (pair, point)
}

/// A template with this key in its last fields.
fn with_point(template: &[u8], unique: usize, point: &[u8]) -> Vec<u8> {
    let head = &template[..template.len() - unique];
    Writer::default().bytes(head).sized(&point[..SIZE]).sized(&point[SIZE..]).done()
}

/// An endorsement key of P-256, as a public area.
pub(super) fn endorsement() -> Vec<u8> {
    with_point(&endorsement_template(Kind::Ecc), 2 * (2 + SIZE), &pair().1)
}

impl Software {
    pub(super) fn new() -> Self {
        let (pair, point) = pair();
        Self { pair, public: with_point(&attestation_template(), 4, &point) }
    }

    /// Signs any statement, as a TPM would not.
    pub(super) fn sign(&self, statement: &[u8]) -> Vec<u8> {
        let signature = self.pair.sign(&SystemRandom::new(), statement).unwrap();
        let (r, s) = signature.as_ref().split_at(SIZE);
        Writer::default().u16(key::ALG_ECDSA).u16(key::ALG_SHA256).sized(r).sized(s).done()
    }

    pub(super) fn key(&self) -> AttestationKey {
        AttestationKey::read(&self.public).unwrap()
    }
}

/// The values that the tests have in the registers.
pub(super) fn registers() -> Registers {
    ASKED.into_iter().map(|number| (number, [u8::try_from(number).unwrap(); SIZE])).collect()
}

/// A statement with this mark and kind, about [`registers`].
pub(super) fn statement(magic: u32, kind: u16, qualifier: &[u8]) -> Vec<u8> {
    let digest = registers().values().fold(Sha256::new(), Sha256::chain_update).finalize();
    Writer::default()
        .u32(magic)
        .u16(kind)
        .sized(&[7; 34])
        .sized(qualifier)
        .bytes(&[0; 25])
        .u32(1)
        .u16(key::ALG_SHA256)
        .u8(3)
        .bytes(&[0x80, 0x18, 0])
        .sized(&digest)
        .done()
}

fn check(key: &AttestationKey, quote: &[u8], signature: &[u8]) -> Result<(), Error> {
    quote::check(key, quote, signature, &[1; SIZE], &registers())
}

#[test]
fn a_quote_is_the_tpm_s_word_about_these_registers_for_this_question() {
    let key = Software::new();
    let quote = statement(0xff54_4347, 0x8018, &[1; SIZE]);
    let signature = key.sign(&quote);
    assert_eq!(check(&key.key(), &quote, &signature), Ok(()));

    let other = |quote: &[u8]| check(&key.key(), quote, &key.sign(quote));
    assert_eq!(other(&statement(0xff54_4348, 0x8018, &[1; SIZE])), Err(Error::Quote));
    assert_eq!(other(&statement(0xff54_4347, 0x8017, &[1; SIZE])), Err(Error::Quote));
    assert_eq!(other(&statement(0xff54_4347, 0x8018, &[2; SIZE])), Err(Error::Question));
    assert_eq!(other(&[&*quote, &[0]].concat()), Err(Error::Quote));
    for length in 0..quote.len() {
        assert!(other(&quote[..length]).is_err(), "{length}");
    }
    assert_eq!(check(&Software::new().key(), &quote, &signature), Err(Error::Signature));
    for place in 0..quote.len() {
        let mut changed = quote.clone();
        changed[place] ^= 1;
        assert_eq!(check(&key.key(), &changed, &signature), Err(Error::Signature), "{place}");
    }
    let with =
        |registers: &Registers| quote::check(&key.key(), &quote, &signature, &[1; SIZE], registers);
    let mut changed = registers();
    changed.insert(11, [0; SIZE]);
    assert_eq!(with(&changed), Err(Error::Registers));
    changed.remove(&11);
    assert_eq!(with(&changed), Err(Error::Selection));
}

#[test]
fn keys_that_differ_from_their_templates_are_refused() {
    let key = Software::new();
    let fixed = key.public.len() - 2 * (2 + SIZE);
    for place in 0..fixed {
        let mut changed = key.public.clone();
        // Among them: a key that may leave its TPM, and one that signs everything.
        changed[place] ^= 2;
        assert_eq!(AttestationKey::read(&changed), Err(Error::AttestationKey), "{place}");
    }
    let endorsement = endorsement();
    assert!(EndorsementKey::read(&endorsement).is_ok());
    for place in 0..endorsement.len() - 2 * (2 + SIZE) {
        let mut changed = endorsement.clone();
        changed[place] ^= 2;
        assert_eq!(EndorsementKey::read(&changed), Err(Error::EndorsementKey), "{place}");
    }
    // A template itself has no key in it, and no point is at zero.
    let keys = Keys {
        endorsement: endorsement_template(Kind::Ecc),
        certificate: None,
        attestation: key.public,
    };
    assert_eq!(Challenge::new(&keys).unwrap_err(), Error::EndorsementKey);
    let keys = Keys { endorsement: endorsement_template(Kind::Rsa), ..keys };
    assert_eq!(Challenge::new(&keys).unwrap_err(), Error::EndorsementKey);
}

#[test]
fn an_answer_counts_only_with_the_secret_and_for_its_node() {
    let key = Software::new();
    let attestation = key.public.clone();
    let keys = Keys { endorsement: endorsement(), certificate: None, attestation };
    let challenge = Challenge::new(&keys).unwrap();
    let answer = |node: &str, secret: &[u8]| {
        let quote = statement(0xff54_4347, 0x8018, &qualifier(&challenge.nonce, node));
        let signature = key.sign(&quote);
        Answer { secret: secret.to_vec(), quote, signature, registers: registers() }
    };
    let checked = |answer: &Answer| challenge.check("polis-1", &ASKED, answer);
    assert_eq!(checked(&answer("polis-1", &*challenge.secret)), Ok(()));
    assert_eq!(checked(&answer("polis-1", &[0; SIZE])), Err(Error::Activation));
    assert_eq!(checked(&answer("polis-1", &[])), Err(Error::Activation));
    assert_eq!(checked(&answer("polis-2", &*challenge.secret)), Err(Error::Question));
    let fewer = challenge.check("polis-1", &[7, 11], &answer("polis-1", &*challenge.secret));
    assert_eq!(fewer, Err(Error::Selection));
}

/// A maker of TPMs.
pub(super) struct Maker {
    issuer: Issuer<'static, KeyPair>,
    pub(super) der: Vec<u8>,
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

impl Maker {
    pub(super) fn new(name: &str) -> Self {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let der = params.self_signed(&key).unwrap().der().to_vec();
        Self { issuer: Issuer::new(params, key), der }
    }

    /// A certificate for the key with this point.
    pub(super) fn certify(&self, point: &derive::Point, purpose: &[u64]) -> Vec<u8> {
        // SubjectPublicKeyInfo of a key of P-256, up to its point.
        const HEAD: &str = "3059301306072a8648ce3d020106082a8648ce3d030107034200";
        let head = polis_base::hex::decode(HEAD).unwrap();
        let der = [head, derive::uncompressed(point)].concat();
        let key = SubjectPublicKeyInfo::from_der(&der).unwrap();
        let mut params = named("");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(purpose.to_vec())];
        params.signed_by(&key, &self.issuer).unwrap().der().to_vec()
    }
}

#[test]
fn a_certificate_counts_only_for_its_key_and_of_a_given_maker() {
    const EK: [u64; 5] = [2, 23, 133, 8, 1];
    let read = |public: &[u8]| EndorsementKey::read(public).unwrap();
    let (key, other) = (read(&endorsement()), read(&endorsement()));
    let EndorsementKey::Ecc(point) = key else { panic!("{key:?}") };
    let (maker, stranger) = (Maker::new("Maker of TPMs"), Maker::new("Maker of TPMs"));
    let der = [maker.certify(&point, &EK), vec![0xff; 20]].concat();
    let certificate = Certificate::read(&der).unwrap();
    assert_eq!(certificate.issuer(), "CN=Maker of TPMs");
    assert_eq!(certificate.certifies(&key), Ok(()));
    assert_eq!(certificate.certifies(&other), Err(Error::CertificateKey));
    let signed = |makers: &[&Maker]| {
        certificate.signed_by_one_of(makers.iter().map(|maker| maker.der.as_slice()))
    };
    assert_eq!(signed(&[&stranger, &maker]).as_deref(), Ok("CN=Maker of TPMs"));
    assert_eq!(signed(&[&stranger]), Err(Error::CertificateIssuer));
    assert_eq!(signed(&[]), Err(Error::CertificateIssuer));
    let another = maker.certify(&point, &[2, 23, 133, 8, 3]);
    let another = Certificate::read(&another).unwrap();
    assert_eq!(another.certifies(&key), Err(Error::CertificatePurpose));
    assert_eq!(
        Certificate::read(&maker.der).unwrap().certifies(&key),
        Err(Error::CertificatePurpose)
    );
    let filled = [der, vec![1]].concat();
    assert_eq!(Certificate::read(&filled).unwrap_err(), Error::CertificateMalformed);
}
