//! Pipes from etcd to event values: follow the values kept in etcd and publish them in this
//! process.
//!
//! ```text
//!            list                      changes
//! [unknown] ------> [known, revision] ---------> known
//!     ^                     |
//!     +--- watch broke, or its revision was compacted: list again
//! ```
//!
//! Invariants:
//! - A follower of a prefix receives every key that vanished, also those that vanished
//!   while the watch was down: a new listing is compared with the keys known before.
//! - The published map is always one that etcd held at one revision.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use etcd_client::{EventType, WatchOptions};
use tokio::sync::watch;
use tracing::debug;

use super::{Client, Error, Kv, Listing, call, prefix_end};
use polis_base::cause;

/// The delay before a broken watch is set up again: etcd may be restarting, and a restart
/// takes some tenths of a second.
const RETRY: Duration = Duration::from_millis(100);

/// One difference between two moments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key has this value now.
    Put(Kv),
    /// The key was removed.
    Gone(String),
}

/// Everything below a prefix, as of one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mirror {
    /// By key.
    pub entries: BTreeMap<String, Kv>,
    /// The revision of the values.
    pub revision: i64,
}

impl Mirror {
    /// Applies a fresh listing; returns the differences.
    fn relist(&mut self, listing: Listing) -> Vec<Change> {
        let fresh: BTreeMap<_, _> =
            listing.entries.into_iter().map(|kv| (kv.key.clone(), kv)).collect();
        let gone = self.entries.keys().filter(|key| !fresh.contains_key(*key));
        let mut changes: Vec<_> = gone.cloned().map(Change::Gone).collect();
        let put = fresh.values().filter(|kv| self.entries.get(&kv.key) != Some(*kv));
        changes.extend(put.cloned().map(Change::Put));
        *self = Self { entries: fresh, revision: listing.revision };
        changes
    }

    /// Applies the report of a watch; drops changes that are known already.
    fn apply(&mut self, events: Vec<Change>, revision: i64) -> Vec<Change> {
        let mut changes = Vec::new();
        for change in events {
            let new = match &change {
                Change::Put(kv) => {
                    self.entries.insert(kv.key.clone(), kv.clone()).as_ref() != Some(kv)
                }
                Change::Gone(key) => self.entries.remove(key).is_some(),
            };
            if new {
                changes.push(change);
            }
        }
        self.revision = self.revision.max(revision);
        changes
    }
}

impl Client {
    /// Follows every key that starts with `prefix`, for as long as it is polled: calls
    /// `observer` with the known values and the new ones, first after the first listing.
    /// Dropping it ends the watch.
    pub async fn follow(
        &self,
        prefix: &str,
        observer: impl FnMut(&Mirror, &[Change]) + Send,
    ) -> Infallible {
        let from = self.outer(prefix);
        let end = prefix_end(&from);
        self.follow_range(prefix, from, Some(end), observer).await
    }

    /// Publishes the key as an event value, for as long as it is polled: `None` until etcd
    /// was asked, then the key's content.
    pub async fn follow_key(
        &self,
        key: &str,
        value: &watch::Sender<Option<Option<Kv>>>,
    ) -> Infallible {
        let observer = |mirror: &Mirror, _changes: &[Change]| {
            let now = Some(mirror.entries.get(key).cloned());
            value.send_if_modified(|value| std::mem::replace(value, now.clone()) != now);
        };
        self.follow_range(key, self.outer(key), None, observer).await
    }

