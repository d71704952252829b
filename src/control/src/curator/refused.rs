//! The list of rejected registrations, for the operator.
//!
//! A machine shows on its own screen why it was rejected; with this list, an operator need
//! not stand before it. The list lives in the memory of the curator that leads, since
//! no call of an untrusted caller may write to etcd.
//!
//! Invariants:
//! - At most [`ENTRIES_MAX`] entries are kept; a machine that asks again and again for the
//!   same cause is one.
//! - A machine that makes up keys displaces its own entries first: the address with the
//!   most entries loses one.
//! - Untrusted callers make at most one line of the log a second.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use polis_proto::v1;
use tokio::time::Instant;
use tracing::warn;

use polis_wire::identity::NodeId;

/// The number that fits on a screen beside the rest.
const ENTRIES_MAX: usize = 16;
/// The time between two lines of the log.
const LINE: Duration = Duration::from_secs(1);

/// The refusals. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    /// The entries, newest last.
    entries: Vec<Entry>,
    line: Option<Instant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    key: [u8; 32],
    address: IpAddr,
    reason: &'static str,
    count: u64,
    /// Seconds since 1970.
    last: i64,
}

impl Refusals {
    /// Adds an entry, at `now` in seconds since 1970.
    pub(super) fn add(&self, key: [u8; 32], address: IpAddr, reason: &'static str, now: i64) {
        let mut kept = self.kept();
        let Kept { entries, line } = &mut *kept;
        let at = entries.iter().position(|entry| entry.key == key && entry.reason == reason);
        let before = at.map_or(0, |at| entries.remove(at).count);
        if entries.len() >= ENTRIES_MAX {
            entries.remove(displaced(entries));
        }
        let count = before.saturating_add(1);
        entries.push(Entry { key, address, reason, count, last: now });
        let due = line.is_none_or(|line| line.elapsed() >= LINE);
        // Repetitions are logged at 1, 2, 4, 8 and so on.
        if due && count.is_power_of_two() {
            *line = Some(Instant::now());
            let node = NodeId::from_public_key(&key);
            warn!(%node, %address, reason = reason, count, "refused a registration");
        }
    }

    /// All entries, the newest first.
    pub(super) fn list(&self) -> Vec<v1::RefusedRegistration> {
        let list = |entry: &Entry| v1::RefusedRegistration {
            public_key: entry.key.to_vec(),
            address: entry.address.to_string(),
            reason: entry.reason.to_owned(),
            count: entry.count,
            last_at: entry.last,
        };
        self.kept().entries.iter().rev().map(list).collect()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The entry to displace: the oldest of the address with the most.
fn displaced(entries: &[Entry]) -> usize {
    let mut by_address = BTreeMap::<IpAddr, usize>::new();
    for entry in entries {
        *by_address.entry(entry.address).or_default() += 1;
    }
    let most = by_address.values().max().copied().unwrap_or_default();
    let crowd = |entry: &Entry| by_address.get(&entry.address) == Some(&most);
    entries.iter().position(crowd).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[tokio::test]
    async fn a_machine_that_asks_again_is_one_entry_for_each_cause() {
        let refusals = Refusals::default();
        for second in 0..100 {
            refusals.add([1; 32], address(1), "ticket-wrong", second);
        }
        refusals.add([1; 32], address(2), "known", 100);
        let list = refusals.list();
        let seen: Vec<_> =
            list.iter().map(|one| (one.reason.as_str(), one.count, one.last_at)).collect();
        assert_eq!(seen, [("known", 1, 100), ("ticket-wrong", 100, 99)]);
    }

    #[tokio::test]
    async fn invented_keys_do_not_displace_another_machine() {
        let refusals = Refusals::default();
        refusals.add([255; 32], address(1), "ticket-ended", 0);
        for key in 0..250 {
            refusals.add([key; 32], address(66), "ticket-wrong", 1);
        }
        let list = refusals.list();
        assert_eq!(list.len(), ENTRIES_MAX);
        assert!(list.iter().any(|one| one.public_key == [255; 32]));
    }

    proptest! {
        #[test]
        fn no_more_is_kept_than_fits_and_the_newest_is(
            calls in prop::collection::vec((any::<u8>(), 0..4_u8, any::<bool>()), 1..200),
        ) {
            let refusals = Refusals::default();
            for (key, from, known) in calls {
                let reason = if known { "known" } else { "ticket-wrong" };
                refusals.add([key; 32], address(from), reason, 0);
                let list = refusals.list();
                prop_assert!(list.len() <= ENTRIES_MAX);
                prop_assert_eq!(&list[0].public_key, &[key; 32]);
            }
        }
    }
}
