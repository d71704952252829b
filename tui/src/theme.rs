//! The few styles of the TUI. Sixteen colours; a word always repeats the meaning of a
//! colour.

use ratatui::style::{Color, Modifier, Style};

/// Headings and names that lead a block.
pub(crate) const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);
/// Ordinary text.
pub(crate) const PLAIN: Style = Style::new();
/// Parts for the second look: units, axes, column heads.
pub(crate) const DIM: Style = Style::new().fg(Color::DarkGray);
/// As it should be.
pub(crate) const GOOD: Style = Style::new().fg(Color::Green);
/// At work.
pub(crate) const BUSY: Style = Style::new().fg(Color::Cyan);
/// Worth a look.
pub(crate) const ATTENTION: Style = Style::new().fg(Color::LightYellow);
/// Someone must act.
pub(crate) const BAD: Style = Style::new().fg(Color::LightRed).add_modifier(Modifier::BOLD);
/// The bar at the top.
pub(crate) const BAR: Style = Style::new().fg(Color::White).bg(Color::Blue);
/// A key, in the row of keys.
pub(crate) const KEY: Style = Style::new().fg(Color::LightCyan).bg(Color::Blue);
/// The effect of a key, there.
pub(crate) const DOES: Style = Style::new().fg(Color::Gray).bg(Color::Blue);
/// A page that someone must look at, there.
pub(crate) const ALARM: Style =
    Style::new().fg(Color::White).bg(Color::Red).add_modifier(Modifier::BOLD);
/// The page that is open, there.
pub(crate) const OPEN: Style = Style::new().fg(Color::Black).bg(Color::Gray);
/// The message of the terminal's owner, in place of the keys.
pub(crate) const NOTICE: Style = Style::new().fg(Color::Black).bg(Color::Yellow);

/// The row under the cursor.
pub(crate) const CURSOR: Style = Style::new().add_modifier(Modifier::REVERSED);
/// The match of a search.
pub(crate) const FOUND: Style = Style::new().fg(Color::Black).bg(Color::Cyan);

/// How something stands: a glyph and a style that always go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mark {
    /// To come, or over.
    Idle,
    /// As it should be.
    Good,
    /// At work.
    Busy,
    /// Worth a look.
    Attention,
    /// Someone must act.
    Bad,
}

impl Mark {
    pub(crate) fn glyph(self) -> &'static str {
        match self {
            Self::Idle => "·",
            Self::Good => "■",
            Self::Busy => "►",
            Self::Attention => "▲",
            Self::Bad => "!",
        }
    }

    pub(crate) fn style(self) -> Style {
        match self {
            Self::Idle => DIM,
            Self::Good => GOOD,
            Self::Busy => BUSY,
            Self::Attention => ATTENTION,
            Self::Bad => BAD,
        }
    }
}
