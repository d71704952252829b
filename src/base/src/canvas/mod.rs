//! The canvas: it turns pictures into bytes for one terminal.
//!
//! ```text
//! buffer --settle--> cells --what the terminal does not show yet--> bytes
//! ```
//!
//! The Linux console has one switch for bold and for bright colours, and its own rule
//! for when the switch goes back. So no cell leaves its colours to the terminal: all of
//! them are named, and bold is a bright colour. Only for an operator who wants no colours
//! ([`Colours::Off`]) none is named.
//!
//! Invariants:
//! - A picture that shows nothing new gives no bytes.
//! - A cell is one character: combined characters are not drawn here.
//!
//! What this module does not do: write, or ask a terminal anything; it holds the
//! question, and how often the owner of a terminal looks after it. The library's own
//! way to ask would use the process's standard input; and its own canvas looks at the
//! width of every cell, twice, and keeps two of them.

mod encode;

use std::time::Duration;

use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};

use crate::sys::terminal::Size;

/// Resets colours, clears, goes home, hides the cursor.
const CLEAR: &[u8] = b"\x1b[0m\x1b[2J\x1b[H\x1b[?25l";
/// The same without the clearing, for a terminal that is painted over.
const HOME: &[u8] = b"\x1b[0m\x1b[H\x1b[?25l";
/// A terminal of the screen wall; a larger one is drawn on in part. A cell is
/// some fifty bytes of memory.
const SIZE_MAX: Size = Size { columns: 240, rows: 80 };
/// The same where memory does not matter: beyond any readable screen.
const SIZE_MAX_WHOLE: Size = Size { columns: 640, rows: 240 };

/// Sent to a terminal of unknown size: keeps the cursor, jumps to the far corner, asks
/// for its position, comes back.
pub const WHERE: &[u8] = b"\x1b7\x1b[999;999H\x1b[6n\x1b8";
/// Silence after which an answer about the size comes from a new client. A line that is
/// merely slow answers sooner: no question waits behind a picture, and a driver's
/// buffer is sent within five seconds at 9,600 baud.
pub const ABSENT_AFTER: Duration = Duration::from_secs(10);
/// How often a terminal that does not report its content is painted over: the output of
/// other writers on a serial line stays no longer. Four kilobytes.
pub const REPAINT: Duration = Duration::from_secs(60);

/// Whether pictures have colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    /// Every cell has its own.
    On,
    /// Every cell has those of the terminal; one with another background is reversed.
    Off,
}

/// The content of a terminal, so that only differences are sent.
#[derive(Debug)]
pub struct Canvas {
    size: Size,
    colours: Colours,
    /// Where pictures are drawn.
    buffer: Buffer,
    /// The content of the terminal, row by row.
    shown: Vec<Shown>,
    /// Bytes sent ahead of the next picture.
    lead: &'static [u8],
}

/// The content of one cell of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    glyph: char,
    fg: Color,
    bg: Color,
    modifier: Modifier,
}

impl Shown {
    /// A value that differs from every drawn cell.
    const NOTHING: Self =
        Self { glyph: '\u{e000}', fg: Color::Reset, bg: Color::Reset, modifier: Modifier::empty() };

    fn of(cell: &Cell) -> Self {
        let glyph = cell.symbol().chars().next().unwrap_or(' ');
        Self { glyph, fg: cell.fg, bg: cell.bg, modifier: cell.modifier }
    }
}

impl Canvas {
    /// A canvas of `size`; its first picture clears the terminal.
    #[must_use]
    pub fn new(size: Size) -> Self {
        Self::of(Self::bounded(size), Colours::On)
    }

    /// The same for a program that has the memory for all of a large terminal.
    #[must_use]
    pub fn whole(size: Size, colours: Colours) -> Self {
        Self::of(clamp(size, SIZE_MAX_WHOLE), colours)
    }

    fn of(size: Size, colours: Colours) -> Self {
        let buffer = Buffer::empty(Rect::new(0, 0, size.columns, size.rows));
        let shown = vec![Shown::NOTHING; buffer.content.len()];
        Self { size, colours, buffer, shown, lead: CLEAR }
    }

    /// The part of a terminal of `size` that is drawn on.
    #[must_use]
    pub fn bounded(size: Size) -> Size {
        clamp(size, SIZE_MAX)
    }

    /// The size that is drawn on.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// All that is drawn on.
    #[must_use]
    pub fn area(&self) -> Rect {
        self.buffer.area
    }

