//! Work on disks that may hang: on threads of its own, and once at a time for each disk.
//!
//! The threads of `supervisor::blocking` are few, and every file that the node saves needs one of
//! them. A disk that never answers holds none of these, and at most one of its own for each
//! [`Pending`] and for each partition whose [`step`] hangs.
//!
//! Invariants:
//! - No caller of [`Pending`] waits longer than [`ANSWER_MAX`] for an answer. A disk without one is
//!   not there, for now.
//! - Work that has not ended is not begun again: its callers share it, and its answer.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::Span;

use super::apply;

/// How long a disk may take to say what it is: a few blocks of it.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The name of a disk, and the kernel's number of it: another one may get the name.
pub(crate) type Key = (String, Option<u64>);

/// The name of the disk with this device.
pub(crate) fn name_of(device: &Path) -> String {
    device.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The kernel's number of the device with this name; `None` where it does not say. Blocks.
pub(crate) fn sequence(sys: &Path, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(sys.join("block").join(name).join("diskseq")).ok()?;
    text.trim().parse().ok()
}

/// The key of the disk with this name. Blocks.
pub(crate) fn key(sys: &Path, name: String) -> Key {
    let number = sequence(sys, &name);
    (name, number)
}

/// Does `work` on a thread of its own. It runs to its end, even if the caller stops
/// waiting.
///
/// # Errors
///
/// There is no memory for a thread, or the work ended with a panic, which the log has.
pub(crate) async fn detached<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    caught(work).await?.map_err(|_payload| io::Error::other("the thread ended with a panic"))
}

/// Takes a step on a disk, for as long as that takes, on a thread of its own. A panic of the work
/// is one of the caller, as with `supervisor::blocking`.
///
/// # Errors
///
/// That of the work, or [`apply::Error::Lost`] without memory for a thread.
pub(crate) async fn step<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, apply::Error> + Send + 'static,
) -> Result<T, apply::Error> {
    match caught(work).await {
        Ok(Ok(done)) => done,
        Ok(Err(payload)) => resume_unwind(payload),
        Err(_no_memory) => Err(apply::Error::Lost),
    }
}

/// Does `work` on a thread of its own; returns what it does, or the payload of its panic.
async fn caught<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<thread::Result<T>> {
    let (done, ended) = oneshot::channel();
    let span = Span::current();
    let run = move || {
        // Nothing that the work owned is used after its panic.
        let caught = catch_unwind(AssertUnwindSafe(|| span.in_scope(work)));
        // Without a receiver, the caller has ended.
        let _unheard = done.send(caught);
    };
    thread::Builder::new().name("disk".to_owned()).spawn(run)?;
    ended.await.map_err(io::Error::other)
}

type Work<T> = Shared<BoxFuture<'static, Option<T>>>;

/// Work that was begun and has not ended, by what it is about. Clones share it.
#[derive(Clone)]
pub(crate) struct Pending<K, T> {
    answer_max: Duration,
    work: Arc<Mutex<BTreeMap<K, Work<T>>>>,
}

impl<K, T> Default for Pending<K, T> {
    fn default() -> Self {
        Self { answer_max: ANSWER_MAX, work: Arc::default() }
    }
}

impl<K, T> fmt::Debug for Pending<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

impl<K: Ord + Clone, T: Clone + Send + Sync + 'static> Pending<K, T> {
    /// The same with another bound, for a test with real threads.
    #[cfg(test)]
    pub(crate) fn within(answer_max: Duration) -> Self {
        Self { answer_max, ..Self::default() }
    }

    /// The answer about `key`, by work that goes on already, or else by a new one. `None` if it has
    /// not come in time, or the work failed.
    pub(crate) async fn answer<F>(&self, key: K, begin: impl FnOnce() -> F) -> Option<T>
    where
        F: Future<Output = io::Result<T>> + Send + 'static,
    {
        let begin = || begin().map(Result::ok).boxed().shared();
        let work = self.lock().entry(key.clone()).or_insert_with(begin).clone();
        let answer = timeout(self.answer_max, work.clone()).await;
        if answer.is_ok() {
            let mut all = self.lock();
            // Another caller may have begun the next one.
            if all.get(&key).is_some_and(|other| other.ptr_eq(&work)) {
                all.remove(&key);
            }
        }
        answer.ok().flatten()
    }

    /// Forgets the work about everything else.
    pub(crate) fn keep(&self, keys: &[K]) {
        self.lock().retain(|key, _work| keys.contains(key));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, Work<T>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_that_hangs_is_left_in_time_and_goes_on_once_for_all_callers() {
        let pending: Pending<&str, u8> = Pending::default();
        let begun = Cell::new(0);
        let slow = || {
            begun.set(begun.get() + 1);
            async {
                sleep(ANSWER_MAX + Duration::from_secs(1)).await;
                Ok::<u8, io::Error>(7)
            }
        };
        let start = Instant::now();
        let both = tokio::join!(pending.answer("vdb", slow), pending.answer("vdb", slow));
        assert_eq!(both, (None, None));
        assert!(start.elapsed() < ANSWER_MAX * 2, "one has waited for the other");
        // Another disk does not wait for it.
        let other = pending.answer("vdc", || async { Ok::<u8, io::Error>(8) }).await;
        assert_eq!(other, Some(8));
        assert_eq!(pending.answer("vdb", slow).await, Some(7));
        assert_eq!(begun.get(), 1);
        // What has ended is not answered from memory.
        let again = pending.answer("vdb", || async { Ok::<u8, io::Error>(9) }).await;
        assert_eq!(again, Some(9));
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_was_pulled_and_came_back_is_asked_again() {
        let pending: Pending<&str, u8> = Pending::default();
        let hung = pending.answer("vdb", std::future::pending::<io::Result<u8>>);
        assert_eq!(hung.await, None);
        pending.keep(&["vdb"]);
        assert_eq!(pending.answer("vdb", || async { Ok::<u8, io::Error>(7) }).await, None);
        pending.keep(&["vdc"]);
        assert_eq!(pending.answer("vdb", || async { Ok::<u8, io::Error>(7) }).await, Some(7));
    }

    #[tokio::test]
    async fn work_has_a_thread_of_its_own_and_its_panic_is_an_error() {
        let name = detached(|| thread::current().name().map(str::to_owned)).await.unwrap();
        assert_eq!(name.as_deref(), Some("disk"));
        assert!(detached(|| -> u8 { panic!("a bug") }).await.is_err());
        let failing = step(|| -> Result<u8, apply::Error> { panic!("a bug") });
        let ended = AssertUnwindSafe(failing).catch_unwind().await;
        assert_eq!(ended.unwrap_err().downcast_ref(), Some(&"a bug"));
        assert_eq!(step(|| Ok(7)).await.unwrap(), 7);
    }
}
