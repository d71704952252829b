//! Answers: what was said? Follows the newest entries until a person scrolls up.

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Content, blank};
use crate::snapshot::{LogEntry, Logs, Severity};
use crate::text::{clean, plural, width as cells, wrap};
use crate::theme::{ATTENTION, BAD, BUSY, DIM, Mark, PLAIN};
use crate::widgets::Row;
use crate::widgets::headline::headline;

/// Where the text of an entry goes on in its second line: below the name.
const INDENT: usize = 12;

pub(crate) fn content(
    logs: &Logs,
    paused: Option<&Logs>,
    severity: Severity,
    width: usize,
) -> Content {
    let shown = paused.unwrap_or(logs);
    let from = match severity {
        Severity::Debug => "everything",
        Severity::Info => "information and worse",
        Severity::Warning => "warnings and worse",
        Severity::Error | Severity::Fatal => "errors and worse",
    };
    let lost = if logs.dropped == 0 {
        String::new()
    } else {
        format!(" {} lost.", plural(logs.dropped, "entry").replace("entrys", "entries"))
    };
    let (mark, text) = match paused {
        None => (Mark::Busy, format!("Following: {from} (s changes).{lost}")),
        Some(paused) => {
            let newer = logs.total.saturating_sub(paused.total);
            (Mark::Attention, format!("Paused: {from}; {newer} newer, End follows again.{lost}"))
        }
    };
    let mut head = headline(mark, &text, width);
    head.push(blank());
    let body = shown.entries.iter().filter(|entry| entry.severity >= severity);
    let mut body: Vec<_> = body.flat_map(|entry| lines(entry, width)).collect();
    if body.is_empty() {
        body.push(Row::indented(2).put(DIM, "Nothing yet.").line());
    }
    Content { head, body }
}

fn lines(entry: &LogEntry, width: usize) -> Vec<Line<'static>> {
    let (letter, text) = styles(entry.severity);
    let name = format!("{}: ", clean(&entry.name));
    // The name is a part of the first line's text, so that it wraps with it.
    let wrapped = wrap(&format!("{name}{}", clean(&entry.text)), width.saturating_sub(INDENT));
    let mut named = cells(name.trim_end());
    let row = |(at, line): (usize, String)| {
        let row = Row::default();
        let row = if at == 0 {
            let severity = String::from(entry.severity.letter());
            row.right(INDENT - 3, DIM, &seconds(entry)).gap(1).cell(2, letter, &severity)
        } else {
            row.gap(INDENT)
        };
        let split = line.char_indices().nth(named).map_or(line.len(), |(at, _)| at);
        named = named.saturating_sub(cells(&line));
        let (name, said) = line.split_at(split);
        row.put(BUSY, name).put(text, said).line()
    };
    wrapped.into_iter().enumerate().map(row).collect()
}

fn seconds(entry: &LogEntry) -> String {
    format!("{}.{:03}", entry.time.as_secs(), entry.time.subsec_millis())
}

fn styles(severity: Severity) -> (Style, Style) {
    match severity {
        Severity::Debug => (DIM, DIM),
        Severity::Info => (DIM, PLAIN),
        Severity::Warning => (ATTENTION, ATTENTION),
        Severity::Error | Severity::Fatal => (BAD, BAD),
    }
}
