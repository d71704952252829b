//! The pages. Each answers one question of a person, with the answer on top.

pub(crate) mod boot;
pub(crate) mod cluster;
pub(crate) mod etcd;
pub(crate) mod filter;
mod load;
pub(crate) mod logs;
pub(crate) mod network;
pub(crate) mod pki;
pub(crate) mod services;
pub(crate) mod workloads;

use std::ops::Range;

pub(crate) use self::cluster::has_no_part;

use ratatui::text::Line;

/// From so many columns on, blocks stand beside each other.
pub(crate) const WIDE: usize = 110;

/// A page as lines: the head stays, the body scrolls.
#[derive(Debug, Default)]
pub(crate) struct Content {
    pub(crate) head: Vec<Line<'static>>,
    pub(crate) body: Vec<Line<'static>>,
    /// Lines before the body that will not be shown soon, about.
    pub(crate) above: usize,
    /// The head of the lines from one of the body on: the last line of the head.
    pub(crate) days: Vec<(usize, Line<'static>)>,
    /// Lines of the body that must be on the screen: where the cursor is.
    pub(crate) focus: Option<Range<usize>>,
}

impl Content {
    /// Rows for the head out of `height`: never more than half, so that every
    /// line of the body can be reached.
    pub(crate) fn head_rows(&self, height: u16) -> u16 {
        u16::try_from(self.head.len()).unwrap_or(u16::MAX).min(height / 2)
    }
}
