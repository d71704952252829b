//! The directory: a copy of the curator's records in memory, as an event value.
//!
//! Every curator follows the whole of its namespace with one watch; questions about nodes,
//! users or the leader are answered from the copy, and any number of watchers share that
//! one watch.
//!
//! ```text
//! etcd ==one watch==> Directory --borrow--> handlers, the access check
//!                        |  sequence number for each change
//!                        +--changes since n--> watcher, watcher, ..
//! ```
//!
//! A watcher keeps the sequence number that it has seen and asks for what is
//! newer, so a slow one costs nothing and skips values that are old already.
//!
//! Invariants:
//! - `revision` is the revision up to which the copy is whole: a writer at a revision waits
//!   for it and then reads its own write. It is zero until a watch has begun.
//! - Every watcher that received a node also receives its removal, however far behind it
//!   is: for removals too old to be remembered, the watcher compares.
//! - A record that cannot be read keeps its old value here, and the error is logged.
//! - Records that vanished during a gap between two watches are removed by the first
//!   listing of the next watch: a node may leave etcd and enter it once more.
//!
//! What this module does not do: write (`fenced`), or determine by itself health (`health`
//! supplies it) and whether a member fits the attestation policy (`attested`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_proto::v1;
use prost::Message;
use tokio::sync::watch;
use tracing::warn;

use super::store::{self, CONFIGURATION, LEADERS, NODES, REGISTRIES, ROTATION, UPDATE, USERS};
use crate::consensus::client::{Change, Client, Kv, Mirror};
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::pki::{Authorities, Crl};

/// The number of removed nodes that are remembered; deletions are rare and by hand.
const GONE_MAX: usize = 1024;

/// The bytes of records after which an event takes no other record: with the last one it stays
/// far below the 4 MiB of a message.
const BYTES_MAX: usize = 1 << 20;

/// One node.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// Its record.
    pub node: Arc<v1::Node>,
    /// Its health, by its heartbeats.
    pub health: v1::NodeHealth,
    /// Why it does not fit the attestation policy, by `attested`; empty: it does.
    pub attestation_fault: String,
    changed: u64,
}

/// The leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The node.
    pub node: NodeId,
    /// Its address.
    pub address: Option<IpAddr>,
    /// The port of its curator.
    pub port: u16,
    /// The start of its leadership, by its own clock.
    pub since: SystemTime,
}

impl Leader {
    /// Its encoding in etcd.
    #[must_use]
    pub fn to_message(&self) -> v1::Leader {
        let since = self.since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        v1::Leader {
            node_id: self.node.to_string(),
            address: self.address.map(|address| address.to_string()).unwrap_or_default(),
            port: self.port.into(),
            since: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        }
    }

    /// Reads the encoding in etcd.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        let message = v1::Leader::decode(value).ok()?;
        let since = Duration::from_secs(u64::try_from(message.since).ok()?);
        Some(Self {
            node: message.node_id.parse().ok()?,
            address: message.address.parse().ok(),
            port: u16::try_from(message.port).ok()?,
            since: SystemTime::UNIX_EPOCH.checked_add(since)?,
        })
    }
}

/// The changes since a watcher last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Nodes that are new or different.
    pub nodes: Vec<(NodeId, Known)>,
    /// Nodes that were removed.
    pub gone: Vec<NodeId>,
}

/// The copy. `Default` is an empty copy, at revision zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Directory {
    revision: i64,
    nodes: BTreeMap<NodeId, Known>,
    users: BTreeMap<String, v1::User>,
    /// Those of them that have access, as nodes receive them.
    admitted: Arc<v1::Users>,
    configuration: v1::ClusterConfiguration,
    registries: Arc<v1::Registries>,
    update: Option<Arc<v1::ClusterUpdate>>,
    leaders: BTreeMap<String, (i64, Leader)>,
    crl: Arc<Vec<u8>>,
    crl_digest: Vec<u8>,
    /// The certificate of the CA that signs, and the record of its rotations, if there is one.
    authority: Option<Vec<u8>>,
    rotated: Option<Arc<Authorities>>,
    rotation: Option<v1::Rotation>,
    sequence: u64,
    /// Which node changed at which number; each node is in here once.
    order: BTreeMap<u64, NodeId>,
    gone: BTreeMap<u64, NodeId>,
    /// Removals at this number or before are forgotten.
    forgotten: u64,
}

