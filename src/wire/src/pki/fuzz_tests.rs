//! Fuzz targets of what the PKI reads from etcd: certificates, revocation lists, keys.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use polis_fuzz::{Accepted, Target};

use super::overview::{Overview, Renewal};
use super::store::memory::Memory;
use super::tests::{authority, noon, peer};
use super::*;

/// A namespace with an authority and a certificate on its CRL.
async fn contents() -> BTreeMap<String, Vec<u8>> {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    pki.revoke(&authority(), "a", Reason::KeyCompromise, noon()).await.unwrap();
    pki.ensure(&peer("a", Mode::Managed), noon()).await.unwrap();
    memory.contents()
}

/// The values whose keys end so.
fn ending(contents: &BTreeMap<String, Vec<u8>>, end: &str) -> Vec<Vec<u8>> {
    let found = contents.iter().filter(|(key, _)| key.ends_with(end));
    found.map(|(_, value)| value.clone()).collect()
}

#[tokio::test]
async fn certificates() {
    let certificates = ending(&contents().await, "/certificate");
    let authority = certificates[0].clone();
    Target::new("wire.certificate").samples(certificates).run(|input| {
        let _signed = signed_by(input, &authority);
        let Some(facts) = Facts::read(input) else { return Accepted::No };
        assert!(facts.renew_at() <= facts.not_after.max(facts.not_before));
        let _due = facts.renewal_due(SystemTime::UNIX_EPOCH);
        Accepted::Yes
    });
}

#[tokio::test]
async fn revocation_lists() {
    let lists = ending(&contents().await, "/crl");
    Target::new("wire.crl").samples(lists).run(|input| {
        let Some(crl) = Crl::read(input) else { return Accepted::No };
        assert_eq!(crl.der, input);
        assert!(crl.revoked.iter().all(|entry| crl.revokes(&entry.serial)));
        Accepted::Yes
    });
}

#[tokio::test]
async fn authorities_of_a_record() {
    let memory = Memory::default();
    let pki = Namespace::new(memory.clone(), "");
    let first = pki.ensure(&authority(), noon()).await.unwrap().der;
    let sole = Authorities::sole(first.clone()).to_record();
    pki.rotate(&authority(), 1, noon()).await.unwrap();
    let both = ending(&memory.contents(), "/rotated");
    pki.conclude(&authority(), Pin::AllBut(&BTreeSet::new())).await.unwrap();
    let samples = [vec![sole], both, ending(&memory.contents(), "/rotated")].concat();
    Target::new("wire.authorities").samples(samples).run(|input| {
        let Some(read) = Authorities::from_record(input) else { return Accepted::No };
        let (_led, _signed) = (read.succeed(&first), read.signed(&first));
        assert_eq!(Authorities::from_record(&read.to_record()), Some(read));
        Accepted::Yes
    });
}

#[tokio::test]
async fn namespaces() {
    let contents = contents().await;
    let names: Vec<&String> = contents.keys().collect();
    // The number of the record that the input takes the place of, then its content.
    let samples: Vec<Vec<u8>> = (0_u8..)
        .zip(contents.values())
        .map(|(number, value)| [&[number][..], value].concat())
        .collect();
    Target::new("wire.pki_records").samples(samples).run(|input| {
        let Some((number, value)) = input.split_first() else { return Accepted::No };
        let mut contents = contents.clone();
        contents.insert(names[usize::from(*number) % names.len()].clone(), value.to_vec());
        let mut overview = Overview::default();
        overview.add("x", &contents, |_| Renewal::WhenUsed);
        assert!(overview.authorities.len() <= 1 && overview.certificates.len() <= 1);
        Accepted::Yes
    });
}
