//! The kernel's messages, copied into the log tree under the name `kernel`.

use std::io;

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

/// Copies from the first message of this boot on.
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
        let mut expected = None;
        ctx.healthy();
        loop {
            let Some(ready) = ctx.until_cancelled(watched.readable()).await else { return Ok(()) };
            let mut ready = ready.map_err(Error::Read)?;
            for _ in 0..BATCH {
                let Some(record) = log.next_record().map_err(Error::Read)? else {
                    ready.clear_ready();
                    break;
                };
                self.note_gap(expected, record.sequence);
                expected = Some(record.sequence + 1);
                self.put(record);
            }
            // The first batch holds the whole boot: let other tasks run in between.
            tokio::task::yield_now().await;
        }
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
    fn what_the_kernel_calls_an_error_is_one_and_its_routine_is_for_debugging() {
        assert_eq!(
            [0, 3, 4, 5, 6, 7].map(|level| severity(level).letter()),
            ['F', 'E', 'W', 'I', 'D', 'D']
        );
    }
}
