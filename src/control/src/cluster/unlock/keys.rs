//! The keys of a node's disk: makes, derives and encrypts them.
//!
//! ```text
//! node unlock key (NUK)     on the ESP, plain or sealed --+
//!                                                         +--HKDF-SHA256--> passphrase, slot 0
//! cluster unlock key (CUK)  in etcd, or a keeper's share -+
//! recovery key              with the owner -------------------------------> slot 1
//! ```
//!
//! Invariants:
//! - Neither half reveals anything about the passphrase without the other.
//! - This module prints no key, and wipes each with its last copy.
//!
//! What this module does not do: store or fetch them (`sealer`, `keeper`).

use std::fmt;

use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom as _, SystemRandom};
use uuid::Uuid;
use zeroize::Zeroizing;

use crate::cluster::Error;
use polis_machine::storage::key::{Passphrase, RecoveryKey, SIZE};

/// Half of the key of a disk, or a seed of the same size.
#[derive(Clone, PartialEq, Eq)]
pub struct Half(Zeroizing<[u8; SIZE]>);

impl Half {
    /// A new one.
    pub(in crate::cluster) fn random() -> Result<Self, Error> {
        random().map(Self)
    }

    /// From stored bytes; `None` for anything but [`SIZE`] bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut half = Zeroizing::new([0; SIZE]);
        (bytes.len() == SIZE).then(|| half.copy_from_slice(bytes))?;
        Some(Self(half))
    }

    /// Its bytes, for a keeper.
    #[must_use]
    pub fn bytes(&self) -> &[u8; SIZE] {
        &self.0
    }
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The secrets of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    /// The node's half of the key of its disk.
    pub node: Half,
    /// The seed of the key by which it asks a curator for the other half.
    pub join: Half,
    /// The seed of the node's own key, while no data partition keeps it.
    pub key: Option<Half>,
}

impl Secrets {
    pub(in crate::cluster) fn random() -> Result<Self, Error> {
        Ok(Self { node: Half::random()?, join: Half::random()?, key: None })
    }

    /// The key by which this node asks a curator.
    #[must_use]
    pub fn join_key(&self) -> ed25519_dalek::SigningKey {
        ed25519_dalek::SigningKey::from_bytes(self.join.bytes())
    }
}

/// The passphrase of slot 0 of the data partition with this GUID.
pub(in crate::cluster) fn passphrase(
    node: &Half,
    cluster: &Half,
    partition: Uuid,
) -> Result<Passphrase, Error> {
    expand(node, cluster, &format!("polis data {partition}")).map(Passphrase::new)
}

/// The key that encrypts the recovery key in the journal of a bootstrap: the holder of both
/// halves can open the disk anyway.
pub(in crate::cluster) fn journal_key(
    node: &Half,
    cluster: &Half,
) -> Result<Zeroizing<[u8; SIZE]>, Error> {
    expand(node, cluster, "polis journal")
}

fn expand(node: &Half, cluster: &Half, purpose: &str) -> Result<Zeroizing<[u8; SIZE]>, Error> {
    struct Bytes;
    impl KeyType for Bytes {
        fn len(&self) -> usize {
            SIZE
        }
    }
    let mut both = Zeroizing::new([0; 2 * SIZE]);
    both[..SIZE].copy_from_slice(node.bytes());
    both[SIZE..].copy_from_slice(cluster.bytes());
    // Both halves are random: a salt would add nothing.
    let key = Salt::new(HKDF_SHA256, &[]).extract(&*both);
    let mut out = Zeroizing::new([0; SIZE]);
    key.expand(&[purpose.as_bytes()], Bytes)
        .and_then(|key| key.fill(&mut *out))
        .map_err(|_unspecified| Error::Random)?;
    Ok(out)
}

/// A new recovery key, not shown to anyone yet.
pub(in crate::cluster) fn recovery_key() -> Result<RecoveryKey, Error> {
    random().map(RecoveryKey::new)
}

/// A nonce.
pub(in crate::cluster) fn nonce() -> Result<[u8; 12], Error> {
    let mut nonce = [0; 12];
    SystemRandom::new().fill(&mut nonce).map_err(|_unspecified| Error::Random)?;
    Ok(nonce)
}

fn random() -> Result<Zeroizing<[u8; SIZE]>, Error> {
    let mut bytes = Zeroizing::new([0; SIZE]);
    SystemRandom::new().fill(&mut *bytes).map_err(|_unspecified| Error::Random)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(byte: u8) -> Half {
        Half::new(&[byte; SIZE]).unwrap()
    }

    #[test]
    fn the_passphrase_is_that_of_any_other_hkdf() {
        // RFC 5869 with two calls of HMAC-SHA256, computed elsewhere.
        let text = passphrase(&half(1), &half(2), Uuid::from_bytes([9; 16])).unwrap().text();
        let text = String::from_utf8(text.to_vec()).unwrap();
        assert_eq!(text, "bfae9ebd021a52756604426f1129e6a93138221f4e3fb82f1df905dfad0f004d");
    }

    #[test]
    fn each_half_and_the_partition_matter() {
        let text = |node, cluster, partition: u8| {
            let partition = Uuid::from_bytes([partition; 16]);
            passphrase(&half(node), &half(cluster), partition).unwrap().text()
        };
        let all = [text(1, 2, 3), text(2, 1, 3), text(1, 3, 3), text(3, 2, 3), text(1, 2, 4)];
        let different: std::collections::BTreeSet<_> =
            all.iter().map(|text| text.to_vec()).collect();
        assert_eq!(different.len(), all.len());
    }

    #[test]
    fn a_key_of_another_length_is_none_and_none_is_printed() {
        assert_eq!(Half::new(&[1; 31]), None);
        assert_eq!(Half::new(&[1; 33]), None);
        let secrets = Secrets { node: half(0xa7), join: half(0xa7), key: None };
        assert_eq!(format!("{secrets:?}"), "Secrets { node: …, join: …, key: None }");
    }
}
