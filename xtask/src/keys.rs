//! `cargo xtask keys`: makes the keys of an owner, lists them, or revokes what they signed.
//!
//! A passphrase comes from a terminal without echo, or from a file; never from the command
//! line, which every process on the machine can read.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use clap::Subcommand;
use polis_image::{
    authenticode_hash, secret,
    signing::{self, Keys, Passphrase, Private, Shown, ensure_free, revoke, revoked, show},
    without_echo,
};
use rpassword::ConfigBuilder;
use tempfile::NamedTempFile;
use zeroize::Zeroizing;

use crate::host::Help;

/// Arguments of `cargo xtask keys`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Debug, Subcommand)]
enum Sub {
    /// Make all keys of an owner in a folder, encrypted with one passphrase.
    Create {
        /// The folder: empty, or not there yet.
        folder: PathBuf,
        #[command(flatten)]
        passphrase: PassphraseFrom,
    },
    /// List the keys of a folder.
    Show {
        /// The folder.
        folder: PathBuf,
    },
    /// Revoke kernel images that these keys signed: firmware that takes the list `dbx.auth`
    /// starts them no more.
    Revoke {
        /// The folder; the exchange key must be in it.
        folder: PathBuf,
        /// An update bundle, a disk image, or a program for UEFI.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        #[command(flatten)]
        passphrase: PassphraseFrom,
    },
}

/// The source of a passphrase.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct PassphraseFrom {
    /// Take the passphrase from the first line of this file [default: ask].
    #[arg(long, value_name = "FILE")]
    passphrase_file: Option<PathBuf>,
}

impl PassphraseFrom {
    /// Reads it; `prompt` is shown on the terminal.
    pub(crate) fn read(&self, prompt: &str) -> Result<Passphrase> {
        let text = match &self.passphrase_file {
            Some(file) => first_line(file)?,
            None => ask(prompt)?,
        };
        Ok(Passphrase::new(text)?)
    }

    /// Reads a new one, which is typed twice.
    fn read_new(&self) -> Result<Passphrase> {
        if self.passphrase_file.is_some() {
            return self.read("");
        }
        let typed = ask("New passphrase: ")?;
        if ask("Repeat the passphrase: ")? != typed {
            return Err(anyhow!("the two passphrases differ"))
                .context(Help("try again".to_owned()));
        }
        Ok(Passphrase::new(typed)?)
    }
}

fn ask(prompt: &str) -> Result<Zeroizing<String>> {
    let typed = without_echo(prompt, |input| {
        let config = ConfigBuilder::new().input_reader(input).output_discard().build();
        rpassword::read_password_with_config(config).map(Zeroizing::new)
    });
    typed
        .context("cannot ask for the passphrase")
        .context(Help("without a terminal, use --passphrase-file".to_owned()))
}

