//! Prints every screen in colour, one below the other: for the eyes of whoever changes one.
//!
//! `cargo run -p polis-tui --features samples --example gallery [COLUMNS ROWS]`

use std::io::{self, Write};

use polis_tui::guru::{self, Guru};
use polis_tui::ratatui::backend::TestBackend;
use polis_tui::ratatui::buffer::Buffer;
use polis_tui::ratatui::style::{Color, Modifier};
use polis_tui::ratatui::{Frame, Terminal};
use polis_tui::{Key, Page, Snapshot, View, render, samples};

fn main() -> io::Result<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|number| number.parse().ok());
    let (columns, rows) = (numbers.next().unwrap_or(80), numbers.next().unwrap_or(24));
    let screen = |draw: &dyn Fn(&mut Frame<'_>)| {
        let mut terminal =
            Terminal::new(TestBackend::new(columns, rows)).map_err(io::Error::other)?;
        terminal.draw(draw).map_err(io::Error::other)?;
        print(terminal.backend().buffer())
    };
    let snapshots: [Snapshot; 4] =
        [samples::empty(), samples::ordinary(), samples::failing(), samples::overflowing()];
    for snapshot in &snapshots {
        for (_, number) in Page::ALL.iter().zip(1..) {
            let mut view = View::new(columns, rows);
            view.key(Key::F(number), snapshot);
            screen(&|frame| render(snapshot, &view, frame))?;
        }
    }
    let gurus: [Guru; 2] = [samples::guru(), samples::guru_overflowing()];
    for guru in &gurus {
        screen(&|frame| guru::render(guru, &guru::View::new(columns, rows), true, frame))?;
    }
    Ok(())
}

fn print(buffer: &Buffer) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for row in buffer.content().chunks(usize::from(buffer.area.width).max(1)) {
        for cell in row {
            let bold = if cell.modifier.contains(Modifier::BOLD) { ";1" } else { "" };
            let (front, back) = (number(cell.fg, "39", "38;5"), number(cell.bg, "49", "48;5"));
            write!(out, "\x1b[0{bold};{front};{back}m{}", cell.symbol())?;
        }
        writeln!(out, "\x1b[0m")?;
    }
    writeln!(out)
}

fn number(color: Color, none: &str, prefix: &str) -> String {
    let number = match color {
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
        Color::LightYellow => 11,
        Color::White => 15,
        _ => return none.to_owned(),
    };
    format!("{prefix};{number}")
}
