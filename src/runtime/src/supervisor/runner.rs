//! The runner of a group of services: it starts them, waits until one ends, stops the rest,
//! waits, and starts them again. A single service is a group of one.
//!
//! ```text
//!            a member died             all ended             delay over
//! [running] --------------> [ending] ------------> [waiting] ----------> [running]
//!     |                         |                      |
//!     |                         +-- bound exceeded --> pass it on, end
//!     +---------- asked to stop: end the members, youngest first ---> end
//! ```
//!
//! A runner has a task of its own, which is the only place that starts tasks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::select_all;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, error, info, info_span, warn};

use super::context::{Child, Context, Run, Service};
use super::restart::{History, Policy, Verdict};
use super::tree::State;
use super::{STOP_DEADLINE, Shared};
use crate::logtree::layer;
use polis_base::trapdoor::{Report, code};

/// After an abort, a task ends at its next wait; one that never waits is left behind.
const ABORT_DEADLINE: Duration = Duration::from_secs(1);

/// Starts `members` below the run `parent`.
pub(super) fn start(
    shared: Shared,
    members: Vec<Service>,
    policy: Policy,
    parent: Arc<Run>,
) -> Child {
    let ending = parent.ending.child_token();
    Runner { shared, members, policy, parent: Some(parent), ending }.start()
}

/// Starts the root, whose death is not passed on.
pub(super) fn start_root(shared: Shared, root: Service) -> Child {
    let ending = shared.stopping.child_token();
    let policy = Policy::never();
    Runner { shared, members: vec![root], policy, parent: None, ending }.start()
}

struct Runner {
    shared: Shared,
    members: Vec<Service>,
    policy: Policy,
    parent: Option<Arc<Run>>,
    /// The subtree above is being stopped.
    ending: CancellationToken,
}

/// A member that was started and has not been stopped.
struct Running {
    service: Service,
    span: Span,
    run: Arc<Run>,
    passed_on: mpsc::Receiver<String>,
    /// `None` once the run itself has ended; its children may go on.
    task: Option<JoinHandle<Result<(), anyhow::Error>>>,
}

impl Runner {
    fn start(self) -> Child {
        let child = Child { stop: CancellationToken::new(), ended: CancellationToken::new() };
        let (stop, ended) = (child.stop.clone(), child.ended.clone().drop_guard());
        spawn(async move {
            self.keep(stop).await;
            drop(ended);
        });
        child
    }

    async fn keep(self, stop: CancellationToken) {
        let mut history = History::default();
        let epoch = Instant::now();
        loop {
            let mut running = Vec::new();
            for service in &self.members {
                running.push(self.run(service));
            }
            let death = stop.run_until_cancelled(self.first_death(&mut running)).await;
            let dead = death.map(|(index, cause)| {
                let Running { service, span, run, .. } = &running[index];
                (service.name.clone(), span.clone(), run.healthy.get().copied(), cause)
            });
            // The parent was stopped meanwhile: its stop request is on its way.
            let dead = dead.filter(|_| !self.ending.is_cancelled());
            let Some((name, span, healthy, cause)) = dead else {
                stop.cancelled().await;
                self.stop(running, None).await;
                return;
            };
            let now = epoch.elapsed();
            let healthy = healthy.map(|since| since.elapsed());
            let verdict = history.died(self.policy, now, healthy, jitter());
            let state = match verdict {
                Verdict::Restart(delay) => {
                    span.in_scope(|| error!(cause, "died, restarts in {delay:.1?}"));
                    State::Dead
                }
                Verdict::GiveUp(deaths) => {
                    span.in_scope(|| error!(cause, deaths, "died too often, escalated"));
                    State::Failed
                }
            };
            self.shared.set_state(&name, state, Some(&cause));
            self.stop(running, Some(&name)).await;
            match verdict {
                Verdict::Restart(delay) => {
                    if stop.run_until_cancelled(sleep(delay)).await.is_none() {
                        self.shared.set_state(&name, State::Stopped, None);
                        return;
                    }
                }
                Verdict::GiveUp(deaths) => return self.pass_on(&name, deaths, &cause),
            }
        }
    }

    fn run(&self, service: &Service) -> Running {
        let span = info_span!(parent: None, layer::SPAN, name = %service.name);
        let (run, passed_on) = Run::new(&self.ending);
        self.shared.set_state(&service.name, State::Starting, None);
        let ctx = Context {
            name: Arc::clone(&service.name),
            run: Arc::clone(&run),
            shared: self.shared.clone(),
        };
        let make = Arc::clone(&service.run);
        // The function itself may panic before its first wait: call it inside.
        let task = spawn(async move { make(ctx).await }.instrument(span.clone()));
        Running { service: service.clone(), span, run, passed_on, task: Some(task) }
    }

