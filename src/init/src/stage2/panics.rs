//! Counts the panics of the kernel before this boot as failed boots.
//!
//! What this module does not do: read the records of firmware (`last_words`), or know the files of
//! the count (`attempts`).

use std::path::Path;

use polis_base::files;
use polis_base::serial::Severity;
use polis_base::sys::clock;
use polis_base::trapdoor::{Report, code};

use super::super::attempts::Store;
use super::super::deadline;
use super::super::last_words::{self, LastWords};
use super::super::machine::{Identity, Machine};
use super::super::mounts;
use super::super::record;
use super::on_esp;

/// Counts a panic of the kernel since the last boot, if firmware has a record of one. Returns a
/// report where the machine must not go on by itself: it has been started again as often as it
/// may, or the panic cannot be counted.
pub(super) fn count(machine: &mut Machine) -> Option<Report> {
    // Only a driver for the records is read from a disk.
    let words = deadline::within(machine, deadline::SYSTEM, || {
        last_words::take(Path::new(mounts::VARIABLES))
    });
    let words = words.unwrap_or_else(|error| {
        let text = format!("cannot read the kernel's last words: {error}");
        machine.port.log(Severity::Error, &text);
        LastWords::default()
    });
    for fault in &words.faults {
        machine.port.log(Severity::Warning, &format!("of the kernel's last words, {fault}"));
    }
    if !words.panicked {
        return None;
    }
    let causes = vec!["the kernel panicked".to_owned(), words.cause];
    let report = Report::new(code::KERNEL_PANICKED, causes);
    machine.port.log(Severity::Error, &report.cause());
    for line in &words.lines {
        machine.port.log(Severity::Info, &format!("last words: {line}"));
    }
    // The guru meditation says why it cannot.
    let Some(store) = machine.attempts.clone() else { return Some(report) };
    let (identity, counted) = (machine.identity.clone(), report.clone());
    let lines = words.lines;
    let panic = move || count_one(&identity, &store, &counted, &lines);
    match on_esp(machine, panic) {
        Ok(Some(last)) => machine.previous = Some(last),
        Ok(None) => return Some(report),
        Err(error) => {
            let text = format!("cannot count a panic of the kernel: {error}");
            machine.port.log(Severity::Error, &text);
            return Some(report);
        }
    }
    None
}

/// Counts one panic, and keeps its report; returns its summary. `None`: the machine has been
/// started again as often as it may.
fn count_one(
    identity: &Identity,
    store: &Store,
    report: &Report,
    words: &[String],
) -> Result<Option<String>, files::Error> {
    let ledger = store.load()?;
    let Some(counted) = ledger.rebooting() else { return Ok(None) };
    let summary = format!("{} {}", report.code, report.cause());
    let text = record::text(report, identity, ledger.sequence, clock::uptime(), words);
    // A report that cannot be written does not stop the count.
    let (ledger, _written) = store.remember(&counted, &summary, &text)?;
    Ok(Some(ledger.last.unwrap_or(summary)))
}
