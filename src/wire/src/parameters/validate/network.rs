//! Validation of the network: each link is described once, and can be made as described.
//!
//! The faults that one message alone shows are found here. Only the machine knows whether
//! the cards are there (`network` of the machine).

use std::collections::{BTreeMap, BTreeSet};

use polis_proto::v1;
use polis_proto::v1::network_configuration as wire;

use super::super::error::Error;
use super::super::network::{
    Bond, Bonding, Card, Hash, Interface, Ipv6, LinkSettings, Match, Network, Parent, Route, Vlan,
};
use super::super::text::{self, At as _, Refusal};
use super::super::{Cidr, Mac};
use super::SERVERS_MAX;

/// The numbers of a link's settings: addresses, routes, MTU, primary and IPv6.
const SETTINGS: [u16; 5] = [2, 3, 4, 5, 6];

const INTERFACES_MAX: usize = 32;
const BONDS_MAX: usize = 16;
const VLANS_MAX: usize = 64;
const MEMBERS_MAX: usize = 8;
/// Addresses or routes of one link.
const PER_LINK_MAX: usize = 64;
/// The MTU that a link may have: the least that IPv6 works with, to the most that an Ethernet
/// driver takes.
pub const MTU: std::ops::RangeInclusive<u32> = 1280..=65_535;
/// The MTU of a link for which nothing says another.
const MTU_DEFAULT: u32 = 1500;
/// The IDs of VLANs: 0 marks a frame outside of every VLAN, and 4095 is reserved.
pub const VLAN_IDS: std::ops::RangeInclusive<u16> = 1..=4094;
/// The name of a bond begins so, and no card does: names of VLANs on it have room for the ID in
/// the 15 bytes of a name.
const BOND: &str = "bond";
const BOND_SUFFIX_MAX: usize = 6;

/// Reads a network; `path` is its position as errors report it.
///
/// # Errors
///
/// [`Error::Field`], for the first thing that is not allowed.
pub fn network(message: v1::NetworkConfiguration, path: &str) -> Result<Network, Error> {
    let mut links = Links::default();
    let interfaces = links.interfaces(message.interfaces, &format!("{path}.interfaces"))?;
    let bonds = links.bonds(message.bonds, &format!("{path}.bonds"))?;
    let vlans = links.vlans(message.vlans, &format!("{path}.vlans"))?;
    text::at_most(message.nameservers.len(), SERVERS_MAX, "servers")
        .at(format!("{path}.nameservers"), 2)?;
    let mut nameservers = Vec::with_capacity(message.nameservers.len());
    for (i, server) in message.nameservers.iter().enumerate() {
        let address = server.parse().map_err(|_invalid| Refusal::of(server, "an IP address"));
        nameservers.push(address.at(format!("{path}.nameservers[{i}]"), 2)?);
    }
    text::at_most(message.ntp_servers.len(), SERVERS_MAX, "servers")
        .at(format!("{path}.ntp_servers"), 3)?;
    for (i, server) in message.ntp_servers.iter().enumerate() {
        text::host(server).at(format!("{path}.ntp_servers[{i}]"), 3)?;
    }
    Ok(Network { interfaces, bonds, vlans, nameservers, ntp_servers: message.ntp_servers })
}

/// The links so far.
#[derive(Default)]
struct Links {
    /// The MTU of each interface and each bond.
    mtus: BTreeMap<Parent, u32>,
    /// The cards of bonds.
    members: BTreeSet<Card>,
    vlans: BTreeSet<(Parent, u16)>,
    primary: bool,
}

impl Links {
    fn interfaces(
        &mut self,
        messages: Vec<wire::Interface>,
        path: &str,
    ) -> Result<Vec<Interface>, Error> {
        text::at_most(messages.len(), INTERFACES_MAX, "interfaces").at(path, 1)?;
        let mut interfaces = Vec::with_capacity(messages.len());
        for (i, message) in messages.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let wire::Interface {
                r#match,
                dhcp,
                addresses,
                routes,
                mtu,
                path: place,
                driver,
                primary,
                ipv6,
            } = message;
            let card = card(wire::Card { r#match, path: place, driver }, &path, [1, 6, 7])?;
            let settings = wire::Settings { dhcp, addresses, routes, mtu, primary, ipv6 };
            let settings = self.settings(settings, &path, [3, 4, 5, 8, 9])?;
            let mtu = settings.mtu.unwrap_or(MTU_DEFAULT);
            if self.mtus.insert(Parent::Card(card.clone()), mtu).is_some() {
                let refusal = Refusal::of(&card.to_string(), "each interface once");
                return Err(refusal).at(format!("{path}.match"), 1);
            }
            interfaces.push(Interface { card, settings });
        }
        Ok(interfaces)
    }

    fn bonds(&mut self, messages: Vec<wire::Bond>, path: &str) -> Result<Vec<Bond>, Error> {
        text::at_most(messages.len(), BONDS_MAX, "bonds").at(path, 4)?;
        let mut bonds = Vec::with_capacity(messages.len());
        for (i, message) in messages.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let mode = bonding(&message, &path)?;
            let wire::Bond { name, members, settings, .. } = message;
            bond_name(&name).at(format!("{path}.name"), 1)?;
            let members = self.members(members, &format!("{path}.members"))?;
            let settings = settings.unwrap_or_default();
            let settings = self.settings(settings, &format!("{path}.settings"), SETTINGS)?;
            let mtu = settings.mtu.unwrap_or(MTU_DEFAULT);
            if self.mtus.insert(Parent::Bond(name.clone()), mtu).is_some() {
                return Err(Refusal::of(&name, "each bond once")).at(format!("{path}.name"), 1);
            }
            bonds.push(Bond { name, members, mode, settings });
        }
        Ok(bonds)
    }

