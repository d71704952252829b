//! Words of the kernel command line, for `init` and for `node`.
//!
//! Invariants:
//! - The first of two equal words counts: a word appended by a launcher cannot replace
//!   one that was signed with the image.

use std::io;

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
    fn this_boot_has_a_command_line() {
        assert!(read().is_ok());
    }
}
