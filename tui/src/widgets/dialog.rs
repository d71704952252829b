//! The dialog: a box over a page, for help, and for decisions.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::{Row, row};
use crate::text::{cut, width};
use crate::theme::STRONG;

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
    lines.extend(rows.into_iter().take(usize::from(height - 2)).map(line));
    lines.push(Row::default().put(style, &format!("└{}┘", "─".repeat(inner))));
    let x = area.x + (area.width - columns) / 2;
    let y = area.y + (area.height - height) / 2;
    buffer.set_style(Rect { x, y, width: columns, height }, Style::reset());
    for (row, y) in lines.into_iter().zip(y..y + height) {
        row::draw(&row.line(), x, y, columns, buffer);
    }
}
