//! The part of a run that waits for something to do.
//!
//! Invariants:
//! - A deadline that has passed during a look is due at once.
//! - Announcements of the kernel cause [`NOTICED_MAX`] looks in [`NOTICED_IN`] at most, and the
//!   last of them is followed by one: any machine of a segment causes some by each router
//!   advertisement.
//! - What is announced is taken at once, so that none of it piles up.
//!
//! What this module does not do: look (`reconcile`).

use std::collections::VecDeque;
use std::time::Duration;

use futures::FutureExt as _;
use futures::channel::mpsc::UnboundedReceiver;
use futures::stream::StreamExt as _;
use tokio::time::Instant;

use super::super::change::Changes;
use super::super::{dhcp, dhcpv6};
use super::{Error, PATIENCE, Run, configured};
use crate::parameters;
use polis_runtime::event;

/// The run listens for changes of links and addresses, and not for those of routes, so all is read
/// again now and then.
const REVIEW: Duration = Duration::from_secs(60);

/// Wait before actions that failed are tried again.
const RETRY: Duration = Duration::from_secs(2);

/// Looks in a time because of announcements: more than a boot with many links has, and a tenth of a
/// processor.
const NOTICED_MAX: usize = 64;
const NOTICED_IN: Duration = Duration::from_secs(2);

/// The reason why a run woke.
pub(super) enum Event {
    /// The kernel changed something, or time passed: everything is read again anyway.
    Look,
    Known(parameters::Network, bool),
    Dhcp(u32, dhcp::Event),
    Dhcpv6(u32, dhcpv6::Event),
}

pub(super) type Notice = (
    rtnetlink::packet_core::NetlinkMessage<netlink_packet_route::RouteNetlinkMessage>,
    rtnetlink::sys::SocketAddr,
);

/// The looks because of announcements.
#[derive(Debug, Default)]
pub(super) struct Noticed {
    /// The last ones, the oldest first.
    looks: VecDeque<Instant>,
    /// When the next one follows, if announcements wait for one.
    due: Option<Instant>,
}

impl Noticed {
    /// Whether an announcement that comes now has its look now.
    fn is_due(&mut self, now: Instant) -> bool {
        let oldest = self.looks.front().filter(|_| self.looks.len() >= NOTICED_MAX);
        self.due = oldest.map(|oldest| *oldest + NOTICED_IN).filter(|until| *until > now);
        if self.due.is_none() {
            self.count(now);
        }
        self.due.is_none()
    }

    /// All was read just now. A look for which announcements have waited counts like the others.
    fn looked(&mut self, now: Instant) {
        if self.due.take().is_some_and(|due| due <= now) {
            self.count(now);
        }
    }

    fn count(&mut self, now: Instant) {
        self.looks.push_back(now);
        if self.looks.len() > NOTICED_MAX {
            self.looks.pop_front();
        }
    }
}

impl Run {
    /// Waits for something to do. `waiting` is the time of the last report, where the node waits
    /// for an address or a card by it.
    pub(super) async fn next_event(
        &mut self,
        notices: &mut UnboundedReceiver<Notice>,
        waiting: Option<Instant>,
    ) -> Result<Event, Error> {
        self.noticed.looked(Instant::now());
        loop {
            if let Some(event) = self.wait(notices, waiting).await? {
                return Ok(event);
            }
            // A socket that is never empty must not keep the rest of the service waiting.
            tokio::task::consume_budget().await;
        }
    }

