//! The fence: lets the leader of one term write, and rejects the writes of earlier leaders.
//!
//! [`Fenced`] is a namespace of etcd for the length of one term: the curator's own, that of the
//! etcd peers' certificates, or that of Kubernetes' certificates. It is a [`pki::Store`], so
//! records and certificates are written in the same way, and in no other way.
//!
//! ```text
//! commit:  if  the lock still has the create revision of this term, and guards
//!          then  write                                          -> Ok(true)
//!          else  read the lock:  still ours -> a guard failed   -> Ok(false)
//!                                gone       -> Err(Deposed)
//! ```
//!
//! Invariants:
//! - Every write carries the guard; a late write of a deposed leader changes nothing.
//! - A write without an answer is an error, and is not retried here: it may have happened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::consensus::client::{Client, Leadership, Txn};
use polis_wire::pki;

/// This curator does not lead any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this curator no longer leads")]
pub struct Deposed;

/// A namespace of etcd, the curator's own or another, as the leader of one term writes it.
#[derive(Clone, Debug)]
pub struct Fenced {
    client: Client,
    term: Leadership,
    written: Written,
}

/// What was written, for the whole term and for one call.
#[derive(Clone, Debug, Default)]
struct Written {
    newest: Arc<AtomicI64>,
    by_call: Arc<AtomicBool>,
}

impl Written {
    /// The same term, and a call that has written nothing yet.
    fn for_call(&self) -> Self {
        Self { newest: Arc::clone(&self.newest), by_call: Arc::default() }
    }

    /// Notes a write that made `revision`.
    fn add(&self, revision: i64) {
        self.newest.fetch_max(revision, Ordering::AcqRel);
        self.by_call.store(true, Ordering::Release);
    }
}

impl Fenced {
    /// Writes for as long as `term` lasts.
    #[must_use]
    pub fn new(client: Client, term: Leadership) -> Self {
        Self { client, term, written: Written::default() }
    }

    /// The same namespace, as one call writes it.
    #[must_use]
    pub fn for_call(&self) -> Self {
        Self { written: self.written.for_call(), ..self.clone() }
    }

    /// Whether anything was written through this or a clone of it since [`Self::for_call`].
    #[must_use]
    pub fn wrote(&self) -> bool {
        self.written.by_call.load(Ordering::Acquire)
    }

    /// The revision of the newest write through this or a clone of it, of any call; zero without
    /// one. A reader of a copy waits until the copy has it.
    #[must_use]
    pub fn written(&self) -> i64 {
        self.written.newest.load(Ordering::Acquire)
    }
}

impl pki::Store for Fenced {
    async fn read<const N: usize>(
        &self,
        keys: [&str; N],
    ) -> anyhow::Result<[Option<pki::Entry>; N]> {
        pki::Store::read(&self.client, keys).await
    }

    async fn list(&self, prefix: &str) -> anyhow::Result<Vec<(String, pki::Entry)>> {
        pki::Store::list(&self.client, prefix).await
    }

    async fn commit(
        &self,
        guards: Vec<pki::Guard>,
        writes: Vec<pki::Write>,
    ) -> anyhow::Result<bool> {
        let term = Some(self.term.clone());
        let outcome = self.client.txn(Txn { term, guards, writes, reads: Vec::new() }).await?;
        if outcome.succeeded {
            // Otherwise the revision belongs to another writer, perhaps in another namespace,
            // of which a copy of this namespace never receives changes.
            if outcome.wrote {
                self.written.add(outcome.revision);
            }
            return Ok(true);
        }
        if outcome.deposed { Err(Deposed.into()) } else { Ok(false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_writes_nothing_is_told_from_the_others_of_its_term() {
        let term = Written::default();
        let [one, other] = [term.for_call(), term.for_call()];
        one.clone().add(7);
        let newest = |written: &Written| written.newest.load(Ordering::Acquire);
        assert_eq!([&term, &one, &other].map(newest), [7; 3]);
        let wrote = |written: &Written| written.by_call.load(Ordering::Acquire);
        assert_eq!([&term, &one, &other].map(wrote), [false, true, false]);
        assert!(!wrote(&one.for_call()), "the next call");
    }
}
