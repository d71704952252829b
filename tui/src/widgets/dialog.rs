//! The dialog: a box over a page, for help, and for decisions.
//!
//! Invariants:
//! - The last rows, which are the keys of a decision, are on a screen of any use.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::{Row, row};
use crate::text::{cut, width};
use crate::theme::{DIM, STRONG};

/// The last rows that have content: to confirm, and to go back.
const KEYS: usize = 2;

/// Draws `rows` under `title` in the middle of `area`, `columns` wide and in a
/// border of `style`, or as much of it as fits.
pub(crate) fn draw(
    title: &str,
    style: Style,
    rows: Vec<Row>,
    columns: u16,
    area: Rect,
    buffer: &mut Buffer,
) {
    let columns = area.width.min(columns);
    let rows = fitting(rows, usize::from(area.height.saturating_sub(2)));
    let height = area.height.min(u16::try_from(rows.len() + 2).unwrap_or(u16::MAX));
    if columns < 2 || height < 2 {
        return;
    }
    let inner = usize::from(columns - 2);
    let title = cut(&format!("─ {title} "), inner);
    let rule = "─".repeat(inner.saturating_sub(width(&title)));
    let top = Row::default().put(style, "┌").put(style.patch(STRONG), &title);
    let mut lines = vec![top.put(style, &format!("{rule}┐"))];
    let line = |row: Row| Row::default().put(style, "│").join(inner, row).put(style, "│");
    lines.extend(rows.into_iter().map(line));
    lines.push(Row::default().put(style, &format!("└{}┘", "─".repeat(inner))));
    let x = area.x + (area.width - columns) / 2;
    let y = area.y + (area.height - height) / 2;
    buffer.set_style(Rect { x, y, width: columns, height }, Style::reset());
    for (row, y) in lines.into_iter().zip(y..y + height) {
        row::draw(&row.line(), x, y, columns, buffer);
    }
}

/// As many of `rows` as fit into `height`: empty ones go first, then those before the keys.
fn fitting(mut rows: Vec<Row>, height: usize) -> Vec<Row> {
    if rows.len() > height {
        rows.retain(|row| row.used() > 0);
    }
    if rows.len() > height {
        let keys = rows.split_off(rows.len() - KEYS.min(height));
        rows.truncate(height - keys.len());
        if let Some(last) = rows.last_mut() {
            *last = Row::indented(2).put(DIM, "..");
        }
        rows.extend(keys);
    }
    rows
}
