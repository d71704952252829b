//! Disk keys: the cluster's part of the keys of a node's disk, in the node's record.

use std::fmt;

use polis_proto::v1;
use prost::Message as _;

use super::store::{Error, Outcome, Store, join_key_at, node_key};
use polis_wire::age::{self, Recipient};
use polis_wire::identity::Identity;
use polis_wire::pki::{self, Write};

/// The part of a node's record about its disk.
#[derive(Clone, PartialEq, Eq)]
pub struct DiskKeys {
    /// The cluster's half of the key.
    pub cluster_unlock_key: [u8; 32],
    /// The key by which the node asks for that half.
    pub join_key: [u8; 32],
    /// Whether the node's half is sealed to a TPM.
    pub tpm: bool,
}

impl fmt::Debug for DiskKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskKeys").field("tpm", &self.tpm).finish_non_exhaustive()
    }
}

impl DiskKeys {
    /// Writes the keys into a record; returns whether that changed anything.
    pub(super) fn apply(&self, node: &mut v1::Node) -> bool {
        let before = (node.cluster_unlock_key.clone(), node.join_key.clone(), node.tpm);
        node.cluster_unlock_key = self.cluster_unlock_key.to_vec();
        node.join_key = self.join_key.to_vec();
        node.tpm = self.tpm;
        before != (node.cluster_unlock_key.clone(), node.join_key.clone(), node.tpm)
    }
}

impl<S: pki::Store + Clone> Store<S> {
    /// Updates the record of `node` to the keys that opened its disk: after a recovery the
    /// node's keys are newer.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`], or the error of a store that does not answer.
    pub async fn keep_disk_keys(&self, node: Identity, keys: &DiskKeys) -> Result<(), Error> {
        let key = node_key(node.id);
        let kept = self.update(&key, |old: Option<v1::Node>| {
            let mut record = old.ok_or_else(|| Error::Missing { key: key.clone() })?;
            let former = record.join_key.clone();
            if !keys.apply(&mut record) {
                return Ok::<_, Error>(Outcome::Keep(record));
            }
            let forget = (!former.is_empty() && former != keys.join_key)
                .then(|| Write::Delete(join_key_at(&former)));
            let writes = std::iter::once(join_write(&keys.join_key, node)).chain(forget).collect();
            Ok(Outcome::Put(record, Vec::new(), writes))
        });
        kept.await.map(drop)
    }
}

/// The recovery key of a disk as records have it: only the owners can read it.
///
/// # Errors
///
/// When the kernel gives no random bytes.
pub(super) fn encrypted(recovery_key: &[u8], owners: &[Recipient]) -> Result<Vec<u8>, Error> {
    age::encrypt(owners, recovery_key).map_err(|source| {
        Error::Pki(pki::Error::Random {
            name: "the encryption of a recovery key".to_owned(),
            source,
        })
    })
}

/// Makes the node findable by its join key.
pub(super) fn join_write(join_key: &[u8; 32], node: Identity) -> Write {
    let record = v1::JoinKey { node_id: node.id.to_string() };
    Write::Put(join_key_at(join_key), record.encode_to_vec())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ed25519_dalek::SigningKey;

    use super::*;
    use crate::curator::Founding;
    use polis_wire::pki::memory::Memory;

    #[tokio::test]
    async fn the_record_follows_the_disk_and_the_old_join_key_is_void() {
        let owner = SigningKey::from_bytes(&[6; 32]);
        let memory = Memory::default();
        let store = Store::new(memory.clone());
        let node = Identity::new([7; 32]);
        let first = DiskKeys { cluster_unlock_key: [1; 32], join_key: [2; 32], tpm: false };
        let founding = Founding {
            node,
            labels: BTreeMap::new(),
            name: None,
            owner_public_key: owner.verifying_key().to_bytes(),
            configuration: v1::ClusterConfiguration::default(),
            disk: Some((first.clone(), vec![9; 32])),
            storage_kind: v1::StorageKind::Authenticated,
            restored: false,
        };
        store.found(&founding).await.unwrap();
        let record = store.complete(node).await.unwrap();
        assert_eq!(record.cluster_unlock_key, [1; 32]);
        let saved = record.recovery_key;
        let mut read = Vec::new();
        age::decrypt(&age::Identity::of_key(&owner), &*saved, &mut read).unwrap();
        assert_eq!(read, [9; 32]);
        let has_key = |value: &[u8]| value.windows(32).any(|bytes| bytes == [9; 32]);
        assert!(!memory.contents().values().any(|value| has_key(value)), "a plain recovery key");
        let before = memory.contents();
        store.keep_disk_keys(node, &first).await.unwrap();
        assert_eq!(memory.contents(), before, "nothing to change");

        let second = DiskKeys { cluster_unlock_key: [3; 32], join_key: [4; 32], tpm: true };
        store.keep_disk_keys(node, &second).await.unwrap();
        let record = store.complete(node).await.unwrap();
        assert_eq!((record.cluster_unlock_key, record.tpm), (vec![3; 32], true));
        assert_eq!(record.recovery_key, saved, "the recovery key stays");
        let contents = memory.contents();
        let joins: Vec<_> = contents.keys().filter(|key| key.starts_with("join_keys/")).collect();
        assert_eq!(joins, [&join_key_at(&[4; 32])]);
    }

    #[test]
    fn keys_are_not_shown() {
        let keys = DiskKeys { cluster_unlock_key: [77; 32], join_key: [78; 32], tpm: true };
        assert_eq!(format!("{keys:?}"), "DiskKeys { tpm: true, .. }");
    }
}
