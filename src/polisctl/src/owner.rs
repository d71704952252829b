//! `polisctl owner`: the key that founds a cluster.

use std::path::PathBuf;

use super::error::Error;
use super::output::{self, Document, fields};
use super::{Global, key};
use polis_base::hex;
use polis_wire::identity::Fingerprint;

/// Commands about the owner's key.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Make the key of a cluster's owner, or of another user.
    ///
    /// Another user keeps the key, and gives the public half to an owner for `user create`.
    /// Ed25519 in PKCS#8 and PEM, mode 0600, with the public half beside it. An existing
    /// key is never overwritten.
    Create {
        /// The path of the new key [default: owner.key in the folder of polisctl].
        #[arg(short, long, value_name = "FILE", value_parser = output::file())]
        out: Option<PathBuf>,
        /// Protect it with a passphrase, which is asked for or read from --passphrase-file.
        #[arg(long)]
        passphrase: bool,
    },
    /// Print the public half of a key.
    Show {
        /// The key, public or private [default: owner.key in the folder of polisctl].
        file: Option<PathBuf>,
    },
}

/// Runs the command.
pub(super) fn run(command: Command, global: &Global) -> Result<(), Error> {
    let (file, public_file, public) = match command {
        Command::Create { out, passphrase } => {
            let file = out.unwrap_or_else(|| global.contexts.owner_key());
            let wanted = passphrase || global.passphrase.file.is_some();
            let (public_file, public) = key::create(&file, wanted.then_some(&global.passphrase))?;
            global.out.remark(
                "Keep an offline backup of this key. Its holder owns every cluster that is \
                 bootstrapped with it; a user whose key is lost gets another from an owner.",
            );
            (file, Some(public_file), public)
        }
        Command::Show { file } => {
            let file = file.unwrap_or_else(|| global.contexts.owner_key());
            let public = key::read_public(&file, &global.passphrase)?;
            (file, None, public)
        }
    };
    let fingerprint = Fingerprint::of_key(&public).to_string();
    let value = serde_json::json!({
        "file": file.to_string_lossy(),
        "public_key_file": public_file.as_ref().map(|file| file.to_string_lossy()),
        "public_key": hex::encode(&public),
        "fingerprint": fingerprint,
    });
    let mut lines = vec![("key", file.display().to_string())];
    if let Some(public_file) = &public_file {
        lines.push(("public key file", public_file.display().to_string()));
    }
    lines.push(("public key", hex::encode(&public)));
    lines.push(("fingerprint", fingerprint));
    global.out.print(&Document::new(&value, fields(&lines))?)
}
