//! Draws frames into bytes for one terminal, whoever has it.
//!
//! ```text
//! frame --settle--> picture --what differs from the last one--> bytes
//! ```
//!
//! The Linux console has one switch for bold and for bright colours, and its own
//! idea of when the switch goes back. So no cell leaves its colours to the
//! terminal: they are all named, and bold is a bright colour.
//!
//! What this module does not do: write, or ask a terminal anything. The library's
//! own way to ask would ask whatever is the process's standard input.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Cell;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};
use ratatui::{Frame, TerminalOptions, Viewport};

use crate::sys::terminal::Size;

/// Resets colours, clears, goes home, hides the cursor.
const CLEAR: &[u8] = b"\x1b[0m\x1b[2J\x1b[H\x1b[?25l";
/// The same without the clearing, for a terminal that is painted over.
const HOME: &[u8] = b"\x1b[0m\x1b[H\x1b[?25l";
/// What no picture holds: a character of nobody.
const NOTHING: &str = "\u{e000}";
/// A terminal of the screen wall; a larger one is drawn on in part. A cell is
/// some fifty bytes of memory.
const SIZE_MAX: Size = Size { columns: 240, rows: 80 };

/// What the terminal library wrote, until it is taken.
#[derive(Clone, Debug, Default)]
struct Bytes(Arc<Mutex<Vec<u8>>>);

impl Bytes {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for Bytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A picture of what the terminal shows, so that only differences are sent.
#[derive(Debug)]
pub struct Canvas {
    size: Size,
    bytes: Bytes,
    /// What each cell of the last picture shows: its ASCII character, or zero
    /// for one that a terminal may keep in another way. Row by row.
    shown: Vec<u8>,
    terminal: ratatui::Terminal<CrosstermBackend<Bytes>>,
}

impl Canvas {
    /// A canvas of `size`; its first picture clears the terminal.
    ///
    /// # Errors
    ///
    /// Never for a size that is not zero.
    pub fn new(size: Size) -> io::Result<Self> {
        let size = Self::bounded(size);
        let bytes = Bytes::default();
        let viewport = Viewport::Fixed(Rect::new(0, 0, size.columns, size.rows));
        let backend = CrosstermBackend::new(bytes.clone());
        let options = TerminalOptions { viewport };
        let terminal = ratatui::Terminal::with_options(backend, options)?;
        bytes.lock().extend(CLEAR);
        Ok(Self { size, bytes, shown: Vec::new(), terminal })
    }

    /// The part of a terminal of `size` that is drawn on.
    #[must_use]
    pub fn bounded(size: Size) -> Size {
        Size {
            columns: size.columns.clamp(1, SIZE_MAX.columns),
            rows: size.rows.clamp(1, SIZE_MAX.rows),
        }
    }

    /// The size that is drawn on.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// What the terminal must be sent to show what `render` draws.
    ///
    /// # Errors
    ///
    /// None: nothing is written here.
    pub fn draw(&mut self, render: impl FnOnce(&mut Frame<'_>)) -> io::Result<Vec<u8>> {
        let frame = self.terminal.draw(|frame| {
            render(frame);
            frame.buffer_mut().content.iter_mut().for_each(settle);
        })?;
        self.shown.clear();
        self.shown.extend(frame.buffer.content.iter().map(|cell| match cell.symbol().as_bytes() {
            [c @ b' '..=b'~'] => *c,
            _ => 0,
        }));
        Ok(std::mem::take(&mut *self.bytes.lock()))
    }

    /// Has the next picture be sent whole, over whatever is there: without the
    /// flicker of a terminal that is cleared.
    ///
    /// # Errors
    ///
    /// None: nothing is written here.
    pub fn forget(&mut self) -> io::Result<()> {
        let mut before = std::mem::take(&mut *self.bytes.lock());
        self.terminal.draw(|frame| {
            for cell in &mut frame.buffer_mut().content {
                cell.set_symbol(NOTHING);
            }
        })?;
        // What it took to draw nothing is dropped; what was waiting is not.
        before.extend(HOME);
        *self.bytes.lock() = before;
        Ok(())
    }

    /// Whether `cells`, a terminal's own account of its characters, row by row,
    /// differ from the last picture.
    #[must_use]
    pub fn differs(&self, cells: &[u8]) -> bool {
        self.shown.len() != cells.len()
            || self.shown.iter().zip(cells).any(|(shown, cell)| *shown != 0 && shown != cell)
    }
}

/// Names the colours of a cell.
fn settle(cell: &mut Cell) {
    let bold = cell.modifier.contains(Modifier::BOLD);
    cell.modifier.remove(Modifier::BOLD);
    cell.fg = match cell.fg {
        Color::Reset | Color::Gray if bold => Color::White,
        Color::Reset => Color::Gray,
        Color::Black if bold => Color::DarkGray,
        Color::Red if bold => Color::LightRed,
        Color::Green if bold => Color::LightGreen,
        Color::Yellow if bold => Color::LightYellow,
        Color::Blue if bold => Color::LightBlue,
        Color::Magenta if bold => Color::LightMagenta,
        Color::Cyan if bold => Color::LightCyan,
        other => other,
    };
    if cell.bg == Color::Reset {
        cell.bg = Color::Black;
    }
}

#[cfg(test)]
mod tests {
    use polis_tui::{Snapshot, View};

