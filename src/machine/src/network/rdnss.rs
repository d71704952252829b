//! The name servers that routers advertise (RDNSS, RFC 8106), each until its end.
//!
//! ```text
//! router --advertisement--> kernel --announcement--> Routers --> plan --> resolv.conf
//! ```
//!
//! Invariants:
//! - No server is known past its end, nor of a link that is gone.
//! - A link has at most [`KEPT_MAX`] servers, and an advertisement that repeats them changes
//!   neither them nor their order: a router that names many displaces no server that is in use.
//!
//! What this module does not do: say which servers are asked first (`plan`).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::lease::is_host_v6;
use polis_base::sys::router::{Listener, NameServers, Received};
use polis_runtime::sys::readiness;

/// Servers of one link. Two routers with three servers each have room.
const KEPT_MAX: usize = 8;

/// Hears what routers advertise.
pub(super) struct Routers {
    listener: Listener,
    ready: AsyncFd<OwnedFd>,
    servers: Servers,
}

impl Routers {
    /// Hears every advertisement from now on.
    pub(super) fn listen() -> io::Result<Self> {
        let listener = Listener::open()?;
        let ready = readiness::watch(&listener, Interest::READABLE)?;
        Ok(Self { listener, ready, servers: Servers::default() })
    }

    /// Waits until the servers of a link change, and returns its number. Cancel-safe: what was
    /// heard is kept.
    pub(super) async fn changed(&mut self) -> io::Result<u32> {
        loop {
            let mut ready = self.ready.readable().await?;
            match self.listener.next_announcement()? {
                Received::Nothing => ready.clear_ready(),
                Received::Advertised(all) => {
                    // The kernel sends one for each option.
                    let mut changed = None;
                    for told in &all {
                        if self.servers.told(told, Instant::now()) {
                            changed = Some(told.link);
                        }
                    }
                    if let Some(link) = changed {
                        return Ok(link);
                    }
                }
            }
        }
    }

    pub(super) fn servers(&self) -> &Servers {
        &self.servers
    }

    pub(super) fn servers_mut(&mut self) -> &mut Servers {
        &mut self.servers
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
    /// Takes what a router said; returns whether there are other servers than before.
    fn told(&mut self, told: &NameServers, now: Instant) -> bool {
        let servers = self.0.entry(told.link).or_default();
        let ends = told.lifetime.map(|lifetime| now + lifetime);
        let is_over = ends.is_some_and(|ends| ends <= now);
        let (before, mut changed) = (servers.len(), false);
        for address in told.servers.iter().copied().filter(|address| is_host_v6(*address)) {
            if let Some(server) = servers.iter_mut().find(|server| server.address == address) {
                server.ends = ends;
            } else if !is_over && servers.len() < KEPT_MAX {
                servers.push(Server { address, ends });
                changed = true;
            }
        }
        servers.retain(|server| server.ends.is_none_or(|ends| ends > now));
        changed || servers.len() != before
    }

    /// Forgets servers past their end, and links that are not there any longer.
    pub(super) fn review(&mut self, is_there: impl Fn(u32) -> bool, now: Instant) {
        self.0.retain(|link, servers| {
            servers.retain(|server| server.ends.is_none_or(|ends| ends > now));
            is_there(*link) && !servers.is_empty()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ETH0: u32 = 2;

    fn told(servers: &[&str], seconds: Option<u64>) -> NameServers {
        let servers = servers.iter().map(|server| server.parse().unwrap()).collect();
        NameServers { link: ETH0, servers, lifetime: seconds.map(Duration::from_secs) }
    }

    fn of(servers: &Servers) -> Vec<String> {
        servers.of(ETH0).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_server_is_known_until_its_end_or_until_a_router_takes_it_back() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(servers.told(&told(&["2001:db8::1", "2001:db8::2"], Some(60)), now));
        assert!(!servers.told(&told(&["2001:db8::2"], Some(90)), now), "only its end is another");
        assert_eq!(servers.deadline(), Some(now + Duration::from_secs(60)));
        servers.review(|_link| true, now + Duration::from_secs(60));
        assert_eq!(of(&servers), ["2001:db8::2"]);
        assert!(servers.told(&told(&["2001:db8::2"], Some(0)), now));
        assert_eq!((of(&servers).len(), servers.deadline()), (0, None));
    }

    #[test]
    fn one_without_an_end_goes_with_its_link() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(servers.told(&told(&["fd00::1"], None), now));
        assert_eq!(servers.deadline(), None);
        servers.review(|_link| true, now + Duration::from_secs(1 << 33));
        assert_eq!(of(&servers), ["fd00::1"]);
        servers.review(|_link| false, now);
        assert_eq!(of(&servers).len(), 0);
    }

    #[test]
    fn addresses_that_no_server_can_have_and_more_than_fit_are_left_out() {
        let (mut servers, now) = (Servers::default(), Instant::now());
        assert!(!servers.told(&told(&["ff02::1", "::", "::1", "fe80::1"], Some(60)), now));
        assert!(!servers.told(&told(&["2001:db8::1"], Some(0)), now), "it was not known");
        assert!(servers.told(&told(&["2001:db8::1"], Some(60)), now));
        for number in 2..100 {
            servers.told(&told(&[&format!("2001:db8::{number}")], Some(600)), now);
        }
        assert_eq!((of(&servers)[0].as_str(), of(&servers).len()), ("2001:db8::1", KEPT_MAX));
    }
}
