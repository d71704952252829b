//! The log tree's newest entries.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// The newest entries of the log tree, the oldest of them first; before them earlier
/// warnings and errors, so numbers may have gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Logs {
    /// The entries that are left; shared by the logs of one snapshot and the next.
    pub entries: Vec<Arc<LogEntry>>,
    /// How many there ever were, so that a paused page can say how many are new.
    pub total: u64,
    /// The day of this snapshot, as entries have theirs; empty while it is unknown.
    pub today: String,
}

impl Logs {
    /// Puts the entries `seen` before in front of the new ones; the newest `max` stay.
    /// Where the new snapshot dates an entry by another clock, it holds all entries
    /// dated by that clock, and the seen entries are dropped: no page mixes the times
    /// of two clocks.
    pub fn put_before(&mut self, seen: &Self, max: usize) {
        if !self.is_dated_unlike(seen) {
            self.entries.extend(seen.entries.iter().cloned());
        }
        // Where nothing is there twice, they are in order already.
        self.entries.sort_by_key(|entry| entry.number);
        self.entries.dedup_by_key(|entry| entry.number);
        let surplus = self.entries.len().saturating_sub(max);
        self.entries.drain(..surplus);
    }

    /// Whether the newest entry that both have carries another time of day.
    #[must_use]
    pub fn is_dated_unlike(&self, other: &Self) -> bool {
        let mut alike = self.entries.iter().rev().filter_map(|one| {
            let at = other.entries.binary_search_by_key(&one.number, |two| two.number).ok()?;
            let two = &other.entries[at];
            Some((&one.day, &one.clock) == (&two.day, &two.clock))
        });
        alike.next() == Some(false)
    }
}

/// An entry of the log tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogEntry {
    /// Its place in the log tree; each entry has a greater one than those before.
    pub number: u64,
    /// When, after the kernel started.
    #[serde(with = "time")]
    pub time: Duration,
    /// The day of the entry, ready to print; empty while that is unknown, or not needed
    /// yet.
    pub day: String,
    /// The time of that day, ready to print.
    pub clock: String,
    /// How much it matters.
    pub severity: Severity,
    /// The dotted name of the writer.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// How much a log entry matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// For a person who looks for a bug.
    #[default]
    Debug,
    /// The ordinary course of things.
    Info,
    /// Went on without it.
    Warning,
    /// Someone should look.
    Error,
    /// The writer ended because of it.
    Fatal,
}

impl Severity {
    /// The letter on the serial line.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::Debug => 'D',
            Self::Info => 'I',
            Self::Warning => 'W',
            Self::Error => 'E',
            Self::Fatal => 'F',
        }
    }
}
