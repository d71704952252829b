//! Other machines of a segment with an IPv4 address of this node: looks for them by ARP, and has
//! them reported.
//!
//! RFC 5227 has a machine probe for some seconds before it uses an address. A boot does not wait
//! for that: the node uses an address at once, probes at the same time and then once in a while,
//! and listens to what other machines claim. The kernel does this by itself for IPv6.
//!
//! ```text
//! addresses of links with a carrier --> review --> probes --> segment
//! segment --claims of other machines--> changed --> found, until none comes for a while
//! ```
//!
//! Invariants:
//! - A conflict takes no address from the node (RFC 5227, 2.4, c): ARP is not authenticated, so a
//!   machine of the segment could take every address.
//! - A message of this machine is no conflict, whichever of its cards sent it.
//! - A segment full of ARP costs [`BATCH_MAX`] messages and one pass of the service each [`PACE`].
//!
//! What this module does not do: give an address back to its DHCP server, for which `mozim` has no
//! message.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use super::plan::{Kind, Observed};
use super::view::name;
use crate::parameters::Mac;
use polis_base::sys::arp::{Claim, Received, Socket};
use polis_runtime::sys::readiness;

/// Between two probes of an address, at the least; the service looks once a minute. A switch that
/// forwards late, or a lost message, hides another machine until the next one.
const PROBE_WAIT: Duration = Duration::from_secs(50);

/// How long another machine is reported after its last message: it has missed several probes.
const KEPT: Duration = Duration::from_secs(300);

/// Messages that are read in one go, and the time between two goes. A segment of a thousand
/// machines has fewer.
const BATCH_MAX: usize = 256;
const PACE: Duration = Duration::from_secs(1);

/// An address on a link.
type Place = (u32, Ipv4Addr);

/// Receives ARP, and knows the conflicts.
pub(super) struct Conflicts {
    pub(super) socket: Socket,
    ready: AsyncFd<OwnedFd>,
    /// When messages are read again.
    resumes: Instant,
    known: Known,
}

impl Conflicts {
    /// Receives every message from now on.
    pub(super) fn listen() -> io::Result<Self> {
        let socket = Socket::open()?;
        let ready = readiness::watch(&socket, Interest::READABLE)?;
        Ok(Self { socket, ready, resumes: Instant::now(), known: Known::default() })
    }

    /// Waits until there is a conflict more. Cancel-safe: a conflict is kept until it was
    /// reported.
    pub(super) async fn changed(&mut self) -> io::Result<()> {
        loop {
            if std::mem::take(&mut self.known.is_new) {
                return Ok(());
            }
            sleep_until(self.resumes).await;
            let mut ready = self.ready.readable().await?;
            self.resumes = Instant::now() + PACE;
            for _ in 0..BATCH_MAX {
                match self.socket.next_message()? {
                    Received::Nothing => {
                        ready.clear_ready();
                        break;
                    }
                    Received::Other => {}
                    Received::Claim(claim) => self.known.claimed(claim, Instant::now()),
                }
            }
        }
    }

    /// Takes up the addresses of the node, and probes those that are due. Returns why a probe
    /// failed, with its address.
    pub(super) fn review(&mut self, observed: &Observed) -> Vec<(Ipv4Addr, io::Error)> {
        let due = self.known.review(observed, Instant::now()).into_iter();
        let probe = |(link, mac, address): (u32, Mac, Ipv4Addr)| {
            Some((address, self.socket.probe(link, mac.0, address).err()?))
        };
        due.filter_map(probe).collect()
    }

    /// The conflicts, a sentence for each.
    pub(super) fn sentences(&self, observed: &Observed) -> Vec<String> {
        let found = self.known.found.iter().map(|((link, address), found)| {
            let (name, mac) = (name(observed, *link), found.mac);
            format!(
                "another machine, {mac}, has the address {address} of {name}, too; give one of \
                 them another address"
            )
        });
        found.collect()
    }
}

/// What is known without the socket.
#[derive(Debug, Default)]
struct Known {
    /// The addresses of the node on links with a carrier, and when each was probed last.
    own: BTreeMap<Place, Instant>,
    /// The hardware addresses of this machine.
    macs: BTreeSet<Mac>,
    found: BTreeMap<Place, Found>,
    /// Whether one was found since the last report.
    is_new: bool,
}

/// Another machine with an address of the node.
#[derive(Debug)]
struct Found {
    mac: Mac,
    seen: Instant,
}

