//! The link that gives an unconfigured node its address: a rule, and no race of DHCP servers.
//!
//! All links ask. Of those that got a lease the best counts: one with a cable before one that is
//! unplugged (`leases`), a card of the machine before one behind USB (a management controller's is
//! one), a lease with a way out before one without, then the place of the card on its bus, which is
//! the same at each boot. A link that would come first has some seconds to get a lease before
//! another counts.
//!
//! ```text
//!             a lease, and none that would come first is still expected
//! [open] ------------------------------------------------------------> [chosen]
//!    ^ all ask                                   its lease ended or gone |  |
//!    +-------------------------------------------------------------------+  |
//!                 a better kind of lease came: another is chosen <----------+
//! ```
//!
//! A chosen link stays while it has a lease: a better place alone changes no address of a
//! running node. While its lease is not of the best kind, and so while it is unplugged, the others
//! go on asking: an unplugged link keeps the node's address until another has a lease. Where the
//! address of another link that no lease gives (`advertised`) became the node's before that, the
//! plan uses nothing of the unplugged link's lease.
//!
//! Invariants:
//! - With the same links, servers and answers within [`SETTLE`] of the first, the same link is
//!   chosen, whatever their order.
//! - A machine with one link waits for nothing.
//! - A link without a carrier never replaces another: of two that are unplugged together, one
//!   counts as such first.
//!
//! What this module does not do: keep leases (`leases`), or ask (`service`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::lease::Lease;
use super::plan::{Link, Observed};
use crate::parameters::Cidr;

/// How long a link that would come first may take: a cable reports itself within three seconds,
/// a server answers within one.
const SETTLE: Duration = Duration::from_secs(5);

/// The same before a card behind USB counts, on a machine that has another: a switch may let
/// nothing through for half a minute after it started, and the next question comes later still.
/// A link that has the node's address has as long: until the lease ends, the address is valid.
const SETTLE_LONG: Duration = Duration::from_secs(60);

/// How good a lease is; the least is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    unplugged: bool,
    usb: bool,
    no_way_out: bool,
}

/// The order of links with a lease.
type Rank<'a> = (Class, &'a str, u32);

/// The chosen link.
#[derive(Debug, Default)]
pub(super) struct Primary {
    chosen: Option<(u32, Class)>,
    /// Since when each link may ask.
    asking: BTreeMap<u32, Instant>,
    /// When the first lease of the best class came that is still to be chosen.
    offered: Option<(Class, Instant)>,
    /// When another link counts, although one that would come first has no lease.
    settled: Option<Instant>,
}

impl Primary {
    /// Looks at the links that may ask, at the leases that are held and at those of them that are
    /// unplugged; returns the link that was chosen just now, in place of another or of none.
    pub(super) fn review(
        &mut self,
        observed: &Observed,
        candidates: &[u32],
        leases: &BTreeMap<u32, &Lease>,
        unplugged: &BTreeSet<u32>,
        now: Instant,
    ) -> Option<u32> {
        self.asking.retain(|link, _since| candidates.contains(link));
        for link in candidates {
            self.asking.entry(*link).or_insert(now);
        }
        let offer = |index: u32| {
            let (link, lease) = (observed.links.get(&index)?, leases.get(&index)?);
            let (class, place, index) = rank(index, link, lease.gateway().is_none());
            Some((Class { unplugged: unplugged.contains(&index), ..class }, place, index))
        };
        // Its lease may have become another.
        self.chosen = self.chosen.and_then(|(index, _class)| Some((index, offer(index)?.0)));
        self.settled = None;

        let carrier = |index: u32| observed.links.get(&index).is_some_and(|link| link.carrier);
        let may_count = |(_, _, index): &Rank<'_>| self.chosen.is_none() || carrier(*index);
        let offers = candidates.iter().filter_map(|index| offer(*index));
        let offers: Vec<_> = offers.filter(may_count).collect();
        let best = offers.iter().min().copied();
        let better = |class: Class| self.chosen.is_none_or(|(_link, chosen)| class < chosen);
        let Some(mut best) = best.filter(|(class, _, _)| better(*class)) else {
            self.offered = None;
            return None;
        };
        let class = best.0;
        let known = self.offered.filter(|(offered, _at)| *offered <= class);
        let (_, offered) = *self.offered.insert(known.unwrap_or((class, now)));
        // A node that runs keeps its address, unless there is a better kind of lease.
        let former =
            |(of, _, index): &&Rank<'_>| *of == class && is_former(observed, *index, leases);
        best = offers.iter().filter(former).min().copied().unwrap_or(best);
        let index = best.2;
        if !is_former(observed, index, leases) {
            let settled = self.settles(observed, leases, best, offered);
            self.settled = settled.filter(|at| *at > now);
            if self.settled.is_some() {
                return None;
            }
        }
        self.chosen = Some((index, class));
        self.offered = None;
        Some(index)
    }

