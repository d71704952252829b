//! The calls that nodes were given, for the audit log: what a leader takes of a report.
//!
//! A node reports the calls of operators that it answered itself (`NodeManagement`). The
//! leader believes it about them, so an entry names the node, and a node that is not honest
//! can fill only so much of the log.
//!
//! Invariants:
//! - A node adds at most [`CALLS_MAX`] entries in a minute.
//! - The node that reports an entry is the one that the entry names, whatever it says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polis_proto::v1::AuditEntry;
use tokio::time::Instant;

use polis_wire::identity::NodeId;

/// Entries of one node in a minute: more than operators make by hand, and an eightieth of the
/// log.
pub(super) const CALLS_MAX: u32 = 120;

/// Entries of one report.
pub(super) const REPORT_MAX: usize = 16;

/// The time in which the entries of a node are counted.
const WINDOW: Duration = Duration::from_secs(60);

/// Bytes of the texts that the chain does not cut itself: a name of an RPC, a fingerprint, an
/// address.
const WORD_MAX: usize = 64;

/// The number of entries of each node in its minute. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Budgets(Arc<Mutex<BTreeMap<NodeId, Budget>>>);

#[derive(Debug)]
struct Budget {
    since: Instant,
    used: u32,
}

impl Budgets {
    /// Takes the place of one entry; false: the node has used all of its minute.
    pub(super) fn take(&self, node: NodeId) -> bool {
        let now = Instant::now();
        let mut budgets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nodes whose minute is over need no place here.
        budgets.retain(|_, budget| now.duration_since(budget.since) < WINDOW);
        let budget = budgets.entry(node).or_insert(Budget { since: now, used: 0 });
        let left = budget.used < CALLS_MAX;
        budget.used += u32::from(left);
        left
    }
}

/// The entry that `node` reports, with the fields that it may set.
pub(super) fn entry(node: NodeId, told: AuditEntry) -> AuditEntry {
    let AuditEntry { time_unix_ms, who, what, code, reason, repeats, .. } = told;
    AuditEntry {
        time_unix_ms,
        who,
        key: word(&told.key),
        from: word(&told.from),
        call: word(&told.call),
        what,
        code,
        reason,
        repeats,
        at: node.to_string(),
        ..AuditEntry::default()
    }
}

/// A text of printable ASCII without spaces, which is what these fields are.
fn word(text: &str) -> String {
    text.chars().filter(char::is_ascii_graphic).take(WORD_MAX).collect()
}

/// Whether both are of the same call.
pub(super) fn is_same(one: &AuditEntry, other: &AuditEntry) -> bool {
    let call = |entry: &AuditEntry| {
        let AuditEntry { time_unix_ms, key, from, call, what, code, at, .. } = entry.clone();
        (time_unix_ms, key, from, call, what, code, at)
    };
    call(one) == call(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(seed: u8) -> NodeId {
        NodeId::from_public_key(&[seed; 32])
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_fills_its_own_minute_only() {
        let budgets = Budgets::default();
        let taken = (0..1000).filter(|_| budgets.take(id(1))).count();
        assert_eq!(taken, 120);
        assert!(budgets.take(id(2)));
        tokio::time::advance(WINDOW).await;
        assert!(budgets.take(id(1)));
        assert_eq!(budgets.0.lock().unwrap().len(), 1, "the others are forgotten");
    }

    #[test]
    fn a_node_reports_calls_of_its_own_alone() {
        let told = AuditEntry {
            number: 7,
            who: "owner ann".to_owned(),
            call: "Re\u{1b}[2Jboot".to_owned(),
            from: "x".repeat(1000),
            at: id(2).to_string(),
            node: id(2).to_string(),
            hash: vec![1],
            previous: vec![2],
            ..AuditEntry::default()
        };
        let entry = entry(id(1), told.clone());
        let expected = AuditEntry {
            who: told.who,
            call: "Re[2Jboot".to_owned(),
            from: "x".repeat(64),
            at: id(1).to_string(),
            ..AuditEntry::default()
        };
        assert_eq!(entry, expected);
    }

    #[test]
    fn what_the_leader_sets_does_not_make_another_call_of_it() {
        let told = AuditEntry { time_unix_ms: 5, call: "Reboot".to_owned(), ..Default::default() };
        let written = AuditEntry { number: 9, node: "polis-1".to_owned(), ..told.clone() };
        assert!(is_same(&told, &written));
        let later = AuditEntry { time_unix_ms: 6, ..told.clone() };
        assert!(!is_same(&later, &written));
    }
}
