//! The store of the curator: the records of nodes, of the owner and of the configuration in etcd.
//!
//! ```text
//! nodes/<node ID>         v1.Node
//! join_keys/<hex>         v1.JoinKey: the node that has it
//! node_names/<name>       v1.NodeName: the node that has it
//! users/<name>            v1.User
//! global/initial_owner    v1.InitialOwner
//! global/register_ticket  v1.RegisterTicket
//! cluster/configuration   v1.ClusterConfiguration
//! cluster/registries      v1.Registries
//! cluster/snapshot_credentials  v1.SnapshotCredentials, see `snapshot_target`
//! cluster/update          v1.ClusterUpdate
//! cluster/rotation        v1.Rotation: the last one of the authorities
//! pod_prefixes/<prefix>   v1.ClusterNetworkOwner: the node whose pods have these addresses
//! mesh_keys/<hex>         v1.ClusterNetworkOwner: the node that has this key of the mesh
//! audit/...               see `audit`: the audit log
//! leader/<lease>          v1.Leader, see `leader`
//! pki/...                 see `pki`: the cluster's CA and what it issued
//! ```
//! The leader writes through `fenced`: it reads a record, makes a new one of it and commits
//! the new one if the record has not changed since.
//!
//! Invariants:
//! - Reading never repairs: a record that cannot be decoded is an error.
//! - Two changes of a record at the same moment are applied one after the other; a write
//!   without an answer is never retried.
//!
//! What this module does not do: know the allowed changes of a record (`state`, `nodes`,
//! `tickets`, `users`), or write the first records (`founding`).

use std::sync::Arc;
use std::time::SystemTime;

use polis_proto::v1;
use prost::Message;

use polis_base::hex;
use polis_wire::identity::{Identity, NodeId};
use polis_wire::pki::{
    self, Authorities, Certificate, Guard, Issued, Issuer, Mode, Namespace, Reason, Template, Write,
};

/// The place of the cluster's own PKI.
const PKI: &str = "pki/";

pub(super) const NODES: &str = "nodes/";
pub(super) const JOIN_KEYS: &str = "join_keys/";
pub(super) const NODE_NAMES: &str = "node_names/";
pub(super) const USERS: &str = "users/";
pub(super) const LEADERS: &str = "leader/";
pub(super) const OWNER: &str = "global/initial_owner";
pub(super) const TICKET: &str = "global/register_ticket";
/// The key of the configuration of the whole cluster, for watchers.
pub const CONFIGURATION: &str = "cluster/configuration";
pub(super) const SNAPSHOT_CREDENTIALS: &str = "cluster/snapshot_credentials";
pub(super) const REGISTRIES: &str = "cluster/registries";
pub(super) const UPDATE: &str = "cluster/update";
pub(super) const ROTATION: &str = "cluster/rotation";
pub(super) const POD_PREFIXES: &str = "pod_prefixes/";
pub(super) const MESH_KEYS: &str = "mesh_keys/";

/// The number of attempts at a record that others change at the same moment. Each failure
/// means that another writer was faster, so this many in a row point to a fault.
pub(super) const CONFLICTS_MAX: u32 = 32;

/// The cluster's CA: signs nodes and users.
const AUTHORITY: &str = "cluster";

/// The reason why the store cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// etcd did not answer, or refused.
    #[error("cannot use the cluster's store")]
    Store(#[source] anyhow::Error),
    /// A certificate cannot be made or read.
    #[error("cannot get a certificate of the cluster")]
    Pki(#[from] pki::Error),
    /// A record is missing that every cluster has.
    #[error("the cluster's store has no {key}")]
    Missing {
        /// The record's key.
        key: String,
    },
    /// A record cannot be read.
    #[error("the record {key} in the cluster's store is damaged")]
    Damaged {
        /// The record's key.
        key: String,
    },
    /// Other writers changed the same record, again and again.
    #[error("the record {key} in the cluster's store changes too often")]
    Contended {
        /// The record's key.
        key: String,
    },
    /// The store belongs to a cluster that another node founded.
    #[error("the cluster's store was created by another node: it has no {key}")]
    OtherFounder {
        /// The key of the record that is missing.
        key: String,
    },
    /// The disk of the node that restores a cluster does not meet that cluster's policy.
    #[error(
        "the storage policy of the cluster in the snapshot is {policy}, and the disk of this node \
         is {kind}"
    )]
    StoragePolicy {
        /// The demanded protection.
        policy: &'static str,
        /// The actual protection.
        kind: &'static str,
    },
}

