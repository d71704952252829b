//! Transactions: several changes in one step, if several conditions hold.

use etcd_client::{Compare, CompareOp, TxnOp, TxnOpResponse};

use super::{Client, Kv, Leadership};
use polis_wire::pki::{Guard, Write};

/// Changes that happen together if every condition holds.
#[derive(Clone, Debug, Default)]
pub struct Txn {
    /// The leadership that must not be lost; every write of a leader carries it.
    pub term: Option<Leadership>,
    /// The other conditions.
    pub guards: Vec<Guard>,
    /// The changes if all conditions hold.
    pub writes: Vec<Write>,
    /// The keys to read otherwise.
    pub reads: Vec<String>,
}

/// The result of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether every guard held.
    pub succeeded: bool,
    /// The revision after it: that of the whole of etcd, not of this namespace alone.
    pub revision: i64,
    /// Whether it wrote anything: the removal of a missing key is not a write, and makes no
    /// revision.
    pub wrote: bool,
    /// Whether it failed since its leadership is lost: the lock is gone, or came to be at
    /// another revision.
    pub deposed: bool,
    /// The keys that it read, in their order.
    pub read: Vec<Option<Kv>>,
}

impl Txn {
    pub(super) fn into_etcd(self, client: &Client) -> etcd_client::Txn {
        let guard = |guard| match guard {
            Guard::Absent(key) => Compare::create_revision(client.outer(&key), CompareOp::Equal, 0),
            Guard::Unchanged(key, revision) => {
                Compare::mod_revision(client.outer(&key), CompareOp::Equal, revision)
            }
        };
        let write = |write| match write {
            Write::Put(key, value) => TxnOp::put(client.outer(&key), value, None),
            Write::Delete(key) => TxnOp::delete(client.outer(&key), None),
        };
        // The key of a leader is absolute: it may lead in another namespace.
        let lock = self.term.as_ref().map(Leadership::lock);
        let leads = lock.iter().map(|(key, revision)| {
            Compare::create_revision(key.as_slice(), CompareOp::Equal, *revision)
        });
        let locks = lock.iter().map(|(key, _)| TxnOp::get(key.as_slice(), None));
        let reads = self.reads.iter().map(|key| TxnOp::get(client.outer(key), None));
        etcd_client::Txn::new()
            .when(leads.chain(self.guards.into_iter().map(guard)).collect::<Vec<_>>())
            .and_then(self.writes.into_iter().map(write).collect::<Vec<_>>())
            .or_else(locks.chain(reads).collect::<Vec<_>>())
    }
}

impl Outcome {
    /// Reads the answer to a transaction with `term`.
    pub(super) fn from_etcd(
        client: &Client,
        term: Option<&Leadership>,
        response: &etcd_client::TxnResponse,
    ) -> Self {
        let done = response.op_responses();
        let wrote = done.iter().any(|done| match done {
            TxnOpResponse::Put(_) => true,
            TxnOpResponse::Delete(gone) => gone.deleted() > 0,
            TxnOpResponse::Get(_) | TxnOpResponse::Txn(_) => false,
        });
        let mut read = done.into_iter().filter_map(|done| match done {
            TxnOpResponse::Get(get) => Some(get.kvs().first().map(|kv| client.inner(kv))),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        // The lock is read first.
        let term = term.filter(|_term| !response.succeeded());
        let deposed = term.is_some_and(|term| {
            let lock = read.next().flatten();
            lock.is_none_or(|lock: Kv| lock.created != term.revision())
        });
        Self {
            succeeded: response.succeeded(),
            revision: response.header().map_or(0, etcd_client::ResponseHeader::revision),
            wrote,
            deposed,
            read: read.collect(),
        }
    }
}