    fn members(&mut self, messages: Vec<wire::Card>, path: &str) -> Result<Vec<Card>, Error> {
        if messages.is_empty() {
            return Err(Refusal::described("empty", "at least one card")).at(path, 2);
        }
        text::at_most(messages.len(), MEMBERS_MAX, "members").at(path, 2)?;
        let mut members = Vec::with_capacity(messages.len());
        for (i, message) in messages.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let card = card(message, &path, [1, 2, 3])?;
            let is_interface = self.mtus.contains_key(&Parent::Card(card.clone()));
            if is_interface || !self.members.insert(card.clone()) {
                let allowed = "each card once: in a bond, or as an interface";
                return Err(Refusal::of(&card.to_string(), allowed)).at(path, 2);
            }
            members.push(card);
        }
        Ok(members)
    }

    fn vlans(&mut self, messages: Vec<wire::Vlan>, path: &str) -> Result<Vec<Vlan>, Error> {
        text::at_most(messages.len(), VLANS_MAX, "VLANs").at(path, 5)?;
        let mut vlans = Vec::with_capacity(messages.len());
        for (i, message) in messages.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            let wire::Vlan { bond, card, id, settings } = message;
            let parent = self.parent(bond, card, &path)?;
            let read = u16::try_from(id).ok().filter(|id| VLAN_IDS.contains(id));
            let allowed = || format!("a number from {} to {}", VLAN_IDS.start(), VLAN_IDS.end());
            let read = read.ok_or_else(|| Refusal::described(id, allowed()));
            let id = read.at(format!("{path}.id"), 3)?;
            if !self.vlans.insert((parent.clone(), id)) {
                let refusal = Refusal::described(id, "each ID once on a parent");
                return Err(refusal).at(format!("{path}.id"), 3);
            }
            let place = format!("{path}.settings");
            let settings = self.settings(settings.unwrap_or_default(), &place, SETTINGS)?;
            let below = self.mtus.get(&parent).copied().unwrap_or(MTU_DEFAULT);
            if let Some(mtu) = settings.mtu.filter(|mtu| *mtu > below) {
                let allowed = format!("at most {below}, the MTU of {parent}: give that one more");
                return Err(Refusal::described(mtu, allowed)).at(format!("{place}.mtu"), 4);
            }
            vlans.push(Vlan { parent, id, settings });
        }
        Ok(vlans)
    }

    fn parent(&self, bond: String, card: Option<wire::Card>, path: &str) -> Result<Parent, Error> {
        let place = format!("{path}.card");
        match card {
            Some(message) if bond.is_empty() => {
                let card = self::card(message, &place, [1, 2, 3])?;
                if self.members.contains(&card) {
                    let allowed = "a card that is in no bond: put the VLAN on the bond";
                    return Err(Refusal::of(&card.to_string(), allowed)).at(place, 2);
                }
                Ok(Parent::Card(card))
            }
            Some(_) => Err(Refusal::described("set, as the bond is", "one of both")).at(place, 2),
            None => {
                let parent = Parent::Bond(bond.clone());
                if self.mtus.contains_key(&parent) {
                    return Ok(parent);
                }
                let known = self.mtus.keys().filter(|known| matches!(known, Parent::Bond(_)));
                let known: Vec<_> = known.map(ToString::to_string).collect();
                let allowed = match &*known {
                    [] => "a bond of this configuration, which has none, or a card".to_owned(),
                    known => {
                        format!("a bond of this configuration ({}), or a card", known.join(", "))
                    }
                };
                Err(Refusal::of(&bond, allowed)).at(format!("{path}.bond"), 1)
            }
        }
    }

    /// `numbers` are those of addresses, routes, MTU, primary and IPv6.
    fn settings(
        &mut self,
        message: wire::Settings,
        path: &str,
        numbers: [u16; 5],
    ) -> Result<LinkSettings, Error> {
        let wire::Settings { dhcp, addresses, routes, mtu, primary, ipv6 } = message;
        text::at_most(addresses.len(), PER_LINK_MAX, "addresses")
            .at(format!("{path}.addresses"), numbers[0])?;
        let mut read = Vec::with_capacity(addresses.len());
        for (i, address) in addresses.iter().enumerate() {
            let address = host_address(address).and_then(|cidr| with_one_prefix(cidr, &read));
            read.push(address.at(format!("{path}.addresses[{i}]"), numbers[0])?);
        }
        text::at_most(routes.len(), PER_LINK_MAX, "routes")
            .at(format!("{path}.routes"), numbers[1])?;
        let routes = routes.iter().enumerate();
        let routes = routes.map(|(i, message)| route(message, &format!("{path}.routes[{i}]")));
        let routes: Vec<_> = routes.collect::<Result<_, _>>()?;
        let mtu = (mtu != 0).then_some(mtu);
        if let Some(mtu) = mtu.filter(|mtu| !MTU.contains(mtu)) {
            let allowed = format!("a number from {} to {}", MTU.start(), MTU.end());
            return Err(Refusal::described(mtu, allowed)).at(format!("{path}.mtu"), numbers[2]);
        }
        if primary && !dhcp && read.is_empty() {
            let allowed = "a link with DHCP or an address: its first address is the node's";
            return Err(Refusal::described("set", allowed))
                .at(format!("{path}.primary"), numbers[3]);
        }
        if primary && std::mem::replace(&mut self.primary, true) {
            let refusal = Refusal::described("set, as it is before", "one link at most");
            return Err(refusal).at(format!("{path}.primary"), numbers[3]);
        }
        let ipv6 = self::ipv6(ipv6, &read, &routes).at(format!("{path}.ipv6"), numbers[4])?;
        Ok(LinkSettings { dhcp, addresses: read, routes, mtu, primary, ipv6 })
    }
}

