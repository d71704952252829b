//! The signed measurements of the running system: the policy that its owner's policy key
//! approved, as the image has it (`polis_image::signing`) and stage 1 of `init` hands it on.
//!
//! ```text
//! tpm2-pcr-public-key.pem   the key: RSA-2048, exponent 65537
//! tpm2-pcr-signature.json   {"sha256":[{"pcrs":[11],"pkfp":..,"pol":..,"sig":..}]}
//! ```
//!
//! The format is that of `systemd-measure sign`. The TPM verifies the signature and compares the
//! policy with its register 11: a forged file opens nothing.
//!
//! What this module does not do: talk to the TPM (`command`).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use base64ct::{Base64, Encoding as _};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use polis_base::{extra, hex};
use polis_wire::attestation::format::Writer;
use polis_wire::attestation::name;

/// The register of the image's sections.
pub(super) const SECTIONS: u32 = 11;

/// Bytes of the modulus.
const MODULUS: usize = 256;
/// What comes before and behind the modulus in a public key of RSA-2048 with the exponent 65537
/// in DER, which has one spelling (RFC 5280, `SubjectPublicKeyInfo`).
const BEFORE: [u8; 33] = [
    0x30, 0x82, 0x01, 0x22, 0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01,
    0x01, 0x05, 0x00, 0x03, 0x82, 0x01, 0x0f, 0x00, 0x30, 0x82, 0x01, 0x0a, 0x02, 0x82, 0x01, 0x01,
    0x00,
];
const BEHIND: [u8; 5] = [0x02, 0x03, 0x01, 0x00, 0x01];
const PEM: [&str; 2] = ["-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"];

const ALG_RSA: u16 = 0x0001;
const ALG_SHA256: u16 = 0x000b;
const ALG_NULL: u16 = 0x0010;
/// A key that verifies signatures, and comes from outside.
const ATTRIBUTES: u32 = 0x0004_0040;

/// Why the signed measurements cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// A file exists and cannot be read.
    #[error("cannot read {path}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The content of a file.
    #[error("{file} is invalid: {reason}")]
    Invalid {
        /// The file's name.
        file: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// The signed measurements of one system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedSystem {
    /// The digest of the policy that holds after a start of the system.
    pub(super) policy: [u8; 32],
    /// The signature of `policy`: RSASSA-PKCS1-v1_5 with SHA-256.
    pub(super) signature: Vec<u8>,
    /// The public area of the key, for a TPM.
    pub(super) key: Vec<u8>,
}

#[derive(Deserialize)]
struct Banks {
    #[serde(default)]
    sha256: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    pcrs: Vec<u32>,
    pkfp: String,
    pol: String,
    sig: String,
}

impl SignedSystem {
    /// Reads what `init` handed on in `directory`, usually [`extra::DIRECTORY`]; `None` for a
    /// system without signed measurements. Blocks.
    ///
    /// # Errors
    ///
    /// [`Unreadable`].
    pub fn load(directory: &Path) -> Result<Option<Self>, Unreadable> {
        let signature = content(directory, extra::SIGNATURE)?;
        let key = content(directory, extra::PUBLIC_KEY)?;
        signature.zip(key).map(|(signature, key)| Self::read(&signature, &key)).transpose()
    }

    /// Reads the two files from their content.
    ///
    /// # Errors
    ///
    /// [`Unreadable::Invalid`].
    pub fn read(signature: &[u8], key: &[u8]) -> Result<Self, Unreadable> {
        let bad_key = |reason| Unreadable::Invalid { file: extra::PUBLIC_KEY, reason };
        let der = pem(key).ok_or(bad_key("it is not a public key in PEM"))?;
        let modulus = der.strip_prefix(&BEFORE).and_then(|der| der.strip_suffix(&BEHIND));
        let modulus = modulus.filter(|modulus| modulus.len() == MODULUS);
        let modulus =
            modulus.ok_or(bad_key("it is not a key of RSA-2048 with the exponent 65537"))?;

        let bad = |reason| Unreadable::Invalid { file: extra::SIGNATURE, reason };
        let banks: Banks = serde_json::from_slice(signature)
            .map_err(|_error| bad("it is not the JSON of signed measurements"))?;
        let fingerprint = hex::encode(&Sha256::digest(&der));
        let entry = banks.sha256.into_iter().find(|entry| {
            entry.pcrs == [SECTIONS] && entry.pkfp.eq_ignore_ascii_case(&fingerprint)
        });
        let entry = entry.ok_or(bad("it has no entry of this key for register 11"))?;
        let policy = hex::decode(&entry.pol).and_then(|policy| policy.try_into().ok());
        let policy = policy.ok_or(bad("pol is not a SHA-256 digest in hexadecimal"))?;
        let signature = Base64::decode_vec(&entry.sig).ok();
        let signature = signature.filter(|signature| signature.len() == MODULUS);
        let signature = signature.ok_or(bad("sig is not a signature of RSA-2048 in base64"))?;
        Ok(Self { policy, signature, key: public(modulus) })
    }

    /// The name that TPMs have for the key: what a blob is sealed to.
    #[must_use]
    pub fn signer(&self) -> Vec<u8> {
        name(&self.key)
    }
}

/// `TPMT_PUBLIC` of the key. Its name follows from each field: a change locks disks.
fn public(modulus: &[u8]) -> Vec<u8> {
    Writer::default()
        .u16(ALG_RSA)
        .u16(ALG_SHA256)
        .u32(ATTRIBUTES)
        .sized(&[])
        .u16(ALG_NULL)
        .u16(ALG_NULL)
        .u16(2048)
        // The default: 65537.
        .u32(0)
        .sized(modulus)
        .done()
}

/// The bytes in a PEM of a public key.
fn pem(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?.trim();
    let [begin, end] = PEM;
    let body = text.strip_prefix(begin)?.strip_suffix(end)?;
    let digits: String = body.split_ascii_whitespace().collect();
    Base64::decode_vec(&digits).ok()
}

/// The content of a file that may be absent.
fn content(directory: &Path, name: &'static str) -> Result<Option<Vec<u8>>, Unreadable> {
    let path = directory.join(name);
    let mut bytes = Vec::new();
    let read =
        File::open(&path).and_then(|file| file.take(extra::SIZE_MAX + 1).read_to_end(&mut bytes));
    match read {
        Ok(length) if length as u64 > extra::SIZE_MAX => {
            Err(Unreadable::Invalid { file: name, reason: "it is too long" })
        }
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Unreadable::File { path, source }),
    }
}

#[cfg(test)]
#[path = "signed_tests.rs"]
mod tests;
