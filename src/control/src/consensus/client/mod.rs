//! The client of etcd: gives each user its own part of the keys, and only that.
//!
//! `consensus` publishes [`Clients`] while its member serves; a user takes the
//! client of its namespace and passes parts of it on with [`Client::sub`].
//!
//! ```text
//! Clients --user(Curator)--> polis:curator/...
//!                                  |
//!                                  +--sub("kubernetes")--> polis:curator:kubernetes/...
//! ```
//!
//! Invariants:
//! - Every key gets the prefix on its way in and loses it on its way out, in
//!   reads, writes, transactions, watches and elections alike.
//! - No namespace lies inside another: the colons come before the first slash.
//! - Only reads are repeated by themselves. A write that got no answer may have
//!   happened; its caller decides by a guard, or by making it again if that is
//!   harmless.
//! - A write that a leader took with it ends once there is a new leader ([`lost`]), and
//!   any other call after five seconds without an answer.
//!
//! What this module does not do: start etcd, or change its membership.

mod election;
mod error;
mod lost;
mod pipe;
mod txn;

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{ConnectOptions, GetOptions, PutOptions, TxnOp};
use tonic::transport::Endpoint;

use polis_wire::pki;

pub use self::election::{Leadership, Lease};
pub use self::error::Error;
pub use self::pipe::{Change, Mirror};
pub use self::txn::{Outcome, Txn};

/// The namespace that holds all others.
const ROOT: &str = "polis";

/// Longer than an election: a call that takes more is not going to be answered.
const CALL_MAX: Duration = Duration::from_secs(5);

/// A read is repeated for as long as a leader may take to fail and be replaced.
const READ_MAX: Duration = Duration::from_secs(10);

/// The delay between two attempts at a read: starts short, and doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Keys in the first page of a listing. Values of some kilobytes stay far below the 4 MiB of a
/// message; a page of larger ones is asked for again with half the keys.
const PAGE: i64 = 500;

/// The users of etcd. Closed: a new user is a decision, not a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The certificates of the etcd peers.
    EtcdPki,
    /// The curator, and through it every record about nodes.
    Curator,
    /// The certificates and keys of Kubernetes.
    KubernetesPki,
    /// The lock of the member that rewrites its database.
    Maintenance,
}

impl User {
    fn namespace(self) -> &'static str {
        match self {
            Self::EtcdPki => "etcd-pki",
            Self::Curator => "curator",
            Self::KubernetesPki => "kubernetes-pki",
            Self::Maintenance => "maintenance",
        }
    }
}

/// The way to this node's member. Cheap to clone; survives a restart of etcd.
#[derive(Clone)]
pub struct Clients {
    /// Shared: it is some kilobytes of clients for each part of the protocol.
    etcd: Arc<etcd_client::Client>,
    socket: Arc<PathBuf>,
}

impl fmt::Debug for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clients").field(&self.socket).finish()
    }
}

/// Equal if they lead to the same member by the same connection.
impl PartialEq for Clients {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.socket, &other.socket)
    }
}

impl Eq for Clients {}

impl Clients {
    /// A connection to the unix socket of a member, made when it is first used.
    ///
    /// # Errors
    ///
    /// When the path cannot be part of an address.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let address = format!("unix://{}", socket.display());
        let endpoint = Endpoint::from_shared(address)
            .map_err(|error| Error::new("connect", etcd_client::Error::TransportError(error)))?
            .connect_timeout(Duration::from_secs(2));
        // The lazy channel connects again by itself whenever etcd was restarted.
        let channel = etcd_client::Channel::Tonic(endpoint.connect_lazy());
        // A member without a leader ends watches instead of going silent.
        let options = ConnectOptions::new().with_require_leader(true);
        let etcd = etcd_client::Client::from_channel(channel, Some(options)).await;
        let etcd = etcd.map_err(|error| Error::new("connect", error))?;
        Ok(Self { etcd: Arc::new(etcd), socket: Arc::new(socket.to_owned()) })
    }

    /// The namespace of `user`.
    #[must_use]
    pub fn user(&self, user: User) -> Client {
        let namespace = format!("{ROOT}:{}", user.namespace());
        Client { etcd: Arc::clone(&self.etcd), namespace: namespace.into() }
    }

    /// Begins a copy of the whole database, as of now.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn snapshot(&self) -> Result<Snapshot, Error> {
        let mut maintenance = self.etcd.maintenance_client();
        Ok(Snapshot(call(SNAPSHOT, maintenance.snapshot()).await?))
    }

    /// Requests the member's status, for callers that measure the latency.
    ///
    /// # Errors
    ///
    /// When the member does not answer.
    pub async fn ping(&self) -> Result<(), Error> {
        let asked = self.etcd.maintenance_client().status().await;
        asked.map(drop).map_err(|error| Error::new("ask for the status", error))
    }

    /// Members and maintenance, for the service that runs the member.
    pub(in crate::consensus) fn raw(&self) -> &etcd_client::Client {
        &self.etcd
    }
}

