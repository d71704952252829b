//! The queue of lines that wait for the serial port.
//!
//! Services put lines here; `node` hands them to `init`, which owns the port.
//! A slow port never slows a service: a full queue drops the line and counts it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use polis_base::serial::EventLine;
use tokio::sync::mpsc;

/// Lines that wait for the serial port. A boot writes some hundreds; a port at
/// 115,200 baud drains about a hundred a second.
const LINES_MAX: usize = 2048;

/// The queue into which `node` puts the lines of the serial port. Cheap to clone, never
/// blocks.
#[derive(Clone, Debug)]
pub struct Lines {
    queue: mpsc::Sender<String>,
    /// Lines that were queued and not yet written.
    pending: Arc<AtomicU64>,
    dropped: Arc<AtomicU64>,
}

impl Lines {
    /// A bounded queue of lines and its reading end.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<String>) {
        let (queue, lines) = mpsc::channel(LINES_MAX);
        (Self { queue, pending: Arc::default(), dropped: Arc::default() }, lines)
    }

    /// Queues `line`; a full queue drops it and counts it.
    pub fn put(&self, line: String) {
        self.pending.fetch_add(1, Ordering::AcqRel);
        if self.queue.try_send(line).is_err() {
            self.written(1);
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// For the writer: removes `count` written lines from the count of pending ones.
    pub fn written(&self, count: u64) {
        self.pending.fetch_sub(count, Ordering::AcqRel);
    }

    /// Whether every queued line was written.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Queues an event line that happened now.
    pub fn event(&self, line: EventLine) {
        self.put(line.bounded().at(polis_base::sys::clock::uptime()).to_string());
    }

    /// How many lines were dropped since the last call.
    #[must_use]
    pub fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}
