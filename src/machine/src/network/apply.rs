//! The application of a plan: carries out its actions. Nothing is left to decide, and doing an
//! action twice is doing it once.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressProtocol, CacheInfo};
use netlink_packet_route::link::{BondMode, BondXmitHashPolicy, LinkMessage};
use netlink_packet_route::route::{RouteMessage, RouteProtocol, RouteScope};
use rtnetlink::{
    AddressMessageBuilder, Error, Handle, LinkBond, LinkUnspec, LinkVlan, RouteMessageBuilder,
};

use super::plan::{Action, MIIMON, OWN, Origin, Route, Switches};
use crate::parameters::{Bonding, Cidr, Hash, Mac};

/// The switches of links for IPv6, a folder each.
const SWITCHES: &str = "/proc/sys/net/ipv6/conf";

/// Why the kernel refuses an action.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Netlink(#[from] Error),
    #[error("cannot write {path}")]
    Switch { path: String, source: std::io::Error },
}

/// Carries out one action.
pub(super) async fn apply(handle: &Handle, action: &Action) -> Result<(), Refusal> {
    match action {
        Action::Switch(_, name, switches) => switch(name, *switches),
        action => Ok(netlink(handle, action).await?),
    }
}

/// Netlink reads these switches, and does not set them.
fn switch(name: &str, switches: Switches) -> Result<(), Refusal> {
    let values = [("autoconf", switches.slaac), ("disable_ipv6", switches.off)];
    for (file, value) in values {
        let path = format!("{SWITCHES}/{name}/{file}");
        // The kernel answers at once: nothing is read from a disk.
        std::fs::write(&path, if value { "1" } else { "0" })
            .map_err(|source| Refusal::Switch { path, source })?;
    }
    Ok(())
}

async fn netlink(handle: &Handle, action: &Action) -> Result<(), Error> {
    match action {
        Action::RemoveLink(link) => {
            let gone = handle.link().del(*link).execute().await;
            ignore(gone, rustix::io::Errno::NODEV)
        }
        Action::AddBond(name, mode, address) => {
            // The module makes one by itself when it is loaded: the next look replaces it.
            let made = handle.link().add(bond(name, *mode, *address)).execute().await;
            ignore(made, rustix::io::Errno::EXIST)
        }
        Action::AddVlan { name, parent, id } => {
            handle.link().add(LinkVlan::new(name, *parent, *id).build()).execute().await
        }
        Action::Leave(link) => {
            let free = LinkUnspec::new_with_index(*link).nocontroller().build();
            handle.link().set(free).execute().await
        }
        Action::Join { link, bond } => {
            // The kernel takes a card into a bond only while it is down, and brings it up then.
            let down = LinkUnspec::new_with_index(*link).down().build();
            handle.link().set(down).execute().await?;
            let member = LinkUnspec::new_with_index(*link).controller(*bond).build();
            handle.link().set(member).execute().await
        }
        Action::Up(link) => {
            let up = LinkUnspec::new_with_index(*link).up().build();
            handle.link().set(up).execute().await
        }
        Action::Mtu(link, mtu) => {
            let mtu = LinkUnspec::new_with_index(*link).mtu(*mtu).build();
            handle.link().set(mtu).execute().await
        }
        Action::RemoveAddress(link, cidr) => {
            let gone = handle.address().del(address(*link, *cidr)).execute().await;
            ignore(gone, rustix::io::Errno::ADDRNOTAVAIL)
        }
        Action::AddAddress(link, cidr, lifetime) => {
            let mut request = handle.address().add(*link, cidr.address(), cidr.prefix()).replace();
            let attributes = &mut request.message_mut().attributes;
            attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(OWN)));
            attributes.extend(lifetime.map(lasting));
            request.execute().await
        }
        Action::RemoveRoute(route) => {
            let gone = handle.route().del(message(route)).execute().await;
            ignore(gone, rustix::io::Errno::SRCH)
        }
        Action::AddRoute(route) => handle.route().add(message(route)).replace().execute().await,
        // Not a message: see `switch`.
        Action::Switch(..) => Ok(()),
    }
}

