//! The private keys of users: created, stored and read.
//!
//! A key is a file: Ed25519 in PKCS#8 version 1, in PEM, which OpenSSL and
//! everything around it reads; encrypted if its owner wants a passphrase.
//!
//! Invariants:
//! - An existing file is never overwritten: an owner's key controls a cluster.
//! - The file has mode 0600 before its first byte is written, and a key that others can
//!   read is refused.
//! - A passphrase comes from a terminal without echo or from a file; never from the command
//!   line, which every process on the machine can read.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use ed25519_dalek::pkcs8::{EncodePrivateKey as _, KeypairBytes};
use ed25519_dalek::{SigningKey, VerifyingKey};
use pkcs8::der::pem::LineEnding;
use pkcs8::pkcs5::{pbes2, scrypt};
use pkcs8::{
    DecodePrivateKey as _, DecodePublicKey as _, EncodePublicKey as _, PrivateKeyInfoRef,
    SecretDocument,
};
use rand::TryRng as _;
use rand::rngs::SysRng;
use rpassword::ConfigBuilder;
use zeroize::{Zeroize as _, Zeroizing};

use super::error::{Error, Explain as _};
use polis_base::sys::terminal::without_echo;
use polis_base::{hex, secret};

/// Far above the length of a typed passphrase.
const PASSPHRASE_MAX: usize = 1024;
const ENCRYPTED: &str = "BEGIN ENCRYPTED PRIVATE KEY";
const PUBLIC: &str = "BEGIN PUBLIC KEY";
/// The name of standard input as a file.
pub(super) const STDIN: &str = "-";
/// Of every kind of private key in PEM.
const PRIVATE: &str = "PRIVATE KEY-----";

/// Asks for a secret on the terminal, without echo.
pub(super) fn typed(prompt: &str) -> io::Result<Zeroizing<String>> {
    without_echo(prompt, |input| {
        let config = ConfigBuilder::new().input_reader(input).output_discard().build();
        rpassword::read_password_with_config(config).map(Zeroizing::new)
    })
}

/// The source of a passphrase.
#[derive(Clone, Debug, Default)]
pub(super) struct Passphrase {
    /// A file with the passphrase as its first line [default: asked for].
    pub(super) file: Option<PathBuf>,
}

impl Passphrase {
    /// Reads it; `prompt` is shown on the terminal.
    fn read(&self, prompt: &str) -> Result<Zeroizing<String>, Error> {
        let Some(file) = &self.file else {
            return typed(prompt)
                .doing(|| "cannot ask for the passphrase".to_owned())
                .help(|| "without a terminal, use --passphrase-file".to_owned());
        };
        let text = read_private(file)?;
        Ok(secret::first_line(&text))
    }

    /// Reads a new one, which is typed twice.
    fn read_new(&self) -> Result<Zeroizing<String>, Error> {
        let passphrase = self.read("New passphrase: ")?;
        if passphrase.is_empty() || passphrase.len() > PASSPHRASE_MAX {
            return Err(Error::new(format!(
                "a passphrase has 1 to {PASSPHRASE_MAX} characters, not {}",
                passphrase.len()
            ))
            .or_help(match &self.file {
                Some(file) => format!("write it on the first line of {}", file.display()),
                None => "take another passphrase".to_owned(),
            }));
        }
        if self.file.is_none() && self.read("Repeat the passphrase: ")? != passphrase {
            return Err(Error::new("the two passphrases differ").or_help("try again"));
        }
        Ok(passphrase)
    }
}

