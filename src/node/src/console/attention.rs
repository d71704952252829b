//! The attention of people: the time of the last event that a person would look at.
//!
//! Screens call when a key is pressed, the console when an event value changes; the
//! load is sampled less often after [`REST`] without a call.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Silence from which on a machine is at rest.
const REST: Duration = Duration::from_secs(10);

/// The way to call. Clones share their state.
#[derive(Clone, Debug)]
pub(super) struct Attention(watch::Sender<Instant>);

impl Attention {
    /// Something happens now.
    pub(super) fn call(&self) {
        self.0.send_replace(Instant::now());
    }

    /// Whether nothing has happened for a while.
    pub(super) fn is_at_rest(&self) -> bool {
        self.0.borrow().elapsed() >= REST
    }

    /// When the last call was.
    pub(super) fn calls(&self) -> watch::Receiver<Instant> {
        self.0.subscribe()
    }
}

impl Default for Attention {
    fn default() -> Self {
        Self(watch::Sender::new(Instant::now()))
    }
}
