//! The network of the node: gives it an address, and publishes that address.
//!
//! [`Service`] owns the loopback interface of the machine, its cards, and the bonds and VLANs on
//! them; no other service sets links, addresses or routes. `console`, `consensus` and the cluster
//! manager read its [`Status`]; [`names`] makes the node's own name resolve to the address.
//!
//! ```text
//! kernel --links, addresses, routes--> Observed --+
//! parameters, orders --> change -----> Network ---+--> plan --> Wanted --> actions --> apply
//! DHCP, DHCPv6 ----------------------> leases ----+      +----> Status (event value), resolv.conf
//! routers --addresses of the kernel--> advertised +
//!         --name servers ------------> rdnss -----+
//! other machines --ARP---------------> conflicts ---------> Status
//! ```
//!
//! Invariants:
//! - Every wake reads all, plans all and applies the difference, so a lost
//!   message, a pulled cable and a late interface are all the same case.
//! - `Status::primary` is an address that the kernel has on an interface.
//! - A network that the cluster orders stays only if another machine was reached over it
//!   (`change`).
//! - An answer of a DHCP or DHCPv6 server is bounded and checked before it is believed.
//!
//! What this module does not do: filter packets, or make addresses of the prefixes that routers
//! advertise: the kernel does that by itself.

mod advertised;
mod apply;
mod change;
mod conflicts;
mod dhcp;
mod dhcpv6;
mod lease;
mod leases;
pub mod names;
mod observe;
mod plan;
mod primary;
mod probe;
mod rdnss;
mod service;
#[cfg(test)]
mod service_tests;
mod view;

use std::net::IpAddr;
use std::time::Duration;

use polis_base::serial::EventLine;
use polis_proto::v1::NetworkState;

use crate::parameters::{Bonding, Cidr, LinkSettings, Mac, Network};

pub use self::observe::Interfaces;
pub use self::service::{Config, Error, Service};

/// The published status of the network; an event value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The address of the node; `None` while it has no address.
    pub primary: Option<IpAddr>,
    /// The way out.
    pub gateway: Option<IpAddr>,
    /// DNS servers, best first.
    pub nameservers: Vec<IpAddr>,
    /// Time servers, by name or address.
    pub ntp_servers: Vec<String>,
    /// Every card, bond and VLAN, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// Why a part of the configuration has no link, and which addresses another machine has, too:
    /// a sentence for each.
    pub faults: Vec<String>,
    /// How it stands with the network that the cluster ordered last.
    pub change: Change,
    /// The reason why an address waits, and the next step.
    pub waiting: Option<String>,
}

/// A network that the cluster orders for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Another one for each order; never zero.
    pub number: u64,
    /// `None`: the one of the parameters.
    pub network: Option<Network>,
}

/// How it stands with the last order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The order; zero: none.
    pub number: u64,
    /// Its state.
    pub state: NetworkState,
    /// Why it is reverted or refused.
    pub cause: String,
}

impl Change {
    /// The word for its state.
    #[must_use]
    pub fn word(&self) -> &'static str {
        change::word(self.state)
    }

    /// Its line on the serial port, without the time.
    fn line(&self) -> EventLine {
        let line = EventLine::new("network").field("state", self.word());
        let line = line.field("order", self.number);
        if self.cause.is_empty() { line } else { line.field("cause", &self.cause) }
    }
}

impl Status {
    /// All addresses of the node, the primary first.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        let all = self.interfaces.iter().flat_map(|interface| &interface.addresses);
        let others = all.map(Cidr::address).filter(|address| Some(*address) != self.primary);
        self.primary.into_iter().chain(others).collect()
    }
}

/// One link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its number in the kernel.
    pub index: u32,
    /// Its name in the kernel.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Its hardware address; that of a member of a bond is the one of the bond.
    pub mac: Mac,
    /// Whether a cable is plugged in and the other end is there.
    pub carrier: bool,
    /// The kernel's driver, if it has one.
    pub driver: Option<String>,
    /// The place of a card below `/sys/devices`; empty without.
    pub path: String,
    /// Bytes in a packet.
    pub mtu: u32,
    /// The configuration of the link, where it has one.
    pub planned: Option<LinkSettings>,
    /// Its addresses, IPv6 link-local ones left out.
    pub addresses: Vec<Cidr>,
    /// Whether a DHCP server is asked for an address.
    pub asking: bool,
    /// The lease from a DHCP server.
    pub leased: Option<Leased>,
    /// The lease from a DHCPv6 server.
    pub leased_v6: Option<Leased>,
}

impl Interface {
    /// Where an address of it is from: `DHCP`, `DHCPv6`, `configuration` or `router`; empty: not
    /// known.
    #[must_use]
    pub fn origin(&self, address: &Cidr) -> &'static str {
        let is = |leased: Option<Leased>| leased.is_some_and(|leased| leased.address == *address);
        let planned = self.planned.as_ref();
        match address.address() {
            _ if is(self.leased) => "DHCP",
            _ if is(self.leased_v6) => "DHCPv6",
            _ if planned.is_some_and(|planned| planned.addresses.contains(address)) => {
                "configuration"
            }
            // The kernel makes those by itself, of what routers advertise.
            IpAddr::V6(_) => "router",
            IpAddr::V4(_) => "",
        }
    }
}

/// The kind of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A card, and the bond that it is a member of.
    Card(Option<Membership>),
    /// A bond; `None`: in a mode that the node does not make.
    Bond(Option<Bonding>),
    /// A VLAN.
    Vlan {
        /// The name of the link that carries it.
        on: String,
        /// Its ID.
        id: u16,
    },
}

/// A card's part in a bond.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The name of the bond.
    pub bond: String,
    /// Whether packets are sent through it: an active backup waits.
    pub active: bool,
}

/// An address that a DHCP server gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The address.
    pub address: Cidr,
    /// When it must be given back, in time since the kernel started; `None`: never.
    pub ends: Option<Duration>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_of_an_address_is_a_server_the_configuration_a_router_or_unknown() {
        let [fixed, four, six, advertised, other] =
            ["192.168.40.7/22", "10.0.2.15/24", "2001:db8::7/128", "fd00::1/64", "192.168.40.8/22"]
                .map(|text| text.parse::<Cidr>().unwrap());
        let leased = |address| Some(Leased { address, ends: None });
        let mut interface = Interface {
            index: 2,
            name: "eth0".to_owned(),
            kind: Kind::Card(None),
            mac: Mac([2, 0, 0, 0, 0, 1]),
            carrier: true,
            driver: None,
            path: String::new(),
            mtu: 1500,
            planned: Some(LinkSettings { addresses: vec![fixed], ..LinkSettings::default() }),
            addresses: Vec::new(),
            asking: false,
            leased: leased(four),
            leased_v6: leased(six),
        };
        let from = [fixed, four, six, advertised, other].map(|address| interface.origin(&address));
        assert_eq!(from, ["configuration", "DHCP", "DHCPv6", "router", ""]);
        interface.planned = None;
        assert_eq!(interface.origin(&fixed), "");
    }
}
