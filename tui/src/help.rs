//! Draws the list of all keys over the open page.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::text::width;
use crate::theme::{BUSY, PLAIN, STRONG};
use crate::widgets::Row;

const KEYS: [(&str, &str); 9] = [
    ("F1 .. F5, 1 .. 5", "open a page"),
    ("Tab, Right", "next page"),
    ("Shift-Tab, Left", "previous page"),
    ("Up, Down", "scroll by a line"),
    ("PgUp, PgDn", "scroll by a screen"),
    ("Home, End", "first and last line; in the logs, End follows"),
    ("s", "logs: least severity that is shown"),
    ("Ctrl-L", "draw the screen anew"),
    ("?", "this help; any key closes it"),
];

/// Where the explanations start.
const COLUMN: usize = 20;

/// Cells and rows of the box, its border included.
const COLUMNS: u16 = 70;
const ROWS: u16 = 13;

/// Draws the box in the middle of `area`, or as much of it as fits.
pub(crate) fn draw(area: Rect, buffer: &mut Buffer) {
    let (columns, rows) = (area.width.min(COLUMNS), area.height.min(ROWS));
    let area = Rect {
        x: area.x + (area.width - columns) / 2,
        y: area.y + (area.height - rows) / 2,
        width: columns,
        height: rows,
    };
    if columns < 2 || rows < 2 {
        return;
    }
    let inner = usize::from(columns - 2);
    let rule = |left: &str, title: &str, right: &str| {
        let fill = "─".repeat(inner.saturating_sub(width(title)));
        let title = Row::default().put(STRONG, &format!("{title}{fill}"));
        Row::default().put(PLAIN, left).join(inner, title).put(PLAIN, right)
    };
    let line = |row: Row| Row::default().put(PLAIN, "│").join(inner, row).put(PLAIN, "│");
    let keys = KEYS
        .iter()
        .map(|(key, what)| line(Row::indented(2).cell(COLUMN, BUSY, key).put(PLAIN, what)));
    let mut lines = vec![rule("┌", "─ Keys ", "┐"), line(Row::default())];
    lines.extend(keys);
    lines.truncate(usize::from(rows - 1));
    lines.resize(usize::from(rows - 1), line(Row::default()));
    lines.push(rule("└", "", "┘"));
    for (row, y) in lines.into_iter().zip(area.top()..area.bottom()) {
        buffer.set_line(area.x, y, &row.line(), area.width);
    }
}
