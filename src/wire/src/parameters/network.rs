//! The network of a machine, as its parameters or an operator configure it: checked values.
//!
//! ```text
//! Network
//! ├ Interface: Card ------------------------+
//! ├ Bond: Card, Card, ... ------------------+--> LinkSettings: addresses, DHCP, routes, MTU
//! └ Vlan: on a bond or on a Card, an ID ----+
//! ```
//!
//! Invariants:
//! - [`Network::message`] and [`super::network()`] are inverse to each other.
//!
//! What this module does not do: check messages (`validate`), or look for the cards (`network`
//! of the machine).

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use polis_proto::v1;
use polis_proto::v1::network_configuration as wire;

use super::{Cidr, Mac};

/// Between the parts of a [`Card`] as text.
const AND: char = '+';

/// How to reach the world. Without links: every card asks DHCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Cards with addresses of their own.
    pub interfaces: Vec<Interface>,
    /// Cards that are used as one.
    pub bonds: Vec<Bond>,
    /// VLANs on bonds or cards.
    pub vlans: Vec<Vlan>,
    /// DNS servers, before those that DHCP names.
    pub nameservers: Vec<IpAddr>,
    /// Time servers, by name or address.
    pub ntp_servers: Vec<String>,
}

impl Network {
    /// Whether it names no link: then every card asks DHCP. Else the others have no address.
    #[must_use]
    pub fn is_automatic(&self) -> bool {
        self.interfaces.is_empty() && self.bonds.is_empty() && self.vlans.is_empty()
    }

    /// The settings of every link: interfaces, bonds, VLANs, in this order.
    pub fn settings(&self) -> impl Iterator<Item = &LinkSettings> {
        let interfaces = self.interfaces.iter().map(|interface| &interface.settings);
        let bonds = self.bonds.iter().map(|bond| &bond.settings);
        interfaces.chain(bonds).chain(self.vlans.iter().map(|vlan| &vlan.settings))
    }

    /// The message that means it.
    #[must_use]
    pub fn message(&self) -> v1::NetworkConfiguration {
        v1::NetworkConfiguration {
            interfaces: self.interfaces.iter().map(Interface::message).collect(),
            nameservers: self.nameservers.iter().map(ToString::to_string).collect(),
            ntp_servers: self.ntp_servers.clone(),
            bonds: self.bonds.iter().map(Bond::message).collect(),
            vlans: self.vlans.iter().map(Vlan::message).collect(),
        }
    }
}

/// The configuration of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Which card is meant.
    pub card: Card,
    /// Its settings.
    pub settings: LinkSettings,
}

impl Interface {
    fn message(&self) -> wire::Interface {
        let wire::Card { r#match, path, driver } = self.card.message();
        let wire::Settings { dhcp, addresses, routes, mtu, primary, ipv6 } =
            self.settings.message();
        wire::Interface { r#match, dhcp, addresses, routes, mtu, path, driver, primary, ipv6 }
    }
}

/// Several cards as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bond {
    /// The name of its link: `bond0`.
    pub name: String,
    /// Its cards, the preferred one first; never empty, each once.
    pub members: Vec<Card>,
    /// How they share the traffic.
    pub mode: Bonding,
    /// Its settings.
    pub settings: LinkSettings,
}

impl Bond {
    fn message(&self) -> wire::Bond {
        let (mode, hash, min_links) = match self.mode {
            Bonding::ActiveBackup => {
                (wire::bond::Mode::ActiveBackup, wire::bond::Hash::Unspecified, 0)
            }
            Bonding::Lacp { hash, min_links } => {
                let hash = match hash {
                    Hash::Layer2 => wire::bond::Hash::Layer2,
                    Hash::Layer2And3 => wire::bond::Hash::Layer23,
                    Hash::Layer3And4 => wire::bond::Hash::Layer34,
                };
                (wire::bond::Mode::Lacp, hash, min_links)
            }
        };
        wire::Bond {
            name: self.name.clone(),
            members: self.members.iter().map(Card::message).collect(),
            mode: mode.into(),
            hash: hash.into(),
            min_links,
            settings: Some(self.settings.message()),
        }
    }
}

/// How the members of a bond share the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bonding {
    /// One carries everything, the others wait.
    ActiveBackup,
    /// All of them, as negotiated with the switch (IEEE 802.3ad).
    Lacp {
        /// The rule by which a member sends a packet.
        hash: Hash,
        /// With fewer members that carry, the bond has no carrier; 0 and 1 mean the same.
        min_links: u32,
    },
}

impl fmt::Display for Bonding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ActiveBackup => f.write_str("active-backup"),
            Self::Lacp { hash, min_links: 0 | 1 } => write!(f, "LACP by {hash}"),
            Self::Lacp { hash, min_links } => {
                write!(f, "LACP by {hash}, {min_links} links or more")
            }
        }
    }
}

