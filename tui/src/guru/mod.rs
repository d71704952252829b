//! The guru meditation: shows why this machine cannot go on, and what a person can do.
//!
//! `init` draws it after the trapdoor has opened, on every terminal that shows
//! the console. The whole screen is red on black inside a border that blinks;
//! the caller turns `phase` over twice a second, so the border blinks alike on
//! terminals with and without an attribute for it.
//!
//! ```text
//! [report] --L--> [logs] --L, Esc--> [report]
//!    any   --U, where the disk is locked--> [prompt] --Enter--> Command::Unlock
//!                                              \--Esc--> as before
//! ```
//!
//! Invariants:
//! - A key that is being typed does nothing else: no `R` in it reboots.
//! - The code, the next step, the keys and the countdown are on the screen from 80 × 24
//!   on, however long the rest is. A block that had to be cut shows that, and `L` shows
//!   all of it.
//! - The code, every key and what comes without one are on the screen from 40 × 12 on.
//! - Nothing that is absent leaves a gap in a sentence.
//!
//! What this module does not do: count down or act. Keys become commands.

mod foot;
mod prompt;
mod report;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use zeroize::Zeroizing;

use self::foot::foot;
use self::prompt::{Prompt, asking};
use self::report::{everything, report};
use crate::text::{clean, cut};
use crate::widgets::{Row, row, window};
use crate::{Command, Key};

/// Everything that the guru meditation shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guru {
    /// The stable code, `#SSCC.DDDD`.
    pub code: String,
    /// The stage that failed.
    pub stage: String,
    /// The failure first, then what caused it, the root last.
    pub causes: Vec<String>,
    /// The attempts before giving up.
    pub tried: Vec<String>,
    /// The next step of the person in front of the machine.
    pub next: String,
    /// The last log lines, the newest last; at most [`LOG_MAX`] are shown.
    pub log: Vec<String>,
    /// The version of the system.
    pub version: String,
    /// The image that it was started from.
    pub image: String,
    /// Which boot in a row this is that failed, from 1.
    pub attempt: u32,
    /// How many of them may fail before the machine holds.
    pub attempts_max: u32,
    /// The effect if no key is pressed.
    pub countdown: Countdown,
    /// Whether the recovery key of the disk would help.
    pub unlock: bool,
    /// The command by which this machine is reached over the network; empty while it is not.
    pub maintenance: String,
}

/// The effect if no key is pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Countdown {
    /// The machine reboots by itself.
    Reboot {
        /// Seconds until then.
        seconds: u32,
    },
    /// Nothing, because a person asked for it.
    Held,
    /// Nothing, because too many boots in a row have failed.
    Exhausted,
    /// Nothing, because it cannot be counted how many have failed.
    Uncounted,
}

impl Default for Countdown {
    fn default() -> Self {
        Self::Reboot { seconds: 0 }
    }
}

/// Lines that are shown of the log: what `init` keeps.
pub const LOG_MAX: usize = 200;

/// The parts that must be readable on a photograph of the screen: the code, the failure,
/// the next step.
const STRONG: Style = Style::new().fg(Color::White).bg(Color::Black).add_modifier(Modifier::BOLD);
const TEXT: Style = Style::new().fg(Color::Gray).bg(Color::Black);
/// Headings, and what leads a line.
const TITLE: Style = Style::new().fg(Color::LightRed).bg(Color::Black);
/// The border and the scroll bar, and no text: on black it cannot be read at night.
const FRAME: Style = Style::new().fg(Color::Red).bg(Color::Black);

/// More columns and rows than these are air around the text: a reader does not find the
/// next line at the end of two hundred letters, nor the keys a screen below the text
/// that they act on.
const TEXT_MAX: (u16, u16) = (120, 48);

/// Rows of a screen from which on there is room for an empty one after the head.
const ROWS_FOR_AIR: u16 = 16;

/// The way to all of a part that was cut, and that while `L` would be a letter of a key.
const MORE: &str = ".. press L for all";
const MORE_BEHIND_PROMPT: &str = ".. press Esc, then L for all";

