//! The address of IPv6 of a node without DHCP for IPv4: a rule, and no race of servers and routers.
//!
//! The kernel makes addresses of the prefixes that routers advertise (SLAAC), and DHCPv6 servers
//! give others. One of them becomes the node's where no link has a lease of IPv4: a link of the
//! machine before one behind USB, a global address before a unique local one, one from a server
//! before one of a prefix, then the place of the link on its bus, then the lowest address. All of
//! that is the same at each boot.
//!
//! ```text
//!           an address, and no lease for the time of a DHCP server
//! [open] ----------------------------------------------------------> [chosen]
//!   ^ ^       the kernel has taken it away, and there is no other      |  |
//!   | +----------------------------------------------------------------+  |
//!   +---- a lease, or an address in the parameters -----------------------+
//! ```
//!
//! An address counts while the kernel has it for itself alone, it is not temporary, its router
//! has not deprecated it, and a router advertises a way out on its link. A chosen address stays
//! until it is gone; one that is deprecated, or whose cable is unplugged, until there is another.
//!
//! Invariants:
//! - IPv4 comes first: while a link has a lease, or the parameters give an address, this chooses
//!   none, and a lease that comes later takes its place. Without a configuration, the lease of a
//!   unplugged link (`leases`) does not count.
//! - With the same links, routers and prefixes, the same address is chosen, whatever the order
//!   of the advertisements within the wait.
//!
//! What this module does not do: make addresses or routes (the kernel), or ask DHCPv6 (`dhcpv6`).

use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use super::leases::CARRIER_GRACE;
use super::plan::Observed;
use crate::parameters::Cidr;

/// How long a DHCP server may take after there is an address that could be chosen. The segment
/// passes packets by then, and a client that gets no answer starts over after as long.
const DHCP_MAX: Duration = super::dhcp::ASKING_MAX;

/// The same while the kernel has an IPv4 address of a former run: its server has answered before.
const DHCP_MAX_AGAIN: Duration = Duration::from_secs(60);

/// How long the other addresses may take where no link asks DHCP: a router advertises all of its
/// prefixes at once, and the kernel asks for a second whether another machine has an address.
const SETTLE: Duration = Duration::from_secs(5);

/// Whether DHCP servers are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dhcp {
    Asked,
    Off,
}

/// The order of addresses; the least is the best.
type Rank<'a> = (bool, bool, bool, &'a str, u32, Cidr);

/// The chosen address.
#[derive(Debug, Default)]
pub(super) struct Advertised {
    chosen: Option<(u32, Cidr)>,
    /// The node's address in a former run of the service.
    former: Option<IpAddr>,
    /// Since when there is an address that could be chosen.
    offered: Option<Instant>,
    /// The address that is chosen if nothing better comes, and when.
    settled: Option<((u32, Cidr), Instant)>,
    unplugged_since: Option<Instant>,
    /// The time of the last review.
    reviewed: Option<Instant>,
}

impl Advertised {
    /// The node had `former` before the service started again.
    pub(super) fn after(former: Option<IpAddr>) -> Self {
        Self { former: former.filter(IpAddr::is_ipv6), ..Self::default() }
    }

    /// The node has another address, or waits for the better one of two.
    pub(super) fn rest(&mut self) {
        *self = Self::default();
    }

    /// Looks at the addresses of these links; returns the one that was chosen just now, in place
    /// of another or of none.
    pub(super) fn review(
        &mut self,
        observed: &Observed,
        links: &[u32],
        dhcp: Dhcp,
        now: Instant,
    ) -> Option<(u32, Cidr)> {
        self.reviewed = Some(now);
        let offers = observed.addresses.iter().filter(|(link, _)| links.contains(link));
        let offers: Vec<Rank<'_>> = offers.filter_map(|at| rank(observed, *at)).collect();
        self.settled = None;
        let before = self.chosen;
        self.chosen = before.filter(|chosen| observed.has(*chosen));
        let stays = self.chosen.is_some_and(|chosen| !self.may_go(observed, chosen, now));
        let best = offers.iter().min().filter(|_best| !stays);
        let Some((.., link, address)) = best.copied() else {
            self.offered = None;
            return None;
        };
        let former = offers.iter().find(|(.., it)| Some(it.address()) == self.former);
        let best = former.map_or((link, address), |(.., link, address)| (*link, *address));
        let offered = *self.offered.get_or_insert(now);
        let until = offered + patience(observed, links, dhcp);
        // A node that has had such an address got no lease until now.
        if before.is_none() && former.is_none() && until > now {
            self.settled = Some((best, until));
            return None;
        }
        *self = Self { chosen: Some(best), ..Self::default() };
        self.chosen
    }

