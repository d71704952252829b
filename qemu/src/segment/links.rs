//! The links of a segment: what a test cuts, slows, heals and captures.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::switch::{State, lock, pair};
use crate::capture::{Capture, Captured};
use crate::plug::Port;

/// The links of a segment, usable from any thread. After the segment has ended, a cut
/// has no effect; the default belongs to no segment.
#[derive(Clone, Debug, Default)]
pub struct Links {
    pub(super) state: Arc<Mutex<State>>,
}

impl Links {
    /// Cuts the link between two ports; frames on it are lost from now on.
    pub fn cut(&self, a: Port, b: Port) {
        lock(&self.state).cut.insert(pair(a, b));
    }

    /// Cuts `port` off from all others, the gateway among them.
    pub fn isolate(&self, port: Port) {
        let mut state = lock(&self.state);
        let others: Vec<Port> =
            state.lines.keys().copied().filter(|other| *other != port).collect();
        state.cut.extend(others.into_iter().map(|other| pair(port, other)));
    }

    /// Cuts `machine` off from all others, except the gateway: the host reaches it.
    pub fn part(&self, machine: Port) {
        let mut state = lock(&self.state);
        let others: Vec<Port> = state.lines.keys().copied().collect();
        let others = others.into_iter().filter(|other| ![machine, Port::Gateway].contains(other));
        state.cut.extend(others.map(|other| pair(machine, other)));
    }

    /// Makes every link to and from `port` slower by `delay`.
    pub fn slow(&self, port: Port, delay: Duration) {
        lock(&self.state).delays.insert(port, delay);
    }

    /// Captures every frame that is delivered from now on; a former capture is dropped.
    pub fn capture(&self) {
        lock(&self.state).capture = Some(Capture::default());
    }

    /// Ends the capture, and returns its frames; nothing without a capture.
    ///
    /// # Errors
    /// The number of frames for which it had no room.
    pub fn captured(&self) -> Result<Vec<Captured>, usize> {
        lock(&self.state).capture.take().unwrap_or_default().end()
    }

    /// The bytes of all frames that came from `port` and were delivered, since the start.
    #[must_use]
    pub fn bytes_from(&self, port: Port) -> u64 {
        lock(&self.state).delivered.get(&port).copied().unwrap_or_default()
    }

    /// Undoes every cut and every delay.
    pub fn heal(&self) {
        let mut state = lock(&self.state);
        state.cut.clear();
        state.delays.clear();
    }
}
