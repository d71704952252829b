//! Keeps the newest entries of the log tree in the form that the console shows.

use polis_tui::snapshot::{LogEntry, Logs, Severity};

use crate::logtree::{Backlog, Entry, Item, Kinds, Query, Reader, Tree};
use crate::serial;

/// Entries that the console can scroll through. A snapshot carries them all.
const SHOWN_MAX: usize = 500;
/// Entries taken in before something else may run.
const BATCH_MAX: usize = 2048;

/// The newest entries.
#[derive(Debug)]
pub(super) struct Window {
    reader: Reader,
    logs: Logs,
}

impl Window {
    /// Begins with the newest of what is there.
    pub(super) fn new(tree: &Tree) -> Self {
        let reader = tree.read(Query {
            kinds: Kinds::All,
            backlog: Backlog::Last(SHOWN_MAX),
            ..Query::all()
        });
        Self { reader, logs: Logs::default() }
    }

    pub(super) fn shown(&self) -> &Logs {
        &self.logs
    }

    /// Takes in what is there already.
    pub(super) fn catch_up(&mut self) {
        for _ in 0..BATCH_MAX {
            let Some(item) = self.reader.try_next() else { break };
            self.take(item);
        }
        let surplus = self.logs.entries.len().saturating_sub(SHOWN_MAX);
        self.logs.entries.drain(..surplus);
    }

    /// Waits for something new, and takes it in. Cancel-safe.
    pub(super) async fn wait(&mut self) {
        match self.reader.next().await {
            Some(item) => self.take(item),
            None => std::future::pending().await,
        }
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Lost(count) => self.logs.dropped += count,
            Item::Entry(entry) => {
                self.logs.total = entry.number + 1;
                self.logs.entries.push(shown(&entry));
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
