//! The window: shows the part of a long text that fits, and its place in the whole.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;

use super::row;

/// How far down a text of `lines` can be scrolled in `rows`.
pub(crate) fn end(lines: usize, rows: u16) -> usize {
    lines.saturating_sub(usize::from(rows))
}

/// Draws `lines` from `top` on; the last column is for the scroll bar, in style
/// `bar`, where there is something to scroll. Before the first of the lines are
/// `above` more, which only the scroll bar knows of.
pub(crate) fn draw(
    lines: &[Line<'_>],
    top: usize,
    above: usize,
    area: Rect,
    bar: Style,
    buffer: &mut Buffer,
) {
    let end = end(lines.len(), area.height);
    let top = top.min(end);
    let text = area.width.saturating_sub(1);
    for (line, y) in lines.iter().skip(top).zip(area.top()..area.bottom()) {
        row::draw(line, area.x, y, text, buffer);
    }
    let (top, end) = (top + above, end + above);
    if end == 0 || area.is_empty() {
        return;
    }
    let rows = usize::from(area.height);
    // The thumb covers as much of the bar as the window covers of the text.
    let thumb = (rows * rows / (lines.len() + above)).max(1);
    let first = top * (rows - thumb) / end;
    for (row, y) in (area.top()..area.bottom()).enumerate() {
        let glyph = match row {
            0 if top > 0 => "▲",
            row if row + 1 == rows && top < end => "▼",
            row if (first..first + thumb).contains(&row) => "█",
            _ => "│",
        };
        buffer.set_string(area.right() - 1, y, glyph, bar);
    }
}
