//! Reads links, addresses and routes from the kernel.
//!
//! Only what the plan decides about is kept: loopback, cards, bonds and VLANs on them, addresses
//! that are not link-local, routes that the node made itself, and the routers that advertise
//! themselves.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use futures::TryStreamExt as _;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressMessage, AddressProtocol, AddressScope,
};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, BondMode, BondPortState, BondXmitHashPolicy, Inet6IfaceFlags,
    InfoBond, InfoBondPort, InfoData, InfoKind, InfoPortData, InfoVlan, LinkAttribute, LinkFlags,
    LinkInfo, LinkLayerType, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol,
};
use rtnetlink::{Handle, RouteMessageBuilder};

use super::plan::{Flaw, Kind, Link, MIIMON, OWN, Observed, Origin, Route, Switches};
use crate::parameters::{Bonding, Cidr, Hash, Mac};

/// Which interfaces are the node's to configure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interfaces {
    /// Those with hardware behind them.
    Hardware,
    /// Those whose names start so, and loopback: in a network namespace of a
    /// test, all are virtual, and some are the other ends of cables.
    Named(&'static str),
}

/// Reads everything.
pub(super) async fn observe(
    handle: &Handle,
    interfaces: Interfaces,
) -> Result<Observed, rtnetlink::Error> {
    let mut links = BTreeMap::new();
    let mut messages = handle.link().get().execute();
    while let Some(message) = messages.try_next().await? {
        if let Some(link) = link(&message, interfaces) {
            links.insert(message.header.index, link);
        }
    }
    let mut observed = Observed { links: known(links, interfaces), ..Observed::default() };
    let mut messages = handle.address().get().execute();
    while let Some(message) = messages.try_next().await? {
        let index = message.header.index;
        if let Some(cidr) = address(&message).filter(|_| observed.links.contains_key(&index)) {
            observed.addresses.insert((index, cidr));
            if let Some(flaw) = flaw(&message) {
                observed.flaws.insert((index, cidr), flaw);
            }
            if flags(&message).is_some_and(|flags| !flags.contains(AddressFlags::Permanent)) {
                observed.ending.insert((index, cidr));
            }
            let own = AddressAttribute::Protocol(AddressProtocol::Other(OWN));
            if message.attributes.contains(&own) {
                observed.own.insert((index, cidr));
            }
        }
    }
    for request in [
        RouteMessageBuilder::<Ipv4Addr>::new().build(),
        RouteMessageBuilder::<Ipv6Addr>::new().build(),
    ] {
        let mut messages = handle.route().get(request).execute();
        while let Some(message) = messages.try_next().await? {
            observed.routes.extend(route(&message));
            if let Some((index, router)) = router(&message)
                && let Some(link) = observed.links.get_mut(&index)
            {
                // Of several, the one with the lowest address: the same at each look.
                link.router = Some(link.router.map_or(router, |other| other.min(router)));
            }
        }
    }
    Ok(observed)
}

/// Leaves out cards that another link owns which is not a bond, and VLANs on links that are
/// not observed.
fn known(mut links: BTreeMap<u32, Link>, interfaces: Interfaces) -> BTreeMap<u32, Link> {
    let kinds: BTreeMap<u32, Kind> =
        links.iter().map(|(index, link)| (*index, link.kind)).collect();
    links.retain(|_index, link| {
        let owner = link.master.map(|master| kinds.get(&master));
        // The half of a pair, which has the same MAC: the other half is configured.
        let free = interfaces != Interfaces::Hardware
            || owner.is_none_or(|kind| matches!(kind, Some(Kind::Bond(_))));
        let carried = match link.kind {
            Kind::Vlan { parent, .. } => kinds.contains_key(&parent),
            Kind::Loopback | Kind::Ethernet | Kind::Bond(_) => true,
        };
        free && carried
    });
    links
}