/// The rule by which a member of a bond sends a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hash {
    /// Hardware addresses. The default.
    #[default]
    Layer2,
    /// Hardware and IP addresses.
    Layer2And3,
    /// IP addresses and ports.
    Layer3And4,
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layer2 => "layer2",
            Self::Layer2And3 => "layer2+3",
            Self::Layer3And4 => "layer3+4",
        })
    }
}

/// A VLAN (IEEE 802.1Q) on another link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// The link that carries it.
    pub parent: Parent,
    /// 1 to 4094.
    pub id: u16,
    /// Its settings.
    pub settings: LinkSettings,
}

impl Vlan {
    fn message(&self) -> wire::Vlan {
        let (bond, card) = match &self.parent {
            Parent::Bond(name) => (name.clone(), None),
            Parent::Card(card) => (String::new(), Some(card.message())),
        };
        let settings = Some(self.settings.message());
        wire::Vlan { bond, card, id: self.id.into(), settings }
    }
}

/// The link that carries a VLAN.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    /// The bond with this name.
    Bond(String),
    /// A card.
    Card(Card),
}

impl fmt::Display for Parent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bond(name) => f.write_str(name),
            Self::Card(card) => card.fmt(f),
        }
    }
}

/// The settings that every link can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkSettings {
    /// Ask DHCP for an address.
    pub dhcp: bool,
    /// Fixed addresses, with the lengths of their networks.
    pub addresses: Vec<Cidr>,
    /// Fixed routes.
    pub routes: Vec<Route>,
    /// Bytes in a packet; `None` leaves it to the driver and DHCP.
    pub mtu: Option<u32>,
    /// Whether its address is the node's, whatever the order of the links.
    pub primary: bool,
    /// Where its addresses of IPv6 come from, besides the fixed ones.
    pub ipv6: Ipv6,
}

/// Where the addresses of IPv6 of a link come from, besides the fixed ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ipv6 {
    /// As routers advertise: SLAAC, DHCPv6, or both. The default.
    #[default]
    Auto,
    /// Of the prefixes that routers advertise; DHCPv6 is not asked.
    Slaac,
    /// From a DHCPv6 server, and not from advertised prefixes.
    Dhcpv6,
    /// The link has no IPv6.
    Off,
}

impl Ipv6 {
    /// All of them, with their names on the command line.
    pub const NAMES: [(Self, &'static str); 4] = [
        (Self::Auto, "auto"),
        (Self::Slaac, "slaac"),
        (Self::Dhcpv6, "dhcpv6"),
        (Self::Off, "off"),
    ];

    /// The value of the message that means it; the default is not written.
    #[must_use]
    pub fn message(self) -> wire::Ipv6 {
        match self {
            Self::Auto => wire::Ipv6::Unspecified,
            Self::Slaac => wire::Ipv6::Slaac,
            Self::Dhcpv6 => wire::Ipv6::Dhcpv6,
            Self::Off => wire::Ipv6::Off,
        }
    }
}

impl fmt::Display for Ipv6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(of, _)| of == self).map_or("", |(_, name)| *name);
        f.write_str(name)
    }
}

impl LinkSettings {
    fn message(&self) -> wire::Settings {
        let route = |route: &Route| wire::Route {
            destination: route.destination.to_string(),
            gateway: route.gateway.to_string(),
            metric: route.metric,
        };
        wire::Settings {
            dhcp: self.dhcp,
            addresses: self.addresses.iter().map(ToString::to_string).collect(),
            routes: self.routes.iter().map(route).collect(),
            mtu: self.mtu.unwrap_or_default(),
            primary: self.primary,
            ipv6: self.ipv6.message().into(),
        }
    }
}

/// In the words of a person: `DHCP, 192.0.2.7/24, 0.0.0.0/0 by 192.0.2.1, MTU 9000`.
impl fmt::Display for LinkSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = self.dhcp.then(|| "DHCP".to_owned()).into_iter().collect();
        parts.extend(self.addresses.iter().map(ToString::to_string));
        parts.extend(self.routes.iter().map(ToString::to_string));
        parts.extend(self.mtu.map(|mtu| format!("MTU {mtu}")));
        parts.extend(self.primary.then(|| "primary".to_owned()));
        parts.extend((self.ipv6 != Ipv6::Auto).then(|| format!("IPv6 {}", self.ipv6)));
        f.write_str(&parts.join(", "))
    }
}

/// A fixed route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to; no bits are set beyond the prefix.
    pub destination: Cidr,
    /// The next hop, of the same family.
    pub gateway: IpAddr,
    /// Lower wins; 0 is the kernel's default.
    pub metric: u32,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.destination, self.gateway)?;
        match self.metric {
            0 => Ok(()),
            metric => write!(f, " at metric {metric}"),
        }
    }
}

