//! The part of a run about DHCPv6 and name servers of routers: starts and ends clients, and holds
//! leases and name servers.
//!
//! What this module does not do: decide which links ask (`plan::ipv6`), or choose the node's
//! address (`advertised`).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use futures::stream::Stream;
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_stream::StreamMap;
use tracing::{info, warn};

use super::super::dhcpv6::{self, Client, Event, Servers, Want};
use super::super::leases::Leases;
use super::super::observe;
use super::super::plan::{self, Flaw, Kind, KnownV6, Observed};
use super::super::rdnss::Routers;
use super::super::view::name;
use super::Run;
use crate::parameters::Cidr;
use polis_base::cause;
use polis_base::sys::router;

type Events = Pin<Box<dyn Stream<Item = Event> + Send>>;

/// The state of a run about DHCPv6 and routers.
pub(super) struct V6 {
    pub(super) routers: Routers,
    /// The name servers of routers that were logged last, by link.
    advertised: BTreeMap<u32, Vec<IpAddr>>,
    pub(super) clients: StreamMap<u32, Events>,
    /// What each client asks for, and the means to decline its address.
    asking: BTreeMap<u32, (Want, Arc<Notify>)>,
    pub(super) leases: Leases,
    /// The servers that links without an address got.
    servers: BTreeMap<u32, Servers>,
    /// The addresses of a former run that no server has given to this one yet; `None` before the
    /// first look.
    inherited: Option<BTreeSet<(u32, Cidr)>>,
    /// Addresses that another machine has, since the last look.
    duplicates: BTreeSet<(u32, Cidr)>,
}

impl V6 {
    /// Without any knowledge yet. Advertisements are received from now on.
    pub(super) fn listen() -> io::Result<Self> {
        Ok(Self {
            routers: Routers::listen()?,
            advertised: BTreeMap::new(),
            clients: StreamMap::new(),
            asking: BTreeMap::new(),
            leases: Leases::default(),
            servers: BTreeMap::new(),
            inherited: None,
            duplicates: BTreeSet::new(),
        })
    }

    /// Looks at what the kernel announces. It takes an address that ends away when another machine
    /// has it, and says why only once.
    pub(super) fn noticed(&mut self, message: &NetlinkMessage<RouteNetlinkMessage>) {
        if let NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelAddress(message)) =
            &message.payload
        {
            self.duplicates.extend(observe::duplicate(message));
        }
    }

    /// What the plan has to know.
    pub(super) fn known(&self) -> KnownV6<'_> {
        KnownV6 {
            leases: self.leases.by_link(),
            servers: Some(&self.servers),
            asking: self.asking.iter().map(|(link, (want, _))| (*link, *want)).collect(),
            inherited: self.inherited.as_ref(),
        }
    }

    /// Where an address of IPv6 that the parameters do not give is from.
    pub(super) fn origin(&self, link: u32, address: Cidr) -> &'static str {
        let leased = self.leases.leased(link).is_some_and(|leased| leased.address == address);
        if leased { "from a DHCPv6 server" } else { "from a router" }
    }

    /// Starts and ends clients.
    pub(super) fn ask(&mut self, observed: &Observed, wanted: &BTreeMap<u32, Want>) {
        let other = |link: &u32, want: Want| wanted.get(link) != Some(&want);
        let gone = self.asking.iter().filter(|(link, (want, _))| other(link, *want));
        for link in gone.map(|(link, _)| *link).collect::<Vec<_>>() {
            self.asking.remove(&link);
            self.clients.remove(&link);
        }
        for (index, want) in wanted {
            let Some(link) = observed.links.get(index) else { continue };
            if self.asking.contains_key(index) {
                continue;
            }
            let association = match link.kind {
                Kind::Vlan { id, .. } => id.into(),
                Kind::Loopback | Kind::Ethernet | Kind::Bond(_) => 0,
            };
            let client = Client { mac: link.mac, association };
            let asking = dhcpv6::ask(*index, link.name.clone(), client, *want);
            self.clients.insert(*index, asking.events);
            self.asking.insert(*index, (*want, asking.declined));
        }
    }
}