    /// The same; `None` for announcements that have their look later.
    async fn wait(
        &mut self,
        notices: &mut UnboundedReceiver<Notice>,
        waiting: Option<Instant>,
    ) -> Result<Option<Event>, Error> {
        let latest = Instant::now() + if self.failed.is_empty() { REVIEW } else { RETRY };
        let patience = self.started + PATIENCE;
        let deadlines = [
            self.leases.deadline(),
            self.primary.deadline(),
            self.advertised.deadline(),
            self.v6.leases.deadline(),
            self.v6.routers.servers.deadline(),
            self.v6.routers.solicitations.deadline(),
            self.noticed.due,
            waiting.filter(|reported| patience > *reported).map(|_reported| patience),
        ];
        let deadline = next_look(&self.changes, &deadlines, latest);
        let (is_known, trying) = (self.is_known, self.changes.is_trying());
        tokio::select! {
            // Cancel-safe: a notice is taken or stays.
            notice = notices.next() => {
                let (notice, _from) = notice.ok_or(Error::Closed)?;
                self.v6.noticed(&notice);
                // One look is enough for all that has piled up.
                while let Some(Some((notice, _from))) = notices.next().now_or_never() {
                    self.v6.noticed(&notice);
                }
                Ok(self.noticed.is_due(Instant::now()).then_some(Event::Look))
            }
            // Cancel-safe: the value stays where it is.
            network = event::until(&mut self.service.known, "parameters", configured),
                if !is_known => {
                let (network, given) = network?;
                Ok(Some(Event::Known(network, given)))
            }
            // Cancel-safe, both: they wait for event values.
            order = self.service.order.changed(), if is_known => {
                order.map_err(|_closed| event::Closed("the order of the network"))?;
                Ok(Some(Event::Look))
            }
            proof = self.service.proof.changed(), if trying => {
                proof.map_err(|_closed| event::Closed("the proof of contact"))?;
                Ok(Some(Event::Look))
            }
            // Cancel-safe, too.
            asks = event::until(&mut self.service.asks, "parameters", |asks| asks.then_some(())),
                if !is_known && self.network.is_none() => {
                asks.map(|()| Some(Event::Look)).map_err(Into::into)
            }
            // Cancel-safe, both: the clients keep their progress.
            Some((link, event)) = self.clients.next() => Ok(Some(Event::Dhcp(link, event))),
            Some((link, event)) = self.v6.clients.next() => Ok(Some(Event::Dhcpv6(link, event))),
            // Cancel-safe, too.
            changed = self.v6.routers.changed() => {
                changed.map(|()| Some(Event::Look)).map_err(Error::Routers)
            }
            // Cancel-safe, too.
            changed = self.conflicts.changed() => {
                changed.map(|()| Some(Event::Look)).map_err(Error::Arp)
            }
            // Cancel-safe: only waits.
            () = tokio::time::sleep_until(deadline) => Ok(Some(Event::Look)),
        }
    }
}

/// When all is read again without an event: at the first deadline, `latest` otherwise. A deadline
/// that has passed since the last look is due at once, since only another look acts on it; after
/// that, it is none any more.
fn next_look(changes: &Changes, others: &[Option<Instant>], latest: Instant) -> Instant {
    let deadlines = others.iter().copied().chain([changes.deadline()]);
    deadlines.flatten().fold(latest, Instant::min)
}

#[cfg(test)]
mod tests {
    use super::super::super::Order;
    use super::super::super::change::TRIAL;
    use super::*;

    #[test]
    fn a_trial_that_ended_during_a_look_has_another_look_at_once() {
        let (mut changes, now) = (Changes::default(), Instant::now());
        changes.known(parameters::Network::default(), true);
        let nameservers = vec![std::net::IpAddr::from([192, 0, 2, 2])];
        let network = parameters::Network { nameservers, ..Default::default() };
        changes.take(&Order { number: 7, network: Some(network) }, None, now);
        // The look began before the end of the trial, and lasted until after it.
        let after = now + TRIAL + Duration::from_secs(1);
        let latest = after + REVIEW;
        assert_eq!(next_look(&changes, &[None], latest), now + TRIAL);
        changes.review(None, after);
        assert_eq!(next_look(&changes, &[None], latest), latest);
        let sooner = after + Duration::from_secs(1);
        assert_eq!(next_look(&changes, &[None, Some(sooner)], latest), sooner);
    }

    #[test]
    fn a_segment_full_of_announcements_costs_some_looks_and_the_last_one_has_its_own() {
        let (mut noticed, start) = (Noticed::default(), Instant::now());
        assert!(noticed.is_due(start), "an ordinary one has its look at once");
        // One each millisecond, for ten times the time; a look that was put off has its turn.
        let mut looks = 1;
        for millis in 1..20_000 {
            let now = start + Duration::from_millis(millis);
            if noticed.due.is_some_and(|due| due <= now) {
                noticed.looked(now);
                looks += 1;
            }
            looks += usize::from(noticed.is_due(now));
        }
        assert!((NOTICED_MAX..=10 * NOTICED_MAX).contains(&looks), "{looks} looks");
        let due = noticed.due.unwrap().duration_since(start);
        assert!(due > Duration::from_secs(19) && due < Duration::from_secs(20) + NOTICED_IN);
    }
}
