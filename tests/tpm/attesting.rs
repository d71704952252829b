//! Attestation: quotes, credentials, and the certificates of makers.

use polis_machine::tpm::{Error, keys, prove, seal, unseal};
use polis_tests::{Story, story};
use polis_wire::attestation::{
    self, Answer, AttestationKey, Certificate, Challenge, EndorsementKey, Keys,
    attestation_template, qualifier,
};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, SubjectPublicKeyInfo,
};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use crate::bus::Bus;
use crate::sealing::SECRET;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_quote_of_the_asked_tpm_verifies_and_its_keys_outlive_restarts),
    story!(a_quote_for_another_question_or_of_other_registers_is_refused),
    story!(a_credential_opens_only_in_the_tpm_that_has_both_keys),
    story!(a_key_outside_of_the_tpm_attests_nothing),
    story!(a_maker_s_certificate_is_read_from_the_tpm_and_holds_for_its_key_alone),
    story!(a_tpm_without_the_bank_attests_nothing_and_says_so),
    story!(an_attestation_leaves_nothing_in_the_tpm),
];

/// The registers that an attestation is about: more than a TPM reads at once.
const REGISTERS: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13];

const NODE: &str = "polis-1";

/// The answer of the machine with this TPM, as the node `node`.
fn answer(bus: &mut Bus, challenge: &Challenge, node: &str) -> Result<Answer, Error> {
    prove(bus, &challenge.credential, &qualifier(&challenge.nonce, node), &REGISTERS)
}

fn a_quote_of_the_asked_tpm_verifies_and_its_keys_outlive_restarts() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let found = keys(&mut bus).unwrap();
    assert_eq!(found.certificate, None);
    let challenge = Challenge::new(&found).unwrap();
    let proof = answer(&mut bus, &challenge, NODE).unwrap();
    challenge.check(NODE, &REGISTERS, &proof).unwrap();
    assert_eq!(proof.registers[&11], [0; 32]);
    // The measurements show.
    bus.measure(11);
    let challenge = Challenge::new(&found).unwrap();
    let proof = answer(&mut bus, &challenge, NODE).unwrap();
    challenge.check(NODE, &REGISTERS, &proof).unwrap();
    assert_ne!(proof.registers[&11], [0; 32]);
    drop(bus);
    assert_eq!(keys(&mut Bus::switch_on(state.path())).unwrap(), found);
}

fn a_quote_for_another_question_or_of_other_registers_is_refused() {
    use attestation::Error::{Activation, Question, Registers, Selection, Signature};
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let keys = keys(&mut bus).unwrap();
    let challenge = Challenge::new(&keys).unwrap();
    let proof = answer(&mut bus, &challenge, NODE).unwrap();
    let refused = |proof: &Answer| challenge.check(NODE, &REGISTERS, proof).unwrap_err();

    // An old answer, the answer to another one with the secret of this one, and that of
    // another node that passes the question on.
    let later = Challenge::new(&keys).unwrap();
    assert_eq!(later.check(NODE, &REGISTERS, &proof), Err(Activation));
    let other = answer(&mut bus, &later, NODE).unwrap();
    let mixed = Answer { secret: proof.secret.clone(), ..other };
    assert_eq!(refused(&mixed), Question);
    let passed_on = answer(&mut bus, &challenge, "polis-2").unwrap();
    assert_eq!(refused(&passed_on), Question);

    // Other values, and fewer registers.
    let mut changed = proof.clone();
    changed.registers.insert(11, [7; 32]);
    assert_eq!(refused(&changed), Registers);
    changed.registers.remove(&11);
    assert_eq!(refused(&changed), Selection);
    let fewer = [7, 12];
    let asked = qualifier(&challenge.nonce, NODE);
    let few = prove(&mut bus, &challenge.credential, &asked, &fewer).unwrap();
    assert_eq!(challenge.check(NODE, &fewer, &few), Ok(()));
    assert_eq!(refused(&Answer { registers: proof.registers.clone(), ..few }), Selection);

    // Each bit of the statement is signed.
    for place in 0..proof.quote.len() {
        let mut changed = proof.clone();
        changed.quote[place] ^= 1;
        assert_eq!(refused(&changed), Signature, "{place}");
    }
}

