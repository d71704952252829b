//! A build of Go on a thread of its own. Go has a folder and a lock of its own, so it does not
//! wait for the builds of the other parts, which are cargo's.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// A build that goes on.
pub(super) struct Background(JoinHandle<Result<()>>);

impl Background {
    /// Steps of `nice`: other work goes first.
    const STEPS: i32 = 19;

    /// Begins it, at the lowest priority.
    pub(super) fn begin(build: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        Self(thread::spawn(move || {
            // Of this thread, and of what it starts.
            rustix::process::nice(Self::STEPS).context("cannot be nice")?;
            build()
        }))
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self) -> bool {
        self.0.is_finished()
    }

    /// Longest that a build may go on once nothing runs beside it.
    const PATIENCE: Duration = Duration::from_secs(45 * 60);

    /// Waits for its end; false if it has none until then.
    pub(super) fn wait(self, until: Option<Instant>) -> Result<bool> {
        let begun = Instant::now();
        while !self.is_over() {
            if until.is_some_and(|until| until < Instant::now()) {
                return Ok(false);
            }
            ensure!(begun.elapsed() < Self::PATIENCE, "it did not end in {:?}", Self::PATIENCE);
            thread::sleep(Duration::from_millis(200));
        }
        let ended = self.0.join();
        ended.unwrap_or_else(|_panic| bail!("the thread that built it panicked")).map(|()| true)
    }
}