impl Error {
    /// Whether a retry of the same call may succeed.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            Self::Store(_) | Self::Contended { .. } => true,
            Self::Pki(error) => error.retriable(),
            Self::Missing { .. }
            | Self::Damaged { .. }
            | Self::OtherFounder { .. }
            | Self::StoragePolicy { .. } => false,
        }
    }
}

/// The records of the curator.
#[derive(Clone, Debug)]
pub struct Store<S> {
    pub(super) kv: S,
}

/// The result of a change for a record.
pub(super) enum Outcome<M> {
    /// The record stays.
    Keep(M),
    /// The record is written, with the other changes of the same step.
    Put(M, Vec<Guard>, Vec<Write>),
    /// The record is removed; this is its last content.
    Delete(M, Vec<Write>),
}

impl<S: pki::Store + Clone> Store<S> {
    /// The records in `kv`, the curator's namespace of etcd.
    pub fn new(kv: S) -> Self {
        Self { kv }
    }

    /// Checks that this is the store of a cluster with founding records and `node` in it,
    /// and returns the node's record.
    ///
    /// # Errors
    ///
    /// The first record that is missing or damaged.
    pub async fn complete(&self, node: Identity) -> Result<v1::Node, Error> {
        let key = node_key(node.id);
        let missing = |key: &str| Error::Missing { key: key.to_owned() };
        let read = self.kv.read([&key, OWNER, CONFIGURATION]).await.map_err(Error::Store)?;
        let [found, owner, configuration] = read;
        let found = found.ok_or_else(|| missing(&key))?;
        let found: v1::Node = decode(&key, &found.value)?;
        if found.public_key != node.public_key {
            return Err(Error::Damaged { key });
        }
        let owner = owner.ok_or_else(|| missing(OWNER))?;
        let _owner: v1::InitialOwner = decode(OWNER, &owner.value)?;
        let configuration = configuration.ok_or_else(|| missing(CONFIGURATION))?;
        let _configuration: v1::ClusterConfiguration = decode(CONFIGURATION, &configuration.value)?;
        Ok(found)
    }

