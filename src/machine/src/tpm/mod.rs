//! The machine's TPM 2.0: keeps secrets that only this machine, started as it was, gets
//! back, and proves to others what it was started with ([`keys`], [`prove`]).
//!
//! The cluster manager seals its node's half of the disk's key. The sealed data may
//! have any length: a random key goes into the TPM, and encrypts the rest.
//!
//! ```text
//! seal:    key  --TPM, under a policy of registers--> public, private
//!          secret --ChaCha20-Poly1305 by the key----> nonce, ciphertext
//! unseal:  is it this TPM? -> load -> policy -> key -> secret
//!             | no             | no     | no
//!          Cleared          Cleared   Changed
//! ```
//!
//! The policy may also demand that the running system is one that its owner's policy key signed
//! ([`SignedSystem`]): then each of them opens the blob, and no other.
//!
//! ```text
//! LoadExternal(key), VerifySignature -> ticket
//! PolicyPCR(11), PolicyAuthorize(key, ticket), PolicyPCR(registers)
//!                     | register 11 is not as signed: Unapproved
//! ```
//!
//! A policy session that has named registers ends when any register is extended, also one that
//! the policy does not name (`TPM_RC_PCR_CHANGED`). The kernel extends register 10 for each
//! module that it loads while Secure Boot is on, so such a session is started again, a bounded
//! number of times.
//!
//! Each secret crosses the bus encrypted, see [`session`]; the name of its root key,
//! which the blob has, exposes an attacker who could also answer in the TPM's name.
//!
//! Invariants:
//! - The causes of a refusal are distinguished, since each has another next step.
//! - Nothing is written into the TPM: blobs are kept outside.
//!
//! What this module does not do: measure anything, or choose the secrets to seal.

mod command;
mod device;
mod proof;
mod session;
mod signed;

use std::io;
use std::time::Duration;

use ring::aead::{self, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use zeroize::Zeroizing;

use self::command::{Approval, Terms, Tpm};
pub use self::device::Device;
pub use self::proof::{keys, prove};
pub use self::signed::{SignedSystem, Unreadable};

/// The lengths that a blob's parts may have. Those of a TPM are some hundred bytes.
const PART_MAX: usize = 1024;

/// Carries a command to a TPM and the answer back.
pub trait Transport {
    /// Sends a whole command, receives a whole answer.
    ///
    /// # Errors
    ///
    /// An error of the kernel.
    fn transmit(&mut self, command: &[u8]) -> io::Result<Vec<u8>>;

    /// Waits until the TPM may be less busy.
    fn wait(&mut self, time: Duration);
}

/// Why a TPM does not seal or unseal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine has no TPM 2.0, or it is switched off.
    #[error("this machine has no TPM 2.0")]
    Absent,
    /// The TPM is another one, or somebody cleared it.
    #[error("another TPM sealed this, or the TPM was cleared since")]
    Cleared,
    /// The machine was started otherwise than when the secret was sealed.
    #[error(
        "the machine started differently than when this was sealed: one of the TPM's registers \
         {0:?} has changed"
    )]
    Changed(Vec<u32>),
    /// Registers were extended during each of many attempts.
    #[error("the machine extends the TPM's registers all the time, so that no policy holds")]
    Measured,
    /// The running system is not one that the policy key of the blob signed.
    #[error("the key of the disk opens for systems that its owner's policy key signed")]
    Unapproved(#[source] Unapproved),
    /// The command or the answer got lost; another attempt may do better.
    #[error("cannot speak to the TPM")]
    Transport(#[source] io::Error),
    /// The TPM does not support the request.
    #[error("the TPM refuses {command} with code {rc:#x}")]
    Refused {
        /// Its name in the specification.
        command: &'static str,
        /// The TPM's answer.
        rc: u32,
    },
    /// The answer makes no sense.
    #[error("the TPM's answer is invalid: {0}")]
    Malformed(&'static str),
    /// Somebody between this machine's processor and its TPM changed the answer.
    #[error("the answer to {0} is not from the TPM: the bus is tampered with")]
    Forged(&'static str),
    /// The TPM does not make a session that is safe from eavesdropping.
    #[error("cannot start a session with the TPM")]
    Session,
    /// The TPM has the registers, and no values of them in SHA-256.
    #[error(
        "the TPM keeps no SHA-256 values of its registers: switch its SHA-256 bank on in the \
         firmware's setup"
    )]
    NoBank,
    /// A blob names a register that no TPM has.
    #[error("a TPM has no register {0}")]
    Register(u32),
    /// The key came out of the TPM, and does not open the data that it should have
    /// encrypted.
    #[error("the TPM's sealed secret does not match the stored share")]
    Mismatch,
    /// Somebody made a credential for another TPM, or for another key.
    #[error("the credential is not for the keys of this TPM")]
    Credential,
}

impl Error {
    /// Whether the same call may succeed if it is made again.
    #[must_use]
    pub fn retriable(&self) -> bool {
        matches!(self, Self::Transport(_) | Self::Measured)
    }
}

/// Why a system is not one that a policy key signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unapproved {
    /// It has no signed measurements.
    #[error("this system has no signed measurements")]
    Unsigned,
    /// Another key signed it.
    #[error("the policy key of another owner signed this system")]
    OtherKey,
    /// Its register 11 is not the signed one.
    #[error(
        "this system, or its command line, is not the one that was signed: register 11 differs"
    )]
    Changed,
    /// The signature is not of the key beside it.
    #[error("the signature of this system's measurements is damaged")]
    Damaged,
}

