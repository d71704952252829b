//! The DHCP leases of the node: keeps them, and releases them in time.
//!
//! ```text
//! answered --> [Held] --renewed--> [Held]
//!                |--expired------------------------------------------> given up
//!                |--link gone----------------------------------------> given up
//!                +--unplugged, and another link has been chosen------> given up
//! ```
//!
//! A link counts as unplugged when it has had no carrier for [`CARRIER_GRACE`].
//!
//! Invariants:
//! - A lease is not held past its end, even if the DHCP client does nothing, and says at each
//!   review how much of it is left: an address that the kernel gets late does not last longer.
//!
//! What this module does not do: look at the clock. The caller passes the time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Leased;
use super::lease::Lease;
use super::plan::Observed;
use polis_base::sys::clock;

/// How long a pulled cable is taken for an accident. A switch that restarts
/// takes longer, but then a spare is as good.
pub(super) const CARRIER_GRACE: Duration = Duration::from_secs(10);

/// The value of DHCP for a lease without end.
const INFINITE: Duration = Duration::from_secs(u32::MAX as u64);

/// Every lease that is held, by the index of its link.
#[derive(Debug, Default)]
pub(super) struct Leases {
    held: BTreeMap<u32, Held>,
    /// The time of the last review.
    reviewed: Option<Instant>,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    /// `None` for a lease without end.
    ends: Option<Instant>,
    /// The lease as it is published.
    leased: Leased,
    /// Since when its cable is unplugged.
    unplugged_since: Option<Instant>,
}

impl Leases {
    /// The leases, as the plan wants them.
    pub(super) fn by_link(&self) -> BTreeMap<u32, &Lease> {
        self.held.iter().map(|(link, held)| (*link, &held.lease)).collect()
    }

    /// The links with a lease that were unplugged at the last review.
    pub(super) fn unplugged(&self) -> BTreeSet<u32> {
        let unplugged = self.held.iter().filter(|(_link, held)| {
            let unplugged_from = held.unplugged_since.map(|since| since + CARRIER_GRACE);
            unplugged_from
                .is_some_and(|from| self.reviewed.is_some_and(|reviewed| reviewed >= from))
        });
        unplugged.map(|(link, _held)| *link).collect()
    }

    /// A server answered, now.
    pub(super) fn answered(&mut self, link: u32, lease: Lease, now: Instant) {
        let lifetime = (lease.lifetime < INFINITE).then_some(lease.lifetime);
        let ends = lifetime.map(|lifetime| now + lifetime);
        let leased = Leased {
            address: lease.address,
            ends: lifetime.map(|lifetime| clock::uptime().saturating_add(lifetime)),
        };
        self.held.insert(link, Held { lease, ends, leased, unplugged_since: None });
    }

    /// The lease that a server gave to this link.
    pub(super) fn leased(&self, link: u32) -> Option<Leased> {
        self.held.get(&link).map(|held| held.leased)
    }

    /// A client reports that its lease is over.
    pub(super) fn ended(&mut self, link: u32) -> Option<Lease> {
        self.held.remove(&link).map(|held| held.lease)
    }

    /// Drops the leases of all links but this one: they are spares.
    pub(super) fn keep_only(&mut self, link: u32) {
        self.held.retain(|index, _held| *index == link);
    }

    /// Drops the leases of links that may not ask: another configuration is in force.
    pub(super) fn keep(&mut self, candidates: &[u32]) {
        self.held.retain(|index, _held| candidates.contains(index));
    }

    /// Gives up the leases of unplugged links, since `chosen` gives the node its address; returns
    /// them with the reason. While `chosen` is unplugged itself, every lease stays.
    pub(super) fn give_way(&mut self, chosen: u32) -> Vec<(u32, &'static str)> {
        let mut unplugged = self.unplugged();
        if unplugged.contains(&chosen) {
            return Vec::new();
        }
        unplugged.retain(|link| self.held.remove(link).is_some());
        let reason = "its cable is unplugged, and another interface has a lease";
        unplugged.into_iter().map(|link| (link, reason)).collect()
    }

    /// Gives up what cannot be held any longer; returns it with the reason.
    pub(super) fn review(&mut self, observed: &Observed, now: Instant) -> Vec<(u32, &'static str)> {
        self.reviewed = Some(now);
        let mut given_up = Vec::new();
        self.held.retain(|index, held| {
            if let Some(ends) = held.ends {
                held.lease.lifetime = ends.saturating_duration_since(now);
            }
            let link = observed.links.get(index);
            if link.is_some_and(|link| link.carrier) {
                held.unplugged_since = None;
            } else {
                held.unplugged_since.get_or_insert(now);
            }
            let reason = if link.is_none() {
                "the interface is gone"
            } else if held.ends.is_some_and(|ends| now >= ends) {
                "the lease ended"
            } else {
                return true;
            };
            given_up.push((*index, reason));
            false
        });
        given_up
    }