    /// Until when a link without a lease may still take the place of `best`, which was `offered`
    /// then. `None`: no link may.
    fn settles(
        &self,
        observed: &Observed,
        leases: &BTreeMap<u32, &Lease>,
        best: Rank<'_>,
        offered: Instant,
    ) -> Option<Instant> {
        let expected = self.asking.iter().filter_map(|(index, since)| {
            let link = observed.links.get(index).filter(|_link| !leases.contains_key(index))?;
            let former = has_address(observed, *index);
            let patience = if best.0.usb || former { SETTLE_LONG } else { SETTLE };
            // One without a cable is not waited for after others have answered.
            let from = if link.carrier { offered.max(*since) } else { *since };
            (former || rank(*index, link, false) < best).then(|| from + patience)
        });
        expected.max()
    }

    /// The link that gives the node its address.
    pub(super) fn link(&self) -> Option<u32> {
        self.chosen.map(|(link, _class)| link)
    }

    /// Of these leases, the one that the plan uses: that of the chosen link, unless that was
    /// unplugged at the last review and the node's address is `advertised`, on another link. The
    /// gateway and the servers of the lease are out of reach then.
    pub(super) fn in_use<'a>(
        &self,
        mut leases: BTreeMap<u32, &'a Lease>,
        advertised: Option<(u32, Cidr)>,
    ) -> BTreeMap<u32, &'a Lease> {
        let is_used = |class: Class| !class.unplugged || advertised.is_none();
        let used = self.chosen.filter(|(_link, class)| is_used(*class));
        leases.retain(|link, _lease| used.is_some_and(|(of, _class)| of == *link));
        leases
    }

    /// Whether no other link needs to ask: the lease is of the best kind.
    pub(super) fn is_final(&self) -> bool {
        let best = Class { unplugged: false, usb: false, no_way_out: false };
        self.chosen.is_some_and(|(_link, class)| class == best)
    }

    /// When [`Primary::review`] decides otherwise by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.settled
    }
}

/// The rank of a link that is not unplugged.
fn rank(index: u32, link: &Link, no_way_out: bool) -> Rank<'_> {
    (Class { unplugged: false, usb: link.usb, no_way_out }, &link.place, index)
}

/// Whether the link has an address of a former run.
fn has_address(observed: &Observed, link: u32) -> bool {
    observed.addresses.iter().any(|(of, address)| *of == link && address.address().is_ipv4())
}

