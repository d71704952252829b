//! The lines of the serial port: log lines for people, event lines for programs.
//!
//! `init` and `node` both write them, `init` reads them back from the control
//! channel, and tests outside the project rely on every name here.
//!
//! ```text
//! [    9.412] I root.cluster.consensus: etcd is serving
//! POLIS etcd state=voter members=1 term=2 t=9.413
//! ```
//!
//! Invariants:
//! - An event line is one line, and reads as it was written: in a value, everything that
//!   [`is_control`] is escaped, so a value from outside cannot forge a second line.
//! - Every event line ends with `t`, the seconds since the kernel started.
//!
//! What this module does not do: write. `init` owns the port, and `node` queues
//! its lines for `init`.

use std::fmt::{self, Write as _};
use std::time::Duration;

/// How an event line starts.
const PREFIX: &str = "POLIS ";
/// Bytes of all [`TEXTS`] of a line together, as they are written, escapes and all.
const TEXTS_MAX: usize = 960;
/// The keys of texts that errors, programs and people have written, which have no bound.
const TEXTS: [&str; 2] = ["cause", "for"];

/// One event line: a word, then keys with values in the order they were added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLine {
    word: String,
    fields: Vec<(String, String)>,
}

impl EventLine {
    /// Starts a line; `word` is one of the contract's, for example `stage`.
    #[must_use]
    pub fn new(word: &str) -> Self {
        Self { word: word.to_owned(), fields: Vec::new() }
    }

    /// Adds `key=value`; the value is quoted where it must be.
    #[must_use]
    pub fn field(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.fields.push((key.to_owned(), value.to_string()));
        self
    }

    /// Adds `t`, seconds since the kernel started, with three decimals.
    #[must_use]
    pub fn at(self, uptime: Duration) -> Self {
        self.field("t", format_args!("{:.3}", uptime.as_secs_f64()))
    }

    /// Cuts long texts for people, so that the line stays shorter than the reader's limit: a
    /// line that `init` cut would end without `t`, and within quotation marks.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let texts = self.fields.iter().filter(|field| is_text(field)).count();
        for (_key, value) in self.fields.iter_mut().filter(|field| is_text(field)) {
            let mut written = 0;
            let end = value.char_indices().find(|(_, c)| {
                written += written_bytes(*c);
                written > TEXTS_MAX / texts
            });
            if let Some((end, _)) = end {
                value.truncate(end);
                value.push('…');
            }
        }
        self
    }

    /// The word after `POLIS`.
    #[must_use]
    pub fn word(&self) -> &str {
        &self.word
    }

    /// The value of `key`, if the line has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// All values of `key`, in order: a key may stand more than once on the control channel.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.fields.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Reads a line back. `None` if it is not a well-formed event line.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let rest = line.strip_prefix(PREFIX)?;
        let (word, mut rest) = rest.split_once(' ').unwrap_or((rest, ""));
        if word.is_empty() {
            return None;
        }
        let mut parsed = Self::new(word);
        while !rest.is_empty() {
            let (key, after) = rest.split_once('=')?;
            if key.is_empty() || key.contains([' ', '"']) {
                return None;
            }
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => unquote(quoted)?,
                None => {
                    let end = after.find(' ').unwrap_or(after.len());
                    (after[..end].to_owned(), &after[end..])
                }
            };
            parsed.fields.push((key.to_owned(), value));
            rest = match after.strip_prefix(' ') {
                Some(more) => more,
                None if after.is_empty() => after,
                None => return None,
            };
        }
        Some(parsed)
    }
}

/// Reads up to the closing quote; returns the value and what follows the quote.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                'u' => {
                    let code: String = chars.by_ref().take(4).map(|(_, digit)| digit).collect();
                    value.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
                }
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// Whether a terminal or a reader of lines takes this character for more than text: a control
/// character of ASCII or Unicode, a separator at which some readers end a line, a mark that
/// changes the direction of the text around it, or one without width: by the last two, a line or
/// a name looks like another one.
#[must_use]
pub fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

/// Whether a field has a text for people.
fn is_text((key, _): &(String, String)) -> bool {
    TEXTS.contains(&key.as_str())
}

/// Bytes of a character within quotation marks.
fn written_bytes(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' => 2,
        // `\uXXXX`
        c if is_control(c) => 6,
        c => c.len_utf8(),
    }
}

impl fmt::Display for EventLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.word)?;
        for (key, value) in &self.fields {
            write!(f, " {key}=")?;
            let plain = !value.is_empty()
                && !value.contains(|c: char| {
                    c.is_whitespace() || c == '"' || c == '\\' || is_control(c)
                });
            if plain {
                f.write_str(value)?;
                continue;
            }
            f.write_char('"')?;
            for c in value.chars() {
                match c {
                    '"' | '\\' => write!(f, "\\{c}")?,
                    '\n' => f.write_str("\\n")?,
                    // All of them are below U+10000: four digits hold them.
                    c if is_control(c) => write!(f, "\\u{:04x}", u32::from(c))?,
                    c => f.write_char(c)?,
                }
            }
            f.write_char('"')?;
        }
        Ok(())
    }
}

