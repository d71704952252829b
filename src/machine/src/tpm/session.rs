//! The encrypted session with the TPM: encrypts commands and answers, so that an
//! eavesdropper on the bus learns nothing.
//!
//! A session is *salted*: its key is made of a secret that only the TPM's storage
//! root key can decrypt. From then on each command and each answer carries a HMAC,
//! and the first parameter of either may be encrypted with AES-128 in CFB mode.
//!
//! ```text
//! ephemeral P-256 key -ECDH with the root key-> Z -KDFe-> salt -KDFa-> session key
//! session key + both nonces of the moment -KDFa-> key and vector of one parameter
//! ```
//!
//! Names are those of the specification, part 1, sections 11.4, 19 and 21.

use aes::Aes128;
use aes::cipher::{BlockCipherEncrypt as _, KeyInit as _};
use ring::agreement::{self, ECDH_P256, EphemeralPrivateKey, UnparsedPublicKey};
use ring::hmac;
use ring::rand::SystemRandom;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

/// Bytes of a SHA-256 digest, of a nonce, and of a coordinate of P-256.
pub(super) const SIZE: usize = 32;

/// The session goes on after the command.
pub(super) const CONTINUE: u8 = 1;
/// The TPM decrypts the first parameter of the command.
pub(super) const DECRYPT: u8 = 0x20;
/// The TPM encrypts the first parameter of its answer.
pub(super) const ENCRYPT: u8 = 0x40;

/// The kernel gave no random bytes, or the TPM's key is not a point of its curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unusable;

/// A key of ours that lives for one session, and the salt that it makes.
pub(super) struct Salt {
    /// X and Y of the public half, for the TPM.
    pub(super) point: ([u8; SIZE], [u8; SIZE]),
    secret: Zeroizing<[u8; SIZE]>,
}

impl Salt {
    /// Makes a salt for the owner of the root key at `(x, y)`.
    pub(super) fn for_root(root: &([u8; SIZE], [u8; SIZE])) -> Result<Self, Unusable> {
        let unusable = |_unspecified| Unusable;
        let ours =
            EphemeralPrivateKey::generate(&ECDH_P256, &SystemRandom::new()).map_err(unusable)?;
        let public = ours.compute_public_key().map_err(unusable)?;
        let point = coordinates(public.as_ref()).ok_or(Unusable)?;
        let theirs = [&[4][..], &root.0, &root.1].concat();
        let theirs = UnparsedPublicKey::new(&ECDH_P256, theirs);
        let secret = agreement::agree_ephemeral(ours, &theirs, |shared| {
            // KDFe: one block of SHA-256 is all that is needed.
            let hash = Sha256::new_with_prefix(1_u32.to_be_bytes())
                .chain_update(shared)
                .chain_update(b"SECRET\0")
                .chain_update(point.0)
                .chain_update(root.0);
            Zeroizing::new(hash.finalize().into())
        });
        Ok(Self { point, secret: secret.map_err(unusable)? })
    }
}

/// Splits an uncompressed point.
fn coordinates(point: &[u8]) -> Option<([u8; SIZE], [u8; SIZE])> {
    let (x, y) = point.strip_prefix(&[4])?.split_at_checked(SIZE)?;
    Some((x.try_into().ok()?, y.try_into().ok()?))
}

/// A session that is under way.
pub(super) struct Session {
    pub(super) handle: u32,
    key: Zeroizing<Vec<u8>>,
    ours: [u8; SIZE],
    theirs: Vec<u8>,
}

impl Session {
    /// After the TPM answered with its handle and nonce; without a salt the
    /// session has no key, and can prove and hide nothing.
    pub(super) fn new(handle: u32, salt: Option<&Salt>, ours: [u8; SIZE], theirs: Vec<u8>) -> Self {
        let key = salt.map(|salt| kdfa(&*salt.secret, b"ATH", &theirs, &ours));
        let key = key.map_or_else(Zeroizing::default, |key| Zeroizing::new(key.to_vec()));
        Self { handle, key, ours, theirs }
    }

    /// Begins a command: a nonce is used once.
    pub(super) fn turn(&mut self, nonce: [u8; SIZE]) -> [u8; SIZE] {
        self.ours = nonce;
        nonce
    }

