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
//!                            +-- [RUNNING_MAX] run, or [ANONYMOUS_MAX] of anonymous callers:
//!                                the call waits, and is dropped with its caller
//! ```
//!
//! Invariants:
//! - At most [`RUNNING_MAX`] changes of all callers run. The calls that wait for one of them are
//!   bounded as all calls are (`rpc`).
//! - At most [`ANONYMOUS_MAX`] of them are of callers without a certificate of the cluster, so
//!   that many of those do not delay users.
//! - Every task ends with the run of the service.
//!
//! What this module does not do: decide which calls run here (`audit`), bound the time of a
//! change (each request to etcd has its own bound), or keep the term: a leader that stops keeps it
//! until the changes under way have ended, for some seconds at most (`leader`), and etcd rejects
//! what a change writes after that.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::{Mutex, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tracing::{Instrument as _, warn};

use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// The number of changes that run at once. Each ends with an entry in the audit log, and those
/// are written one after the other: more of them at once end no sooner.
const RUNNING_MAX: usize = 64;

/// The number of changes of callers without a certificate of the cluster. One call is open to
/// them, which an owner makes rarely.
const ANONYMOUS_MAX: usize = 8;
const _: () = assert!(ANONYMOUS_MAX < RUNNING_MAX);

/// The changes that are handed over and do not run yet. Such a change is carried out whether its
/// caller stays or not, so there are few of them.
const QUEUE: usize = 1;

/// A call, from its change to its answer.
type Work = BoxFuture<'static, ()>;

/// Who asks for a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// A user or a node, with a certificate of the cluster.
    Member,
    /// A caller without one, which can make any number of keys.
    Anonymous,
}

/// The handle to run a call to its end. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Changes {
    hand_over: mpsc::Sender<Work>,
    /// The places of callers without a certificate.
    anonymous: Arc<Semaphore>,
    under_way: watch::Sender<()>,
}

/// The other end of [`Changes`]; every run of [`Service`] takes it in turn.
pub(in crate::curator) type Queue = Arc<Mutex<mpsc::Receiver<Work>>>;

impl Changes {
    /// Both ends.
    #[must_use]
    pub(in crate::curator) fn channel() -> (Self, Queue) {
        let (hand_over, queue) = mpsc::channel(QUEUE);
        let anonymous = Arc::new(Semaphore::new(ANONYMOUS_MAX));
        let under_way = watch::Sender::default();
        (Self { hand_over, anonymous, under_way }, Arc::new(Mutex::new(queue)))
    }

    /// Each change that runs holds a receiver of it.
    #[must_use]
    pub(in crate::curator) fn under_way(&self) -> watch::Sender<()> {
        self.under_way.clone()
    }

    /// Runs `work` in a task of its own, and returns its result; `None` if the curator stopped or
    /// `work` had a bug (a panic, which is in the log) before its end. If this future is dropped
    /// after `work` was handed over, `work` runs on.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        by: By,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let place = match by {
            By::Member => None,
            By::Anonymous => Some(Arc::clone(&self.anonymous).acquire_owned().await.ok()?),
        };
        let (answer, answered) = oneshot::channel();
        let under_way = self.under_way.clone();
        let work = async move {
            let running = under_way.subscribe();
            // The caller may have left.
            let _unheard = answer.send(work.await);
            drop((running, place));
        };
        self.hand_over.send(work.in_current_span().boxed()).await.ok()?;
        answered.await.ok()
    }
}

/// Runs the changes. Cloned into every run.
#[derive(Clone, Debug)]
pub(in crate::curator) struct Service {
    pub(in crate::curator) queue: Queue,
}

impl Service {
    /// Runs until cancelled; then it cuts off the changes that still run. The leader, which stops
    /// before, has waited for them and given up its term: etcd rejects what they would write.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the other end is gone.
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        let mut queue = self.queue.lock().await;
        let mut running = JoinSet::new();
        let ended = ctx.until_cancelled(start_all(&mut queue, &mut running)).await;
        while running.try_join_next().is_some() {}
        if !running.is_empty() {
            warn!(left = running.len(), "changes are cut off because the curator stops");
        }
        // Each reports its entry as it is cut off, and the audit stops after this service.
        running.shutdown().await;
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
    use std::time::Duration;

