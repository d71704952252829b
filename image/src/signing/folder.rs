//! The folder of an owner's keys: made once, as a whole, and read by each build.
//!
//! ```text
//! platform.key  exchange.key  signature.key   RSA-2048, encrypted (PKCS #8, PBES2)
//! platform.crt  exchange.crt  signature.crt   their certificates (X.509)
//! policy.key    policy.pub                    RSA-2048
//! release.key   release.pub                   Ed25519
//! PK.auth       KEK.auth      db.auth         for firmware in setup mode
//! dbx.auth                                    what was revoked; not there before that
//! ```
//!
//! Invariants:
//! - The folder appears whole, or not at all; one that has anything in it is left alone, but for
//!   `dbx.auth`, which is replaced as a whole.
//! - Private keys have mode 0600 from their first byte on, the folder 0700.

use std::{
    fmt,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use ed25519_dalek::{
    SigningKey, VerifyingKey,
    pkcs8::{DecodePrivateKey as _, DecodePublicKey as _, EncodePublicKey as _, KeypairBytes},
};
use pkcs8::{
    EncryptedPrivateKeyInfoRef, PrivateKeyInfoRef, SecretDocument,
    der::{Document, pem::LineEnding},
    pkcs5::{pbes2, scrypt},
};
use polis_base::{hex, sys::clock};
use rand::{TryRng as _, rngs::SysRng};
use ring::rsa::KeyPair;
use zeroize::{Zeroize as _, Zeroizing};

use super::{
    Error, Passphrase, Purpose, authenticode, hash,
    identity::{Identity, PUBLIC, Signer, certify, generate, pair, public},
    policy::PolicyKey,
    revocation::Revoked,
    variables::{self, DB, DBX, KEK, PK, TIME},
};

/// Far above the size of any file here.
const FILE_MAX: u64 = 64 * 1024;

const ENCRYPTED: &str = "ENCRYPTED PRIVATE KEY";
const CERTIFICATE: &str = "CERTIFICATE";

/// New keys, with their private halves.
pub struct Keys {
    pairs: Vec<Pair>,
    enrolment: Vec<(String, Vec<u8>)>,
}

/// One key.
struct Pair {
    purpose: Purpose,
    private: SecretDocument,
    /// The certificate, or the bare key with its algorithm.
    public: Vec<u8>,
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
    pub(super) fn identity(&self, purpose: Purpose) -> Result<Identity, Error> {
        let failed = |reason: &str| Error::Generate { reason: reason.to_owned() };
        let found = self.pairs.iter().find(|pair| pair.purpose == purpose);
        let found = found.ok_or_else(|| failed("it was not made"))?;
        let signer = Signer::parse(&found.public).map_err(super::sign)?;
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
        key.map(ReleaseKey).map_err(|error| failed(error.to_string()))
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
        let aside = folder.with_file_name(name);
        let made = fs::DirBuilder::new().mode(0o700).create(&aside);
        made.map_err(at("make", &aside))?;
        let outcome = self.fill(&aside, passphrase).and_then(|()| appear(&aside, folder));
        if outcome.is_err() {
            // The unfinished folder is useless; a failure to remove it changes nothing for
            // the caller.
            fs::remove_dir_all(&aside).unwrap_or_default();
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
            let text = text.map_err(super::sign)?;
            write(&folder.join(public_file(*purpose)), text.as_bytes(), 0o644)?;
        }
        for (name, update) in &self.enrolment {
            write(&folder.join(name), update, 0o644)?;
        }
        sync(folder)
    }
}

/// Checks that new keys can have this path: nothing is there, or an empty folder.
///
/// # Errors
///
/// [`Error::Taken`], or the path cannot be read.
pub fn ensure_free(folder: &Path) -> Result<(), Error> {
    let taken = || Error::Taken { path: folder.to_owned() };
    match folder.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {
            let mut entries = fs::read_dir(folder).map_err(at("look at", folder))?;
            if entries.next().is_some() { Err(taken()) } else { Ok(()) }
        }
        Ok(_) => Err(taken()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(at("look at", folder)(error)),
    }
}

/// Gives the finished folder its name. The kernel replaces an empty folder, and nothing else.
fn appear(aside: &Path, folder: &Path) -> Result<(), Error> {
    match fs::rename(aside, folder) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::AlreadyExists
                    | io::ErrorKind::DirectoryNotEmpty
                    | io::ErrorKind::NotADirectory
            ) =>
        {
            return Err(Error::Taken { path: folder.to_owned() });
        }
        renamed => renamed.map_err(at("make", folder))?,
    }
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    sync(parent.unwrap_or(Path::new(".")))
}

