//! The TPM code of the node against an emulated TPM, without a machine.
//!
//! `cargo xtask test` provides `swtpm`.
#![expect(clippy::unwrap_used, reason = "a story fails where something else came")]

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use polis_machine::tpm::{Error, Transport, seal, unseal};
use polis_qemu::tpm::Tpm;
use polis_tests::{Story, Suite, story};

/// A TPM that is on, and what went over its bus.
struct Bus {
    stream: UnixStream,
    seen: Vec<u8>,
    _tpm: Tpm,
}

impl Bus {
    fn switch_on(state: &std::path::Path) -> Self {
        let (tpm, stream) = Tpm::alone(state).unwrap();
        // Longer than any answer takes on a busy host.
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { stream, seen: Vec::new(), _tpm: tpm }
    }

    /// Extends a register, as the code that starts the machine does.
    fn measure(&mut self, pcr: u32) {
        let handle = pcr.to_be_bytes();
        let session = [0x40, 0, 0, 9, 0, 0, 1, 0, 0];
        let mut command = vec![0x80, 2, 0, 0, 0, 0, 0, 0, 1, 0x82];
        command.extend(handle);
        command.extend(9_u32.to_be_bytes());
        command.extend(session);
        command.extend([0, 0, 0, 1, 0, 0x0b]);
        command.extend([7; 32]);
        let size = u32::try_from(command.len()).unwrap().to_be_bytes();
        command[2..6].copy_from_slice(&size);
        let answer = self.transmit(&command).unwrap();
        assert_eq!(answer[6..10], [0; 4], "the TPM refuses a measurement");
    }

    /// Keeps SHA-1 values of the registers alone from the next start on, as an old firmware's
    /// setup does (`TPM2_PCR_Allocate`).
    fn drop_sha256(&mut self) {
        let banks = [0, 0, 0, 2, 0, 4, 3, 0xff, 0xff, 0xff, 0, 0x0b, 3, 0, 0, 0];
        let mut command = vec![0x80, 2, 0, 0, 0, 0, 0, 0, 1, 0x2b];
        // The platform's hierarchy, by its empty password.
        command.extend([0x40, 0, 0, 0x0c]);
        command.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 1, 0, 0]);
        command.extend(banks);
        let size = u32::try_from(command.len()).unwrap().to_be_bytes();
        command[2..6].copy_from_slice(&size);
        let answer = self.transmit(&command).unwrap();
        assert_eq!(answer[6..10], [0; 4], "the TPM keeps its banks");
        assert_eq!(answer[14], 1, "the TPM cannot have these banks");
    }

    fn has_seen(&self, secret: &[u8]) -> bool {
        self.seen.windows(secret.len()).any(|window| window == secret)
    }
}

impl Transport for Bus {
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        self.seen.extend(command);
        self.stream.write_all(command)?;
        let mut answer = vec![0; 10];
        self.stream.read_exact(&mut answer)?;
        let size = u32::from_be_bytes([answer[2], answer[3], answer[4], answer[5]]) as usize;
        answer.resize(size, 0);
        self.stream.read_exact(&mut answer[10..])?;
        self.seen.extend(&answer);
        Ok(answer)
    }

    /// This TPM tests itself at once.
    fn wait(&mut self, _time: Duration) {}
}

const SECRET: &[u8] = b"a secret of any length that is longer than a key";

const SUITE: Suite =
    Suite { name: "tpm", retries: 0, deadline: Duration::from_secs(120), per_processor: 1 };

const STORIES: &[Story] = &[
    story!(what_was_sealed_opens_after_a_restart_and_as_often_as_one_likes),
    story!(who_listens_to_the_bus_learns_neither_the_key_nor_the_secret),
    story!(a_changed_register_differs_from_a_cleared_tpm),
    story!(a_blob_opens_for_its_own_purpose_only),
    story!(a_tpm_that_is_gone_is_an_outage_and_not_a_refusal),
    story!(a_tpm_without_the_bank_seals_nothing_and_says_so),
];

fn what_was_sealed_opens_after_a_restart_and_as_often_as_one_likes() {
    let state = tempfile::tempdir().unwrap();
    let blob = seal(&mut Bus::switch_on(state.path()), &[7, 12], b"test", SECRET).unwrap();
    for _boot in 0..2 {
        let mut bus = Bus::switch_on(state.path());
        // More often than a TPM has room for objects or sessions: all are given back.
        for _time in 0..5 {
            assert_eq!(**unseal(&mut bus, b"test", &blob).unwrap(), *SECRET);
        }
    }
}

fn who_listens_to_the_bus_learns_neither_the_key_nor_the_secret() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    // A key of one repeated byte would show; the TPM is asked with ours.
    let blob = seal(&mut bus, &[7], b"test", SECRET).unwrap();
    let opened = unseal(&mut bus, b"test", &blob).unwrap();
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
    let blob = seal(&mut bus, &[7, 12], b"test", SECRET).unwrap();
    // A register that the policy does not speak of changes nothing.
    bus.measure(11);
    unseal(&mut bus, b"test", &blob).unwrap();
    bus.measure(12);
    let refused = unseal(&mut bus, b"test", &blob).unwrap_err();
    assert!(matches!(&refused, Error::Changed(pcrs) if *pcrs == [7, 12]), "{refused:?}");
    // Started as it was, it opens again.
    drop(bus);
    unseal(&mut Bus::switch_on(state.path()), b"test", &blob).unwrap();

    let other = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(other.path());
    let refused = unseal(&mut bus, b"test", &blob).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
    // Also where somebody wrote this TPM's name into the blob.
    let root = seal(&mut bus, &[7, 12], b"test", SECRET).unwrap().root;
    let refused =
        unseal(&mut bus, b"test", &polis_machine::tpm::Blob { root, ..blob }).unwrap_err();
    assert!(matches!(refused, Error::Cleared), "{refused:?}");
}

fn a_blob_opens_for_its_own_purpose_only() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    let blob = seal(&mut bus, &[7], b"one", SECRET).unwrap();
    let refused = unseal(&mut bus, b"two", &blob).unwrap_err();
    assert!(matches!(refused, Error::Mismatch), "{refused:?}");
}

fn a_tpm_that_is_gone_is_an_outage_and_not_a_refusal() {
    let state = tempfile::tempdir().unwrap();
    let mut bus = Bus::switch_on(state.path());
    bus.stream.shutdown(std::net::Shutdown::Both).unwrap();
    let error = seal(&mut bus, &[7], b"test", SECRET).unwrap_err();
    assert!(error.retriable(), "{error:?}");
}

fn a_tpm_without_the_bank_seals_nothing_and_says_so() {
    let state = tempfile::tempdir().unwrap();
    Bus::switch_on(state.path()).drop_sha256();
    let error = seal(&mut Bus::switch_on(state.path()), &[7, 12], b"test", SECRET).unwrap_err();
    assert!(matches!(error, Error::NoBank), "{error:?}");
    assert!(!error.retriable(), "{error}");
}

fn main() -> ExitCode {
    polis_tests::main(SUITE, &[STORIES])
}