    use polis_runtime::supervisor::Handles;
    use tokio::time::timeout;

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
        let call = changes.run(By::Member, steps.clone().change());
        assert!(timeout(Duration::from_secs(1), call).await.is_err(), "it waits at the gate");
        assert_eq!((*steps.begun.borrow(), *steps.done.borrow()), (1, 0));
        steps.gate.add_permits(1);
        reaches(&steps.done, 1).await;
        steps.gate.add_permits(1);
        assert_eq!(changes.run(By::Member, steps.clone().change()).await, Some("done"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_leaves_again_and_again_has_a_bounded_number_of_changes() {
        let (changes, _handles, _runs) = started();
        let steps = Steps::new();
        for _call in 0..3 * RUNNING_MAX {
            let call = changes.run(By::Member, steps.clone().change());
            assert!(timeout(Duration::from_secs(1), call).await.is_err());
        }
        assert_eq!(*steps.begun.borrow(), RUNNING_MAX);
        // Those that run and those in the queue end; the others never began.
        steps.gate.add_permits(3 * RUNNING_MAX);
        reaches(&steps.done, RUNNING_MAX + QUEUE).await;
        assert_eq!(changes.run(By::Member, steps.clone().change()).await, Some("done"));
        assert_eq!(*steps.begun.borrow(), RUNNING_MAX + QUEUE + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_of_anonymous_callers_leaves_users_their_places() {
        let (changes, _handles, _runs) = started();
        let steps = Steps::new();
        let mut crowd = JoinSet::new();
        for _call in 0..2 * RUNNING_MAX {
            let (changes, change) = (changes.clone(), steps.clone().change());
            crowd.spawn(async move { changes.run(By::Anonymous, change).await });
        }
        reaches(&steps.begun, ANONYMOUS_MAX).await;
        let of_a_user = changes.run(By::Member, std::future::ready(7));
        assert_eq!(timeout(Duration::from_secs(1), of_a_user).await, Ok(Some(7)));
        assert_eq!(*steps.begun.borrow(), ANONYMOUS_MAX);
        // Each of them has its turn.
        steps.gate.add_permits(2 * RUNNING_MAX);
        reaches(&steps.done, 2 * RUNNING_MAX).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_under_way_from_its_beginning_to_its_end() {
        let (changes, _handles, _runs) = started();
        let (under_way, steps) = (changes.under_way(), Steps::new());
        under_way.closed().await;
        let call = changes.run(By::Member, steps.clone().change());
        assert!(timeout(Duration::from_secs(1), call).await.is_err(), "it waits at the gate");
        let ended = timeout(Duration::from_secs(60), under_way.closed()).await;
        assert!(ended.is_err(), "its caller left, and it runs on");
        steps.gate.add_permits(1);
        timeout(Duration::from_secs(60), under_way.closed()).await.unwrap();
        assert_eq!(*steps.done.borrow(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_goes_on_when_the_curator_stops_is_cut_off_at_once() {
        let (changes, handles, mut runs) = started();
        let steps = Steps::new();
        let call = changes.run(By::Member, steps.clone().change());
        assert!(timeout(Duration::from_secs(1), call).await.is_err());
        handles.cancel().await;
        timeout(Duration::from_secs(1), runs.join_next()).await.unwrap().unwrap().unwrap().unwrap();
        assert_eq!(*steps.begun.borrow(), 1);
        changes.under_way().closed().await;
        steps.gate.add_permits(1);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*steps.done.borrow(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_with_a_bug_has_no_answer_and_the_next_one_has() {
        let (changes, _handles, _runs) = started();
        assert_eq!(changes.run(By::Member, failing()).await, None);
        assert_eq!(changes.run(By::Member, std::future::ready(7)).await, Some(7));
    }
}
