//! Counts of refused calls: the first call of a kind in a minute has an entry of its own, and the
//! others of that kind have one together.
//!
//! A leader counts the calls that it refuses (`serve::audit`), and a node the calls to itself that
//! it refuses (`management::calls` of the node).
//!
//! The leader also refuses callers without a certificate of the cluster, which make a new key for
//! each call. It counts all of them as one caller, [`STRANGERS`]. It counts them, and each node, in
//! windows of an hour, so that they never displace the entries that the log keeps: the counted
//! calls are those of people, and an honest node makes none.
//!
//! Invariants:
//! - A kind of refusal (caller, call, code) makes two entries in a [`Kinds::WINDOW`] at most.
//! - All strangers together, and each node, make nine entries in an hour at most.
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

/// The beginning of the name of a caller that is a node (`rpc::Peer`).
const NODE: &str = "node ";

/// Kinds of refusals of one node, or of strangers, that get entries of their own: one call is open
/// to strangers, which is refused with a few codes, and none to nodes.
const OTHERS_KINDS_MAX: usize = 4;

/// Windows for which the refusals of nodes and strangers are counted: an hour. By nine entries an
/// hour the log of ten thousand entries holds those of more than six weeks.
const OTHERS_WINDOWS: u32 = 60;

/// Who made which call, and the code of the refusal.
type Kind = (String, String, i32);

/// The first refusal of each kind, with the number of the others.
type Counts = BTreeMap<Kind, AuditEntry>;

/// The refusals of a window: one entry for the first of a kind, and one for the others.
#[derive(Debug, Default)]
pub struct Kinds {
    users: Counts,
    /// Those of nodes and strangers.
    others: Counts,
    /// Windows that have ended since the refusals of nodes and strangers were written.
    windows: u32,
}

impl Kinds {
    /// The time in which refusals of one kind are counted.
    pub const WINDOW: Duration = Duration::from_secs(60);

    /// Returns the entry to write now, if it is the first of its kind.
    pub fn seen(&mut self, entry: AuditEntry) -> Option<AuditEntry> {
        let is_user = entry.who != STRANGERS && !entry.who.starts_with(NODE);
        let counts = if is_user { &mut self.users } else { &mut self.others };
        let kind = (entry.who.clone(), entry.call.clone(), entry.code);
        if let Some(first) = counts.get_mut(&kind) {
            first.repeats += 1;
            return None;
        }
        let has_place = match is_user {
            true => counts.len() < KINDS_MAX,
            false => {
                let its = counts.keys().filter(|(who, ..)| *who == entry.who);
                its.count() < OTHERS_KINDS_MAX
            }
        };
        if has_place {
            counts.insert(kind, entry.clone());
            return Some(entry);
        }
        let (at, rest) = match is_user {
            true => {
                let rest = AuditEntry { who: "other callers".to_owned(), ..entry };
                (Kind::default(), rest)
            }
            false => {
                let at = (entry.who.clone(), String::new(), 0);
                (at, AuditEntry { call: "other calls".to_owned(), ..entry })
            }
        };
        counts.entry(at).or_insert(rest).repeats += 1;
        None
    }

    /// The entries to write at the end of the window.
    pub fn ended(&mut self) -> Vec<AuditEntry> {
        let users = std::mem::take(&mut self.users);
        self.windows += 1;
        let others = match self.windows < OTHERS_WINDOWS {
            true => Counts::default(),
            false => {
                self.windows = 0;
                std::mem::take(&mut self.others)
            }
        };
        let ended = users.into_values().chain(others.into_values());
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
        let callers = [STRANGERS, "node polis-a", "node polis-b"];
        let mut kinds = Kinds::default();
        let (mut entries, mut calls, mut told) = (0, 0, 0);
        for minute in 0..10 * OTHERS_WINDOWS {
            for who in callers {
                for code in 1..=16 {
                    calls += 1;
                    let first = kinds.seen(by(who, code));
                    entries += first.iter().count();
                    told += first.iter().count() as u64;
                }
            }
            assert!(kinds.seen(by("operator otto", 7)).is_some(), "minute {minute}");
            let ended = kinds.ended();
            entries += ended.len();
            told += ended.iter().map(|entry| entry.repeats).sum::<u64>();
        }
        assert_eq!((entries, told), (10 * callers.len() * (2 * OTHERS_KINDS_MAX + 1), calls));
        // One kind: the first at once, and the number of the others an hour later.
        assert_eq!(kinds.seen(by(STRANGERS, 7)), Some(by(STRANGERS, 7)));
        assert_eq!(kinds.seen(by(STRANGERS, 7)), None);
        let hour: Vec<_> = (0..OTHERS_WINDOWS).map(|_| kinds.ended()).collect();
        assert!(hour[..hour.len() - 1].iter().all(Vec::is_empty));
        assert_eq!(hour.last().unwrap()[..], [AuditEntry { repeats: 1, ..by(STRANGERS, 7) }]);
    }

    #[test]
    fn the_refusals_of_a_node_that_have_no_entry_are_counted_under_its_name() {
        let mut kinds = Kinds::default();
        let (who, code) = ("node polis-a".to_owned(), 7);
        for call in 0..9 {
            let call = call.to_string();
            kinds.seen(AuditEntry { who: who.clone(), call, code, ..Default::default() });
        }
        let hour: Vec<_> = (0..OTHERS_WINDOWS).flat_map(|_| kinds.ended()).collect();
        let call = "other calls".to_owned();
        assert_eq!(hour, [AuditEntry { who, call, code, repeats: 5, ..Default::default() }]);
    }

    #[test]
    fn a_node_is_recognised_by_its_name_as_a_caller() {
        let node = polis_wire::identity::NodeId::from_public_key(&[7; 32]);
        assert!(polis_wire::rpc::Peer::Node(node).to_string().starts_with(NODE));
    }
}