impl Run {
    /// Removes name servers that end, solicits routers, and logs which servers there are.
    pub(super) fn hold_routers(&mut self, observed: &Observed) {
        let links = plan::listening(observed, self.network.as_ref());
        let Routers { servers, solicitations, .. } = &mut self.v6.routers;
        servers.review(|link| links.contains(&link), Instant::now());
        let is_answered = |link| !servers.of(link).is_empty();
        for link in solicitations.review(&links, is_answered, Instant::now()) {
            if let Err(error) = router::solicit(link) {
                info!("cannot solicit the routers on {}: {error}", name(observed, link));
            }
        }
        let all = links.iter().map(|link| (*link, servers.of(*link)));
        let all: BTreeMap<_, _> = all.filter(|(_, servers)| !servers.is_empty()).collect();
        for (link, servers) in &all {
            if self.v6.advertised.get(link) != Some(servers) {
                let servers: Vec<_> = servers.iter().map(ToString::to_string).collect();
                let (name, servers) = (name(observed, *link), servers.join(", "));
                info!("routers on {name} advertise these name servers: {servers}");
            }
        }
        for link in self.v6.advertised.keys().filter(|link| !all.contains_key(*link)) {
            info!("no name server of a router is left on {}", name(observed, *link));
        }
        self.v6.advertised = all;
    }

    /// Gives up what cannot be held any longer, and declines what another machine has.
    pub(super) fn hold_v6(&mut self, observed: &Observed) {
        let Some(network) = &self.network else { return };
        let own = || observed.own.iter().filter(|(_, cidr)| cidr.address().is_ipv6());
        self.v6.inherited.get_or_insert_with(|| own().copied().collect());
        let candidates = plan::candidates_v6(&plan::modes(observed, network));
        self.v6.leases.keep(&candidates);
        self.v6.servers.retain(|link, _servers| candidates.contains(link));
        // Links do not stand in for each other: each has addresses of its own, unplugged or not.
        let given_up = self.v6.leases.review(observed, Instant::now());
        for (link, reason) in given_up {
            warn!("gives up the DHCPv6 address of {}: {reason}", name(observed, link));
        }
        // One without an end stays.
        let flawed = observed.flaws.iter().filter(|(_, flaw)| **flaw == Flaw::Duplicate);
        self.v6.duplicates.extend(flawed.map(|(of, _)| *of));
        for (link, cidr) in std::mem::take(&mut self.v6.duplicates) {
            if self.v6.leases.leased(link).is_none_or(|leased| leased.address != cidr) {
                continue;
            }
            warn!(
                "declines {cidr} on {}, which a DHCPv6 server gave: another machine on the \
                 segment has it",
                name(observed, link)
            );
            self.v6.leases.ended(link);
            if let Some((_, declined)) = self.v6.asking.get(&link) {
                declined.notify_one();
            }
        }
    }

    pub(super) fn answered_v6(&mut self, observed: &Observed, link: u32, event: Event) {
        let name = name(observed, link);
        match event {
            Event::Leased(lease) => {
                let (address, server) = (lease.address, lease.server);
                let seconds = lease.lifetime.as_secs();
                info!("DHCPv6 server {server} leases {address} to {name} for {seconds} s");
                self.renewed.insert((link, address));
                self.v6.leases.answered(link, lease, Instant::now());
                if let Some(inherited) = &mut self.v6.inherited {
                    inherited.retain(|(of, _)| *of != link);
                }
            }
            Event::Told(servers) => {
                let count = servers.nameservers.len() + servers.ntp_servers.len();
                info!("a DHCPv6 server names {count} name and time servers on {name}");
                self.v6.servers.insert(link, servers);
            }
            Event::Denied(status) => {
                warn!("a DHCPv6 server gives {name} no address: {status}");
            }
            Event::Refused(refused) => {
                warn!("a DHCPv6 server's answer on {name} cannot be used: {refused}");
            }
            Event::Ended => {
                if let Some(lease) = self.v6.leases.ended(link) {
                    warn!("the DHCPv6 lease of {} on {name} ended", lease.address);
                }
            }
            Event::Failed(error) => {
                warn!("cannot ask DHCPv6 on {name}: {}", cause::line(&error));
            }
        }
    }
}