fn a_credential_opens_only_in_the_tpm_that_has_both_keys() {
    let (states, mut buses): (Vec<_>, Vec<_>) = (0..2)
        .map(|_tpm| {
            let state = tempfile::tempdir().unwrap();
            let bus = Bus::switch_on(state.path());
            (state, bus)
        })
        .unzip();
    let found: Vec<_> = buses.iter_mut().map(|bus| keys(bus).unwrap()).collect();
    assert_ne!(found[0].endorsement, found[1].endorsement);
    assert_ne!(found[0].attestation, found[1].attestation);
    let own = Challenge::new(&found[0]).unwrap();
    let proof = answer(&mut buses[0], &own, NODE).unwrap();
    own.check(NODE, &REGISTERS, &proof).unwrap();
    let refused = answer(&mut buses[1], &own, NODE).unwrap_err();
    assert!(matches!(refused, Error::Credential), "{refused:?}");
    // The attestation key of one, and the endorsement key of the other: neither opens it.
    let mixed = Keys { attestation: found[1].attestation.clone(), ..found[0].clone() };
    let challenge = Challenge::new(&mixed).unwrap();
    for bus in &mut buses {
        let refused = answer(bus, &challenge, NODE).unwrap_err();
        assert!(matches!(refused, Error::Credential), "{refused:?}");
    }
    // The quote of the one TPM in the name of the other.
    let theirs = Challenge::new(&found[1]).unwrap();
    let proof = answer(&mut buses[1], &theirs, NODE).unwrap();
    let borrowed = Answer { quote: own_quote(&mut buses[0], &own, &theirs), ..proof };
    let refused = theirs.check(NODE, &REGISTERS, &borrowed);
    assert_eq!(refused, Err(attestation::Error::Signature));
    drop(states);
}

/// The quote of a TPM for the nonce of a question to another one.
fn own_quote(bus: &mut Bus, own: &Challenge, theirs: &Challenge) -> Vec<u8> {
    let asked = qualifier(&theirs.nonce, NODE);
    prove(bus, &own.credential, &asked, &REGISTERS).unwrap().quote
}

/// An attestation key in the memory of a machine that pretends to have it in its TPM.
fn software_key() -> (EcdsaKeyPair, Vec<u8>) {
    let (random, scheme) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
    let document = EcdsaKeyPair::generate_pkcs8(scheme, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(scheme, document.as_ref(), &random).unwrap();
    let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
    let template = attestation_template();
    let fixed = &template[..template.len() - 4];
    let public = [fixed, &[0, 32], x, &[0, 32], y].concat();
    (pair, public)
}

fn a_key_outside_of_the_tpm_attests_nothing() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let found = keys(&mut bus).unwrap();
    let (pair, public) = software_key();
    let pretended = Keys { attestation: public, ..found.clone() };
    // It looks like one of a TPM, and the TPM does not open the credential for it.
    let challenge = Challenge::new(&pretended).unwrap();
    let refused = answer(&mut bus, &challenge, NODE).unwrap_err();
    assert!(matches!(refused, Error::Credential), "{refused:?}");
    // So its signature, over a quote that this machine has made up, comes without the secret.
    let real = Challenge::new(&found).unwrap();
    let asked = qualifier(&challenge.nonce, NODE);
    let proof = prove(&mut bus, &real.credential, &asked, &REGISTERS).unwrap();
    let signed = pair.sign(&SystemRandom::new(), &proof.quote).unwrap();
    let (r, s) = signed.as_ref().split_at(32);
    let signature = [&[0, 0x18, 0, 0x0b, 0, 32][..], r, &[0, 32], s].concat();
    let forged = Answer { signature, ..proof };
    assert_eq!(challenge.check(NODE, &REGISTERS, &forged), Err(attestation::Error::Activation));
    // One that says that it may leave its TPM is refused before it is asked anything.
    let mut exportable = found.attestation;
    exportable[7] &= !2;
    assert_eq!(AttestationKey::read(&exportable), Err(attestation::Error::AttestationKey));
}

/// A maker of TPMs, and its certificate.
fn maker(name: &str) -> (Issuer<'static, KeyPair>, Vec<u8>) {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let der = params.self_signed(&key).unwrap().der().to_vec();
    (Issuer::new(params, key), der)
}

