//! Tests that need no TPM. `tests/tpm` uses one.

use proptest::prelude::*;

use super::*;

/// Answers with these bytes to every command.
pub(super) struct Answers(pub(super) Vec<Vec<u8>>);

impl Transport for Answers {
    fn transmit(&mut self, _command: &[u8]) -> io::Result<Vec<u8>> {
        if self.0.len() > 1 { Ok(self.0.remove(0)) } else { Ok(self.0[0].clone()) }
    }

    fn wait(&mut self, _time: Duration) {}
}

fn refusal(rc: u32) -> Vec<u8> {
    [&[0x80, 0x01, 0, 0, 0, 10][..], &rc.to_be_bytes()].concat()
}

pub(super) fn blob() -> Blob {
    Blob {
        public: vec![1],
        private: vec![2],
        root: vec![3],
        pcrs: vec![7],
        signer: Vec::new(),
        nonce: vec![0; NONCE_LEN],
        ciphertext: vec![4; 40],
    }
}

#[test]
fn a_machine_without_a_tpm_differs_from_one_with_an_unreachable_tpm() {
    let dev = tempfile::tempdir().unwrap();
    assert!(matches!(Device::open(dev.path()), Err(Error::Absent)));
    std::fs::create_dir(dev.path().join("tpmrm0")).unwrap();
    let error = Device::open(dev.path()).unwrap_err();
    assert!(error.retriable(), "{error:?}");
}

#[test]
fn each_refusal_has_its_cause() {
    let refused = |rc| Error::Refused { command: "TPM2_Load", rc };
    assert!(matches!(loading(refused(0x1df)), Error::Cleared), "TPM_RC_INTEGRITY");
    assert!(matches!(loading(refused(0x9a2)), Error::Refused { .. }), "TPM_RC_BAD_AUTH");
    assert!(matches!(opening(refused(0x99d), &[7]), Error::Changed(pcrs) if pcrs == [7]));
    assert!(matches!(opening(refused(0x902), &[7]), Error::Refused { .. }));
    let approving = |command, rc| command::approving(Error::Refused { command, rc });
    let (authorize, verify) = ("TPM2_PolicyAuthorize", "TPM2_VerifySignature");
    assert!(matches!(approving(authorize, 0x1c4), Error::Unapproved(Unapproved::Changed)));
    assert!(matches!(approving(verify, 0x2db), Error::Unapproved(Unapproved::Damaged)));
    // Another parameter, and another command.
    assert!(matches!(approving(authorize, 0x4c4), Error::Refused { .. }));
    assert!(matches!(approving(verify, 0x1c4), Error::Refused { .. }));
}

#[test]
fn a_tpm_that_is_busy_is_asked_again_and_not_for_ever() {
    let mut tpm = Answers(vec![refusal(0x922), refusal(0x90a), refusal(0x101)]);
    let error = unseal(&mut tpm, None, b"test", &blob()).unwrap_err();
    assert!(matches!(error, Error::Refused { rc: 0x101, .. }), "{error:?}");
    let mut tpm = Answers(vec![refusal(0x922)]);
    assert!(unseal(&mut tpm, None, b"test", &blob()).unwrap_err().retriable());
}

#[test]
fn what_was_encrypted_for_one_purpose_does_not_open_for_another() {
    let sealed = encrypt(&[7; 32], [1; NONCE_LEN], b"one", b"secret").unwrap();
    assert_eq!(**decrypt(&[7; 32], &[1; NONCE_LEN], b"one", &sealed).unwrap(), *b"secret");
    for (key, nonce, purpose) in [
        ([8; 32], &[1; NONCE_LEN][..], &b"one"[..]),
        ([7; 32], &[1; 3], b"one"),
        ([7; 32], &[1; NONCE_LEN], b"two"),
    ] {
        assert!(matches!(decrypt(&key, nonce, purpose, &sealed), Err(Error::Mismatch)));
    }
}

proptest! {
    #[test]
    fn an_answer_of_arbitrary_bytes_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let whole = u32::try_from(bytes.len() + 10).unwrap().to_be_bytes();
        let framed = [&[0x80, 0x02][..], &whole, &[0; 4], &bytes].concat();
        for answer in [bytes, framed] {
            prop_assert!(unseal(&mut Answers(vec![answer]), None, b"test", &blob()).is_err());
        }
    }
}
