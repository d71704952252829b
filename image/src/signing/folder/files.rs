//! The files of a folder of keys: their names, and reading and writing one.
//!
//! Private keys are PEM that a passphrase encrypts (PKCS #8, PBES2), public halves are PEM. A file
//! is read up to a bound, and a private key only if no other user may read it.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use ed25519_dalek::{VerifyingKey, pkcs8::DecodePublicKey as _};
use pkcs8::{
    EncryptedPrivateKeyInfoRef, PrivateKeyInfoRef, SecretDocument,
    der::{Document, pem::LineEnding},
    pkcs5::{pbes2, scrypt},
};
use rand::{TryRng as _, rngs::SysRng};
use ring::rsa::KeyPair;
use rustix::fs::{Access, access};
use zeroize::Zeroizing;

use crate::signing::{
    Error, Passphrase, Purpose,
    identity::{Identity, PUBLIC, Signer, pair},
};

/// Far above the size of any file here.
const FILE_MAX: u64 = 64 * 1024;

const ENCRYPTED: &str = "ENCRYPTED PRIVATE KEY";
pub(super) const CERTIFICATE: &str = "CERTIFICATE";

/// Checks that new keys can have this path: nothing is there, or an empty folder, in a folder
/// that can be written.
///
/// # Errors
///
/// [`Error::Taken`], or one of the folders cannot be used.
pub fn ensure_free(folder: &Path) -> Result<(), Error> {
    let taken = || Error::Taken { path: folder.to_owned() };
    match folder.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {
            let mut entries = fs::read_dir(folder).map_err(at("look at", folder))?;
            if entries.next().is_some() {
                return Err(taken());
            }
        }
        Ok(_) => return Err(taken()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at("look at", folder)(error)),
    }
    let parent = parent(folder);
    access(parent, Access::WRITE_OK).map_err(|errno| at("write to", parent)(errno.into()))
}

/// The folder that has this one.
fn parent(folder: &Path) -> &Path {
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Gives the finished folder its name. The kernel replaces an empty folder, and nothing else.
pub(super) fn appear(draft: &Path, folder: &Path) -> Result<(), Error> {
    match fs::rename(draft, folder) {
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
    sync(parent(folder))
}

pub(super) fn sync(folder: &Path) -> Result<(), Error> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(at("flush", folder))
}

pub(super) fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(bytes)?;
        // The umask may have taken more than it should.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    });
    written.map_err(at("write", path))
}

pub(super) fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { what, path, source }
}

/// scrypt with the most memory that OpenSSL grants it (it refuses 32 MiB and more), five
/// times over, as is advised for that size; then AES-256 in CBC. OpenSSL reads it.
pub(super) fn seal(
    private: &SecretDocument,
    passphrase: &Passphrase,
) -> Result<Zeroizing<String>, Error> {
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
pub(super) fn open(
    folder: &Path,
    purpose: Purpose,
    passphrase: &Passphrase,
) -> Result<SecretDocument, Error> {
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
pub(super) fn rsa(
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
pub(super) fn identity(
    folder: &Path,
    purpose: Purpose,
    passphrase: &Passphrase,
) -> Result<Identity, Error> {
    let signer = signer(folder, purpose)?;
    let (pair, path) = rsa(folder, purpose, passphrase)?;
    Identity::new(pair, signer).ok_or(Error::Mismatch { path })
}

/// Reads a certificate.
pub(super) fn signer(folder: &Path, purpose: Purpose) -> Result<Signer, Error> {
    let der = public_half(folder, purpose)?;
    Signer::parse(&der).map_err(|error| Error::Malformed {
        path: folder.join(public_file(purpose)),
        expected: "certificate",
        reason: error.to_string(),
    })
}

/// Reads a public half, in DER.
pub(super) fn public_half(folder: &Path, purpose: Purpose) -> Result<Vec<u8>, Error> {
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
pub(super) fn release_half(folder: &Path) -> Result<[u8; 32], Error> {
    let key = VerifyingKey::from_public_key_der(&public_half(folder, Purpose::Release)?);
    let malformed = |reason: String| Error::Malformed {
        path: folder.join(public_file(Purpose::Release)),
        expected: "Ed25519 key",
        reason,
    };
    Ok(key.map_err(|error| malformed(error.to_string()))?.to_bytes())
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes));
    let length = read.map_err(at("read", path))?;
    if length as u64 > FILE_MAX {
        let reason = format!("it is larger than {FILE_MAX} bytes");
        return Err(Error::Malformed { path: path.to_owned(), expected: "key", reason });
    }
    Ok(bytes)
}

pub(super) fn private_file(purpose: Purpose) -> String {
    format!("{purpose}.key")
}

pub(in crate::signing) fn public_file(purpose: Purpose) -> String {
    format!("{purpose}.{}", if purpose.certified() { "crt" } else { "pub" })
}
