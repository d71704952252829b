//! The encoder of cells: the shortest bytes that make a terminal show them.
//!
//! A serial line takes eleven bytes in a millisecond, and the kernel waits for a
//! hypervisor's console sixteen bytes at a time: so a cursor in the right place is not
//! moved, colours in force are not repeated, and they have the short names of the
//! sixteen (`ECMA-48`, and 90 to 107 as in `aixterm`).
//!
//! The Linux console makes a bright colour bold, and leaves it so until the bold is
//! ended: before a dark colour, the encoder sends 22.
//!
//! What this module does not do: compare pictures (`canvas`).

use std::fmt::Write as _;

use ratatui::style::{Color, Modifier};

use super::Shown;

/// Ends the attributes of a picture: other writers use the terminal in between.
const PLAIN: &str = "\x1b[m";

/// The first of the eight foregrounds, and of the eight bright ones; a background's
/// number is higher by [`BACKGROUND`].
const DARK: u8 = 30;
const BRIGHT: u8 = 90;
const BACKGROUND: u8 = 10;

/// The bytes for cells, in the order of rows and columns, each with the place of its
/// cell. A terminal is in its plain state before and after.
pub(super) fn encode(cells: &[(u16, u16, Shown)]) -> String {
    let mut text = String::new();
    let (mut at, mut style) = (None, Style::PLAIN);
    for &(x, y, cell) in cells {
        if at != Some((x, y)) {
            // Writing to memory cannot fail.
            let _never = write!(text, "\x1b[{};{}H", y + 1, x + 1);
        }
        let new = Style::of(cell);
        if style != new {
            style.change(new, &mut text);
            style = new;
        }
        text.push(cell.glyph);
        // Behind the last column, terminals differ in where the cursor is.
        at = Some((x + 1, y));
    }
    if style != Style::PLAIN {
        text.push_str(PLAIN);
    }
    text
}

/// The style of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Style {
    fg: Color,
    bg: Color,
    modifier: Modifier,
}

impl Style {
    const PLAIN: Self = Self { fg: Color::Reset, bg: Color::Reset, modifier: Modifier::empty() };

    fn of(cell: Shown) -> Self {
        Self { fg: cell.fg, bg: cell.bg, modifier: cell.modifier }
    }

    /// Appends the codes that change a terminal from this style to another.
    fn change(self, new: Self, text: &mut String) {
        let mut codes = Vec::new();
        let mut old = self;
        if old.modifier != new.modifier {
            // Which code ends one of them differs between terminals.
            codes.push("0".to_owned());
            old = Self::PLAIN;
            let known = [(Modifier::UNDERLINED, "4"), (Modifier::REVERSED, "7")];
            let set = known.iter().filter(|(modifier, _)| new.modifier.contains(*modifier));
            codes.extend(set.map(|(_, code)| (*code).to_owned()));
        }
        if old.fg != new.fg {
            if is_bright(old.fg) && !is_bright(new.fg) {
                codes.push("22".to_owned());
            }
            codes.push(name(new.fg, 0));
        }
        if old.bg != new.bg {
            codes.push(name(new.bg, BACKGROUND));
        }
        let _never = write!(text, "\x1b[{}m", codes.join(";"));
    }
}

/// The code of a colour, of the foreground or of the background.
fn name(color: Color, ground: u8) -> String {
    match (color, sixteenth(color)) {
        (Color::Indexed(number), _) => format!("{};5;{number}", 38 + ground),
        (Color::Rgb(red, green, blue), _) => format!("{};2;{red};{green};{blue}", 38 + ground),
        (_, Some(number @ 0..8)) => (DARK + ground + number).to_string(),
        (_, Some(number)) => (BRIGHT + ground + number - 8).to_string(),
        (_, None) => (39 + ground).to_string(),
    }
}

fn is_bright(color: Color) -> bool {
    sixteenth(color).is_some_and(|number| number >= 8)
}

/// Which of the sixteen colours it is, the bright ones last.
fn sixteenth(color: Color) -> Option<u8> {
    Some(match color {
        Color::Black => 0,
        Color::Red => 1,
        Color::Green => 2,
        Color::Yellow => 3,
        Color::Blue => 4,
        Color::Magenta => 5,
        Color::Cyan => 6,
        Color::Gray => 7,
        Color::DarkGray => 8,
        Color::LightRed => 9,
        Color::LightGreen => 10,
        Color::LightYellow => 11,
        Color::LightBlue => 12,
        Color::LightMagenta => 13,
        Color::LightCyan => 14,
        Color::White => 15,
        Color::Reset | Color::Rgb(..) | Color::Indexed(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(glyph: char, fg: Color) -> Shown {
        Shown { glyph, fg, bg: Color::Blue, modifier: Modifier::empty() }
    }

    #[test]
    fn the_second_that_goes_by_costs_two_writes_of_a_hypervisor_s_console() {
        let seconds = [(32, 1, cell('2', Color::White)), (74, 1, cell('2', Color::White))];
        let text = encode(&seconds);
        assert_eq!(text, "\x1b[2;33H\x1b[97;44m2\x1b[2;75H2\x1b[m");
        assert!(text.len() <= 32);
    }

    #[test]
    fn neighbours_need_no_move_and_a_new_row_does() {
        let gray = |glyph| cell(glyph, Color::Gray);
        let text = encode(&[(0, 0, gray('a')), (1, 0, gray('b')), (0, 1, gray('c'))]);
        assert_eq!(text, "\x1b[1;1H\x1b[37;44mab\x1b[2;1Hc\x1b[m");
    }

    #[test]
    fn a_bright_colour_is_ended_before_a_dark_one() {
        let cells = [Color::LightRed, Color::Red, Color::White, Color::LightRed];
        let cells: Vec<_> =
            cells.into_iter().zip(0..).map(|(fg, x)| (x, 0, cell('x', fg))).collect();
        assert_eq!(encode(&cells), "\x1b[1;1H\x1b[91;44mx\x1b[22;31mx\x1b[97mx\x1b[91mx\x1b[m");
    }

    #[test]
    fn a_cursor_of_the_page_is_reversed_and_ends() {
        let mut reversed = cell('x', Color::Gray);
        reversed.modifier = Modifier::REVERSED;
        let cells =
            [(0, 0, cell('x', Color::Gray)), (1, 0, reversed), (2, 0, cell('x', Color::Gray))];
        let text = "\x1b[1;1H\x1b[37;44mx\x1b[0;7;37;44mx\x1b[0;37;44mx\x1b[m";
        assert_eq!(encode(&cells), text);
    }

    #[test]
    fn nothing_is_no_bytes_and_every_colour_has_a_code() {
        assert_eq!(encode(&[]), "");
        assert_eq!(name(Color::Reset, BACKGROUND), "49");
        assert_eq!(name(Color::LightYellow, BACKGROUND), "103");
        assert_eq!(name(Color::Indexed(200), 0), "38;5;200");
        assert_eq!(name(Color::Rgb(1, 2, 3), BACKGROUND), "48;2;1;2;3");
    }
}
