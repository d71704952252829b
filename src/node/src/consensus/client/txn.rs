//! Transactions: several changes in one step, if several conditions hold.

use etcd_client::{Compare, CompareOp, TxnOp, TxnOpResponse};

use super::{Client, Kv, Leadership};
use polis_wire::pki;

/// Changes that happen together if every guard holds.
#[derive(Clone, Debug, Default)]
pub struct Txn {
    /// The conditions.
    pub guards: Vec<Guard>,
    /// The changes if all conditions hold.
    pub then: Vec<Op>,
    /// The changes otherwise.
    pub otherwise: Vec<Op>,
}

/// A condition of a transaction.
#[derive(Clone, Debug)]
pub enum Guard {
    /// The key does not exist.
    Absent(String),
    /// The key is still the one that came to be at this revision.
    Created(String, i64),
    /// The key was not written since this revision.
    Unchanged(String, i64),
    /// This leadership was not lost. Every write of a leader carries it.
    Leads(Leadership),
}

/// One step of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Writes a key.
    Put(String, Vec<u8>),
    /// Writes a key that ends with a lease.
    PutLeased(String, Vec<u8>, i64),
    /// Removes a key.
    Delete(String),
    /// Reads a key; [`Outcome::read`] has it in the order of the reads.
    Get(String),
    /// Reads the lock of a leadership, as [`Self::Get`] does: it is gone, or came
    /// to be at another revision, when the leadership is lost.
    GetLock(Leadership),
}

impl From<pki::Guard> for Guard {
    fn from(guard: pki::Guard) -> Self {
        match guard {
            pki::Guard::Absent(key) => Self::Absent(key),
            pki::Guard::Unchanged(key, revision) => Self::Unchanged(key, revision),
        }
    }
}

impl From<pki::Write> for Op {
    fn from(write: pki::Write) -> Self {
        match write {
            pki::Write::Put(key, value) => Self::Put(key, value),
            pki::Write::Delete(key) => Self::Delete(key),
        }
    }
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
    /// The results of its reads.
    pub read: Vec<Option<Kv>>,
}

impl Txn {
    pub(super) fn into_etcd(self, client: &Client) -> etcd_client::Txn {
        let guard = |guard| match guard {
            Guard::Absent(key) => Compare::create_revision(client.outer(&key), CompareOp::Equal, 0),
            Guard::Created(key, revision) => {
                Compare::create_revision(client.outer(&key), CompareOp::Equal, revision)
            }
            Guard::Unchanged(key, revision) => {
                Compare::mod_revision(client.outer(&key), CompareOp::Equal, revision)
            }
            // The key of a leader is absolute: it may lead in another namespace.
            Guard::Leads(leadership) => {
                let (key, revision) = leadership.lock();
                Compare::create_revision(key, CompareOp::Equal, revision)
            }
        };
        let op = |op| match op {
            Op::Put(key, value) => TxnOp::put(client.outer(&key), value, None),
            Op::PutLeased(key, value, lease) => {
                let options = etcd_client::PutOptions::new().with_lease(lease);
                TxnOp::put(client.outer(&key), value, Some(options))
            }
            Op::Delete(key) => TxnOp::delete(client.outer(&key), None),
            Op::Get(key) => TxnOp::get(client.outer(&key), None),
            Op::GetLock(leadership) => TxnOp::get(leadership.lock().0, None),
        };
        etcd_client::Txn::new()
            .when(self.guards.into_iter().map(guard).collect::<Vec<_>>())
            .and_then(self.then.into_iter().map(op).collect::<Vec<_>>())
            .or_else(self.otherwise.into_iter().map(op).collect::<Vec<_>>())
    }
}

impl Leadership {
    /// Whether `lock`, as [`Op::GetLock`] read it, is still that of this leadership.
    #[must_use]
    pub fn holds(&self, lock: Option<&Kv>) -> bool {
        lock.is_some_and(|lock| lock.created == self.lock().1)
    }
}

impl Outcome {
    pub(super) fn from_etcd(client: &Client, response: &etcd_client::TxnResponse) -> Self {
        let done = response.op_responses();
        let wrote = done.iter().any(|done| match done {
            TxnOpResponse::Put(_) => true,
            TxnOpResponse::Delete(gone) => gone.deleted() > 0,
            TxnOpResponse::Get(_) | TxnOpResponse::Txn(_) => false,
        });
        let read = done.into_iter().filter_map(|done| match done {
            TxnOpResponse::Get(get) => Some(get.kvs().first().map(|kv| client.inner(kv))),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        Self {
            succeeded: response.succeeded(),
            revision: response.header().map_or(0, etcd_client::ResponseHeader::revision),
            wrote,
            read: read.collect(),
        }
    }
}
