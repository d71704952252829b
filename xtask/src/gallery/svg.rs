//! Draws a screen as an SVG that looks alike everywhere.
//!
//! The font of the viewer is unknown. So only letters are text, each run of them stretched
//! to its cells; bars, boxes and marks are shapes, which meet without gaps as they do on a
//! console. The crate `anstyle-svg` is not used: it reads a stream of escape sequences, not
//! cells, and writes lines of text in whatever font the viewer has.

use std::fmt::Write as _;

use polis_tui::ratatui::buffer::{Buffer, Cell};
use polis_tui::ratatui::style::{Color, Modifier};

/// A cell in units of the picture, and where letters stand in it.
const WIDTH: usize = 9;
const HEIGHT: usize = 18;
const BASELINE: usize = 14;

/// Around the screen.
const MARGIN: usize = 9;

/// The colours of the Linux console as ours has them, from black to white.
const COLORS: [&str; 16] = [
    "#000000", "#aa0000", "#00aa00", "#aa5500", "#0000aa", "#aa00aa", "#00aaaa", "#aaaaaa",
    "#858585", "#ff5555", "#55ff55", "#ffff55", "#5555ff", "#ff55ff", "#55ffff", "#ffffff",
];
const GRAY: usize = 7;
const BRIGHT: usize = 8;

/// The style of a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Look {
    front: usize,
    back: usize,
    bold: bool,
}

/// The picture of `buffer`.
pub(super) fn draw(buffer: &Buffer) -> String {
    let columns = usize::from(buffer.area.width).max(1);
    let rows = usize::from(buffer.area.height);
    let (width, height) = (columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-size=\"15\" \
         font-family=\"'DejaVu Sans Mono','Menlo','Consolas',monospace\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"#000000\"/>\n\
         <g transform=\"translate({MARGIN} {MARGIN})\">\n"
    );
    for (row, cells) in buffer.content().chunks(columns).enumerate() {
        let y = row * HEIGHT;
        for (start, run) in runs(cells, |cell| look(cell).back) {
            let back = look(&run[0]).back;
            if back != 0 {
                rect(&mut svg, start * WIDTH, y, run.len() * WIDTH, HEIGHT, back, "");
            }
        }
        let kind = |cell: &Cell| (look(cell), shape(cell.symbol()));
        for (start, run) in runs(cells, kind) {
            let (look, shape) = kind(&run[0]);
            match shape {
                Shape::Space => {}
                Shape::Glyph(glyph) => shapes(&mut svg, glyph, start, run.len(), y, look.front),
                Shape::Letter => words(&mut svg, run, start, y, look),
            }
        }
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

/// A run of equal cells, with the column of the first.
fn runs<K: PartialEq>(cells: &[Cell], key: impl Fn(&Cell) -> K) -> Vec<(usize, &[Cell])> {
    let mut column = 0;
    let mut runs = Vec::new();
    for run in cells.chunk_by(|one, other| key(one) == key(other)) {
        runs.push((column, run));
        column += run.len();
    }
    runs
}

fn look(cell: &Cell) -> Look {
    let bold = cell.modifier.contains(Modifier::BOLD);
    let mut front = number(cell.fg).unwrap_or(GRAY);
    let mut back = number(cell.bg).unwrap_or(0);
    if bold && front < BRIGHT {
        // On the Linux console bold is bright, and nothing else.
        front += BRIGHT;
    }
    if cell.modifier.contains(Modifier::REVERSED) {
        (front, back) = (back, front.min(GRAY));
    }
    Look { front, back, bold }
}

fn number(color: Color) -> Option<usize> {
    let all = [
        Color::Black,
        Color::Red,
        Color::Green,
        Color::Yellow,
        Color::Blue,
        Color::Magenta,
        Color::Cyan,
        Color::Gray,
        Color::DarkGray,
        Color::LightRed,
        Color::LightGreen,
        Color::LightYellow,
        Color::LightBlue,
        Color::LightMagenta,
        Color::LightCyan,
        Color::White,
    ];
    all.iter().position(|known| *known == color)
}

/// The content of a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Space,
    Letter,
    Glyph(char),
}

fn shape(symbol: &str) -> Shape {
    match symbol.chars().next() {
        None | Some(' ') => Shape::Space,
        Some(glyph) if "─│┌┐└┘├┤┬┴┼░▒▓█▄▌▐▀■►◄▲▼•·".contains(glyph) => {
            Shape::Glyph(glyph)
        }
        Some(_) => Shape::Letter,
    }
}

fn words(svg: &mut String, run: &[Cell], start: usize, y: usize, look: Look) {
    let text: String = run.iter().map(Cell::symbol).collect();
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let weight = if look.bold { " font-weight=\"bold\"" } else { "" };
    let _infallible = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\" \
         fill=\"{}\"{weight}>{text}</text>",
        start * WIDTH,
        y + BASELINE,
        run.len() * WIDTH,
        COLORS[look.front],
    );
}

