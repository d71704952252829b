//! Blocks of lines: under a title, or beside each other.

use ratatui::text::{Line, Span};

use super::Row;
use crate::text::width;
use crate::theme::{DIM, STRONG};

/// The title of a block, with a rule that is as wide as the page.
pub(crate) fn title(text: &str, cells: usize) -> Line<'static> {
    titled(Row::default().put(STRONG, text), cells)
}

/// The same with column heads, or a remark, after the title.
pub(crate) fn titled(row: Row, cells: usize) -> Line<'static> {
    let rule = cells.saturating_sub(row.used() + 1);
    row.gap(1).put(DIM, &"─".repeat(rule)).line()
}

/// An empty line.
pub(crate) fn blank() -> Line<'static> {
    Line::default()
}

/// `right` beside `left`, which has `cells`.
pub(crate) fn beside(
    left: Vec<Line<'static>>,
    cells: usize,
    right: Vec<Line<'static>>,
) -> Vec<Line<'static>> {
    let rows = left.len().max(right.len());
    let [mut left, mut right] = [left.into_iter(), right.into_iter()];
    let row = |_| {
        let mut line = left.next().unwrap_or_default();
        let used: usize = line.spans.iter().map(|span| width(&span.content)).sum();
        line.spans.push(Span::raw(" ".repeat(cells.saturating_sub(used))));
        line.spans.extend(right.next().unwrap_or_default().spans);
        line
    };
    (0..rows).map(row).collect()
}
