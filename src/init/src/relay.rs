//! The buffer of serial lines: it passes them on to a slow port, and remembers the last ones.
//!
//! ```text
//! node's pipes --take--> [lines] --pending--> serial port
//!                           |
//!                           +--last 200--> guru meditation
//! ```
//!
//! Invariants:
//! - `node` never waits for the port: lines that do not fit are dropped and counted,
//!   and a line gives the count as soon as there is room.
//! - A line is passed on whole or not at all, and begins at the start of a line: below an echo
//!   that nothing has ended.
//! - Event lines are dropped last: a part of the buffer is theirs alone.
//! - A line given to [`Relay::force`] is never dropped: these few lines record why the
//!   machine ended.
//!
//! What this module does not do: read or write (`port`, `stage2`).

use std::collections::VecDeque;
use std::time::Duration;

use polis_base::serial::{Severity, is_control, log_line};

/// The pending bytes: six seconds' worth at 115,200 baud.
const PENDING_MAX: usize = 64 << 10;
/// The part of it that log lines may not use.
const EVENTS_ONLY: usize = 8 << 10;
/// The lines that a guru meditation can show.
const KEPT: usize = 200;
/// A longer line is cut: the longest screen shows less.
const LINE_MAX: usize = 2048;
/// The part of a line that is kept for the screen; 200 of them stay below 64 KiB.
const KEPT_LINE_MAX: usize = 300;

/// Whether a line is one of an event.
pub(super) fn is_event(line: &str) -> bool {
    line.starts_with("POLIS ")
}

/// Lines on their way to the port.
#[derive(Debug, Default)]
pub struct Relay {
    pending: VecDeque<u8>,
    dropped: u64,
    kept: VecDeque<String>,
    muted: bool,
    /// Whether an echo was the last text, and did not end its line.
    echoes: bool,
}

/// The start of a line whose end has not come yet. One for each pipe.
#[derive(Debug, Default)]
pub struct Partial {
    bytes: Vec<u8>,
}

impl Partial {
    /// Adds bytes from a pipe; returns the lines that are complete now. Everything that
    /// [`is_control`] but tabs becomes a space: a line can't hide another.
    pub fn take(&mut self, mut bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.extend(&bytes[..end]);
            lines.push(self.cut());
            bytes = &bytes[end + 1..];
        }
        self.extend(bytes);
        lines
    }

    /// The last line, if the pipe ended in the middle of it.
    pub fn end(&mut self) -> Option<String> {
        (!self.bytes.is_empty()).then(|| self.cut())
    }

    fn extend(&mut self, bytes: &[u8]) {
        let room = LINE_MAX.saturating_sub(self.bytes.len());
        self.bytes.extend(&bytes[..bytes.len().min(room)]);
    }

    fn cut(&mut self) -> String {
        let bytes = std::mem::take(&mut self.bytes);
        let text = String::from_utf8_lossy(&bytes);
        text.trim_end_matches('\r')
            .chars()
            .map(|c| if is_control(c) && c != '\t' { ' ' } else { c })
            .collect()
    }
}

impl Relay {
    /// Adds one line, without a line feed.
    pub fn put(&mut self, now: Duration, line: &str) {
        self.keep(line);
        if self.muted {
            return;
        }
        let bound = if is_event(line) { PENDING_MAX } else { PENDING_MAX - EVENTS_ONLY };
        if self.dropped > 0 && self.pending.len() <= PENDING_MAX / 2 {
            self.confess(now);
        }
        if self.pending.len() + usize::from(self.echoes) + line.len() + 1 > bound {
            self.dropped += 1;
            return;
        }
        self.push(line);
    }

    /// Adds one line that must be sent, however slow the port is: `init` has a handful
    /// of those in the life of a machine, so the buffer stays bounded.
    pub fn force(&mut self, now: Duration, line: &str) {
        self.keep(line);
        if self.muted {
            return;
        }
        if self.dropped > 0 {
            self.confess(now);
        }
        self.push(line);
    }

    /// Adds text that is not a line: it may be shown, but is never remembered.
    pub fn echo(&mut self, text: &str) {
        let Some(last) = text.as_bytes().last() else { return };
        if !self.muted && self.pending.len() + text.len() <= PENDING_MAX {
            self.pending.extend(text.as_bytes());
            self.echoes = *last != b'\n';
        }
    }

    /// The bytes to give to the port next; may be empty.
    #[must_use]
    pub fn pending(&self) -> &[u8] {
        self.pending.as_slices().0
    }

    /// The port has taken so many bytes.
    pub fn written(&mut self, now: Duration, count: usize) {
        self.pending.drain(..count.min(self.pending.len()));
        if self.dropped > 0 && self.pending.is_empty() {
            self.confess(now);
        }
    }

    /// The last lines, the oldest first.
    pub fn kept(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.kept.iter().map(String::as_str)
    }

