//! The newest entries of the log tree, in the form that the console shows.
//!
//! ```text
//! tree --stream--> window: the newest 500 --what was wrong--> the 200 before them
//!   \--read anew, where the stream was too fast----^----------------^
//! ```
//!
//! Invariants:
//! - The newest entries of the tree are shown, however many come at once.
//! - Ordinary entries do not displace warnings and errors.
//! - The lines of the audit log are not shown: a screen has readers who may not read that log.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use polis_tui::snapshot::{LogEntry, Logs, Severity};

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::fold;
use polis_base::serial;
use polis_control::curator::audit;
use polis_runtime::logtree::{Backlog, Entry, Item, Query, Reader, Tree};

/// Entries that the console can scroll through. A snapshot carries them all.
const SHOWN_MAX: usize = 500;
/// Warnings and errors that are kept beyond those.
const WRONG_MAX: usize = 200;
/// New entries between two snapshots from which on a person only sees that there
/// are many.
const FLOOD: usize = 100;
/// The time of day of an entry.
const TIME: &[BorrowedFormatItem<'_>] = format_description!("[hour]:[minute]:[second]");
/// From so much on, another wall clock changes the dates of all entries.
const STEP: Duration = Duration::from_secs(1);
/// Entries taken in before something else may run.
const BATCH_MAX: usize = 2048;

/// The newest entries.
#[derive(Debug)]
pub(super) struct Window {
    tree: Tree,
    reader: Reader,
    logs: Arc<Logs>,
    /// How many of the entries are older than the newest: the warnings and errors among
    /// them.
    wrong: usize,
    /// Whether the stream was too fast: the tree has what is missing.
    missed: bool,
    /// When the kernel started by the wall clock, once entries show the time of day.
    started: Option<SystemTime>,
    /// The day of the newest snapshot, in days since 1970.
    today: Option<u64>,
    /// How many came at once, the last time.
    batch: usize,
}

impl Window {
    /// Begins with the newest of the existing entries.
    pub(super) fn new(tree: &Tree) -> Self {
        let reader = tree.read(Query { backlog: Backlog::None, ..Query::all() });
        let (tree, logs) = (tree.clone(), Arc::default());
        // The reader takes the entries from before its start from the tree.
        Self { tree, reader, logs, wrong: 0, missed: true, started: None, today: None, batch: 0 }
    }

    pub(super) fn shown(&self) -> &Arc<Logs> {
        &self.logs
    }

    /// Whether entries come faster than anybody reads.
    pub(super) fn is_flooded(&self) -> bool {
        self.batch >= FLOOD
    }

    /// The kernel started at `started` by the wall clock; `None` as long as the
    /// seconds since then say more.
    pub(super) fn date(&mut self, started: Option<SystemTime>, uptime: Duration) {
        let differs = match (self.started, started) {
            (Some(old), Some(new)) => {
                let [forth, back] = [new.duration_since(old), old.duration_since(new)];
                forth.or(back).is_ok_and(|step| step >= STEP)
            }
            (old, new) => old.is_some() != new.is_some(),
        };
        if differs {
            self.started = started;
            let entries = &mut Arc::make_mut(&mut self.logs).entries;
            entries.iter_mut().for_each(|entry| stamp(Arc::make_mut(entry), started));
        }
        let now = self.started.and_then(|started| started.checked_add(uptime));
        let since = now.and_then(|now| now.duration_since(SystemTime::UNIX_EPOCH).ok());
        let today = since.map(|since| since.as_secs() / 86_400);
        if self.today != today {
            self.today = today;
            let text = now.map(|now| fold::printed(now, fold::DAY)).unwrap_or_default();
            Arc::make_mut(&mut self.logs).today = text;
        }
    }

    /// Adds the existing entries.
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
            // The stream is behind the entries that were read from the tree meanwhile.
            Item::Entry(entry) if entry.number < self.logs.total => {}
            Item::Entry(entry) if audit::is_line(&entry) => {}
            Item::Entry(entry) => {
                let logs = Arc::make_mut(&mut self.logs);
                logs.total = entry.number + 1;
                logs.entries.push(Arc::new(shown(&entry, self.started)));
            }
        }
    }

    /// The newest `count` that a screen may show. Where lines of the audit log are among the newest
    /// of the tree, older entries come in place of them.
    fn newest(&self, count: usize, severity_min: serial::Severity) -> Vec<Arc<Entry>> {
        let mut wanted = count;
        loop {
            let backlog = Backlog::Last(wanted);
            let mut found = self.tree.backlog(&Query { severity_min, backlog, ..Query::all() });
            let is_all = found.len() < wanted;
            found.retain(|entry| !audit::is_line(entry));
            if is_all || found.len() >= count {
                return found.split_off(found.len().saturating_sub(count));
            }
            wanted *= 2;
        }
    }

    /// Takes the newest from the tree, and leaves the known entries as they are.
    fn read_anew(&mut self) {
        let newest = self.newest(SHOWN_MAX, serial::Severity::Debug);
        let (Some(first), Some(last)) = (newest.first(), newest.last()) else { return };
        let (first, total) = (first.number, last.number + 1);
        // As many of them may be among the newest.
        let wrong = self.newest(WRONG_MAX + SHOWN_MAX, serial::Severity::Warning);
        let older = wrong.iter().filter(|entry| entry.number < first);
        let known = &self.logs.entries;
        let entry = |entry: &Arc<Entry>| match known
            .binary_search_by_key(&entry.number, |known| known.number)
        {
            Ok(at) => Arc::clone(&known[at]),
            Err(_unknown) => Arc::new(shown(entry, self.started)),
        };
        let entries: Vec<_> = older.chain(&newest).map(entry).collect();
        self.wrong = entries.len() - newest.len();
        let today = self.logs.today.clone();
        self.logs = Arc::new(Logs { entries, total, today });
    }

    /// Drops the oldest, warnings and errors last.
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

