//! Draws snapshots into bytes for one terminal.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use polis_tui::{Snapshot, View};
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::{TerminalOptions, Viewport};

use crate::sys::terminal::Size;

/// Resets colours, clears, goes home, hides the cursor. The library's own
/// `clear` would ask where the cursor is, of whatever is our standard input.
const CLEAR: &[u8] = b"\x1b[0m\x1b[2J\x1b[H\x1b[?25l";
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
pub(crate) struct Canvas {
    size: Size,
    bytes: Bytes,
    /// What each cell of the last picture shows: its ASCII character, or zero
    /// for one that a terminal may keep in another way. Row by row.
    shown: Vec<u8>,
    terminal: ratatui::Terminal<CrosstermBackend<Bytes>>,
}

impl Canvas {
    /// A canvas of `size`; its first picture clears the terminal.
    pub(crate) fn new(size: Size) -> io::Result<Self> {
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
    pub(crate) fn bounded(size: Size) -> Size {
        Size {
            columns: size.columns.clamp(1, SIZE_MAX.columns),
            rows: size.rows.clamp(1, SIZE_MAX.rows),
        }
    }

    /// The size that is drawn on.
    pub(crate) fn size(&self) -> Size {
        self.size
    }

    /// What the terminal must be sent to show `snapshot`; empty if it does already.
    pub(crate) fn draw(&mut self, snapshot: &Snapshot, view: &View) -> io::Result<Vec<u8>> {
        let frame = self.terminal.draw(|frame| polis_tui::render(snapshot, view, frame))?;
        self.shown.clear();
        self.shown.extend(frame.buffer.content().iter().map(
            |cell| match cell.symbol().as_bytes() {
                [c @ b' '..=b'~'] => *c,
                _ => 0,
            },
        ));
        Ok(std::mem::take(&mut *self.bytes.lock()))
    }

    /// Whether `cells`, a terminal's own account of its characters, row by row,
    /// differ from the last picture.
    pub(crate) fn differs(&self, cells: &[u8]) -> bool {
        self.shown.len() != cells.len()
            || self.shown.iter().zip(cells).any(|(shown, cell)| *shown != 0 && shown != cell)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(canvas: &Canvas) -> View {
        View::new(canvas.size().columns, canvas.size().rows)
    }

    #[test]
    fn the_first_picture_is_whole_and_the_next_one_is_what_changed() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let view = view(&canvas);
        let mut snapshot = Snapshot::default();
        let first = canvas.draw(&snapshot, &view).unwrap();
        assert!(first.starts_with(CLEAR));
        let same = canvas.draw(&snapshot, &view).unwrap();
        assert!(same.len() < 40, "{} bytes for no change", same.len());
        snapshot.header.clock = "2026-01-01 00:00:00 UTC".to_owned();
        let changed = canvas.draw(&snapshot, &view).unwrap();
        assert!(changed.len() > same.len() && changed.len() < first.len());
    }

    #[test]
    fn a_picture_that_was_written_over_is_noticed() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let view = view(&canvas);
        canvas.draw(&Snapshot::default(), &view).unwrap();
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
            let view = view(&canvas);
            canvas.draw(&Snapshot::default(), &view).unwrap();
        }
    }

    #[test]
    fn nothing_asks_the_terminal_where_its_cursor_is() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 }).unwrap();
        let view = view(&canvas);
        let bytes = canvas.draw(&Snapshot::default(), &view).unwrap();
        assert!(!bytes.windows(4).any(|part| part == b"\x1b[6n"));
    }
}