fn sync(folder: &Path) -> Result<(), Error> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(at("flush", folder))
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(bytes)?;
        // The umask may have taken more than it should.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    });
    written.map_err(at("write", path))
}

fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { what, path, source }
}

/// scrypt with the most memory that OpenSSL grants it (it refuses 32 MiB and more), five
/// times over, as is advised for that size; then AES-256 in CBC. OpenSSL reads it.
fn seal(private: &SecretDocument, passphrase: &Passphrase) -> Result<Zeroizing<String>, Error> {
    let failed = |reason: String| Error::Generate { reason };
    let (mut salt, mut iv) = ([0; 16], [0; 16]);
    SysRng.try_fill_bytes(&mut salt).map_err(|error| failed(error.to_string()))?;
    SysRng.try_fill_bytes(&mut iv).map_err(|error| failed(error.to_string()))?;
    let cost = scrypt::Params::new(14, 8, 5).map_err(|error| failed(error.to_string()))?;
    let parameters = pbes2::Parameters::generate_scrypt_aes256cbc(cost, &salt, iv);
    let parameters = parameters.map_err(|error| failed(error.to_string()))?;
    PrivateKeyInfoRef::try_from(private.as_bytes())
        .and_then(|info| info.encrypt_with_params(parameters, passphrase.as_bytes()))
        .and_then(|sealed| Ok(sealed.to_pem(ENCRYPTED, LineEnding::LF)?))
        .map_err(|error| failed(error.to_string()))
}

/// Reads a private key.
fn open(folder: &Path, purpose: Purpose, passphrase: &Passphrase) -> Result<SecretDocument, Error> {
    let path = folder.join(private_file(purpose));
    let text = Zeroizing::new(read(&path)?);
    let mode = fs::metadata(&path).map_err(at("look at", &path))?.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(Error::Mode { path, mode });
    }
    let malformed = |reason: String| Error::Malformed {
        path: path.clone(),
        expected: "encrypted private key in PEM",
        reason,
    };
    let text = std::str::from_utf8(&text).map_err(|error| malformed(error.to_string()))?;
    let (label, sealed) =
        SecretDocument::from_pem(text).map_err(|error| malformed(error.to_string()))?;
    if label != ENCRYPTED {
        return Err(malformed(format!("it is a {label}")));
    }
    let sealed = EncryptedPrivateKeyInfoRef::try_from(sealed.as_bytes())
        .map_err(|error| malformed(error.to_string()))?;
    sealed.decrypt(passphrase.as_bytes()).map_err(|_wrong| Error::Passphrase { path: path.clone() })
}

/// Reads a private RSA key; returns its file, too.
fn rsa(
    folder: &Path,
    purpose: Purpose,
    passphrase: &Passphrase,
) -> Result<(KeyPair, PathBuf), Error> {
    let private = open(folder, purpose, passphrase)?;
    let path = folder.join(private_file(purpose));
    let expected = "RSA key";
    match pair(&private) {
        Ok(pair) => Ok((pair, path)),
        Err(error) => Err(Error::Malformed { path, expected, reason: error.to_string() }),
    }
}

/// Reads a key that has a certificate, for use.
fn identity(folder: &Path, purpose: Purpose, passphrase: &Passphrase) -> Result<Identity, Error> {
    let signer = signer(folder, purpose)?;
    let (pair, path) = rsa(folder, purpose, passphrase)?;
    Identity::new(pair, signer).ok_or(Error::Mismatch { path })
}

/// Reads a certificate.
fn signer(folder: &Path, purpose: Purpose) -> Result<Signer, Error> {
    let der = public_half(folder, purpose)?;
    Signer::parse(&der).map_err(|error| Error::Malformed {
        path: folder.join(public_file(purpose)),
        expected: "certificate",
        reason: error.to_string(),
    })
}

/// The list of what was revoked: the file as it is, and its content. `None` if nothing was.
fn revocation(folder: &Path) -> Result<Option<(Vec<u8>, Revoked)>, Error> {
    let path = folder.join(DBX.file());
    let update = match read(&path) {
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        read => read?,
    };
    let owner = variables::owner(&signer(folder, Purpose::Platform)?);
    match Revoked::parse(&update, &owner) {
        Ok(revoked) => Ok(Some((update, revoked))),
        Err(reason) => {
            let (expected, reason) = ("list of revoked programs", reason.to_owned());
            Err(Error::Malformed { path, expected, reason })
        }
    }
}

