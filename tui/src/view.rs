//! The view of a person: the page, the scroll position, the folds, the filter.
//!
//! A view is all the state that the console has. Keys change it, snapshots never
//! do, so two people at two terminals look at two views of one snapshot.
//!
//! ```text
//! Logs:  [following] --scrolled up--> [paused: a copy of the entries]
//!             ^------ end reached, or another filter --------/
//! Over a page:  [nothing] --?--> [help] --any key--> [nothing]
//!                   \--F10--> [power menu, see `power`]
//! ```
//!
//! Invariants:
//! - Text that a person reads does not move: scrolling up in the logs keeps a copy, even while
//!   entries arrive or fall out.
//! - A view never points past the end of its content.

use std::sync::Arc;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;

use crate::page::Page;
use crate::pages::filter::Filter;
use crate::pages::logs::Of;
use crate::pages::services::{Step, Tree};
use crate::pages::{self, Content};
use crate::power::Menu;
use crate::prompt::{For, Outcome, Prompt};
use crate::snapshot::{Logs, Severity};
use crate::theme::{DIM, STRONG};
use crate::widgets::{Row, row, window};
use crate::{Command, Key, Snapshot, header, help};

/// A picture that stood for so long may have been read. A text that is pasted, or
/// echoed, comes in pieces, with pictures between them: no piece is as slow as this.
pub const READ: Duration = Duration::from_millis(300);

/// The dialog over the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Over {
    #[default]
    Nothing,
    Help,
    Power(Menu),
}

/// The view of a person.
#[derive(Clone, Debug, Default)]
pub struct View {
    page: Page,
    over: Over,
    /// Whether the dialog over the page stood there for long enough.
    seen: bool,
    size: Rect,
    leaves: bool,
    /// The first line shown of each page's scrolled part.
    tops: [usize; Page::ALL.len()],
    tree: Tree,
    /// Whether every stage of the boot is shown, however little room there is.
    unfolded: bool,
    filter: Filter,
    prompt: Option<Prompt>,
    paused: Option<Arc<Logs>>,
}

impl View {
    /// A view of the Boot page on a terminal of `columns` × `rows`.
    #[must_use]
    pub fn new(columns: u16, rows: u16) -> Self {
        let mut view = Self::default();
        view.resize(columns, rows);
        view
    }