    /// The certificate of the cluster's CA, made if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn ensure_authority(&self, now: SystemTime) -> Result<Issued, Error> {
        Ok(self.certificates().ensure(&authority(), now).await?)
    }

    /// The cluster's CA, which exists since the bootstrap of the cluster, and those before it.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`].
    pub async fn authorities(&self) -> Result<Authorities, Error> {
        let missing = || Error::Missing { key: format!("{PKI}authorities/{AUTHORITY}") };
        self.certificates().authorities(&authority()).await?.ok_or_else(missing)
    }

    /// The certificate of `node`, made if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn ensure_node_certificate(
        &self,
        node: Identity,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        Ok(self.certificates().ensure(&desired_node(node), now).await?)
    }

    /// A new certificate for `node` if two thirds of the life of its old one are over, else
    /// the existing one; `None` if that was revoked.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn renew_node_certificate(
        &self,
        node: Identity,
        now: SystemTime,
    ) -> Result<Option<Issued>, Error> {
        Ok(self.certificates().current(&desired_node(node), now).await?)
    }

    /// The certificate of `node` as a curator: the existing one, a new one if that is due for
    /// renewal, or the first one. Made by the voter itself, as long as etcd takes its writes.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn curator_certificate(
        &self,
        node: Identity,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        match self.existing_curator_certificate(node, now).await? {
            Some(issued) => Ok(issued),
            None => Ok(self.certificates().ensure(&desired_curator(node), now).await?),
        }
    }

    /// The same, without the first one: `None` if the node has none.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn existing_curator_certificate(
        &self,
        node: Identity,
        now: SystemTime,
    ) -> Result<Option<Issued>, Error> {
        Ok(self.certificates().current(&desired_curator(node), now).await?)
    }

    /// Revokes every certificate that `node` had as a curator.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn revoke_curator(&self, node: NodeId, now: SystemTime) -> Result<(), Error> {
        self.revoke(&curator_name(node), Reason::Left, now).await
    }

    /// Revokes every certificate that the cluster issued to `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn revoke(&self, name: &str, reason: Reason, now: SystemTime) -> Result<(), Error> {
        self.certificates().revoke_surely(&authority(), name, reason, now).await?;
        Ok(())
    }

    /// Removes ended certificates from the list of what the cluster issued, and from its CRL.
    /// Returns how many left the list.
    ///
    /// # Errors
    ///
    /// [`Error::Pki`].
    pub async fn prune(&self, now: SystemTime) -> Result<usize, Error> {
        Ok(self.certificates().prune(&authority(), now).await?)
    }

    /// The configuration of the whole cluster.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn configuration(&self) -> Result<v1::ClusterConfiguration, Error> {
        let found = self.read(CONFIGURATION).await?;
        found.ok_or_else(|| Error::Missing { key: CONFIGURATION.to_owned() })
    }

    /// Reads a record, makes another of it, and writes that if no other writer was faster;
    /// else it reads again.
    pub(super) async fn update<M, E>(
        &self,
        key: &str,
        mut change: impl FnMut(Option<M>) -> Result<Outcome<M>, E> + Send,
    ) -> Result<M, E>
    where
        M: Message + Default,
        E: From<Error>,
    {
        for _attempt in 0..CONFLICTS_MAX {
            if let Some(record) = self.attempt(key, &mut change).await? {
                return Ok(record);
            }
        }
        Err(Error::Contended { key: key.to_owned() }.into())
    }

    /// One attempt of [`Self::update`]; `None` if another writer was faster.
    pub(super) async fn attempt<M, E>(
        &self,
        key: &str,
        change: impl FnOnce(Option<M>) -> Result<Outcome<M>, E> + Send,
    ) -> Result<Option<M>, E>
    where
        M: Message + Default,
        E: From<Error>,
    {
        let entry = self.kv.get(key).await.map_err(Error::Store)?;
        let (guard, old) = match &entry {
            None => (Guard::Absent(key.to_owned()), None),
            Some(entry) => {
                let old = decode::<M>(key, &entry.value)?;
                (Guard::Unchanged(key.to_owned(), entry.revision), Some(old))
            }
        };
        let (record, guards, writes) = match change(old)? {
            Outcome::Keep(record) => return Ok(Some(record)),
            Outcome::Put(record, guards, writes) => {
                let put = Write::Put(key.to_owned(), record.encode_to_vec());
                (record, guards, [vec![put], writes].concat())
            }
            Outcome::Delete(record, writes) => {
                (record, Vec::new(), [vec![Write::Delete(key.to_owned())], writes].concat())
            }
        };
        let guards = [vec![guard], guards].concat();
        let done = self.kv.commit(guards, writes).await.map_err(Error::Store)?;
        Ok(done.then_some(record))
    }

    pub(super) fn certificates(&self) -> Namespace<S> {
        Namespace::new(self.kv.clone(), PKI)
    }

    pub(super) async fn read<M: Message + Default>(&self, key: &str) -> Result<Option<M>, Error> {
        let Some(entry) = self.kv.get(key).await.map_err(Error::Store)? else { return Ok(None) };
        decode(key, &entry.value).map(Some)
    }
}

pub(super) fn decode<M: Message + Default>(key: &str, value: &[u8]) -> Result<M, Error> {
    M::decode(value).map_err(|_reason| Error::Damaged { key: key.to_owned() })
}

pub(super) fn node_key(id: NodeId) -> String {
    format!("{NODES}{id}")
}