    /// Whether another address may take the place of the chosen one, which the kernel has.
    fn may_go(&mut self, observed: &Observed, (link, cidr): (u32, Cidr), now: Instant) -> bool {
        if observed.links.get(&link).is_some_and(|link| link.carrier) {
            self.unplugged_since = None;
        } else {
            self.unplugged_since.get_or_insert(now);
        }
        let unplugged = self.unplugged_since.is_some_and(|since| now >= since + CARRIER_GRACE);
        unplugged || observed.flaws.contains_key(&(link, cidr))
    }

    /// The link and the address that is the node's.
    pub(super) fn chosen(&self) -> Option<(u32, Cidr)> {
        self.chosen
    }

    /// The address that will be chosen unless a better one or a lease comes, and when.
    pub(super) fn settled(&self) -> Option<((u32, Cidr), Instant)> {
        self.settled
    }

    /// When [`Advertised::review`] may decide otherwise than the last time; it may be past by
    /// now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let unplugged = self.unplugged_since.map(|since| since + CARRIER_GRACE);
        let unplugged = unplugged.filter(|at| self.reviewed.is_none_or(|reviewed| *at > reviewed));
        self.settled.map(|(_, until)| until).into_iter().chain(unplugged).min()
    }
}

/// The rank of an address; `None` if it must not be chosen.
fn rank(observed: &Observed, (index, cidr): (u32, Cidr)) -> Option<Rank<'_>> {
    let IpAddr::V6(address) = cidr.address() else { return None };
    let link = observed.links.get(&index).filter(|link| link.carrier && link.router.is_some())?;
    let flawless = !observed.flaws.contains_key(&(index, cidr));
    // Of the node's own, only those from servers: it has no address in the parameters.
    let of_prefix = !observed.own.contains(&(index, cidr));
    let local = address.is_unique_local();
    flawless.then_some((link.usb, local, of_prefix, link.place.as_str(), index, cidr))
}

