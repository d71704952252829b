//! The Logs page: what was logged? Follows the newest entries until a person scrolls up.
//!
//! [`content`] is the page; [`block`] is the part of the log that other pages show below
//! their own content.
//!
//! Invariants:
//! - The page marks where entries that it does not keep were, so that two entries that stand
//!   together were logged together, as far as the filter shows them.
//! - While the page follows, it lays out only the lines that are on the screen: a flood of
//!   entries costs no more than a full page.
//! - Every text is cleaned before it is measured, searched or drawn: others wrote it.

use std::sync::Arc;

use ratatui::style::Style;
use ratatui::text::Line;

use super::Content;
use super::filter::{Filter, letters, position};
use crate::snapshot::{LogEntry, Logs, Severity};
use crate::text::{clean, cut, plural, width as cells, wrap_within};
use crate::theme::{ATTENTION, BAD, BUSY, DIM, FOUND, Mark, PLAIN};
use crate::widgets::Row;
use crate::widgets::block::{blank, titled};
use crate::widgets::headline::headline;

/// Where the text of an entry goes on in its second line: below the name.
const INDENT: usize = 12;

/// With `rows`, only so many of the last lines: those on the screen of a view that follows.
pub(crate) fn content(
    logs: &Logs,
    paused: Option<&Logs>,
    filter: &Filter,
    width: usize,
    rows: Option<usize>,
) -> Content {
    let shown = paused.unwrap_or(logs);
    let what = filter.words();
    let (mark, text) = match paused {
        None => (Mark::Busy, format!("Following: {what}.")),
        Some(paused) => {
            let newer = logs.total.saturating_sub(paused.total);
            let entries = logs.entries.iter().filter(|entry| entry.number >= paused.total);
            let here = entries.filter(|entry| filter.lets_through(entry)).count() as u64;
            let here = match here {
                some if some == newer => String::new(),
                some => format!(", {} of them here", crate::text::count(some)),
            };
            let newer = plural(newer, "newer line");
            (Mark::Attention, format!("Paused: {what}; {newer}{here}. End follows again."))
        }
    };
    let mut head = headline(mark, &text, width);
    head.push(blank());
    let mut body = Vec::new();
    let mut days = Vec::new();
    let mut above = 0;
    let mut day = None;
    let mut missing = 0;
    let mut newest = shown.entries.iter().enumerate().rev();
    while let Some((at, entry)) = newest.next() {
        if filter.lets_through(entry) {
            // Upwards, the gap stands between this entry and the one below.
            if !body.is_empty() && missing > 0 {
                body.push(gap(missing));
            }
            missing = 0;
            // Upwards, a day begins where an entry of another comes.
            if let Some(day) = day.replace(&entry.day).filter(|day| **day != entry.day) {
                body.push(rule(day, width));
                days.push((body.len(), rule(day, width)));
            }
            let lines = lines(entry, &filter.text, None, width, usize::MAX);
            body.extend(lines.into_iter().rev());
        }
        missing += missing_before(&shown.entries[..at], entry, filter);
        if rows.is_some_and(|rows| body.len() >= rows) {
            // Most entries have one line, and a scroll bar is not exact.
            above = newest.by_ref().filter(|(_, entry)| filter.lets_through(entry)).count();
        }
    }
    body.reverse();
    for (first, _) in &mut days {
        *first = body.len() - *first;
    }
    days.extend(day.map(|day| (0, rule(day, width))));
    days.reverse();
    if body.is_empty() {
        let nothing = if shown.entries.is_empty() {
            "No entries yet."
        } else {
            "No match among the newest entries. Esc shows all again."
        };
        body.push(Row::indented(2).put(DIM, nothing).line());
    }
    Content { head, body, above, days, focus: None }
}

/// The head of the entries of a day.
fn rule(day: &str, width: usize) -> Line<'static> {
    if day.is_empty() {
        return blank();
    }
    titled(Row::default().put(DIM, &format!("── {}", clean(day))), width)
}

/// The part of the log that a page about something else shows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of<'a> {
    /// All entries worth showing; of the kernel, warnings and errors.
    All,
    /// The same of those with one of these names, and of all below them.
    Below(&'a [&'a str]),
    /// Warnings and errors, of every source.
    Wrong,
}