    /// Encrypts the first parameter of the command.
    pub(super) fn encrypt(&self, parameter: &mut [u8]) {
        cfb(&kdfa(&self.key, b"CFB", &self.ours, &self.theirs), parameter, Way::Encrypt);
    }

    /// Proves that the command with this hash is ours.
    pub(super) fn prove(&self, hash: &[u8], attributes: u8) -> [u8; SIZE] {
        let mut out = [0; SIZE];
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key);
        let message = [hash, &self.ours, &self.theirs, &[attributes]].concat();
        out.copy_from_slice(hmac::sign(&key, &message).as_ref());
        out
    }

    /// Takes the TPM's new nonce, and returns whether the answer with this hash is the
    /// TPM's.
    pub(super) fn check(
        &mut self,
        nonce: &[u8],
        hash: &[u8],
        attributes: u8,
        proof: &[u8],
    ) -> bool {
        self.theirs = nonce.to_vec();
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key);
        let message = [hash, &self.theirs, &self.ours, &[attributes]].concat();
        hmac::verify(&key, &message, proof).is_ok()
    }

    /// Decrypts the first parameter of the answer that was just checked.
    pub(super) fn decrypt(&self, parameter: &mut [u8]) {
        cfb(&kdfa(&self.key, b"CFB", &self.theirs, &self.ours), parameter, Way::Decrypt);
    }
}

/// The key derivation of sessions: 256 bits, so one block of HMAC-SHA256.
fn kdfa(key: &[u8], label: &[u8], newer: &[u8], older: &[u8]) -> Zeroizing<[u8; SIZE]> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    let mut context = hmac::Context::with_key(&key);
    let bits = 256_u32.to_be_bytes();
    for part in [&1_u32.to_be_bytes()[..], label, &[0], newer, older, &bits] {
        context.update(part);
    }
    let mut out = Zeroizing::new([0; SIZE]);
    out.copy_from_slice(context.sign().as_ref());
    out
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Encrypt,
    Decrypt,
}

/// AES-128 in CFB mode over whole blocks; `material` is key and vector.
fn cfb(material: &[u8; SIZE], data: &mut [u8], way: Way) {
    let (key, vector) = material.split_at(SIZE / 2);
    let (Ok(cipher), Ok(mut block)) = (Aes128::new_from_slice(key), vector.try_into()) else {
        unreachable!("half of 32 bytes are 16")
    };
    for chunk in data.chunks_mut(SIZE / 2) {
        cipher.encrypt_block(&mut block);
        for (mask, byte) in block.iter_mut().zip(chunk) {
            let given = *byte;
            *byte ^= *mask;
            *mask = if way == Way::Encrypt { *byte } else { given };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        polis_base::hex::decode(text).unwrap()
    }

    #[test]
    fn cfb_is_that_of_the_published_vectors() {
        // NIST SP 800-38A, F.3.13, the first two blocks.
        let material = hex("2b7e151628aed2a6abf7158809cf4f3c000102030405060708090a0b0c0d0e0f");
        let material: [u8; SIZE] = material.try_into().unwrap();
        let plain = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        let mut data = plain.clone();
        cfb(&material, &mut data, Way::Encrypt);
        assert_eq!(data, hex("3b3fd92eb72dad20333449f8e83cfb4ac8a64537a0b3a93fcde3cdad9f1ce58b"));
        cfb(&material, &mut data, Way::Decrypt);
        assert_eq!(data, plain);
    }

    #[test]
    fn a_tampered_answer_is_detected() {
        let salt = Salt { point: ([0; SIZE], [0; SIZE]), secret: Zeroizing::new([7; SIZE]) };
        let session = || Session::new(1, Some(&salt), [1; SIZE], vec![2; SIZE]);
        // The computation of the TPM, from its side: its nonce is the newer one.
        let tpm = Session::new(1, Some(&salt), [1; SIZE], vec![2; SIZE]);
        let tpm = Session { ours: [3; SIZE], theirs: vec![1; SIZE], ..tpm };
        let proof = tpm.prove(b"hash", CONTINUE);
        assert!(session().check(&[3; SIZE], b"hash", CONTINUE, &proof));
        assert!(!session().check(&[3; SIZE], b"hush", CONTINUE, &proof));
        assert!(!session().check(&[4; SIZE], b"hash", CONTINUE, &proof));
        assert!(!session().check(&[3; SIZE], b"hash", 0, &proof));
    }
}