/// Notes where the hardware of each card is, and its driver. `sys` is where sysfs is mounted.
pub(super) fn place(observed: &mut Observed, sys: &Path) {
    for link in observed.links.values_mut().filter(|link| link.kind == Kind::Ethernet) {
        let device = sys.join("class/net").join(&link.name).join("device");
        let driver = std::fs::read_link(device.join("driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        link.driver = driver;
        // A link without hardware has its number for a place.
        let Ok(device) = device.canonicalize() else { continue };
        let parts = device.components().map(|part| part.as_os_str().to_string_lossy());
        let parts: Vec<_> = parts.skip_while(|part| part != "devices").skip(1).collect();
        link.usb = parts.iter().any(|part| {
            // A host's bus: `usb1`.
            part.strip_prefix("usb").is_some_and(|number| number.parse::<u16>().is_ok())
        });
        link.place = parts.join("/");
    }
}

fn link(message: &LinkMessage, interfaces: Interfaces) -> Option<Link> {
    let flags = message.header.flags;
    let kind = match message.header.link_layer_type {
        LinkLayerType::Loopback => Kind::Loopback,
        LinkLayerType::Ether => Kind::Ethernet,
        _ => return None,
    };
    let mut link = Link {
        kind,
        name: String::new(),
        mac: Mac([0; 6]),
        hardware: Mac([0; 6]),
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        mtu: 0,
        mtu_max: None,
        master: None,
        active: true,
        driver: None,
        place: String::new(),
        usb: false,
        router: None,
        managed: false,
        informed: false,
        switches: None,
    };
    let (mut below, mut info, mut permanent) = (None, &[][..], None);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::AfSpecUnspec(families) => ipv6(&mut link, families),
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            // Zero: the driver does not say.
            LinkAttribute::MaxMtu(max) => link.mtu_max = Some(*max).filter(|max| *max > 0),
            LinkAttribute::Address(mac) => link.mac = Mac(mac.as_slice().try_into().ok()?),
            // A member of a bond has the address of the bond for as long.
            LinkAttribute::PermAddress(mac) => permanent = mac.as_slice().try_into().ok().map(Mac),
            LinkAttribute::Controller(0) => {}
            LinkAttribute::Controller(master) => link.master = Some(*master),
            LinkAttribute::Link(parent) => below = Some(*parent),
            LinkAttribute::LinkInfo(parts) => info = parts,
            _ => {}
        }
    }
    link.hardware = permanent.unwrap_or(link.mac);
    for option in port(info) {
        match option {
            InfoBondPort::PermHwaddr(mac) if permanent.is_none() => {
                link.hardware = mac.as_slice().try_into().map_or(link.hardware, Mac);
            }
            InfoBondPort::BondPortState(state) => link.active = *state == BondPortState::Active,
            _ => {}
        }
    }
    let named = info.iter().find_map(|part| match part {
        LinkInfo::Kind(kind) => Some(kind),
        _ => None,
    });
    let ours = match (named, interfaces) {
        (Some(InfoKind::Bond), _) => {
            link.kind = Kind::Bond(bonding(info));
            true
        }
        (Some(InfoKind::Vlan), _) => {
            link.kind = Kind::Vlan { parent: below?, id: vlan(info)? };
            true
        }
        // Bridges, tunnels and the like name their kind; hardware does not.
        (named, Interfaces::Hardware) => named.is_none() && !link.name.is_empty(),
        (_, Interfaces::Named(prefix)) => kind == Kind::Loopback || link.name.starts_with(prefix),
    };
    ours.then_some(link)
}

/// The state of a member in its bond.
fn port(info: &[LinkInfo]) -> &[InfoBondPort] {
    let data = info.iter().find_map(|part| match part {
        LinkInfo::PortData(InfoPortData::BondPort(data)) => Some(data.as_slice()),
        _ => None,
    });
    data.unwrap_or_default()
}

/// The mode of a bond; `None` if the node makes none like it.
fn bonding(info: &[LinkInfo]) -> Option<Bonding> {
    let (mut mode, mut hash, mut min_links, mut monitored) = (None, Hash::Layer2, 0, false);
    let data = info.iter().find_map(|part| match part {
        LinkInfo::Data(InfoData::Bond(data)) => Some(data),
        _ => None,
    });
    for option in data? {
        match option {
            InfoBond::Mode(is) => mode = Some(*is),
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer2) => hash = Hash::Layer2,
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer23) => hash = Hash::Layer2And3,
            InfoBond::XmitHashPolicy(BondXmitHashPolicy::Layer34) => hash = Hash::Layer3And4,
            InfoBond::MinLinks(links) => min_links = *links,
            InfoBond::MiiMon(millis) => monitored = *millis == MIIMON,
            _ => {}
        }
    }
    match mode.filter(|_mode| monitored)? {
        BondMode::ActiveBackup => Some(Bonding::ActiveBackup),
        BondMode::Ieee8023Ad => Some(Bonding::Lacp { hash, min_links }),
        _ => None,
    }
}

