//! The reports of nodes: what a leader takes of the calls that a node was given, for the audit
//! log, and how often it takes the status of a node.
//!
//! A node reports the calls of operators that it answered itself (`NodeManagement`). The
//! leader believes it about their callers and results, so an entry names the node, and a node
//! that is not honest can fill only a little of the log, or of etcd by its status.
//!
//! Invariants:
//! - A node reports at most [`CALLS_MAX`] entries at once, and then one each [`PACE`].
//! - A node sends at most [`STATUSES_MAX`] statuses at once, and then one each [`STATUS_PACE`].
//! - The node that reports an entry is the one that the entry names, whatever it says.
//! - Its call is one of those that a node serves, or [`OTHER_CALLS`]: the number of its refusals.

use std::time::Duration;

use polis_proto::v1::AuditEntry;
use tonic::Code;

use super::budgets::Budgets;
use polis_wire::audit::{NODE_CALLS, OTHER_CALLS};
use polis_wire::identity::NodeId;

/// Entries of one node after a time without any: more than operators make by hand, and an
/// eightieth of the log.
pub(super) const CALLS_MAX: u32 = 120;

/// The time after which a node may report one more: the log of ten thousand entries holds those
/// of more than three days.
pub(super) const PACE: Duration = Duration::from_secs(30);

/// Statuses of one node after a time without any: several times what a start of a node with all
/// roles makes, and at most 15 MiB in etcd.
pub(super) const STATUSES_MAX: u32 = 120;

/// The time after which a node may send one more: an honest one sends a status when it changes, and
/// a status that is refused again after five seconds.
pub(super) const STATUS_PACE: Duration = Duration::from_secs(10);

/// Entries of one report.
pub(super) const REPORT_MAX: u32 = 16;

/// Bytes of the texts that the chain does not cut itself: a fingerprint, an address.
const WORD_MAX: usize = 64;

/// The number of entries that nodes may report.
pub(super) fn budgets() -> Budgets {
    Budgets::new(CALLS_MAX, PACE)
}

/// The number of statuses that nodes may send; kept beside those budgets.
pub(super) fn statuses(budgets: &Budgets) -> Budgets {
    budgets.beside("statuses", STATUSES_MAX, STATUS_PACE)
}

/// The entry that `node` reports, with the fields that it may set; `None` for a call that nodes
/// do not record.
pub(super) fn entry(node: NodeId, reported: AuditEntry) -> Option<AuditEntry> {
    let AuditEntry { time_unix_ms, who, what, reason, call, .. } = reported;
    let is_known = call == OTHER_CALLS || NODE_CALLS.contains(&(&*call, true));
    is_known.then(|| AuditEntry {
        time_unix_ms,
        who,
        key: word(&reported.key),
        from: word(&reported.from),
        call,
        what,
        code: Code::from_i32(reported.code).into(),
        reason,
        at: node.to_string(),
        ..AuditEntry::default()
    })
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

    #[test]
    fn a_node_reports_calls_of_its_own_alone() {
        let reported = AuditEntry {
            number: 7,
            who: "owner ann".to_owned(),
            call: "Reboot".to_owned(),
            from: "x".repeat(1000),
            key: "a\u{1b}[2Jb".to_owned(),
            code: 900,
            repeats: u64::MAX,
            at: id(2).to_string(),
            node: id(2).to_string(),
            hash: vec![1],
            previous: vec![2],
            ..AuditEntry::default()
        };
        let expected = AuditEntry {
            who: "owner ann".to_owned(),
            call: "Reboot".to_owned(),
            from: "x".repeat(64),
            key: "a[2Jb".to_owned(),
            code: Code::Unknown.into(),
            at: id(1).to_string(),
            ..AuditEntry::default()
        };
        assert_eq!(entry(id(1), reported.clone()), Some(expected));
        for call in ["ApproveNode", "", "Reboot ", "Console"] {
            let reported = AuditEntry { call: call.to_owned(), ..reported.clone() };
            assert_eq!(entry(id(1), reported), None, "{call}");
        }
        // A node counts the refusals of a caller beyond some kinds under one name.
        let counted = AuditEntry { call: OTHER_CALLS.to_owned(), ..reported };
        assert_eq!(entry(id(1), counted).unwrap().call, OTHER_CALLS);
    }

    #[test]
    fn what_the_leader_sets_does_not_make_another_call_of_it() {
        let reported =
            AuditEntry { time_unix_ms: 5, call: "Reboot".to_owned(), ..Default::default() };
        let written = AuditEntry { number: 9, node: "polis-1".to_owned(), ..reported.clone() };
        assert!(is_same(&reported, &written));
        let later = AuditEntry { time_unix_ms: 6, ..reported };
        assert!(!is_same(&later, &written));
    }
}
