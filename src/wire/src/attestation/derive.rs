//! The cryptography that the TPM specification composes itself: KDFa, KDFe, and a parameter's
//! encryption in CFB mode.
//!
//! The sessions of a node with its TPM and the credentials of a verifier use the same ones.
//! Names are those of the specification, part 1, sections 11.4, 21 and 24.

use aes::Aes128;
use aes::cipher::{BlockCipherEncrypt as _, KeyInit as _};
use ring::agreement::{self, ECDH_P256, EphemeralPrivateKey, UnparsedPublicKey};
use ring::hmac;
use ring::rand::SystemRandom;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

/// Bytes of a SHA-256 digest, of a nonce, and of a coordinate of P-256.
pub const SIZE: usize = 32;

/// Bytes of a key of AES-128, and of its blocks.
pub const BLOCK: usize = 16;

/// X and Y of a point of P-256.
pub type Point = ([u8; SIZE], [u8; SIZE]);

/// The kernel gave no random bytes, or the TPM's key is not a point of its curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unusable;

/// A secret that the owner of a P-256 key can compute from our public half.
pub struct Shared {
    /// The public half of our key, which lived for this secret.
    pub ours: Point,
    /// The secret.
    pub secret: Zeroizing<[u8; SIZE]>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared(…)")
    }
}

impl Shared {
    /// Makes a secret for the owner of the key `theirs`: ECDH, then KDFe with this label.
    ///
    /// # Errors
    ///
    /// [`Unusable`].
    pub fn with(theirs: &Point, label: &[u8]) -> Result<Self, Unusable> {
        let unusable = |_unspecified| Unusable;
        let key =
            EphemeralPrivateKey::generate(&ECDH_P256, &SystemRandom::new()).map_err(unusable)?;
        let public = key.compute_public_key().map_err(unusable)?;
        let ours = coordinates(public.as_ref()).ok_or(Unusable)?;
        let peer = UnparsedPublicKey::new(&ECDH_P256, uncompressed(theirs));
        let secret = agreement::agree_ephemeral(key, &peer, |shared| {
            // KDFe: one block of SHA-256 is all that is needed.
            let hash = Sha256::new_with_prefix(1_u32.to_be_bytes())
                .chain_update(shared)
                .chain_update(label)
                .chain_update([0])
                .chain_update(ours.0)
                .chain_update(theirs.0);
            Zeroizing::new(hash.finalize().into())
        });
        Ok(Self { ours, secret: secret.map_err(unusable)? })
    }
}

/// A point as certificates and signature checks have it.
#[must_use]
pub fn uncompressed(point: &Point) -> Vec<u8> {
    [&[4][..], &point.0, &point.1].concat()
}

/// A coordinate as a TPM has it: some leave zeros away at the front.
#[must_use]
pub fn coordinate(bytes: &[u8]) -> Option<[u8; SIZE]> {
    let mut whole = [0; SIZE];
    let start = SIZE.checked_sub(bytes.len())?;
    whole[start..].copy_from_slice(bytes);
    Some(whole)
}

/// Splits an uncompressed point.
fn coordinates(point: &[u8]) -> Option<Point> {
    let (x, y) = point.strip_prefix(&[4])?.split_at_checked(SIZE)?;
    Some((x.try_into().ok()?, y.try_into().ok()?))
}

/// KDFa for as many bytes as one block of HMAC-SHA256 gives, at most.
#[must_use]
pub fn kdfa<const BYTES: usize>(
    key: &[u8],
    label: &[u8],
    first: &[u8],
    second: &[u8],
) -> Zeroizing<[u8; BYTES]> {
    const { assert!(BYTES <= SIZE, "one block is all that is computed") };
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    let mut context = hmac::Context::with_key(&key);
    let bits = u32::try_from(BYTES * 8).unwrap_or(u32::MAX).to_be_bytes();
    for part in [&1_u32.to_be_bytes()[..], label, &[0], first, second, &bits] {
        context.update(part);
    }
    let mut out = Zeroizing::new([0; BYTES]);
    out.copy_from_slice(&context.sign().as_ref()[..BYTES]);
    out
}

/// The direction of a cipher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From plain text.
    Encrypt,
    /// To plain text.
    Decrypt,
}

/// AES-128 in CFB mode, whose last block may be cut.
pub fn cfb(key: &[u8; BLOCK], vector: [u8; BLOCK], data: &mut [u8], direction: Direction) {
    let cipher = Aes128::new(key.into());
    let mut block = vector.into();
    for chunk in data.chunks_mut(BLOCK) {
        cipher.encrypt_block(&mut block);
        for (mask, byte) in block.iter_mut().zip(chunk) {
            let given = *byte;
            *byte ^= *mask;
            *mask = if direction == Direction::Encrypt { *byte } else { given };
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
        let key = hex("2b7e151628aed2a6abf7158809cf4f3c").try_into().unwrap();
        let vector = hex("000102030405060708090a0b0c0d0e0f").try_into().unwrap();
        let plain = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        let coded = hex("3b3fd92eb72dad20333449f8e83cfb4ac8a64537a0b3a93fcde3cdad9f1ce58b");
        // The whole, and a last block that is cut.
        for length in [32, 19] {
            let mut data = plain[..length].to_vec();
            cfb(&key, vector, &mut data, Direction::Encrypt);
            assert_eq!(data, coded[..length]);
            cfb(&key, vector, &mut data, Direction::Decrypt);
            assert_eq!(data, plain[..length]);
        }
    }

    #[test]
    fn two_secrets_for_one_key_differ() {
        let key = Shared::with(&base(), b"TEST").unwrap();
        let again = Shared::with(&base(), b"TEST").unwrap();
        assert!(key.secret != again.secret && key.ours != again.ours);
        assert_eq!(Shared::with(&([1; SIZE], [1; SIZE]), b"TEST").err(), Some(Unusable));
    }

    /// The base point of the curve.
    fn base() -> Point {
        let x = hex("6b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296");
        let y = hex("4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5");
        (x.try_into().unwrap(), y.try_into().unwrap())
    }
}
