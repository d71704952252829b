//! The row: builds one line out of columns.

use ratatui::buffer::Buffer;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use crate::text::{clean, cut, width};
use crate::theme::DIM;

/// Draws at most `cells` of `line` from (`x`, `y`) on, where the buffer has a row.
/// Text is clean by now, so every character is a cell of its own, and nothing is
/// searched for what would join some of them.
pub(crate) fn draw(line: &Line<'_>, x: u16, y: u16, cells: u16, buffer: &mut Buffer) {
    let cells = cells.min(buffer.area.right().saturating_sub(x));
    if cells == 0 {
        return;
    }
    let first = buffer.index_of(x, y);
    let mut row = buffer.content.iter_mut().skip(first).take(cells.into());
    for span in &line.spans {
        for (c, cell) in span.content.chars().zip(&mut row) {
            cell.set_char(c).set_style(span.style);
        }
    }
}

/// A line under construction; it knows how far it has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    spans: Vec<Span<'static>>,
    used: usize,
}

impl Row {
    /// An empty line that starts after `indent` cells.
    pub(crate) fn indented(indent: usize) -> Self {
        Self::default().gap(indent)
    }

    /// Adds `text` as it is.
    pub(crate) fn put(mut self, style: Style, text: &str) -> Self {
        let text = clean(text).into_owned();
        self.used += width(&text);
        self.spans.push(Span::styled(text, style));
        self
    }

    /// Adds `cells` of nothing.
    pub(crate) fn gap(self, cells: usize) -> Self {
        self.put(Style::new(), &" ".repeat(cells))
    }

    /// Adds `text` in which dots are for the second look: bars and charts.
    pub(crate) fn dotted(self, style: Style, text: &str) -> Self {
        text.split_inclusive('·').fold(self, |row, part| {
            let (bar, dot) = part.strip_suffix('·').map_or((part, ""), |bar| (bar, "·"));
            let row = if bar.is_empty() { row } else { row.put(style, bar) };
            if dot.is_empty() { row } else { row.put(DIM, dot) }
        })
    }

    /// Goes to `column`, or nowhere if the line is past it.
    pub(crate) fn to(self, column: usize) -> Self {
        let cells = column.saturating_sub(self.used);
        self.gap(cells)
    }

    /// Adds a column of `cells`, filled from the left; text that does not fit is cut,
    /// so that the last cell keeps the next column apart.
    pub(crate) fn cell(self, cells: usize, style: Style, text: &str) -> Self {
        let column = self.used + cells;
        self.put(style, &cut(&clean(text), cells.saturating_sub(1))).to(column)
    }

    /// Adds a column of `cells`, filled from the right; its first cell stays free.
    pub(crate) fn right(self, cells: usize, style: Style, text: &str) -> Self {
        let text = cut(&clean(text), cells.saturating_sub(1));
        let column = (self.used + cells).saturating_sub(width(&text));
        self.to(column).put(style, &text)
    }

    /// Adds a column of `cells` that holds `other`, which is cut where it must be.
    pub(crate) fn join(mut self, cells: usize, other: Self) -> Self {
        let column = self.used + cells;
        for span in other.spans {
            let left = column.saturating_sub(self.used);
            self = self.put(span.style, &cut(&span.content, left));
        }
        self.to(column)
    }

    /// Lays `style` over all of it.
    pub(crate) fn patch(mut self, style: Style) -> Self {
        for span in &mut self.spans {
            span.style = span.style.patch(style);
        }
        self
    }

    /// Cells used so far.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// The line.
    pub(crate) fn line(self) -> Line<'static> {
        Line::from(self.spans)
    }
}
