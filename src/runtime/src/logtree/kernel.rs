//! The kernel's messages, copied into the log tree under the name `kernel`.
//!
//! Invariants:
//! - A message is in the tree once: the tree knows the number of the next one, so that a run that
//!   follows one that died goes on where that ended.

use std::io;
use std::sync::atomic::Ordering;

use tokio::io::Interest;

use super::{Body, Levelled, Origin, Tree};
use crate::supervisor::Context;
use crate::sys::readiness;
use polis_base::serial::Severity;
use polis_base::sys::kmsg::{From, Reader, Record};

/// The dotted name of the kernel.
const NAME: &str = "kernel";
/// Records copied before the task yields: a boot has some 600.
const BATCH: usize = 64;

/// Why the messages cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device cannot be opened.
    #[error("cannot open the kernel's log")]
    Open(#[source] io::Error),
    /// The device was open and failed.
    #[error("cannot read the kernel's log")]
    Read(#[source] io::Error),
}

/// Copies the messages of this boot, from the first one that is not in the tree.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where to.
    pub tree: Tree,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`] when the log cannot be read.
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        let mut log = Reader::open(From::Start).map_err(Error::Open)?;
        let watched = readiness::watch(&log, Interest::READABLE).map_err(Error::Open)?;
        ctx.healthy();
        loop {
            let Some(ready) = ctx.until_cancelled(watched.readable()).await else { return Ok(()) };
            let mut ready = ready.map_err(Error::Read)?;
            for _ in 0..BATCH {
                let Some(record) = log.next_record().map_err(Error::Read)? else {
                    ready.clear_ready();
                    break;
                };
                self.take(record);
            }
            // The first batch holds the whole boot: let other tasks run in between.
            tokio::task::yield_now().await;
        }
    }

    /// Files a record, unless a former run has.
    fn take(&self, record: Record) {
        let next = &self.tree.0.kernel;
        let expected = Some(next.load(Ordering::Relaxed)).filter(|next| *next > 0);
        let sequence = record.sequence;
        if expected.is_some_and(|expected| sequence < expected) {
            return;
        }
        self.note_gap(expected, sequence);
        self.put(record);
        next.store(sequence.saturating_add(1), Ordering::Relaxed);
    }

    fn note_gap(&self, expected: Option<u64>, found: u64) {
        let lost = expected.map_or(0, |expected| found.saturating_sub(expected));
        if lost > 0 {
            let text = format!("{lost} messages of the kernel were lost: it wrote too fast");
            let body = Body::Levelled(Levelled::new(Severity::Warning, text));
            self.tree.append(NAME, Origin::Kernel, body);
        }
    }

    fn put(&self, record: Record) {
        let body = Body::Levelled(Levelled::new(severity(record.level), record.text));
        self.tree.append_at(record.time, NAME, Origin::Kernel, body);
    }
}

/// The kernel distinguishes eight levels. Most of a boot's messages are of the seventh:
/// what each driver found. They would hide those of the node.
fn severity(level: u8) -> Severity {
    match level {
        0..=2 => Severity::Fatal,
        3 => Severity::Error,
        4 => Severity::Warning,
        5 => Severity::Info,
        _ => Severity::Debug,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::logtree::Query;

    #[test]
    fn a_gap_is_reported_and_an_unbroken_row_is_not() {
        let service = Service { tree: Tree::new(None) };
        service.note_gap(None, 7);
        service.note_gap(Some(8), 8);
        assert!(service.tree.backlog(&Query::all()).is_empty());
        service.note_gap(Some(9), 12);
        let entries = service.tree.backlog(&Query::all());
        assert!(entries[0].body.to_string().starts_with("3 messages"));
    }

    #[test]
    fn a_run_after_one_that_died_files_no_message_twice_and_reports_what_it_missed() {
        let first = Service { tree: Tree::new(None) };
        let record = |sequence: u64| Record {
            level: 6,
            facility: 0,
            sequence,
            time: Duration::from_secs(sequence),
            text: format!("message {sequence}"),
        };
        // The kernel has overwritten those before.
        (3..6).for_each(|sequence| first.take(record(sequence)));
        let second = first.clone();
        // It reads from the start again, and two are gone by then.
        [3, 4, 5, 8].into_iter().for_each(|sequence| second.take(record(sequence)));
        let entries = first.tree.backlog(&Query::all());
        let texts: Vec<String> = entries.iter().map(|entry| entry.body.to_string()).collect();
        let lost = "2 messages of the kernel were lost: it wrote too fast";
        assert_eq!(texts, ["message 3", "message 4", "message 5", lost, "message 8"]);
    }

    #[test]
    fn what_the_kernel_calls_an_error_is_one_and_its_routine_is_for_debugging() {
        assert_eq!(
            [0, 3, 4, 5, 6, 7].map(|level| severity(level).letter()),
            ['F', 'E', 'W', 'I', 'D', 'D']
        );
    }
}
