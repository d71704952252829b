//! The key parser: turns the bytes of a terminal into keys.
//!
//! Three dialects are understood at once, because a line does not say which one it
//! speaks: the Linux console (`ESC [ [ A` is F1), xterm and its many children, and a
//! plain serial terminal. A read may end anywhere, so the parser is a state machine that
//! goes on with the next read.
//!
//! ```text
//! [Ground] --ESC--> [Escape] --'['--> [Csi] --letter or '~'--> key, [Ground]
//!    |                 |  \              \--'[' first--> [Linux] --A..E--> F1..F5
//!    |                 |   \--'O'--> [Ss3] --letter--> key
//!    |                 \--anything else--> Esc, then as in [Ground]
//!    \--lead byte--> [Utf8] --last byte--> character
//! ```
//!
//! Invariants:
//! - The same bytes give the same keys, however reads split them.
//! - No input panics or grows the state; an unknown sequence is dropped.
//!
//! What this module does not do: read, or know the time. The reader calls
//! [`Parser::idle`] after a short silence, since only silence distinguishes the Escape
//! key from the start of a sequence.

/// A key, or another message of a terminal.
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
    /// Not a key: the terminal answers with the place of its cursor, from 1. Asked after
    /// a jump to the far corner, the answer gives the size of a serial terminal.
    Cursor {
        /// The row.
        row: u16,
        /// The column.
        column: u16,
    },
}

const ESC: u8 = 0x1b;

/// `ESC [` of a terminal that answers in 8 bits. Inside of UTF-8 it is a part of a
/// character.
const EIGHT_BIT_CSI: u8 = 0x9b;

/// The longest sequence that means anything here is a cursor report, `65535;65535`.
const PARAMETERS_MAX: usize = 11;

/// Reads keys out of bytes; keeps what a read has cut off.
#[derive(Clone, Debug, Default)]
pub struct Parser {
    state: State,
    /// Whether a sequence was given up, and the next bytes may be the rest of it.
    torn: bool,
}

#[derive(Clone, Debug, Default)]
enum State {
    #[default]
    Ground,
    Escape,
    Ss3,
    /// After `ESC [`; `len` may pass the buffer's end, and the sequence is then dropped.
    Csi {
        parameters: [u8; PARAMETERS_MAX],
        len: usize,
    },
    /// After `ESC [ [`.
    Linux,
    Utf8 {
        bytes: [u8; 4],
        len: usize,
        want: usize,
    },
}

impl State {
    /// After `ESC [`.
    const CSI: Self = Self::Csi { parameters: [0; PARAMETERS_MAX], len: 0 };
}