/// Makes a key in `file`, and its public half in `file` with the extension `pub`.
/// Returns that second path and the public key.
pub(super) fn create(
    file: &Path,
    passphrase: Option<&Passphrase>,
) -> Result<(PathBuf, [u8; 32]), Error> {
    let public_file = file.with_extension("pub");
    // Checked before a passphrase is asked for.
    if public_file == file {
        return Err(Error::usage(format!(
            "{} is the name of a public half, which would take the place of the key",
            file.display()
        ))
        .or_help("name a file with another extension, as ann.key: its public half is ann.pub"));
    }
    for there in [file, &public_file] {
        if there.symlink_metadata().is_ok() {
            return Err(taken(there));
        }
    }
    let passphrase = passphrase.map(Passphrase::read_new).transpose()?;
    let mut seed = Zeroizing::new([0; 32]);
    SysRng.try_fill_bytes(seed.as_mut()).doing(|| "cannot get random bytes".to_owned())?;
    let key = SigningKey::from_bytes(&seed);
    let pem = encode(&key, passphrase.as_deref().map(String::as_str))?;
    let public = key.verifying_key();
    let public_pem = public
        .to_public_key_pem(LineEnding::LF)
        .map_err(|error| anyhow!("cannot encode the public key: {error}"))?;
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        super::contexts::private_folder(folder)?;
    }
    write_new(file, 0o600, &pem)?;
    if let Err(error) = write_new(&public_file, 0o644, &public_pem) {
        // Nothing knows the new key yet: the command may be repeated.
        let _removed = fs::remove_file(file);
        return Err(error);
    }
    Ok((public_file, public.to_bytes()))
}

fn taken(file: &Path) -> Error {
    Error::new(format!("{} exists already; a key is never overwritten", file.display()))
        .or_help("use that key, or name another file: `-o FILE`")
}

/// Fails where a file has a private key, whose place an output would take.
pub(super) fn keep(file: &Path) -> Result<(), Error> {
    let has_key = file.is_file() && read_text(file).is_ok_and(|text| text.contains(PRIVATE));
    if has_key { Err(taken(file)) } else { Ok(()) }
}

fn write_new(file: &Path, mode: u32, pem: &str) -> Result<(), Error> {
    let cannot = || format!("cannot write {}", file.display());
    let mut opened = match File::options().write(true).create_new(true).mode(mode).open(file) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(taken(file)),
        opened => opened.doing(cannot)?,
    };
    let written = opened.write_all(pem.as_bytes()).and_then(|()| opened.sync_all());
    if written.is_err() {
        // A part of a key would only stand in the way of the next attempt.
        let _removed = fs::remove_file(file);
    }
    written.doing(cannot)
}

/// PKCS#8 without the public half, which OpenSSL 3.0 would not read.
fn encode(key: &SigningKey, passphrase: Option<&str>) -> Result<Zeroizing<String>, Error> {
    let mut pair = KeypairBytes { secret_key: key.to_bytes(), public_key: None };
    let der = pair.to_pkcs8_der();
    pair.secret_key.zeroize();
    let failed = |error: pkcs8::Error| anyhow!("cannot encode the key: {error}");
    let der = der.map_err(failed)?;
    let Some(passphrase) = passphrase else {
        return Ok(der
            .to_pem("PRIVATE KEY", LineEnding::LF)
            .map_err(pkcs8::Error::from)
            .map_err(failed)?);
    };
    let parameters = parameters()?;
    let info = PrivateKeyInfoRef::try_from(der.as_bytes()).map_err(failed)?;
    let sealed = info.encrypt_with_params(parameters, passphrase).map_err(failed)?;
    Ok(sealed
        .to_pem("ENCRYPTED PRIVATE KEY", LineEnding::LF)
        .map_err(pkcs8::Error::from)
        .map_err(failed)?)
}

/// scrypt with the most memory that OpenSSL grants it (it refuses 32 MiB and
/// more), five times over, as is advised for that size; then AES-256 in CBC.
fn parameters() -> Result<pbes2::Parameters, Error> {
    let (mut salt, mut iv) = ([0; 16], [0; 16]);
    SysRng.try_fill_bytes(&mut salt).doing(|| "cannot get random bytes".to_owned())?;
    SysRng.try_fill_bytes(&mut iv).doing(|| "cannot get random bytes".to_owned())?;
    let cost = scrypt::Params::new(14, 8, 5).map_err(|error| anyhow!("scrypt: {error}"))?;
    pbes2::Parameters::generate_scrypt_aes256cbc(cost, &salt, iv)
        .map_err(|error| anyhow!("cannot set the encryption up: {error}").into())
}