    use super::*;

    fn picture(canvas: &mut Canvas, snapshot: &Snapshot) -> Vec<u8> {
        let view = view(canvas);
        canvas.draw(|frame| polis_tui::render(snapshot, &view, frame)).unwrap()
    }

    fn view(canvas: &Canvas) -> View {
        View::new(canvas.size().columns, canvas.size().rows)
    }

    #[test]
    fn the_first_picture_is_whole_and_the_next_one_is_what_changed() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let mut snapshot = Snapshot::default();
        let first = picture(&mut canvas, &snapshot);
        assert!(first.starts_with(CLEAR));
        let same = picture(&mut canvas, &snapshot);
        assert!(same.len() < 40, "{} bytes for no change", same.len());
        snapshot.header.clock = "2026-01-01 00:00:00 UTC".to_owned();
        let changed = picture(&mut canvas, &snapshot);
        assert!(changed.len() > same.len() && changed.len() < first.len());
    }

    #[test]
    fn a_picture_that_was_written_over_is_noticed() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        picture(&mut canvas, &Snapshot::default());
        // A glyph that is not ASCII has a number of the font's own.
        let mut cells: Vec<u8> =
            canvas.shown.iter().map(|c| if *c == 0 { 0xfe } else { *c }).collect();
        assert!(!canvas.differs(&cells));
        cells[0] ^= 1;
        assert!(canvas.differs(&cells));
        assert!(canvas.differs(&[]));
    }

    #[test]
    fn no_size_is_too_small_or_too_large() {
        for (columns, rows) in [(0, 0), (1, 1), (u16::MAX, u16::MAX)] {
            let mut canvas = Canvas::new(Size { columns, rows }).unwrap();
            picture(&mut canvas, &Snapshot::default());
        }
    }

    #[test]
    fn nothing_asks_the_terminal_where_its_cursor_is() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let bytes = picture(&mut canvas, &Snapshot::default());
        assert!(!bytes.windows(4).any(|part| part == b"\x1b[6n"));
    }

    #[test]
    fn a_terminal_that_is_painted_over_gets_every_cell_and_is_not_cleared() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        picture(&mut canvas, &Snapshot::default());
        canvas.forget().unwrap();
        let again = picture(&mut canvas, &Snapshot::default());
        let text = String::from_utf8(again).unwrap();
        assert!(text.starts_with("\x1b[0m\x1b[H") && !text.contains("\x1b[2J"));
        // Every cell is sent: rows hold their blanks too.
        assert!(text.chars().filter(|c| *c == ' ').count() > 1000, "{text}");
        assert!(!text.contains(NOTHING));
        assert!(picture(&mut canvas, &Snapshot::default()).len() < 40);
    }

    #[test]
    fn no_cell_leaves_its_colours_to_the_terminal() {
        let mut cell = Cell::default();
        cell.modifier.insert(Modifier::BOLD);
        settle(&mut cell);
        assert_eq!((cell.fg, cell.bg), (Color::White, Color::Black));
        assert!(!cell.modifier.contains(Modifier::BOLD));
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let text = String::from_utf8(picture(&mut canvas, &Snapshot::default())).unwrap();
        assert!(!text.contains("\x1b[1m") && !text.contains("\x1b[22m"), "{text}");
    }
}
