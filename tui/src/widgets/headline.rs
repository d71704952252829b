//! The headline: answers a page's question in one sentence, under a mark.

use ratatui::style::Style;
use ratatui::text::Line;

use super::Row;
use crate::text::{clean, wrap};
use crate::theme::{ATTENTION, Mark, PLAIN, STRONG};

/// Where the text of a headline starts, and what belongs to it.
pub(crate) const INDENT: usize = 2;

/// A sentence under its mark, wrapped to `width` cells.
pub(crate) fn headline(mark: Mark, text: &str, width: usize) -> Vec<Line<'static>> {
    let style = if mark == Mark::Bad { mark.style() } else { STRONG };
    marked(mark, style, text, width)
}

/// The same for a remark that is not an answer.
pub(crate) fn note(mark: Mark, text: &str, width: usize) -> Vec<Line<'static>> {
    marked(mark, PLAIN, text, width)
}

fn marked(mark: Mark, style: Style, text: &str, width: usize) -> Vec<Line<'static>> {
    let lines = wrap(&clean(text), width.saturating_sub(INDENT));
    let row = |(at, line): (usize, &String)| {
        let glyph = if at == 0 { mark.glyph() } else { "" };
        Row::default().cell(INDENT, mark.style(), glyph).put(style, line).line()
    };
    lines.iter().enumerate().map(row).collect()
}

/// A text of second rank: `lead` once, then the text beside it, wrapped.
pub(crate) fn hanging(
    indent: usize,
    lead: &str,
    style: Style,
    text: &str,
    width: usize,
) -> Vec<Line<'static>> {
    let column = indent + crate::text::width(lead);
    let lines = wrap(&clean(text), width.saturating_sub(column));
    let row = |(at, line): (usize, &String)| {
        let lead = if at == 0 { lead } else { "" };
        Row::indented(indent).put(style, lead).to(column).put(style, line).line()
    };
    lines.iter().enumerate().map(row).collect()
}

/// A command to type: on a line of its own, so that it stays one command when it is
/// read aloud or from a photograph.
pub(crate) fn command(text: &str, width: usize) -> Vec<Line<'static>> {
    hanging(INDENT, "► ", ATTENTION, text, width)
}