const SNAPSHOT: &str = "take a snapshot";

/// A copy of the database on its way: a file in pieces, with its checksum at the end.
#[derive(Debug)]
pub struct Snapshot(etcd_client::SnapshotStreaming);

impl Snapshot {
    /// The next piece; `None` after the last one.
    ///
    /// # Errors
    ///
    /// The copy is unusable then, and the caller begins another.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let piece = call(SNAPSHOT, self.0.message()).await?;
        Ok(piece.map(|piece| piece.blob().to_vec()))
    }
}

/// A value with its key.
#[derive(Clone, PartialEq, Eq)]
pub struct Kv {
    /// The key within the namespace.
    pub key: String,
    /// The stored value.
    pub value: Vec<u8>,
    /// The revision at which the key came to be.
    pub created: i64,
    /// The revision at which the value was written.
    pub modified: i64,
    /// The lease that the key ends with; zero without a lease.
    pub lease: i64,
}

/// Values can be private keys: the output shows only their length.
impl std::fmt::Debug for Kv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { key, value, created, modified, lease } = self;
        f.debug_struct("Kv")
            .field("key", key)
            .field("value", &format_args!("{} bytes", value.len()))
            .field("created", created)
            .field("modified", modified)
            .field("lease", lease)
            .finish()
    }
}

/// The keys found below a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// In order of their keys.
    pub entries: Vec<Kv>,
    /// The revision of the listing.
    pub revision: i64,
}

/// One namespace of etcd. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    etcd: Arc<etcd_client::Client>,
    namespace: Arc<str>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Client").field(&self.namespace).finish()
    }
}

impl Client {
    /// The namespace of this name inside this one.
    #[must_use]
    pub fn sub(&self, name: &str) -> Self {
        debug_assert!(!name.contains([':', '/']), "{name:?} would leave its namespace");
        let namespace = format!("{}:{name}", self.namespace);
        Self { etcd: Arc::clone(&self.etcd), namespace: namespace.into() }
    }

    /// The whole name, for example `polis:curator`.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Reads one key.
    ///
    /// # Errors
    ///
    /// When etcd gives no answer for 10 seconds.
    pub async fn get(&self, key: &str) -> Result<Option<Kv>, Error> {
        let response = self.read("read a key", || self.fetch(self.outer(key), None)).await?;
        Ok(response.kvs().first().map(|kv| self.inner(kv)))
    }

    /// Reads keys, in their order and all as of one revision, by one request to etcd.
    ///
    /// # Errors
    ///
    /// When etcd gives no answer for 10 seconds.
    pub async fn get_all(&self, keys: &[&str]) -> Result<Vec<Option<Kv>>, Error> {
        let response = self.read("read keys", || async {
            let gets = keys.iter().map(|key| TxnOp::get(self.outer(key), None));
            let txn = etcd_client::Txn::new().and_then(gets.collect::<Vec<_>>());
            self.etcd.kv_client().txn(txn).await
        });
        Ok(Outcome::from_etcd(self, None, &response.await?).read)
    }

    /// Reads every key that starts with `prefix`, all as of one revision.
    ///
    /// # Errors
    ///
    /// When etcd gives no answer for 10 seconds.
    pub async fn list(&self, prefix: &str) -> Result<Listing, Error> {
        let mut from = self.outer(prefix);
        let end = prefix_end(&from);
        let mut listing = Listing { entries: Vec::new(), revision: 0 };
        let mut limit = PAGE;
        loop {
            let mut options = GetOptions::new().with_range(end.clone()).with_limit(limit);
            if listing.revision > 0 {
                options = options.with_revision(listing.revision);
            }
            let fetch = || self.fetch(from.clone(), Some(options.clone()));
            let page = match self.read("list keys", fetch).await {
                Err(error) if error.too_large() && limit > 1 => {
                    limit /= 2;
                    continue;
                }
                page => page?,
            };
            if listing.revision == 0 {
                listing.revision = page.header().map_or(0, etcd_client::ResponseHeader::revision);
            }
            listing.entries.extend(page.kvs().iter().map(|kv| self.inner(kv)));
            match page.kvs().last() {
                // The first key after the last one of this page.
                Some(last) if page.more() => from = [last.key(), &[0]].concat(),
                _ => return Ok(listing),
            }
        }
    }