/// Revokes programs, by their hashes ([`crate::authenticode_hash`]): writes the list `dbx.auth` of
/// a folder of keys anew, with the exchange key. Returns how many of them are new in it; the file
/// stays as it is if none is.
///
/// # Errors
///
/// A file is missing or damaged, the passphrase is wrong, or the list cannot be written.
pub fn revoke(
    folder: &Path,
    passphrase: &Passphrase,
    programs: &[[u8; 32]],
) -> Result<usize, Error> {
    let (_update, mut revoked) = revocation(folder)?.unwrap_or_default();
    let exchange = identity(folder, Purpose::Exchange, passphrase)?;
    let added = revoked.add(programs);
    if added == 0 {
        return Ok(0);
    }
    let owner = variables::owner(&signer(folder, Purpose::Platform)?);
    let update = revoked.update(&exchange, &owner, clock::now())?;
    let path = folder.join(DBX.file());
    let aside = folder.join(format!("{}.new-{}", DBX.file(), std::process::id()));
    write(&aside, &update, 0o644)?;
    fs::rename(&aside, &path).map_err(at("write", &path))?;
    sync(folder)?;
    Ok(added)
}

/// The hashes of the programs that were revoked with a folder of keys, as digits. Needs no
/// passphrase.
///
/// # Errors
///
/// The list is malformed.
pub fn revoked(folder: &Path) -> Result<Vec<String>, Error> {
    let (_update, revoked) = revocation(folder)?.unwrap_or_default();
    Ok(revoked.hashes().map(|hash| hex::encode(hash)).collect())
}

/// Reads a public half, in DER.
fn public_half(folder: &Path, purpose: Purpose) -> Result<Vec<u8>, Error> {
    let path = folder.join(public_file(purpose));
    let wanted = if purpose.certified() { CERTIFICATE } else { PUBLIC };
    let expected = if purpose.certified() { "certificate in PEM" } else { "public key in PEM" };
    let malformed = |reason: String| Error::Malformed { path: path.clone(), expected, reason };
    let text = read(&path)?;
    let text = std::str::from_utf8(&text).map_err(|error| malformed(error.to_string()))?;
    let (label, der) = Document::from_pem(text).map_err(|error| malformed(error.to_string()))?;
    if label != wanted {
        return Err(malformed(format!("it is a {label}")));
    }
    Ok(der.into_vec())
}

/// The public half of the release key.
fn release_half(folder: &Path) -> Result<[u8; 32], Error> {
    let key = VerifyingKey::from_public_key_der(&public_half(folder, Purpose::Release)?);
    let malformed = |reason: String| Error::Malformed {
        path: folder.join(public_file(Purpose::Release)),
        expected: "Ed25519 key",
        reason,
    };
    Ok(key.map_err(|error| malformed(error.to_string()))?.to_bytes())
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes));
    let length = read.map_err(at("read", path))?;
    if length as u64 > FILE_MAX {
        let reason = format!("it is larger than {FILE_MAX} bytes");
        return Err(Error::Malformed { path: path.to_owned(), expected: "key", reason });
    }
    Ok(bytes)
}

fn private_file(purpose: Purpose) -> String {
    format!("{purpose}.key")
}

pub(super) fn public_file(purpose: Purpose) -> String {
    format!("{purpose}.{}", if purpose.certified() { "crt" } else { "pub" })
}

/// The signer of an image: the signature key, the files that enrol it, the policy key, which
/// approves the image's measurements, and the release key, whose update bundles the image takes.
#[derive(Debug)]
pub struct ImageSigner {
    identity: Identity,
    enrolment: Vec<(String, Vec<u8>)>,
    revoked: Revoked,
    /// The public half of the release key.
    release: [u8; 32],
    policy: PolicyKey,
}

impl ImageSigner {
    /// Opens a folder of keys. Of the private keys, those for signatures and for policies have
    /// to be there.
    ///
    /// # Errors
    ///
    /// A file is missing or damaged, or the passphrase is wrong.
    pub fn open(folder: &Path, passphrase: &Passphrase) -> Result<Self, Error> {
        let files = [PK, KEK, DB].map(|variable| variable.file());
        let enrolment = files.into_iter().map(|name| Ok((name.clone(), read(&folder.join(name))?)));
        let mut enrolment = enrolment.collect::<Result<Vec<_>, Error>>()?;
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

    pub(crate) fn key(&self) -> &SigningKey {
        &self.0
    }
}

impl fmt::Debug for ReleaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReleaseKey(…)")
    }
}

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

#[cfg(test)]
#[path = "folder_tests.rs"]
pub(crate) mod tests;
