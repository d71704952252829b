//! The tasks of calls that change something: a change that began runs to its end, also if its
//! caller leaves or its time is over.
//!
//! hyper drops the future of a call when its caller hangs up. Some changes are several writes,
//! and the entry in the audit log is another one, so the audit ([`super::audit`]) hands such a
//! call to this service, and only waits for its answer.
//!
//! ```text
//! call --[Changes::run]--> queue --> task of [Service] --> change, entry in the audit log
//!                            |            |
//!                            |            +--> answer; dropped if the caller has left
//!                            +-- [RUNNING_MAX] run: the call waits, and is dropped with its caller
//! ```
//!
//! Invariants:
//! - At most [`RUNNING_MAX`] changes of all callers run. The calls that wait for one of them are
//!   bounded as all calls are (`rpc`).
//! - Every task ends with the run of the service.
//!
//! What this module does not do: decide which calls run here (`audit`), bound the time of a
//! change (each request to etcd has its own bound), or keep the term: a curator that stops gives
//! it up first, and etcd rejects what a change writes after that.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{Instrument as _, warn};

use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// The number of changes that run at once. Each ends with an entry in the audit log, and those
/// are written one after the other: more of them at once end no sooner.
const RUNNING_MAX: usize = 64;

/// The changes that are handed over and do not run yet. Such a change is carried out whether its
/// caller stays or not, so there are few of them.
const QUEUE: usize = 1;

/// How long the changes under way may go on once the curator is to stop: as long as calls may.
const STOP_MAX: Duration = Duration::from_secs(3);

/// A call, from its change to its answer.
type Work = BoxFuture<'static, ()>;

/// The handle to run a call to its end. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Changes(mpsc::Sender<Work>);

/// The other end of [`Changes`]; every run of [`Service`] takes it in turn.
pub(in crate::curator) type Queue = Arc<Mutex<mpsc::Receiver<Work>>>;

impl Changes {
    /// Both ends.
    #[must_use]
    pub(in crate::curator) fn channel() -> (Self, Queue) {
        let (hand_over, queue) = mpsc::channel(QUEUE);
        (Self(hand_over), Arc::new(Mutex::new(queue)))
    }

    /// Runs `work` in a task of its own, and returns its result; `None` if the curator stopped or
    /// `work` had a bug (a panic, which is in the log) before its end. If this future is dropped
    /// after `work` was handed over, `work` runs on.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let work = async move {
            // The caller may have left.
            let _unheard = answer.send(work.await);
        };
        self.0.send(work.in_current_span().boxed()).await.ok()?;
        answered.await.ok()
    }
}

/// Runs the changes. Cloned into every run.
#[derive(Clone, Debug)]
pub(in crate::curator) struct Service {
    pub(in crate::curator) queue: Queue,
}

impl Service {
    /// Runs until cancelled; then the changes under way have [`STOP_MAX`].
    ///
    /// # Errors
    ///
    /// [`Closed`] when the other end is gone.
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut queue = self.queue.lock().await;
        let mut running = JoinSet::new();
        let ended = ctx.until_cancelled(start_all(&mut queue, &mut running)).await;
        let finished = async { while running.join_next().await.is_some() {} };
        if timeout(STOP_MAX, finished).await.is_err() {
            warn!(left = running.len(), "changes are cut off because the curator stops");
        }
        ended.unwrap_or(Ok(()))
    }
}

/// Starts each change that is handed over, without end.
async fn start_all(
    queue: &mut mpsc::Receiver<Work>,
    running: &mut JoinSet<()>,
) -> Result<(), Closed> {
    loop {
        tokio::select! {
            // Cancel-safe, both per their documentation.
            work = queue.recv(), if running.len() < RUNNING_MAX => {
                running.spawn(work.ok_or(Closed("the curator"))?);
            }
            Some(_ended) = running.join_next() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use polis_runtime::supervisor::Handles;
    use tokio::sync::{Semaphore, watch};

    use super::*;

    /// A service that runs, and the handle to it.
    fn started() -> (Changes, Handles, JoinSet<Result<(), Closed>>) {
        let (changes, queue) = Changes::channel();
        let (ctx, handles) = Context::for_test();
        let mut runs = JoinSet::new();
        runs.spawn(Service { queue }.run(ctx));
        (changes, handles, runs)
    }

    /// Changes that wait for a permit of `gate`, then have a second step, and are counted in
    /// `begun` and `done`.
    #[derive(Clone)]
    struct Steps {
        gate: Arc<Semaphore>,
        begun: watch::Sender<usize>,
        done: watch::Sender<usize>,
    }

    impl Steps {
        fn new() -> Self {
            let gate = Arc::new(Semaphore::new(0));
            Self { gate, begun: watch::Sender::new(0), done: watch::Sender::new(0) }
        }

        async fn change(self) -> &'static str {
            self.begun.send_modify(|count| *count += 1);
            self.gate.acquire().await.unwrap().forget();
            tokio::task::yield_now().await;
            self.done.send_modify(|count| *count += 1);
            "done"
        }
    }

    async fn failing() -> u8 {
        panic!("a bug")
    }

    async fn reaches(count: &watch::Sender<usize>, expected: usize) {
        let mut count = count.subscribe();
        let reached = count.wait_for(|count| *count == expected);
        let reached = timeout(Duration::from_secs(60), reached).await;
        assert!(reached.is_ok_and(|known| known.is_ok()), "{expected}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_runs_to_its_end_although_its_caller_leaves() {
        let (changes, _handles, _runs) = started();
        let steps = Steps::new();
        let call = changes.run(steps.clone().change());
        assert!(timeout(Duration::from_secs(1), call).await.is_err(), "it waits at the gate");
        assert_eq!((*steps.begun.borrow(), *steps.done.borrow()), (1, 0));
        steps.gate.add_permits(1);
        reaches(&steps.done, 1).await;
        steps.gate.add_permits(1);
        assert_eq!(changes.run(steps.clone().change()).await, Some("done"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_leaves_again_and_again_has_a_bounded_number_of_changes() {
        let (changes, _handles, _runs) = started();
        let steps = Steps::new();
        for _call in 0..3 * RUNNING_MAX {
            let call = changes.run(steps.clone().change());
            assert!(timeout(Duration::from_secs(1), call).await.is_err());
        }
        assert_eq!(*steps.begun.borrow(), RUNNING_MAX);
        // Those that run and those in the queue end; the others never began.
        steps.gate.add_permits(3 * RUNNING_MAX);
        reaches(&steps.done, RUNNING_MAX + QUEUE).await;
        assert_eq!(changes.run(steps.clone().change()).await, Some("done"));
        assert_eq!(*steps.begun.borrow(), RUNNING_MAX + QUEUE + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_curator_that_stops_lets_changes_end_and_cuts_off_one_that_does_not() {
        for ends in [true, false] {
            let (changes, handles, mut runs) = started();
            let steps = Steps::new();
            let call = changes.run(steps.clone().change());
            assert!(timeout(Duration::from_secs(1), call).await.is_err());
            handles.cancel().await;
            if ends {
                steps.gate.add_permits(1);
            }
            timeout(STOP_MAX * 2, runs.join_next()).await.unwrap().unwrap().unwrap().unwrap();
            steps.gate.add_permits(1);
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(*steps.done.borrow(), usize::from(ends));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_with_a_bug_has_no_answer_and_the_next_one_has() {
        let (changes, _handles, _runs) = started();
        assert_eq!(changes.run(failing()).await, None);
        assert_eq!(changes.run(std::future::ready(7)).await, Some(7));
    }
}