/// Reads a private key.
pub(super) fn read(file: &Path, passphrase: &Passphrase) -> Result<SigningKey, Error> {
    decode(&read_pem(file)?, file, passphrase)
}

/// Fails where a file has no private key, as far as that shows without its passphrase.
pub(super) fn check(file: &Path) -> Result<(), Error> {
    let pem = read_pem(file)?;
    match pem.contains(ENCRYPTED) {
        true => whole(&pem, file),
        false => plain(&pem, file).map(drop),
    }
}

/// Reads the PEM of a private key.
fn read_pem(file: &Path) -> Result<Zeroizing<String>, Error> {
    let pem = read_text(file)?;
    // Before its mode: a public half is no secret.
    let is_public = pem.contains(PUBLIC) || hex_key(pem.trim()).is_some();
    if is_public && !pem.contains(PRIVATE) {
        return Err(Error::new(format!("{} has only the public half of a key", file.display()))
            .or_help("name the file with the private half, as ann.key beside ann.pub"));
    }
    ensure_private(file)?;
    Ok(pem)
}

fn decode(pem: &str, file: &Path, passphrase: &Passphrase) -> Result<SigningKey, Error> {
    // Before the passphrase is asked for: with a damaged file, each would be a wrong one.
    whole(pem, file)?;
    if pem.contains(ENCRYPTED) {
        let passphrase = passphrase.read(&format!("Passphrase of {}: ", file.display()))?;
        return SigningKey::from_pkcs8_encrypted_pem(pem, passphrase.as_bytes())
            .map_err(|_error| anyhow!("cannot decrypt {} with this passphrase", file.display()))
            .help(|| "try again; without the passphrase the key is lost".to_owned());
    }
    plain(pem, file)
}

/// Fails where a file in PEM was cut off or changed, as far as that shows without its passphrase.
fn whole(pem: &str, file: &Path) -> Result<(), Error> {
    SecretDocument::from_pem(pem).map(drop).map_err(|_error| damaged(file))
}

/// A private key without a passphrase.
fn plain(pem: &str, file: &Path) -> Result<SigningKey, Error> {
    SigningKey::from_pkcs8_pem(pem).map_err(|_error| damaged(file))
}

fn damaged(file: &Path) -> Error {
    Error::new(format!("{} has no whole Ed25519 key in PEM", file.display())).or_help(
        "copy it again from a backup; `polisctl owner create` makes another key, which no \
         cluster knows",
    )
}

/// Reads a public key: a public key in PEM, 64 hexadecimal digits, or the public
/// half of a private key.
pub(super) fn read_public(file: &Path, passphrase: &Passphrase) -> Result<[u8; 32], Error> {
    let text = read_text(file)?;
    if text.contains(PUBLIC) {
        let key = VerifyingKey::from_public_key_pem(&text).map_err(|_error| damaged(file))?;
        return Ok(key.to_bytes());
    }
    if let Some(key) = hex_key(text.trim()) {
        return Ok(key);
    }
    if !text.contains(PRIVATE) {
        return Err(Error::new(format!(
            "{} has no key; allowed are a public or a private one, Ed25519 in PEM, and 64 \
             hexadecimal digits",
            file.display()
        ))
        .or_help("name one of the two files that `polisctl key create -o FILE` writes"));
    }
    ensure_private(file)?;
    Ok(decode(&text, file, passphrase)?.verifying_key().to_bytes())
}

fn hex_key(text: &str) -> Option<[u8; 32]> {
    hex::decode(text)?.try_into().ok()
}

fn read_text(file: &Path) -> Result<Zeroizing<String>, Error> {
    let name = file.display().to_string();
    text_of(File::open(file).doing(|| format!("cannot read {name}"))?, &name)
}

