//! Signing: the keys of an owner, and what they sign.
//!
//! ```text
//! platform (PK) --signs--> KEK.auth   \
//! exchange (KEK) --signs--> db.auth    | the machine's firmware takes these once
//! platform (PK) --signs--> PK.auth    /
//! exchange (KEK) --signs--> dbx.auth: programs that were signed and are revoked
//! signature (db) --signs--> systemd-boot, unified kernel image
//! policy    --signs--> the measurements of the kernel image, which open a disk
//! release   --signs--> update bundles
//! ```
//!
//! The enrolment files are made together with the keys and are public, so a build opens the
//! private halves of the signature and the policy key alone; the platform and the exchange key
//! may be kept where no build host reaches them.
//!
//! Invariants:
//! - RSA signatures are PKCS #1 1.5 and have no time in them: the same inputs and the same
//!   keys give the same bytes.
//! - Private keys are written encrypted, and no type of this module prints one.
//!
//! What this module does not do: keep keys in a PKCS #11 token.

mod authenticode;
mod folder;
mod identity;
mod policy;
mod revocation;
mod signed_data;
mod variables;

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use polis_base::hex;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

pub use self::authenticode::Fault;
pub(crate) use self::authenticode::{claimed, hash as authenticode_hash, verify};
#[cfg(test)]
pub(crate) use self::folder::tests::{keys, other_keys};
pub use self::folder::{
    ImageSigner, Keys, Private, ReleaseKey, Shown, ensure_free, revoke, revoked, show,
};
pub(crate) use self::identity::Signer;

/// Far above the length of a typed passphrase.
const PASSPHRASE_MAX: usize = 1024;

/// The purpose of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// UEFI's PK: signs changes of the key-exchange keys.
    Platform,
    /// UEFI's KEK: signs changes of the lists of signers.
    Exchange,
    /// UEFI's db: signs the programs that the firmware starts.
    Signature,
    /// Signs the measurements that open a disk.
    Policy,
    /// Signs the updates that a cluster takes.
    Release,
}

impl Purpose {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Self; 5] =
        [Self::Platform, Self::Exchange, Self::Signature, Self::Policy, Self::Release];

    /// The word in names of files.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Platform => "platform",
            Self::Exchange => "exchange",
            Self::Signature => "signature",
            Self::Policy => "policy",
            Self::Release => "release",
        }
    }

    /// Whether firmware knows the key, as a certificate; the others are plain public keys.
    #[must_use]
    pub(crate) fn certified(self) -> bool {
        matches!(self, Self::Platform | Self::Exchange | Self::Signature)
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// The passphrase of a folder of keys.
pub struct Passphrase(Zeroizing<String>);

impl Passphrase {
    /// Takes what was typed or read.
    ///
    /// # Errors
    ///
    /// It is empty, or longer than anyone types.
    pub fn new(text: Zeroizing<String>) -> Result<Self, Error> {
        match text.len() {
            1..=PASSPHRASE_MAX => Ok(Self(text)),
            length => Err(Error::Length { length }),
        }
    }

    fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase(…)")
    }
}

/// Why something could not be signed, or a key not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The place for new keys has something else, or keys.
    #[error("{path} is not an empty folder; keys are never overwritten", path = path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
    },
    /// A file or folder could not be used.
    #[error("cannot {what} {path}", path = path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// Its object.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A private key that others may read.
    #[error("{path} has mode {mode:04o}: others may read this key", path = path.display())]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A passphrase of a wrong length.
    #[error("a passphrase has 1 to {PASSPHRASE_MAX} bytes, not {length}")]
    Length {
        /// Its length.
        length: usize,
    },
    /// The passphrase is wrong, or the file is damaged: the two look alike.
    #[error("cannot decrypt {path} with this passphrase", path = path.display())]
    Passphrase {
        /// The private key.
        path: PathBuf,
    },
    /// A file of the folder is not what its name says.
    #[error("{path} is not a valid {expected}: {reason}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
        /// The fault.
        reason: String,
    },
    /// A private key does not belong to the public half beside it.
    #[error("{path} is not the private half of the key beside it", path = path.display())]
    Mismatch {
        /// The private key.
        path: PathBuf,
    },
    /// A key could not be made.
    #[error("cannot make a key: {reason}")]
    Generate {
        /// The fault.
        reason: String,
    },
    /// A signature could not be made.
    #[error("cannot make a signature: {reason}")]
    Sign {
        /// The fault.
        reason: String,
    },
    /// A program that cannot be signed.
    #[error("cannot sign {name}")]
    Program {
        /// The program.
        name: String,
        /// The fault.
        source: Fault,
    },
    /// A program that firmware with these keys would refuse.
    #[error("cannot sign {name}: it was revoked")]
    Revoked {
        /// The program.
        name: String,
    },
}

impl Error {
    /// The next step for the operator.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        Some(match self {
            Self::Taken { .. } => {
                "name an empty one, or one that does not exist; keys in it can be used as they are"
                    .to_owned()
            }
            Self::File { what: "read", path, source }
                if source.kind() == io::ErrorKind::NotFound =>
            {
                missing(path)
            }
            Self::Mode { path, .. } => format!("chmod 600 {}", path.display()),
            Self::Length { .. } => {
                "type another one, or make it the first line of the file of --passphrase-file"
                    .to_owned()
            }
            Self::Passphrase { .. } => {
                "try again; without the passphrase the key is lost".to_owned()
            }
            Self::Revoked { .. } => {
                "build another version; `dbx.auth` in the folder of keys has what was revoked"
                    .to_owned()
            }
            Self::Malformed { .. } | Self::Mismatch { .. } => {
                "take the folder from a backup, as a whole".to_owned()
            }
            _ => return None,
        })
    }
}

/// The remedy for a file that the folder lacks.
fn missing(path: &Path) -> String {
    let folder = path.parent().unwrap_or(path);
    let is_there = |purpose: Purpose| folder.join(folder::public_file(purpose)).exists();
    if !Purpose::ALL.into_iter().any(is_there) {
        return format!(
            "{} is not a folder of keys; `cargo xtask keys create DIR` makes keys in a new folder",
            folder.display()
        );
    }
    if path.extension().is_some_and(|kind| kind == "key") {
        return format!(
            "`cargo xtask keys show {}` lists what the folder has; the private halves that it \
             lacks are in your backup",
            folder.display()
        );
    }
    "take the folder from a backup, as a whole".to_owned()
}

/// SHA-256 as digits: the fingerprint of a key.
fn hash(bytes: &[u8]) -> String {
    hex::encode(&Sha256::digest(bytes))
}

/// An error of the DER encoder, or of a key, while something is signed.
fn sign(error: impl fmt::Display) -> Error {
    Error::Sign { reason: error.to_string() }
}
