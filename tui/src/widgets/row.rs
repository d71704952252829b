//! Builds one line out of columns.

use ratatui::style::Style;
use ratatui::text::{Line, Span};

use crate::text::{clean, cut, width};
use crate::theme::DIM;

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
        let text = clean(text);
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

    /// Adds a column of `cells`, filled from the left; what does not fit is cut,
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
