//! Counts of refused calls: the first call of a kind in a minute has an entry of its own, and the
//! others of that kind have one together.
//!
//! A leader counts the calls that it refuses (`serve::audit`), and a node the calls to itself that
//! it refuses (`management::calls` of the node).
//!
//! The leader also refuses callers without a certificate of the cluster, which make a new key for
//! each call. It counts all of them as one caller, [`STRANGERS`], in windows of an hour, so that
//! they never displace the entries that the log keeps.
//!
//! Invariants:
//! - A kind of refusal (caller, call, code) makes two entries in a [`Kinds::WINDOW`] at most.
//! - All strangers together make nine entries in an hour at most.
//! - Every refusal is an entry, or counted in one.
//!
//! What this module does not do: measure the window. Its owner ends each one.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1::AuditEntry;

/// Kinds of refusals of one window that get entries of their own.
const KINDS_MAX: usize = 64;

/// All callers without a certificate of the cluster, as the caller of an entry.
pub(super) const STRANGERS: &str = "callers without a certificate of the cluster";

/// Kinds of refusals of strangers that get entries of their own: one call is open to them, which
/// is refused with a few codes.
const STRANGERS_KINDS_MAX: usize = 4;

/// Windows for which the refusals of strangers are counted: an hour. By nine entries an hour the
/// log of ten thousand entries holds those of more than six weeks.
const STRANGERS_WINDOWS: u32 = 60;

/// The first refusal of each kind, with the number of the others.
type Counts = BTreeMap<(String, String, i32), AuditEntry>;

/// The refusals of a window: one entry for the first of a kind, and one for the others.
#[derive(Debug, Default)]
pub struct Kinds {
    known: Counts,
    strangers: Counts,
    /// Windows that have ended since the refusals of strangers were written.
    windows: u32,
}

impl Kinds {
    /// The time in which refusals of one kind are counted.
    pub const WINDOW: Duration = Duration::from_secs(60);

    /// Returns the entry to write now, if it is the first of its kind.
    pub fn seen(&mut self, entry: AuditEntry) -> Option<AuditEntry> {
        let (counts, kinds_max) = match entry.who == STRANGERS {
            true => (&mut self.strangers, STRANGERS_KINDS_MAX),
            false => (&mut self.known, KINDS_MAX),
        };
        let kind = (entry.who.clone(), entry.call.clone(), entry.code);
        if let Some(first) = counts.get_mut(&kind) {
            first.repeats += 1;
            return None;
        }
        if counts.len() < kinds_max {
            counts.insert(kind, entry.clone());
            return Some(entry);
        }
        let others = || AuditEntry { who: "other callers".to_owned(), ..entry.clone() };
        let rest = counts.entry((String::new(), String::new(), 0)).or_insert_with(others);
        rest.repeats += 1;
        None
    }

    /// The entries to write at the end of the window.
    pub fn ended(&mut self) -> Vec<AuditEntry> {
        let known = std::mem::take(&mut self.known);
        self.windows += 1;
        let strangers = match self.windows < STRANGERS_WINDOWS {
            true => Counts::default(),
            false => {
                self.windows = 0;
                std::mem::take(&mut self.strangers)
            }
        };
        let ended = known.into_values().chain(strangers.into_values());
        ended.filter(|entry| entry.repeats > 0).collect()
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

    #[test]
    fn strangers_fill_no_log_and_take_no_entry_from_a_user() {
        let by = |who: &str, code| AuditEntry { who: who.to_owned(), code, ..Default::default() };
        let mut kinds = Kinds::default();
        let (mut entries, mut calls, mut told) = (0, 0, 0);
        for minute in 0..10 * STRANGERS_WINDOWS {
            for code in 1..=16 {
                calls += 1;
                let first = kinds.seen(by(STRANGERS, code));
                entries += first.iter().count();
                told += first.iter().count() as u64;
            }
            assert!(kinds.seen(by("operator otto", 7)).is_some(), "minute {minute}");
            let ended = kinds.ended();
            entries += ended.len();
            told += ended.iter().map(|entry| entry.repeats).sum::<u64>();
        }
        assert_eq!((entries, told), (10 * (2 * STRANGERS_KINDS_MAX + 1), calls));
        // One kind: the first at once, and the number of the others an hour later.
        assert_eq!(kinds.seen(by(STRANGERS, 7)), Some(by(STRANGERS, 7)));
        assert_eq!(kinds.seen(by(STRANGERS, 7)), None);
        let hour: Vec<_> = (0..STRANGERS_WINDOWS).map(|_| kinds.ended()).collect();
        assert!(hour[..hour.len() - 1].iter().all(Vec::is_empty));
        assert_eq!(hour.last().unwrap()[..], [AuditEntry { repeats: 1, ..by(STRANGERS, 7) }]);
    }
}