/// How much an entry matters. One letter on the serial line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Details for debugging.
    Debug,
    /// The ordinary course of events.
    Info,
    /// The writer continues without the failed part.
    Warning,
    /// An operator should look at it.
    Error,
    /// The writer ended because of it.
    Fatal,
}

impl Severity {
    /// `D`, `I`, `W`, `E` or `F`.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::Debug => 'D',
            Self::Info => 'I',
            Self::Warning => 'W',
            Self::Error => 'E',
            Self::Fatal => 'F',
        }
    }
}

/// One log line, without a line feed; everything that [`is_control`] becomes a space.
#[must_use]
pub fn log_line(uptime: Duration, severity: Severity, name: &str, text: &str) -> String {
    let text: String = text.chars().map(|c| if is_control(c) { ' ' } else { c }).collect();
    format!("[{:>9.3}] {} {name}: {text}", uptime.as_secs_f64(), severity.letter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_long_value_is_cut_and_the_line_stays_whole() {
        for letter in ["x", "\n", "\u{1}", "é", "\""] {
            let long = EventLine::new("service").field("cause", letter.repeat(5000));
            let long = long.field("for", letter.repeat(5000)).bounded().at(Duration::from_secs(1));
            let line = long.to_string();
            assert!(line.len() < 1024, "{} bytes", line.len());
            assert!(line.ends_with(" t=1.000"), "{line}");
            assert_eq!(EventLine::parse(&line).as_ref(), Some(&long));
            assert!(long.get("cause").unwrap().ends_with('…'));
        }
        let short = EventLine::new("service").field("cause", "it ended");
        assert_eq!(short.clone().bounded(), short);
    }

    #[test]
    fn a_text_is_cut_by_its_bytes_as_they_are_written() {
        for (letter, count) in [("x", 960), ("é", 480), ("\"", 480), ("\n", 480), ("\u{1}", 160)] {
            let alone = |count| EventLine::new("stage").field("for", letter.repeat(count));
            assert_eq!(alone(count).bounded(), alone(count));
            let cut = format!("{}…", letter.repeat(count));
            assert_eq!(alone(count + 1).bounded().get("for"), Some(&*cut));
            let two = alone(count + 1).field("cause", letter).bounded();
            let cut = format!("{}…", letter.repeat(count / 2));
            assert_eq!((two.get("for"), two.get("cause")), (Some(&*cut), Some(letter)));
            let text = two.to_string();
            assert!(text.len() < 1024, "{} bytes", text.len());
        }
    }

    #[test]
    fn a_line_reads_as_the_contract_says() {
        let line = EventLine::new("stage")
            .field("name", "network")
            .field("state", "waiting")
            .field("for", "a \"lease\" on eth0")
            .at(Duration::from_millis(9_412));
        assert_eq!(
            line.to_string(),
            r#"POLIS stage name=network state=waiting for="a \"lease\" on eth0" t=9.412"#
        );
    }

    #[test]
    fn a_log_line_has_the_contract_s_columns() {
        let line = log_line(Duration::from_millis(9_412), Severity::Info, "root.a", "b\nPOLIS c");
        assert_eq!(line, "[    9.412] I root.a: b POLIS c");
    }

    #[test]
    fn what_a_terminal_or_a_reader_of_lines_acts_on_is_not_written_as_it_came() {
        for c in [
            '\n', '\r', '\u{1b}', '\u{7f}', '\u{85}', '\u{9b}', '\u{61c}', '\u{200e}', '\u{200f}',
            '\u{2028}', '\u{2029}', '\u{202a}', '\u{202e}', '\u{2066}', '\u{2069}', '\u{200b}',
            '\u{200d}', '\u{2060}', '\u{206f}', '\u{feff}',
        ] {
            let line = EventLine::new("guru").field("cause", format!("a{c}POLIS b"));
            let text = line.to_string();
            assert!(!text.contains(c), "{text:?}");
            assert_eq!(EventLine::parse(&text), Some(line));
            let text = log_line(Duration::ZERO, Severity::Info, "root", &format!("a{c}b"));
            assert!(text.ends_with(": a b"), "{text:?}");
        }
        for c in ['é', '…', '\u{2027}', '\u{202f}', '\u{1f600}'] {
            assert!(!is_control(c), "{c:?}");
        }
    }

    #[test]
    fn a_value_with_any_space_in_it_is_one_word_to_a_reader_that_splits_at_spaces() {
        for space in [' ', '\u{a0}', '\u{3000}'] {
            let line = EventLine::new("guru").field("cause", format!("a{space}b"));
            let text = line.to_string();
            assert_eq!(text, format!("POLIS guru cause=\"a{space}b\""));
            assert_eq!(EventLine::parse(&text), Some(line));
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_one_line_and_reads_back(
            fields in prop::collection::vec(("[a-z]{1,8}", any::<String>()), 0..6)
        ) {
            let line = fields
                .iter()
                .fold(EventLine::new("guru"), |line, (key, value)| line.field(key, value));
            let text = line.to_string();
            prop_assert!(!text.contains(is_control));
            prop_assert_eq!(EventLine::parse(&text), Some(line));
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _parsed = EventLine::parse(&format!("POLIS {text}"));
        }
    }
}

#[cfg(test)]
#[path = "serial_fuzz_tests.rs"]
mod fuzz_tests;
