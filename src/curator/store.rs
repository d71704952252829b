//! Keeps what the cluster knows about itself: its nodes, its owner, its configuration.
//!
//! ```text
//! nodes/<node ID>         v1.Node
//! global/initial_owner    v1.InitialOwner
//! cluster/configuration   v1.ClusterConfiguration
//! pki/...                 see `pki`: the cluster's CA and what it issued
//! ```
//!
//! The cluster manager of the first node writes the founding records straight
//! into etcd: no curator serves before there is a cluster.
//!
//! Invariants:
//! - The founding records appear together or not at all, once in the life of a
//!   cluster.
//! - Reading never repairs: a record that is not understood is an error.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use polis_proto::v1;
use prost::Message;

use crate::identity::{Identity, NodeId};
use crate::pki::{self, Certificate, Guard, Issued, Issuer, Mode, Namespace, Template, Write};

/// Where the cluster's own PKI is.
const PKI: &str = "pki/";

const OWNER: &str = "global/initial_owner";
const CONFIGURATION: &str = "cluster/configuration";

/// The cluster's CA: signs nodes and users.
const AUTHORITY: &str = "cluster";

/// Why the store cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// etcd did not answer, or refused.
    #[error("cannot use the cluster's store")]
    Store(#[source] anyhow::Error),
    /// A certificate cannot be made or read.
    #[error("cannot get a certificate of the cluster")]
    Pki(#[from] pki::Error),
    /// Something is missing that every cluster has.
    #[error("the cluster's store has no {key}")]
    Missing {
        /// Its key.
        key: String,
    },
    /// A record cannot be read.
    #[error("the record {key} in the cluster's store is damaged")]
    Damaged {
        /// Its key.
        key: String,
    },
    /// The store belongs to a cluster that another node founded.
    #[error("the cluster's store was begun by another node: it has no {key}")]
    OtherFounder {
        /// The record that would be there.
        key: String,
    },
}

impl Error {
    /// Whether the same call may succeed if it is made again.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            Self::Store(_) => true,
            Self::Pki(error) => error.retriable(),
            Self::Missing { .. } | Self::Damaged { .. } | Self::OtherFounder { .. } => false,
        }
    }
}

/// What a cluster is founded with.
#[derive(Clone, Debug, PartialEq)]
pub struct Founding {
    /// The first node.
    pub node: Identity,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whoever may take ownership.
    pub owner_public_key: [u8; 32],
    /// What holds for the whole cluster.
    pub configuration: v1::ClusterConfiguration,
}

/// The records of the curator.
#[derive(Clone, Debug)]
pub struct Store<S> {
    kv: S,
}

impl<S: pki::Store + Clone> Store<S> {
    /// The records that lie in `kv`, the curator's namespace of etcd.
    pub fn new(kv: S) -> Self {
        Self { kv }
    }

    /// Writes the founding records, unless they are there.
    ///
    /// # Errors
    ///
    /// [`Error::OtherFounder`] if they are there without this node.
    pub async fn found(&self, founding: &Founding) -> Result<(), Error> {
        let node = v1::Node {
            public_key: founding.node.public_key.to_vec(),
            state: v1::NodeState::Up.into(),
            roles: Some(v1::NodeRoles {
                consensus_member: Some(v1::node_roles::ConsensusMember {}),
                ..Default::default()
            }),
            labels: founding.labels.clone(),
            ..Default::default()
        };
        let owner = v1::InitialOwner { public_key: founding.owner_public_key.to_vec() };
        let node_key = node_key(founding.node.id);
        let records = [
            (node_key.as_str(), node.encode_to_vec()),
            (OWNER, owner.encode_to_vec()),
            (CONFIGURATION, founding.configuration.encode_to_vec()),
        ];
        let guards = records.iter().map(|(key, _)| Guard::Absent((*key).to_owned())).collect();
        let writes = records.into_iter().map(|(key, value)| Write::Put(key.to_owned(), value));
        if self.kv.commit(guards, writes.collect()).await.map_err(Error::Store)? {
            return Ok(());
        }
        // An earlier attempt wrote them: all of them, since it was one step.
        match self.read::<v1::Node>(&node_key).await? {
            Some(_) => self.complete(founding.node).await.map(drop),
            None => Err(Error::OtherFounder { key: node_key }),
        }
    }

