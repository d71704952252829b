//! The detection of a split: notices when this node is cut off from its cluster, and
//! when that ends.
//!
//! ```text
//!          no curator answers, or the own member of etcd knows no leader,
//!          for so long
//! [home] ------------------------------------------------------------> [split]
//!    ^                                                                    |
//!    +----- a leader answers, and the own member knows one ---------------+
//! ```
//!
//! What this module does not do: fence anything. Services watch the state and
//! decide for themselves.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::Service;
use polis_control::cluster::state::{Event, State};
use polis_control::consensus;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;

/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Looks until cancelled.
pub(super) async fn run(service: Service, ctx: Context) -> Result<(), Closed> {
    let mut cluster = service.outputs.cluster.subscribe();
    let home = until(&mut cluster, "the cluster", |status| status.is_member().then_some(()));
    let Some(home) = ctx.until_cancelled(home).await else { return Ok(()) };
    home?;
    ctx.healthy();
    let mut view = View::new(Instant::now());
    loop {
        let now = Instant::now();
        let last_contact = *service.outputs.contact.borrow();
        let leaderless = is_leaderless(&service.inputs.consensus.borrow());
        view.look(now, last_contact, leaderless);
        let event = match view.cut_off(now, service.config.cut_off_after) {
            Some(why) => (Event::CutOff, why),
            None => (Event::Reconnected, "the cluster answers again"),
        };
        change(&service, &ctx, event);
        if ctx.until_cancelled(sleep(POLL_INTERVAL)).await.is_none() {
            return Ok(());
        }
    }
}

/// Whether there is a member of etcd here that could not write.
fn is_leaderless(status: &consensus::Status) -> bool {
    // A node without a member has no member number.
    status.member.is_some() && status.leader.is_none()
}

/// The observed state of the cluster.
#[derive(Clone, Copy, Debug)]
struct View {
    /// The time of the last contact, or of this node's return to its cluster.
    last_contact: Instant,
    /// The last time at which the node's own member knew a leader, or did not need one.
    led: Instant,
}

impl View {
    fn new(now: Instant) -> Self {
        Self { last_contact: now, led: now }
    }

    fn look(&mut self, now: Instant, last_contact: Option<Instant>, leaderless: bool) {
        self.last_contact = last_contact.unwrap_or(self.last_contact).max(self.last_contact);
        if !leaderless {
            self.led = now;
        }
    }

    /// Why the node is cut off, if it is.
    fn cut_off(&self, now: Instant, after: Duration) -> Option<&'static str> {
        if now.saturating_duration_since(self.led) > after {
            return Some("the etcd member of this node has no leader");
        }
        let silent = now.saturating_duration_since(self.last_contact) > after;
        silent.then_some("no curator answers")
    }
}

/// Changes the state of this node, and logs the change.
pub(super) fn change(service: &Service, ctx: &Context, (event, why): (Event, &str)) {
    service.outputs.cluster.happened(event, ctx.lines(), |state| match state {
        State::Split => warn!(event = "cut-off", "this node is cut off from its cluster: {why}"),
        State::Disowning => warn!(event = "removed", "THE CLUSTER HAS REMOVED THIS NODE: {why}"),
        _ => info!(event = "home", "this node is home: {why}"),
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AFTER: Duration = Duration::from_secs(20);

    #[test]
    fn a_node_is_cut_off_after_a_long_silence() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut view = View::new(start);
        view.look(at(20), None, false);
        assert_eq!(view.cut_off(at(20), AFTER), None);
        view.look(at(21), None, false);
        assert_eq!(view.cut_off(at(21), AFTER), Some("no curator answers"));
        view.look(at(22), Some(at(22)), false);
        assert_eq!(view.cut_off(at(22), AFTER), None);
    }

    #[test]
    fn a_node_is_cut_off_when_its_member_knows_no_leader_for_long_enough() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut view = View::new(start);
        for second in 0..=21 {
            view.look(at(second), Some(at(second)), second > 0);
        }
        assert_eq!(view.cut_off(at(20), AFTER), None);
        let why = view.cut_off(at(21), AFTER);
        assert_eq!(why, Some("the etcd member of this node has no leader"));
        view.look(at(22), Some(at(22)), false);
        assert_eq!(view.cut_off(at(22), AFTER), None);
    }

    proptest! {
        #[test]
        fn a_node_with_contact_and_a_leader_is_never_cut_off(
            looks in prop::collection::vec((0_u64..5, any::<bool>(), any::<bool>()), 0..100)
        ) {
            let start = Instant::now();
            let mut view = View::new(start);
            let mut now = start;
            for (pause, hears, leaderless) in looks {
                now += Duration::from_secs(pause);
                view.look(now, hears.then_some(now), leaderless);
                if hears && !leaderless {
                    prop_assert_eq!(view.cut_off(now, AFTER), None);
                }
            }
        }
    }
}
