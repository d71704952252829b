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

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::Service;
use polis_base::sys::clock;
use polis_control::cluster::state::{Event, State};
use polis_control::consensus;
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;
use polis_wire::pki::Facts;
use polis_wire::rpc::Credentials;

/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Why a node that was off for long stays cut off. A wrong clock looks the same, so the clocks
/// come first. The last step gives up the data of the machine.
const ENDED: &str = "by the clock of this node its certificate has ended, and curators \
                     reject it: compare the clocks of the nodes; where they are right, \
                     the node was off for too long: reboot it, and it asks for a new certificate, \
                     which an operator approves; if it was a consensus member and its etcd is \
                     lost, an owner deletes it (`polisctl node delete NODE --force`), and its \
                     machine is registered again with an empty disk (`polisctl parameters \
                     register --wipes`)";

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
            Some(why) => {
                let own = service.outputs.credentials.borrow().clone();
                (Event::CutOff, why.words(own.as_ref(), clock::now()))
            }
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

/// Why a node is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// Its own member of etcd knows no leader.
    Leaderless,
    /// No curator answers.
    Silent,
}

impl Why {
    /// In words, for a node with these credentials.
    fn words(self, own: Option<&Credentials>, now: SystemTime) -> &'static str {
        let ended = || {
            let facts = own.and_then(|own| Facts::read(&own.certificate));
            facts.is_some_and(|facts| facts.not_after <= now)
        };
        match self {
            Self::Leaderless => "the etcd member of this node has no leader",
            Self::Silent if ended() => ENDED,
            Self::Silent => "no curator answers",
        }
    }
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
    fn cut_off(&self, now: Instant, after: Duration) -> Option<Why> {
        if now.saturating_duration_since(self.led) > after {
            return Some(Why::Leaderless);
        }
        let silent = now.saturating_duration_since(self.last_contact) > after;
        silent.then_some(Why::Silent)
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
    use polis_wire::rpc::testing::Authority;
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
        assert_eq!(view.cut_off(at(21), AFTER), Some(Why::Silent));
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
        assert_eq!(view.cut_off(at(21), AFTER), Some(Why::Leaderless));
        view.look(at(22), Some(at(22)), false);
        assert_eq!(view.cut_off(at(22), AFTER), None);
    }

    #[tokio::test]
    async fn a_node_whose_certificate_has_ended_says_so_and_names_the_clocks_first() {
        let own = Authority::new().await.node(1).await;
        let (now, later) = (clock::now(), clock::now() + Duration::from_secs(91 * 24 * 60 * 60));
        let words = |why: Why, at| why.words(Some(&own), at);
        assert_eq!(words(Why::Silent, now), "no curator answers");
        assert_eq!(Why::Silent.words(None, later), "no curator answers");
        let said = words(Why::Silent, later);
        let at = |text: &str| said.find(text).unwrap();
        assert!(at("compare the clocks") < at("reboot it") && at("reboot it") < at("--wipes"));
        // A voter renews its own certificate once its etcd has a leader.
        assert!(words(Why::Leaderless, later).contains("no leader"));
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
