//! The files of a member: what must be on its disk before etcd may listen, and how it is written.
//!
//! ```text
//! /data/etcd/bootstrapping      there until a new cluster is complete on the disk
//! /data/etcd/alone              there while this member is the only one
//! /data/etcd/peer_pki/*.pem     the trusted authorities, and the member's own certificate
//! /data/etcd/peer.crl           the revoked certificates
//! ```

use std::sync::Arc;

use zeroize::Zeroizing;

use polis_base::files::{Error, Etcd};
use polis_wire::identity::{Identity, NodeKey};
use polis_wire::pki::{self, Authorities, Certificate, Issuer, Mode, Template};

use super::Peer;
use polis_runtime::save::Save as _;

/// The name of the authority that signs etcd peers.
const AUTHORITY: &str = "etcd-peers";

/// The authority of the etcd peers of this cluster.
pub(crate) fn authority() -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: AUTHORITY.to_owned(),
        template: Template::EtcdAuthority,
        mode: Mode::Managed,
    })
}

/// The certificate of a member, for the existing key of the node.
pub(super) fn peer_certificate(identity: &Identity, peer: &Peer) -> Certificate {
    Certificate {
        issuer: Issuer::Authority(authority()),
        name: identity.id.to_string(),
        template: Template::EtcdPeer { host: peer.host.clone() },
        mode: Mode::External(identity.public_key),
    }
}

/// The state of the disk that a start finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing: this machine was never a member.
    Nothing,
    /// A bootstrap that was interrupted. No other machine has seen its cluster yet, so it
    /// may be thrown away.
    Unfinished,
    /// Every file that a member needs.
    Complete,
    /// Some files, but not all: this is damage.
    Damaged {
        /// The first file that is missing.
        missing: &'static str,
    },
}

/// Examines the disk. Blocks.
pub(super) fn look(tree: &Etcd) -> Result<Found, Error> {
    if tree.bootstrapping.read()?.is_some() {
        return Ok(Found::Unfinished);
    }
    let parts = [
        ("data", !tree.data.is_empty()?),
        ("certificate of the authority", tree.peer_pki.ca.read()?.is_some()),
        ("certificate", tree.peer_pki.cert.read()?.is_some()),
        ("key", tree.peer_pki.key.read()?.map(Zeroizing::new).is_some()),
        ("CRL", tree.peer_crl.read()?.is_some()),
    ];
    Ok(classify(&parts))
}

fn classify(parts: &[(&'static str, bool)]) -> Found {
    if parts.iter().all(|(_, there)| !there) {
        return Found::Nothing;
    }
    let missing = parts.iter().find(|(_, there)| !there);
    missing.map_or(Found::Complete, |(name, _)| Found::Damaged { missing: name })
}

/// The certificate of a member in DER, and the authorities of the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) authorities: Authorities,
    pub(super) certificate: Vec<u8>,
    pub(super) crl: Vec<u8>,
}

/// The certificates that etcd trusts, as it reads them at its start: the authorities, and the
/// certificates of members that were away during the last rotation, each by itself (Go's `Verify`
/// accepts a certificate that is in the pool).
pub(super) fn trusted_pem(authorities: &Authorities) -> Vec<u8> {
    let pinned = authorities.pinned.iter().map(Vec::as_slice);
    pki::certificates_pem(authorities.trusted().chain(pinned))
}

/// Writes all of it; each file is replaced whole. Safe to repeat.
pub(super) async fn write(
    tree: &Etcd,
    credentials: &Credentials,
    key: &NodeKey,
) -> Result<(), super::Error> {
    let key = key.to_pkcs8_pem().map_err(super::Error::Key)?;
    tree.peer_pki.dir.create()?;
    let Credentials { authorities, certificate, .. } = credentials;
    tree.peer_pki.ca.save(trusted_pem(authorities)).await?;
    // It is wiped once it is written.
    tree.peer_pki.key.save(key).await?;
    tree.peer_pki.cert.save(authorities.chain_pem(certificate)).await?;
    tree.peer_crl.save(pki::crl_pem(&credentials.crl).into_bytes()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_empty_complete_or_damaged() {
        let parts =
            |there: [bool; 3]| classify(&[("a", there[0]), ("b", there[1]), ("c", there[2])]);
        assert_eq!(parts([false; 3]), Found::Nothing);
        assert_eq!(parts([true; 3]), Found::Complete);
        assert_eq!(parts([true, false, false]), Found::Damaged { missing: "b" });
        assert_eq!(parts([false, true, true]), Found::Damaged { missing: "a" });
    }

    #[test]
    fn an_interrupted_bootstrap_is_distinguished_from_damage() {
        let directory = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(directory.path());
        let tree = &root.data.etcd;
        tree.data.create().unwrap();
        assert_eq!(look(tree).unwrap(), Found::Nothing);
        tree.bootstrapping.write(b"").unwrap();
        std::fs::create_dir(tree.data.path().join("member")).unwrap();
        assert_eq!(look(tree).unwrap(), Found::Unfinished);
        tree.bootstrapping.remove().unwrap();
        let damaged = Found::Damaged { missing: "certificate of the authority" };
        assert_eq!(look(tree).unwrap(), damaged);
    }
}
