//! Tests of the verifier, with keys in software in the place of a TPM's. `tests/tpm` has a TPM.

use super::software::{Maker, PURPOSE, Pair, Software, endorsement};
use super::*;

/// The registers of the tests.
const ASKED: [u32; 3] = [7, 11, 12];

/// The values that the tests have in the registers.
pub(super) fn registers() -> Registers {
    ASKED.into_iter().map(|number| (number, [u8::try_from(number).unwrap(); SIZE])).collect()
}

/// A statement with this mark and kind, about [`registers`].
pub(super) fn statement(magic: u32, kind: u16, qualifier: &[u8]) -> Vec<u8> {
    software::statement(magic, kind, qualifier, &registers())
}

fn check(key: &AttestationKey, quote: &[u8], signature: &[u8]) -> Result<(), Error> {
    quote::check(key, quote, signature, &[1; SIZE], &registers())
}

#[test]
fn a_quote_is_the_tpm_s_word_about_these_registers_for_this_question() {
    let key = Pair::new();
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
    assert_eq!(check(&Pair::new().key(), &quote, &signature), Err(Error::Signature));
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
    let key = Pair::new();
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
    let key = Pair::new();
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

#[test]
fn a_credential_opens_for_both_keys_and_for_no_other() {
    let tpm = Software::default();
    let challenge = Challenge::new(&tpm.keys()).unwrap();
    let answer =
        tpm.prove(&challenge.credential, &qualifier(&challenge.nonce, "polis-1"), registers());
    assert_eq!(challenge.check("polis-1", &ASKED, &answer.unwrap()), Ok(()));
    // Another attestation key, and a changed credential.
    let mixed = Keys { attestation: Pair::new().public, ..tpm.keys() };
    let other = Challenge::new(&mixed).unwrap().credential;
    assert_eq!(tpm.prove(&other, &[0; SIZE], registers()), None);
    for place in 0..challenge.credential.blob.len() {
        let mut changed = challenge.credential.clone();
        changed.blob[place] ^= 1;
        assert_eq!(tpm.prove(&changed, &[0; SIZE], registers()), None, "{place}");
    }
}

#[test]
fn a_certificate_counts_only_for_its_key_and_of_a_given_maker() {
    let read = |public: &[u8]| EndorsementKey::read(public).unwrap();
    let (key, other) = (read(&endorsement()), read(&endorsement()));
    let EndorsementKey::Ecc(point) = key else { panic!("{key:?}") };
    let (maker, stranger) = (Maker::new("Maker of TPMs"), Maker::new("Maker of TPMs"));
    let der = [maker.certify(&point, &PURPOSE), vec![0xff; 20]].concat();
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