    /// Writes one key; the lease, if any, takes it away again. Returns the revision.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn put(
        &self,
        key: &str,
        value: impl Into<Vec<u8>> + Send,
        lease: Option<&Lease>,
    ) -> Result<i64, Error> {
        let options = lease.map(|lease| PutOptions::new().with_lease(lease.id()));
        let mut kv = self.etcd.kv_client();
        let response =
            lost::write(&self.etcd, "write a key", kv.put(self.outer(key), value, options)).await?;
        Ok(response.header().map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Removes one key; says whether it was there.
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again.
    pub async fn delete(&self, key: &str) -> Result<bool, Error> {
        let mut kv = self.etcd.kv_client();
        let response =
            lost::write(&self.etcd, "delete a key", kv.delete(self.outer(key), None)).await?;
        Ok(response.deleted() > 0)
    }

    /// Makes a transaction: see [`Txn`].
    ///
    /// # Errors
    ///
    /// [`Error::retriable`] says whether it makes sense to try again; without an
    /// answer the transaction may have happened.
    pub async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        let mut kv = self.etcd.kv_client();
        let term = txn.term.clone();
        let work = kv.txn(txn.into_etcd(self));
        let response = lost::write(&self.etcd, "make a transaction", work).await?;
        Ok(Outcome::from_etcd(self, term.as_ref(), &response))
    }

    async fn fetch(
        &self,
        key: Vec<u8>,
        options: Option<GetOptions>,
    ) -> Result<etcd_client::GetResponse, etcd_client::Error> {
        self.etcd.kv_client().get(key, options).await
    }

    async fn read<T, F>(&self, what: &'static str, attempt: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let end = tokio::time::Instant::now() + READ_MAX;
        let mut pause = PAUSE_MIN;
        loop {
            match call(what, attempt()).await {
                Err(error) if error.retriable() && tokio::time::Instant::now() + pause < end => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                answer => return answer,
            }
        }
    }

    /// The key as etcd knows it.
    fn outer(&self, key: &str) -> Vec<u8> {
        format!("{}/{key}", self.namespace).into_bytes()
    }

    /// The key as the user knows it.
    fn strip(&self, key: &[u8]) -> String {
        let start = self.namespace.len() + 1;
        String::from_utf8_lossy(key.get(start..).unwrap_or_default()).into_owned()
    }

    fn inner(&self, kv: &etcd_client::KeyValue) -> Kv {
        Kv {
            key: self.strip(kv.key()),
            value: kv.value().to_vec(),
            created: kv.create_revision(),
            modified: kv.mod_revision(),
            lease: kv.lease(),
        }
    }
}

/// The end of the range "every key with this prefix".
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end;
        }
    }
    // etcd's notation for "to the last key".
    vec![0]
}

/// Bounds a call and names it in its error.
pub(in crate::consensus) async fn call<T>(
    what: &'static str,
    work: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(CALL_MAX, work).await {
        Ok(answer) => answer.map_err(|error| Error::new(what, error)),
        Err(_elapsed) => Err(Error::Timeout { what }),
    }
}

impl pki::Store for Client {
    async fn read<const N: usize>(
        &self,
        keys: [&str; N],
    ) -> anyhow::Result<[Option<pki::Entry>; N]> {
        let mut found = self.get_all(&keys).await?.into_iter();
        Ok(keys.map(|_key| {
            let kv = found.next().flatten();
            kv.map(|kv| pki::Entry { value: kv.value, revision: kv.modified })
        }))
    }

    async fn list(&self, prefix: &str) -> anyhow::Result<Vec<(String, pki::Entry)>> {
        let found = Self::list(self, prefix).await?.entries.into_iter();
        Ok(found
            .map(|kv| (kv.key, pki::Entry { value: kv.value, revision: kv.modified }))
            .collect())
    }

    async fn commit(
        &self,
        guards: Vec<pki::Guard>,
        writes: Vec<pki::Write>,
    ) -> anyhow::Result<bool> {
        Ok(self.txn(Txn { guards, writes, ..Txn::default() }).await?.succeeded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn curator() -> Client {
        let clients = Clients::connect(Path::new("/nonexistent/etcd.sock")).await.unwrap();
        clients.user(User::Curator)
    }

    #[tokio::test]
    async fn namespaces_nest_with_colons_and_end_with_a_slash() {
        let curator = curator().await;
        assert_eq!(curator.outer("nodes/a"), b"polis:curator/nodes/a");
        let sub = curator.sub("kubernetes");
        assert_eq!(sub.outer("x"), b"polis:curator:kubernetes/x");
        assert_eq!(sub.strip(b"polis:curator:kubernetes/x"), "x");
    }

    #[tokio::test]
    async fn a_namespace_holds_nothing_of_the_one_inside_it() {
        let curator = curator().await;
        let whole = curator.outer("");
        let inside = curator.sub("kubernetes").outer("x");
        assert!(!inside.starts_with(&whole));
    }

    #[test]
    fn the_end_of_a_prefix_is_the_next_key_of_its_length() {
        assert_eq!(prefix_end(b"ab/"), b"ab0");
        assert_eq!(prefix_end(b"a\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
    }

    #[tokio::test]
    async fn a_socket_without_a_listener_is_retried() {
        let error = curator().await.put("a", "b", None).await.unwrap_err();
        assert!(error.retriable(), "{error:?}");
    }
}