impl Parser {
    /// The keys that `bytes` complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Key> {
        let mut keys = Vec::new();
        for &byte in bytes {
            self.push(byte, &mut keys);
        }
        keys
    }

    /// No byte has come for a while: a lone ESC was the Escape key, and the rest of a
    /// torn sequence will not come any more.
    pub fn idle(&mut self) -> Option<Key> {
        let state = std::mem::take(&mut self.state);
        self.torn |= matches!(state, State::Csi { .. });
        matches!(state, State::Escape).then_some(Key::Esc)
    }

    fn push(&mut self, byte: u8, keys: &mut Vec<Key>) {
        match std::mem::take(&mut self.state) {
            State::Ground => self.ground(byte, keys),
            State::Escape => match byte {
                b'[' => self.state = State::CSI,
                b'O' => self.state = State::Ss3,
                b'\t' => keys.push(Key::BackTab),
                _ => {
                    keys.push(Key::Esc);
                    self.ground(byte, keys);
                }
            },
            State::Ss3 => match byte {
                b'P'..=b'S' => keys.push(Key::F(byte - b'P' + 1)),
                _ => match cursor_key(byte) {
                    Some(key) => keys.push(key),
                    None => self.after_broken(byte, keys),
                },
            },
            State::Csi { mut parameters, len } => match byte {
                b'[' if len == 0 => self.state = State::Linux,
                0x20..=0x3f => {
                    if let Some(free) = parameters.get_mut(len) {
                        *free = byte;
                    }
                    self.state = State::Csi { parameters, len: (len + 1).min(PARAMETERS_MAX + 1) };
                }
                0x40..=0x7e => keys.extend(parameters.get(..len).and_then(|p| csi(p, byte))),
                _ => {
                    self.torn = true;
                    self.after_broken(byte, keys);
                }
            },
            State::Linux => match byte {
                b'A'..=b'E' => keys.push(Key::F(byte - b'A' + 1)),
                _ => self.after_broken(byte, keys),
            },
            State::Utf8 { mut bytes, len, want } => {
                if !(0x80..=0xbf).contains(&byte) {
                    return self.ground(byte, keys);
                }
                bytes[len] = byte;
                let len = len + 1;
                if len < want {
                    self.state = State::Utf8 { bytes, len, want };
                } else if let Ok(text) = std::str::from_utf8(&bytes[..len]) {
                    keys.extend(text.chars().next().filter(|c| !c.is_control()).map(Key::Char));
                }
            }
        }
    }

    fn ground(&mut self, byte: u8, keys: &mut Vec<Key>) {
        let start = |want| State::Utf8 { bytes: [byte, 0, 0, 0], len: 1, want };
        let torn = std::mem::take(&mut self.torn);
        match byte {
            ESC => self.state = State::Escape,
            EIGHT_BIT_CSI => self.state = State::CSI,
            // The end of an answer about the cursor; a person does not type it right
            // after.
            b'R' if torn => {}
            b'0'..=b'9' | b';' => {
                self.torn = torn;
                keys.push(Key::Char(char::from(byte)));
            }
            b'\r' | b'\n' => keys.push(Key::Enter),
            b'\t' => keys.push(Key::Tab),
            0x08 | 0x7f => keys.push(Key::Backspace),
            0x01..=0x1a => keys.push(Key::Ctrl(char::from(byte - 1 + b'a'))),
            b' '..=b'~' => keys.push(Key::Char(char::from(byte))),
            0xc2..=0xdf => self.state = start(2),
            0xe0..=0xef => self.state = start(3),
            0xf0..=0xf4 => self.state = start(4),
            _ => {}
        }
    }

    /// A sequence went wrong at `byte`. A control character still counts, so that
    /// noise on the line never swallows an Escape; anything else goes with it.
    fn after_broken(&mut self, byte: u8, keys: &mut Vec<Key>) {
        if byte < b' ' {
            self.ground(byte, keys);
        }
    }
}

/// The meaning of `ESC [ parameters last`. Modifiers (`1;5A`) are ignored.
fn csi(parameters: &[u8], last: u8) -> Option<Key> {
    let text = std::str::from_utf8(parameters).ok()?;
    let (first, second) = text.split_once(';').unwrap_or((text, ""));
    match last {
        b'R' => Some(Key::Cursor { row: first.parse().ok()?, column: second.parse().ok()? }),
        b'Z' => Some(Key::BackTab),
        b'P' | b'Q' | b'S' => Some(Key::F(last - b'P' + 1)),
        b'~' => match first.parse::<u8>().ok()? {
            1 | 7 => Some(Key::Home),
            2 => Some(Key::Insert),
            3 => Some(Key::Delete),
            4 | 8 => Some(Key::End),
            5 => Some(Key::PageUp),
            6 => Some(Key::PageDown),
            number @ 11..=15 => Some(Key::F(number - 10)),
            number @ 17..=21 => Some(Key::F(number - 11)),
            number @ 23..=24 => Some(Key::F(number - 12)),
            _ => None,
        },
        _ => cursor_key(last),
    }
}

