//! Counters of calls, connections and rejections; written by every server, read by `/metrics`.
//!
//! Invariants:
//! - Callers cannot create new counters: paths that are missing from the table count
//!   together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::access::Table;

/// Upper ends of the classes of latency, in seconds; one more has no end.
pub const BUCKETS: [f64; 8] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0];

/// Status codes of gRPC: 0 to 16.
const CODES: usize = 17;

/// The path under which calls are counted that the table does not contain.
pub const OTHER: &str = "other";

/// The counters of one server. Shared by all its connections.
#[derive(Debug)]
pub struct Metrics {
    calls: BTreeMap<String, Calls>,
    /// Connections that were accepted.
    pub accepted: Counter,
    /// Connections that were closed early, because the room was full.
    pub crowded_out: Counter,
    /// Handshakes that failed or did not finish.
    pub handshakes_failed: Counter,
    /// Connections that were cut because their peer had lost its access.
    pub cut: Counter,
    /// Connections that were cut because an answer was left lying.
    pub stalled: Counter,
    /// Calls that were rejected before they reached their service.
    pub refused: Counter,
    /// Connections that are open now, handshakes among them.
    pub open: Counter,
}

/// The counters of one RPC.
#[derive(Debug, Default)]
pub struct Calls {
    codes: [Counter; CODES],
    classes: [Counter; BUCKETS.len() + 1],
    micros: Counter,
}

/// A number that many may change at once.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn up(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes one away.
    pub fn down(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// The number.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Metrics {
    /// Counters for everything in `table`.
    #[must_use]
    pub fn new(table: &Table) -> Self {
        let paths = table.rules().map(|(path, _)| path.to_owned());
        Self {
            calls: paths.chain([OTHER.to_owned()]).map(|path| (path, Calls::default())).collect(),
            accepted: Counter::default(),
            crowded_out: Counter::default(),
            handshakes_failed: Counter::default(),
            cut: Counter::default(),
            stalled: Counter::default(),
            refused: Counter::default(),
            open: Counter::default(),
        }
    }

    /// Notes a call that has ended with `code`, `took` after it came.
    pub(super) fn called(&self, path: &str, code: tonic::Code, took: Duration) {
        let Some(calls) = self.calls.get(path).or_else(|| self.calls.get(OTHER)) else { return };
        if let Some(counter) =
            usize::try_from(i32::from(code)).ok().and_then(|i| calls.codes.get(i))
        {
            counter.up();
        }
        let seconds = took.as_secs_f64();
        let class = BUCKETS.iter().position(|end| seconds <= *end).unwrap_or(BUCKETS.len());
        calls.classes[class].up();
        calls.micros.add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }

    /// Every RPC that was called at least once.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &Calls)> {
        let calls = self.calls.iter().filter(|(_, calls)| calls.count() > 0);
        calls.map(|(path, calls)| (path.as_str(), calls))
    }
}

impl Calls {
    /// How many have ended.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.codes.iter().map(Counter::get).sum()
    }

    /// How many have ended with each code; codes without a call are left out.
    pub fn codes(&self) -> impl Iterator<Item = (tonic::Code, u64)> {
        let codes = (0_i32..).zip(&self.codes).map(|(code, n)| (tonic::Code::from(code), n.get()));
        codes.filter(|(_, count)| *count > 0)
    }

    /// How many took at most as long as each of [`BUCKETS`], then all.
    #[must_use]
    pub fn within(&self) -> [u64; BUCKETS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|class| {
            sum += self.classes[class].get();
            sum
        })
    }

    /// How long they took together.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        Duration::from_micros(self.micros.get()).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_code_and_class() {
        let metrics = Metrics::new(&Table::polis().unwrap());
        let path = "/polis.v1.Aaa/Escrow";
        metrics.called(path, tonic::Code::Ok, Duration::from_millis(3));
        metrics.called(path, tonic::Code::Ok, Duration::from_secs(60));
        metrics.called(path, tonic::Code::NotFound, Duration::from_micros(900));
        let (named, calls) = metrics.calls().next().unwrap();
        assert_eq!(named, path);
        assert_eq!(calls.count(), 3);
        let codes: Vec<_> = calls.codes().collect();
        assert_eq!(codes, [(tonic::Code::Ok, 2), (tonic::Code::NotFound, 1)]);
        assert_eq!(calls.within(), [1, 2, 2, 2, 2, 2, 2, 2, 3]);
        assert!((calls.seconds() - 60.0039).abs() < 1e-9);
    }

    #[test]
    fn unknown_paths_make_no_counters() {
        let metrics = Metrics::new(&Table::polis().unwrap());
        let before = metrics.calls.len();
        for n in 0..1000 {
            metrics.called(&format!("/{n}"), tonic::Code::Unimplemented, Duration::ZERO);
        }
        assert_eq!(metrics.calls.len(), before);
        assert_eq!(metrics.calls().next().unwrap().0, OTHER);
    }
}