impl Of<'_> {
    fn lets_through(self, entry: &LogEntry) -> bool {
        let below = |name: &str| {
            let rest = entry.name.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        match self {
            _ if entry.severity >= Severity::Warning && !matches!(self, Self::Below(_)) => true,
            Self::Wrong => false,
            Self::All => entry.severity >= Severity::Info && !TALKATIVE.contains(&&*entry.name),
            Self::Below(names) => {
                entry.severity >= Severity::Info && names.iter().any(|name| below(name))
            }
        }
    }
}

/// The sources that log every step of their own: a kernel lists its hardware, and etcd the
/// votes of its elections. The node logs the result in a line.
const TALKATIVE: [&str; 2] = ["kernel", "root.consensus.etcd"];

/// Fewer lines of the log say nothing.
const ROWS_MIN: usize = 3;

/// Rows of an entry in a block, so that one line of kilobytes takes the place of no others. The
/// Logs page has all of it.
const ENTRY_ROWS: usize = 3;

/// A block with the newest entries `of` the log below `title`, as many as fit into `rows`;
/// nothing where there are few rows, or no entries.
pub(crate) fn block(
    logs: &Logs,
    title: Row,
    of: Of<'_>,
    width: usize,
    rows: usize,
) -> Vec<Line<'static>> {
    let Some(rows) = rows.checked_sub(1).filter(|rows| *rows >= ROWS_MIN) else {
        return Vec::new();
    };
    let newest = newest(logs, of, width, rows);
    if newest.is_empty() {
        return newest;
    }
    let mut lines = vec![titled(title, width)];
    lines.extend(newest);
    lines
}

/// The newest entries `of` the log, as many as fit into `rows`.
fn newest(logs: &Logs, of: Of<'_>, width: usize, rows: usize) -> Vec<Line<'static>> {
    let mut newest = Vec::new();
    for entry in logs.entries.iter().rev().filter(|entry| of.lets_through(entry)) {
        let lines = lines(entry, "", Some(&logs.today), width, ENTRY_ROWS);
        if newest.len() + lines.len() > rows {
            break;
        }
        newest.extend(lines.into_iter().rev());
    }
    newest.reverse();
    newest
}

/// The number of entries between `entry` and those `before` it that have been dropped by
/// now, or are of the audit log. No gap is marked where only warnings and errors are shown.
fn missing_before(before: &[Arc<LogEntry>], entry: &LogEntry, filter: &Filter) -> u64 {
    match before.last() {
        Some(last) if filter.severity < Severity::Warning => {
            entry.number.saturating_sub(last.number.saturating_add(1))
        }
        _ => 0,
    }
}

/// A note about the `missing` entries between two entries on the screen.
fn gap(missing: u64) -> Line<'static> {
    let text = format!("·· {} not kept on this page", plural(missing, "line"));
    Row::indented(INDENT).put(DIM, &text).line()
}

/// An entry in at most `rows`. Where no rule shows the day, an entry of another day than `today`
/// has the day.
fn lines(
    entry: &LogEntry,
    found: &str,
    today: Option<&str>,
    width: usize,
    rows: usize,
) -> Vec<Line<'static>> {
    let (letter, text) = styles(entry.severity);
    let name = format!("{}: ", clean(&entry.name));
    // The name is a part of the first line's text, so that it wraps with it.
    let message = clean(&entry.text);
    let whole = format!("{name}{message}");
    let wrapped = wrap_within(&whole, width.saturating_sub(INDENT), rows);
    let mut marks = marks(&name, &message, found);
    let mut named = cells(name.trim_end());
    let row = |(at, line): (usize, String)| {
        let row = Row::default();
        let row = if at == 0 {
            let severity = String::from(entry.severity.letter());
            row.right(INDENT - 3, DIM, &stamp(entry, today)).gap(1).cell(2, letter, &severity)
        } else {
            row.gap(INDENT)
        };
        let split = line.char_indices().nth(named).map_or(line.len(), |(at, _)| at);
        named = named.saturating_sub(cells(&line));
        let (name, message) = line.split_at(split);
        let marks = marks.take(&line);
        let (in_name, in_text) = marks.split_at(marks.len().min(cells(name)));
        marked(marked(row, BUSY, name, in_name), text, message, in_text).line()
    };
    wrapped.into_iter().enumerate().map(row).collect()
}

/// The marked parts of an entry: found before it is wrapped, so that a line's end in the
/// middle of one hides nothing.
struct Marks(std::vec::IntoIter<(char, bool)>);