/// The certificate of an endorsement key.
fn certificate(maker: &Issuer<'_, KeyPair>, key: &EndorsementKey) -> Vec<u8> {
    let hex = |text| polis_base::hex::decode(text).unwrap();
    let key = match key {
        EndorsementKey::Ecc((x, y)) => {
            let head = hex("3059301306072a8648ce3d020106082a8648ce3d03010703420004");
            [&*head, x, y].concat()
        }
        EndorsementKey::Rsa(modulus) => {
            let head = hex("30820122300d06092a864886f70d01010105000382010f003082010a0282010100");
            [&*head, &**modulus, &hex("0203010001")].concat()
        }
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(vec![2, 23, 133, 8, 1])];
    let key = SubjectPublicKeyInfo::from_der(&key).unwrap();
    params.signed_by(&key, maker).unwrap().der().to_vec()
}

fn a_maker_s_certificate_is_read_from_the_tpm_and_holds_for_its_key_alone() {
    let (maker, authority) = maker("Maker of TPMs");
    let (_stranger, foreign) = self::maker("Maker of TPMs");
    let ecc = {
        let state = tempfile::tempdir().unwrap();
        EndorsementKey::read(&keys(&mut Bus::switch_on(state.path())).unwrap().endorsement).unwrap()
    };
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    // A certificate where that of a key of RSA is stored: this TPM has no other, so that key is
    // asked for. It is the certificate of another key.
    bus.store(0x01c0_0002, &certificate(&maker, &ecc));
    let found = keys(&mut bus).unwrap();
    let rsa = EndorsementKey::read(&found.endorsement).unwrap();
    assert!(matches!(rsa, EndorsementKey::Rsa(_)), "{rsa:?}");
    let stored = found.certificate.unwrap();
    let wrong = Certificate::read(&stored).unwrap();
    assert_eq!(wrong.certifies(&rsa), Err(attestation::Error::CertificateKey));

    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    bus.store(0x01c0_0002, &[0; 600]);
    let rsa = EndorsementKey::read(&keys(&mut bus).unwrap().endorsement).unwrap();
    // The owner makes room, and the maker's own takes it (`TPM2_NV_UndefineSpace`).
    bus.run(0x122, &[0x4000_0001, 0x01c0_0002], &[]);
    let der = certificate(&maker, &rsa);
    bus.store(0x01c0_0002, &[&*der, &[0xff; 700]].concat());
    let found = keys(&mut bus).unwrap();
    let stored = found.certificate.clone().unwrap();
    let right = Certificate::read(&stored).unwrap();
    assert_eq!(right.certifies(&rsa), Ok(()));
    assert_eq!(right.issuer(), "CN=Maker of TPMs");
    assert!(right.signed_by_one_of([&*authority]).is_ok());
    let refused = right.signed_by_one_of([&*foreign]).unwrap_err();
    assert_eq!(refused, attestation::Error::CertificateIssuer);
    // And a credential for a key of RSA opens, too.
    let challenge = Challenge::new(&found).unwrap();
    let proof = answer(&mut bus, &challenge, NODE).unwrap();
    challenge.check(NODE, &REGISTERS, &proof).unwrap();
}

fn a_tpm_without_the_bank_attests_nothing_and_says_so() {
    let state = tempfile::tempdir().unwrap();
    Bus::switch_on(state.path()).drop_sha256();
    let mut bus = Bus::switch_on(state.path());
    let challenge = Challenge::new(&keys(&mut bus).unwrap()).unwrap();
    let error = answer(&mut bus, &challenge, NODE).unwrap_err();
    assert!(matches!(error, Error::NoBank), "{error:?}");
}

fn an_attestation_leaves_nothing_in_the_tpm() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    // More often than a TPM has room for objects or sessions, also where it is refused.
    for _time in 0..5 {
        let challenge = Challenge::new(&keys(&mut bus).unwrap()).unwrap();
        answer(&mut bus, &challenge, NODE).unwrap();
        let (_pair, public) = software_key();
        let wrong = Keys { attestation: public, ..keys(&mut bus).unwrap() };
        answer(&mut bus, &Challenge::new(&wrong).unwrap(), NODE).unwrap_err();
    }
    // Neither does it disturb what is sealed.
    let blob = seal(&mut bus, None, &[7, 12], b"test", SECRET).unwrap();
    let challenge = Challenge::new(&keys(&mut bus).unwrap()).unwrap();
    answer(&mut bus, &challenge, NODE).unwrap();
    assert_eq!(**unseal(&mut bus, None, b"test", &blob).unwrap(), *SECRET);
}