    async fn follow_range(
        &self,
        name: &str,
        from: Vec<u8>,
        end: Option<Vec<u8>>,
        mut observer: impl FnMut(&Mirror, &[Change]) + Send,
    ) -> Infallible {
        let mut mirror = Mirror::default();
        let mut known = false;
        let mut last = cause::Last::default();
        loop {
            let listed = match &end {
                Some(_) => self.list(name).await,
                None => self.list_one(name).await,
            };
            let error = match listed {
                Ok(listing) => {
                    let changes = mirror.relist(listing);
                    if !known || !changes.is_empty() {
                        observer(&mirror, &changes);
                    }
                    known = true;
                    last.clear();
                    self.watch(&from, end.as_deref(), &mut mirror, &mut observer).await
                }
                Err(error) => error,
            };
            let error = cause::line(&error);
            if last.is_new(&error) {
                debug!(namespace = self.namespace(), name, error, "follow again");
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// One key as a listing, with the revision at which it was absent.
    async fn list_one(&self, key: &str) -> Result<Listing, Error> {
        let what = "read a key";
        let response = self.read(what, || self.fetch(self.outer(key), None)).await?;
        Ok(Listing {
            entries: response.kvs().iter().map(|kv| self.inner(kv)).collect(),
            revision: response.header().map_or(0, etcd_client::ResponseHeader::revision),
        })
    }

    /// Follows from where `mirror` is until the watch breaks.
    async fn watch(
        &self,
        from: &[u8],
        end: Option<&[u8]>,
        mirror: &mut Mirror,
        observer: &mut (impl FnMut(&Mirror, &[Change]) + Send),
    ) -> Error {
        let what = "watch";
        let mut options = WatchOptions::new().with_start_revision(mirror.revision + 1);
        if let Some(end) = end {
            options = options.with_range(end);
        }
        let mut watches = self.etcd.watch_client();
        let mut stream = match call(what, watches.watch(from, Some(options))).await {
            Ok(stream) => stream,
            Err(error) => return error,
        };
        loop {
            let message = match stream.message().await {
                Ok(Some(message)) if !message.canceled() => message,
                // Cancelled: compacted beyond our revision, or no leader.
                Ok(_) => return Error::Ended { what },
                Err(error) => return Error::new(what, error),
            };
            let events = message.events().iter().filter_map(|event| {
                let kv = event.kv()?;
                Some(match event.event_type() {
                    EventType::Put => Change::Put(self.inner(kv)),
                    EventType::Delete => Change::Gone(self.strip(kv.key())),
                })
            });
            let revision = message.header().map_or(0, etcd_client::ResponseHeader::revision);
            let changes = mirror.apply(events.collect(), revision);
            if !changes.is_empty() {
                observer(mirror, &changes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kv(key: u8, value: u8, revision: i64) -> Kv {
        let key = format!("k{key}");
        Kv { key, value: vec![value], created: 1, modified: revision, lease: 0 }
    }

    /// A change of the store; a watch that is down does not receive it.
    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, u8),
        Delete(u8),
        Break,
        Relist,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..6_u8, any::<u8>()).prop_map(|(key, value)| Step::Put(key, value)),
            3 => (0..6_u8).prop_map(Step::Delete),
            1 => Just(Step::Break),
            1 => Just(Step::Relist),
        ]
    }

    proptest! {
        #[test]
        fn folding_the_changes_gives_the_content_of_the_store(
            steps in prop::collection::vec(step(), 0..60)
        ) {
            let mut store = BTreeMap::new();
            let mut mirror = Mirror::default();
            let mut folded = BTreeMap::new();
            let mut connected = true;
            for (at, step) in (1_i64..).zip(steps) {
                let changes = match step {
                    Step::Put(key, value) => {
                        let kv = kv(key, value, at);
                        store.insert(kv.key.clone(), kv.clone());
                        if connected { mirror.apply(vec![Change::Put(kv)], at) } else { vec![] }
                    }
                    Step::Delete(key) => {
                        let key = kv(key, 0, 0).key;
                        store.remove(&key);
                        if connected { mirror.apply(vec![Change::Gone(key)], at) } else { vec![] }
                    }
                    Step::Break => {
                        connected = false;
                        vec![]
                    }
                    Step::Relist => {
                        connected = true;
                        let entries = store.values().cloned().collect();
                        mirror.relist(Listing { entries, revision: at })
                    }
                };
                for change in changes {
                    match change {
                        Change::Put(kv) => drop(folded.insert(kv.key.clone(), kv)),
                        Change::Gone(key) => {
                            prop_assert!(folded.remove(&key).is_some(), "{key} was not known");
                        }
                    }
                }
                prop_assert_eq!(&folded, &mirror.entries);
                if connected {
                    prop_assert_eq!(&store, &mirror.entries);
                }
            }
        }
    }
}
