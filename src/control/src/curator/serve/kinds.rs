//! Counts of refused calls: the first call of a kind in a minute has an entry of its own, and the
//! others of that kind have one together.
//!
//! A leader counts the calls that it refuses (`serve::audit`), and a node the calls to itself that
//! it refuses (`management::calls` of the node). The leader also counts calls that were done and
//! changed nothing: their code is that of success, and all below holds for them, too. Their object
//! is a part of their kind: such a call may repeat one whose answer was lost after the change. So
//! is that of a call that was cut off, which may have been done: an operator who hangs up before
//! each answer would leave the first object alone.
//!
//! The leader also refuses callers without a certificate of the cluster, which make a new key for
//! each call. It counts all of them as one caller, [`ANONYMOUS`]. It counts them, and each node, in
//! windows of an hour, so that they never displace the entries that the log keeps: the counted
//! calls are those of people, and an honest node makes none.
//!
//! A user can be refused at every call of the API, so the bound of a minute alone would let one
//! user roll over the log: after [`USER_KINDS_MAX`] kinds in an hour, the further ones of this user
//! are counted in one entry until the hour ends.
//!
//! Invariants:
//! - A kind of refusal (caller, call, code) makes two entries in a [`Kinds::WINDOW`] at most.
//! - A user makes 121 entries in an hour at most.
//! - All anonymous callers together, and each node, make nine entries in an hour at most.
//! - Every refusal is an entry, or counted in one.
//!
//! What this module does not do: measure the window. Its owner ends each one.

use std::collections::BTreeMap;
use std::time::Duration;

use polis_proto::v1::AuditEntry;
use tonic::Code;

use polis_wire::audit::OTHER_CALLS;

/// Kinds of refusals of one window that get entries of their own.
const KINDS_MAX: usize = 64;

/// Kinds of refusals of one user in an hour that get entries of their own: one each minute. By two
/// entries for each, the log of ten thousand entries holds those of more than three days.
const USER_KINDS_MAX: u32 = 60;

/// All callers without a certificate of the cluster, as the caller of an entry.
pub(super) const ANONYMOUS: &str = "callers without a certificate of the cluster";

/// The beginning of the name of a caller that is a node (`rpc::Peer`).
const NODE: &str = "node ";

/// Kinds of refusals of one node, or of anonymous callers, that get entries of their own: those
/// may make one call, which is refused with a few codes, and nodes may make none.
const OTHERS_KINDS_MAX: usize = 4;

/// Windows for which the refusals of nodes and anonymous callers are counted, and the kinds of
/// each user: an hour. By nine entries an hour the log of ten thousand entries holds those of more
/// than six weeks.
const OTHERS_WINDOWS: u32 = 60;

/// Who made which call, and the code of the refusal; of a call that was done or cut off, also its
/// object.
type Kind = (String, String, i32, String);

/// The first refusal of each kind, with the number of the others.
type Counts = BTreeMap<Kind, AuditEntry>;

/// The refusals of a window: one entry for the first of a kind, and one for the others.
#[derive(Debug, Default)]
pub struct Kinds {
    users: Counts,
    /// Those of nodes and anonymous callers, and of users that had their kinds of this hour.
    others: Counts,
    /// The kinds that each user had in this hour.
    had: BTreeMap<String, u32>,
    /// Windows of this hour that have ended.
    windows: u32,
}

impl Kinds {
    /// The time in which refusals of one kind are counted.
    pub const WINDOW: Duration = Duration::from_secs(60);

    /// Returns the entry to write now, if it is the first of its kind.
    pub fn seen(&mut self, entry: AuditEntry) -> Option<AuditEntry> {
        let what = match Code::from_i32(entry.code) {
            Code::Ok | Code::Cancelled => entry.what.clone(),
            _ => String::new(),
        };
        let kind = (entry.who.clone(), entry.call.clone(), entry.code, what);
        if let Some(first) = self.users.get_mut(&kind).or_else(|| self.others.get_mut(&kind)) {
            first.repeats += 1;
            return None;
        }
        let is_user = entry.who != ANONYMOUS && !entry.who.starts_with(NODE);
        let may_have_more = match is_user {
            true => self.had.get(&entry.who).is_none_or(|had| *had < USER_KINDS_MAX),
            false => {
                let its = self.others.keys().filter(|(who, ..)| *who == entry.who);
                its.count() < OTHERS_KINDS_MAX
            }
        };
        if !may_have_more {
            let at = (entry.who.clone(), String::new(), 0, String::new());
            let rest = AuditEntry { call: OTHER_CALLS.to_owned(), ..entry };
            self.others.entry(at).or_insert(rest).repeats += 1;
            return None;
        }
        if is_user && self.users.len() >= KINDS_MAX {
            let rest = AuditEntry { who: "other callers".to_owned(), ..entry };
            self.users.entry(Kind::default()).or_insert(rest).repeats += 1;
            return None;
        }
        if is_user {
            *self.had.entry(entry.who.clone()).or_default() += 1;
        }
        let counts = if is_user { &mut self.users } else { &mut self.others };
        counts.insert(kind, entry.clone());
        Some(entry)
    }

