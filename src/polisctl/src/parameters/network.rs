//! The network of a machine on the command line, and its view.
//!
//! Options are split here; their values are checked with the rest of the message.

use std::fmt::Display;

use polis_proto::v1;
use polis_proto::v1::network_configuration::bond::{Hash, Mode};
use polis_proto::v1::network_configuration::{Bond, Interface, Route, Settings, Vlan};
use serde::Serialize;

use crate::error::Error;
use crate::output::or_dash;
use polis_wire::parameters::{Bonding, Card, Ipv6, LinkSettings, MTU, Network, VLAN_IDS};

/// The text behind the link in each option.
const SETTINGS: &str = "dhcp, address=CIDR, route=CIDR@GATEWAY[@METRIC], mtu=BYTES, primary, \
                        ipv6=auto|slaac|dhcpv6|off";

/// The form of a route.
const ROUTE: &str = "CIDR@GATEWAY, or CIDR@GATEWAY@METRIC with a number, such as \
                     0.0.0.0/0@192.0.2.1@100";

/// The links of a machine.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Links {
    /// A card with addresses of its own; repeatable [default: all ask DHCP].
    ///
    /// `eth0,dhcp` or
    /// `eth0,address=192.0.2.7/24,route=0.0.0.0/0@192.0.2.1,mtu=9000`;
    /// `address` and `route` may be repeated; a route may end in `@METRIC`. `ipv6=slaac`, `dhcpv6`
    /// or `off` replaces what routers advertise. The card is a kernel name, a MAC address,
    /// `path:0000:00:03.0` or `driver:virtio_net`, or several with `+`.
    #[arg(long = "interface", value_name = "INTERFACE")]
    interfaces: Vec<String>,
    /// Several cards as one; repeatable.
    ///
    /// `bond0,member=eth0,member=eth1,mode=active-backup` or `mode=lacp`, with
    /// `hash=layer2|layer2+3|layer3+4` and `min-links=N`; then settings as those of an interface.
    #[arg(long = "bond", value_name = "BOND")]
    bonds: Vec<String>,
    /// A VLAN on a bond or a card; repeatable.
    ///
    /// `bond0,id=7,dhcp`; then settings as those of an interface.
    #[arg(long = "vlan", value_name = "VLAN")]
    vlans: Vec<String>,
    /// A DNS server; repeatable.
    #[arg(long = "nameserver", value_name = "ADDRESS")]
    nameservers: Vec<String>,
    /// A time server of this machine; repeatable.
    #[arg(long = "ntp", value_name = "SERVER")]
    ntp_servers: Vec<String>,
}

impl Links {
    /// The message, unchecked.
    pub(crate) fn message(&self) -> Result<v1::NetworkConfiguration, Error> {
        Ok(v1::NetworkConfiguration {
            interfaces: self
                .interfaces
                .iter()
                .map(|text| interface(text))
                .collect::<Result<_, _>>()?,
            nameservers: self.nameservers.clone(),
            ntp_servers: self.ntp_servers.clone(),
            bonds: self.bonds.iter().map(|text| bond(text)).collect::<Result<_, _>>()?,
            vlans: self.vlans.iter().map(|text| vlan(text)).collect::<Result<_, _>>()?,
        })
    }
}

/// The reason why a part of an option is rejected.
enum Wrong {
    /// The option has no such part.
    Part,
    /// The value of the part, with the allowed ones.
    Value(String),
}

impl Wrong {
    fn value(allowed: impl Into<String>) -> Self {
        Self::Value(allowed.into())
    }

    /// The error for this part of `option`, whose allowed parts are `known`.
    fn error(self, option: &str, text: &str, part: &str, known: &str) -> Error {
        let why = match (self, part.split_once('=')) {
            (Self::Value(allowed), Some((key, value))) => {
                format!("{key} is {value:?}; allowed is {allowed}")
            }
            (Self::Part, _) | (Self::Value(_), None) => format!("{part:?} is not known"),
        };
        Error::usage(format!("{option} {text:?}: {why}"))
            .or_help(format!("after the name: {known}"))
    }
}

/// Takes up a setting that every link may have.
fn setting(settings: &mut Settings, part: &str) -> Result<(), Wrong> {
    match part.split_once('=') {
        None if part == "dhcp" => settings.dhcp = true,
        None if part == "primary" => settings.primary = true,
        Some(("address", address)) => settings.addresses.push(address.to_owned()),
        Some(("ipv6", ipv6)) => {
            let ipv6 = one_of(&Ipv6::NAMES.map(|(ipv6, name)| (name, ipv6)), ipv6)?;
            settings.ipv6 = ipv6.message().into();
        }
        Some(("mtu", mtu)) => settings.mtu = number(mtu, MTU.start(), MTU.end())?,
        Some(("route", text)) => {
            settings.routes.push(route(text).ok_or_else(|| Wrong::value(ROUTE))?);
        }
        _ => return Err(Wrong::Part),
    }
    Ok(())
}

