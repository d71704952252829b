//! The drain of this node: keeps new pods away and moves those that are there, for as long
//! as a caller holds it.
//!
//! The node drains itself, with the certificate of its kubelet: the API server lets it
//! cordon its own Node and evict its own pods, and nothing else. So a drain needs neither a
//! leader nor a right over the pods of other nodes.
//!
//! ```text
//! Drains::begin --order--> [service] --Progress--> Held     (the stream of an operator)
//!                              |
//!    cordon, evict, look again v
//! [none] --order--> [draining] --no pod left--------------> [drained]
//!   ^                   |  \----no API server answers,
//!   |                   |       or deadline and `force`----> [given up]
//!   |                   \----- refused, or deadline -------> [failed]
//!   +--------- `Held` is gone for GRACE, or the machine has booted: uncordoned
//! ```
//!
//! | file | content |
//! |---|---|
//! | `pods` | which pods have to go, and what the API server answers to an eviction; pure |
//! | `state` | what is known of a drain |
//! | `service` | cordons, evicts, waits, and uncordons |
//!
//! Invariants:
//! - Only a Node that Polis has cordoned is uncordoned: it has the annotation.
//! - A drain ends: each of its waits has a deadline.
//! - A new order replaces the one before it.
//!
//! What this module does not do: end the machine, or take its role away. The caller does
//! so while it holds the drain.

mod pods;
mod service;
pub(super) mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use self::service::Service;
pub use self::state::{Failure, State};

/// The longest deadline of a drain: a day.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a drain waits for an API server. A machine can be rebooted without Kubernetes.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long a person in front of the machine waits for pods: twice the grace that a pod has where
/// it names none.
const END_MAX: Duration = Duration::from_secs(60);

/// And for an API server.
const END_SILENCE_MAX: Duration = Duration::from_secs(5);

/// The wish of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    number: u64,
    since: Instant,
    timeout: Duration,
    /// What becomes of pods that nothing would replace.
    unmanaged: Unmanaged,
    /// How long an API server is waited for.
    silence: Duration,
}

/// What becomes of pods that nothing would replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmanaged {
    /// The drain fails, and moves no pod.
    Refuse,
    /// They are evicted, too.
    Evict,
    /// They stay: the machine is there again, and they are.
    Leave,
}

/// How far the drain of an order is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    number: u64,
    /// The state.
    pub state: State,
    /// Pods that still have to go.
    pub pods: usize,
    /// The reason why it waits, or ended.
    pub cause: String,
}

/// The way to have this node drained. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Drains {
    numbers: Arc<AtomicU64>,
    order: watch::Sender<Option<Order>>,
    progress: watch::Sender<Progress>,
}

impl Drains {
    /// Has the node drained until the deadline, instead of any order before, and keeps it
    /// drained until the returned value is dropped. With `force` pods that nothing replaces
    /// are evicted, too, and the deadline ends the drain as [`State::GivenUp`].
    #[must_use]
    pub fn begin(&self, timeout: Duration, force: bool) -> Held {
        let unmanaged = if force { Unmanaged::Evict } else { Unmanaged::Refuse };
        self.ordered(timeout, unmanaged, SILENCE_MAX)
    }

    /// The same before an end of the machine that somebody in front of it asked for: for a
    /// minute, for an API server for some seconds, and pods that nothing replaces stay.
    #[must_use]
    pub fn begin_before_end(&self) -> Held {
        self.ordered(END_MAX, Unmanaged::Leave, END_SILENCE_MAX)
    }

    fn ordered(&self, timeout: Duration, unmanaged: Unmanaged, silence: Duration) -> Held {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let since = Instant::now();
        let timeout = timeout.min(TIMEOUT_MAX);
        let order = Order { number, since, timeout, unmanaged, silence };
        self.order.send_replace(Some(order));
        Held { number, since, drains: self.clone() }
    }

    /// The state at present.
    #[must_use]
    pub fn state(&self) -> State {
        self.progress.borrow().state
    }
}

/// A drain that is held. The node takes pods again after its end.
#[derive(Debug)]
pub struct Held {
    number: u64,
    since: Instant,
    drains: Drains,
}

/// Another caller has begun a drain, which holds instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another request drains this node now")]
pub struct Taken;

impl Held {
    /// The time since it was begun.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Waits for a progress that is not `seen`. Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`Taken`].
    pub async fn next(&self, seen: Option<&Progress>) -> Result<Progress, Taken> {
        let mut order = self.drains.order.subscribe();
        let mut progress = self.drains.progress.subscribe();
        let taken =
            order.wait_for(|order| order.as_ref().is_none_or(|order| order.number != self.number));
        let new =
            progress.wait_for(|progress| progress.number == self.number && Some(progress) != seen);
        // The senders live as long as `self`.
        tokio::select! {
            // Cancel-safe, both: they wait for event values.
            _taken = taken => Err(Taken),
            Ok(progress) = new => Ok(progress.clone()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.drains.order.send_if_modified(|order| {
            let own = order.as_ref().is_some_and(|order| order.number == self.number);
            if own {
                *order = None;
            }
            own
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_is_held_until_its_holder_is_gone_or_another_takes_it_over() {
        let drains = Drains::default();
        let order = drains.order.subscribe();
        let first = drains.begin(Duration::from_secs(60), false);
        assert_eq!(order.borrow().as_ref().unwrap().number, first.number);
        let second = drains.begin(Duration::from_secs(60), true);
        assert_eq!(first.next(None).await, Err(Taken));
        drop(first);
        let unmanaged = order.borrow().as_ref().unwrap().unmanaged;
        assert_eq!(unmanaged, Unmanaged::Evict, "the second one still holds");
        drop(second);
        assert_eq!(*order.borrow(), None);
    }

    #[tokio::test]
    async fn a_holder_sees_the_progress_of_its_own_order() {
        let drains = Drains::default();
        let old = Progress { number: 0, state: State::Drained, ..Progress::default() };
        drains.progress.send_replace(old);
        let held = drains.begin(TIMEOUT_MAX * 2, false);
        assert_eq!(drains.order.borrow().as_ref().unwrap().timeout, TIMEOUT_MAX);
        let own = Progress { number: held.number, state: State::Draining, ..Progress::default() };
        let (seen, ()) = tokio::join!(held.next(None), async {
            drains.progress.send_replace(own.clone());
        });
        assert_eq!(seen, Ok(own.clone()));
        let done = Progress { state: State::Drained, ..own.clone() };
        drains.progress.send_replace(done.clone());
        assert_eq!(held.next(Some(&own)).await, Ok(done));
    }
}
