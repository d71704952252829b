//! Secrets that are sealed to the signature of a system: the policy key of an owner.

use polis_image::signing::{ImageSigner, Keys as OwnersKeys};
use polis_machine::tpm::{Blob, Error, SignedSystem, Unapproved, confirm, seal, unseal};
use polis_tests::{Story, story};
use sha2::{Digest as _, Sha256};

use crate::bus::Bus;
use crate::sealing::SECRET;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(each_system_of_one_policy_key_opens_what_another_one_sealed),
    story!(a_register_that_is_extended_meanwhile_shuts_nothing),
    story!(a_system_of_another_key_a_changed_one_and_a_flipped_signature_are_refused),
    story!(what_was_sealed_without_a_policy_key_opens_for_a_signed_system_and_is_sealed_anew),
    story!(a_blob_of_a_policy_key_without_registers_opens_after_new_firmware),
];

/// The policy keys of two owners.
fn owners() -> [ImageSigner; 2] {
    [(); 2].map(|()| OwnersKeys::generate().unwrap().image_signer().unwrap())
}

/// The value of register 11 after so many measurements of [`Bus::measure`].
fn sections(times: u8) -> [u8; 32] {
    (0..times).fold([0; 32], |value, _time| {
        Sha256::new_with_prefix(value).chain_update([7; 32]).finalize().into()
    })
}

/// What the image has whose start measures so many times, signed by this owner.
fn signed(owner: &ImageSigner, times: u8) -> SignedSystem {
    let signature = owner.approve(&polis_bundle::policy(&sections(times))).unwrap();
    SignedSystem::read(signature.as_bytes(), owner.policy_key().unwrap().as_bytes()).unwrap()
}

/// The start of that image.
fn start(state: &std::path::Path, times: u8) -> Bus {
    let mut bus = Bus::switch_on(state);
    (0..times).for_each(|_time| bus.measure(11));
    bus
}

fn each_system_of_one_policy_key_opens_what_another_one_sealed() {
    let state = tempfile::tempdir().unwrap();
    let [owner, _other] = owners();
    let mut bus = start(state.path(), 1);
    let old = signed(&owner, 1);
    confirm(&mut bus, &old).unwrap();
    let blob = seal(&mut bus, Some(&old), &[7, 12], b"test", SECRET).unwrap();
    assert_eq!((&*blob.signer, &*blob.pcrs), (&*old.signer(), &[7, 12][..]));
    drop(bus);
    // The same system, and the next one: more often than a TPM has room for objects.
    for times in [1, 2] {
        let mut bus = start(state.path(), times);
        let system = signed(&owner, times);
        for _time in 0..5 {
            let opened = unseal(&mut bus, Some(&system), b"test", &blob).unwrap();
            assert_eq!(**opened, *SECRET);
            confirm(&mut bus, &system).unwrap();
        }
    }
    // The new system seals, and the one before it opens that, too.
    let new = signed(&owner, 2);
    let blob = seal(&mut start(state.path(), 2), Some(&new), &[7, 12], b"test", SECRET).unwrap();
    unseal(&mut start(state.path(), 1), Some(&old), b"test", &blob).unwrap();
}

fn a_register_that_is_extended_meanwhile_shuts_nothing() {
    let state = tempfile::tempdir().unwrap();
    let [owner, _other] = owners();
    let system = signed(&owner, 1);
    let mut bus = start(state.path(), 1);
    for disturbed in [1, 2, 5] {
        bus.disturbed = disturbed;
        let blob = seal(&mut bus, Some(&system), &[7, 12], b"test", SECRET).unwrap();
        bus.disturbed = disturbed;
        assert_eq!(**unseal(&mut bus, Some(&system), b"test", &blob).unwrap(), *SECRET);
        assert_eq!(bus.disturbed, 0, "no register was extended");
    }
    bus.disturbed = 1;
    confirm(&mut bus, &system).unwrap();
    assert_eq!(bus.disturbed, 0, "no register was extended");
    // Without an end, it is an outage and not a changed machine; then it opens again.
    let blob = seal(&mut bus, Some(&system), &[7, 12], b"test", SECRET).unwrap();
    bus.disturbed = u32::MAX;
    let refused = unseal(&mut bus, Some(&system), b"test", &blob).unwrap_err();
    assert!(matches!(refused, Error::Measured) && refused.retriable(), "{refused:?}");
    bus.disturbed = 0;
    unseal(&mut bus, Some(&system), b"test", &blob).unwrap();
    // A register of the policy that changes meanwhile is noticed.
    bus.measure(12);
    bus.disturbed = 1;
    let refused = unseal(&mut bus, Some(&system), b"test", &blob).unwrap_err();
    assert!(matches!(refused, Error::Changed(_)), "{refused:?}");
}

/// Why the TPM does not open a blob for this system.
fn why(bus: &mut Bus, system: Option<&SignedSystem>, blob: &Blob) -> Unapproved {
    match unseal(bus, system, b"test", blob).unwrap_err() {
        Error::Unapproved(why) => why,
        error => panic!("{error:?}"),
    }
}