    /// When [`Leases::review`] may find otherwise than the last time; it may be past by now.
    /// `None`: not by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let ends = self.held.values().filter_map(|held| held.ends);
        let unplugged = self.held.values().filter_map(|held| held.unplugged_since);
        let all = ends.chain(unplugged.map(|since| since + CARRIER_GRACE));
        all.filter(|at| self.reviewed.is_none_or(|reviewed| *at > reviewed)).min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::plan::tests::{observed, unplug};
    use super::*;

    fn lease(lifetime: u64) -> Lease {
        Lease {
            address: "10.0.2.15/24".parse().unwrap(),
            routes: Vec::new(),
            nameservers: Vec::new(),
            ntp_servers: Vec::new(),
            mtu: None,
            lifetime: Duration::from_secs(lifetime),
            server: Ipv4Addr::new(10, 0, 2, 2).into(),
        }
    }

    #[test]
    fn a_lease_is_given_up_when_it_ends_and_not_before() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(60), now);
        assert_eq!(leases.deadline(), Some(now + Duration::from_secs(60)));
        let almost = now + Duration::from_secs(59);
        assert!(leases.review(&observed(), almost).is_empty());
        let end = now + Duration::from_secs(60);
        assert_eq!(leases.review(&observed(), end), [(2, "the lease ended")]);
        assert_eq!(leases.deadline(), None);
    }

    #[test]
    fn a_deadline_that_has_passed_since_the_last_review_is_due_and_one_before_it_is_not() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(60), now);
        let pulled = unplug(unplug(observed(), 2), 3);
        leases.review(&pulled, now);
        // The look that this review was part of takes until after this.
        assert_eq!(leases.deadline(), Some(now + CARRIER_GRACE));
        // Without a spare nothing follows from it: it must not be due for ever.
        leases.review(&pulled, now + CARRIER_GRACE);
        assert_eq!(leases.deadline(), Some(now + Duration::from_secs(60)));
        let given_up = leases.review(&pulled, now + Duration::from_secs(61));
        assert_eq!((given_up.len(), leases.deadline()), (1, None));
    }

    #[test]
    fn a_renewed_lease_ends_later() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(60), now);
        leases.answered(2, lease(60), now + Duration::from_secs(30));
        assert!(leases.review(&observed(), now + Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn an_address_that_is_added_late_lasts_as_long_as_the_rest_of_its_lease() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(60), now);
        leases.answered(3, lease(u32::MAX.into()), now);
        leases.review(&observed(), now + Duration::from_secs(20));
        let left = leases.by_link().values().map(|lease| lease.lifetime).collect::<Vec<_>>();
        assert_eq!(left, [Duration::from_secs(40), INFINITE]);
    }

    #[test]
    fn an_endless_lease_has_no_deadline() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(u32::MAX.into()), now);
        assert_eq!(leases.deadline(), None);
    }

    #[test]
    fn a_pulled_cable_gives_way_after_a_while_to_the_link_that_is_chosen() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(3600), now);
        leases.answered(3, lease(3600), now);
        let pulled = unplug(observed(), 2);
        assert!(leases.review(&pulled, now).is_empty());
        assert_eq!(leases.deadline(), Some(now + CARRIER_GRACE));
        assert!(leases.unplugged().is_empty());
        assert!(leases.give_way(3).is_empty(), "it may be an accident");
        let later = now + CARRIER_GRACE;
        assert!(leases.review(&pulled, later).is_empty());
        assert_eq!(leases.unplugged(), BTreeSet::from([2]));
        let given_up = leases.give_way(3);
        assert!(matches!(given_up.as_slice(), [(2, _)]), "{given_up:?}");
        assert_eq!(leases.by_link().into_keys().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_pulled_cable_keeps_its_lease_while_no_other_link_is_chosen() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(3600), now);
        leases.answered(3, lease(3600), now);
        let pulled = unplug(unplug(observed(), 2), 3);
        assert!(leases.review(&pulled, now).is_empty());
        assert!(leases.review(&pulled, now + CARRIER_GRACE).is_empty());
        assert!(leases.give_way(2).is_empty());
        assert_eq!(leases.by_link().len(), 2);
    }

    #[test]
    fn a_cable_that_is_plugged_in_again_is_not_unplugged() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(2, lease(3600), now);
        leases.review(&unplug(observed(), 2), now);
        leases.review(&unplug(observed(), 2), now + CARRIER_GRACE);
        assert_eq!(leases.unplugged(), BTreeSet::from([2]));
        leases.review(&observed(), now + CARRIER_GRACE + Duration::from_secs(1));
        assert!(leases.unplugged().is_empty());
        assert!(leases.give_way(3).is_empty());
    }

    #[test]
    fn a_vanished_interface_holds_nothing() {
        let now = Instant::now();
        let mut leases = Leases::default();
        leases.answered(9, lease(3600), now);
        assert_eq!(leases.review(&observed(), now), [(9, "the interface is gone")]);
    }
}