/// The place of the record of a join key.
pub(super) fn join_key_at(key: &[u8]) -> String {
    format!("{JOIN_KEYS}{}", hex::encode(key))
}

/// The place of the rotations of the cluster's authority.
pub(super) fn rotated_key() -> String {
    format!("{PKI}authorities/{AUTHORITY}/rotated")
}

/// The place of the certificate of the cluster's authority.
pub(super) fn authority_key() -> String {
    format!("{PKI}authorities/{AUTHORITY}/certificate")
}

/// The place of the CRL of the cluster's authority.
pub(super) fn crl_key() -> String {
    format!("{PKI}authorities/{AUTHORITY}/crl")
}

fn desired_node(node: Identity) -> Certificate {
    Certificate {
        issuer: Issuer::Authority(Arc::new(authority())),
        name: node.id.to_string(),
        template: Template::Node,
        mode: Mode::External(node.public_key),
    }
}

fn desired_curator(node: Identity) -> Certificate {
    Certificate {
        issuer: Issuer::Authority(Arc::new(authority())),
        name: curator_name(node.id),
        template: Template::Curator { node: node.id.to_string() },
        mode: Mode::External(node.public_key),
    }
}

/// The name of the certificate of a curator. No user can have it, since the names of users do
/// not begin like those of nodes, and no node, since it is longer than an ID.
fn curator_name(node: NodeId) -> String {
    format!("{node}.curator")
}

pub(super) fn authority() -> Certificate {
    Certificate {
        issuer: Issuer::Itself,
        name: AUTHORITY.to_owned(),
        template: Template::ClusterAuthority,
        mode: Mode::Managed,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use polis_base::sys::clock;
    use polis_wire::pki::memory::Memory;

    #[test]
    fn the_crl_is_watched_where_the_library_keeps_it() {
        let pki = Namespace::new(Memory::default(), PKI);
        assert_eq!(pki.crl_key(&authority()), crl_key());
        assert_eq!(pki.rotated_key(&authority()), rotated_key());
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

    #[tokio::test]
    async fn a_node_whose_certificate_was_revoked_gets_none_by_asking_again() {
        let store = Store::new(Memory::default());
        let node = Identity::new([7; 32]);
        let now = clock::now();
        let first = store.ensure_node_certificate(node, now).await.unwrap();
        let same = store.renew_node_certificate(node, now).await.unwrap().unwrap();
        assert_eq!(first.der, same.der);
        store.revoke(&node.id.to_string(), Reason::Left, now).await.unwrap();
        assert!(store.renew_node_certificate(node, now).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn the_proof_of_a_curator_is_revoked_without_the_certificate_of_its_node() {
        let store = Store::new(Memory::default());
        let node = Identity::new([7; 32]);
        let now = clock::now();
        let own = store.ensure_node_certificate(node, now).await.unwrap();
        assert!(store.existing_curator_certificate(node, now).await.unwrap().is_none());
        let first = store.curator_certificate(node, now).await.unwrap();
        let same = store.curator_certificate(node, now).await.unwrap();
        let existing = store.existing_curator_certificate(node, now).await.unwrap().unwrap();
        assert_eq!((&first.der, &first.der), (&same.der, &existing.der));
        let later = now + Duration::from_secs(7 * 24 * 60 * 60);
        let renewed = store.curator_certificate(node, later).await.unwrap();
        assert_ne!(first.der, renewed.der);
        store.revoke_curator(node.id, later).await.unwrap();
        let crl = store.certificates().crl(&authority()).await.unwrap().unwrap();
        let revokes = |der: &[u8]| crl.revokes(&pki::Facts::read(der).unwrap().serial);
        assert!(revokes(&first.der) && revokes(&renewed.der) && !revokes(&own.der));
        assert!(store.existing_curator_certificate(node, later).await.unwrap().is_none());
        // The node has the role again.
        let anew = store.curator_certificate(node, later).await.unwrap();
        assert!(!revokes(&anew.der));
    }
}