fn text_of(source: impl io::Read, name: &str) -> Result<Zeroizing<String>, Error> {
    let read = secret::read(source);
    let fault = match read.as_ref().map_err(io::Error::kind) {
        Err(io::ErrorKind::InvalidData) => "is not text".to_owned(),
        Err(io::ErrorKind::FileTooLarge) => format!("has more than {} bytes", secret::SIZE_MAX),
        Ok(_) | Err(_) => return read.doing(|| format!("cannot read {name}")),
    };
    Err(Error::new(format!("{name} {fault}")).or_help(
        "name another file: a key is text in PEM, a passphrase or a password one line of text",
    ))
}

/// Reads a secret from a file that others must not be able to read, or from standard input.
pub(super) fn read_secret(file: &Path) -> Result<Zeroizing<String>, Error> {
    match file.to_str() {
        Some(STDIN) => text_of(io::stdin().lock(), "standard input"),
        _ => read_private(file),
    }
}

/// Reads a file that others must not be able to read.
pub(super) fn read_private(file: &Path) -> Result<Zeroizing<String>, Error> {
    let text = read_text(file)?;
    ensure_private(file)?;
    Ok(text)
}

fn ensure_private(file: &Path) -> Result<(), Error> {
    let metadata = fs::metadata(file).doing(|| format!("cannot inspect {}", file.display()))?;
    if let Some(mode) = secret::exposed(&metadata) {
        return Err(Error::new(format!(
            "{} has mode {mode:04o}: others may read this secret",
            file.display()
        ))
        .or_help(format!("chmod 600 {}", file.display())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn secret(folder: &Path, text: &str) -> Passphrase {
        let file = folder.join("passphrase");
        let _old = fs::remove_file(&file);
        write_new(&file, 0o600, text).unwrap();
        Passphrase { file: Some(file) }
    }

    #[test]
    fn a_key_is_private_and_reads_back() {
        let folder = folder();
        let file = folder.path().join("new/owner.key");
        let (public_file, public) = create(&file, None).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(file.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        let none = Passphrase::default();
        assert_eq!(read(&file, &none).unwrap().verifying_key().to_bytes(), public);
        assert_eq!(read_public(&file, &none).unwrap(), public);
        assert_eq!(read_public(&public_file, &none).unwrap(), public);
    }

    #[test]
    fn a_key_is_never_written_over() {
        let folder = folder();
        let file = folder.path().join("owner.key");
        fs::write(&file, "something").unwrap();
        let error = create(&file, None).unwrap_err().render();
        assert!(error.contains("never overwritten"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "something");
    }

    #[test]
    fn no_half_of_a_key_takes_the_place_of_another_file() {
        let folder = folder();
        let [key, public] = ["ann.key", "ann.pub"].map(|name| folder.path().join(name));
        let error = create(&public, None).unwrap_err();
        assert_eq!(error.exit(), crate::error::Exit::Usage);
        assert!(error.render().contains("name of a public half"), "{}", error.render());
        fs::write(&public, "that of the owner").unwrap();
        let error = create(&key, None).unwrap_err().render();
        assert!(error.contains("ann.pub exists already"), "{error}");
        assert_eq!(fs::read_to_string(&public).unwrap(), "that of the owner");
        assert!(!key.exists());
        fs::remove_file(&public).unwrap();
        create(&key, None).unwrap();
        keep(&public).unwrap();
        keep(&folder.path().join("none")).unwrap();
        assert!(keep(&key).unwrap_err().render().contains("never overwritten"));
    }

    #[test]
    fn a_file_without_a_key_is_not_called_a_secret() {
        let folder = folder();
        let file = folder.path().join("id_ed25519.pub");
        fs::write(&file, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 ann@home\n").unwrap();
        let error = read_public(&file, &Passphrase::default()).unwrap_err().render();
        assert!(error.contains("has no key; allowed are a public or a private one"), "{error}");
        assert!(!error.contains("chmod"), "{error}");
        assert!(error.contains("help: name one of the two files"), "{error}");
    }

    #[test]
    fn a_public_half_in_the_place_of_a_private_key_is_named_as_one() {
        let folder = folder();
        let (public_file, _key) = create(&folder.path().join("ann.key"), None).unwrap();
        let read = read(&public_file, &Passphrase::default()).unwrap_err();
        for error in [read, check(&public_file).unwrap_err()] {
            let error = error.render();
            assert!(error.contains("ann.pub has only the public half"), "{error}");
            assert!(error.contains("help: name the file with the private half"), "{error}");
        }
    }

    #[test]
    fn a_key_that_was_cut_off_is_no_wrong_passphrase_and_names_the_backup() {
        let folder = folder();
        let passphrase = secret(folder.path(), "correct horse");
        for (name, passphrase) in [("plain.key", None), ("sealed.key", Some(&passphrase))] {
            let file = folder.path().join(name);
            create(&file, passphrase).unwrap();
            check(&file).unwrap();
            let pem = fs::read_to_string(&file).unwrap();
            fs::write(&file, &pem[..pem.len() / 2]).unwrap();
            // Nothing asks for a passphrase, which a test does not have.
            let none = Passphrase::default();
            let (read, public) = (read(&file, &none), read_public(&file, &none));
            for error in [read.unwrap_err(), public.unwrap_err(), check(&file).unwrap_err()] {
                let error = error.render();
                let said = format!("{name} has no whole Ed25519 key in PEM\nhelp: copy it again");
                assert!(error.contains(&said), "{error}");
            }
        }
    }

    #[test]
    fn a_file_that_is_no_text_or_too_large_is_named_with_what_is_asked_for() {
        let folder = folder();
        let file = folder.path().join("key");
        for (content, fault) in [
            (vec![0xff; 9], "key is not text"),
            (vec![b'a'; 70_000], "key has more than 65536 bytes"),
        ] {
            fs::write(&file, content).unwrap();
            let error = read_public(&file, &Passphrase::default()).unwrap_err().render();
            assert!(error.contains(&format!("{fault}\nhelp: name another file")), "{error}");
        }
    }

    #[test]
    fn a_key_with_a_passphrase_opens_with_that_one_only() {
        let folder = folder();
        let file = folder.path().join("owner.key");
        let right = secret(folder.path(), "correct horse\nsecond line\n");
        let (_file, public) = create(&file, Some(&right)).unwrap();
        assert!(fs::read_to_string(&file).unwrap().starts_with("-----BEGIN ENCRYPTED PRIVATE KEY"));
        assert_eq!(read(&file, &right).unwrap().verifying_key().to_bytes(), public);
        let wrong = secret(folder.path(), "correct horsf");
        let error = read(&file, &wrong).unwrap_err().render();
        assert!(error.contains("cannot decrypt"), "{error}");
    }

    #[test]
    fn an_empty_passphrase_is_refused() {
        let folder = folder();
        let empty = secret(folder.path(), "\n");
        let error = create(&folder.path().join("k"), Some(&empty)).unwrap_err().render();
        assert!(error.contains("1 to 1024"), "{error}");
        assert!(error.contains("help: write it on the first line of "), "{error}");
    }

    #[test]
    fn a_key_that_others_may_read_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = folder();
        let file = folder.path().join("owner.key");
        create(&file, None).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let error = read(&file, &Passphrase::default()).unwrap_err().render();
        assert!(error.contains("mode 0640") && error.contains("help: chmod 600"), "{error}");
    }

    #[test]
    fn the_private_half_is_version_1_of_pkcs_8() {
        let pem = encode(&SigningKey::from_bytes(&[7; 32]), None).unwrap();
        // 48 bytes are 64 characters, without space for the public half.
        assert_eq!(pem.lines().nth(1).unwrap().len(), 64);
        assert_eq!(pem.lines().count(), 3);
    }

    #[test]
    fn a_public_key_may_be_digits() {
        let folder = folder();
        let file = folder.path().join("key");
        fs::write(&file, format!("{}\n", "07".repeat(32))).unwrap();
        assert_eq!(read_public(&file, &Passphrase::default()).unwrap(), [7; 32]);
    }
}