/// The data that a TPM sealed. Of no use without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The public part of the sealed key.
    pub public: Vec<u8>,
    /// The private part, which only the TPM can read.
    pub private: Vec<u8>,
    /// The name of the TPM's root key.
    pub root: Vec<u8>,
    /// The registers of the policy; empty: the TPM opens it whatever they have.
    pub pcrs: Vec<u32>,
    /// The name of the policy key whose systems open it; empty: every system does.
    pub signer: Vec<u8>,
    /// Of the ciphertext.
    pub nonce: Vec<u8>,
    /// The data that the sealed key encrypts.
    pub ciphertext: Vec<u8>,
}

/// Seals `secret` to the registers `pcrs` as they are now; without any, this TPM opens it
/// whatever the machine was started with. With `system`, which has to be the running one, only
/// systems of the same policy key open it. `purpose` is asked for again when it is unsealed: one
/// blob is never taken for another.
///
/// # Errors
///
/// [`Error`].
pub fn seal(
    transport: &mut (impl Transport + ?Sized),
    system: Option<&SignedSystem>,
    pcrs: &[u32],
    purpose: &[u8],
    secret: &[u8],
) -> Result<Blob, Error> {
    let mut key = Zeroizing::new([0; 32]);
    let mut nonce = [0; NONCE_LEN];
    let random = SystemRandom::new();
    random.fill(&mut *key).map_err(|_unspecified| Error::Session)?;
    random.fill(&mut nonce).map_err(|_unspecified| Error::Session)?;

    let mut tpm = Tpm(transport);
    let approval = system.map(|system| tpm.approve(system)).transpose()?;
    let terms = Terms { approval: approval.as_ref(), pcrs };
    let root = tpm.root()?;
    let made = tpm.policy(terms).and_then(|policy| tpm.create(&root, &policy, &*key));
    tpm.flush(root.object.handle);
    let (public, private) = made?;
    Ok(Blob {
        public,
        private,
        root: root.object.name,
        pcrs: pcrs.to_vec(),
        signer: approval.map(|approval| approval.signer).unwrap_or_default(),
        nonce: nonce.to_vec(),
        ciphertext: encrypt(&key, nonce, purpose, secret)?,
    })
}