    /// The bytes that make the terminal show what `render` draws on an empty buffer.
    pub fn draw(&mut self, render: impl FnOnce(&mut Buffer)) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.reset();
        render(&mut buffer);
        let bytes = self.bytes(&mut buffer);
        self.buffer = buffer;
        bytes
    }

    /// The same where no more than `part` of the terminal changes.
    pub fn draw_part(&mut self, part: Rect, render: impl FnOnce(&mut Buffer)) -> Vec<u8> {
        let mut buffer = Buffer::empty(part.intersection(self.buffer.area));
        render(&mut buffer);
        self.bytes(&mut buffer)
    }

    /// The bytes for the differences between `buffer` and the terminal; afterwards they
    /// agree.
    fn bytes(&mut self, buffer: &mut Buffer) -> Vec<u8> {
        let area = buffer.area;
        let mut changed = Vec::new();
        for (row, y) in buffer.content.chunks_mut(area.width.max(1).into()).zip(area.y..) {
            let first = usize::from(y) * usize::from(self.size.columns) + usize::from(area.x);
            let shown = self.shown.iter_mut().skip(first);
            for ((cell, x), shown) in row.iter_mut().zip(area.x..).zip(shown) {
                match self.colours {
                    Colours::On => settle(cell),
                    Colours::Off => without_colours(cell),
                }
                let new = Shown::of(cell);
                if *shown != new {
                    *shown = new;
                    changed.push((x, y, new));
                }
            }
        }
        let mut bytes = std::mem::take(&mut self.lead).to_vec();
        bytes.extend(encode::encode(&changed).into_bytes());
        bytes
    }

    /// Makes the next picture a whole one, over the current content: without the
    /// flicker of a terminal that is cleared.
    pub fn forget(&mut self) {
        self.shown.fill(Shown::NOTHING);
        if self.lead.is_empty() {
            self.lead = HOME;
        }
    }

    /// Whether `cells`, the characters that a terminal of `size` reports, row by row,
    /// differ from the last picture. A glyph outside of ASCII has a number of the
    /// font's own, and is not compared; cells outside of the drawn part are not
    /// compared either, and a report of another size, from the middle of a change, does
    /// not count.
    #[must_use]
    pub fn differs(&self, cells: &[u8], size: Size) -> bool {
        let [columns, drawn] = [size, self.size].map(|size| usize::from(size.columns.max(1)));
        if cells.len() != columns * usize::from(size.rows) || Self::bounded(size) != self.size {
            return false;
        }
        let differs = |(shown, cell): (&Shown, &u8)| {
            matches!(shown.glyph, ' '..='~') && shown.glyph != char::from(*cell)
        };
        let mut rows = self.shown.chunks(drawn).zip(cells.chunks(columns));
        rows.any(|(shown, cells)| shown.iter().zip(cells).any(differs))
    }
}

