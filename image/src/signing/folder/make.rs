//! New keys: made in memory, and written to a folder of their own.

use std::{fmt, fs, os::unix::fs::DirBuilderExt as _, path::Path};

use ed25519_dalek::{
    SigningKey,
    pkcs8::{DecodePrivateKey as _, EncodePublicKey as _, KeypairBytes},
};
use pkcs8::{
    SecretDocument,
    der::{Document, pem::LineEnding},
};
use rand::{TryRng as _, rngs::SysRng};
use zeroize::{Zeroize as _, Zeroizing};

use super::files::{
    CERTIFICATE, appear, at, ensure_free, private_file, public_file, seal, sync, write,
};
use super::opened::{ImageSigner, ReleaseKey};
use crate::signing::{
    Error, Passphrase, Purpose,
    identity::{Identity, PUBLIC, Signer, certify, generate, pair, public},
    policy::PolicyKey,
    revocation::Revoked,
    sign,
    variables::{self, DB, KEK, PK, TIME},
};

/// New keys, with their private halves.
pub struct Keys {
    pub(super) pairs: Vec<Pair>,
    enrolment: Vec<(String, Vec<u8>)>,
}

/// One key.
pub(super) struct Pair {
    pub(super) purpose: Purpose,
    private: SecretDocument,
    /// The certificate, or the bare key with its algorithm.
    pub(super) public: Vec<u8>,
}

impl Pair {
    fn generate(purpose: Purpose) -> Result<Self, Error> {
        if purpose == Purpose::Release {
            let (private, public) = release()?;
            return Ok(Self { purpose, private, public });
        }
        let private = generate()?;
        let key = pair(&private)?;
        let public = if purpose.certified() { certify(purpose, &key)? } else { public(&key) };
        Ok(Self { purpose, private, public })
    }
}

/// A new Ed25519 key.
fn release() -> Result<(SecretDocument, Vec<u8>), Error> {
    let failed = |reason: String| Error::Generate { reason };
    let mut seed = Zeroizing::new([0; 32]);
    SysRng.try_fill_bytes(seed.as_mut()).map_err(|error| failed(error.to_string()))?;
    let key = SigningKey::from_bytes(&seed);
    // Version 1 of PKCS #8, without the public half, which OpenSSL 3.0 would not read.
    let mut bytes = KeypairBytes { secret_key: *seed, public_key: None };
    let private = ed25519_dalek::pkcs8::EncodePrivateKey::to_pkcs8_der(&bytes);
    bytes.secret_key.zeroize();
    let private = private.map_err(|error| failed(error.to_string()))?;
    let public = key.verifying_key().to_public_key_der();
    Ok((private, public.map_err(|error| failed(error.to_string()))?.into_vec()))
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys(…)")
    }
}

impl Keys {
    /// Makes a key for each purpose. Takes some seconds: large primes are rare.
    ///
    /// # Errors
    ///
    /// The host gives no random bytes.
    pub fn generate() -> Result<Self, Error> {
        let pairs = Purpose::ALL.into_iter().map(Pair::generate).collect::<Result<Vec<_>, _>>()?;
        let mut keys = Self { pairs, enrolment: Vec::new() };
        let platform = keys.identity(Purpose::Platform)?;
        let exchange = keys.identity(Purpose::Exchange)?;
        let signature = keys.identity(Purpose::Signature)?;
        let owner = variables::owner(platform.signer());
        for (variable, certificate, signer) in
            [(PK, &platform, &platform), (KEK, &exchange, &platform), (DB, &signature, &exchange)]
        {
            let list = variables::certificate(certificate.signer(), &owner)?;
            let update = variable.update(&list, &TIME, signer)?;
            keys.enrolment.push((variable.file(), update));
        }
        Ok(keys)
    }

    /// One of the keys that have a certificate, for use.
    pub(in crate::signing) fn identity(&self, purpose: Purpose) -> Result<Identity, Error> {
        let failed = |reason: &str| Error::Generate { reason: reason.to_owned() };
        let found = self.pairs.iter().find(|pair| pair.purpose == purpose);
        let found = found.ok_or_else(|| failed("it was not made"))?;
        let signer = Signer::parse(&found.public).map_err(sign)?;
        Identity::new(pair(&found.private)?, signer).ok_or_else(|| failed("its halves differ"))
    }

    /// The keys that a build of an image needs.
    ///
    /// # Errors
    ///
    /// The keys cannot be used.
    pub fn image_signer(&self) -> Result<ImageSigner, Error> {
        let identity = self.identity(Purpose::Signature)?;
        let release = *self.release_key()?.key().verifying_key().as_bytes();
        let policy = self.policy_key()?;
        let (enrolment, revoked) = (self.enrolment.clone(), Revoked::default());
        Ok(ImageSigner { identity, enrolment, revoked, release, policy })
    }

    /// The key that approves the measurements of their images.
    fn policy_key(&self) -> Result<PolicyKey, Error> {
        let failed = |reason: &str| Error::Generate { reason: reason.to_owned() };
        let found = self.pairs.iter().find(|pair| pair.purpose == Purpose::Policy);
        let found = found.ok_or_else(|| failed("it was not made"))?;
        PolicyKey::new(pair(&found.private)?, found.public.clone())
            .ok_or_else(|| failed("its halves differ"))
    }

    /// The key that signs their update bundles.
    ///
    /// # Errors
    ///
    /// The key cannot be used.
    pub fn release_key(&self) -> Result<ReleaseKey, Error> {
        let failed = |reason: String| Error::Generate { reason };
        let found = self.pairs.iter().find(|pair| pair.purpose == Purpose::Release);
        let found = found.ok_or_else(|| failed("it was not made".to_owned()))?;
        let key = SigningKey::from_pkcs8_der(found.private.as_bytes());
        key.map(ReleaseKey::new).map_err(|error| failed(error.to_string()))
    }

    /// Writes them to a folder that does not exist, or is empty.
    ///
    /// # Errors
    ///
    /// The folder has content, or cannot be written.
    pub fn store(&self, folder: &Path, passphrase: &Passphrase) -> Result<(), Error> {
        ensure_free(folder)?;
        let mut name = folder.file_name().unwrap_or_default().to_owned();
        name.push(format!(".new-{}", std::process::id()));
        let draft = folder.with_file_name(name);
        let made = fs::DirBuilder::new().mode(0o700).create(&draft);
        made.map_err(at("make", &draft))?;
        let outcome = self.fill(&draft, passphrase).and_then(|()| appear(&draft, folder));
        if outcome.is_err() {
            // The unfinished folder is useless; a failure to remove it changes nothing for
            // the caller.
            fs::remove_dir_all(&draft).unwrap_or_default();
        }
        outcome
    }

    fn fill(&self, folder: &Path, passphrase: &Passphrase) -> Result<(), Error> {
        for Pair { purpose, private, public } in &self.pairs {
            let sealed = seal(private, passphrase)?;
            write(&folder.join(private_file(*purpose)), sealed.as_bytes(), 0o600)?;
            let label = if purpose.certified() { CERTIFICATE } else { PUBLIC };
            let text =
                Document::try_from(&public[..]).and_then(|der| der.to_pem(label, LineEnding::LF));
            let text = text.map_err(sign)?;
            write(&folder.join(public_file(*purpose)), text.as_bytes(), 0o644)?;
        }
        for (name, update) in &self.enrolment {
            write(&folder.join(name), update, 0o644)?;
        }
        sync(folder)
    }
}