impl Marks {
    /// Those of the next `line`: a line begins with no space, since it ended the one before.
    fn take(&mut self, line: &str) -> Vec<bool> {
        let mut marks = Vec::new();
        for c in line.chars() {
            let mut rest = self.0.by_ref().skip_while(|(of, _)| marks.is_empty() && *of != c);
            marks.extend(rest.next().map(|(_, mark)| mark));
        }
        marks
    }
}

fn marks(name: &str, message: &str, found: &str) -> Marks {
    let found = letters(found);
    let mut marks = Vec::new();
    // As the filter looks for it: in one or in the other.
    for text in [name, message].into_iter().filter(|_| !found.is_empty()) {
        let letters = letters(text);
        let mut held = vec![false; letters.len()];
        let mut from = 0;
        while let Some(at) = position(&letters[from..], &found) {
            held[from + at..][..found.len()].fill(true);
            from += at + found.len();
        }
        marks.extend(text.chars().zip(held));
    }
    Marks(marks.into_iter())
}

/// Adds `text`, and highlights its marked parts.
fn marked(mut row: Row, style: Style, text: &str, marks: &[bool]) -> Row {
    let mut rest = text;
    for run in marks.chunk_by(|one, other| one == other) {
        let end = rest.char_indices().nth(run.len()).map_or(rest.len(), |(at, _)| at);
        let (part, after) = rest.split_at(end);
        row = row.put(if run[0] { FOUND } else { style }, part);
        rest = after;
    }
    row.put(style, rest)
}

/// The time of the entry: the time of day, or the seconds while that is not needed.
fn stamp(entry: &LogEntry, today: Option<&str>) -> String {
    match today {
        _ if entry.clock.is_empty() => seconds(entry),
        Some(today) if today != entry.day && is_within_a_month(&entry.day, today) => {
            let day: String = entry.day.chars().skip(8).collect();
            let minute: String = entry.clock.chars().take(5).collect();
            format!("{day} {minute}")
        }
        // Without the year, which stands at the top of the screen.
        Some(today) if today != entry.day => entry.day.chars().skip(5).collect(),
        _ => entry.clock.clone(),
    }
}

/// Whether the day of the month identifies `day`, seen from `today`.
fn is_within_a_month(day: &str, today: &str) -> bool {
    let parts = |day: &str| -> Option<(u32, u32)> {
        let mut parts = day.split('-').map(|part| part.parse::<u32>().ok());
        let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
        Some((year.checked_mul(12)?.checked_add(month)?, day))
    };
    let (Some((then, day)), Some((now, today))) = (parts(day), parts(today)) else { return false };
    match now.checked_sub(then) {
        Some(0) => day <= today,
        Some(1) => day > today,
        _ => false,
    }
}

/// Seconds since the kernel's start, with as many digits as there is room for.
fn seconds(entry: &LogEntry) -> String {
    let (seconds, millis) = (entry.time.as_secs(), entry.time.subsec_millis());
    match seconds {
        0..10_000 => format!("{seconds}.{millis:03}"),
        10_000..1_000_000 => format!("{seconds}.{}", millis / 100),
        _ => cut(&format!("{seconds}"), INDENT - 4),
    }
}

