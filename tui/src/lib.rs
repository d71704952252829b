//! The console as a pure function: from a snapshot to a picture, and from keys to commands.
//!
//! `node` fills a [`Snapshot`] and calls [`render`]; `init` draws a failure with
//! [`guru::render`]. Both feed the bytes of a terminal to a [`keys::Parser`], give the keys to
//! the view, and carry out the [`Command`] that may come back.
//!
//! ```text
//! event values --(node)--> Snapshot --+
//!                                     +--render--> Buffer --(canvas)--> terminal
//! bytes --Parser--> Key --> View -----+
//!                            \------------> Command --(node, init)
//! ```
//!
//! Invariants:
//! - Nothing here reads a clock, a file or a lock, and nothing blocks.
//! - No snapshot, key or size of terminal panics.
//! - Every glyph is in the font of the Linux console, and a word or a glyph repeats the
//!   meaning of every colour.
//!
//! What this crate does not do: own a terminal. It knows no file descriptor.

pub mod guru;
mod header;
mod help;
pub mod keys;
mod page;
mod pages;
mod power;
mod prompt;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod snapshot;
mod text;
mod theme;
mod view;
mod widgets;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

/// The version of ratatui that buffers come from.
pub use ratatui;

pub use self::keys::Key;
pub use self::page::Page;
pub use self::pages::services::down as services_down;
pub use self::snapshot::Snapshot;
pub use self::text::{bytes, clean, duration};
pub use self::view::{READ, View};

/// The request of a key to the owner of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Clear the terminal and redraw everything: its content is wrong.
    Redraw,
    /// Reboot the machine.
    Reboot,
    /// Power the machine off.
    PowerOff,
    /// Close this console and leave the machine alone: only of a view that can be left.
    Leave,
    /// Stop the countdown.
    Hold,
    /// Go on with the recovery key that was typed: [`guru::View::take_typed`].
    Unlock,
}

/// Draws `snapshot` as `view` wants to see it, over all of an empty `buffer`.
pub fn render(snapshot: &Snapshot, view: &View, buffer: &mut Buffer) {
    view.draw(snapshot, buffer.area, buffer);
}

/// The row of a terminal of `area` that shows the time of day: the only row that changes while
/// nothing happens. Empty where the room does not suffice for it.
#[must_use]
pub fn clock_of(area: Rect) -> Rect {
    header::place(view::Areas::of(area).header)
}

/// Draws no more than that row, over all of an empty `buffer` of its size.
pub fn render_clock(snapshot: &Snapshot, buffer: &mut Buffer) {
    header::draw_place(snapshot, buffer.area, buffer);
}

/// Draws the message of the terminal's owner over the row of keys.
pub fn render_notice(notice: &str, buffer: &mut Buffer) {
    header::draw_notice(notice, view::Areas::of(buffer.area).keys, buffer);
}

#[cfg(test)]
mod tests;