    /// The entries to write at the end of the window.
    pub fn ended(&mut self) -> Vec<AuditEntry> {
        let users = std::mem::take(&mut self.users);
        self.windows += 1;
        let others = match self.windows < OTHERS_WINDOWS {
            true => Counts::default(),
            false => {
                self.windows = 0;
                self.had.clear();
                std::mem::take(&mut self.others)
            }
        };
        let ended = users.into_values().chain(others.into_values());
        ended.filter(|entry| entry.repeats > 0).collect()
    }

    /// The entries to write where no further window follows.
    pub fn closed(&mut self) -> Vec<AuditEntry> {
        self.windows = OTHERS_WINDOWS;
        self.ended()
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
    fn calls_that_changed_nothing_or_were_cut_off_have_an_entry_for_each_object() {
        let by = |what: &str, code| {
            let (who, what) = ("operator otto".to_owned(), what.to_owned());
            AuditEntry { who, what, code, ..Default::default() }
        };
        let mut kinds = Kinds::default();
        for (code, is_first) in [
            (Code::Ok, [true, true, false]),
            (Code::Cancelled, [true, true, false]),
            (Code::PermissionDenied, [true, false, false]),
        ] {
            let seen = ["a", "b", "a"].map(|what| kinds.seen(by(what, code.into())).is_some());
            assert_eq!(seen, is_first, "{code:?}");
        }
    }

    #[test]
    fn anonymous_callers_fill_no_log_and_take_no_entry_from_a_user() {
        let by = |who: &str, code| AuditEntry { who: who.to_owned(), code, ..Default::default() };
        let callers = [ANONYMOUS, "node polis-a", "node polis-b"];
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
        assert_eq!(kinds.seen(by(ANONYMOUS, 7)), Some(by(ANONYMOUS, 7)));
        assert_eq!(kinds.seen(by(ANONYMOUS, 7)), None);
        let hour: Vec<_> = (0..OTHERS_WINDOWS).map(|_| kinds.ended()).collect();
        assert!(hour[..hour.len() - 1].iter().all(Vec::is_empty));
        assert_eq!(hour.last().unwrap()[..], [AuditEntry { repeats: 1, ..by(ANONYMOUS, 7) }]);
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
        let call = OTHER_CALLS.to_owned();
        assert_eq!(hour, [AuditEntry { who, call, code, repeats: 5, ..Default::default() }]);
    }

    #[test]
    fn a_user_who_is_refused_at_every_call_again_and_again_does_not_roll_over_the_log() {
        let by = |who: &str, call: usize| AuditEntry {
            who: who.to_owned(),
            call: call.to_string(),
            code: 7,
            ..Default::default()
        };
        let mut kinds = Kinds::default();
        for hour in 0..3 {
            let (mut entries, mut calls, mut told) = (0, 0, 0);
            for minute in 0..OTHERS_WINDOWS {
                for call in (0..30).chain(0..30) {
                    calls += 1;
                    let first = kinds.seen(by("viewer vera", call)).iter().count();
                    entries += first;
                    told += first as u64;
                }
                let other = kinds.seen(by("operator otto", 1));
                assert!(other.is_some(), "hour {hour}, minute {minute}");
                let ended = kinds.ended();
                entries += ended.len();
                told += ended.iter().map(|entry| entry.repeats).sum::<u64>();
            }
            assert_eq!((entries, told), (121, calls), "hour {hour}");
        }
        // Where the count ends early, none is left out.
        for call in 0..100 {
            kinds.seen(by("viewer vera", call));
        }
        let call = OTHER_CALLS.to_owned();
        assert_eq!(kinds.closed(), [AuditEntry { call, repeats: 40, ..by("viewer vera", 60) }]);
        assert_eq!(kinds.closed(), []);
    }

    #[test]
    fn a_node_is_recognised_by_its_name_as_a_caller() {
        let node = polis_wire::identity::NodeId::from_public_key(&[7; 32]);
        assert!(polis_wire::rpc::Peer::Node(node).to_string().starts_with(NODE));
    }
}