impl Directory {
    /// The revision of etcd up to which this copy is whole; zero before the first listing.
    #[must_use]
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// One node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Known> {
        self.nodes.get(&id)
    }

    /// Every node, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Known)> {
        self.nodes.iter().map(|(id, known)| (*id, known))
    }

    /// Whether a node is on its way out of the cluster, or of etcd.
    #[must_use]
    pub fn has_departure(&self) -> bool {
        self.nodes.values().any(|known| known.node.leaving.is_some())
    }

    /// One user.
    #[must_use]
    pub fn user(&self, name: &str) -> Option<&v1::User> {
        self.users.get(name)
    }

    /// Every user, in order.
    pub fn users(&self) -> impl Iterator<Item = &v1::User> {
        self.users.values()
    }

    /// Every user that has access, in order.
    #[must_use]
    pub fn admitted(&self) -> Arc<v1::Users> {
        Arc::clone(&self.admitted)
    }

    /// The configuration of the whole cluster.
    #[must_use]
    pub fn configuration(&self) -> &v1::ClusterConfiguration {
        &self.configuration
    }

    /// The registries of images, with their credentials.
    #[must_use]
    pub fn registries(&self) -> Arc<v1::Registries> {
        Arc::clone(&self.registries)
    }

    /// The update of the cluster that goes on, or the last one.
    #[must_use]
    pub fn update(&self) -> Option<Arc<v1::ClusterUpdate>> {
        self.update.clone()
    }

    /// The leader: the node that took the lock first.
    #[must_use]
    pub fn leader(&self) -> Option<&Leader> {
        let first = self.leaders.values().min_by_key(|(created, _)| *created);
        first.map(|(_, leader)| leader)
    }

    /// Whether this copy holds everything that was written before the term whose lock was created
    /// at the revision `lock`, and everything up to the revision `written`.
    ///
    /// The leaders before it wrote after that lock was created, since a candidate waits for them.
    /// But each of them had an earlier lock and wrote nothing once that was gone: a copy without
    /// an earlier lock has all that they wrote.
    #[must_use]
    pub(super) fn holds(&self, lock: i64, written: i64) -> bool {
        let first = self.leaders.values().map(|(created, _)| *created).min();
        first == Some(lock) && self.revision >= written
    }

    /// The CRL of the cluster's authority, DER; empty before the first one.
    #[must_use]
    pub fn crl(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.crl)
    }

    /// Its digest; empty before the first one.
    #[must_use]
    pub fn crl_digest(&self) -> &[u8] {
        &self.crl_digest
    }

    /// The cluster's CA and those before it; `None` before the first listing.
    #[must_use]
    pub fn authorities(&self) -> Option<Arc<Authorities>> {
        let sole = || self.authority.clone().map(|der| Authorities::sole(der).into());
        self.rotated.clone().or_else(sole)
    }

    /// The rotation of the authorities that goes on, or the last one.
    #[must_use]
    pub fn rotation(&self) -> Option<v1::Rotation> {
        self.rotation
    }

    /// Sets the health of a node; returns whether it changed.
    pub fn set_health(&mut self, id: NodeId, health: v1::NodeHealth) -> bool {
        let Some(known) = self.nodes.get(&id).filter(|known| known.health != health) else {
            return false;
        };
        let known = Known { health, ..known.clone() };
        self.put(id, known);
        true
    }

    /// Sets why a member does not fit the attestation policy; returns whether that changed.
    pub fn set_attestation_fault(&mut self, id: NodeId, fault: &str) -> bool {
        let known = self.nodes.get(&id).filter(|known| known.attestation_fault != fault);
        let Some(known) = known.cloned() else { return false };
        self.put(id, Known { attestation_fault: fault.to_owned(), ..known });
        true
    }

    /// Applies the changes that a watch received.
    pub fn apply(&mut self, mirror: &Mirror, changes: &[Change]) {
        let mut of_users = false;
        for change in changes {
            let key = match change {
                Change::Put(kv) => {
                    self.put_record(kv);
                    &kv.key
                }
                Change::Gone(key) => {
                    self.remove_record(key);
                    key
                }
            };
            of_users |= key.starts_with(USERS);
        }
        // Once for all of them: a listing has thousands.
        if of_users {
            self.admit();
        }
        self.revision = self.revision.max(mirror.revision);
    }

    /// Marks the copy as incomplete until the next listing: no watch follows etcd, or there
    /// was a gap. The nodes stay for the watchers, which later receive the removals.
    fn doubt(&mut self) -> bool {
        let known = self.revision > 0;
        self.revision = 0;
        self.leaders.clear();
        known
    }

    /// Applies the first listing of a new watch: removes the records of an earlier watch that
    /// the listing lacks.
    fn begin(&mut self, mirror: &Mirror, changes: &[Change]) {
        let nodes = self.nodes.keys().map(|id| store::node_key(*id));
        let users = self.users.keys().map(|name| format!("{USERS}{name}"));
        let known = nodes.chain(users).chain(self.leaders.keys().cloned());
        let known = known.chain([REGISTRIES, UPDATE].map(str::to_owned));
        let gone: Vec<_> = known.filter(|key| !mirror.entries.contains_key(key)).collect();
        for key in gone {
            self.remove_record(&key);
        }
        self.apply(mirror, changes);
        self.admit();
    }

    fn put_record(&mut self, kv: &Kv) {
        let damaged = || warn!(key = kv.key, "a record in the cluster's store cannot be read");
        if let Some(id) = kv.key.strip_prefix(NODES) {
            let Ok(id) = id.parse::<NodeId>() else { return damaged() };
            let Ok(node) = v1::Node::decode(kv.value.as_slice()) else { return damaged() };
            let known = self.nodes.get(&id);
            let health = known.map_or(v1::NodeHealth::Unknown, |known| known.health);
            let attestation_fault =
                known.map(|known| known.attestation_fault.clone()).unwrap_or_default();
            let node = Arc::new(node);
            self.put(id, Known { node, health, attestation_fault, changed: 0 });
        } else if let Some(name) = kv.key.strip_prefix(USERS) {
            let Ok(user) = v1::User::decode(kv.value.as_slice()) else { return damaged() };
            self.users.insert(name.to_owned(), user);
        } else if kv.key.starts_with(LEADERS) {
            let Some(leader) = Leader::read(&kv.value) else { return damaged() };
            self.leaders.insert(kv.key.clone(), (kv.created, leader));
        } else if kv.key == CONFIGURATION {
            let read = v1::ClusterConfiguration::decode(kv.value.as_slice());
            let Ok(configuration) = read else { return damaged() };
            self.configuration = configuration;
        } else if kv.key == REGISTRIES {
            let Ok(read) = v1::Registries::decode(kv.value.as_slice()) else { return damaged() };
            self.registries = Arc::new(read);
        } else if kv.key == UPDATE {
            let Ok(read) = v1::ClusterUpdate::decode(kv.value.as_slice()) else { return damaged() };
            self.update = Some(Arc::new(read));
        } else if kv.key == store::crl_key() {
            self.crl_digest = Crl::digest_of(&kv.value);
            self.crl = Arc::new(kv.value.clone());
        } else if kv.key == store::authority_key() {
            self.authority = Some(kv.value.clone());
        } else if kv.key == store::rotated_key() {
            let Some(read) = Authorities::from_record(&kv.value) else { return damaged() };
            self.rotated = Some(Arc::new(read));
        } else if kv.key == ROTATION {
            let Ok(read) = v1::Rotation::decode(kv.value.as_slice()) else { return damaged() };
            self.rotation = Some(read);
        }
    }

    fn remove_record(&mut self, key: &str) {
        if let Some(id) = key.strip_prefix(NODES).and_then(|id| id.parse::<NodeId>().ok()) {
            let Some(known) = self.nodes.remove(&id) else { return };
            self.order.remove(&known.changed);
            self.sequence += 1;
            self.gone.insert(self.sequence, id);
            while self.gone.len() > GONE_MAX {
                if let Some((sequence, _)) = self.gone.pop_first() {
                    self.forgotten = sequence;
                }
            }
        } else if let Some(name) = key.strip_prefix(USERS) {
            self.users.remove(name);
        } else if key == REGISTRIES {
            self.registries = Arc::default();
        } else if key == UPDATE {
            self.update = None;
        } else {
            self.leaders.remove(key);
        }
    }

    /// Lists the users that have access anew.
    fn admit(&mut self) {
        let users = self.users.values().filter(|user| !user.revoked).cloned().collect();
        self.admitted = Arc::new(v1::Users { users });
    }

    fn put(&mut self, id: NodeId, known: Known) {
        self.sequence += 1;
        self.order.insert(self.sequence, id);
        let known = Known { changed: self.sequence, ..known };
        if let Some(old) = self.nodes.insert(id, known) {
            self.order.remove(&old.changed);
        }
    }
}