fn clamp(size: Size, max: Size) -> Size {
    Size { columns: size.columns.clamp(1, max.columns), rows: size.rows.clamp(1, max.rows) }
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

/// Leaves the colours of a cell to the terminal.
fn without_colours(cell: &mut Cell) {
    cell.modifier.remove(Modifier::BOLD);
    if !matches!(cell.bg, Color::Reset | Color::Black) {
        // A bar stays one.
        cell.modifier.insert(Modifier::REVERSED);
    }
    (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
}

#[cfg(test)]
mod tests {
    use polis_tui::{Snapshot, View};

    use super::*;

    fn picture(canvas: &mut Canvas, snapshot: &Snapshot) -> Vec<u8> {
        let view = view(canvas);
        canvas.draw(|buffer| polis_tui::render(snapshot, &view, buffer))
    }

    fn view(canvas: &Canvas) -> View {
        View::new(canvas.size().columns, canvas.size().rows)
    }

    #[test]
    fn the_first_picture_is_whole_and_the_next_one_is_what_changed() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 });
        let mut snapshot = Snapshot::default();
        let first = picture(&mut canvas, &snapshot);
        assert!(first.starts_with(CLEAR));
        assert!(picture(&mut canvas, &snapshot).is_empty(), "nothing has changed");
        snapshot.header.clock = "2026-01-01 00:00:00 UTC".to_owned();
        let changed = picture(&mut canvas, &snapshot);
        assert!(!changed.is_empty() && changed.len() < first.len() / 10);
    }

    #[test]
    fn a_part_that_changes_is_drawn_as_it_is_in_the_whole() {
        let size = Size { columns: 100, rows: 30 };
        let [mut whole, mut part] = [Canvas::new(size), Canvas::new(size)];
        let mut snapshot = Snapshot::default();
        assert_eq!(picture(&mut whole, &snapshot), picture(&mut part, &snapshot));
        snapshot.header.clock = "2026-01-01 00:00:00 UTC".to_owned();
        snapshot.header.uptime = std::time::Duration::from_secs(7);
        let clock = polis_tui::clock_of(part.area());
        let drawn = part.draw_part(clock, |buffer| polis_tui::render_clock(&snapshot, buffer));
        assert_eq!(picture(&mut whole, &snapshot), drawn);
        assert!(drawn.len() < 250, "{} bytes for the time", drawn.len());
        assert!(picture(&mut part, &snapshot).is_empty(), "the whole has nothing to add");
    }

    /// The report of a terminal of `size` that shows the canvas.
    fn reported(canvas: &Canvas, size: Size) -> Vec<u8> {
        let cell = |shown: &Shown| u8::try_from(shown.glyph).unwrap_or(0xfe);
        let mut cells = vec![b' '; usize::from(size.columns) * usize::from(size.rows)];
        let rows = canvas.shown.chunks(canvas.size.columns.into());
        for (reported, shown) in cells.chunks_mut(size.columns.into()).zip(rows) {
            reported.iter_mut().zip(shown).for_each(|(reported, shown)| *reported = cell(shown));
        }
        cells
    }

    #[test]
    fn a_picture_that_was_written_over_is_noticed_on_a_terminal_of_any_size() {
        for (columns, rows) in [(80, 24), (240, 67), (320, 90), (480, 135)] {
            let size = Size { columns, rows };
            let mut canvas = Canvas::new(size);
            picture(&mut canvas, &Snapshot::default());
            let mut cells = reported(&canvas, size);
            assert!(!canvas.differs(&cells, size), "{columns} x {rows}");
            let at = usize::from(columns) + 3;
            cells[at] ^= 1;
            assert!(canvas.differs(&cells, size), "{columns} x {rows}");
        }
    }

    #[test]
    fn a_report_of_another_size_is_not_compared() {
        let size = Size { columns: 80, rows: 24 };
        let mut canvas = Canvas::new(size);
        picture(&mut canvas, &Snapshot::default());
        for (columns, rows, cells) in [(80, 24, 0), (80, 24, 81 * 24), (100, 30, 3000), (0, 0, 0)] {
            assert!(!canvas.differs(&vec![0; cells], Size { columns, rows }));
        }
    }

    #[test]
    fn no_size_is_too_small_or_too_large() {
        for (columns, rows) in [(0, 0), (1, 1), (u16::MAX, u16::MAX)] {
            let size = Size { columns, rows };
            for mut canvas in [Canvas::new(size), Canvas::whole(size, Colours::Off)] {
                picture(&mut canvas, &Snapshot::default());
            }
        }
        let large = Size { columns: 320, rows: 90 };
        let whole = Canvas::whole(large, Colours::On);
        assert_eq!((whole.size(), Canvas::new(large).size().columns), (large, 240));
    }

    #[test]
    fn nothing_asks_the_terminal_where_its_cursor_is() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 });
        let bytes = picture(&mut canvas, &Snapshot::default());
        assert!(!bytes.windows(4).any(|part| part == b"\x1b[6n"));
    }

    #[test]
    fn a_terminal_that_is_painted_over_gets_every_cell_and_is_not_cleared() {
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 });
        picture(&mut canvas, &Snapshot::default());
        canvas.forget();
        let again = picture(&mut canvas, &Snapshot::default());
        let text = String::from_utf8(again).unwrap();
        assert!(text.starts_with("\x1b[0m\x1b[H") && !text.contains("\x1b[2J"));
        // Every cell is sent: rows hold their blanks too.
        assert!(text.chars().filter(|c| *c == ' ').count() > 1000, "{text}");
        assert!(!text.contains(Shown::NOTHING.glyph));
        assert!(picture(&mut canvas, &Snapshot::default()).is_empty());
    }

    #[test]
    fn no_cell_leaves_its_colours_to_the_terminal() {
        let mut cell = Cell::default();
        cell.modifier.insert(Modifier::BOLD);
        settle(&mut cell);
        assert_eq!((cell.fg, cell.bg), (Color::White, Color::Black));
        assert!(!cell.modifier.contains(Modifier::BOLD));
        let mut canvas = Canvas::new(Size { columns: 80, rows: 24 });
        let text = String::from_utf8(picture(&mut canvas, &Snapshot::default())).unwrap();
        assert!(!text.contains("\x1b[1m") && !text.contains("\x1b[22m"), "{text}");
    }

    #[test]
    fn without_colours_a_picture_keeps_its_bars_and_names_no_colour() {
        let mut canvas = Canvas::whole(Size { columns: 80, rows: 24 }, Colours::Off);
        let text = String::from_utf8(picture(&mut canvas, &Snapshot::default())).unwrap();
        let ends = |c: char| !c.is_ascii_digit() && c != ';';
        let styles: Vec<_> = text
            .split("\x1b[")
            .filter_map(|part| part.split_at_checked(part.find(ends)?))
            .filter_map(|(codes, rest)| rest.starts_with('m').then_some(codes))
            .collect();
        assert!(styles.contains(&"0;7"), "{styles:?}");
        let mut codes = styles.iter().flat_map(|codes| codes.split(';'));
        assert!(codes.all(|code| ["", "0", "4", "7"].contains(&code)), "{styles:?}");
    }
}
