//! Draws the console: a pure function from a snapshot to a frame, and from keys to commands.

pub mod guru;
pub mod keys;
pub mod snapshot;

pub use ratatui;

pub use self::keys::Key;
pub use self::snapshot::Snapshot;

/// What a key asks of whoever owns the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Clear the terminal and draw everything anew: it shows something else than it should.
    Redraw,
    /// Reboot the machine.
    Reboot,
    /// Power the machine off.
    PowerOff,
    /// Stop the countdown.
    Hold,
}