/// Whether the kernel has this address already: it is the one of a former run.
fn is_former(observed: &Observed, link: u32, leases: &BTreeMap<u32, &Lease>) -> bool {
    leases.get(&link).is_some_and(|lease| observed.addresses.contains(&(link, lease.address)))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::super::plan::tests::{observed as two, unplug};
    use super::*;

    /// `eth0` 2 and `eth1` 3 on PCI, and a card behind USB 4.
    fn observed() -> Observed {
        let mut observed = two();
        let usb = observed.links[&3].clone();
        observed.links.insert(4, Link { name: "eth2".to_owned(), usb: true, ..usb });
        let places = [(2, "pci0000:00/0000:00:03.0"), (3, "pci0000:00/0000:00:04.0")];
        for (index, place) in places.into_iter().chain([(4, "pci0000:00/0000:00:01.0/usb1")]) {
            place.clone_into(&mut observed.links.get_mut(&index).unwrap().place);
        }
        observed
    }

    fn lease(way_out: bool) -> Lease {
        let everywhere = "0.0.0.0/0".parse().unwrap();
        Lease {
            address: "10.0.2.15/24".parse().unwrap(),
            routes: way_out
                .then(|| (everywhere, Some(Ipv4Addr::new(10, 0, 2, 2))))
                .into_iter()
                .collect(),
            nameservers: Vec::new(),
            ntp_servers: Vec::new(),
            mtu: None,
            lifetime: Duration::from_secs(3600),
            server: Ipv4Addr::new(10, 0, 2, 2).into(),
        }
    }

    /// The machine with these leases, each with or without a way out, from such a second on.
    struct Story {
        primary: Primary,
        observed: Observed,
        candidates: Vec<u32>,
        unplugged: BTreeSet<u32>,
        start: Instant,
    }

    impl Story {
        fn new(candidates: &[u32]) -> Self {
            let (primary, start) = (Primary::default(), Instant::now());
            let (observed, candidates) = (observed(), candidates.to_vec());
            Self { primary, observed, candidates, unplugged: BTreeSet::new(), start }
        }

        fn at(&mut self, seconds: u64, leases: &[(u32, bool)]) -> Option<u32> {
            let leases: Vec<_> = leases.iter().map(|(link, out)| (*link, lease(*out))).collect();
            let leases = leases.iter().map(|(link, lease)| (*link, lease)).collect();
            let now = self.start + Duration::from_secs(seconds);
            self.primary.review(&self.observed, &self.candidates, &leases, &self.unplugged, now);
            self.primary.link()
        }
    }

    #[test]
    fn a_machine_with_one_card_waits_for_nothing() {
        for card in [2, 3, 4] {
            assert_eq!(Story::new(&[card]).at(0, &[(card, false)]), Some(card));
        }
    }

    #[test]
    fn the_first_card_on_the_bus_is_chosen_whoever_answers_first() {
        let mut story = Story::new(&[2, 3, 4]);
        assert_eq!(story.at(0, &[]), None);
        assert_eq!(story.at(1, &[(3, true)]), None);
        let first = story.start + Duration::from_secs(1);
        assert_eq!(story.primary.deadline(), Some(first + SETTLE));
        assert_eq!(story.at(2, &[(3, true), (2, true)]), Some(2));
        assert!(story.primary.is_final());
        assert_eq!(Story::new(&[2, 3, 4]).at(0, &[(2, true)]), Some(2), "nothing comes before it");
    }

    #[test]
    fn a_card_whose_network_has_no_server_holds_the_node_up_for_seconds_only() {
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &[(3, true)]), None);
        assert_eq!(story.at(4, &[(3, true)]), None);
        assert_eq!(story.at(5, &[(3, true)]), Some(3));
        // It has an address now, and keeps it.
        assert_eq!(story.at(9, &[(3, true), (2, true)]), Some(3));
        assert_eq!(story.at(10, &[(2, true)]), Some(2), "its own lease ended");
    }

    #[test]
    fn a_network_without_a_way_out_gives_way_to_one_that_has_it() {
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &[(2, false)]), None);
        assert_eq!(story.at(1, &[(2, false), (3, true)]), Some(3));
        let mut late = Story::new(&[2, 3]);
        assert_eq!(late.at(5, &[(2, false)]), None);
        assert_eq!(late.at(10, &[(2, false)]), Some(2));
        assert!(!late.primary.is_final(), "the other goes on asking");
        assert_eq!(late.at(60, &[(2, false), (3, true)]), Some(3));
    }

    #[test]
    fn a_card_behind_usb_counts_when_nothing_else_comes_and_gives_way() {
        let mut story = Story::new(&[2, 4]);
        assert_eq!(story.at(0, &[(4, true)]), None);
        assert_eq!(story.at(59, &[(4, true)]), None);
        assert_eq!(story.at(60, &[(4, true)]), Some(4));
        assert!(!story.primary.is_final());
        assert_eq!(story.at(70, &[(4, true), (2, false)]), Some(2));
    }

    #[test]
    fn the_address_of_a_former_run_is_taken_at_once() {
        let mut story = Story::new(&[2, 3]);
        story.observed.addresses.insert((3, "10.0.2.15/24".parse().unwrap()));
        assert_eq!(story.at(0, &[(3, true)]), Some(3));
    }

    #[test]
    fn servers_that_are_late_together_lead_to_the_same_card() {
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &[]), None);
        assert_eq!(story.at(40, &[(3, true)]), None, "the first lease of all");
        assert_eq!(story.at(44, &[(3, true), (2, true)]), Some(2));
    }

    #[test]
    fn a_management_card_that_answers_first_does_not_hurry_the_others() {
        for (first, chosen) in [(2, Some(2)), (3, None)] {
            let mut story = Story::new(&[2, 3, 4]);
            assert_eq!(story.at(0, &[(4, true)]), None);
            assert_eq!(story.at(31, &[(4, true), (first, true)]), chosen, "link {first} first");
            assert_eq!(story.at(33, &[(4, true), (3, true), (2, true)]), Some(2));
        }
    }

    #[test]
    fn a_card_without_a_cable_is_waited_for_at_the_start_only() {
        for (seconds, chosen) in [(2, None), (5, Some(3)), (40, Some(3))] {
            let mut story = Story::new(&[2, 3]);
            story.observed = unplug(story.observed, 2);
            assert_eq!(story.at(0, &[]), None);
            assert_eq!(story.at(seconds, &[(3, true)]), chosen, "after {seconds} s");
        }
    }

    #[test]
    fn a_node_that_runs_keeps_its_card_when_the_service_starts_again() {
        let mut story = Story::new(&[2, 3]);
        story.observed.addresses.insert((3, "10.0.2.15/24".parse().unwrap()));
        assert_eq!(story.at(0, &[(2, true)]), None, "its lease is still to come");
        assert_eq!(story.at(1, &[(2, true), (3, true)]), Some(3));
        let mut gone = Story::new(&[2, 3]);
        gone.observed.addresses.insert((3, "10.0.9.9/24".parse().unwrap()));
        assert_eq!(gone.at(0, &[(2, true)]), None);
        assert_eq!(gone.at(59, &[(2, true)]), None);
        assert_eq!(gone.at(60, &[(2, true)]), Some(2));
    }

    #[test]
    fn an_unplugged_card_keeps_the_address_until_another_card_has_a_lease() {
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &[(2, true)]), Some(2));
        story.observed.addresses.insert((2, "10.0.2.15/24".parse().unwrap()));
        story.unplugged.insert(2);
        assert_eq!(story.at(100, &[(2, true)]), Some(2), "the other has no lease");
        assert!(!story.primary.is_final(), "the other has to ask");
        assert_eq!(story.at(101, &[(2, true), (3, true)]), Some(3));
        assert!(story.primary.is_final());
        story.unplugged.clear();
        assert_eq!(story.at(102, &[(2, true), (3, true)]), Some(3), "it runs");

        let mut back = Story::new(&[2, 3]);
        assert_eq!(back.at(0, &[(2, true)]), Some(2));
        back.unplugged.insert(2);
        assert_eq!(back.at(100, &[(2, true)]), Some(2));
        back.unplugged.clear();
        assert_eq!(back.at(101, &[(2, true), (3, true)]), Some(2));
        assert!(back.primary.is_final());
    }

    #[test]
    fn an_unplugged_card_keeps_the_address_while_a_better_card_than_the_next_one_may_answer() {
        let mut story = Story::new(&[2, 3, 4]);
        assert_eq!(story.at(0, &[(2, true)]), Some(2));
        story.unplugged.insert(2);
        // The card 3 asks, too, and comes before one behind USB.
        assert_eq!(story.at(100, &[(2, true), (4, true)]), Some(2));
        let until = story.start + Duration::from_secs(100) + SETTLE_LONG;
        assert_eq!(story.primary.deadline(), Some(until));
        assert_eq!(story.at(160, &[(2, true), (4, true)]), Some(4));
        assert!(!story.primary.is_final());
    }

    #[test]
    fn of_two_cards_that_are_unplugged_together_neither_takes_the_place_of_the_other() {
        let leases = [(2, false), (3, false)];
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &leases), Some(2));
        assert!(!story.primary.is_final(), "both leases are held");
        story.observed = unplug(unplug(observed(), 2), 3);
        // The carrier of the other one went a moment later.
        story.unplugged.insert(2);
        assert_eq!(story.at(100, &leases), Some(2));
        story.unplugged.insert(3);
        assert_eq!(story.at(101, &leases), Some(2));
        // The other one is back first.
        story.observed = unplug(observed(), 2);
        story.unplugged.remove(&3);
        assert_eq!(story.at(102, &leases), Some(3));
    }

    #[test]
    fn nothing_of_an_unplugged_card_s_lease_is_used_once_the_node_has_an_address_without_one() {
        let advertised = Some((3, "2001:db8::5/64".parse().unwrap()));
        let lease = lease(true);
        let used = |story: &Story, advertised| {
            let leases = BTreeMap::from([(2, &lease), (3, &lease)]);
            story.primary.in_use(leases, advertised).into_keys().collect::<Vec<_>>()
        };
        let mut story = Story::new(&[2, 3]);
        assert_eq!(used(&story, None), [0; 0], "none is chosen");
        assert_eq!(story.at(0, &[(2, true)]), Some(2));
        assert_eq!((used(&story, None), used(&story, advertised)), (vec![2], vec![2]));
        story.unplugged.insert(2);
        assert_eq!(story.at(100, &[(2, true)]), Some(2));
        assert_eq!((used(&story, None), used(&story, advertised)), (vec![2], vec![]));
        story.unplugged.clear();
        assert_eq!(story.at(101, &[(2, true)]), Some(2));
        assert_eq!(used(&story, advertised), [2]);
    }

    #[test]
    fn a_card_that_goes_is_waited_for_no_longer() {
        let mut story = Story::new(&[2, 3]);
        assert_eq!(story.at(0, &[(3, true)]), None);
        story.candidates = vec![3];
        assert_eq!(story.at(1, &[(3, true)]), Some(3));
    }

    proptest! {
        /// Twenty boots and more: the answers come in any order, each within its time.
        #[test]
        fn answers_in_any_order_lead_to_the_same_link(
            order in Just(vec![2_u32, 3, 4]).prop_shuffle(),
            seconds in prop::collection::vec(0_u64..5, 3),
            ways_out in any::<[bool; 3]>(),
        ) {
            let all: Vec<(u32, bool)> = (2..=4).zip(ways_out).collect();
            let mut answers: Vec<(u64, u32)> = seconds.into_iter().zip(order).collect();
            answers.sort_unstable();
            let mut story = Story::new(&[2, 3, 4]);
            story.at(0, &[]);
            let mut held = Vec::new();
            for (second, link) in answers {
                held.push(all[usize::try_from(link - 2).unwrap()]);
                story.at(second, &held);
            }
            let best = all.iter().min_by_key(|(link, out)| (*link == 4, !out, *link)).unwrap();
            prop_assert_eq!(story.at(5, &held), Some(best.0));
        }
    }
}