/// The view of a person: the report, or the logs and how far down, and the text that
/// they type.
#[derive(Clone, Debug, Default)]
pub struct View {
    logs: bool,
    top: usize,
    size: Rect,
    prompt: Option<Prompt>,
}

impl View {
    /// A view of the report on a terminal of `columns` × `rows`.
    #[must_use]
    pub fn new(columns: u16, rows: u16) -> Self {
        Self { size: Rect::new(0, 0, columns, rows), ..Self::default() }
    }

    /// The terminal has another size.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.size = Rect::new(0, 0, columns, rows);
    }

    /// Takes a key; returns what the owner of the terminal must do about it.
    pub fn key(&mut self, key: Key, guru: &Guru) -> Option<Command> {
        if self.prompt.is_some() {
            return self.type_key(key);
        }
        let Areas { body, .. } = Areas::of(self.size);
        let end = || window::end(everything(guru, text_width(body)).len(), body.height);
        let page = usize::from(body.height.saturating_sub(1).max(1));
        let top = match key {
            Key::Char('r' | 'R') => return Some(Command::Reboot),
            Key::Char('p' | 'P') => return Some(Command::PowerOff),
            Key::Char('h' | 'H') => return Some(Command::Hold),
            Key::Char('u' | 'U') if guru.unlock => {
                self.prompt = Some(Prompt::new());
                // Typing takes longer than the countdown may.
                return Some(Command::Hold);
            }
            Key::Ctrl('l') => return Some(Command::Redraw),
            Key::Char('l' | 'L') => {
                self.logs = !self.logs;
                end()
            }
            Key::Esc => {
                self.logs = false;
                return None;
            }
            Key::Up => self.top.saturating_sub(1),
            Key::Down => self.top + 1,
            Key::PageUp => self.top.saturating_sub(page),
            Key::PageDown => self.top + page,
            Key::Home => 0,
            Key::End => end(),
            _ => return None,
        };
        self.top = top.min(end());
        None
    }

    /// A key while a recovery key is typed: letters are letters now.
    fn type_key(&mut self, key: Key) -> Option<Command> {
        let prompt = self.prompt.as_mut()?;
        match key {
            Key::Char(c) => prompt.put(c),
            Key::Backspace => drop(prompt.0.pop()),
            Key::Ctrl('u') => prompt.0.clear(),
            Key::Ctrl('l') => return Some(Command::Redraw),
            Key::Esc | Key::Ctrl('c') => self.prompt = None,
            Key::Enter if !prompt.0.trim().is_empty() => return Some(Command::Unlock),
            _ => {}
        }
        None
    }

    /// How many characters of a recovery key are typed, while the screen asks for one.
    #[must_use]
    pub fn asks(&self) -> Option<usize> {
        self.prompt.as_ref().map(|prompt| prompt.0.len())
    }

    /// The recovery key that was typed; read after [`Command::Unlock`].
    pub fn take_typed(&mut self) -> Option<Zeroizing<String>> {
        self.prompt.take().map(|prompt| prompt.0)
    }
}

/// Paints the whole screen; `phase` turns over to make the border blink.
pub fn render(guru: &Guru, view: &View, phase: bool, buffer: &mut Buffer) {
    let area = buffer.area;
    let mut areas = Areas::of(area);
    fill(area, if phase { "█" } else { " " }, FRAME, buffer);
    fill(areas.inside, " ", TEXT, buffer);
    let width = text_width(areas.body);
    put(&head(guru, width), areas.head, buffer);
    let columns = usize::from(areas.foot.width);
    let foot = match &view.prompt {
        Some(prompt) => {
            let foot = asking(prompt, columns, usize::from(areas.body.height + areas.foot.height));
            areas.grow_foot(foot.len());
            foot
        }
        None => foot(guru, view, columns, usize::from(areas.foot.height)),
    };
    if view.logs {
        window::draw(&everything(guru, width), view.top, 0, areas.body, FRAME, buffer);
    } else {
        let more = if view.prompt.is_some() { MORE_BEHIND_PROMPT } else { MORE };
        put(&report(guru, width, usize::from(areas.body.height), more), areas.body, buffer);
    }
    // The last of them matter most.
    let rows = usize::from(areas.foot.height);
    put(&foot[foot.len().saturating_sub(rows)..], areas.foot, buffer);
}