/// The value that one of these words means.
fn one_of<T: Copy>(known: &[(&str, T)], word: &str) -> Result<T, Wrong> {
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        Wrong::value(names.join(", "))
    })
}

/// A number; its range is checked with the message.
fn number(text: &str, least: impl Display, most: impl Display) -> Result<u32, Wrong> {
    text.parse().map_err(|_not| Wrong::value(format!("a number from {least} to {most}")))
}

fn route(text: &str) -> Option<Route> {
    let mut fields = text.split('@');
    let (destination, gateway) = (fields.next()?, fields.next()?);
    let metric = fields.next().map_or(Ok(0), str::parse).ok()?;
    let route = Route { destination: destination.to_owned(), gateway: gateway.to_owned(), metric };
    fields.next().is_none().then_some(route)
}

fn card(option: &str, text: &str, part: &str) -> Result<v1::network_configuration::Card, Error> {
    Card::read(part).map_err(|why| {
        Error::usage(format!("{option} {text:?}: {why}"))
            .or_help("leave out one of the parts with `+` between them")
    })
}

fn interface(text: &str) -> Result<Interface, Error> {
    let mut parts = text.split(',');
    let card = card("--interface", text, parts.next().unwrap_or_default())?;
    let mut settings = Settings::default();
    for part in parts {
        setting(&mut settings, part)
            .map_err(|wrong| wrong.error("--interface", text, part, SETTINGS))?;
    }
    let Settings { dhcp, addresses, routes, mtu, primary, ipv6 } = settings;
    let v1::network_configuration::Card { r#match, path, driver } = card;
    Ok(Interface { r#match, dhcp, addresses, routes, mtu, path, driver, primary, ipv6 })
}

/// The modes of a bond, by their words.
const MODES: [(&str, Mode); 2] = [("active-backup", Mode::ActiveBackup), ("lacp", Mode::Lacp)];

/// What LACP chooses the card of a packet by.
const HASHES: [(&str, Hash); 3] =
    [("layer2", Hash::Layer2), ("layer2+3", Hash::Layer23), ("layer3+4", Hash::Layer34)];

fn bond(text: &str) -> Result<Bond, Error> {
    let allowed = format!(
        "member=CARD, mode=active-backup|lacp, hash=layer2|layer2+3|layer3+4, min-links=N, {SETTINGS}"
    );
    let mut parts = text.split(',');
    let mut bond = Bond { name: parts.next().unwrap_or_default().to_owned(), ..Bond::default() };
    let mut settings = Settings::default();
    for part in parts {
        let wrong = |wrong: Wrong| wrong.error("--bond", text, part, &allowed);
        match part.split_once('=') {
            Some(("member", member)) => bond.members.push(card("--bond", text, member)?),
            Some(("mode", mode)) => bond.mode = one_of(&MODES, mode).map_err(wrong)?.into(),
            Some(("hash", hash)) => bond.hash = one_of(&HASHES, hash).map_err(wrong)?.into(),
            Some(("min-links", links)) => {
                bond.min_links = number(links, 0, "the number of members").map_err(wrong)?;
            }
            _ => setting(&mut settings, part).map_err(wrong)?,
        }
    }
    bond.settings = (settings != Settings::default()).then_some(settings);
    Ok(bond)
}

fn vlan(text: &str) -> Result<Vlan, Error> {
    let (least, most) = (*VLAN_IDS.start(), *VLAN_IDS.end());
    let allowed = format!("id={least}-{most}, {SETTINGS}");
    let mut parts = text.split(',');
    let parent = parts.next().unwrap_or_default();
    let mut vlan = Vlan::default();
    // No card is called so.
    if parent.starts_with("bond") {
        parent.clone_into(&mut vlan.bond);
    } else {
        vlan.card = Some(card("--vlan", text, parent)?);
    }
    let mut settings = Settings::default();
    for part in parts {
        let wrong = |wrong: Wrong| wrong.error("--vlan", text, part, &allowed);
        match part.split_once('=') {
            Some(("id", id)) => vlan.id = number(id, least, most).map_err(wrong)?,
            _ => setting(&mut settings, part).map_err(wrong)?,
        }
    }
    vlan.settings = (settings != Settings::default()).then_some(settings);
    Ok(vlan)
}

/// A network, as programs read it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct View {
    interfaces: Vec<InterfaceView>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bonds: Vec<BondView>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    vlans: Vec<VlanView>,
    nameservers: Vec<String>,
    ntp_servers: Vec<String>,
    /// The same in words.
    #[serde(skip)]
    lines: Vec<(&'static str, String)>,
}

#[derive(Debug, Serialize)]
struct InterfaceView {
    r#match: String,
    #[serde(flatten)]
    settings: SettingsView,
}

#[derive(Debug, Serialize)]
struct BondView {
    name: String,
    members: Vec<String>,
    mode: &'static str,
    hash: Option<String>,
    min_links: Option<u32>,
    #[serde(flatten)]
    settings: SettingsView,
}

#[derive(Debug, Serialize)]
struct VlanView {
    parent: String,
    id: u16,
    #[serde(flatten)]
    settings: SettingsView,
}

#[derive(Debug, Serialize)]
struct SettingsView {
    dhcp: bool,
    addresses: Vec<String>,
    routes: Vec<RouteView>,
    mtu: Option<u32>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    primary: bool,
    /// `slaac`, `dhcpv6` or `off`; without: as routers advertise.
    #[serde(skip_serializing_if = "Option::is_none")]
    ipv6: Option<String>,
}

#[derive(Debug, Serialize)]
struct RouteView {
    destination: String,
    gateway: String,
    metric: u32,
}

impl SettingsView {
    fn of(settings: &LinkSettings) -> Self {
        let routes = settings.routes.iter().map(|route| RouteView {
            destination: route.destination.to_string(),
            gateway: route.gateway.to_string(),
            metric: route.metric,
        });
        Self {
            dhcp: settings.dhcp,
            addresses: settings.addresses.iter().map(ToString::to_string).collect(),
            routes: routes.collect(),
            mtu: settings.mtu,
            primary: settings.primary,
            ipv6: (settings.ipv6 != Ipv6::Auto).then(|| settings.ipv6.to_string()),
        }
    }
}

impl View {
    /// The view of a network.
    pub(crate) fn of(network: &Network) -> Self {
        let interfaces = network.interfaces.iter().map(|interface| InterfaceView {
            r#match: interface.card.to_string(),
            settings: SettingsView::of(&interface.settings),
        });
        let bonds = network.bonds.iter().map(|bond| {
            let (mode, hash, min_links) = match bond.mode {
                Bonding::ActiveBackup => ("active-backup", None, None),
                Bonding::Lacp { hash, min_links } => {
                    ("lacp", Some(hash.to_string()), Some(min_links))
                }
            };
            let members = bond.members.iter().map(ToString::to_string).collect();
            let settings = SettingsView::of(&bond.settings);
            BondView { name: bond.name.clone(), members, mode, hash, min_links, settings }
        });
        let vlans = network.vlans.iter().map(|vlan| VlanView {
            parent: vlan.parent.to_string(),
            id: vlan.id,
            settings: SettingsView::of(&vlan.settings),
        });
        Self {
            interfaces: interfaces.collect(),
            bonds: bonds.collect(),
            vlans: vlans.collect(),
            nameservers: network.nameservers.iter().map(ToString::to_string).collect(),
            ntp_servers: network.ntp_servers.clone(),
            lines: lines(network),
        }
    }

    /// Its lines in a list of fields.
    pub(crate) fn fields(&self) -> Vec<(&'static str, String)> {
        self.lines.clone()
    }
}

fn lines(network: &Network) -> Vec<(&'static str, String)> {
    let with = |mut line: String, settings: &LinkSettings| {
        let settings = settings.to_string();
        if !settings.is_empty() {
            line.push_str(", ");
            line.push_str(&settings);
        }
        line
    };
    let interfaces = network.interfaces.iter();
    let interfaces = interfaces.map(|it| with(it.card.to_string(), &it.settings));
    let bonds = network.bonds.iter().map(|bond| {
        let members: Vec<_> = bond.members.iter().map(ToString::to_string).collect();
        let line = format!("{} of {}, {}", bond.name, members.join(" and "), bond.mode);
        with(line, &bond.settings)
    });
    let vlans = network.vlans.iter();
    let vlans = vlans.map(|vlan| with(format!("{} on {}", vlan.id, vlan.parent), &vlan.settings));
    let joined = |all: Vec<String>| all.join("\n");
    let (interfaces, bonds, vlans): (Vec<_>, Vec<_>, Vec<_>) =
        (interfaces.collect(), bonds.collect(), vlans.collect());
    let mut lines = Vec::new();
    if network.is_automatic() {
        lines.push(("interfaces", "all, by DHCP".to_owned()));
    } else if interfaces.is_empty() {
        lines.push(("interfaces", "-".to_owned()));
    } else {
        lines.push(("interfaces", joined(interfaces)));
    }
    lines.extend((!bonds.is_empty()).then(|| ("bonds", joined(bonds))));
    lines.extend((!vlans.is_empty()).then(|| ("VLANs", joined(vlans))));
    let nameservers: Vec<_> = network.nameservers.iter().map(ToString::to_string).collect();
    lines.push(("nameservers", or_dash(&nameservers.join(", "))));
    lines.push(("time servers", or_dash(&network.ntp_servers.join(", "))));
    lines
}
