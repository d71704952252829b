//! The founding records: the content of the curator's store at the beginning of a cluster.
//!
//! The cluster manager of the first node writes them straight into etcd: no curator serves
//! before there is a cluster.
//!
//! Invariants:
//! - The founding records appear together or not at all, once in the life of a
//!   cluster.

use std::collections::BTreeMap;

use polis_proto::v1;
use prost::Message as _;

use super::disk_keys::{DiskKeys, encrypted, join_write};
use super::names;
use super::nodes::misfit;
use super::store::{CONFIGURATION, Error, NODES, OWNER, Store, decode, node_key};
use super::users;
use polis_wire::identity::{Identity, NodeName};
use polis_wire::node_roles::is_consensus_member;
use polis_wire::pki::{self, Guard, Write};

/// The content of the founding records.
#[derive(Clone, PartialEq)]
pub struct Founding {
    /// The first node.
    pub node: Identity,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its name beside the ID.
    pub name: Option<NodeName>,
    /// The key that may take ownership.
    pub owner_public_key: [u8; 32],
    /// The configuration of the whole cluster.
    pub configuration: v1::ClusterConfiguration,
    /// The keys of its disk, and the key that opens that alone, which is stored encrypted to the
    /// owner; `None` without encryption.
    pub disk: Option<(DiskKeys, Vec<u8>)>,
    /// The protection of its disk.
    pub storage_kind: v1::StorageKind,
    /// Whether the store began with a snapshot: owner and configuration then come from the
    /// snapshot, and the node is one more.
    pub restored: bool,
}

impl std::fmt::Debug for Founding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Founding").field("node", &self.node.id).finish_non_exhaustive()
    }
}

impl<S: pki::Store + Clone> Store<S> {
    /// Writes the founding records, unless they are there.
    ///
    /// # Errors
    ///
    /// [`Error::OtherFounder`] if they are there without this node.
    pub async fn found(&self, founding: &Founding) -> Result<(), Error> {
        let recovery_key = match &founding.disk {
            Some((_, key)) => {
                encrypted(key, &[users::recipient(OWNER, &founding.owner_public_key)?])?
            }
            None => Vec::new(),
        };
        let mut node = v1::Node {
            public_key: founding.node.public_key.to_vec(),
            state: v1::NodeState::Up.into(),
            roles: Some(v1::NodeRoles {
                consensus_member: Some(v1::node_roles::ConsensusMember {}),
                ..Default::default()
            }),
            labels: founding.labels.clone(),
            name: founding.name.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..Default::default()
        };
        if let Some((keys, _)) = &founding.disk {
            keys.apply(&mut node);
            node.recovery_key = recovery_key;
        }
        let owner = v1::InitialOwner { public_key: founding.owner_public_key.to_vec() };
        let node_key = node_key(founding.node.id);
        let records = [
            (node_key.as_str(), node.encode_to_vec()),
            (OWNER, owner.encode_to_vec()),
            (CONFIGURATION, founding.configuration.encode_to_vec()),
        ];
        let guards = records.iter().map(|(key, _)| Guard::Absent((*key).to_owned())).collect();
        let writes = records.into_iter().map(|(key, value)| Write::Put(key.to_owned(), value));
        let join = founding.disk.iter().map(|(keys, _)| join_write(&keys.join_key, founding.node));
        let name = founding.name.iter().map(|name| names::take(name, founding.node.id));
        let writes = writes.chain(join).chain(name).collect();
        if self.kv.commit(guards, writes).await.map_err(Error::Store)? {
            return Ok(());
        }
        // An earlier attempt wrote them: all of them, since it was one step.
        match self.read::<v1::Node>(&node_key).await? {
            Some(_) => self.complete(founding.node).await.map(drop),
            None if founding.restored => self.found_again(founding, &node).await,
            None => Err(Error::OtherFounder { key: node_key }),
        }
    }

    /// Adds the node to a cluster of which no other machine is left.
    async fn found_again(&self, founding: &Founding, node: &v1::Node) -> Result<(), Error> {
        let configuration = self.read::<v1::ClusterConfiguration>(CONFIGURATION).await?;
        let policy = configuration.unwrap_or_default().storage_security_policy();
        if let Some((policy, kind)) = misfit(policy, founding.storage_kind) {
            return Err(Error::StoragePolicy { policy, kind });
        }
        let key = node_key(founding.node.id);
        // The cluster may have given the name to another node before.
        let mut node = v1::Node { name: String::new(), ..node.clone() };
        if let Some((_, recovery_key)) = &founding.disk {
            node.recovery_key = encrypted(recovery_key, &self.owner_recipients().await?)?;
        }
        let join = founding.disk.iter().map(|(keys, _)| join_write(&keys.join_key, founding.node));
        let writes = [Write::Put(key.clone(), node.encode_to_vec())].into_iter().chain(join);
        let absent = Guard::Absent(key.clone());
        let (guards, marks) = self.former_voters().await?;
        let guards = std::iter::once(absent).chain(guards).collect();
        match self.kv.commit(guards, writes.chain(marks).collect()).await.map_err(Error::Store)? {
            true => self.complete(founding.node).await.map(drop),
            false => Err(Error::Contended { key }),
        }
    }

