//! The filter and the search of the log.
//!
//! `view` changes a [`Filter`] key by key; the Logs page shows the entries that match
//! it, and marks the places that [`position`] finds.
//!
//! Invariants:
//! - A filter never hides an entry that contains the typed text, in any case, nor one that
//!   is drawn as the typed text is.

use crate::snapshot::{LogEntry, Severity};
use crate::text::{clean, name};

/// Which entries are shown.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    /// The least severity.
    pub(crate) severity: Severity,
    /// A dotted name: of the writer, or of a parent of it. Empty for all.
    pub(crate) below: String,
    /// Whether `below` is all of such a name; or else any part may begin with it.
    pub(crate) whole: bool,
    /// The text that the entry must hold, in any case. Empty for all.
    pub(crate) text: String,
}

impl Default for Filter {
    fn default() -> Self {
        Self { severity: Severity::Info, below: String::new(), whole: false, text: String::new() }
    }
}

impl Filter {
    pub(super) fn lets_through(&self, entry: &LogEntry) -> bool {
        entry.severity >= self.severity && self.is_above(&entry.name) && self.is_said_by(entry)
    }

    /// Takes the typed text as a name; a dot ends it, as one ends a part.
    pub(crate) fn below(&mut self, typed: &str) {
        self.whole &= self.below == typed;
        typed.clone_into(&mut self.below);
    }

    fn is_above(&self, writer: &str) -> bool {
        // Evaluated for every entry, each time that the page is laid out.
        if self.below.is_empty() {
            return true;
        }
        if self.whole {
            let rest = writer.strip_prefix(self.below.as_str());
            return rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        }
        // With a dot at the end, so that a typed dot means a whole part.
        let parts = format!("{writer}.");
        let starts = parts.match_indices('.').map(|(at, _)| at + 1);
        std::iter::once(0).chain(starts).any(|start| parts[start..].starts_with(&self.below))
    }

    fn is_said_by(&self, entry: &LogEntry) -> bool {
        self.text.is_empty() || holds(&entry.text, &self.text) || holds(&entry.name, &self.text)
    }

    /// The filter, as the end of a sentence.
    pub(super) fn words(&self) -> String {
        let mut words = match self.severity {
            Severity::Debug => "everything",
            Severity::Info => "information and worse",
            Severity::Warning => "warnings and worse",
            Severity::Error | Severity::Fatal => "errors and worse",
        }
        .to_owned();
        if !self.below.is_empty() {
            words.push_str(&format!(" of {}", name(&self.below)));
        }
        if !self.text.is_empty() {
            words.push_str(&format!(" with \"{}\"", name(&self.text)));
        }
        words
    }
}

/// Whether `text` holds `part`, in any case.
fn holds(text: &str, part: &str) -> bool {
    position(&letters(text), &letters(part)).is_some()
}

/// Where `part` begins in `text`.
pub(super) fn position(text: &[char], part: &[char]) -> Option<usize> {
    text.windows(part.len().max(1)).position(|window| window == part)
}

/// The characters of `text` as they are drawn, in lower case.
pub(super) fn letters(text: &str) -> Vec<char> {
    clean(text).chars().map(small).collect()
}

/// A letter in lower case: one each, as all that the console draws.
fn small(c: char) -> char {
    let mut small = c.to_lowercase();
    match (small.next(), small.next()) {
        (Some(small), None) => small,
        _ => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subtree_does_not_include_similar_names() {
        let of =
            |below: &str, whole| Filter { below: below.to_owned(), whole, ..Filter::default() };
        for filter in [of("root.net", true), of("root.net.", false), of("net.", false)] {
            assert!(filter.is_above("root.net") && filter.is_above("root.net.dhcp"));
            assert!(!filter.is_above("root.network") && !filter.is_above("root"), "{filter:?}");
        }
        assert!(Filter::default().is_above("anything"));
    }

    #[test]
    fn each_letter_of_a_name_that_is_typed_narrows_and_none_hides_what_is_meant() {
        for typed in ["root.network", "network", "network.dhcp"] {
            let mut filter = Filter::default();
            for end in 0..=typed.len() {
                filter.below(&typed[..end]);
                assert!(filter.is_above("root.network.dhcp"), "{:?}", filter.below);
                assert_eq!(
                    filter.is_above("root.names"),
                    "root.n".starts_with(&filter.below) || "n".starts_with(&filter.below),
                    "{:?}",
                    filter.below
                );
            }
        }
        let mut filter = Filter { below: "root.net".to_owned(), whole: true, ..Filter::default() };
        filter.below("root.net");
        assert!(!filter.is_above("root.network"), "nothing was typed");
        filter.below("root.netw");
        assert!(filter.is_above("root.network"));
    }

    #[test]
    fn a_search_finds_in_any_case_and_counts_characters() {
        let find = |text, part| position(&letters(text), &letters(part));
        assert_eq!(find("é DHCP", "dhcp"), Some(2));
        assert_eq!(find("Zürich", "ZÜR"), Some(0));
        assert_eq!(find("dhc", "dhcp"), None);
        assert!(holds("a\tb", "A B"), "what is searched is what is seen");
    }

    #[test]
    fn a_search_for_what_the_console_draws_otherwise_hides_nothing() {
        for typed in ["“quoted” word…", "\"QUOTED\" word..", "…"] {
            assert!(holds("a “quoted” word… stands", typed), "{typed}");
        }
    }
}
