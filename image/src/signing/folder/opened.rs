//! The keys of a folder that a build uses: for an image, and for an update bundle.

use std::{fmt, path::Path};

use ed25519_dalek::{
    SigningKey,
    pkcs8::{DecodePrivateKey as _, EncodePublicKey as _},
};
use polis_base::hex;

use super::files::{identity, open, private_file, public_half, read, release_half, rsa};
use super::revoked::revocation;
use crate::signing::{
    Error, Passphrase, Purpose, authenticode, hash,
    identity::Identity,
    policy::PolicyKey,
    revocation::Revoked,
    variables::{DB, DBX, KEK, PK},
};

/// The signer of an image: the signature key, the files that enrol it, the policy key, which
/// approves the image's measurements, and the release key, whose update bundles the image takes.
#[derive(Debug)]
pub struct ImageSigner {
    pub(super) identity: Identity,
    pub(super) enrolment: Vec<(String, Vec<u8>)>,
    pub(super) revoked: Revoked,
    /// The public half of the release key.
    pub(super) release: [u8; 32],
    pub(super) policy: PolicyKey,
}

/// The files that enrol the keys of a folder: name and content.
fn enrolment(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let files = [PK, KEK, DB].map(|variable| variable.file());
    files.into_iter().map(|name| Ok((name.clone(), read(&folder.join(name))?))).collect()
}

impl ImageSigner {
    /// Checks that a folder has keys that sign images, as far as that needs no passphrase.
    ///
    /// # Errors
    ///
    /// A file is missing.
    pub fn check(folder: &Path) -> Result<(), Error> {
        enrolment(folder).map(drop)
    }

    /// Opens a folder of keys. Of the private keys, those for signatures and for policies have
    /// to be there.
    ///
    /// # Errors
    ///
    /// A file is missing or damaged, or the passphrase is wrong.
    pub fn open(folder: &Path, passphrase: &Passphrase) -> Result<Self, Error> {
        let mut enrolment = enrolment(folder)?;
        let revocation = revocation(folder)?;
        let (update, revoked) = revocation.unzip();
        enrolment.extend(update.map(|update| (DBX.file(), update)));
        let identity = identity(folder, Purpose::Signature, passphrase)?;
        let public = public_half(folder, Purpose::Policy)?;
        let (pair, path) = rsa(folder, Purpose::Policy, passphrase)?;
        let policy = PolicyKey::new(pair, public).ok_or(Error::Mismatch { path })?;
        let release = release_half(folder)?;
        Ok(Self { identity, enrolment, revoked: revoked.unwrap_or_default(), release, policy })
    }

    /// The public half of the policy key, in PEM: the section `.pcrpkey` of a kernel image.
    ///
    /// # Errors
    ///
    /// The key cannot be encoded.
    pub fn policy_key(&self) -> Result<String, Error> {
        self.policy.section()
    }

    /// Approves the measurements of a kernel image that satisfy the TPM policy with the digest
    /// `policy`: the section `.pcrsig`, JSON in the format of `systemd-measure`.
    ///
    /// # Errors
    ///
    /// The key cannot be used.
    pub fn approve(&self, policy: &[u8; 32]) -> Result<String, Error> {
        self.policy.approve(policy)
    }

    /// The public half of the release key.
    pub(crate) fn release(&self) -> &[u8; 32] {
        &self.release
    }

    /// Signs a program for UEFI, unless it was revoked; `name` is for errors.
    pub(crate) fn sign(&self, name: &str, program: &[u8]) -> Result<Vec<u8>, Error> {
        let signed = authenticode::sign(name, program, &self.identity)?;
        let fault = |source| Error::Program { name: name.to_owned(), source };
        match self.revoked.has(&authenticode::hash(&signed).map_err(fault)?) {
            true => Err(Error::Revoked { name: name.to_owned() }),
            false => Ok(signed),
        }
    }

    /// The files for firmware in setup mode: name and content.
    pub(crate) fn enrolment(&self) -> &[(String, Vec<u8>)] {
        &self.enrolment
    }

    /// Changes when another key or other files for enrolment are used.
    pub(crate) fn fingerprint(&self) -> String {
        let files = self.enrolment.iter().map(|(_, update)| hash(update));
        let keys = [
            self.identity.signer().fingerprint(),
            hex::encode(&self.release),
            self.policy.fingerprint(),
        ];
        keys.into_iter().chain(files).collect()
    }
}

/// The key that signs an update bundle.
pub struct ReleaseKey(SigningKey);

impl ReleaseKey {
    /// Opens the release key of a folder.
    ///
    /// # Errors
    ///
    /// A file is missing or damaged, or the passphrase is wrong.
    pub fn open(folder: &Path, passphrase: &Passphrase) -> Result<Self, Error> {
        let public = public_half(folder, Purpose::Release)?;
        let private = open(folder, Purpose::Release, passphrase)?;
        let path = folder.join(private_file(Purpose::Release));
        let key = SigningKey::from_pkcs8_der(private.as_bytes()).map_err(|error| {
            let reason = error.to_string();
            Error::Malformed { path: path.clone(), expected: "Ed25519 key", reason }
        })?;
        match key.verifying_key().to_public_key_der() {
            Ok(own) if own.as_bytes() == public => Ok(Self(key)),
            _ => Err(Error::Mismatch { path }),
        }
    }

    pub(super) fn new(key: SigningKey) -> Self {
        Self(key)
    }

    pub(crate) fn key(&self) -> &SigningKey {
        &self.0
    }
}

impl fmt::Debug for ReleaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReleaseKey(…)")
    }
}
