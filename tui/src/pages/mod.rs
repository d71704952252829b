//! Writes the pages. Each answers one question of a person, with the answer on top.

pub(crate) mod boot;
pub(crate) mod etcd;
pub(crate) mod logs;
pub(crate) mod pki;
pub(crate) mod services;

use ratatui::text::Line;

use crate::theme::DIM;
use crate::widgets::Row;

/// A page as lines: the head stays, the body scrolls.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) head: Vec<Line<'static>>,
    pub(crate) body: Vec<Line<'static>>,
}

impl Content {
    /// Rows for the head out of `height`: never more than half, so that every
    /// line of the body can be reached.
    pub(crate) fn head_rows(&self, height: u16) -> u16 {
        u16::try_from(self.head.len()).unwrap_or(u16::MAX).min(height / 2)
    }
}

/// The name of a block on a page.
fn title(text: &str) -> Line<'static> {
    Row::default().put(DIM, text).line()
}

/// An empty line.
fn blank() -> Line<'static> {
    Line::default()
}