/// How the screen is shared out.
struct Areas {
    inside: Rect,
    head: Rect,
    body: Rect,
    foot: Rect,
}

impl Areas {
    /// A border of one row and two columns looks equally thick on all sides.
    fn of(area: Rect) -> Self {
        let inside = if area.width >= 20 && area.height >= 8 { inset(area, 2, 1) } else { area };
        let text = inset(inside, 2.min(inside.width / 8), u16::from(inside.height >= 28));
        let text = inset(
            text,
            text.width.saturating_sub(TEXT_MAX.0) / 2,
            text.height.saturating_sub(TEXT_MAX.1) / 2,
        );
        let foot = 3.min(text.height);
        let head = if area.height >= ROWS_FOR_AIR { 3 } else { 2 };
        let head = head.min(text.height - foot);
        let body = text.height - foot - head;
        Self {
            inside,
            head: Rect { height: head, ..text },
            body: Rect { y: text.y + head, height: body, ..text },
            foot: Rect { y: text.y + head + body, height: foot, ..text },
        }
    }

    /// Gives the foot so many rows, as far as the body has them.
    fn grow_foot(&mut self, rows: usize) {
        let rows = u16::try_from(rows).unwrap_or(u16::MAX);
        let more = rows.saturating_sub(self.foot.height).min(self.body.height);
        self.body.height -= more;
        self.foot.y -= more;
        self.foot.height += more;
    }
}

/// `area` without so many columns and rows on each side; it is large enough.
fn inset(area: Rect, columns: u16, rows: u16) -> Rect {
    Rect {
        x: area.x + columns,
        y: area.y + rows,
        width: area.width - 2 * columns,
        height: area.height - 2 * rows,
    }
}

/// Columns for text: the scroll bar and one that keeps it apart are not.
fn text_width(area: Rect) -> usize {
    usize::from(area.width.saturating_sub(2))
}

fn fill(area: Rect, glyph: &str, style: Style, buffer: &mut Buffer) {
    for position in area.positions() {
        buffer[position].set_symbol(glyph).set_style(style);
    }
}

fn put(lines: &[Line<'_>], area: Rect, buffer: &mut Buffer) {
    for (line, y) in lines.iter().zip(area.top()..area.bottom()) {
        row::draw(line, area.x, y, area.width, buffer);
    }
}

/// Cells of the sentence around the name of a stage: `Stage "" failed.`
const STAGE: usize = 16;

/// The first two rows: the code to search for, and what was started from what.
fn head(guru: &Guru, width: usize) -> Vec<Line<'static>> {
    let first = Row::default().put(TITLE, "GURU MEDITATION  ").put(STRONG, &guru.code).gap(2);
    let left = width.saturating_sub(first.used());
    let polis = format!("Polis {}", clean(&guru.version));
    let whole = match (guru.version.as_str(), guru.image.as_str()) {
        ("", _) => String::new(),
        (_, "") => polis.clone(),
        (_, image) => format!("{polis}, image {}", clean(image)),
    };
    // The start of an image's name does not identify an image.
    let fits = |text: &String| crate::text::width(text) < left;
    let version = [whole, polis].into_iter().find(fits).unwrap_or_default();
    let stage = clean(&guru.stage);
    let what = match &*stage {
        "" => vec!["This machine stopped.".to_owned()],
        stage => vec![
            format!("This machine stopped: stage \"{stage}\" failed."),
            format!("Stage \"{stage}\" failed."),
            // Of a name without room, the sentence keeps its end.
            format!("Stage \"{}\" failed.", cut(stage, width.saturating_sub(STAGE))),
        ],
    };
    let what = shortest_that_fits(what, width);
    vec![first.right(left, TITLE, &version).line(), Row::default().put(TEXT, &what).line()]
}

/// The first of `texts` that fits, or as much of the last one as does.
fn shortest_that_fits(texts: Vec<String>, width: usize) -> String {
    let last = texts.last().map(|text| cut(text, width)).unwrap_or_default();
    texts.into_iter().find(|text| crate::text::width(text) <= width).unwrap_or(last)
}
