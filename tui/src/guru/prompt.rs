//! The prompt for a recovery key: the text that was typed, and its rows on the screen.

use std::fmt;

use ratatui::text::Line;
use zeroize::Zeroizing;

use super::foot::in_rows;
use super::report::block;
use super::{STRONG, TEXT};
use crate::widgets::Row;

/// What a prompt asks for.
const ASKED: &str = "Type the recovery key of this machine; dashes and spaces do not matter.";

/// Characters of a recovery key, with dashes and spaces as anyone may set them.
const TYPED_MAX: usize = 200;

/// The text that a person has typed so far. It is shown as it is typed, since fifty
/// characters cannot be typed blindly; nothing else ever prints it.
#[derive(Clone)]
pub(super) struct Prompt(pub(super) Zeroizing<String>);

impl Prompt {
    pub(super) fn new() -> Self {
        // It never grows: a larger one would leave a copy of the smaller behind.
        Self(Zeroizing::new(String::with_capacity(TYPED_MAX)))
    }

    pub(super) fn put(&mut self, c: char) {
        if (c.is_ascii_graphic() || c == ' ') && self.0.len() < TYPED_MAX {
            self.0.push(c);
        }
    }
}

impl fmt::Debug for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prompt({} characters)", self.0.len())
    }
}

/// The wanted input, what was typed of it, and the keys that matter now, in about `rows`: of a
/// text with more rows than are left for it, the end is shown, where the person is.
pub(super) fn asking(prompt: &Prompt, width: usize, rows: usize) -> Vec<Line<'static>> {
    let mut lines = block(0, "", TEXT, ASKED, width, usize::MAX);
    let keys = in_rows(&[("Enter", "opens the disk"), ("Esc", "goes back")], 4, width);
    let (typed, columns) = (prompt.0.len(), width.max(1));
    // The last cell is the cursor's.
    let all = (typed + 1).div_ceil(columns);
    let shown = rows.saturating_sub(lines.len() + keys.len()).clamp(1, all);
    lines.extend((all - shown..all).map(|row| {
        let (first, end) = (row * columns, ((row + 1) * columns).min(typed));
        let cursor = if row + 1 == all { "_" } else { "" };
        // Only ASCII gets into it: any byte is a boundary.
        Row::default().put(STRONG, &prompt.0[first..end]).put(STRONG, cursor).line()
    }));
    lines.extend(keys);
    lines
}