    /// Whether the store began with a snapshot: it has the voters of the former cluster until
    /// they are deleted or are voters again.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn began_again(&self) -> Result<bool, Error> {
        for (key, entry) in self.kv.list(NODES).await.map_err(Error::Store)? {
            if decode::<v1::Node>(&key, &entry.value)?.former_voter {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Marks the voters of the former cluster: their members of etcd are not members of the
    /// one that began with the snapshot, and do not become any by themselves.
    async fn former_voters(&self) -> Result<(Vec<Guard>, Vec<Write>), Error> {
        let (mut guards, mut writes) = (Vec::new(), Vec::new());
        for (key, entry) in self.kv.list(NODES).await.map_err(Error::Store)? {
            let node: v1::Node = decode(&key, &entry.value)?;
            if is_consensus_member(node.roles.as_ref()) {
                let node = v1::Node { former_voter: true, ..node };
                guards.push(Guard::Unchanged(key.clone(), entry.revision));
                writes.push(Write::Put(key, node.encode_to_vec()));
            }
        }
        Ok((guards, writes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_wire::pki::memory::Memory;

    fn founding(key: u8) -> Founding {
        Founding {
            node: Identity::new([key; 32]),
            labels: BTreeMap::from([("rack".to_owned(), "1".to_owned())]),
            name: None,
            owner_public_key: [1; 32],
            configuration: v1::ClusterConfiguration::default(),
            disk: None,
            storage_kind: v1::StorageKind::Authenticated,
            restored: false,
        }
    }

    #[tokio::test]
    async fn a_cluster_is_founded_once_and_stays_as_it_was_founded() {
        let store = Store::new(Memory::default());
        let founding = founding(7);
        store.found(&founding).await.unwrap();
        let other = Founding { owner_public_key: [2; 32], ..founding.clone() };
        store.found(&other).await.unwrap();
        let node = store.complete(founding.node).await.unwrap();
        assert_eq!(node.state(), v1::NodeState::Up);
        assert!(node.roles.unwrap().consensus_member.is_some());
        assert_eq!(node.labels, founding.labels);
        let owner: v1::InitialOwner = store.read(OWNER).await.unwrap().unwrap();
        assert_eq!(owner.public_key, [1; 32]);
    }

    #[tokio::test]
    async fn another_node_does_not_found_the_same_cluster() {
        let store = Store::new(Memory::default());
        store.found(&founding(7)).await.unwrap();
        let refused = store.found(&founding(8)).await;
        assert!(matches!(refused, Err(Error::OtherFounder { .. })));
    }

    #[tokio::test]
    async fn a_store_that_came_from_a_snapshot_takes_one_more_node_and_stays_as_it_was() {
        let store = Store::new(Memory::default());
        store.found(&founding(7)).await.unwrap();
        let again = Founding { restored: true, owner_public_key: [2; 32], ..founding(8) };
        // A power cut may come after it.
        store.found(&again).await.unwrap();
        store.found(&again).await.unwrap();
        assert_eq!(store.complete(again.node).await.unwrap().state(), v1::NodeState::Up);
        assert_eq!(store.complete(founding(7).node).await.unwrap().state(), v1::NodeState::Up);
        let is_former = async |key| store.complete(founding(key).node).await.unwrap().former_voter;
        assert_eq!([is_former(7).await, is_former(8).await], [true, false]);
        let owner: v1::InitialOwner = store.read(OWNER).await.unwrap().unwrap();
        assert_eq!(owner.public_key, [1; 32]);
        // All secrets of the cluster would lie on a disk that its policy rejects.
        let plain =
            Founding { storage_kind: v1::StorageKind::Insecure, restored: true, ..founding(9) };
        let refused = store.found(&plain).await;
        assert!(matches!(refused, Err(Error::StoragePolicy { .. })), "{refused:?}");
        assert!(store.complete(plain.node).await.is_err());
        // Without a snapshot in it, a store gets its founding records as always.
        let store = Store::new(Memory::default());
        store.found(&again).await.unwrap();
        let owner: v1::InitialOwner = store.read(OWNER).await.unwrap().unwrap();
        assert_eq!(owner.public_key, [2; 32]);
    }

    #[tokio::test]
    async fn what_is_missing_or_damaged_is_named() {
        let memory = Memory::default();
        let store = Store::new(memory.clone());
        let node = Identity::new([7; 32]);
        let missing = store.complete(node).await.unwrap_err();
        assert_eq!(missing.to_string(), format!("the cluster's store has no nodes/{}", node.id));
        store.found(&founding(7)).await.unwrap();
        let put = |key: &str, value: &[u8]| vec![Write::Put(key.to_owned(), value.to_vec())];
        pki::Store::commit(&memory, vec![], put(OWNER, &[0xff])).await.unwrap();
        assert!(matches!(store.complete(node).await, Err(Error::Damaged { key }) if key == OWNER));
        let delete = vec![Write::Delete(OWNER.to_owned())];
        pki::Store::commit(&memory, vec![], delete).await.unwrap();
        assert!(matches!(store.complete(node).await, Err(Error::Missing { key }) if key == OWNER));
    }
}
