//! Keeps the newest entries of the log tree in the form that the console shows.

use std::sync::Arc;

use polis_tui::snapshot::{LogEntry, Logs, Severity};

use crate::logtree::{Backlog, Entry, Item, Kinds, Query, Reader, Tree};
use crate::serial;

/// Entries that the console can scroll through. A snapshot carries them all.
const SHOWN_MAX: usize = 500;
/// New entries between two snapshots from which on a person only sees that there
/// are many.
const FLOOD: usize = 100;
/// Entries taken in before something else may run.
const BATCH_MAX: usize = 2048;

/// The newest entries.
#[derive(Debug)]
pub(super) struct Window {
    reader: Reader,
    logs: Arc<Logs>,
    /// How many came at once, the last time.
    batch: usize,
}

impl Window {
    /// Begins with the newest of what is there.
    pub(super) fn new(tree: &Tree) -> Self {
        let reader = tree.read(Query {
            kinds: Kinds::All,
            backlog: Backlog::Last(SHOWN_MAX),
            ..Query::all()
        });
        Self { reader, logs: Arc::default(), batch: 0 }
    }

    pub(super) fn shown(&self) -> &Arc<Logs> {
        &self.logs
    }

    /// Whether more comes than anybody reads.
    pub(super) fn is_flooded(&self) -> bool {
        self.batch >= FLOOD
    }

    /// Takes in what is there already.
    pub(super) fn catch_up(&mut self) {
        self.batch = 0;
        while self.batch < BATCH_MAX {
            let Some(item) = self.reader.try_next() else { break };
            self.batch += 1;
            self.take(item);
        }
        let surplus = self.logs.entries.len().saturating_sub(SHOWN_MAX);
        if surplus > 0 {
            Arc::make_mut(&mut self.logs).entries.drain(..surplus);
        }
    }

    /// Waits for something new, and takes it in. Cancel-safe.
    pub(super) async fn wait(&mut self) {
        match self.reader.next().await {
            Some(item) => self.take(item),
            None => std::future::pending().await,
        }
    }

    fn take(&mut self, item: Item) {
        let logs = Arc::make_mut(&mut self.logs);
        match item {
            Item::Lost(count) => logs.dropped += count,
            Item::Entry(entry) => {
                logs.total = entry.number + 1;
                logs.entries.push(Arc::new(shown(&entry)));
            }
        }
    }
}

fn shown(entry: &Entry) -> LogEntry {
    LogEntry {
        number: entry.number,
        time: entry.at,
        severity: match entry.body.severity() {
            serial::Severity::Debug => Severity::Debug,
            serial::Severity::Info => Severity::Info,
            serial::Severity::Warning => Severity::Warning,
            serial::Severity::Error => Severity::Error,
            serial::Severity::Fatal => Severity::Fatal,
        },
        name: entry.name.to_string(),
        text: entry.body.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logtree::{Body, Origin};

    #[test]
    fn only_the_newest_are_kept_and_all_are_counted() {
        let tree = Tree::new(None);
        let mut window = Window::new(&tree);
        for turn in 0..3 {
            for number in 0..400 {
                let text = format!("{turn} {number}");
                tree.append("root.a", Origin::Service, Body::Raw(text));
            }
            window.catch_up();
        }
        let logs = window.shown();
        assert_eq!((logs.entries.len(), logs.total, logs.dropped), (SHOWN_MAX, 1200, 0));
        assert_eq!(logs.entries.last().unwrap().text, "2 399");
    }
}
