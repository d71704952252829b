//! What a folder of keys has, for a person.

use std::path::{Path, PathBuf};

use polis_base::hex;

use super::files::{private_file, public_file, public_half, signer};
use crate::signing::{Error, Purpose, hash};

/// The files of one key in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Its purpose.
    pub purpose: Purpose,
    /// The file of the public half.
    pub file: PathBuf,
    /// The name in the certificate, or the algorithm of a bare key.
    pub name: String,
    /// SHA-256 of the certificate, or of the bare key with its algorithm.
    pub fingerprint: String,
    /// Whether the private half is in the folder, too.
    pub private: Private,
}

/// Whether a private half is in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Private {
    /// It is.
    Here,
    /// It is kept elsewhere.
    Elsewhere,
}

/// Lists the keys of a folder. Needs no passphrase.
///
/// # Errors
///
/// A public half is missing or malformed.
pub fn show(folder: &Path) -> Result<Vec<Shown>, Error> {
    let one = |purpose: Purpose| {
        let der = public_half(folder, purpose)?;
        let file = folder.join(public_file(purpose));
        let (name, fingerprint) = if purpose.certified() {
            let signer = signer(folder, purpose)?;
            (signer.subject(), signer.fingerprint())
        } else if purpose == Purpose::Release {
            // The last 32 bytes are the key itself, which nodes receive.
            let raw = der.len().checked_sub(32).map_or(&[][..], |from| &der[from..]);
            (format!("Ed25519 {}", hex::encode(raw)), hash(&der))
        } else {
            ("RSA-2048".to_owned(), hash(&der))
        };
        let private = folder.join(private_file(purpose));
        let private = if private.exists() { Private::Here } else { Private::Elsewhere };
        Ok(Shown { purpose, file, name, fingerprint, private })
    };
    Purpose::ALL.into_iter().map(one).collect()
}