/// Stores the time of the entry by a wall clock that began with the kernel.
fn stamp(entry: &mut LogEntry, started: Option<SystemTime>) {
    let at = started.and_then(|started| started.checked_add(entry.time));
    let print = |format| at.map(|at| fold::printed(at, format)).unwrap_or_default();
    (entry.day, entry.clock) = (print(fold::DAY), print(TIME));
}

fn shown(entry: &Entry, started: Option<SystemTime>) -> LogEntry {
    let mut shown = LogEntry {
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
        ..LogEntry::default()
    };
    stamp(&mut shown, started);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use polis_runtime::logtree::{Body, Origin};

    fn say(tree: &Tree, name: &str, severity: serial::Severity, text: &str) {
        let body = Body::Levelled(polis_runtime::logtree::Levelled::new(severity, text));
        tree.append(name, Origin::Service, body);
    }

    fn chatter(tree: &Tree, lines: usize) {
        for number in 0..lines {
            say(tree, "root.chatty", serial::Severity::Info, &format!("line {number}"));
        }
    }

    /// A line of the audit log.
    fn audited(tree: &Tree, severity: serial::Severity) {
        let levelled = polis_runtime::logtree::Levelled::new(severity, "audit: DeleteNode");
        let source = audit::LINES.to_owned();
        let body = Body::Levelled(polis_runtime::logtree::Levelled { source, ..levelled });
        tree.append("root.curator", Origin::Service, body);
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
    fn errors_outlive_later_lines_and_are_bounded_too() {
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
    fn entries_get_the_time_of_day_once_that_is_wanted_and_again_after_the_clock_was_set() {
        let tree = Tree::new(None);
        let message = |at| {
            let body = Body::Raw("a line".to_owned());
            tree.append_at(Duration::from_secs(at), "root", Origin::Service, body);
        };
        let mut window = Window::new(&tree);
        let stamps = |window: &Window| -> Vec<String> {
            let entries = &window.shown().entries;
            entries.iter().map(|it| format!("{} {}", it.day, it.clock)).collect()
        };
        let day = SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 - 10);
        message(5);
        window.date(None, Duration::from_secs(6));
        window.catch_up();
        assert_eq!(stamps(&window), [" "]);
        window.date(Some(day), Duration::from_secs(9));
        message(12);
        window.catch_up();
        assert_eq!(stamps(&window), ["1970-01-01 23:59:55", "1970-01-02 00:00:02"]);
        assert_eq!(window.shown().today, "1970-01-01");
        let before = Arc::clone(window.shown());
        window.date(Some(day + STEP / 2), Duration::from_secs(9));
        assert!(Arc::ptr_eq(&before, window.shown()), "nothing is recomputed at rest");
        window.date(Some(day), Duration::from_secs(13));
        assert_eq!(window.shown().today, "1970-01-02");
        window.date(Some(day + Duration::from_secs(3600)), Duration::from_secs(13));
        assert_eq!(stamps(&window), ["1970-01-02 00:59:55", "1970-01-02 01:00:02"]);
    }

    #[test]
    fn the_lines_of_the_audit_log_are_not_shown() {
        let tree = Tree::new(None);
        let both = |severity| {
            audited(&tree, severity);
            say(&tree, "root.curator", severity, "it leads");
        };
        both(serial::Severity::Warning);
        chatter(&tree, SHOWN_MAX);
        both(serial::Severity::Info);
        // Those from before are read, and those from now on streamed.
        let mut window = Window::new(&tree);
        window.catch_up();
        both(serial::Severity::Info);
        window.catch_up();
        let texts = texts(&window);
        assert_eq!(texts.iter().filter(|text| **text == "it leads").count(), 3, "{texts:?}");
        assert!(!texts.iter().any(|text| text.starts_with("audit")), "{texts:?}");
    }

    #[test]
    fn the_lines_of_the_audit_log_take_the_place_of_no_others() {
        let tree = Tree::new(None);
        for _ in 0..=WRONG_MAX {
            say(&tree, "root.other", serial::Severity::Warning, "wrong");
        }
        chatter(&tree, SHOWN_MAX);
        for _ in 0..3 * SHOWN_MAX {
            audited(&tree, serial::Severity::Warning);
        }
        let mut window = Window::new(&tree);
        window.catch_up();
        let texts = texts(&window);
        assert_eq!(texts.len(), WRONG_MAX + SHOWN_MAX);
        assert!(texts[..WRONG_MAX].iter().all(|text| *text == "wrong"), "{texts:?}");
        assert_eq!(texts.last(), Some(&"line 499"));
        // Nothing but lines of that log.
        let tree = Tree::new(None);
        (0..3 * SHOWN_MAX).for_each(|_| audited(&tree, serial::Severity::Info));
        let mut window = Window::new(&tree);
        window.catch_up();
        assert!(window.shown().entries.is_empty());
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