fn first_line(path: &Path) -> Result<Zeroizing<String>> {
    let read = File::open(path).and_then(secret::read);
    let fault = match read.as_ref().map_err(io::Error::kind) {
        Err(ErrorKind::InvalidData) => Some("is not text".to_owned()),
        Err(ErrorKind::FileTooLarge) => Some(format!("has more than {} bytes", secret::SIZE_MAX)),
        Ok(_) | Err(_) => None,
    };
    if let Some(fault) = fault {
        return Err(anyhow!("{} {fault}", path.display()))
            .context(Help("name a file whose first line is the passphrase".to_owned()));
    }
    let text = read.with_context(|| format!("cannot read {}", path.display()))?;
    let metadata = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    if let Some(mode) = secret::exposed(&metadata) {
        // Not of a device, which is not the user's.
        let help = match metadata.is_file() {
            true => format!("chmod 600 {}", path.display()),
            false => "name a file that no other user may read".to_owned(),
        };
        return Err(anyhow!("{} has mode {mode:04o}: others may read this secret", path.display()))
            .context(Help(help));
    }
    Ok(secret::first_line(&text))
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<()> {
    match args.command {
        Sub::Create { folder, passphrase } => {
            // Checked again when the folder is made; now, before a passphrase is asked for.
            ensure_free(&folder)?;
            let passphrase = passphrase.read_new()?;
            Keys::generate()?.store(&folder, &passphrase)?;
            list(&folder)?;
            println!(
                "keep a copy of {} and the passphrase apart from each other",
                folder.display()
            );
            Ok(())
        }
        Sub::Show { folder } => list(&folder),
        Sub::Revoke { folder, files, passphrase } => {
            // A folder without keys is refused before anything else.
            show(&folder)?;
            let hashes = files.iter().map(|file| Ok(authenticode_hash(file)?));
            let hashes = hashes.collect::<Result<Vec<_>>>()?;
            let passphrase = passphrase.read("Passphrase of the keys: ")?;
            let added = revoke(&folder, &passphrase, &hashes)?;
            let list = folder.join("dbx.auth");
            if added == 0 {
                println!("all of them were revoked before; {} is as it was", list.display());
                return Ok(());
            }
            println!("{added} new in {}, {} in all", list.display(), revoked(&folder)?.len());
            println!(
                "images that you build from now on enrol it with the keys; give it to machines \
                 that have the keys already as docs/images.md says, *Revoking*"
            );
            Ok(())
        }
    }
}

/// The keys in this folder, for a first try of an update: made at the first use, with their
/// passphrase in a file beside the folder. They are as safe as that file. Several processes that
/// make them at the same time all use the keys of one of them.
pub(crate) fn for_trying(folder: &Path) -> Result<Passphrase> {
    let file = folder.with_extension("passphrase");
    if !file.exists() {
        let text: [u8; 16] = rand::random();
        let text = text.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        private(&file, &text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let passphrase = PassphraseFrom { passphrase_file: Some(file) }.read("")?;
    if !folder.exists() {
        unless_made(Keys::generate()?.store(folder, &passphrase))?;
    }
    Ok(passphrase)
}

/// The outcome of storing keys in a folder that did not exist. If another build has made keys
/// there meanwhile, those are used: they have the same passphrase.
fn unless_made(stored: Result<(), signing::Error>) -> Result<(), signing::Error> {
    match stored {
        Err(signing::Error::Taken { .. }) => Ok(()),
        stored => stored,
    }
}

/// Writes a file that other users cannot read: whole or not at all, and never over another one,
/// which stays.
fn private(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Only its owner can read it.
    let mut file = NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    match file.persist_noclobber(path) {
        Ok(_file) => Ok(()),
        Err(kept) if kept.error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(failed) => Err(failed.error),
    }
}

fn list(folder: &Path) -> Result<()> {
    for Shown { purpose, file, name, fingerprint, private } in show(folder)? {
        println!("{purpose:<9}  {name}");
        println!("           {}", file.display());
        println!("           SHA-256 {fingerprint}");
        if private == Private::Elsewhere {
            println!("           its private half is not in this folder");
        }
    }
    for hash in revoked(folder)? {
        println!("revoked    Authenticode SHA-256 {hash}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    };

    use super::*;

    #[test]
    fn a_passphrase_is_the_first_line_of_a_private_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("passphrase");
        fs::write(&file, "horse\nbattery\n").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(first_line(&file).unwrap().as_str(), "horse");
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        let error = format!("{:#}", first_line(&file).unwrap_err());
        assert!(error.contains("mode 0644") && error.contains("chmod 600"), "{error}");
        fs::write(&file, [0xff; 9]).unwrap();
        let error = first_line(&file).unwrap_err();
        assert!(error.is::<Help>() && format!("{error:#}").contains("is not text"), "{error:#}");
        // Not cut to another passphrase.
        fs::write(&file, "a".repeat(secret::SIZE_MAX + 1)).unwrap();
        let error = first_line(&file).unwrap_err();
        let said = format!("{error:#}");
        assert!(error.is::<Help>() && said.contains("has more than 65536 bytes"), "{said}");
        let error = format!("{:#}", first_line(Path::new("/dev/null")).unwrap_err());
        assert!(error.contains("name a file") && !error.contains("chmod"), "{error}");
    }

    #[test]
    fn keys_for_trying_are_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("target/keys");
        let first = for_trying(&keys).unwrap();
        let release = fs::read(keys.join("release.pub")).unwrap();
        signing::ReleaseKey::open(&keys, &first).unwrap();
        let again = for_trying(&keys).unwrap();
        signing::ReleaseKey::open(&keys, &again).unwrap();
        assert_eq!(fs::read(keys.join("release.pub")).unwrap(), release);
        let mode = fs::metadata(keys.with_extension("passphrase")).unwrap().mode();
        assert_eq!(mode & 0o077, 0);
        assert_eq!(fs::read_dir(folder.path().join("target")).unwrap().count(), 2);
        // Another build has made the keys meanwhile.
        unless_made(ensure_free(&keys)).unwrap();
        unless_made(ensure_free(&folder.path().join("no/keys"))).unwrap_err();
    }

    #[test]
    fn a_passphrase_for_trying_that_another_build_made_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.passphrase");
        private(&file, "first").unwrap();
        private(&file, "second").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "first");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_with_content_is_refused_before_a_passphrase_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("mine"), "x").unwrap();
        let sub = Sub::Create {
            folder: folder.path().to_owned(),
            passphrase: PassphraseFrom { passphrase_file: Some("/nonexistent".into()) },
        };
        let error = run(Args { command: sub }).unwrap_err();
        assert!(error.to_string().contains("is not an empty folder"), "{error}");
    }
}
