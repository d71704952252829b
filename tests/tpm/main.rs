//! The TPM code of the node against an emulated TPM, without a machine.
//!
//! `cargo xtask test` provides `swtpm`.
#![expect(clippy::unwrap_used, reason = "a story fails where something else came")]

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use polis_image::signing::{ImageSigner, Keys as OwnersKeys};
use polis_machine::tpm::{
    Blob, Error, SignedSystem, Transport, Unapproved, confirm, keys, prove, seal, unseal,
};
use polis_qemu::tpm::Tpm;
use polis_tests::{Story, Suite, story};
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
use sha2::{Digest as _, Sha256};

/// `TPM2_PolicyPCR`.
const POLICY_PCR: u32 = 0x17f;

/// A TPM that is on, and what went over its bus.
struct Bus {
    stream: UnixStream,
    seen: Vec<u8>,
    /// How often register 10 is extended right after a policy named registers, as the kernel of
    /// a machine does that loads a module at that time.
    disturbed: u32,
    _tpm: Tpm,
}

impl Bus {
    fn switch_on(state: &std::path::Path) -> Self {
        let (tpm, stream) = Tpm::alone(state).unwrap();
        // Longer than any answer takes on a busy host.
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { stream, seen: Vec::new(), disturbed: 0, _tpm: tpm }
    }

    /// Runs a command with the (empty) password of its first object; returns the answer's
    /// parameters.
    fn run(&mut self, code: u32, handles: &[u32], parameters: &[u8]) -> Vec<u8> {
        let mut command = vec![0x80, 2, 0, 0, 0, 0];
        command.extend(code.to_be_bytes());
        handles.iter().for_each(|handle| command.extend(handle.to_be_bytes()));
        command.extend([0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 1, 0, 0]);
        command.extend(parameters);
        let size = u32::try_from(command.len()).unwrap().to_be_bytes();
        command[2..6].copy_from_slice(&size);
        let answer = self.transmit(&command).unwrap();
        assert_eq!(answer[6..10], [0; 4], "the TPM refuses command {code:#x}");
        answer[14..].to_vec()
    }

    /// Extends a register, as the code that starts the machine does.
    fn measure(&mut self, pcr: u32) {
        let value = [&[0, 0, 0, 1, 0, 0x0b][..], &[7; 32]].concat();
        self.run(0x182, &[pcr], &value);
    }

    /// Keeps SHA-1 values of the registers alone from the next start on, as an old firmware's
    /// setup does (`TPM2_PCR_Allocate`).
    fn drop_sha256(&mut self) {
        let banks = [0, 0, 0, 2, 0, 4, 3, 0xff, 0xff, 0xff, 0, 0x0b, 3, 0, 0, 0];
        // The platform's hierarchy.
        let allocated = self.run(0x12b, &[0x4000_000c], &banks);
        assert_eq!(allocated[0], 1, "the TPM cannot have these banks");
    }

    /// Stores something where the maker of a TPM stores a certificate (`TPM2_NV_DefineSpace`,
    /// `TPM2_NV_Write`).
    fn store(&mut self, place: u32, content: &[u8]) {
        const OWNER: u32 = 0x4000_0001;
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        // The owner writes it, and a reader names the place.
        let attributes = 0x0206_0002_u32.to_be_bytes();
        let public = [&place.to_be_bytes()[..], &[0, 0x0b], &attributes, &[0, 0], &length].concat();
        self.run(0x12a, &[OWNER], &[&[0, 0, 0, 14][..], &public].concat());
        for (number, piece) in content.chunks(512).enumerate() {
            let size = u16::try_from(piece.len()).unwrap().to_be_bytes();
            let start = u16::try_from(number * 512).unwrap().to_be_bytes();
            self.run(0x137, &[OWNER, place], &[&size[..], piece, &start].concat());
        }
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
        if self.disturbed > 0 && command[6..10] == POLICY_PCR.to_be_bytes() {
            self.disturbed -= 1;
            self.measure(10);
        }
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
    story!(a_register_that_is_extended_meanwhile_shuts_nothing),
    story!(a_blob_without_registers_opens_after_any_change_and_in_no_other_tpm),
    story!(each_system_of_one_policy_key_opens_what_another_one_sealed),
    story!(a_system_of_another_key_a_changed_one_and_a_flipped_signature_are_refused),
    story!(what_was_sealed_without_a_policy_key_opens_for_a_signed_system_and_is_sealed_anew),
    story!(a_blob_of_a_policy_key_without_registers_opens_after_new_firmware),
    story!(a_blob_opens_for_its_own_purpose_only),
    story!(a_tpm_that_is_gone_is_an_outage_and_not_a_refusal),
    story!(a_tpm_without_the_bank_seals_nothing_and_says_so),
    story!(a_quote_of_the_asked_tpm_verifies_and_its_keys_outlive_restarts),
    story!(a_quote_for_another_question_or_of_other_registers_is_refused),
    story!(a_credential_opens_only_in_the_tpm_that_has_both_keys),
    story!(a_key_outside_of_the_tpm_attests_nothing),
    story!(a_maker_s_certificate_is_read_from_the_tpm_and_holds_for_its_key_alone),
    story!(a_tpm_without_the_bank_attests_nothing_and_says_so),
    story!(an_attestation_leaves_nothing_in_the_tpm),
];

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

fn main() -> ExitCode {
    polis_tests::main(SUITE, &[STORIES])
}
