//! The clock of the leader: a leader whose clock disagrees with the majority of the voters steps
//! down, and says so, and one whose clock no other confirms forgets nothing by it.
//!
//! A leader whose clock is days ahead takes every certificate for ended: it refuses all nodes
//! and users, and holds its lease. The differences are those that chronyd measures against the
//! other voters, by NTP: heartbeats could not show it, since they come through the very
//! connections that such a leader refuses.
//!
//! ```text
//! Ahead (event value) --+
//! voters (directory) ---+--> disagrees? (pure) --yes--> the term ends, another candidate leads
//! ```
//!
//! Invariants:
//! - A leader that the majority of the voters does not answer stays: nothing is known.
//! - A leader stays while one voter of the majority is near it.
//!
//! What this module does not do: set a clock (`time`). A curator that stepped down stands as a
//! candidate again, behind the others, and steps down again while its clock is wrong.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use polis_proto::v1;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::directory::Directory;
use super::leader::Leadership;
use polis_machine::time::{self, Ahead};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;
use polis_wire::node_roles;

/// How far clocks may be apart: far above what measurements across a slow network differ by,
/// far below what harms certificates, which begin a day before they are made.
const APART_MAX: Duration = Duration::from_secs(10);

/// Pause between two times that a curator steps down: long enough for another to lead.
const PAUSE: Duration = Duration::from_secs(60);

/// Steps down where it must, while this curator leads. A service of every curator.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// This node.
    pub(super) node: NodeId,
    /// The measurements of this node.
    pub(super) ahead: watch::Receiver<Ahead>,
    /// The voters, and their addresses.
    pub(super) directory: watch::Receiver<Directory>,
    /// Whether this curator leads.
    pub(super) leadership: watch::Receiver<Leadership>,
    /// When this curator stepped down last.
    pub(super) stepped_down: Option<Instant>,
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        loop {
            self.look();
            let changed = async {
                tokio::select! {
                    // Cancel-safe, all: they wait for event values.
                    changed = self.ahead.changed() => changed.map_err(|_closed| "the clock"),
                    changed = self.directory.changed() => {
                        changed.map_err(|_closed| "the directory")
                    }
                    changed = self.leadership.changed() => {
                        changed.map_err(|_closed| "the election")
                    }
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed.map_err(Closed)?,
                None => return Ok(()),
            }
        }
    }

    /// Ends the term of this curator if its clock disagrees.
    fn look(&mut self) {
        let ahead = self.ahead.borrow_and_update().clone();
        let Some(term) = self.leadership.borrow_and_update().term.clone() else { return };
        let others = others(&self.directory.borrow_and_update(), self.node);
        let measured: Vec<i64> =
            others.iter().filter_map(|address| ahead.get(address).copied()).collect();
        // One that no other curator follows leads again at once, and is left to lead.
        let lately = self.stepped_down.is_some_and(|at| at.elapsed() < PAUSE);
        if let Some(apart) = disagrees(others.len() + 1, &measured).filter(|_apart| !lately) {
            let seconds = time::seconds(apart);
            warn!(
                seconds,
                voters = measured.len(),
                "the clock of this leader is apart from that of the majority of the voters: \
                 another curator leads"
            );
            term.step_down();
            self.stepped_down = Some(Instant::now());
        }
    }
}

/// Whether a clock may decide what has ended for good: it is near those of a majority of the
/// voters, of which `node` is one, and near one clock at least, of a voter or of a server.
pub(super) fn is_confirmed(directory: &Directory, node: NodeId, ahead: &Ahead) -> bool {
    confirmed(&others(directory, node), ahead)
}

fn confirmed(others: &BTreeSet<IpAddr>, ahead: &Ahead) -> bool {
    let near: BTreeSet<_> = ahead.iter().filter(|(_, ahead)| is_near(**ahead)).collect();
    let voters = 1 + near.iter().filter(|(address, _)| others.contains(address)).count();
    !near.is_empty() && voters > others.len().div_ceil(2)
}

/// Whether clocks that are so many microseconds apart agree.
fn is_near(ahead: i64) -> bool {
    u128::from(ahead.unsigned_abs()) <= APART_MAX.as_micros()
}

/// The addresses of the other voters.
fn others(directory: &Directory, own: NodeId) -> BTreeSet<IpAddr> {
    let voters = directory.nodes().filter(|(id, known)| {
        let node = &known.node;
        *id != own
            && node.state() == v1::NodeState::Up
            && node_roles::is_consensus_member(node.roles.as_ref())
    });
    let address = |node: &v1::Node| node.status.as_ref()?.external_address.parse().ok();
    voters.filter_map(|(_, known)| address(&known.node)).collect()
}