    /// Stops all output to the port (a screen is drawn there), or starts it again; returns
    /// whether it was stopped before.
    pub fn mute(&mut self, muted: bool) -> bool {
        std::mem::replace(&mut self.muted, muted)
    }

    fn confess(&mut self, now: Duration) {
        let text = format!("the serial port is slow: {} lines are missing here", self.dropped);
        self.dropped = 0;
        self.push(&log_line(now, Severity::Warning, "init", &text));
    }

    fn push(&mut self, line: &str) {
        if std::mem::take(&mut self.echoes) {
            self.pending.push_back(b'\n');
        }
        self.pending.extend(line.as_bytes());
        self.pending.push_back(b'\n');
    }

    fn keep(&mut self, line: &str) {
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(line.chars().take(KEPT_LINE_MAX).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(1);

    /// Everything that the port would get, read at once.
    fn drain(relay: &mut Relay) -> String {
        let mut bytes = Vec::new();
        while !relay.pending().is_empty() {
            let chunk = relay.pending().to_vec();
            relay.written(NOW, chunk.len());
            bytes.extend(chunk);
        }
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn lines_are_passed_on_as_they_came() {
        let (mut partial, mut relay) = (Partial::default(), Relay::default());
        for line in partial.take(b"one\ntw").into_iter().chain(partial.take(b"o\r\nthree")) {
            relay.put(NOW, &line);
        }
        assert_eq!(drain(&mut relay), "one\ntwo\n");
        assert_eq!(partial.end().as_deref(), Some("three"));
        assert_eq!(partial.end(), None);
    }

    #[test]
    fn a_slow_port_loses_log_lines_first_and_prints_their_number() {
        let mut relay = Relay::default();
        let line = "x".repeat(99);
        let fit = (PENDING_MAX - EVENTS_ONLY) / 100;
        for _ in 0..fit + 7 {
            relay.put(NOW, &line);
        }
        relay.put(NOW, "POLIS ready t=1.000");
        let text = drain(&mut relay);
        assert_eq!(text.lines().filter(|written| *written == line).count(), fit);
        assert!(text.contains("POLIS ready"));
        assert!(text.ends_with("the serial port is slow: 7 lines are missing here\n"), "{text}");
    }

    #[test]
    fn a_line_that_must_get_out_does_so_from_a_full_buffer() {
        let mut relay = Relay::default();
        let line = format!("POLIS noise text={}", "x".repeat(200));
        for _ in 0..PENDING_MAX / 100 {
            relay.put(NOW, &line);
        }
        let full = relay.pending.len();
        relay.put(NOW, &line);
        assert_eq!(relay.pending.len(), full, "the buffer is full");
        relay.force(NOW, "POLIS guru code=#0601.0000 t=1.000");
        let text = drain(&mut relay);
        assert!(text.ends_with("lines are missing here\nPOLIS guru code=#0601.0000 t=1.000\n"));
    }

    #[test]
    fn a_port_with_a_screen_on_it_gets_no_lines() {
        let mut relay = Relay::default();
        relay.mute(true);
        relay.put(NOW, "hidden");
        relay.mute(false);
        relay.put(NOW, "shown");
        assert_eq!(drain(&mut relay), "shown\n");
        assert_eq!(relay.kept().collect::<Vec<_>>(), ["hidden", "shown"]);
    }

    #[test]
    fn a_line_begins_below_an_echo() {
        let mut relay = Relay::default();
        relay.put(NOW, "type the recovery key");
        relay.echo("**");
        relay.echo("");
        relay.force(NOW, "POLIS off reason=reboot t=1.000");
        relay.echo("*");
        assert_eq!(
            drain(&mut relay),
            "type the recovery key\n**\nPOLIS off reason=reboot t=1.000\n*"
        );
        // The port has the echo by now.
        relay.put(NOW, "a log line");
        relay.echo("*");
        relay.echo("\n");
        relay.put(NOW, "below");
        assert_eq!(drain(&mut relay), "\na log line\n*\nbelow\n");
        assert_eq!(relay.kept().next_back(), Some("below"));
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let mut relay = Relay::default();
        for number in 0..KEPT + 5 {
            relay.put(NOW, &number.to_string());
        }
        assert_eq!(relay.kept().count(), KEPT);
        assert_eq!(relay.kept().next(), Some("5"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_stay_bounded_and_make_no_event_line(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8)
        ) {
            let (mut partial, mut relay) = (Partial::default(), Relay::default());
            // Often enough to fill the buffer.
            for chunk in std::iter::repeat_n(&chunks, 100).flatten() {
                for line in partial.take(chunk) {
                    prop_assert!(!line.contains(|c: char| is_control(c) && c != '\t'));
                    relay.echo("*");
                    relay.put(NOW, &line);
                }
                prop_assert!(relay.pending.len() <= PENDING_MAX);
                prop_assert!(partial.bytes.len() <= LINE_MAX);
            }
        }
    }
}
