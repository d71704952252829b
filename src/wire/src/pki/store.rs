//! The interface of the store in which a [`super::Namespace`] keeps certificates.
//!
//! `consensus::client` implements it for etcd; the tests of this library use a
//! map, and can stop it between a read and a write.

use std::fmt;
use std::future::Future;

/// A stored value.
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    /// The stored bytes.
    pub value: Vec<u8>,
    /// Changes whenever the value is written.
    pub revision: i64,
}

/// The conditions of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The key does not exist (its create revision is zero).
    Absent(String),
    /// The key was not written since this revision.
    Unchanged(String, i64),
}

/// One change of a commit.
#[derive(Clone, PartialEq, Eq)]
pub enum Write {
    /// Stores a value.
    Put(String, Vec<u8>),
    /// Removes a key; a missing key is ignored.
    Delete(String),
}

/// Values may be private keys: `Debug` shows only their length.
impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { value, revision } = self;
        write!(f, "Entry({} bytes, revision {revision})", value.len())
    }
}

impl fmt::Debug for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put(key, value) => write!(f, "Put({key:?}, {} bytes)", value.len()),
            Self::Delete(key) => write!(f, "Delete({key:?})"),
        }
    }
}

/// Keeps values under keys and changes several of them in one step.
pub trait Store: Send + Sync {
    /// Reads keys, all as of one moment.
    fn read<const N: usize>(
        &self,
        keys: [&str; N],
    ) -> impl Future<Output = anyhow::Result<[Option<Entry>; N]>> + Send;

    /// Reads one key.
    fn get(&self, key: &str) -> impl Future<Output = anyhow::Result<Option<Entry>>> + Send {
        async {
            let [found] = self.read([key]).await?;
            Ok(found)
        }
    }

    /// Reads every key that starts with `prefix`, in order.
    fn list(
        &self,
        prefix: &str,
    ) -> impl Future<Output = anyhow::Result<Vec<(String, Entry)>>> + Send;

    /// Makes all `writes` if all `guards` hold, otherwise no write; returns which.
    fn commit(
        &self,
        guards: Vec<Guard>,
        writes: Vec<Write>,
    ) -> impl Future<Output = anyhow::Result<bool>> + Send;
}

/// A store in memory, for tests.
#[cfg(any(test, feature = "testing"))]
#[expect(clippy::unwrap_used, reason = "a helper of tests panics as a test does")]
pub mod memory {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A map with revisions.
    #[derive(Clone, Debug, Default)]
    pub struct Memory {
        inner: Arc<Mutex<(i64, BTreeMap<String, Entry>)>>,
        pause: Option<Arc<tokio::sync::Barrier>>,
    }

    impl Memory {
        /// The same map; every commit through it waits for the others first.
        #[cfg(test)]
        pub(in crate::pki) fn pausing(&self, pause: Arc<tokio::sync::Barrier>) -> Self {
            Self { pause: Some(pause), ..self.clone() }
        }

        /// The stored entries, without revisions.
        ///
        /// # Panics
        ///
        /// When a test panicked while it held the store.
        #[must_use]
        pub fn contents(&self) -> BTreeMap<String, Vec<u8>> {
            let inner = self.inner.lock().unwrap();
            inner.1.iter().map(|(key, entry)| (key.clone(), entry.value.clone())).collect()
        }
    }

    impl Store for Memory {
        async fn read<const N: usize>(
            &self,
            keys: [&str; N],
        ) -> anyhow::Result<[Option<Entry>; N]> {
            let inner = self.inner.lock().unwrap();
            Ok(keys.map(|key| inner.1.get(key).cloned()))
        }

        async fn list(&self, prefix: &str) -> anyhow::Result<Vec<(String, Entry)>> {
            let inner = self.inner.lock().unwrap();
            let found = inner.1.iter().filter(|(key, _)| key.starts_with(prefix));
            Ok(found.map(|(key, entry)| (key.clone(), entry.clone())).collect())
        }

        async fn commit(&self, guards: Vec<Guard>, writes: Vec<Write>) -> anyhow::Result<bool> {
            if let Some(pause) = &self.pause {
                pause.wait().await;
            }
            let mut inner = self.inner.lock().unwrap();
            let (revision, map) = &mut *inner;
            let holds = guards.iter().all(|guard| match guard {
                Guard::Absent(key) => !map.contains_key(key),
                Guard::Unchanged(key, at) => map.get(key).is_some_and(|e| e.revision == *at),
            });
            if holds {
                *revision += 1;
                for write in writes {
                    match write {
                        Write::Put(key, value) => {
                            map.insert(key, Entry { value, revision: *revision });
                        }
                        Write::Delete(key) => {
                            map.remove(&key);
                        }
                    }
                }
            }
            Ok(holds)
        }
    }
}

#[cfg(test)]
mod debug {
    use super::*;

    #[test]
    fn a_value_is_not_shown() {
        let put = Write::Put("a/key".to_owned(), vec![77; 48]);
        assert_eq!(format!("{put:?}"), "Put(\"a/key\", 48 bytes)");
        let entry = Entry { value: vec![77; 48], revision: 3 };
        assert_eq!(format!("{entry:?}"), "Entry(48 bytes, revision 3)");
    }
}