fn patience(observed: &Observed, links: &[u32], dhcp: Dhcp) -> Duration {
    let mut all = observed.addresses.iter().filter(|(link, _)| links.contains(link));
    match dhcp {
        Dhcp::Off => SETTLE,
        Dhcp::Asked if all.any(|(_, cidr)| cidr.address().is_ipv4()) => DHCP_MAX_AGAIN,
        Dhcp::Asked => DHCP_MAX,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::super::plan::Flaw;
    use super::super::plan::tests::{observed as two, unplug};
    use super::*;

    const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    /// `eth0` 2 and `eth1` 3, each with a router.
    fn observed(addresses: &[(u32, &str)]) -> Observed {
        let mut observed = two();
        for link in observed.links.values_mut() {
            link.router = Some(ROUTER);
        }
        observed.addresses = addresses.iter().map(|(link, text)| (*link, cidr(text))).collect();
        observed
    }

    /// The address that is chosen once nothing better can come, as the service would: at each
    /// deadline, again.
    fn chosen(observed: &Observed) -> Option<(u32, Cidr)> {
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        advertised.review(observed, &[2, 3], Dhcp::Asked, now);
        let at = advertised.deadline().unwrap_or(now);
        advertised.review(observed, &[2, 3], Dhcp::Asked, at);
        advertised.chosen()
    }

    #[test]
    fn an_address_is_chosen_when_no_dhcp_server_has_answered_in_time() {
        let observed = observed(&[(2, "2001:db8::5/64")]);
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        let address = (2, cidr("2001:db8::5/64"));
        assert_eq!(advertised.review(&observed, &[2, 3], Dhcp::Asked, now), None);
        assert_eq!(advertised.settled(), Some((address, now + DHCP_MAX)));
        let almost = now + DHCP_MAX - Duration::from_millis(1);
        assert_eq!(advertised.review(&observed, &[2, 3], Dhcp::Asked, almost), None);
        let end = now + DHCP_MAX;
        assert_eq!(advertised.review(&observed, &[2, 3], Dhcp::Asked, end), Some(address));
        assert_eq!((advertised.chosen(), advertised.deadline()), (Some(address), None));
        assert_eq!(advertised.review(&observed, &[2, 3], Dhcp::Asked, end), None, "once");
    }

    #[test]
    fn an_address_of_a_dhcpv6_server_comes_before_one_of_a_prefix_and_after_a_global_one() {
        let six = (3, cidr("2001:db8::77/128"));
        let mut both = observed(&[(2, "2001:db8::5/64"), (3, "2001:db8::77/128")]);
        assert_eq!(chosen(&both), Some((2, cidr("2001:db8::5/64"))));
        both.own.insert(six);
        assert_eq!(chosen(&both), Some(six));
        let mut local = observed(&[(2, "2001:db8::5/64"), (3, "fd00::77/128")]);
        local.own.insert((3, cidr("fd00::77/128")));
        assert_eq!(chosen(&local), Some((2, cidr("2001:db8::5/64"))));
    }

    #[test]
    fn a_lease_ends_the_wait_and_takes_the_place_of_a_chosen_address() {
        let observed = observed(&[(2, "2001:db8::5/64")]);
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        advertised.review(&observed, &[2], Dhcp::Asked, now);
        advertised.rest();
        assert_eq!((advertised.chosen(), advertised.deadline()), (None, None));
        // After the lease has ended, the wait begins anew.
        let later = now + 2 * DHCP_MAX;
        assert_eq!(advertised.review(&observed, &[2], Dhcp::Asked, later), None);
        assert!(advertised.review(&observed, &[2], Dhcp::Asked, later + DHCP_MAX).is_some());
        advertised.rest();
        assert_eq!(advertised.chosen(), None);
    }

    #[test]
    fn a_lease_of_a_former_run_is_waited_for_longer_and_without_dhcp_there_is_no_such_wait() {
        let now = Instant::now();
        for (addresses, dhcp, wait) in [
            (&[(2, "2001:db8::5/64"), (2, "10.0.2.15/24")][..], Dhcp::Asked, DHCP_MAX_AGAIN),
            (&[(2, "2001:db8::5/64")], Dhcp::Off, SETTLE),
        ] {
            let mut advertised = Advertised::default();
            advertised.review(&observed(addresses), &[2], dhcp, now);
            assert_eq!(advertised.deadline(), Some(now + wait));
        }
    }

    #[test]
    fn temporary_deprecated_tentative_and_foreign_addresses_are_never_chosen() {
        let address = (2, cidr("2001:db8::5/64"));
        for flaw in [Flaw::Passing, Flaw::Tentative, Flaw::Duplicate] {
            let mut flawed = observed(&[(2, "2001:db8::5/64")]);
            flawed.flaws.insert(address, flaw);
            assert_eq!(chosen(&flawed), None, "{flaw:?}");
        }
        let mut no_way_out = observed(&[(2, "2001:db8::5/64")]);
        no_way_out.links.get_mut(&2).unwrap().router = None;
        assert_eq!(chosen(&no_way_out), None);
        assert_eq!(chosen(&unplug(observed(&[(2, "2001:db8::5/64")]), 2)), None);
        assert_eq!(chosen(&observed(&[(1, "2001:db8::5/64")])), None, "of a link that has its own");
        assert_eq!(chosen(&observed(&[(2, "10.0.2.15/24")])), None);
    }

    #[test]
    fn the_machine_s_card_comes_first_then_global_addresses_then_the_place() {
        let all = [(2, "fd00::5/64"), (3, "2001:db8:1::5/64"), (3, "2001:db8::5/64")];
        assert_eq!(chosen(&observed(&all)), Some((3, cidr("2001:db8::5/64"))));
        let mut usb = observed(&all);
        usb.links.get_mut(&3).unwrap().usb = true;
        assert_eq!(chosen(&usb), Some((2, cidr("fd00::5/64"))), "a unique local one counts");
        let mut placed = observed(&[(2, "2001:db8::5/64"), (3, "2001:db8:1::5/64")]);
        "pci0000:00/2".clone_into(&mut placed.links.get_mut(&2).unwrap().place);
        "pci0000:00/1".clone_into(&mut placed.links.get_mut(&3).unwrap().place);
        assert_eq!(chosen(&placed), Some((3, cidr("2001:db8:1::5/64"))));
    }

    #[test]
    fn an_address_that_is_gone_is_dropped_at_once_and_another_takes_its_place() {
        let both = observed(&[(2, "2001:db8::5/64"), (3, "2001:db8:1::5/64")]);
        let (mut advertised, now) = (Advertised::default(), Instant::now());
        advertised.review(&both, &[2, 3], Dhcp::Asked, now);
        let at = now + DHCP_MAX;
        assert!(advertised.review(&both, &[2, 3], Dhcp::Asked, at).is_some());
        let other = observed(&[(3, "2001:db8:1::5/64")]);
        let address = (3, cidr("2001:db8:1::5/64"));
        assert_eq!(advertised.review(&other, &[2, 3], Dhcp::Asked, at), Some(address));
        let none = observed(&[]);
        assert_eq!(advertised.review(&none, &[2, 3], Dhcp::Asked, at), None);
        assert_eq!((advertised.chosen(), advertised.deadline()), (None, None));
        // Without any, the wait begins anew.
        assert_eq!(advertised.review(&other, &[2, 3], Dhcp::Asked, at), None);
        assert_eq!(advertised.deadline(), Some(at + DHCP_MAX));
    }

    #[test]
    fn a_deprecated_or_unplugged_address_stays_until_there_is_another() {
        let address = (2, cidr("2001:db8::5/64"));
        let now = Instant::now();
        let taken = || {
            let mut advertised = Advertised::after(Some(address.1.address()));
            let alone = observed(&[(2, "2001:db8::5/64")]);
            assert_eq!(advertised.review(&alone, &[2, 3], Dhcp::Asked, now), Some(address));
            advertised
        };
        let mut deprecated = observed(&[(2, "2001:db8::5/64")]);
        deprecated.flaws.insert(address, Flaw::Passing);
        let mut advertised = taken();
        assert_eq!(advertised.review(&deprecated, &[2, 3], Dhcp::Asked, now), None);
        assert_eq!(advertised.chosen(), Some(address));
        let other = (3, cidr("2001:db8:1::5/64"));
        deprecated.addresses.insert(other);
        assert_eq!(advertised.review(&deprecated, &[2, 3], Dhcp::Asked, now), Some(other));

        let mut advertised = taken();
        let unplugged = unplug(observed(&[(2, "2001:db8::5/64"), (3, "2001:db8:1::5/64")]), 2);
        assert_eq!(advertised.review(&unplugged, &[2, 3], Dhcp::Asked, now), None);
        assert_eq!(advertised.deadline(), Some(now + CARRIER_GRACE));
        let later = now + CARRIER_GRACE;
        assert_eq!(advertised.review(&unplugged, &[2, 3], Dhcp::Asked, later), Some(other));

        // Without another, nothing follows from it: it must not be due for ever.
        let mut advertised = taken();
        let unplugged = unplug(observed(&[(2, "2001:db8::5/64")]), 2);
        advertised.review(&unplugged, &[2, 3], Dhcp::Asked, now);
        assert_eq!(advertised.deadline(), Some(now + CARRIER_GRACE));
        advertised.review(&unplugged, &[2, 3], Dhcp::Asked, later);
        assert_eq!((advertised.chosen(), advertised.deadline()), (Some(address), None));
    }

    #[test]
    fn a_service_that_starts_again_keeps_the_address_of_its_former_run() {
        let both = observed(&[(2, "2001:db8::5/64"), (3, "2001:db8:1::5/64")]);
        let former = (3, cidr("2001:db8:1::5/64"));
        let mut advertised = Advertised::after(Some(former.1.address()));
        let now = Instant::now();
        assert_eq!(advertised.review(&both, &[2, 3], Dhcp::Asked, now), Some(former));
        let mut four = Advertised::after(Some(IpAddr::from([10, 0, 2, 15])));
        assert_eq!(four.review(&both, &[2, 3], Dhcp::Asked, now), None);
    }

    proptest! {
        #[test]
        fn addresses_in_any_order_lead_to_the_same_choice(
            order in Just(vec![(2, "2001:db8:2::5/64"), (3, "2001:db8:1::5/64"), (2, "fd00::5/64"),
                (3, "2001:db8:3::5/64")]).prop_shuffle(),
            seconds in prop::collection::vec(0_u64..5, 4),
        ) {
            let (mut advertised, start) = (Advertised::default(), Instant::now());
            let mut waits = seconds.clone();
            waits.sort_unstable();
            for (second, count) in waits.into_iter().zip(1..) {
                let now = start + Duration::from_secs(second);
                advertised.review(&observed(&order[..count]), &[2, 3], Dhcp::Asked, now);
            }
            let end = start + Duration::from_secs(5) + DHCP_MAX;
            advertised.review(&observed(&order), &[2, 3], Dhcp::Asked, end);
            prop_assert_eq!(advertised.chosen(), Some((2, cidr("2001:db8:2::5/64"))));
        }
    }
}
