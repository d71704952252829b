//! The lines of a guest's serial port, parsed.
//!
//! This parser is separate from the node's writer on purpose: a change there that
//! breaks the contract makes the stories fail instead of following along.
//!
//! Firmware clears screens and moves cursors on the same port, so control sequences are
//! removed before a line is parsed.

use std::fmt;
use std::time::Duration;

/// How an event line starts.
const PREFIX: &str = "POLIS ";

/// One line, as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Since QEMU was started, by the host's clock.
    pub at: Duration,
    /// Without control sequences and line end.
    pub text: String,
}

impl Line {
    /// The event, if this is an event line.
    #[must_use]
    pub fn event(&self) -> Option<Event> {
        Event::parse(&self.text, self.at)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:9.3} {}", self.at.as_secs_f64(), self.text)
    }
}

/// An event line: `POLIS word key=value ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Since QEMU was started, by the host's clock.
    pub at: Duration,
    /// The word after `POLIS`.
    pub word: String,
    fields: Vec<(String, String)>,
}

impl Event {
    /// Reads a line. `None` if it is not a well-formed event line.
    #[must_use]
    pub fn parse(text: &str, at: Duration) -> Option<Self> {
        let mut scan = Scanner(text.strip_prefix(PREFIX)?);
        let word = scan.until(' ').to_owned();
        if word.is_empty() {
            return None;
        }
        let mut fields = Vec::new();
        while !scan.0.is_empty() {
            let (key, rest) = scan.0.split_once('=')?;
            if key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic() && c != '"') {
                return None;
            }
            scan.0 = rest;
            let value = if scan.take('"') { scan.quoted()? } else { scan.until(' ').to_owned() };
            fields.push((key.to_owned(), value));
        }
        Some(Self { at, word, fields })
    }

    /// The value of `key`, or `None`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The value of `key`; empty if the line lacks the key.
    #[must_use]
    pub fn text(&self, key: &str) -> &str {
        self.get(key).unwrap_or_default()
    }

    /// Whether `key` has this value.
    #[must_use]
    pub fn is(&self, key: &str, value: &str) -> bool {
        self.get(key) == Some(value)
    }

    /// Seconds since the guest's kernel started.
    #[must_use]
    pub fn uptime(&self) -> Option<f64> {
        self.get("t")?.parse().ok()
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:9.3} {PREFIX}{}", self.at.as_secs_f64(), self.word)?;
        self.fields.iter().try_for_each(|(key, value)| write!(f, " {key}={value:?}"))
    }
}

struct Scanner<'a>(&'a str);

impl<'a> Scanner<'a> {
    /// Takes the text before `stop` and drops `stop`; without a `stop`, all of it.
    fn until(&mut self, stop: char) -> &'a str {
        let (taken, rest) = self.0.split_once(stop).unwrap_or((self.0, ""));
        self.0 = rest;
        taken
    }

    fn take(&mut self, expected: char) -> bool {
        let rest = self.0.strip_prefix(expected);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    /// The rest of a quoted value, up to its closing quote and the space behind it.
    fn quoted(&mut self) -> Option<String> {
        let mut value = String::new();
        loop {
            let c = self.next()?;
            match c {
                '"' if self.0.is_empty() || self.take(' ') => return Some(value),
                '"' => return None,
                '\\' => match self.next()? {
                    'n' => value.push('\n'),
                    'u' => {
                        let digits = self.0.get(..4)?;
                        value.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?)?);
                        self.0 = &self.0[4..];
                    }
                    plain => value.push(plain),
                },
                plain => value.push(plain),
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.0.chars();
        let next = chars.next();
        self.0 = chars.as_str();
        next
    }
}

/// The visible text of `bytes`: control sequences and control characters are left out.
#[must_use]
pub fn clean(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut clean = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' if chars.next_if_eq(&'[').is_some() => {
                // A control sequence ends with its first byte from `@` to `~`.
                while chars.next().is_some_and(|c| !('@'..='~').contains(&c)) {}
            }
            '\u{1b}' => {
                chars.next();
            }
            '\t' => clean.push(' '),
            c if c.is_control() => {}
            c => clean.push(c),
        }
    }
    clean
}

/// Why a guest of several translated processors may end early: one of them runs an
/// instruction that another is changing.
pub(crate) const RACE: &str = "the guest's kernel tripped over an old race in QEMU's translator";

/// The message of firmware about a disk that it cannot start. It turns to the next one then.
pub(crate) const NOT_STARTED: &str = "BdsDxe: failed to load";

/// Why a guest that printed this line will never reach a story's goal.
#[must_use]
pub fn fatal(text: &str) -> Option<&'static str> {
    const FATAL: [(&str, &str); 5] = [
        (NOT_STARTED, "the firmware found no boot file"),
        ("BdsDxe: No bootable option", "the firmware found no boot file"),
        ("Kernel panic", "the guest's kernel panicked"),
        ("Oops: int3", RACE),
        // Behind an oops of any other kind: what the thread held is held for ever.
        ("exited with irqs disabled", "a thread of the guest's kernel died"),
    ];
    // The report of `init` about the boot before.
    if text.contains("init: last words: ") {
        return None;
    }
    FATAL.into_iter().find(|(mark, _)| text.contains(mark)).map(|(_, why)| why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Option<Event> {
        Event::parse(text, Duration::ZERO)
    }

    #[test]
    fn an_event_line_reads_as_the_contract_says() {
        let event =
            parse(r#"POLIS stage name=network state=waiting for="a \"lease\" on \\ eth0" t=9.412"#)
                .unwrap();
        assert_eq!(event.word, "stage");
        assert!(event.is("state", "waiting"));
        assert_eq!(event.text("for"), r#"a "lease" on \ eth0"#);
        assert_eq!(event.uptime(), Some(9.412));
        assert_eq!(event.get("absent"), None);
    }

    #[test]
    fn escapes_and_empty_values_are_read() {
        let event = parse(r#"POLIS service cause="a\nb\u0007" name="" t=1"#).unwrap();
        assert_eq!(event.text("cause"), "a\nb\u{7}");
        assert_eq!(event.get("name"), Some(""));
    }

    #[test]
    fn what_is_not_an_event_line_is_none() {
        for text in
            ["", "POLIS ", "POLISH x=1", " POLIS ready t=1", "POLIS ready t", "POLIS a b=\""]
        {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse(r#"POLIS a b="c"d=1"#), None);
    }

    #[test]
    fn control_sequences_of_the_firmware_are_left_out() {
        assert_eq!(
            clean(b"\x1b[2J\x1b[01;01H\x1b[=3hBdsDxe: loading\t\"Boot0001\"\r"),
            "BdsDxe: loading \"Boot0001\""
        );
        assert_eq!(clean(b"\x1bcPOLIS boot"), "POLIS boot");
    }

    #[test]
    fn a_firmware_without_a_bootable_file_is_fatal() {
        let line = r#"BdsDxe: failed to load Boot0001 "UEFI Misc Device" from PciRoot(0x0)"#;
        assert!(fatal(line).unwrap().contains("firmware"));
        assert_eq!(fatal(r#"BdsDxe: loading Boot0001 "UEFI Misc Device""#), None);
        let died = "[    1.028674] note: kworker/0:0[9] exited with irqs disabled";
        assert!(fatal(died).unwrap().contains("kernel"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = clean(&bytes);
            prop_assert!(!text.contains(char::is_control));
            let _event = parse(&format!("{PREFIX}{text}"));
        }
    }
}