/// A bond that watches its members.
fn bond(name: &str, mode: Bonding, address: Option<Mac>) -> LinkMessage {
    let mut bond = LinkBond::new(name).miimon(MIIMON);
    if let Some(Mac(address)) = address {
        bond = bond.address(address.to_vec());
    }
    match mode {
        Bonding::ActiveBackup => bond.mode(BondMode::ActiveBackup),
        Bonding::Lacp { hash, min_links } => {
            let hash = match hash {
                Hash::Layer2 => BondXmitHashPolicy::Layer2,
                Hash::Layer2And3 => BondXmitHashPolicy::Layer23,
                Hash::Layer3And4 => BondXmitHashPolicy::Layer34,
            };
            bond.mode(BondMode::Ieee8023Ad).xmit_hash_policy(hash).min_links(min_links)
        }
    }
    .build()
}

/// An object that is gone already is the wanted result.
fn ignore(result: Result<(), Error>, errno: rustix::io::Errno) -> Result<(), Error> {
    match result {
        Err(Error::NetlinkError(message)) if message.raw_code() == -errno.raw_os_error() => Ok(()),
        other => other,
    }
}

fn address(link: u32, cidr: Cidr) -> AddressMessage {
    match cidr.address() {
        IpAddr::V4(v4) => {
            AddressMessageBuilder::<Ipv4Addr>::new().index(link).address(v4, cidr.prefix()).build()
        }
        IpAddr::V6(v6) => {
            AddressMessageBuilder::<Ipv6Addr>::new().index(link).address(v6, cidr.prefix()).build()
        }
    }
}

/// The kernel takes the address away at the end of the lease, even if the node is dead by then.
fn lasting(lifetime: Duration) -> AddressAttribute {
    let mut info = CacheInfo::default();
    // The kernel counts whole seconds, and takes none for no lifetime at all.
    let seconds = (lifetime + Duration::from_millis(999)).as_secs();
    // `u32::MAX` means forever here and in DHCP alike.
    info.ifa_valid = u32::try_from(seconds).unwrap_or(u32::MAX);
    info.ifa_preferred = info.ifa_valid;
    AddressAttribute::CacheInfo(info)
}

fn message(route: &Route) -> RouteMessage {
    let protocol = match route.origin {
        Origin::Parameters => RouteProtocol::Static,
        Origin::Dhcp => RouteProtocol::Dhcp,
    };
    // Neighbours need no gateway.
    let scope = if route.gateway.is_none() { RouteScope::Link } else { RouteScope::Universe };
    let prefix = route.destination.prefix();
    // The two builders have the same methods and no trait in common.
    macro_rules! build {
        ($family:ty, $variant:path, $destination:expr) => {{
            let mut builder = RouteMessageBuilder::<$family>::new()
                .destination_prefix($destination, prefix)
                .output_interface(route.link)
                .protocol(protocol)
                .scope(scope);
            if let Some($variant(gateway)) = route.gateway {
                builder = builder.gateway(gateway);
            }
            if route.metric != 0 {
                builder = builder.priority(route.metric);
            }
            if route.on_link {
                builder = builder.onlink();
            }
            builder.build()
        }};
    }
    match route.destination.address() {
        IpAddr::V4(v4) => build!(Ipv4Addr, IpAddr::V4, v4),
        IpAddr::V6(v6) => build!(Ipv6Addr, IpAddr::V6, v6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_lasts_for_whole_seconds_and_for_one_at_least() {
        for (millis, seconds) in [(1, 1), (39_200, 40), (40_000, 40)] {
            let AddressAttribute::CacheInfo(info) = lasting(Duration::from_millis(millis)) else {
                panic!("no lifetime")
            };
            assert_eq!((info.ifa_valid, info.ifa_preferred), (seconds, seconds), "{millis} ms");
        }
    }
}