    /// Waits until a member dies; returns the member and the cause. Cancel-safe.
    async fn first_death(&self, running: &mut [Running]) -> (usize, String) {
        loop {
            let ends = running.iter_mut().map(|member| member.ended().boxed());
            let (end, index, _) = select_all(ends).await;
            match end {
                End::Died(cause) => return (index, cause),
                End::Done => {
                    self.shared.set_state(&running[index].service.name, State::Done, None);
                }
            }
        }
    }

    /// Ends all members, the youngest first. The dead one keeps its state.
    async fn stop(&self, running: Vec<Running>, dead: Option<&Arc<str>>) {
        for member in running.into_iter().rev() {
            let span = member.span.clone();
            let name = Arc::clone(&member.service.name);
            member.stop().instrument(span).await;
            if dead != Some(&name) {
                self.shared.set_state(&name, State::Stopped, None);
            }
        }
    }

    fn pass_on(&self, name: &str, deaths: u32, cause: &str) {
        let Some(parent) = &self.parent else {
            self.shared.open_trapdoor(root_died(&self.shared, cause));
            return;
        };
        let times = if deaths == 1 { "died".to_owned() } else { format!("died {deaths} times") };
        // The parent may be ending already, or have received another death.
        let _too_late = parent.passed_on.try_send(format!("{name} {times}: {cause}"));
    }
}

/// How a run ended.
enum End {
    Done,
    Died(String),
}

impl Running {
    /// Waits until this member dies or is done. Cancel-safe: both branches are,
    /// a task's handle by reference and a queue.
    async fn ended(&mut self) -> End {
        let Some(task) = &mut self.task else {
            return match self.passed_on.recv().await {
                Some(cause) => End::Died(cause),
                // The sender is in `self.run`.
                None => std::future::pending().await,
            };
        };
        let outcome = tokio::select! {
            Some(cause) = self.passed_on.recv() => return End::Died(cause),
            outcome = task => outcome,
        };
        self.task = None;
        match outcome {
            Ok(Ok(())) if self.run.done.load(Ordering::Acquire) => End::Done,
            Ok(Ok(())) => End::Died("returned without being done".to_owned()),
            Ok(Err(error)) => End::Died(format!("{error:#}")),
            Err(error) => End::Died(describe(error)),
        }
    }

    /// Stops its children, then the run itself. The end is on purpose: its result is
    /// ignored.
    async fn stop(mut self) {
        self.run.stop_children().await;
        self.run.cancel.cancel();
        let Some(mut task) = self.task.take() else { return };
        match timeout(STOP_DEADLINE, &mut task).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => info!(error = format!("{error:#}"), "ended while stopping"),
            Ok(Err(error)) => warn!(error = describe(error), "ended while stopping"),
            Err(_elapsed) => {
                error!("did not stop within {STOP_DEADLINE:?}, aborted");
                task.abort();
                if timeout(ABORT_DEADLINE, task).await.is_err() {
                    error!("cannot be aborted: it blocks and is abandoned");
                }
            }
        }
    }
}

/// The cause of death of a task that did not return.
fn describe(error: JoinError) -> String {
    let Ok(payload) = error.try_into_panic() else { return "aborted".to_owned() };
    let text = match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => match payload.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(_) => "with a value that is not text".to_owned(),
        },
    };
    format!("panicked: {text}")
}

/// The root service died: the machine cannot go on.
fn root_died(shared: &Shared, cause: &str) -> Report {
    let stages = shared.stages.watch();
    let stage = polis_base::stage::current(&stages.borrow());
    let causes = cause.split(": ").map(str::to_owned).collect();
    let tried = vec!["restarting it with growing delays, up to its limit".to_owned()];
    Report { stage, tried, ..Report::new(code::SERVICE_GAVE_UP, causes) }
}

/// A number in `0.0..1.0` for the jitter. Not from the kernel's random source,
/// which may block until it is seeded, and a boot is when services die.
fn jitter() -> f64 {
    f64::from(polis_base::sys::clock::uptime().subsec_nanos() % 1_000_003) / 1_000_003.0
}

#[expect(clippy::disallowed_methods, reason = "the supervisor is the one that starts tasks")]
fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(future)
}