/// The same with a flipped bit in the signature.
fn flipped(owner: &ImageSigner, times: u8) -> SignedSystem {
    let text = owner.approve(&polis_bundle::policy(&sections(times))).unwrap();
    let place = text.find(r#""sig":""#).unwrap() + 40;
    let digit = if &text[place..=place] == "A" { "B" } else { "A" };
    let flipped = [&text[..place], digit, &text[place + 1..]].concat();
    SignedSystem::read(flipped.as_bytes(), owner.policy_key().unwrap().as_bytes()).unwrap()
}

fn a_system_of_another_key_a_changed_one_and_a_flipped_signature_are_refused() {
    let state = tempfile::tempdir().unwrap();
    let [owner, other] = owners();
    let (own, foreign) = (signed(&owner, 1), signed(&other, 1));
    let mut bus = start(state.path(), 1);
    let blob = seal(&mut bus, Some(&own), &[7, 12], b"test", SECRET).unwrap();
    assert_eq!(why(&mut bus, None, &blob), Unapproved::Unsigned);
    assert_eq!(why(&mut bus, Some(&foreign), &blob), Unapproved::OtherKey);
    // Also where somebody writes the other key's name into the blob, or none: the TPM knows.
    for (system, signer) in [(&foreign, foreign.signer()), (&own, Vec::new())] {
        let renamed = Blob { signer, ..blob.clone() };
        let refused = unseal(&mut bus, Some(system), b"test", &renamed).unwrap_err();
        assert!(matches!(refused, Error::Changed(_)), "{refused:?}");
    }
    let damaged = flipped(&owner, 1);
    assert_eq!(why(&mut bus, Some(&damaged), &blob), Unapproved::Damaged);
    let refused = seal(&mut bus, Some(&damaged), &[7, 12], b"test", SECRET).unwrap_err();
    assert!(matches!(refused, Error::Unapproved(Unapproved::Damaged)), "{refused:?}");

    // A changed system, as one with another command line, brings the signature along.
    bus.measure(11);
    assert_eq!(why(&mut bus, Some(&own), &blob), Unapproved::Changed);
    for refused in [
        confirm(&mut bus, &own).unwrap_err(),
        seal(&mut bus, Some(&own), &[7, 12], b"test", SECRET).unwrap_err(),
    ] {
        assert!(matches!(refused, Error::Unapproved(Unapproved::Changed)), "{refused:?}");
    }
    drop(bus);
    // Other firmware, and an addition to the command line, as without a policy key.
    for register in [7, 12] {
        let mut bus = start(state.path(), 1);
        bus.measure(register);
        let refused = unseal(&mut bus, Some(&own), b"test", &blob).unwrap_err();
        assert!(matches!(&refused, Error::Changed(pcrs) if *pcrs == [7, 12]), "{refused:?}");
    }
    unseal(&mut start(state.path(), 1), Some(&own), b"test", &blob).unwrap();
    // A TPM that was cleared is named as such.
    let cleared = tempfile::tempdir().unwrap();
    let refused = unseal(&mut start(cleared.path(), 1), Some(&own), b"test", &blob).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
}

fn what_was_sealed_without_a_policy_key_opens_for_a_signed_system_and_is_sealed_anew() {
    let state = tempfile::tempdir().unwrap();
    let [owner, _other] = owners();
    let old = seal(&mut start(state.path(), 3), None, &[7, 12], b"test", SECRET).unwrap();
    assert_eq!(old.signer, [0; 0]);
    let system = signed(&owner, 1);
    let mut bus = start(state.path(), 1);
    let opened = unseal(&mut bus, Some(&system), b"test", &old).unwrap();
    let new = seal(&mut bus, Some(&system), &[7, 12], b"test", &opened).unwrap();
    assert_eq!(**unseal(&mut bus, Some(&system), b"test", &new).unwrap(), *SECRET);
    drop(bus);
    // The system before opens the old one, and not the new one.
    let mut bus = start(state.path(), 3);
    unseal(&mut bus, None, b"test", &old).unwrap();
    assert_eq!(why(&mut bus, None, &new), Unapproved::Unsigned);
}

fn a_blob_of_a_policy_key_without_registers_opens_after_new_firmware() {
    let state = tempfile::tempdir().unwrap();
    let [owner, other] = owners();
    let system = signed(&owner, 1);
    let blob = seal(&mut start(state.path(), 1), Some(&system), &[], b"test", SECRET).unwrap();
    let mut bus = start(state.path(), 1);
    bus.measure(7);
    bus.measure(12);
    assert_eq!(**unseal(&mut bus, Some(&system), b"test", &blob).unwrap(), *SECRET);
    assert_eq!(why(&mut bus, None, &blob), Unapproved::Unsigned);
    assert_eq!(why(&mut bus, Some(&signed(&other, 1)), &blob), Unapproved::OtherKey);
    bus.measure(11);
    assert_eq!(why(&mut bus, Some(&system), &blob), Unapproved::Changed);
}
