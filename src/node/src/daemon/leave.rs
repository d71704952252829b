//! The drain before an end that somebody at the machine asked for: by a key of the console, the
//! power button, or Ctrl-Alt-Del.
//!
//! ```text
//! asked --a worker whose Node is ready--> [its pods leave] --none left, or a minute--> the end
//!   |                                            \--asked again--------------------------^
//!   \--anything else---------------------------------------------------------------------^
//! ```
//!
//! Invariant: nothing but the minute counts against a person who asks again.
//!
//! What this module does not do: drain (`workload::drain`), or end the machine (`init`).

use tokio::sync::watch;
use tracing::{info, warn};

use polis_workload as workload;
use polis_workload::drain::{Drains, Held, Progress, State};
use polis_workload::{Part, PartState};

/// The parts of the node that it takes.
#[derive(Clone, Debug)]
pub(super) struct Leave {
    pub(super) drains: Drains,
    pub(super) workload: watch::Receiver<workload::Status>,
}

impl Leave {
    /// Whether there may be pods, and Kubernetes can be asked about them.
    pub(super) fn is_needed(&self) -> bool {
        self.workload.borrow().parts.get(&Part::Node) == Some(&PartState::Ready)
    }

    /// Moves the pods away, for a minute at most. No new ones come while the returned value is
    /// held. Cancel-safe: the drain ends.
    pub(super) async fn drained(self) -> Option<Held> {
        let held = self.drains.begin_before_end();
        warn!("the machine ends once its pods are gone, or in a minute; at once if asked again");
        let mut seen: Option<Progress> = None;
        loop {
            let Ok(progress) = held.next(seen.as_ref()).await else {
                warn!("another request drains this node: the machine ends with its pods");
                return None;
            };
            match &progress.state {
                State::None | State::Draining if progress.cause.is_empty() => {}
                State::None | State::Draining => {
                    info!(pods = progress.pods, cause = progress.cause, "the machine waits");
                }
                State::Drained => return Some(held),
                State::GivenUp | State::Failed(_) => {
                    let (pods, cause) = (progress.pods, &progress.cause);
                    warn!(pods, cause, "the machine ends with pods on it");
                    return Some(held);
                }
            }
            seen = Some(progress);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_worker_that_kubernetes_knows_is_drained() {
        let status = watch::Sender::new(workload::Status::default());
        let leave = Leave { drains: Drains::default(), workload: status.subscribe() };
        assert!(!leave.is_needed(), "no worker");
        for (state, needed) in [
            (PartState::Starting, false),
            (PartState::Failed { cause: "no API server answers".to_owned() }, false),
            (PartState::Ready, true),
        ] {
            status.send_modify(|status| drop(status.parts.insert(Part::Node, state.clone())));
            assert_eq!(leave.is_needed(), needed, "{state:?}");
        }
    }
}