fn rect(
    svg: &mut String,
    x: usize,
    y: usize,
    width: usize,
    height: usize,
    color: usize,
    more: &str,
) {
    let _infallible = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{}\"{more}/>",
        COLORS[color]
    );
}

/// `count` times the same glyph, side by side.
fn shapes(svg: &mut String, glyph: char, start: usize, count: usize, y: usize, color: usize) {
    let (x, width) = (start * WIDTH, count * WIDTH);
    let half = HEIGHT / 2;
    match glyph {
        '█' => rect(svg, x, y, width, HEIGHT, color, ""),
        '▄' => rect(svg, x, y + half, width, half, color, ""),
        '▀' => rect(svg, x, y, width, half, color, ""),
        '░' => rect(svg, x, y, width, HEIGHT, color, " fill-opacity=\"0.25\""),
        '▒' => rect(svg, x, y, width, HEIGHT, color, " fill-opacity=\"0.5\""),
        '▓' => rect(svg, x, y, width, HEIGHT, color, " fill-opacity=\"0.75\""),
        '─' => rect(svg, x, y + half, width, 1, color, ""),
        _ => {
            for cell in 0..count {
                one(svg, glyph, (start + cell) * WIDTH, y, color);
            }
        }
    }
}

fn one(svg: &mut String, glyph: char, x: usize, y: usize, color: usize) {
    let (mid_x, mid_y) = (x + WIDTH / 2, y + HEIGHT / 2);
    let (right, bottom) = (x + WIDTH, y + HEIGHT);
    let polygon = |svg: &mut String, points: String| {
        let _infallible =
            writeln!(svg, "<polygon points=\"{points}\" fill=\"{}\"/>", COLORS[color]);
    };
    // Which arms of a box a glyph has: up, down, left, right.
    let arms = match glyph {
        '│' => Some([true, true, false, false]),
        '┌' => Some([false, true, false, true]),
        '┐' => Some([false, true, true, false]),
        '└' => Some([true, false, false, true]),
        '┘' => Some([true, false, true, false]),
        '├' => Some([true, true, false, true]),
        '┤' => Some([true, true, true, false]),
        '┬' => Some([false, true, true, true]),
        '┴' => Some([true, false, true, true]),
        '┼' => Some([true, true, true, true]),
        _ => None,
    };
    if let Some([up, down, left, to_right]) = arms {
        let top = if up { y } else { mid_y };
        let end = if down { bottom } else { mid_y + 1 };
        rect(svg, mid_x, top, 1, end - top, color, "");
        let first = if left { x } else { mid_x };
        let last = if to_right { right } else { mid_x + 1 };
        rect(svg, first, mid_y, last - first, 1, color, "");
        return;
    }
    match glyph {
        '▌' => rect(svg, x, y, WIDTH / 2, HEIGHT, color, ""),
        '▐' => rect(svg, mid_x, y, right - mid_x, HEIGHT, color, ""),
        '■' => rect(svg, x + 1, mid_y - 3, 7, 7, color, ""),
        '•' => rect(svg, mid_x - 1, mid_y - 1, 4, 4, color, " rx=\"2\""),
        '·' => rect(svg, mid_x, mid_y, 2, 2, color, ""),
        '►' => polygon(svg, format!("{x},{} {x},{} {right},{mid_y}", mid_y - 5, mid_y + 5)),
        '◄' => polygon(svg, format!("{right},{} {right},{} {x},{mid_y}", mid_y - 5, mid_y + 5)),
        '▲' => {
            let (base, tip) = (mid_y + 4, mid_y - 5);
            polygon(svg, format!("{x},{base} {right},{base} {mid_x},{tip}"));
        }
        '▼' => {
            let (base, tip) = (mid_y - 4, mid_y + 5);
            polygon(svg, format!("{x},{base} {right},{base} {mid_x},{tip}"));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use polis_tui::ratatui::layout::Rect;
    use polis_tui::ratatui::style::Style;

    use super::*;

    #[test]
    fn letters_are_text_and_bars_are_shapes() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 8, 1));
        buffer.set_string(0, 0, "a<b ▄▄", Style::new().fg(Color::Green));
        let svg = draw(&buffer);
        assert!(
            svg.contains("textLength=\"27\"") && svg.contains("fill=\"#00aa00\">a&lt;b</text>")
        );
        assert!(
            svg.contains("<rect x=\"36\" y=\"9\" width=\"18\" height=\"9\" fill=\"#00aa00\"/>")
        );
        assert!(!svg.contains('▄'));
    }
}
