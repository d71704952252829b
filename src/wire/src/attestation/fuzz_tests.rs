//! Fuzz targets of what a node says in an attestation: keys, certificates, quotes.

use polis_fuzz::{Accepted, Target};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::software::{Maker, PURPOSE, Pair, endorsement};
use super::tests::{registers, statement};
use super::*;

#[test]
fn attestation_keys() {
    let rsa = {
        let mut template = endorsement_template(Kind::Rsa);
        let modulus = template.len() - key::MODULUS;
        template[modulus..].fill(0xd5);
        template
    };
    let samples = [endorsement(), rsa, Pair::new().public];
    Target::new("wire.attestation_keys").samples(samples).run(|input| {
        if AttestationKey::read(input).is_ok() {
            return Accepted::Yes;
        }
        let Ok(key) = EndorsementKey::read(input) else { return Accepted::No };
        // A point beside the curve, or a number that cannot be a modulus.
        credential::make(&key, b"name", &[1; SIZE]).is_ok().into()
    });
}

#[test]
fn quotes() {
    let software = Pair::new();
    let key = software.key();
    let sample = statement(0xff54_4347, 0x8018, &[1; SIZE]);
    Target::new("wire.quote").samples([sample.clone()]).run(|input| {
        // A statement that the key signed, and a signature.
        let signature = software.sign(input);
        let checked = quote::check(&key, input, &signature, &[1; SIZE], &registers());
        let forged = quote::check(&key, &sample, input, &[1; SIZE], &registers());
        assert_eq!(forged, Err(Error::Signature));
        checked.is_ok().into()
    });
}

/// The part of a certificate that its maker signs.
fn content(der: &[u8]) -> Vec<u8> {
    let (_, certificate) = X509Certificate::from_der(der).unwrap();
    certificate.tbs_certificate.as_ref().to_vec()
}

#[test]
fn endorsement_certificates() {
    let key = EndorsementKey::read(&endorsement()).unwrap();
    let EndorsementKey::Ecc(point) = key else { panic!("{key:?}") };
    let maker = Maker::new("Maker");
    let sample = maker.certify(&point, &PURPOSE);
    Target::new("wire.endorsement_certificate").samples([sample.clone()]).run(|input| {
        let Ok(certificate) = Certificate::read(input) else { return Accepted::No };
        let _issuer = certificate.issuer();
        let known = certificate.certifies(&key).is_ok();
        let signed = certificate.signed_by_one_of([&*maker.der]).is_ok();
        // Only what the maker signed: the names of the algorithm outside of it may differ.
        assert!(!signed || content(input) == content(&sample));
        (known && signed).into()
    });
}
