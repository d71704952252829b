//! Names the keys that the console knows.

/// A key, or what a terminal sends in place of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// A character, as typed.
    Char(char),
    /// A character with Ctrl, in lower case.
    Ctrl(char),
    /// A function key, from 1.
    F(u8),
    /// Arrow up.
    Up,
    /// Arrow down.
    Down,
    /// Arrow left.
    Left,
    /// Arrow right.
    Right,
    /// Page up.
    PageUp,
    /// Page down.
    PageDown,
    /// Home.
    Home,
    /// End.
    End,
    /// Insert.
    Insert,
    /// Delete.
    Delete,
    /// Tab.
    Tab,
    /// Tab with Shift.
    BackTab,
    /// Enter.
    Enter,
    /// Backspace.
    Backspace,
    /// Escape.
    Esc,
    /// Not a key: the terminal answers where its cursor is, from 1. Asked after
    /// a jump to the far corner, it tells the size of a serial terminal.
    Cursor {
        /// The row.
        row: u16,
        /// The column.
        column: u16,
    },
}
