//! Counts of refused calls: the first call of a kind in a minute has an entry of its own, and the
//! others of that kind have one together.
//!
//! A leader counts the calls that it refuses (`serve::audit`), and a node the calls to itself that
//! it refuses (`management::calls` of the node).
//!
//! Invariants:
//! - A kind of refusal (caller, call, code) makes two entries in a [`Kinds::WINDOW`] at most.
//! - Every refusal is an entry, or counted in one.
//!
//! What this module does not do: measure the window. Its owner ends each one.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1::AuditEntry;

/// Kinds of refusals of one window that get entries of their own.
const KINDS_MAX: usize = 64;

/// The refusals of a window: one entry for the first of a kind, and one for the others.
#[derive(Debug, Default)]
pub struct Kinds(BTreeMap<(String, String, i32), AuditEntry>);

impl Kinds {
    /// The time in which refusals of one kind are counted.
    pub const WINDOW: Duration = Duration::from_secs(60);

    /// Returns the entry to write now, if it is the first of its kind.
    pub fn seen(&mut self, entry: AuditEntry) -> Option<AuditEntry> {
        let kind = (entry.who.clone(), entry.call.clone(), entry.code);
        if let Some(first) = self.0.get_mut(&kind) {
            first.repeats += 1;
            return None;
        }
        if self.0.len() < KINDS_MAX {
            self.0.insert(kind, entry.clone());
            return Some(entry);
        }
        let others = || AuditEntry { who: "other callers".to_owned(), ..entry.clone() };
        let rest = self.0.entry((String::new(), String::new(), 0)).or_insert_with(others);
        rest.repeats += 1;
        None
    }

    /// The entries to write at the end of the window.
    pub fn ended(&mut self) -> Vec<AuditEntry> {
        let ended = std::mem::take(&mut self.0);
        ended.into_values().filter(|entry| entry.repeats > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_makes_few_entries() {
        let by = |who: usize| AuditEntry { who: who.to_string(), code: 7, ..Default::default() };
        let mut kinds = Kinds::default();
        assert_eq!(kinds.seen(by(0)), Some(by(0)));
        for _ in 0..1000 {
            assert_eq!(kinds.seen(by(0)), None);
        }
        let others = (1..1000).filter(|who| kinds.seen(by(*who)).is_some()).count();
        assert_eq!(others, KINDS_MAX - 1);
        let ended = kinds.ended();
        assert_eq!(ended.len(), 2);
        assert_eq!(ended.iter().map(|entry| entry.repeats).sum::<u64>(), 1000 + 1000 - 64);
        assert_eq!(kinds.ended(), []);
        assert_eq!(kinds.seen(by(0)), Some(by(0)), "the next minute");
    }
}
