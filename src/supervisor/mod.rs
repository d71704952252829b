//! Runs every service of the node in one tree and restarts the ones that die.
//!
//! A service is an async function of a [`Context`]. It says *healthy* once, and
//! *done* if it ends on purpose; any other end is a death.
//!
//! Invariants:
//! - Nothing in the node runs outside this tree.
//! - The supervisor never calls into a service and never waits for one longer
//!   than [`STOP_DEADLINE`].
//!
//! What this module does not do: order start-up (services wait for the event
//! values they need) or judge health (a service says so).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::serial::Lines;
use crate::stage::{Board, Stage, State};
use crate::trapdoor::Report;

/// A cancelled run that has not ended by then is aborted and named in the log.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// What the supervisor lends to one run of a service. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Context {
    name: Arc<str>,
    cancel: CancellationToken,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    stages: Board,
    lines: Lines,
    trapdoor: watch::Sender<Option<Report>>,
}

impl Context {
    /// The dotted name of this service, for example `root.cluster.consensus`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Completes when the supervisor wants this run to end. Cancel-safe.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// Drives `work`, or drops it and returns `None` once this run must end.
    pub async fn until_cancelled<F: Future>(&self, work: F) -> Option<F::Output> {
        self.cancel.run_until_cancelled(work).await
    }

    /// Says that this run serves its purpose. Saying it twice changes nothing.
    pub fn healthy(&self) {}

    /// Says that the end of this run is on purpose: return `Ok(())` after it.
    pub fn done(&self) {}

    /// Reports a boot stage.
    pub fn stage(&self, stage: Stage, state: State) {
        self.shared.stages.set(stage, state);
    }

    /// The serial port, for event lines.
    #[must_use]
    pub fn lines(&self) -> &Lines {
        &self.shared.lines
    }

    /// Opens the trapdoor: this machine cannot go on. Never returns; the node is stopped.
    pub async fn trapdoor(&self, report: Report) -> std::convert::Infallible {
        self.stage(report.stage, State::Failed);
        self.shared.trapdoor.send_if_modified(|open| {
            // The first report is the cause; later ones are its echoes.
            let first = open.is_none();
            if first {
                *open = Some(report);
            }
            first
        });
        std::future::pending().await
    }
}
