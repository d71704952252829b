//! Secrets that are sealed to registers, without a policy key.

use polis_machine::tpm::{Blob, Error, seal, unseal};
use polis_tests::{Story, story};

use crate::bus::Bus;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(what_was_sealed_opens_after_a_restart_and_as_often_as_one_likes),
    story!(who_listens_to_the_bus_learns_neither_the_key_nor_the_secret),
    story!(a_changed_register_differs_from_a_cleared_tpm),
    story!(a_blob_without_registers_opens_after_any_change_and_in_no_other_tpm),
    story!(a_blob_opens_for_its_own_purpose_only),
    story!(a_tpm_that_is_gone_is_an_outage_and_not_a_refusal),
    story!(a_tpm_without_the_bank_seals_nothing_and_says_so),
];

pub(crate) const SECRET: &[u8] = b"a secret of any length that is longer than a key";

fn what_was_sealed_opens_after_a_restart_and_as_often_as_one_likes() {
    let state = tempfile::tempdir().unwrap();
    let blob = seal(&mut Bus::switch_on(state.path()), None, &[7, 12], b"test", SECRET).unwrap();
    for _boot in 0..2 {
        let mut bus = Bus::switch_on(state.path());
        // More often than a TPM has room for objects or sessions: all are given back.
        for _time in 0..5 {
            assert_eq!(**unseal(&mut bus, None, b"test", &blob).unwrap(), *SECRET);
        }
    }
}

fn who_listens_to_the_bus_learns_neither_the_key_nor_the_secret() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    // A key of one repeated byte would show; the TPM is asked with ours.
    let blob = seal(&mut bus, None, &[7], b"test", SECRET).unwrap();
    let opened = unseal(&mut bus, None, b"test", &blob).unwrap();
    assert!(!bus.has_seen(&opened));
    // The key in the TPM opens the ciphertext: no 32 bytes of the bus are it.
    let keys = bus.seen.windows(32).map(|key| <[u8; 32]>::try_from(key).unwrap());
    for key in keys {
        assert!(polis_machine::tpm::decrypt(&key, &blob.nonce, b"test", &blob.ciphertext).is_err());
    }
}

fn a_changed_register_differs_from_a_cleared_tpm() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let blob = seal(&mut bus, None, &[7, 12], b"test", SECRET).unwrap();
    // A register that the policy does not speak of changes nothing.
    bus.measure(11);
    unseal(&mut bus, None, b"test", &blob).unwrap();
    bus.measure(12);
    let refused = unseal(&mut bus, None, b"test", &blob).unwrap_err();
    assert!(matches!(&refused, Error::Changed(pcrs) if *pcrs == [7, 12]), "{refused:?}");
    // Started as it was, it opens again.
    drop(bus);
    unseal(&mut Bus::switch_on(state.path()), None, b"test", &blob).unwrap();

    let other = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(other.path());
    let refused = unseal(&mut bus, None, b"test", &blob).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
    // Also where somebody wrote this TPM's name into the blob.
    let root = seal(&mut bus, None, &[7, 12], b"test", SECRET).unwrap().root;
    let refused = unseal(&mut bus, None, b"test", &Blob { root, ..blob }).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
}

fn a_blob_without_registers_opens_after_any_change_and_in_no_other_tpm() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let bound = seal(&mut bus, None, &[7, 12], b"test", SECRET).unwrap();
    let free = seal(&mut bus, None, &[], b"test", SECRET).unwrap();
    assert_eq!(free.pcrs, [0; 0]);
    bus.measure(7);
    bus.measure(12);
    assert_eq!(**unseal(&mut bus, None, b"test", &free).unwrap(), *SECRET);
    unseal(&mut bus, None, b"test", &bound).unwrap_err();
    // Nor does the TPM open what is bound if somebody deletes the registers from the blob.
    let stripped = Blob { pcrs: Vec::new(), ..bound.clone() };
    let refused = unseal(&mut bus, None, b"test", &stripped).unwrap_err();
    assert!(matches!(refused, Error::Changed(_)), "{refused:?}");
    drop(bus);
    // The next start: both open, also more often than a TPM has room for sessions.
    let mut bus = Bus::switch_on(state.path());
    for _time in 0..5 {
        unseal(&mut bus, None, b"test", &free).unwrap();
    }
    unseal(&mut bus, None, b"test", &bound).unwrap();

    let other = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(other.path());
    let refused = unseal(&mut bus, None, b"test", &free).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
    let root = seal(&mut bus, None, &[], b"test", SECRET).unwrap().root;
    let refused = unseal(&mut bus, None, b"test", &Blob { root, ..free }).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
}

fn a_blob_opens_for_its_own_purpose_only() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let blob = seal(&mut bus, None, &[7], b"one", SECRET).unwrap();
    let refused = unseal(&mut bus, None, b"two", &blob).unwrap_err();
    assert!(matches!(refused, Error::Mismatch), "{refused:?}");
}

fn a_tpm_that_is_gone_is_an_outage_and_not_a_refusal() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    bus.stream.shutdown(std::net::Shutdown::Both).unwrap();
    let error = seal(&mut bus, None, &[7], b"test", SECRET).unwrap_err();
    assert!(error.retriable(), "{error:?}");
}

fn a_tpm_without_the_bank_seals_nothing_and_says_so() {
    let state = tempfile::tempdir().unwrap();
    Bus::switch_on(state.path()).drop_sha256();
    let error =
        seal(&mut Bus::switch_on(state.path()), None, &[7, 12], b"test", SECRET).unwrap_err();
    assert!(matches!(error, Error::NoBank), "{error:?}");
    assert!(!error.retriable(), "{error}");
}