fn ipv6(number: i32, addresses: &[Cidr], routes: &[Route]) -> Result<Ipv6, Refusal> {
    let ipv6 = match wire::Ipv6::try_from(number) {
        Ok(wire::Ipv6::Unspecified | wire::Ipv6::Auto) => Ipv6::Auto,
        Ok(wire::Ipv6::Slaac) => Ipv6::Slaac,
        Ok(wire::Ipv6::Dhcpv6) => Ipv6::Dhcpv6,
        Ok(wire::Ipv6::Off) => Ipv6::Off,
        Err(_unknown) => {
            let allowed = "a number from 0 to 4 that the proto file names";
            return Err(Refusal::described(number, allowed));
        }
    };
    let address = addresses.iter().find(|cidr| cidr.address().is_ipv6());
    let route = routes.iter().map(|route| &route.destination).find(|to| to.address().is_ipv6());
    match address.or(route).filter(|_| ipv6 == Ipv6::Off) {
        Some(of) => {
            let found = format!("OFF, and the link has {of}");
            Err(Refusal::described(found, "OFF without addresses and routes of IPv6, or another"))
        }
        None => Ok(ipv6),
    }
}

/// `numbers` are those of match, path and driver.
fn card(message: wire::Card, path: &str, numbers: [u16; 3]) -> Result<Card, Error> {
    let wire::Card { r#match, path: place, driver } = message;
    if r#match.is_empty() && place.is_empty() && driver.is_empty() {
        let allowed = "a kernel interface name such as \"eth0\", a MAC address, a path or a driver";
        return Err(Refusal::of("", allowed)).at(format!("{path}.match"), numbers[0]);
    }
    let matches = match r#match.parse::<Mac>() {
        _ if r#match.is_empty() => None,
        Ok(mac) => Some(Match::Mac(mac)),
        Err(_) => {
            text::interface_name(&r#match).at(format!("{path}.match"), numbers[0])?;
            Some(Match::Name(r#match))
        }
    };
    let allowed = "a place below /sys/devices or whole parts of it, such as \"0000:00:03.0\"";
    let part =
        (!place.is_empty()).then(|| place.parse().map_err(|()| Refusal::of(&place, allowed)));
    let part = part.transpose().at(format!("{path}.path"), numbers[1])?;
    let known = |c: u8| c.is_ascii_alphanumeric() || b"_-".contains(&c);
    if driver.len() > 64 || !driver.bytes().all(known) {
        let refusal = Refusal::of(&driver, "the name of a driver, such as \"virtio_net\"");
        return Err(refusal).at(format!("{path}.driver"), numbers[2]);
    }
    Ok(Card { matches, path: part, driver: (!driver.is_empty()).then_some(driver) })
}

fn bond_name(text: &str) -> Result<(), Refusal> {
    let known = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let suffix = text.strip_prefix(BOND).unwrap_or_default();
    if (1..=BOND_SUFFIX_MAX).contains(&suffix.len()) && suffix.bytes().all(known) {
        return Ok(());
    }
    let allowed =
        format!("\"{BOND}\" and 1 to {BOND_SUFFIX_MAX} of a-z and 0-9, such as \"bond0\"");
    Err(Refusal::of(text, allowed))
}

fn bonding(message: &wire::Bond, path: &str) -> Result<Bonding, Error> {
    let unknown = |number: i32, max: i32| {
        Refusal::described(number, format!("a number from 0 to {max} that the proto file names"))
    };
    let mode = wire::bond::Mode::try_from(message.mode)
        .map_err(|_unknown| unknown(message.mode, 2))
        .at(format!("{path}.mode"), 3)?;
    let hash = wire::bond::Hash::try_from(message.hash)
        .map_err(|_unknown| unknown(message.hash, 3))
        .at(format!("{path}.hash"), 4)?;
    match mode {
        wire::bond::Mode::Unspecified | wire::bond::Mode::ActiveBackup => {
            let allowed = "nothing: only the mode LACP has it";
            if hash != wire::bond::Hash::Unspecified {
                return Err(Refusal::described("set", allowed)).at(format!("{path}.hash"), 4);
            }
            if message.min_links != 0 {
                let refusal = Refusal::described(message.min_links, allowed);
                return Err(refusal).at(format!("{path}.min_links"), 5);
            }
            Ok(Bonding::ActiveBackup)
        }
        wire::bond::Mode::Lacp => {
            let members = message.members.len();
            if usize::try_from(message.min_links).is_ok_and(|links| links > members) {
                let allowed = format!("at most {members}, the number of members");
                return Err(Refusal::described(message.min_links, allowed))
                    .at(format!("{path}.min_links"), 5);
            }
            let hash = match hash {
                wire::bond::Hash::Unspecified | wire::bond::Hash::Layer2 => Hash::Layer2,
                wire::bond::Hash::Layer23 => Hash::Layer2And3,
                wire::bond::Hash::Layer34 => Hash::Layer3And4,
            };
            Ok(Bonding::Lacp { hash, min_links: message.min_links })
        }
    }
}

fn host_address(text: &str) -> Result<Cidr, Refusal> {
    let refusal = || {
        Refusal::of(text, "a host's address and the length of its network, such as 192.0.2.7/24")
    };
    let cidr: Cidr = text.parse().map_err(|_invalid| refusal())?;
    let address = cidr.address();
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        return Err(refusal());
    }
    // It is unique on its link alone, so others could not reach the node by it.
    if matches!(address, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local()) {
        let allowed = "an address outside of fe80::/10, of which the kernel gives each link one";
        return Err(Refusal::of(text, allowed));
    }
    Ok(cidr)
}

/// The kernel has an address of IPv6 once on a link, with the prefix that came first: the node
/// would add the other one without end. An address of IPv4 may have several prefixes.
fn with_one_prefix(cidr: Cidr, earlier: &[Cidr]) -> Result<Cidr, Refusal> {
    let address = cidr.address();
    let known = earlier.iter().find(|known| known.address() == address && **known != cidr);
    match known.filter(|_known| address.is_ipv6()) {
        Some(known) => {
            let allowed = format!("an address of IPv6 once on a link: leave out this or {known}");
            Err(Refusal::of(&cidr.to_string(), allowed))
        }
        None => Ok(cidr),
    }
}

fn route(message: &wire::Route, path: &str) -> Result<Route, Error> {
    let destination: Result<Cidr, _> = message.destination.parse();
    let destination = destination
        .ok()
        .filter(|cidr| *cidr == cidr.network())
        .ok_or_else(|| {
            Refusal::of(&message.destination, "a network without host bits, such as 192.0.2.0/24")
        })
        .at(format!("{path}.destination"), 1)?;
    let gateway: Option<std::net::IpAddr> = message.gateway.parse().ok();
    let gateway = gateway
        .filter(|gateway| gateway.is_ipv4() == destination.address().is_ipv4())
        .filter(|gateway| !gateway.is_unspecified() && !gateway.is_multicast())
        .ok_or_else(|| Refusal::of(&message.gateway, "an IP address of the destination's family"))
        .at(format!("{path}.gateway"), 2)?;
    Ok(Route { destination, gateway, metric: message.metric })
}
