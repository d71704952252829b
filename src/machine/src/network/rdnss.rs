//! The name servers that routers advertise (RDNSS, RFC 8106), each until its end.
//!
//! ```text
//! router --advertisement--> kernel --announcement--> Routers --> plan --> resolv.conf
//!   ^                                                   |
//!   +----solicitation: after a restart, a carrier-------+
//! ```
//!
//! Invariants:
//! - A server is removed at its end, and with the carrier of its link.
//! - A link has at most [`KEPT_MAX`] servers, and an advertisement that repeats them changes
//!   neither them nor their order.
//! - A segment full of advertisements costs one pass of the service each [`PACE`], and the
//!   other parts of the service have their turn in between.
//!
//! What this module does not do: say which servers are asked first (`plan`).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use super::lease::is_host_v6;
use polis_base::sys::router::{Listener, NameServers, Received};
use polis_runtime::sys::readiness;

/// Servers of one link. Two routers with three servers each have room.
const KEPT_MAX: usize = 8;

/// Between two changes that are reported.
const PACE: Duration = Duration::from_secs(1);

/// Announcements that are read in one go; one advertisement has a few.
const BATCH_MAX: usize = 16;

/// Solicitations of a link without an answer, and the time between two (RFC 4861, 10).
const SOLICITATIONS_MAX: u8 = 3;
const SOLICITATION_WAIT: Duration = Duration::from_secs(4);

/// Receives router advertisements.
pub(super) struct Routers {
    listener: Listener,
    ready: AsyncFd<OwnedFd>,
    /// Whether the servers differ from those at the last report.
    is_changed: bool,
    reported: Option<Instant>,
    pub(super) servers: Servers,
    pub(super) solicitations: Solicitations,
}

impl Routers {
    /// Receives every advertisement from now on.
    pub(super) fn listen() -> io::Result<Self> {
        let listener = Listener::open()?;
        let ready = readiness::watch(&listener, Interest::READABLE)?;
        let (servers, solicitations) = Default::default();
        Ok(Self { listener, ready, is_changed: false, reported: None, servers, solicitations })
    }

    /// Waits until the servers change, or one ends earlier than before. Cancel-safe: a change is
    /// kept until it was reported.
    pub(super) async fn changed(&mut self) -> io::Result<()> {
        loop {
            if self.is_changed {
                if let Some(reported) = self.reported {
                    sleep_until(reported + PACE).await;
                }
                self.reported = Some(Instant::now());
                self.is_changed = false;
                return Ok(());
            }
            let mut ready = self.ready.readable().await?;
            for _ in 0..BATCH_MAX {
                match self.listener.next_announcement()? {
                    Received::Nothing => {
                        ready.clear_ready();
                        break;
                    }
                    Received::Lost => {}
                    Received::Advertised(all) => {
                        for advertised in &all {
                            self.is_changed |= self.servers.update(advertised, Instant::now());
                        }
                    }
                }
            }
            // A socket that is never empty must not keep the rest of the service waiting.
            tokio::task::consume_budget().await;
        }
    }
}

/// The servers of each link, by its number.
#[derive(Debug, Default)]
pub(super) struct Servers(BTreeMap<u32, Vec<Server>>);

#[derive(Debug)]
struct Server {
    address: Ipv6Addr,
    /// `None`: never.
    ends: Option<Instant>,
}

impl Servers {
    /// Applies an advertisement; returns whether there are other servers than before, or one ends
    /// earlier than all did.
    fn update(&mut self, advertised: &NameServers, now: Instant) -> bool {
        let before = (self.of(advertised.link), self.deadline());
        let servers = self.0.entry(advertised.link).or_default();
        let ends = advertised.lifetime.map(|lifetime| now + lifetime);
        for address in advertised.servers.iter().copied().filter(|it| is_host_v6(*it)) {
            match servers.iter_mut().find(|server| server.address == address) {
                Some(server) => server.ends = ends,
                None => servers.push(Server { address, ends }),
            }
        }
        servers.retain(|server| server.ends.is_none_or(|ends| ends > now));
        servers.truncate(KEPT_MAX);
        let is_earlier = |ends| before.1.is_none_or(|before| ends < before);
        before.0 != self.of(advertised.link) || self.deadline().is_some_and(is_earlier)
    }

    /// Removes the servers that are past their end, and those of links that are not in use.
    pub(super) fn review(&mut self, is_in_use: impl Fn(u32) -> bool, now: Instant) {
        self.0.retain(|link, servers| {
            servers.retain(|server| server.ends.is_none_or(|ends| ends > now));
            is_in_use(*link) && !servers.is_empty()
        });
    }

    /// The servers of a link, in the order in which they became known.
    pub(super) fn of(&self, link: u32) -> Vec<IpAddr> {
        let servers = self.0.get(&link).into_iter().flatten();
        servers.map(|server| server.address.into()).collect()
    }

    /// The next end of one.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.values().flatten().filter_map(|server| server.ends).min()
    }
}