/// Selects a card of the machine: everything that is given has to fit. At least one is.
///
/// As text: `eth0`, `52:54:00:00:00:01`, `path:0000:00:03.0`, `driver:virtio_net`, and several of
/// them with `+` between.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Card {
    /// Its name or its hardware address.
    pub matches: Option<Match>,
    /// Its place, or a part of it.
    pub path: Option<Place>,
    /// The kernel's driver.
    pub driver: Option<String>,
}

impl Card {
    /// The card that this text selects, unchecked: [`super::network()`] checks it.
    ///
    /// # Errors
    ///
    /// A part that is given twice.
    pub fn read(text: &str) -> Result<wire::Card, String> {
        let mut card = wire::Card::default();
        for part in text.split(AND) {
            let (field, value) = match part.split_once(':') {
                Some(("path", path)) => (&mut card.path, path),
                Some(("driver", driver)) => (&mut card.driver, driver),
                Some(_) | None => (&mut card.r#match, part),
            };
            if !field.is_empty() {
                return Err(format!(
                    "{part:?} comes after another of its kind; allowed is one of each: a name or \
                     a MAC address, path:PLACE, driver:NAME"
                ));
            }
            value.clone_into(field);
        }
        Ok(card)
    }

    fn message(&self) -> wire::Card {
        let text = |it: &dyn ToString| it.to_string();
        wire::Card {
            r#match: self.matches.as_ref().map(|it| text(it)).unwrap_or_default(),
            path: self.path.as_ref().map(|it| text(it)).unwrap_or_default(),
            driver: self.driver.clone().unwrap_or_default(),
        }
    }

    /// Whether a card with this name, hardware address, place and driver fits.
    #[must_use]
    pub fn fits(&self, name: &str, mac: Mac, place: &str, driver: Option<&str>) -> bool {
        let matches = self.matches.as_ref().is_none_or(|matches| match matches {
            Match::Name(wanted) => wanted == name,
            Match::Mac(wanted) => *wanted == mac,
        });
        matches
            && self.path.as_ref().is_none_or(|path| path.is_part_of(place))
            && self.driver.as_ref().is_none_or(|wanted| driver == Some(wanted))
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let matches = self.matches.as_ref().map(ToString::to_string);
        let path = self.path.as_ref().map(|path| format!("path:{path}"));
        let driver = self.driver.as_ref().map(|driver| format!("driver:{driver}"));
        let parts: Vec<String> = [matches, path, driver].into_iter().flatten().collect();
        f.write_str(&parts.join(&AND.to_string()))
    }
}

/// A name or a hardware address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Match {
    /// The card that the kernel calls so.
    Name(String),
    /// The card whose maker gave it this address.
    Mac(Mac),
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Mac(mac) => write!(f, "{mac}"),
        }
    }
}

/// The place of a card below `/sys/devices`, or whole parts of it, such as its PCI address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(String);

/// The longest place, in bytes.
const PLACE_MAX: usize = 200;

impl Place {
    /// Whether `place` has these parts, one after the other.
    #[must_use]
    pub fn is_part_of(&self, place: &str) -> bool {
        let wanted: Vec<&str> = self.0.split('/').collect();
        let parts: Vec<&str> = place.split('/').collect();
        parts.windows(wanted.len()).any(|window| window == wanted)
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let known = |c: u8| c.is_ascii_alphanumeric() || b":._-".contains(&c);
        let part = |part: &str| !part.is_empty() && part.bytes().all(known) && part != "..";
        let good = text.len() <= PLACE_MAX && text.split('/').all(part);
        good.then(|| Self(text.to_owned())).ok_or(())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_found_by_whole_parts_of_it() {
        let place = "pci0000:00/0000:00:03.0/virtio1";
        for (text, found) in [
            ("0000:00:03.0", true),
            ("pci0000:00/0000:00:03.0", true),
            (place, true),
            ("0000:00:03", false),
            ("0000:00:03.0/virtio2", false),
        ] {
            assert_eq!(text.parse::<Place>().unwrap().is_part_of(place), found, "{text}");
        }
        for bad in ["", "/a", "a/", "a//b", "..", "a/../b", "a b", &"a".repeat(201)] {
            assert!(bad.parse::<Place>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_card_as_text_is_read_back() {
        let card = Card::read("52:54:00:00:00:01+path:0000:00:03.0+driver:virtio_net").unwrap();
        assert_eq!(card.r#match, "52:54:00:00:00:01");
        assert_eq!((&*card.path, &*card.driver), ("0000:00:03.0", "virtio_net"));
        assert!(Card::read("eth0+eth1").unwrap_err().contains("eth1"));
        let card = Card {
            matches: Some(Match::Name("eth0".to_owned())),
            path: "0000:00:03.0".parse().ok(),
            driver: Some("virtio_net".to_owned()),
        };
        assert_eq!(Card::read(&card.to_string()).unwrap(), card.message());
        let fits = |driver| card.fits("eth0", Mac([0; 6]), "pci0/0000:00:03.0", driver);
        assert!(fits(Some("virtio_net")) && !fits(Some("e1000e")) && !fits(None));
    }
}
