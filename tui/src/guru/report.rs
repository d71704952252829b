//! The report of a guru meditation as lines: all of it, or as much as a screen has room for.

use ratatui::style::Style;
use ratatui::text::Line;

use super::{Guru, LOG_MAX, STRONG, TEXT, TITLE};
use crate::text::{clean, wrap_within};
use crate::widgets::Row;

/// The next step where no help is known.
const UNKNOWN: &str = "Reboot. If that does not help, look for the code in docs/errors.md.";

/// The text for a failure without a message.
const SILENT: &str = "No cause was reported.";

/// Rows of the newest line of the log, where there is room: that line most often names
/// the failure.
const NEWEST_ROWS: usize = 3;

/// The report in at most `rows`: the next step is never cut, the causes give way to it,
/// and the log has the rest, a row a line. `more` names the way to all of a part that was cut.
pub(super) fn report(guru: &Guru, width: usize, rows: usize, more: &str) -> Vec<Line<'static>> {
    let next = shorten(next(guru, width), rows, more);
    let left = rows.saturating_sub(next.len());
    // Every cause with its beginning says more than the first one with its end.
    let causes = [usize::MAX, 4, 3, 2, 1]
        .into_iter()
        .map(|each| causes(guru, width, each))
        .find(|lines| lines.len() <= left)
        .unwrap_or_else(|| causes(guru, width, 1));
    let mut lines = shorten(causes, left, more);
    lines.extend(next);
    for part in [maintenance(guru, width), tried(guru, width)] {
        let left = rows.saturating_sub(lines.len());
        lines.extend(shorten(part, left, more));
    }
    let left = rows.saturating_sub(lines.len());
    // A title without a line below it says nothing.
    if left >= 2 && !guru.log.is_empty() {
        lines.push(title("Last log lines"));
        lines.extend(newest(guru, width, left - 1));
    }
    lines
}

/// The newest lines of the log in `rows`, each in a row of its own but for the last.
fn newest(guru: &Guru, width: usize, rows: usize) -> Vec<Line<'static>> {
    let Some((last, before)) = guru.log.split_last() else { return Vec::new() };
    let last = block(2, "", TEXT, last, width, NEWEST_ROWS.min(rows));
    let before = &before[before.len().saturating_sub(rows - last.len())..];
    let before = before.iter().flat_map(|line| block(2, "", TEXT, line, width, 1));
    before.chain(last).collect()
}

/// All of the report and the log, for the logs mode.
pub(super) fn everything(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    let mut lines = causes(guru, width, usize::MAX);
    lines.extend(next(guru, width));
    lines.extend(maintenance(guru, width));
    lines.extend(tried(guru, width));
    lines.push(title("Last log lines"));
    if guru.log.is_empty() {
        lines.push(Row::indented(2).put(TITLE, "none").line());
    }
    lines.extend(log(guru, width));
    lines
}

/// The first `rows` of a block, with `more` behind them where that is not all; nothing
/// where the room suffices for `more` only. A block ends with an empty line,
/// which may fall off the screen without it.
fn shorten(mut lines: Vec<Line<'static>>, rows: usize, more: &str) -> Vec<Line<'static>> {
    if lines.len() > rows + 1 {
        let Some(kept) = rows.checked_sub(2).filter(|kept| *kept > 0) else { return Vec::new() };
        lines.truncate(kept);
        lines.push(Row::indented(2).put(TITLE, more).line());
        lines.push(Line::default());
    }
    lines.truncate(rows);
    lines
}

fn title(text: &str) -> Line<'static> {
    Row::default().put(TITLE, text).line()
}

/// The chain of causes, at most `rows` of each.
fn causes(guru: &Guru, width: usize, rows: usize) -> Vec<Line<'static>> {
    let mut lines = vec![title("What happened")];
    if guru.causes.is_empty() {
        lines.push(Row::indented(2).put(TEXT, SILENT).line());
    }
    for (depth, cause) in guru.causes.iter().enumerate() {
        // Each cause hangs below its effect; a long chain stops moving to the right.
        let lead = if depth == 0 { "" } else { "└ " };
        let indent = 2 * depth.clamp(1, 4);
        let style = if depth == 0 { STRONG } else { TEXT };
        lines.extend(block(indent, lead, style, cause, width, rows));
    }
    lines.push(Line::default());
    lines
}

fn next(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    let mut lines = vec![title("What to do")];
    let next = if guru.next.is_empty() { UNKNOWN } else { &guru.next };
    lines.extend(block(0, "► ", STRONG, next, width, usize::MAX));
    lines.push(Line::default());
    lines
}

/// How to reach this machine from another one.
fn maintenance(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    if guru.maintenance.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![title("Over the network")];
    lines.extend(block(2, "", STRONG, &guru.maintenance, width, usize::MAX));
    lines.push(Line::default());
    lines
}

fn tried(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    if guru.tried.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![title("What was tried")];
    lines
        .extend(guru.tried.iter().flat_map(|tried| block(2, "• ", TEXT, tried, width, usize::MAX)));
    lines.push(Line::default());
    lines
}

fn log(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    let newest = guru.log.len().saturating_sub(LOG_MAX);
    guru.log[newest..].iter().flat_map(|line| block(2, "", TEXT, line, width, usize::MAX)).collect()
}

/// A text beside its `lead`, in at most `rows`.
pub(super) fn block(
    indent: usize,
    lead: &str,
    style: Style,
    text: &str,
    width: usize,
    rows: usize,
) -> Vec<Line<'static>> {
    let column = indent + crate::text::width(lead);
    let width = width.saturating_sub(column);
    let lines = wrap_within(&clean(text), width, rows);
    let row = |(at, line): (usize, &String)| {
        let lead = if at == 0 { lead } else { "" };
        Row::indented(indent).put(TITLE, lead).to(column).put(style, line).line()
    };
    lines.iter().enumerate().map(row).collect()
}