    /// The same for a console that can be left: [`Command::Leave`].
    #[must_use]
    pub fn that_can_be_left(mut self) -> Self {
        self.leaves = true;
        self
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

    /// The terminal showed for [`READ`] what this view shows, and no key came
    /// meanwhile: see [`View::key`].
    pub fn was_read(&mut self) {
        self.seen = true;
    }

    /// Takes a key; returns what the owner of the terminal must do about it. The code that draws
    /// calls [`View::was_read`], or no confirmation counts.
    pub fn key(&mut self, key: Key, snapshot: &Snapshot) -> Option<Command> {
        match key {
            Key::Ctrl('l') => return Some(Command::Redraw),
            Key::Cursor { .. } => return None,
            _ => {}
        }
        if let Over::Power(menu) = self.over {
            let (menu, command) = menu.key(key, self.seen);
            let over = menu.map_or(Over::Nothing, Over::Power);
            self.seen &= over == self.over;
            self.over = over;
            return command;
        }
        // Any key pressed over the help closes it.
        if self.over == Over::Help {
            self.over = Over::Nothing;
            return None;
        }
        if let Some(mut prompt) = self.prompt.take() {
            let outcome = prompt.key(key);
            match prompt.what {
                For::Search => self.filter.text.clone_from(&prompt.text),
                For::Below => self.filter.below(&prompt.text),
            }
            self.paused = None;
            if matches!(outcome, Outcome::Typing) {
                self.prompt = Some(prompt);
            }
            return None;
        }
        match key {
            Key::Char('?') => self.over = Over::Help,
            Key::F(10) | Key::Char('P') => {
                (self.over, self.seen) = (Over::Power(Menu::Choose), false);
            }
            Key::Char('q') | Key::Ctrl('c') if self.leaves => return Some(Command::Leave),
            Key::F(number) => self.open(Page::of_key(usize::from(number))),
            Key::Char(digit @ '1'..='9') => {
                self.open(digit.to_digit(10).and_then(|number| Page::of_key(number as usize)));
            }
            Key::Tab | Key::Right => self.page = self.page.step(1),
            Key::BackTab | Key::Left => self.page = self.page.step(Page::ALL.len() - 1),
            _ => match self.page {
                Page::Services => self.service_key(key, snapshot),
                Page::Logs => self.log_key(key, snapshot),
                Page::Boot if matches!(key, Key::Enter | Key::Char(' ')) => {
                    self.unfolded = !self.unfolded;
                }
                Page::Boot
                | Page::Cluster
                | Page::Etcd
                | Page::Pki
                | Page::Network
                | Page::Workloads => {
                    self.scroll(key, snapshot);
                }
            },
        }
        None
    }

    fn open(&mut self, page: Option<Page>) {
        self.page = page.unwrap_or(self.page);
    }

    fn service_key(&mut self, key: Key, snapshot: &Snapshot) {
        let services = &snapshot.services;
        // So many rows further, with some of them for causes.
        let page = isize::try_from(self.size.height / 3).unwrap_or(1).max(1);
        match key {
            Key::Up => self.tree.step(services, Step::By(-1)),
            Key::Down => self.tree.step(services, Step::By(1)),
            Key::PageUp => self.tree.step(services, Step::By(-page)),
            Key::PageDown => self.tree.step(services, Step::By(page)),
            Key::Home => self.tree.step(services, Step::First),
            Key::End => self.tree.step(services, Step::Last),
            Key::Enter | Key::Char(' ') => self.tree.fold(services),
            Key::Char('-') => self.tree.fold_all(true),
            Key::Char('+' | '=') => self.tree.fold_all(false),
            Key::Char('l' | 'L') => {
                if let Some(at) = self.tree.chosen(services) {
                    self.filter = Filter { below: at.to_owned(), ..Filter::default() };
                    self.paused = None;
                    self.page = Page::Logs;
                }
            }
            Key::Esc => self.tree.at = None,
            _ => {}
        }
        self.tops[self.page as usize] = self.top_of(snapshot);
    }

    fn log_key(&mut self, key: Key, snapshot: &Snapshot) {
        let severity = self.filter.severity;
        match key {
            Key::Char('s') => {
                self.filter.severity = match severity {
                    Severity::Debug => Severity::Info,
                    Severity::Info => Severity::Warning,
                    Severity::Warning => Severity::Error,
                    Severity::Error | Severity::Fatal => Severity::Debug,
                };
            }
            Key::Char('S') => {
                self.filter.severity = match severity {
                    Severity::Debug => Severity::Error,
                    Severity::Info => Severity::Debug,
                    Severity::Warning => Severity::Info,
                    Severity::Error | Severity::Fatal => Severity::Warning,
                };
            }
            Key::Char('/') => {
                self.prompt = Some(Prompt::new(For::Search, &self.filter.text));
            }
            Key::Char('n') => self.prompt = Some(Prompt::new(For::Below, &self.filter.below)),
            Key::Esc => self.filter = Filter::default(),
            _ => return self.scroll(key, snapshot),
        }
        // Other lines: the place in them that was read is gone.
        self.paused = None;
    }

    fn scroll(&mut self, key: Key, snapshot: &Snapshot) {
        // Before anything is laid out: most bytes of a noisy line mean nothing here.
        let (steps, page) = match key {
            Key::Up => (-1, false),
            Key::Down => (1, false),
            Key::PageUp => (-1, true),
            Key::PageDown => (1, true),
            Key::Home => (isize::MIN, false),
            Key::End => (isize::MAX, false),
            _ => return,
        };
        let area = Areas::of(self.size).body;
        let content = self.content(snapshot, area, true);
        let rows = area.height - content.head_rows(area.height);
        let end = window::end(content.body.len(), rows);
        let page = if page { isize::from(rows.saturating_sub(1).max(1).cast_signed()) } else { 1 };
        let top = self.top(&content, rows).saturating_add_signed(steps.saturating_mul(page));
        self.tops[self.page as usize] = top.min(end);
        if self.page == Page::Logs && top < end {
            self.paused.get_or_insert_with(|| Arc::clone(&snapshot.logs));
        } else if self.page == Page::Logs {
            self.paused = None;
        }
    }

    /// The first line that is shown now.
    fn top_of(&self, snapshot: &Snapshot) -> usize {
        let area = Areas::of(self.size).body;
        let content = self.content(snapshot, area, true);
        self.top(&content, area.height - content.head_rows(area.height))
    }

    /// The first line to show of `content` in `rows`.
    fn top(&self, content: &Content, rows: u16) -> usize {
        let end = window::end(content.body.len(), rows);
        if self.page == Page::Logs && self.paused.is_none() {
            return end;
        }
        let top = self.tops[self.page as usize];
        let top = match &content.focus {
            // The first line of it wins where not all of it fits.
            Some(focus) => top.max(focus.end.saturating_sub(usize::from(rows))).min(focus.start),
            None => top,
        };
        top.min(end)
    }

    /// The open page; a page of logs that follows is made `whole` only for a person who is about
    /// to scroll.
    fn content(&self, snapshot: &Snapshot, area: Rect, whole: bool) -> Content {
        // The last column is the scroll bar's, the one before keeps it apart.
        let width = usize::from(area.width.saturating_sub(2));
        let mut content = self.page_content(snapshot, area, width, whole);
        if let Some((title, names)) = self.page.writers() {
            // Content that fits below a page never makes it scroll.
            let used = content.head.len() + content.body.len() + 1;
            let rows = usize::from(area.height).saturating_sub(used);
            let title = Row::default().put(STRONG, title).put(DIM, " F6");
            let log = pages::logs::block(&snapshot.logs, title, Of::Below(names), width, rows);
            if !log.is_empty() {
                content.body.push(Line::default());
                content.body.extend(log);
            }
        }
        content
    }

    fn page_content(&self, snapshot: &Snapshot, area: Rect, width: usize, whole: bool) -> Content {
        match self.page {
            Page::Boot => pages::boot::content(snapshot, self.unfolded, width, area.height.into()),
            Page::Cluster => pages::cluster::content(snapshot, width),
            Page::Etcd => pages::etcd::content(snapshot, width),
            Page::Pki => pages::pki::content(snapshot, width),
            Page::Services => {
                pages::services::content(snapshot, &self.tree, width, area.height.into())
            }
            Page::Logs => {
                // One more than fits, for the scroll bar to know that there is more.
                let rows = usize::from(area.height) + 1;
                let rows = (!whole && self.paused.is_none()).then_some(rows);
                let paused = self.paused.as_deref();
                pages::logs::content(&snapshot.logs, paused, &self.filter, width, rows)
            }
            Page::Network => pages::network::content(snapshot, width),
            Page::Workloads => pages::workloads::content(snapshot, width, area.height.into()),
        }
    }

    /// Whether `new` looks different from `old` in this view, the time of day aside: if not,
    /// [`crate::render_clock`] draws all changes.
    #[must_use]
    pub fn sees_change(&self, old: &Snapshot, new: &Snapshot) -> bool {
        // The parts of any page, or of the header beside the time.
        let everywhere = header::shows_change(old, new)
            || old.previous_failure != new.previous_failure
            || old.warnings != new.warnings;
        // Before a person ends the machine, the dialog states the effect on etcd.
        let over = matches!(self.over, Over::Power(_))
            && (&old.etcd, &old.nodes) != (&new.etcd, &new.nodes);
        everywhere || over || self.page.shows_change(old, new) || Page::any_remarks_anew(old, new)
    }

    /// Draws all of it.
    pub(crate) fn draw(&self, snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
        let areas = Areas::of(area);
        header::draw(snapshot, areas.header, buffer);
        self.draw_page(snapshot, areas.body, buffer);
        match &self.prompt {
            Some(prompt) => header::draw_prompt(prompt, areas.keys, buffer),
            None => header::draw_keys(self.page, snapshot, areas.keys, buffer),
        }
        match self.over {
            Over::Nothing => {}
            Over::Help => help::draw(self.page, self.leaves, areas.body, buffer),
            Over::Power(menu) => menu.draw(snapshot, areas.body, buffer),
        }
    }

    fn draw_page(&self, snapshot: &Snapshot, area: Rect, buffer: &mut Buffer) {
        let content = self.content(snapshot, area, false);
        let rows = content.head_rows(area.height);
        let head = Rect { height: rows, ..area };
        let body = Rect { y: area.y + rows, height: area.height - rows, ..area };
        for (line, y) in content.head.iter().zip(head.top()..head.bottom()) {
            row::draw(line, head.x, y, head.width, buffer);
        }
        let top = self.top(&content, body.height);
        let day = content.days.iter().rev().find(|(first, _)| *first <= top);
        if let Some((_, day)) = day.filter(|_| usize::from(rows) == content.head.len()) {
            row::draw(day, head.x, body.y.saturating_sub(1), head.width, buffer);
        }
        window::draw(&content.body, top, content.above, body, DIM, buffer);
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