/// The ID of a VLAN.
fn vlan(info: &[LinkInfo]) -> Option<u16> {
    info.iter().find_map(|part| match part {
        LinkInfo::Data(InfoData::Vlan(data)) => data.iter().find_map(|option| match option {
            InfoVlan::Id(id) => Some(*id),
            _ => None,
        }),
        _ => None,
    })
}

fn address(message: &AddressMessage) -> Option<Cidr> {
    if message.header.scope == AddressScope::Link {
        return None;
    }
    let find =
        |pick: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(pick);
    // On a point-to-point link, `Address` is the other end.
    let local = find(|a| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None });
    let own = || find(|a| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None });
    Cidr::new(local.or_else(own)?, message.header.prefix_len)
}

/// What routers say about DHCPv6 on this link, and what the kernel does about IPv6.
fn ipv6(link: &mut Link, families: &[AfSpecUnspec]) {
    for family in families {
        let AfSpecUnspec::Inet6(attributes) = family else { continue };
        for attribute in attributes {
            match attribute {
                AfSpecInet6::Flags(flags) => {
                    link.managed = flags.contains(Inet6IfaceFlags::RaManaged);
                    link.informed = flags.contains(Inet6IfaceFlags::Otherconf);
                }
                AfSpecInet6::DevConf(conf) => {
                    let (slaac, off) = (conf.autoconf != 0, conf.disable_ipv6 != 0);
                    link.switches = Some(Switches { slaac, off });
                }
                _ => {}
            }
        }
    }
}

fn flags(message: &AddressMessage) -> Option<AddressFlags> {
    message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    })
}

/// Why an IPv6 address should not be chosen as the node's, if something speaks against it.
fn flaw(message: &AddressMessage) -> Option<Flaw> {
    let flags = flags(message).filter(|_| message.header.family == AddressFamily::Inet6)?;
    // For IPv6, the kernel calls a temporary address a secondary one.
    let passing = AddressFlags::Secondary | AddressFlags::Deprecated;
    if flags.contains(AddressFlags::Dadfailed) {
        Some(Flaw::Duplicate)
    } else if flags.contains(AddressFlags::Tentative) {
        Some(Flaw::Tentative)
    } else {
        flags.intersects(passing).then_some(Flaw::Passing)
    }
}

/// The address that the kernel has just taken away because another machine of the segment has it.
/// One that ends is not kept as a duplicate.
pub(super) fn duplicate(message: &AddressMessage) -> Option<(u32, Cidr)> {
    let is_duplicate = flaw(message) == Some(Flaw::Duplicate);
    address(message).filter(|_| is_duplicate).map(|cidr| (message.header.index, cidr))
}

/// The link and the router of a default route that a router advertised.
fn router(message: &RouteMessage) -> Option<(u32, Ipv6Addr)> {
    let header = &message.header;
    let advertised = header.address_family == AddressFamily::Inet6
        && header.protocol == RouteProtocol::Ra
        && header.destination_prefix_length == 0
        && header.table == RouteHeader::RT_TABLE_MAIN;
    let (mut link, mut gateway) = (None, None);
    for attribute in message.attributes.iter().filter(|_| advertised) {
        match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet6(address)) => gateway = Some(*address),
            RouteAttribute::Oif(index) => link = Some(*index),
            _ => {}
        }
    }
    link.zip(gateway)
}

/// Reads a route, if the node made it.
fn route(message: &RouteMessage) -> Option<Route> {
    let header = &message.header;
    let origin = match header.protocol {
        RouteProtocol::Static => Origin::Parameters,
        RouteProtocol::Dhcp => Origin::Dhcp,
        _ => return None,
    };
    if header.table != RouteHeader::RT_TABLE_MAIN {
        return None;
    }
    let ip = |address: &RouteAddress| match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    };
    let v4 = header.address_family == AddressFamily::Inet;
    // The kernel leaves the destination of a default route out.
    let mut destination =
        if v4 { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let (mut link, mut gateway, mut metric) = (None, None, 0);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address)?,
            RouteAttribute::Gateway(address) => gateway = Some(ip(address)?),
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Priority(priority) => metric = *priority,
            _ => {}
        }
    }
    Some(Route {
        link: link?,
        destination: Cidr::new(destination, header.destination_prefix_length)?,
        gateway,
        metric,
        origin,
        on_link: header.flags.contains(RouteFlags::Onlink),
    })
}