/// The progress of one watcher.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    sequence: u64,
    /// The nodes that it received: removed nodes are found by comparing with it.
    nodes: BTreeSet<NodeId>,
}

impl Seen {
    /// The changes for this watcher, which asked for `only` one node or for all; at most
    /// `max` nodes and some [`BYTES_MAX`] at once, so that a message has a bound. Also returns
    /// whether that is the last of the changes.
    pub fn delta(
        &mut self,
        directory: &Directory,
        only: Option<NodeId>,
        max: usize,
    ) -> (Delta, bool) {
        let wanted = |id: &NodeId| only.is_none_or(|only| only == *id);
        let mut delta = Delta::default();
        // Before the nodes: a node that was removed and came again exists in the end.
        let since = self.sequence + 1;
        if self.sequence < directory.forgotten {
            let lost = |id: &NodeId| !directory.nodes.contains_key(id);
            delta.gone = self.nodes.iter().copied().filter(lost).collect();
        } else {
            let gone = directory.gone.range(since..).map(|(_, id)| *id);
            delta.gone = gone.collect();
        }
        // A node that was removed twice is sent once.
        delta.gone.retain(|id| !directory.nodes.contains_key(id) && self.nodes.remove(id));
        let mut bytes = 0;
        for (sequence, id) in directory.order.range(since..) {
            if delta.nodes.len() == max || bytes >= BYTES_MAX {
                return (delta, false);
            }
            self.sequence = *sequence;
            if let Some(known) = directory.nodes.get(id).filter(|_| wanted(id)) {
                self.nodes.insert(*id);
                bytes += known.node.encoded_len();
                delta.nodes.push((*id, known.clone()));
            }
        }
        self.sequence = directory.sequence;
        (delta, true)
    }
}

/// Follows etcd and keeps the copy. A service of every curator.
#[derive(Clone, Debug)]
pub struct Service {
    /// The curator's part of etcd.
    pub client: Client,
    /// The copy.
    pub directory: watch::Sender<Directory>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// None: a broken watch is begun again from a listing.
    pub async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        let mut keep = keeper(&self.directory);
        let reported = |mirror: &Mirror, changes: &[Change]| {
            keep(mirror, changes);
            ctx.healthy();
        };
        match ctx.until_cancelled(Box::pin(self.client.follow("", reported))).await {
            Some(never) => match never {},
            None => Ok(()),
        }
    }
}

/// Keeps the copy by the changes of one watch, whatever state an earlier one has left.
fn keeper(directory: &watch::Sender<Directory>) -> impl FnMut(&Mirror, &[Change]) + Send {
    directory.send_if_modified(Directory::doubt);
    let mut begun = false;
    move |mirror, changes| {
        let goes_on = std::mem::replace(&mut begun, true);
        directory.send_modify(|directory| match goes_on {
            true => directory.apply(mirror, changes),
            false => directory.begin(mirror, changes),
        });
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