/// Opens what [`seal`] made; `system` is the running one, where it is signed.
///
/// # Errors
///
/// [`Error::Cleared`], [`Error::Changed`], [`Error::Unapproved`], or what stands between.
pub fn unseal(
    transport: &mut (impl Transport + ?Sized),
    system: Option<&SignedSystem>,
    purpose: &[u8],
    blob: &Blob,
) -> Result<Zeroizing<Vec<u8>>, Error> {
    if blob.public.len().max(blob.private.len()) > PART_MAX {
        return Err(Error::Mismatch);
    }
    let mut tpm = Tpm(transport);
    let root = tpm.root()?;
    let opened = if root.object.name == blob.root {
        approved(&mut tpm, system, blob).and_then(|approval| {
            let terms = Terms { approval: approval.as_ref(), pcrs: &blob.pcrs };
            let object = tpm.load(&root, &blob.public, &blob.private).map_err(loading)?;
            let opened = tpm.unseal(&root, &object, terms);
            tpm.flush(object.handle);
            opened.map_err(|error| opening(error, &blob.pcrs))
        })
    } else {
        Err(Error::Cleared)
    };
    tpm.flush(root.object.handle);
    let key = opened?.as_slice().try_into().map(Zeroizing::new);
    let key = key.map_err(|_length| Error::Mismatch)?;
    decrypt(&key, &blob.nonce, purpose, &blob.ciphertext)
}

/// Fails unless the TPM agrees that this system, which it was started with, is one of its key.
///
/// # Errors
///
/// [`Error::Unapproved`], or what stands between.
pub fn confirm(
    transport: &mut (impl Transport + ?Sized),
    system: &SignedSystem,
) -> Result<(), Error> {
    let mut tpm = Tpm(transport);
    let approval = tpm.approve(system)?;
    tpm.policy(Terms { approval: Some(&approval), pcrs: &[] }).map(drop)
}

/// What the policy of a blob needs of the running system.
fn approved<T: Transport + ?Sized>(
    tpm: &mut Tpm<'_, T>,
    system: Option<&SignedSystem>,
    blob: &Blob,
) -> Result<Option<Approval>, Error> {
    if blob.signer.is_empty() {
        return Ok(None);
    }
    let system = system.ok_or(Error::Unapproved(Unapproved::Unsigned))?;
    if system.signer() != blob.signer {
        return Err(Error::Unapproved(Unapproved::OtherKey));
    }
    tpm.approve(system).map(Some)
}

/// A blob whose root key is there and that cannot be loaded is not that TPM's.
fn loading(error: Error) -> Error {
    match error {
        // The answer refers to a parameter: its first, the private part.
        Error::Refused { rc, .. } if rc & 0xc0 == 0xc0 => Error::Cleared,
        other => other,
    }
}

/// A policy that does not hold.
fn opening(error: Error, pcrs: &[u32]) -> Error {
    /// `TPM_RC_POLICY_FAIL`, for any session.
    const POLICY_FAIL: u32 = 0x09d;
    match error {
        Error::Refused { rc, .. } if rc & 0xff == POLICY_FAIL => Error::Changed(pcrs.to_vec()),
        other => other,
    }
}

/// Encrypts with a key that is used once.
///
/// # Errors
///
/// [`Error::Session`], which `secret`s that fit into memory never cause.
pub fn encrypt(
    key: &[u8; 32],
    nonce: [u8; NONCE_LEN],
    purpose: &[u8],
    secret: &[u8],
) -> Result<Vec<u8>, Error> {
    // Room for the tag: a vector that grows leaves a copy, which is not wiped.
    let mut sealed = Vec::with_capacity(secret.len() + CHACHA20_POLY1305.tag_len());
    sealed.extend(secret);
    cipher(key)?
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(purpose),
            &mut sealed,
        )
        .map_err(|_unspecified| Error::Session)?;
    Ok(sealed)
}

/// Opens what [`encrypt`] made.
///
/// # Errors
///
/// [`Error::Mismatch`] for another key, nonce, purpose or text.
pub fn decrypt(
    key: &[u8; 32],
    nonce: &[u8],
    purpose: &[u8],
    ciphertext: &[u8],
) -> Result<Zeroizing<Vec<u8>>, Error> {
    let mismatch = |_unspecified| Error::Mismatch;
    let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(mismatch)?;
    let mut opened = Zeroizing::new(ciphertext.to_vec());
    let length =
        cipher(key)?.open_in_place(nonce, Aad::from(purpose), &mut opened).map_err(mismatch)?.len();
    opened.truncate(length);
    Ok(opened)
}

fn cipher(key: &[u8; 32]) -> Result<LessSafeKey, Error> {
    let key = UnboundKey::new(&CHACHA20_POLY1305, key).map_err(|_unspecified| Error::Session)?;
    Ok(aead::LessSafeKey::new(key))
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tests;
