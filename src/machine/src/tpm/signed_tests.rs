//! Tests of the signed measurements, whose bytes come with a kernel image.

use polis_fuzz::{Accepted, Target};
use proptest::prelude::*;

use super::*;

/// A key of the right shape.
fn key() -> Vec<u8> {
    let der = [&BEFORE[..], &[0xab; MODULUS], &BEHIND].concat();
    let [begin, end] = PEM;
    format!("{begin}\n{}\n{end}\n", Base64::encode_string(&der)).into_bytes()
}

fn fingerprint() -> String {
    hex::encode(&Sha256::digest([&BEFORE[..], &[0xab; MODULUS], &BEHIND].concat()))
}

fn entry(pcrs: &str, pkfp: &str, pol: &str, sig: &str) -> String {
    format!(r#"{{"pcrs":{pcrs},"pkfp":"{pkfp}","pol":"{pol}","sig":"{sig}"}}"#)
}

fn good() -> String {
    entry("[11]", &fingerprint(), &"07".repeat(32), &Base64::encode_string(&[5; MODULUS]))
}

fn banks(entries: &[String]) -> Vec<u8> {
    format!(r#"{{"sha256":[{}]}}"#, entries.join(",")).into_bytes()
}

#[test]
fn the_entry_of_this_key_and_of_register_11_counts() {
    let system = SignedSystem::read(&banks(&[good()]), &key()).unwrap();
    assert_eq!((system.policy, &*system.signature), ([7; 32], &[5; MODULUS][..]));
    // By hand: type, digest, attributes, no policy, no cipher, no scheme, bits, exponent.
    let head = "0001000b000400400000001000100800000000000100";
    assert_eq!(system.key, [&hex::decode(head).unwrap()[..], &[0xab; MODULUS]].concat());
    assert_eq!(system.signer(), [&[0, 0x0b][..], &Sha256::digest(&system.key)].concat());
    let others = [
        entry("[11]", &"0".repeat(64), "aa", "bb"),
        entry("[4]", &fingerprint(), "aa", "bb"),
        entry("[4,11]", &fingerprint(), "aa", "bb"),
        good(),
    ];
    assert_eq!(SignedSystem::read(&banks(&others), &key()).unwrap(), system);
    let reason = |entries: &[String]| match SignedSystem::read(&banks(entries), &key()) {
        Err(Unreadable::Invalid { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert!(reason(&others[..3]).contains("no entry of this key"));
    let sig = Base64::encode_string(&[5; MODULUS]);
    assert!(reason(&[entry("[11]", &fingerprint(), "07", &sig)]).starts_with("pol"));
    assert!(reason(&[entry("[11]", &fingerprint(), &"07".repeat(32), "AAAA")]).starts_with("sig"));
}

#[test]
fn another_kind_of_key_is_refused() {
    for der in [
        // A modulus that is too short, and one with another exponent.
        [&BEFORE[..], &[0xab; MODULUS - 1], &BEHIND].concat(),
        [&BEFORE[..], &[0xab; MODULUS], &[2, 3, 1, 0, 3]].concat(),
        Vec::new(),
    ] {
        let [begin, end] = PEM;
        let text = format!("{begin}\n{}\n{end}\n", Base64::encode_string(&der));
        let refused = SignedSystem::read(&banks(&[good()]), text.as_bytes()).unwrap_err();
        assert!(refused.to_string().contains("RSA-2048"), "{refused}");
    }
    let refused = SignedSystem::read(&banks(&[good()]), b"\xff").unwrap_err();
    assert!(refused.to_string().contains("PEM"), "{refused}");
}

#[test]
fn a_system_without_both_files_is_not_signed_and_a_file_has_a_bound() {
    let directory = tempfile::tempdir().unwrap();
    let load = || SignedSystem::load(directory.path());
    assert_eq!(load().unwrap(), None);
    std::fs::write(directory.path().join(extra::SIGNATURE), banks(&[good()])).unwrap();
    assert_eq!(load().unwrap(), None);
    std::fs::write(directory.path().join(extra::PUBLIC_KEY), key()).unwrap();
    assert!(load().unwrap().is_some());
    let long = vec![b' '; usize::try_from(extra::SIZE_MAX).unwrap() + 1];
    std::fs::write(directory.path().join(extra::SIGNATURE), long).unwrap();
    assert!(load().unwrap_err().to_string().ends_with("it is too long"));
}

proptest! {
    #[test]
    fn arbitrary_files_never_panic(
        signature in prop::collection::vec(any::<u8>(), 0..200),
        text in "\\PC{0,200}",
    ) {
        prop_assert!(SignedSystem::read(&signature, &key()).is_err());
        prop_assert!(SignedSystem::read(&banks(&[good()]), text.as_bytes()).is_err());
    }
}

#[test]
fn signed_measurements() {
    let sample = [&key()[..], b"\0", &banks(&[good()])].concat();
    Target::new("machine.signed_system").samples([sample]).run(|input| {
        // A key, NUL, JSON.
        let split = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
        let (key, rest) = input.split_at(split);
        let Ok(system) = SignedSystem::read(rest.get(1..).unwrap_or_default(), key) else {
            return Accepted::No;
        };
        assert_eq!((system.signature.len(), system.key.len()), (MODULUS, 22 + MODULUS));
        Accepted::Yes
    });
}