impl Known {
    /// Looks at the addresses of the node; returns those that are to be probed now, each with its
    /// link and the hardware address of that.
    fn review(&mut self, observed: &Observed, now: Instant) -> Vec<(u32, Mac, Ipv4Addr)> {
        let links = observed.links.values();
        self.macs = links.flat_map(|link| [link.mac, link.hardware]).collect();
        let places = observed.addresses.iter().filter_map(|(index, cidr)| {
            let link = observed.links.get(index)?;
            let IpAddr::V4(address) = cidr.address() else { return None };
            let is_on_wire = link.carrier && link.kind != Kind::Loopback;
            is_on_wire.then_some(((*index, address), link.mac))
        });
        let places: BTreeMap<Place, Mac> = places.collect();
        self.own.retain(|place, _probed| places.contains_key(place));
        let own = &self.own;
        self.found.retain(|place, found| own.contains_key(place) && now < found.seen + KEPT);
        let is_due = |place: &Place| self.own.get(place).is_none_or(|at| now >= *at + PROBE_WAIT);
        let due: Vec<_> = places.into_iter().filter(|(place, _)| is_due(place)).collect();
        self.own.extend(due.iter().map(|(place, _)| (*place, now)));
        due.into_iter().map(|((link, address), mac)| (link, mac, address)).collect()
    }

    /// A machine calls an address its own.
    fn claimed(&mut self, claim: Claim, now: Instant) {
        let (place, mac) = ((claim.link, claim.address), Mac(claim.mac));
        if !self.own.contains_key(&place) || self.macs.contains(&mac) {
            return;
        }
        // The first one stays: several may not make a report each.
        self.is_new |= !self.found.contains_key(&place);
        self.found.entry(place).or_insert(Found { mac, seen: now }).seen = now;
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::{observed as two, unplug};
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];

    /// `eth0` 2 with an address, and `eth1` 3 without.
    fn observed() -> Observed {
        let mut observed = two();
        observed.addresses = [(2, "10.0.2.15/24".parse().unwrap())].into();
        observed
    }

    fn claim(link: u32, mac: [u8; 6], address: Ipv4Addr) -> Claim {
        Claim { link, mac, address }
    }

    #[test]
    fn another_machine_with_an_address_of_the_node_is_found_once_and_kept_while_it_answers() {
        let (mut known, start) = (Known::default(), Instant::now());
        known.review(&observed(), start);
        known.claimed(claim(2, OTHER, ADDRESS), start);
        assert!(std::mem::take(&mut known.is_new));
        let later = start + KEPT - Duration::from_secs(1);
        known.claimed(claim(2, [2, 0, 0, 0, 0, 8], ADDRESS), later);
        assert!(!known.is_new, "each forged message would make a report");
        known.review(&observed(), start + KEPT);
        assert_eq!(known.found.values().map(|found| found.mac).collect::<Vec<_>>(), [Mac(OTHER)]);
        known.review(&observed(), later + KEPT);
        assert!(known.found.is_empty(), "it is gone");
    }

    #[test]
    fn a_message_of_this_machine_or_about_another_address_or_link_is_no_conflict() {
        let (mut known, now) = (Known::default(), Instant::now());
        known.claimed(claim(2, OTHER, ADDRESS), now);
        known.review(&observed(), now);
        // Both cards are on one segment, and each answers for the addresses of the other.
        for last in [2, 3] {
            known.claimed(claim(2, [0x52, 0x54, 0, 0, 0, last], ADDRESS), now);
        }
        known.claimed(claim(3, OTHER, ADDRESS), now);
        known.claimed(claim(2, OTHER, Ipv4Addr::new(10, 0, 2, 16)), now);
        assert!(known.found.is_empty() && !known.is_new, "{known:?}");
    }

    #[test]
    fn an_address_is_probed_when_it_and_a_carrier_are_there_and_then_once_in_a_while() {
        let (mut known, start) = (Known::default(), Instant::now());
        let probe = [(2_u32, Mac([0x52, 0x54, 0, 0, 0, 2]), ADDRESS)];
        assert!(known.review(&unplug(observed(), 2), start).is_empty());
        assert_eq!(known.review(&observed(), start), probe);
        assert!(known.review(&observed(), start + Duration::from_secs(1)).is_empty());
        assert_eq!(known.review(&observed(), start + PROBE_WAIT), probe);
        // Another segment may be behind the cable now.
        known.claimed(claim(2, OTHER, ADDRESS), start);
        known.review(&unplug(observed(), 2), start + PROBE_WAIT);
        assert!(known.found.is_empty());
        assert_eq!(known.review(&observed(), start + PROBE_WAIT), probe);
    }
}
