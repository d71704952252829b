//! A context for the tests of services, without a supervisor around it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::context::{Context, Run};
use super::{Shared, Tree};
use crate::board::Board;
use crate::lines::Lines;
use crate::logtree;
use polis_base::stage::Stages;
use polis_base::trapdoor::Report;

/// The test's end of a context.
#[derive(Debug)]
pub struct Handles {
    /// The lines for the serial port.
    pub lines: mpsc::Receiver<String>,
    /// The boot stages that it reported.
    pub stages: watch::Receiver<Stages>,
    /// The report, if it opened the trapdoor.
    pub trapdoor: watch::Receiver<Option<Report>>,
    /// The states of the service and its children.
    pub tree: watch::Receiver<Tree>,
    run: Arc<Run>,
    /// Receives the deaths that children pass on; the service itself survives them
    /// here.
    pub passed_on: mpsc::Receiver<String>,
}

impl Context {
    /// A context of the service `test`, and the test's end of it.
    #[must_use]
    pub fn for_test() -> (Self, Handles) {
        Self::for_test_with(logtree::Tree::new(None))
    }

    /// The same with an existing log tree.
    #[must_use]
    pub fn for_test_with(logs: logtree::Tree) -> (Self, Handles) {
        let (lines, written) = Lines::channel();
        let shared = Shared::new(Board::new(BTreeMap::new(), lines.clone()), lines, logs);
        let (run, passed_on) = Run::new(&CancellationToken::new());
        let handles = Handles {
            lines: written,
            stages: shared.stages.watch(),
            trapdoor: shared.trapdoor.subscribe(),
            tree: shared.tree.subscribe(),
            run: Arc::clone(&run),
            passed_on,
        };
        (Self { name: "test".into(), run, shared }, handles)
    }
}

impl Handles {
    /// Stops the children, then cancels the service, as the supervisor would.
    pub async fn cancel(&self) {
        self.run.stop_children().await;
        self.run.cancel.cancel();
    }

    /// Whether the service reported healthy.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.run.healthy.get().is_some()
    }

    /// Whether the service reported done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.run.done.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Every line written so far that has not been read yet.
    pub fn take_lines(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.lines.try_recv().ok()).collect()
    }
}
