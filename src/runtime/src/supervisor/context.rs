//! The context that the supervisor gives to one run of a service.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::tree::{State, Tree};
use crate::lines::Lines;
use crate::logtree::{self, Parser, Sink};
use polis_base::stage::{self, Stage, Stages};
use polis_base::trapdoor::Report;

/// The context that the supervisor gives to one run of a service. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Context {
    pub(super) name: Arc<str>,
    pub(super) run: Arc<Run>,
    pub(super) shared: Shared,
}

/// One run of one service, as its context and its runner see it.
#[derive(Debug)]
pub(super) struct Run {
    /// Cancelled when the run must end.
    pub(super) cancel: CancellationToken,
    /// The subtree is being stopped: deaths in it do not count any more.
    pub(super) ending: CancellationToken,
    /// Children in the order of their start; `None` once they are being stopped.
    pub(super) children: Mutex<Option<Vec<Child>>>,
    /// Receives the death of a child that exceeded its bound.
    pub(super) passed_on: mpsc::Sender<String>,
    pub(super) healthy: OnceLock<Instant>,
    pub(super) done: AtomicBool,
}

impl Run {
    /// A run below `ending`, and the receiver of deaths that its children pass on.
    pub(super) fn new(ending: &CancellationToken) -> (Arc<Self>, mpsc::Receiver<String>) {
        // One is enough: the first ends the run.
        let (passed_on, deaths) = mpsc::channel(1);
        let run = Self {
            cancel: CancellationToken::new(),
            ending: ending.child_token(),
            children: Mutex::new(Some(Vec::new())),
            passed_on,
            healthy: OnceLock::new(),
            done: AtomicBool::new(false),
        };
        (Arc::new(run), deaths)
    }

    /// Stops the children, the youngest first.
    pub(super) async fn stop_children(&self) {
        self.ending.cancel();
        let children = self.children.lock().unwrap_or_else(PoisonError::into_inner).take();
        for child in children.into_iter().flatten().rev() {
            child.stop().await;
        }
    }
}

/// A started child, or group of children. Dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct Child {
    pub(super) stop: CancellationToken,
    pub(super) ended: CancellationToken,
}

impl Child {
    /// Stops it with everything below it, and waits until it has ended.
    ///
    /// Safe to drop and to repeat: the stop goes on.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.ended.cancelled().await;
    }
}

/// A service as the supervisor keeps it: it can be started any number of times.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) name: Arc<str>,
    pub(super) run: Arc<RunFn>,
}

type RunFn = dyn Fn(Context) -> BoxFuture<'static, Result<(), anyhow::Error>> + Send + Sync;

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Service").field(&self.name).finish()
    }
}

pub(super) fn service<R, F, E>(name: Arc<str>, run: R) -> Service
where
    R: Fn(Context) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<anyhow::Error>,
{
    let run = move |ctx| run(ctx).map(|ended| ended.map_err(Into::into)).boxed();
    Service { name, run: Arc::new(run) }
}

impl Context {
    /// The dotted name of this service, for example `root.cluster.consensus`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Completes when the supervisor wants this run to end. Cancel-safe.
    pub async fn cancelled(&self) {
        self.run.cancel.cancelled().await;
    }

    /// Drives `work`, or drops it and returns `None` once this run must end.
    pub async fn until_cancelled<F: Future>(&self, work: F) -> Option<F::Output> {
        self.run.cancel.run_until_cancelled(work).await
    }

    /// Reports that this run is healthy. A second report has no effect.
    pub fn healthy(&self) {
        if self.run.healthy.set(Instant::now()).is_ok() && !self.run.ending.is_cancelled() {
            self.shared.set_state(&self.name, State::Healthy, None);
        }
    }

    /// Reports that the end of this run is on purpose: return `Ok(())` after it. Its
    /// children run on until its parent ends.
    pub fn done(&self) {
        self.run.done.store(true, Ordering::Release);
    }

    pub(super) fn child_name(&self, name: &str) -> Arc<str> {
        format!("{}.{name}", self.name).into()
    }

    /// Reports a boot stage.
    pub fn stage(&self, stage: Stage, state: stage::State) {
        self.shared.stages.set(stage, state);
    }

    /// The boot stages, as an event value.
    #[must_use]
    pub fn stages(&self) -> watch::Receiver<Stages> {
        self.shared.stages.watch()
    }

    /// The state of every service, as an event value.
    #[must_use]
    pub fn tree(&self) -> watch::Receiver<Tree> {
        self.shared.tree.subscribe()
    }

    /// The serial port, for event lines.
    #[must_use]
    pub fn lines(&self) -> &Lines {
        &self.shared.lines
    }

    /// The log tree, for readers. Services write with `tracing`.
    #[must_use]
    pub fn logs(&self) -> &logtree::Tree {
        &self.shared.logs
    }

    /// The sink for a program that this service starts: under this service's name and
    /// `program`.
    #[must_use]
    pub fn sink(&self, program: &str, parser: Parser) -> Sink {
        self.shared.logs.sink(self.child_name(program).as_ref(), parser)
    }

    /// Opens the trapdoor: this machine cannot go on. Never returns; the node is stopped.
    pub async fn trapdoor(&self, report: Report) -> std::convert::Infallible {
        self.shared.open_trapdoor(report);
        std::future::pending().await
    }
}
