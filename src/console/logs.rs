//! Keeps the newest entries of the log tree in the form that the console shows.
//!
//! ```text
//! tree --stream--> window: the newest 500 --what was wrong--> the 200 before them
//!   \--read anew, where the stream was too fast----^----------------^
//! ```
//!
//! Invariants:
//! - The newest entries of the tree are shown, however many come at once.
//! - What is wrong is not driven out by what is not.

use std::sync::Arc;

use polis_tui::snapshot::{LogEntry, Logs, Severity};

use crate::logtree::{Backlog, Entry, Item, Kinds, Query, Reader, Tree};
use crate::serial;

/// Entries that the console can scroll through. A snapshot carries them all.
const SHOWN_MAX: usize = 500;
/// Entries that say what is wrong, and are kept beyond those.
const WRONG_MAX: usize = 200;
/// New entries between two snapshots from which on a person only sees that there
/// are many.
const FLOOD: usize = 100;
/// Entries taken in before something else may run.
const BATCH_MAX: usize = 2048;

/// The newest entries.
#[derive(Debug)]
pub(super) struct Window {
    tree: Tree,
    reader: Reader,
    logs: Arc<Logs>,
    /// How many of the entries are older than the newest: what is wrong in them.
    wrong: usize,
    /// Whether the stream was too fast: the tree has what is missing.
    missed: bool,
    /// How many came at once, the last time.
    batch: usize,
}

impl Window {
    /// Begins with the newest of what is there.
    pub(super) fn new(tree: &Tree) -> Self {
        let reader = tree.read(Query { backlog: Backlog::None, ..Query::all() });
        let (tree, logs) = (tree.clone(), Arc::default());
        // What was written before the reader came is read from the tree.
        Self { tree, reader, logs, wrong: 0, missed: true, batch: 0 }
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
        if std::mem::take(&mut self.missed) {
            self.read_anew();
        }
        self.trim();
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
            Item::Lost(_) => self.missed = true,
            // The stream is behind what was read from the tree meanwhile.
            Item::Entry(entry) if entry.number < self.logs.total => {}
            Item::Entry(entry) => {
                let logs = Arc::make_mut(&mut self.logs);
                logs.total = entry.number + 1;
                logs.entries.push(Arc::new(shown(&entry)));
            }
        }
    }

    /// Takes the newest from the tree, and leaves what is known as it is.
    fn read_anew(&mut self) {
        let newest = Query { kinds: Kinds::All, backlog: Backlog::Last(SHOWN_MAX), ..Query::all() };
        let newest = self.tree.backlog(&newest);
        let (Some(first), Some(last)) = (newest.first(), newest.last()) else { return };
        let (first, total) = (first.number, last.number + 1);
        let wrong = self.tree.backlog(&Query {
            severity_min: serial::Severity::Warning,
            // As many of them may be among the newest.
            backlog: Backlog::Last(WRONG_MAX + SHOWN_MAX),
            ..Query::all()
        });
        let older = wrong.iter().filter(|entry| entry.number < first);
        let known = &self.logs.entries;
        let entry = |entry: &Arc<Entry>| match known
            .binary_search_by_key(&entry.number, |known| known.number)
        {
            Ok(at) => Arc::clone(&known[at]),
            Err(_unknown) => Arc::new(shown(entry)),
        };
        let entries: Vec<_> = older.chain(&newest).map(entry).collect();
        self.wrong = entries.len() - newest.len();
        self.logs = Arc::new(Logs { entries, total });
    }

    /// Lets go of the oldest, those that say what is wrong last.
    fn trim(&mut self) {
        let Self { logs, wrong, .. } = self;
        let surplus = logs.entries.len().saturating_sub(*wrong + SHOWN_MAX);
        if surplus == 0 && *wrong <= WRONG_MAX {
            return;
        }
        let entries = &mut Arc::make_mut(logs).entries;
        let newest = entries.split_off(*wrong + surplus);
        let mut number = 0..;
        entries.retain(|entry| number.next() < Some(*wrong) || entry.severity >= Severity::Warning);
        entries.drain(..entries.len().saturating_sub(WRONG_MAX));
        *wrong = entries.len();
        entries.extend(newest);
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

    fn say(tree: &Tree, name: &str, severity: serial::Severity, text: &str) {
        let body = Body::Levelled(crate::logtree::Levelled::new(severity, text));
        tree.append(name, Origin::Service, body);
    }

    fn chatter(tree: &Tree, lines: usize) {
        for number in 0..lines {
            say(tree, "root.chatty", serial::Severity::Info, &format!("line {number}"));
        }
    }

    fn texts(window: &Window) -> Vec<&str> {
        window.shown().entries.iter().map(|entry| &*entry.text).collect()
    }

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
        assert_eq!((logs.entries.len(), logs.total), (SHOWN_MAX, 1200));
        assert_eq!(logs.entries.last().unwrap().text, "2 399");
    }

    #[test]
    fn a_flood_hides_neither_the_error_in_its_middle_nor_the_one_at_its_end() {
        let tree = Tree::new(None);
        let mut window = Window::new(&tree);
        window.catch_up();
        chatter(&tree, 3000);
        say(&tree, "root.other", serial::Severity::Error, "in the middle");
        chatter(&tree, 3000);
        say(&tree, "root.other", serial::Severity::Error, "at the end");
        window.catch_up();
        let texts = texts(&window);
        assert_eq!(texts.first(), Some(&"in the middle"));
        assert_eq!(texts[texts.len() - 2..], ["line 2999", "at the end"]);
        assert_eq!((texts.len(), window.shown().total), (SHOWN_MAX + 1, 6002));
    }

    #[test]
    fn what_is_wrong_outlives_what_is_said_after_it_and_has_a_bound_too() {
        let tree = Tree::new(None);
        let mut window = Window::new(&tree);
        for number in 0..300 {
            say(&tree, "root.other", serial::Severity::Warning, &format!("wrong {number}"));
            chatter(&tree, 10);
            window.catch_up();
        }
        chatter(&tree, 400);
        window.catch_up();
        let texts = texts(&window);
        let wrong: Vec<_> = texts.iter().filter(|text| text.starts_with("wrong")).collect();
        let chatter = texts.len() - wrong.len();
        // The newest 500 are 400 lines, and nine of ten of the hundred before.
        assert_eq!(texts.len(), SHOWN_MAX + WRONG_MAX);
        assert!(chatter >= 490 && wrong.len() >= WRONG_MAX, "{chatter}, {}", wrong.len());
        assert_eq!(**wrong.last().unwrap(), "wrong 299");
        let numbers: Vec<_> = window.shown().entries.iter().map(|it| it.number).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    }

    #[test]
    fn an_entry_is_shown_once_whether_it_was_read_or_streamed() {
        let tree = Tree::new(None);
        chatter(&tree, 20);
        let mut window = Window::new(&tree);
        chatter(&tree, 2000);
        // Lost, with some of those that were not lost still in the stream.
        window.catch_up();
        chatter(&tree, 5);
        window.catch_up();
        let numbers: Vec<_> = window.shown().entries.iter().map(|it| it.number).collect();
        assert_eq!(numbers, (2025 - SHOWN_MAX as u64..2025).collect::<Vec<_>>());
    }
}