/// The keys that end alike after `ESC [` and `ESC O`.
fn cursor_key(last: u8) -> Option<Key> {
    match last {
        b'A' => Some(Key::Up),
        b'B' => Some(Key::Down),
        b'C' => Some(Key::Right),
        b'D' => Some(Key::Left),
        b'H' => Some(Key::Home),
        b'F' => Some(Key::End),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        Parser::default().feed(bytes)
    }

    #[test]
    fn the_linux_console_has_its_own_first_five_function_keys() {
        let sent = b"\x1b[[A\x1b[[B\x1b[[C\x1b[[D\x1b[[E\x1b[17~\x1b[24~";
        let all = [1, 2, 3, 4, 5, 6, 12].map(Key::F);
        assert_eq!(keys(sent), all);
    }

    #[test]
    fn xterm_s_function_keys_are_understood_too() {
        assert_eq!(keys(b"\x1bOP\x1bOS\x1b[15~\x1b[1;2P"), [1, 4, 5, 1].map(Key::F));
    }

    #[test]
    fn moving_keys_of_both_modes_are_the_same_keys() {
        use Key::{Down, End, Home, Left, PageDown, PageUp, Right, Up};
        assert_eq!(keys(b"\x1b[A\x1b[B\x1b[C\x1b[D"), [Up, Down, Right, Left]);
        assert_eq!(keys(b"\x1bOA\x1bOB\x1bOH\x1b[1;5F"), [Up, Down, Home, End]);
        assert_eq!(keys(b"\x1b[1~\x1b[4~\x1b[5~\x1b[6~"), [Home, End, PageUp, PageDown]);
    }

    #[test]
    fn a_cursor_report_differs_from_a_key() {
        assert_eq!(keys(b"\x1b[24;80R"), [Key::Cursor { row: 24, column: 80 }]);
        assert_eq!(keys(b"\x1b[65535;65535R"), [Key::Cursor { row: 65535, column: 65535 }]);
        assert_eq!(keys(b"\x1b[99999;1R\x1b[;R\x1b[R"), []);
    }

    #[test]
    fn escape_is_a_key_once_nothing_follows_it() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(b"\x1b"), []);
        assert_eq!(parser.idle(), Some(Key::Esc));
        assert_eq!(parser.idle(), None);
        assert_eq!(keys(b"\x1b\x1b[A"), [Key::Esc, Key::Up]);
        assert_eq!(keys(b"\x1bq"), [Key::Esc, Key::Char('q')]);
    }

    #[test]
    fn a_torn_sequence_is_forgotten_after_a_silence() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(b"\x1b[1"), []);
        assert_eq!(parser.idle(), None);
        assert_eq!(parser.feed(b"5"), [Key::Char('5')]);
    }

    #[test]
    fn the_end_of_a_torn_answer_is_no_letter() {
        let answer = b"\x1b[24;80R";
        for at in 2..answer.len() {
            let mut parser = Parser::default();
            assert_eq!(parser.feed(&answer[..at]), []);
            assert_eq!(parser.idle(), None);
            let keys = parser.feed(&answer[at..]);
            assert!(!keys.contains(&Key::Char('R')), "torn at {at}: {keys:?}");
            assert_eq!(parser.feed(b"R"), [Key::Char('R')], "what comes next is typed");
        }
        assert_eq!(keys(b"\x1b[24;8\xffR"), []);
    }

    #[test]
    fn a_terminal_that_answers_in_eight_bits_is_understood() {
        assert_eq!(keys(b"\x9b24;80R"), [Key::Cursor { row: 24, column: 80 }]);
        assert_eq!(keys(b"\x9bA\xc3\x9b"), [Key::Up, Key::Char('\u{db}')]);
    }

    #[test]
    fn plain_keys_are_themselves() {
        use Key::{BackTab, Backspace, Char, Ctrl, Enter, Tab};
        assert_eq!(keys("aé\u{20ac}?".as_bytes()), ['a', 'é', '€', '?'].map(Char));
        assert_eq!(keys(b"\r\t\x1b[Z\x7f\x0c"), [Enter, Tab, BackTab, Backspace, Ctrl('l')]);
    }

    #[test]
    fn invalid_bytes_in_a_sequence_do_not_swallow_the_next_key() {
        assert_eq!(keys(b"\x1b[12\x1b[A"), [Key::Up]);
        assert_eq!(keys(b"\xe2\x82q"), [Key::Char('q')]);
        assert_eq!(keys(b"\x1b[11111111111111111111111~x"), [Key::Char('x')]);
    }

    /// Bytes as lines carry them: mostly pieces of sequences, sometimes anything.
    fn line() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            Just(b"\x1b".to_vec()),
            Just(b"\x1b[".to_vec()),
            Just(b"\x1b[[".to_vec()),
            "[0-9;]{1,6}[~A-Z]".prop_map(String::into_bytes),
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            prop::collection::vec(any::<u8>(), 1..4),
        ];
        prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn reads_may_split_the_line_anywhere(line in line(), size in 1usize..7) {
            let mut parser = Parser::default();
            let split: Vec<Key> = line.chunks(size).flat_map(|part| parser.feed(part)).collect();
            prop_assert_eq!(split, keys(&line));
        }

        #[test]
        fn after_arbitrary_bytes_and_a_silence_keys_work_again(line in line()) {
            let mut parser = Parser::default();
            parser.feed(&line);
            parser.idle();
            prop_assert_eq!(parser.feed(b"\x1b[[B"), vec![Key::F(2)]);
        }
    }
}

#[cfg(test)]
#[path = "keys_fuzz_tests.rs"]
mod fuzz_tests;
