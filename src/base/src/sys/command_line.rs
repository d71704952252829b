//! Words of the kernel command line, for `init` and for `node`.
//!
//! Invariants:
//! - The first of two equal words counts: a word appended by a launcher cannot replace
//!   one that was signed with the image.

use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The command line of this boot.
///
/// # Errors
///
/// When `/proc` is not mounted.
pub fn read() -> io::Result<String> {
    std::fs::read_to_string("/proc/cmdline")
}

/// The value of `word=` on `line`.
#[must_use]
pub fn value<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    line.split_ascii_whitespace().find_map(|part| part.strip_prefix(word)?.strip_prefix('='))
}

/// A number of seconds; one out of bounds is ignored.
#[must_use]
pub fn seconds(line: &str, word: &str, allowed: RangeInclusive<u64>) -> Option<Duration> {
    let seconds = value(line, word)?.parse().ok()?;
    allowed.contains(&seconds).then(|| Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_belongs_to_a_whole_word_and_the_first_counts() {
        let line = "quiet xpolis.fault=no polis.faults=no polis.fault=first polis.fault=second\n";
        assert_eq!(value(line, "polis.fault"), Some("first"));
        assert_eq!(value(line, "quiet"), None);
        assert_eq!(value("polis.slot=", "polis.slot"), Some(""));
    }

    #[test]
    fn a_number_of_seconds_out_of_bounds_is_ignored() {
        let read = |line| seconds(line, "polis.time", 5..=10);
        assert_eq!(read("polis.time=10"), Some(Duration::from_secs(10)));
        for line in ["", "polis.time=4", "polis.time=11", "polis.time=x", "polis.time=-5"] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    #[test]
    fn this_boot_has_a_command_line() {
        assert!(read().is_ok());
    }
}
