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

use ring::hmac;
use zeroize::Zeroizing;

use polis_wire::attestation::derive::{BLOCK, Direction, Point, Shared, cfb, kdfa};
pub(super) use polis_wire::attestation::derive::{SIZE, Unusable};

/// The session goes on after the command.
pub(super) const CONTINUE: u8 = 1;
/// The TPM decrypts the first parameter of the command.
pub(super) const DECRYPT: u8 = 0x20;
/// The TPM encrypts the first parameter of its answer.
pub(super) const ENCRYPT: u8 = 0x40;

/// A key of ours that lives for one session, and the salt that it makes.
pub(super) struct Salt {
    /// X and Y of the public half, for the TPM.
    pub(super) point: Point,
    secret: Zeroizing<[u8; SIZE]>,
}

impl Salt {
    /// Makes a salt for the owner of the root key at `(x, y)`.
    pub(super) fn for_root(root: &Point) -> Result<Self, Unusable> {
        let Shared { ours, secret } = Shared::with(root, b"SECRET")?;
        Ok(Self { point: ours, secret })
    }
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
        let key = salt.map(|salt| kdfa::<SIZE>(&*salt.secret, b"ATH", &theirs, &ours));
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
        self::parameter(
            &kdfa(&self.key, b"CFB", &self.ours, &self.theirs),
            parameter,
            Direction::Encrypt,
        );
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
        self::parameter(
            &kdfa(&self.key, b"CFB", &self.theirs, &self.ours),
            parameter,
            Direction::Decrypt,
        );
    }
}

/// Encrypts or decrypts a parameter: `material` is key and vector.
fn parameter(material: &[u8; SIZE], data: &mut [u8], direction: Direction) {
    let (Some(key), Some(vector)) = (material.first_chunk::<BLOCK>(), material.last_chunk()) else {
        unreachable!("32 bytes are two blocks")
    };
    cfb(key, *vector, data, direction);
}

#[cfg(test)]
mod tests {
    use super::*;

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
