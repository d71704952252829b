//! The supervisor: it runs every service of the node in one tree and restarts those that die.
//!
//! A service is an async function of a [`Context`]. It reports *healthy* once, and
//! *done* if it ends on purpose; any other end (an error, a panic, a return) is a
//! death. A service starts its children through its context, one by one
//! ([`Context::spawn`]) or as a group that lives and dies together
//! ([`Context::group`]).
//!
//! ```text
//!             healthy()            done(), then Ok
//! [starting] ----------> [healthy] ---------------> [done]
//!   ^   |                    |
//!   |   +------ death -------+
//!   |             v
//!   +--delay-- [dead] --bound exceeded--> [failed]: the parent dies of it;
//!                                         the root's death opens the trapdoor
//! ```
//!
//! Invariants:
//! - All tasks of the node run inside this tree.
//! - A death ends the whole subtree of the dead service, and its group, before any part
//!   of it starts again.
//! - Children stop before their parent is cancelled, the youngest first; so the service
//!   that started last stops first, at every level.
//! - The supervisor never calls into a service and never waits for one longer
//!   than [`STOP_DEADLINE`].
//!
//! What this module does not do: order start-up (services wait for the event values
//! they need) or classify health (services report it).

mod blocking;
mod children;
mod context;
pub mod restart;
mod runner;
pub mod testing;
mod tree;

#[cfg(test)]
mod tests;

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::blocking::{Lost, attempt, blocking};
pub use self::children::Group;
pub use self::context::{Child, Context};
pub use self::restart::Policy;
pub use self::testing::Handles;
pub use self::tree::{Entry, State, Tree};
use crate::board::Board;
use crate::lines::Lines;
use crate::logtree;
use polis_base::stage;
use polis_base::trapdoor::Report;

/// A cancelled run that has not ended by then is aborted and named in the log.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// The name of the first service.
pub const ROOT: &str = "root";

/// The state that all services share, and the receivers of reports.
#[derive(Clone, Debug)]
struct Shared {
    stages: Board,
    lines: Lines,
    logs: logtree::Tree,
    tree: watch::Sender<Tree>,
    trapdoor: watch::Sender<Option<Report>>,
    /// An orderly stop is under way: a failure now is a consequence of it.
    stopping: CancellationToken,
}

impl Shared {
    fn new(stages: Board, lines: Lines, logs: logtree::Tree) -> Self {
        Self {
            stages,
            lines,
            logs,
            tree: watch::Sender::default(),
            trapdoor: watch::Sender::default(),
            stopping: CancellationToken::new(),
        }
    }

    fn open_trapdoor(&self, report: Report) {
        if self.stopping.is_cancelled() {
            tracing::warn!(cause = report.cause(), "this failed while the node was stopping");
            return;
        }
        self.stages.set(report.stage, stage::State::Failed);
        self.trapdoor.send_if_modified(|open| {
            // The first report is the cause; later ones are its consequences.
            let first = open.is_none();
            if first {
                *open = Some(report);
            }
            first
        });
    }
}

/// The running tree, as `node` holds it.
#[derive(Debug)]
pub struct Supervisor {
    shared: Shared,
    root: Child,
}

impl Supervisor {
    /// Starts the root service. Its death opens the trapdoor.
    pub fn start<R, F, E>(stages: Board, lines: Lines, logs: logtree::Tree, run: R) -> Self
    where
        R: Fn(Context) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error>,
    {
        let shared = Shared::new(stages, lines, logs);
        let root = runner::start_root(shared.clone(), context::service(ROOT.into(), run));
        Self { shared, root }
    }

    /// The state of every service, as an event value.
    #[must_use]
    pub fn tree(&self) -> watch::Receiver<Tree> {
        self.shared.tree.subscribe()
    }

    /// Completes when a service has opened the trapdoor. Cancel-safe.
    pub async fn trapdoor(&self) -> Report {
        let mut open = self.shared.trapdoor.subscribe();
        match crate::event::until(&mut open, "trapdoor", Clone::clone).await {
            Ok(report) => report,
            // The sender is in `self`.
            Err(crate::event::Closed(_)) => std::future::pending().await,
        }
    }

    /// Stops every service, the youngest first, each within [`STOP_DEADLINE`].
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        self.root.stop().await;
    }
}
