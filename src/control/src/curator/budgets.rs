//! The budgets of the nodes: how many costly requests a node may make to the leader in a row, and
//! at what pace it gets them back.
//!
//! All nodes of a cluster share its records and its log, so a node that an intruder controls must
//! not fill them. The limit of the server itself (`rpc`) counts all calls and is far higher, since
//! most calls cost little.
//!
//! Invariants:
//! - A node takes at most `max` at once, and then one each `pace`.
//! - Only nodes that have taken something recently need memory here.
//! - Budgets beside each other ([`Budgets::beside`]) share their place, and nothing else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use polis_wire::identity::NodeId;

/// The budgets of all nodes. Clones share them.
#[derive(Clone, Debug)]
pub struct Budgets {
    /// What they are for, among those beside each other.
    purpose: &'static str,
    max: u32,
    pace: Duration,
    /// When each node has all of its budget again, by purpose.
    whole: Arc<Mutex<BTreeMap<(&'static str, NodeId), Instant>>>,
}

impl Budgets {
    /// Budgets of `max`, of which one comes back each `pace`.
    pub(super) fn new(max: u32, pace: Duration) -> Self {
        Self { purpose: "", max, pace, whole: Arc::default() }
    }

    /// Budgets for another purpose in the same place: a node that takes from these takes nothing
    /// from those.
    pub(super) fn beside(&self, purpose: &'static str, max: u32, pace: Duration) -> Self {
        Self { purpose, max, pace, whole: Arc::clone(&self.whole) }
    }

    /// Takes `count`; false, and nothing is taken, if the node has fewer left.
    pub(super) fn take(&self, node: NodeId, count: u32) -> bool {
        let now = Instant::now();
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        whole.retain(|_, at| *at > now);
        let budget = (self.purpose, node);
        let owed = whole.get(&budget).map_or(Duration::ZERO, |at| at.duration_since(now));
        let owed = owed.saturating_add(self.pace.saturating_mul(count));
        let left = owed <= self.pace.saturating_mul(self.max);
        if left {
            whole.insert(budget, now + owed);
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_takes_its_budget_at_once_and_then_one_at_a_time() {
        let pace = Duration::from_secs(30);
        let budgets = Budgets::new(120, pace);
        let id = |seed: u8| NodeId::from_public_key(&[seed; 32]);
        let taken = |node| (0..1000).filter(|_| budgets.take(id(node), 1)).count();
        assert_eq!(taken(1), 120);
        assert!(!budgets.take(id(2), 121) && budgets.take(id(2), 16));
        tokio::time::advance(pace * 10).await;
        assert_eq!(taken(1), 10);
        tokio::time::advance(pace * 119).await;
        assert!(budgets.take(id(3), 1));
        assert_eq!(budgets.whole.lock().unwrap().len(), 2, "the second one is forgotten");
        tokio::time::advance(pace * 500).await;
        assert_eq!(taken(1), 120);
    }

    #[tokio::test(start_paused = true)]
    async fn budgets_beside_each_other_are_counted_apart() {
        let (pace, id) = (Duration::from_secs(30), NodeId::from_public_key(&[1; 32]));
        let calls = Budgets::new(3, pace);
        let statuses = || calls.beside("statuses", 5, pace);
        assert!(calls.take(id, 3) && !calls.take(id, 1));
        // Those of one purpose are the same ones, each time.
        assert!(statuses().take(id, 2) && statuses().take(id, 3) && !statuses().take(id, 1));
        tokio::time::advance(pace).await;
        assert!(calls.take(id, 1) && statuses().take(id, 1) && !statuses().take(id, 1));
    }
}
