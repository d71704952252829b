//! Remembers what a person looks at: the page, how far it is scrolled, the filter.
//!
//! A view is all the state that the console has. Keys change it, snapshots never
//! do, so two people at two terminals look at two views of one snapshot.
//!
//! ```text
//! Logs:  [following] --scrolled up--> [paused: a copy of the entries]
//!             ^------ end reached, or another severity ------/
//! ```
//!
//! Invariants:
//! - Text that a person reads does not move: scrolling up in the logs keeps a
//!   copy, whatever arrives or falls out meanwhile.
//! - A view never points past the end of what it shows.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::pages::{self, Content};
use crate::snapshot::{Logs, Severity};
use crate::theme::DIM;
use crate::widgets::window;
use crate::{Command, Key, Snapshot};

/// A page of the console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Page {
    /// Is it up? What is it waiting for?
    #[default]
    Boot,
    /// Would the cluster survive the loss of a member?
    Etcd,
    /// What ends soon?
    Pki,
    /// What died, why, how often?
    Services,
    /// What was said?
    Logs,
}

impl Page {
    /// All pages, in the order of their function keys.
    pub const ALL: [Self; 5] = [Self::Boot, Self::Etcd, Self::Pki, Self::Services, Self::Logs];

    /// What the page is called.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Boot => "Boot",
            Self::Etcd => "etcd",
            Self::Pki => "PKI",
            Self::Services => "Services",
            Self::Logs => "Logs",
        }
    }

    /// The page of function key `number`, from 1.
    fn of_key(number: usize) -> Option<Self> {
        Self::ALL.get(number.checked_sub(1)?).copied()
    }

    /// The page `steps` further on, past the last one to the first.
    fn step(self, steps: usize) -> Self {
        Self::ALL[(self as usize + steps) % Self::ALL.len()]
    }
}

/// What a person looks at.
#[derive(Clone, Debug, Default)]
pub struct View {
    page: Page,
    help: bool,
    size: Rect,
    /// The first line shown of each page's scrolled part.
    tops: [usize; Page::ALL.len()],
    severity: Severity,
    paused: Option<Logs>,
}

impl View {
    /// A view of the Boot page on a terminal of `columns` × `rows`.
    #[must_use]
    pub fn new(columns: u16, rows: u16) -> Self {
        let mut view = Self { severity: Severity::Info, ..Self::default() };
        view.resize(columns, rows);
        view
    }

    /// The terminal has another size: pages scroll by what fits on it.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        self.size = Rect::new(0, 0, columns, rows);
    }

    /// The open page.
    #[must_use]
    pub fn page(&self) -> Page {
        self.page
    }

    /// Takes in a key; returns what the owner of the terminal must do about it.
    pub fn key(&mut self, key: Key, snapshot: &Snapshot) -> Option<Command> {
        match key {
            Key::Ctrl('l') => return Some(Command::Redraw),
            Key::Cursor { .. } => {}
            // Whatever is pressed over the help was meant to make it go away.
            _ if self.help => self.help = false,
            Key::Char('?') => self.help = true,
            Key::F(number) => self.open(Page::of_key(usize::from(number))),
            Key::Char(digit @ '1'..='9') => {
                self.open(digit.to_digit(10).and_then(|number| Page::of_key(number as usize)));
            }
            Key::Tab | Key::Right => self.page = self.page.step(1),
            Key::BackTab | Key::Left => self.page = self.page.step(Page::ALL.len() - 1),
            Key::Char('s') if self.page == Page::Logs => {
                self.severity = match self.severity {
                    Severity::Debug => Severity::Info,
                    Severity::Info => Severity::Warning,
                    Severity::Warning => Severity::Error,
                    Severity::Error | Severity::Fatal => Severity::Debug,
                };
                self.paused = None;
            }
            _ => self.scroll(key, snapshot),
        }
        None
    }

    fn open(&mut self, page: Option<Page>) {
        self.page = page.unwrap_or(self.page);
    }

    fn scroll(&mut self, key: Key, snapshot: &Snapshot) {
        let area = Areas::of(self.size).body;
        let content = self.content(snapshot, area);
        let rows = area.height - content.head_rows(area.height);
        let end = window::end(content.body.len(), rows);
        let page = usize::from(rows.saturating_sub(1).max(1));
        let top = self.top(end);
        let top = match key {
            Key::Up => top.saturating_sub(1),
            Key::Down => top + 1,
            Key::PageUp => top.saturating_sub(page),
            Key::PageDown => top + page,
            Key::Home => 0,
            Key::End => end,
            _ => return,
        };
        self.tops[self.page as usize] = top.min(end);
        if self.page == Page::Logs && top < end {
            self.paused.get_or_insert_with(|| snapshot.logs.clone());
        } else if self.page == Page::Logs {
            self.paused = None;
        }
    }

    /// The first line to show of a part that can be scrolled down to `end`.
    fn top(&self, end: usize) -> usize {
        let follows = self.page == Page::Logs && self.paused.is_none();
        if follows { end } else { self.tops[self.page as usize].min(end) }
    }

    fn content(&self, snapshot: &Snapshot, area: Rect) -> Content {
        // The last column is the scroll bar's, the one before keeps it apart.
        let width = usize::from(area.width.saturating_sub(2));
        match self.page {
            Page::Boot => pages::boot::content(snapshot, width),
            Page::Etcd => pages::etcd::content(snapshot, width),
            Page::Pki => pages::pki::content(snapshot, width),
            Page::Services => pages::services::content(snapshot, width),
            Page::Logs => {
                pages::logs::content(&snapshot.logs, self.paused.as_ref(), self.severity, width)
            }
        }
    }

    pub(crate) fn helps(&self) -> bool {
        self.help
    }

    /// Draws the open page.
    pub(crate) fn draw(&self, snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
        let content = self.content(snapshot, area);
        let rows = content.head_rows(area.height);
        let head = Rect { height: rows, ..area };
        let body = Rect { y: area.y + rows, height: area.height - rows, ..area };
        for (line, y) in content.head.iter().zip(head.top()..head.bottom()) {
            buffer.set_line(head.x, y, line, head.width);
        }
        let end = window::end(content.body.len(), body.height);
        window::draw(&content.body, self.top(end), body, DIM, buffer);
    }
}

/// How a terminal is shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Areas {
    pub(crate) header: Rect,
    pub(crate) body: Rect,
    pub(crate) keys: Rect,
}

impl Areas {
    /// A small terminal gives up air first, then the second row of the header.
    pub(crate) fn of(area: Rect) -> Self {
        let (header, air) = match area.height {
            0..8 => (1, 0),
            8..16 => (2, 0),
            _ => (2, 1),
        };
        let header = area.height.min(header);
        let keys = u16::from(area.height > header);
        let left = area.height - header - keys;
        let air = left.min(air);
        let margin = area.width.min(1);
        let row = |y, height| Rect { y: area.y + y, height, ..area };
        Self {
            header: row(0, header),
            body: Rect {
                x: area.x + margin,
                width: area.width - margin,
                ..row(header + air, left - air)
            },
            keys: row(area.height - keys, keys),
        }
    }
}