fn styles(severity: Severity) -> (Style, Style) {
    match severity {
        Severity::Debug => (DIM, DIM),
        Severity::Info => (DIM, PLAIN),
        Severity::Warning => (ATTENTION, ATTENTION),
        Severity::Error | Severity::Fatal => (BAD, BAD),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_stands_out_where_a_line_ends_in_it_too() {
        let entry = LogEntry {
            name: "root.etcd".to_owned(),
            text: "slow Fdatasync took  long: slow fdatasync".to_owned(),
            ..LogEntry::default()
        };
        for width in [14, 20, 24, 30, 40, 90] {
            let lines = lines(&entry, "w FDATA", None, width, usize::MAX);
            let spans = lines.iter().flat_map(|line| &line.spans);
            let found = spans.filter(|span| span.style == FOUND).map(|span| &*span.content);
            let found = found.collect::<String>().replace(' ', "");
            assert_eq!(found, "wFdatawfdata", "{width}");
        }
        // In the name or in the text, and not from one into the other.
        for (text, times) in [("etcd", 1), ("d: slow", 0), ("O", 5), ("", 0)] {
            let lines = lines(&entry, text, None, 90, usize::MAX);
            let spans = lines.iter().flat_map(|line| &line.spans);
            assert_eq!(spans.filter(|span| span.style == FOUND).count(), times, "{text:?}");
        }
    }

    #[test]
    fn one_line_of_kilobytes_does_not_take_the_place_of_the_others() {
        let entry = |text: String| {
            let (severity, name) = (Severity::Error, "root.etcd".to_owned());
            Arc::new(LogEntry { severity, name, text, ..LogEntry::default() })
        };
        let entries = ["the cause".to_owned(), "word ".repeat(1_600)].map(entry).to_vec();
        let logs = Logs { entries, total: 2, ..Logs::default() };
        let shown = block(&logs, Row::default(), Of::All, 78, 8);
        let shown: Vec<_> = shown.iter().map(ToString::to_string).collect();
        assert_eq!(shown.len(), 5, "{shown:#?}");
        assert!(shown[1].contains("the cause") && shown[4].ends_with(".."), "{shown:#?}");
        // All of it is on its own page.
        let page = content(&logs, None, &Filter::default(), 78, None).body;
        assert!(page.len() > 100 && !page.iter().any(|line| line.to_string().ends_with("..")));
    }

    #[test]
    fn a_letter_is_found_as_often_as_a_long_line_holds_it() {
        // A copy of the rest of the line for each of them would take minutes.
        let marks = marks("", &"e".repeat(200_000), "E");
        assert_eq!(marks.0.filter(|(_, mark)| *mark).count(), 200_000);
    }

    #[test]
    fn the_tail_is_the_end_of_the_whole() {
        let logs = crate::samples::failing().logs;
        let whole = content(&logs, None, &Filter::default(), 60, None).body;
        let tail = content(&logs, None, &Filter::default(), 60, Some(5)).body;
        assert!(tail.len() >= 5 && whole.ends_with(&tail));
    }

    #[test]
    fn a_scroll_bar_knows_of_what_is_not_drawn() {
        let mut logs = Logs::default();
        let entry = LogEntry { severity: Severity::Info, ..LogEntry::default() };
        logs.entries = vec![entry.into(); 100];
        let tail = content(&logs, None, &Filter::default(), 60, Some(5));
        assert_eq!((tail.body.len(), tail.above), (5, 95));
    }

    #[test]
    fn a_gap_between_two_entries_is_shown_unless_only_errors_are() {
        let entry = |number| {
            let (severity, text) = (Severity::Error, format!("text {number}"));
            Arc::new(LogEntry { number, severity, text, ..LogEntry::default() })
        };
        let logs = Logs { entries: [3, 4, 50].map(entry).to_vec(), total: 51, ..Logs::default() };
        let shown = |severity, rows| -> String {
            let filter = Filter { severity, ..Filter::default() };
            let body = content(&logs, None, &filter, 60, rows).body;
            body.iter().map(|line| format!("{line}\n")).collect()
        };
        let all = shown(Severity::Info, None);
        assert_eq!(all.lines().count(), 4, "{all}");
        assert!(all.contains("45 lines not kept on this page"), "{all}");
        assert!(all.ends_with(&shown(Severity::Info, Some(2))));
        assert_eq!(shown(Severity::Error, None).lines().count(), 3);
    }

    #[test]
    fn a_filter_shows_gaps_only_between_the_lines_that_it_shows_and_sums_them_up() {
        let entry = |(number, name): (u64, &str)| {
            let (severity, name) = (Severity::Error, name.to_owned());
            Arc::new(LogEntry { number, severity, name, ..LogEntry::default() })
        };
        let entries = [(3, "root.a"), (5, "root.b"), (9, "root.c"), (10, "root.a"), (20, "root.b")];
        let logs = Logs { entries: entries.map(entry).to_vec(), total: 21, ..Logs::default() };
        let shown = |below: &str| -> Vec<String> {
            let filter = Filter { below: below.to_owned(), ..Filter::default() };
            let body = content(&logs, None, &filter, 60, None).body;
            body.iter().map(|line| line.to_string().trim().to_owned()).collect()
        };
        assert_eq!(shown("other"), ["No match among the newest entries. Esc shows all again."]);
        assert_eq!(shown("root.c").len(), 1, "there is nothing to stand between");
        let both = shown("root.a");
        assert_eq!(both.len(), 3, "{both:?}");
        assert_eq!(both[1], "·· 4 lines not kept on this page");
    }

    #[test]
    fn lines_have_the_time_of_day_and_the_day_stands_above_them_wherever_one_looks() {
        let entry = |(number, day, clock): (u64, &str, &str)| {
            let (severity, text) = (Severity::Error, format!("text {number}"));
            let [day, clock] = [day, clock].map(str::to_owned);
            Arc::new(LogEntry { number, severity, text, day, clock, ..LogEntry::default() })
        };
        let entries = [
            (0, "2026-02-10", "23:59:58"),
            (1, "2026-02-10", "23:59:59"),
            (2, "2026-02-11", "00:00:00"),
            (3, "2026-02-11", "00:00:01"),
        ];
        let today = "2026-02-11".to_owned();
        let logs = Logs { entries: entries.map(entry).to_vec(), total: 4, today };
        let shown = content(&logs, None, &Filter::default(), 60, None);
        let body: Vec<_> = shown.body.iter().map(ToString::to_string).collect();
        assert!(body[1].starts_with(" 23:59:59 E") && body[4].starts_with(" 00:00:01 E"));
        assert!(body[2].starts_with("── 2026-02-11 ──") && body.len() == 5, "{body:#?}");
        let days: Vec<_> = shown.days.iter().map(|(at, day)| (*at, day.to_string())).collect();
        let [(0, first), (2, second)] = &days[..] else { panic!("{days:?}") };
        assert!(first.contains("02-10") && second.contains("02-11"), "{days:?}");
        // Of the last two lines, the day is known too.
        let tail = content(&logs, None, &Filter::default(), 60, Some(2));
        assert!(tail.days[0].1.to_string().contains("2026-02-11"), "{:?}", tail.days);
        // Elsewhere the rule does not fit.
        let block: Vec<_> = newest(&logs, Of::All, 60, 9).iter().map(ToString::to_string).collect();
        assert!(block[1].starts_with(" 10 23:59 E") && block[2].starts_with(" 00:00:00 E"));
    }

    #[test]
    fn where_no_rule_tells_the_day_a_line_has_it_and_the_minute_while_that_is_unambiguous() {
        let of = |day: &str, today: &str| {
            let [day, clock] = [day, "23:58:04"].map(str::to_owned);
            stamp(&LogEntry { day, clock, ..LogEntry::default() }, Some(today))
        };
        assert_eq!(of("2026-02-17", "2026-02-17"), "23:58:04");
        assert_eq!(of("2026-02-16", "2026-02-17"), "16 23:58");
        assert_eq!(of("2025-12-31", "2026-01-01"), "31 23:58");
        assert_eq!(of("2026-01-18", "2026-02-17"), "18 23:58");
        assert_eq!(of("2026-01-17", "2026-02-17"), "01-17");
        assert_eq!(of("2025-02-16", "2026-02-17"), "02-16");
        // A clock that was set back, and a console of another version.
        assert_eq!(of("2026-02-18", "2026-02-17"), "02-18");
        assert_eq!(of("yesterday", "2026-02-17"), "rday");
    }

    #[test]
    fn a_paused_page_shows_how_many_newer_lines_match() {
        let of = |number| {
            let severity = if number == 7 { Severity::Error } else { Severity::Info };
            Arc::new(LogEntry { number, severity, ..LogEntry::default() })
        };
        let logs = |total| Logs { entries: (0..total).map(of).collect(), total, ..Logs::default() };
        let head = |severity| {
            let filter = Filter { severity, ..Filter::default() };
            content(&logs(10), Some(&logs(5)), &filter, 90, None).head[0].to_string()
        };
        let errors = head(Severity::Error);
        assert!(errors.contains("5 newer lines, 1 of them here."), "{errors}");
        let all = head(Severity::Info);
        assert!(all.contains("5 newer lines. End"), "{all}");
    }

    #[test]
    fn pages_about_something_else_show_what_belongs_to_them() {
        let shown = |of: Of<'_>, name: &str, severity| {
            of.lets_through(&LogEntry { name: name.to_owned(), severity, ..LogEntry::default() })
        };
        let below = Of::Below(&["root.net"]);
        assert!(shown(below, "root.net.dhcp", Severity::Info));
        assert!(!shown(below, "root.network", Severity::Error));
        assert!(shown(Of::All, "kernel", Severity::Warning));
        assert!(!shown(Of::All, "kernel", Severity::Info));
        assert!(!shown(Of::Wrong, "root", Severity::Info));
    }
}
