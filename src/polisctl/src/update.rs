//! `polisctl update`: update bundles, before any cluster gets one.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use ed25519_dalek::VerifyingKey;
use polis_base::hex;
use polis_bundle::{Bundle, ClusterVersion, Error as Fault, EtcdRefusal, EtcdTarget, Manifest};

use super::ask::Sure;
use super::error::{Error, Explain as _};
use super::output::{Document, fields};
use super::{Global, key};

/// Commands about update bundles.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Check a bundle from its first to its last byte, and print what is in it.
    Inspect {
        /// The bundle, which `cargo xtask image --bundle` writes.
        file: PathBuf,
        /// The key that has to have signed it: `release.pub` of a folder of keys, or a file with
        /// 64 hexadecimal digits [default: any].
        #[arg(long, value_name = "FILE")]
        release_key: Option<PathBuf>,
    },
}

/// Runs the command.
pub(super) fn run(command: Command, global: &Global) -> Result<(), Error> {
    let Command::Inspect { file, release_key } = command;
    let expected = release_key.map(|key| trusted(&key, global)).transpose()?;
    let (signer, manifest) =
        check(&file, expected.as_ref()).map_err(|fault| explained(&file, fault))?;
    let signer = hex::encode(signer.as_bytes());
    let checked = if expected.is_some() { "the expected key" } else { "not compared with a key" };
    let value = serde_json::json!({
        "file": file.to_string_lossy(),
        "manifest": manifest,
        "signer": signer,
        "signer_expected": expected.is_some(),
    });
    let part = |part: &polis_bundle::Part| format!("{} bytes, SHA-256 {}", part.size, part.sha256);
    let kubernetes = manifest.kubernetes.as_ref();
    let kubernetes = kubernetes.map_or_else(|| "none".to_owned(), ToString::to_string);
    let lines = [
        ("version", manifest.version.to_string()),
        ("image", manifest.image.clone()),
        ("updates from", manifest.from.to_string()),
        ("etcd", manifest.etcd.to_string()),
        ("kubernetes", kubernetes),
        ("security level", manifest.security_level.to_string()),
        ("architecture", manifest.architecture.clone()),
        ("variant", manifest.variant.clone()),
        ("kernel image", part(&manifest.kernel)),
        ("system", part(&manifest.system)),
        ("signed by", format!("{signer} ({checked})")),
        ("parts", "whole".to_owned()),
    ];
    global.out.print(&Document::new(&value, fields(&lines))?)
}

/// Option of the commands that bring another system to machines.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct OneWay {
    /// Also if it cannot be undone, as with a newer minor version of etcd.
    #[arg(long)]
    pub(super) one_way: bool,
}

impl OneWay {
    /// The sentence about an update that cannot be undone, with a blank before it; empty for any
    /// other. `runs` is the cluster version of etcd as a node has it; empty: not known.
    ///
    /// # Errors
    ///
    /// The etcd of the bundle does not suit the cluster, or this option is missing.
    pub(super) fn warning(
        self,
        runs: &str,
        manifest: &Manifest,
        sure: Sure,
    ) -> Result<String, Error> {
        let runs = runs.parse::<ClusterVersion>().ok();
        match (EtcdTarget { runs, one_way: false }).takes(&manifest.etcd) {
            Ok(()) => Ok(String::new()),
            Err(refusal @ EtcdRefusal::OneWay { .. }) if self.one_way || sure.is_dry_run() => {
                let needs = if self.one_way { "" } else { " The command needs --one-way." };
                Ok(format!(" {}.{needs}", refusal.to_string().replacen("the", "The", 1)))
            }
            Err(refusal) => {
                let help = refusal.help();
                Err(Error::from(anyhow::Error::from(refusal))
                    .context("cannot use the bundle")
                    .or_help(help))
            }
        }
    }
}

/// The key in a file.
fn trusted(file: &Path, global: &Global) -> Result<VerifyingKey, Error> {
    let bytes = key::read_public(file, &global.passphrase)?;
    VerifyingKey::from_bytes(&bytes).doing(|| format!("{} is not a key", file.display()))
}

/// Reads a whole bundle, without a check of the signer, and returns the signer.
pub(super) fn checked(file: &Path) -> Result<(VerifyingKey, Manifest), Error> {
    check(file, None).map_err(|fault| explained(file, fault))
}

/// Reads a whole bundle.
fn check(file: &Path, expected: Option<&VerifyingKey>) -> Result<(VerifyingKey, Manifest), Fault> {
    let reader = File::open(file).map_err(Fault::Read)?;
    let bundle = Bundle::open(io::BufReader::new(reader), expected)?;
    let signer = *bundle.signer();
    let manifest = bundle.parts([&mut io::sink(), &mut io::sink()], &mut |_bytes| ())?;
    Ok((signer, manifest))
}

/// The error of a bundle that cannot be used.
pub(super) fn explained(file: &Path, fault: Fault) -> Error {
    let help = match &fault {
        Fault::Refused(refusal) => Some(refusal.help()),
        Fault::Read(_) | Fault::Write { .. } => None,
    };
    let error = Error::from(anyhow::Error::from(fault));
    let error = error.context(format!("cannot use {}", file.display()));
    match help {
        Some(help) => error.or_help(help),
        None => error,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ed25519_dalek::SigningKey;
    use polis_bundle::{Part, Refusal, write};

    use super::*;

    /// A small bundle.
    pub(crate) fn bundle(key: &SigningKey) -> Vec<u8> {
        let (kernel, system) = ([1; 300], [2; 500]);
        let text = format!(
            r#"{{"version":"1.0.0","security_level":1,"architecture":"x86_64","variant":"base",
            "image":"00","from":"0.9.0","etcd":"3.5.16","kernel":{},"system":{}}}"#,
            serde_json::to_string(&Part::of(&kernel[..]).unwrap()).unwrap(),
            serde_json::to_string(&Part::of(&system[..]).unwrap()).unwrap(),
        );
        let manifest: Manifest = serde_json::from_str(&text).unwrap();
        let mut bundle = Vec::new();
        write(&mut bundle, &manifest, key, [&mut &kernel[..], &mut &system[..]]).unwrap();
        bundle
    }

    #[test]
    fn a_bundle_is_checked_to_its_last_byte_and_for_its_signer() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("update");
        let key = SigningKey::from_bytes(&[3; 32]);
        let mut bytes = bundle(&key);
        std::fs::write(&file, &bytes).unwrap();
        let (signer, manifest) = check(&file, Some(&key.verifying_key())).unwrap();
        assert_eq!((signer, manifest.system.size), (key.verifying_key(), 500));
        let other = SigningKey::from_bytes(&[4; 32]).verifying_key();
        let error = check(&file, Some(&other)).unwrap_err();
        assert!(matches!(error, Fault::Refused(Refusal::Signer { .. })), "{error}");
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        let text = explained(&file, check(&file, None).unwrap_err()).render();
        assert!(text.contains("its system was changed") && text.contains("help: copy"), "{text}");
        let absent = explained(&file, check(&folder.path().join("no"), None).unwrap_err()).render();
        assert!(absent.contains("cannot read the bundle"), "{absent}");
    }
}
