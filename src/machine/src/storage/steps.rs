//! The steps that are taken on a disk beside the one of the machine: says which one is late.
//!
//! ```text
//! step --SOON--> a line in the log --its limit--> late --ends--> the next step
//! ```
//!
//! A volume takes them, and a mirror on a disk that comes. A step that hangs is not given up: its
//! thread stays in the kernel, and another attempt would hold one more. So its owner goes on
//! waiting, and its state names the disk.
//!
//! What this module does not do: bound the steps of the disk that the machine runs from
//! (`deadline`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::info;

use super::apply::Error;
use super::deadline::{SOON, Watch};

/// A step.
#[derive(Clone, Debug)]
struct Step {
    /// The kernel's name of the disk.
    disk: String,
    what: &'static str,
    limit: Duration,
    since: Instant,
}

/// A step takes longer than it ever should.
#[derive(Debug, thiserror::Error)]
#[error(
    "the disk {disk} is slow, or does not answer: {what} has not ended after {seconds} seconds; \
     check the disk and its cable, or pull it"
)]
pub struct Late {
    /// The kernel's name of it.
    disk: String,
    /// Which step.
    what: &'static str,
    /// How long it was waited for.
    seconds: u64,
}

/// The step that is being taken. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps(Arc<Mutex<Option<Step>>>);

impl Steps {
    /// Takes a step on this disk: waits for `work`.
    pub(crate) async fn during<T>(
        &self,
        disk: &str,
        what: &'static str,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> T {
        self.note(Some(Step { disk: disk.to_owned(), what, limit, since: Instant::now() }));
        let mut work = std::pin::pin!(work);
        let done = match timeout(SOON, &mut work).await {
            Ok(done) => done,
            Err(_elapsed) => {
                info!(disk, "{what} takes long: the disk is slow, or does not answer");
                work.await
            }
        };
        self.note(None);
        done
    }

    /// The step that takes longer than it ever should.
    pub(crate) fn late(&self) -> Option<Late> {
        let step = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let Step { disk, what, limit, since } = step;
        let seconds = limit.as_secs();
        (since.elapsed() >= limit).then_some(Late { disk, what, seconds })
    }

    fn note(&self, step: Option<Step>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = step;
    }
}

/// Notes the steps on one disk.
#[derive(Debug)]
pub(crate) struct Noted<'a> {
    /// The kernel's name of the disk.
    pub(crate) disk: &'a str,
    pub(crate) steps: &'a Steps,
}

impl Watch for Noted<'_> {
    async fn step(
        &self,
        what: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<(), Error>> + Send,
    ) -> Result<(), Error> {
        self.steps.during(self.disk, what, limit, work).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::deadline::SMALL;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_step_is_late_from_its_limit_until_it_ends_and_names_its_disk() {
        let steps = Steps::default();
        let second = Duration::from_secs(1);
        let hung = steps.during("vdb", "mounting the volume", SMALL, tokio::time::sleep(SMALL * 2));
        let looks = async {
            tokio::time::sleep(SMALL - second).await;
            assert!(steps.late().is_none());
            tokio::time::sleep(second * 2).await;
            steps.late().map(|late| late.to_string())
        };
        let ((), late) = tokio::join!(hung, looks);
        let late = late.unwrap();
        assert!(late.contains("vdb") && late.contains("mounting the volume"), "{late}");
        assert!(steps.late().is_none(), "it has ended");
    }
}