    /// Checks that this is the store of a founded cluster with `node` in it, and
    /// returns what it knows of the node.
    ///
    /// # Errors
    ///
    /// The first record that is missing or damaged.
    pub async fn complete(&self, node: Identity) -> Result<v1::Node, Error> {
        let key = node_key(node.id);
        let found = self.read::<v1::Node>(&key).await?;
        let found = found.ok_or_else(|| Error::Missing { key: key.clone() })?;
        if found.public_key != node.public_key {
            return Err(Error::Damaged { key });
        }
        let missing = |key: &str| Error::Missing { key: key.to_owned() };
        let _owner = self.read::<v1::InitialOwner>(OWNER).await?.ok_or_else(|| missing(OWNER))?;
        let configuration = self.read::<v1::ClusterConfiguration>(CONFIGURATION).await?;
        let _configuration = configuration.ok_or_else(|| missing(CONFIGURATION))?;
        Ok(found)
    }

    /// The certificate of the cluster's CA, made if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn ensure_authority(&self, now: SystemTime) -> Result<Issued, Error> {
        Ok(self.certificates().ensure(&authority(), now).await?)
    }

    /// DER of the cluster's CA, which is there since the cluster was founded.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`].
    pub async fn authority(&self, now: SystemTime) -> Result<Vec<u8>, Error> {
        // `ensure` makes what is missing; an authority is never without a CRL.
        if self.certificates().crl(&authority()).await?.is_none() {
            return Err(Error::Missing { key: format!("{PKI}authorities/{AUTHORITY}") });
        }
        Ok(self.ensure_authority(now).await?.der)
    }

    /// The certificate of `node`, made if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn ensure_node_certificate(
        &self,
        node: Identity,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        let wish = Certificate {
            issuer: Issuer::Authority(Arc::new(authority())),
            name: node.id.to_string(),
            template: Template::Node,
            mode: Mode::External(node.public_key),
        };
        Ok(self.certificates().ensure(&wish, now).await?)
    }

    fn certificates(&self) -> Namespace<S> {
        Namespace::new(self.kv.clone(), PKI)
    }

    async fn read<M: Message + Default>(&self, key: &str) -> Result<Option<M>, Error> {
        let Some(entry) = self.kv.get(key).await.map_err(Error::Store)? else { return Ok(None) };
        let decoded = M::decode(entry.value.as_slice());
        decoded.map(Some).map_err(|_reason| Error::Damaged { key: key.to_owned() })
    }
}

fn node_key(id: NodeId) -> String {
    format!("nodes/{id}")
}

fn authority() -> Certificate {
    Certificate {
        issuer: Issuer::Itself,
        name: AUTHORITY.to_owned(),
        template: Template::ClusterAuthority,
        mode: Mode::Managed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::memory::Memory;
    use crate::sys::clock;

    fn founding(key: u8) -> Founding {
        Founding {
            node: Identity::new([key; 32]),
            labels: BTreeMap::from([("rack".to_owned(), "1".to_owned())]),
            owner_public_key: [1; 32],
            configuration: v1::ClusterConfiguration::default(),
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

    #[tokio::test]
    async fn the_authority_and_the_node_s_certificate_are_made_once() {
        let store = Store::new(Memory::default());
        let node = Identity::new([7; 32]);
        let authority = store.ensure_authority(clock::now()).await.unwrap();
        let first = store.ensure_node_certificate(node, clock::now()).await.unwrap();
        let again = store.ensure_node_certificate(node, clock::now()).await.unwrap();
        assert_eq!(first.der, again.der);
        assert_eq!(first.issuer_der, authority.der);
    }
}