/// When routers are asked for an advertisement. The kernel solicits by itself where a link comes
/// up for the first time, and not when its carrier returns or this service starts again.
#[derive(Debug, Default)]
pub(super) struct Solicitations {
    /// The links that have had a carrier, and whether they have one; `None` before the first look.
    carriers: Option<BTreeMap<u32, bool>>,
    /// The solicitations that are left, and the time of the next one.
    due: BTreeMap<u32, (u8, Instant)>,
}

impl Solicitations {
    /// The links to solicit now. `links` are those in use; `is_answered` says whether the servers
    /// of one are known.
    pub(super) fn review(
        &mut self,
        links: &[u32],
        is_answered: impl Fn(u32) -> bool,
        now: Instant,
    ) -> Vec<u32> {
        let is_first = self.carriers.is_none();
        let carriers = self.carriers.get_or_insert_default();
        for (link, has_carrier) in carriers.iter_mut() {
            *has_carrier &= links.contains(link);
        }
        for link in links {
            let had = carriers.insert(*link, true);
            if is_first || had == Some(false) {
                self.due.insert(*link, (SOLICITATIONS_MAX, now));
            }
        }
        self.due.retain(|link, _due| links.contains(link) && !is_answered(*link));
        let mut solicited = Vec::new();
        for (link, (left, next)) in &mut self.due {
            if *next <= now {
                *left -= 1;
                *next = now + SOLICITATION_WAIT;
                solicited.push(*link);
            }
        }
        self.due.retain(|_link, (left, _next)| *left > 0);
        solicited
    }

    /// The time of the next one.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.values().map(|(_left, next)| *next).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETH0: u32 = 2;

    fn advertised(servers: &[&str], seconds: Option<u64>) -> NameServers {
        let servers = servers.iter().map(|server| server.parse().unwrap()).collect();
        NameServers { link: ETH0, servers, lifetime: seconds.map(Duration::from_secs) }
    }

    fn of(servers: &Servers) -> Vec<String> {
        servers.of(ETH0).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_server_is_known_until_its_end_or_until_a_router_takes_it_back() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(servers.update(&advertised(&["2001:db8::1", "2001:db8::2"], Some(60)), now));
        assert!(!servers.update(&advertised(&["2001:db8::2"], Some(90)), now), "a later end");
        assert_eq!(servers.deadline(), Some(now + Duration::from_secs(60)));
        assert!(servers.update(&advertised(&["2001:db8::1"], Some(5)), now), "an earlier end");
        servers.review(|_link| true, now + Duration::from_secs(60));
        assert_eq!(of(&servers), ["2001:db8::2"]);
        assert!(servers.update(&advertised(&["2001:db8::2"], Some(0)), now));
        assert_eq!((of(&servers).len(), servers.deadline()), (0, None));
    }

    #[test]
    fn one_without_an_end_goes_with_its_link() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(servers.update(&advertised(&["fd00::1"], None), now));
        assert_eq!(servers.deadline(), None);
        servers.review(|_link| true, now + Duration::from_secs(1 << 33));
        assert_eq!(of(&servers), ["fd00::1"]);
        servers.review(|_link| false, now);
        assert_eq!(of(&servers).len(), 0);
    }

    #[test]
    fn addresses_that_no_server_can_have_and_more_than_fit_are_left_out() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(!servers.update(&advertised(&["ff02::1", "::", "::1", "fe80::1"], Some(60)), now));
        assert!(!servers.update(&advertised(&["2001:db8::1"], Some(0)), now), "it was not known");
        assert!(servers.update(&advertised(&["2001:db8::1"], Some(60)), now));
        for number in 2..100 {
            servers.update(&advertised(&[&format!("2001:db8::{number}")], Some(600)), now);
        }
        assert_eq!((of(&servers)[0].as_str(), of(&servers).len()), ("2001:db8::1", KEPT_MAX));
    }

    #[test]
    fn routers_are_solicited_after_a_restart_and_when_a_carrier_returns() {
        let (mut solicitations, now) = (Solicitations::default(), Instant::now());
        let mut at = |links: &[u32], is_answered: bool, seconds: u64| {
            let now = now + Duration::from_secs(seconds);
            solicitations.review(links, |_link| is_answered, now)
        };
        assert_eq!(at(&[ETH0], false, 0), [ETH0], "up before the service");
        assert_eq!(at(&[ETH0, 3], false, 1), [0; 0], "the kernel solicits on a new link");
        assert_eq!(at(&[ETH0, 3], false, 4), [ETH0]);
        assert_eq!(at(&[3], false, 9), [0; 0], "without a carrier");
        assert_eq!(at(&[ETH0, 3], false, 10), [ETH0], "it is back");
        assert_eq!(at(&[ETH0, 3], true, 20), [0; 0], "answered");
        assert_eq!(at(&[3], true, 21), [0; 0]);
        for (seconds, asks) in [(22, true), (23, false), (26, true), (30, true), (99, false)] {
            assert_eq!(!at(&[ETH0, 3], false, seconds).is_empty(), asks, "at {seconds}");
        }
    }
}