/// Whether a majority of `voters`, of which this node is one, agree with each other on a time
/// other than this node's: then by how much this node is ahead of them, in microseconds.
/// `ahead` are the measurements against the others that answer.
fn disagrees(voters: usize, ahead: &[i64]) -> Option<i64> {
    let max = i64::try_from(APART_MAX.as_micros()).unwrap_or(i64::MAX);
    if ahead.iter().any(|ahead| is_near(*ahead)) {
        return None;
    }
    let mut sorted = ahead.to_vec();
    sorted.sort_unstable();
    let majority = voters / 2 + 1;
    let near = |window: &&[i64]| match window {
        [first, .., last] => last.saturating_sub(*first) <= max,
        _ => true,
    };
    let agreed = sorted.windows(majority).find(near)?;
    agreed.get(majority / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000_000;
    const DAYS_90: i64 = 90 * 86_400 * SECOND;

    #[test]
    fn a_leader_ahead_by_90_days_of_two_others_disagrees() {
        assert_eq!(disagrees(3, &[DAYS_90, DAYS_90 + SECOND]), Some(DAYS_90 + SECOND));
        assert_eq!(disagrees(3, &[-DAYS_90, -DAYS_90]), Some(-DAYS_90));
        assert_eq!(disagrees(5, &[DAYS_90, 3 * DAYS_90, DAYS_90, DAYS_90]), Some(DAYS_90));
    }

    #[test]
    fn a_leader_stays_where_less_than_a_majority_answers() {
        assert_eq!(disagrees(3, &[DAYS_90]), None);
        assert_eq!(disagrees(5, &[DAYS_90, DAYS_90]), None);
        assert_eq!(disagrees(3, &[]), None);
        // Of two voters, either one may be wrong.
        assert_eq!(disagrees(2, &[DAYS_90]), None);
        assert_eq!(disagrees(1, &[]), None);
    }

    #[test]
    fn a_leader_stays_where_the_others_do_not_agree_or_one_is_near() {
        assert_eq!(disagrees(3, &[DAYS_90, -DAYS_90]), None);
        assert_eq!(disagrees(3, &[DAYS_90, SECOND]), None);
        assert_eq!(disagrees(3, &[10 * SECOND, 10 * SECOND]), None);
        assert_eq!(disagrees(3, &[10 * SECOND + 1, 10 * SECOND + 1]), Some(10 * SECOND + 1));
    }

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn measured(ahead: &[(u8, i64)]) -> Ahead {
        ahead.iter().map(|(last, ahead)| (address(*last), *ahead)).collect()
    }

    #[test]
    fn a_clock_that_is_90_days_ahead_of_the_majority_is_not_confirmed() {
        let others = [1, 2].map(address).into();
        assert!(!confirmed(&others, &measured(&[(1, DAYS_90), (2, DAYS_90)])));
        assert!(!confirmed(&others, &measured(&[(1, DAYS_90)])));
        assert!(confirmed(&others, &measured(&[(1, DAYS_90), (2, SECOND)])));
        assert!(confirmed(&others, &measured(&[(1, -SECOND)])));
        // A server confirms no clock against the voters.
        assert!(!confirmed(&others, &measured(&[(1, DAYS_90), (2, DAYS_90), (9, 0)])));
    }

    #[test]
    fn a_clock_that_was_compared_with_nothing_is_not_confirmed() {
        assert!(!confirmed(&[1, 2].map(address).into(), &Ahead::new()));
        assert!(!confirmed(&BTreeSet::new(), &Ahead::new()));
        assert!(!confirmed(&BTreeSet::new(), &measured(&[(9, DAYS_90)])));
        assert!(confirmed(&BTreeSet::new(), &measured(&[(9, SECOND)])));
    }

    proptest! {
        #[test]
        fn no_clock_is_confirmed_by_which_a_leader_steps_down(
            ahead in prop::collection::vec(any::<i64>(), 0..9),
        ) {
            let others: BTreeSet<_> = (0..8).map(address).collect();
            let known: Ahead = (0..8).map(address).zip(ahead.iter().copied()).collect();
            let ahead: Vec<_> = known.values().copied().collect();
            prop_assert!(
                disagrees(others.len() + 1, &ahead).is_none() || !confirmed(&others, &known)
            );
        }

        #[test]
        fn whatever_is_measured_a_leader_that_steps_down_is_far_from_a_majority(
            voters in 1_usize..9, ahead in prop::collection::vec(any::<i64>(), 0..9),
        ) {
            if let Some(apart) = disagrees(voters, &ahead) {
                prop_assert!(apart.unsigned_abs() > 10_000_000);
                prop_assert!(ahead.len() > voters / 2);
            }
        }
    }
}
