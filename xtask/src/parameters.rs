//! The node parameters of machines that `cargo xtask` starts.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{
    DecodePrivateKey as _, EncodePrivateKey as _, EncodePublicKey as _, KeypairBytes,
};
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::node_parameters::Cluster;
use polis_proto::v1::{
    ClusterBootstrap, ClusterConfiguration, ConsoleConfiguration, NodeParameters,
};
use prost::Message as _;

use crate::host::Help;

/// Parameters that bootstrap a cluster. `tui` names a terminal of the guest that carries the
/// console. `name` is the node's name beside its ID.
pub(crate) fn bootstrap(owner: &SigningKey, tui: Option<&str>, name: &str) -> Vec<u8> {
    founding(owner, tui, StorageSecurityPolicy::Unspecified, name)
}

/// The same, with this policy for the data partition.
pub(crate) fn with_policy(
    owner: &SigningKey,
    tui: Option<&str>,
    policy: StorageSecurityPolicy,
) -> Vec<u8> {
    founding(owner, tui, policy, "")
}

fn founding(
    owner: &SigningKey,
    tui: Option<&str>,
    policy: StorageSecurityPolicy,
    name: &str,
) -> Vec<u8> {
    let configuration = ClusterConfiguration {
        storage_security_policy: policy.into(),
        ..ClusterConfiguration::default()
    };
    let bootstrap = ClusterBootstrap {
        owner_public_key: owner.verifying_key().to_bytes().to_vec(),
        cluster_configuration: Some(configuration),
        name: name.to_owned(),
        ..ClusterBootstrap::default()
    };
    NodeParameters {
        cluster: Some(Cluster::ClusterBootstrap(bootstrap)),
        console: tui.map(|tui| ConsoleConfiguration { tui: vec![tui.to_owned()] }),
        ..NodeParameters::default()
    }
    .encode_to_vec()
}

/// The key in `dir/owner.key`; created with `dir/owner.pub` if it does not exist.
pub(crate) fn owner_key(dir: &Path) -> Result<SigningKey> {
    let file = dir.join("owner.key");
    match fs::read_to_string(&file) {
        Ok(pem) => SigningKey::from_pkcs8_pem(&pem)
            .map_err(|_error| anyhow!("{} has no whole Ed25519 key in PEM", file.display()))
            .context(Help("remove it: a run without `--keep` makes another key".to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => make_key(dir),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

fn make_key(dir: &Path) -> Result<SigningKey> {
    let key = SigningKey::from_bytes(&rand::random());
    // Without the public half, which OpenSSL 3.0 would not read.
    let pair = KeypairBytes { secret_key: key.to_bytes(), public_key: None };
    let private = pair.to_pkcs8_pem(LineEnding::LF).context("cannot encode the owner's key")?;
    let public = key
        .verifying_key()
        .to_public_key_pem(LineEnding::LF)
        .context("cannot encode the owner's public key")?;
    write_new(&dir.join("owner.key"), 0o600, private.as_bytes())?;
    fs::write(dir.join("owner.pub"), public).context("cannot write the owner's public key")?;
    Ok(key)
}

/// Writes a new file: a key is never overwritten.
fn write_new(path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
    let written = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(bytes));
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn an_owner_key_is_made_once_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = owner_key(dir.path()).unwrap();
        let second = owner_key(dir.path()).unwrap();
        assert_eq!(first.to_bytes(), second.to_bytes());
        let mode = fs::metadata(dir.path().join("owner.key")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(dir.path().join("owner.key"), "noise").unwrap();
        let error = owner_key(dir.path()).unwrap_err();
        assert!(error.is::<Help>(), "{error:#}");
        assert!(format!("{error:#}").contains("owner.key has no whole Ed25519 key"), "{error:#}");
    }

    #[test]
    fn parameters_name_the_owner_and_the_terminal() {
        let owner = SigningKey::from_bytes(&[7; 32]);
        let parameters =
            NodeParameters::decode(&*bootstrap(&owner, Some("hvc0"), "node-1")).unwrap();
        assert_eq!(parameters.console.unwrap().tui, ["hvc0"]);
        let Some(Cluster::ClusterBootstrap(bootstrap)) = parameters.cluster else {
            panic!("a bootstrap")
        };
        assert_eq!(bootstrap.owner_public_key, owner.verifying_key().to_bytes());
    }
}
