//! The interface of the mesh, its addresses and routes, by rtnetlink.

use std::net::{IpAddr, Ipv4Addr};

use futures::TryStreamExt as _;
use netlink_packet_route::address::AddressAttribute;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::{
    AddressMessageBuilder, Error as Refusal, Handle, LinkUnspec, LinkWireguard, RouteMessageBuilder,
};

use polis_wire::pod_network::Prefix;

use super::super::actions::{Action, Device, Observed, Route};
use super::super::{DEVICE, MTU};
use super::Error;

/// The origin that routes of the mesh carry in the kernel. Numbers from 5 on are free for
/// programs; `network` takes those of the parameters and of DHCP for its own.
const PROTOCOL: RouteProtocol = RouteProtocol::Other(78);

/// Fixed bits of a single address.
const HOST: u8 = 32;

/// Reads the interface without its keys and peers. Another kind than `kind` is foreign.
pub(super) async fn observe(handle: &Handle, kind: InfoKind) -> Result<Observed, Refusal> {
    let mut found = None;
    let mut messages = handle.link().get().execute();
    while let Some(message) = messages.try_next().await? {
        if name(&message) == Some(DEVICE) {
            found = Some(message);
        }
    }
    let Some(link) = found else { return Ok(Observed::Absent) };
    let index = link.header.index;
    if !is(&link, kind) {
        return Ok(Observed::Foreign(index));
    }
    let mut device = Device {
        index,
        up: link.header.flags.contains(LinkFlags::Up),
        mtu: link.attributes.iter().find_map(mtu).unwrap_or_default(),
        ..Device::default()
    };
    let mut messages = handle.address().get().set_link_index_filter(index).execute();
    while let Some(message) = messages.try_next().await? {
        // The filter of the request is a wish: the kernel may list all.
        if message.header.index != index {
            continue;
        }
        let local = message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(IpAddr::V4(address)) => Some(*address),
            _ => None,
        });
        let bits = message.header.prefix_len;
        device.addresses.extend(local.map(|address| (address, bits)));
    }
    let request = RouteMessageBuilder::<Ipv4Addr>::new().output_interface(index).build();
    let mut messages = handle.route().get(request).execute();
    while let Some(message) = messages.try_next().await? {
        device.routes.extend(route(&message, index));
    }
    Ok(Observed::Device(device))
}

fn name(message: &LinkMessage) -> Option<&str> {
    message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    })
}

fn mtu(attribute: &LinkAttribute) -> Option<u32> {
    match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    }
}

fn is(message: &LinkMessage, kind: InfoKind) -> bool {
    let kind = LinkInfo::Kind(kind);
    message.attributes.iter().any(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => info.contains(&kind),
        _ => false,
    })
}

/// The route in a message, if it leads into the interface from the main table.
fn route(message: &RouteMessage, index: u32) -> Option<Route> {
    let header = &message.header;
    if header.table != RouteHeader::RT_TABLE_MAIN || header.kind != RouteType::Unicast {
        return None;
    }
    // The kernel leaves the destination of a default route out.
    let mut destination = Ipv4Addr::UNSPECIFIED;
    let mut source = None;
    let mut leads_here = false;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(link) => leads_here = *link == index,
            RouteAttribute::Destination(RouteAddress::Inet(address)) => destination = *address,
            RouteAttribute::PrefSource(RouteAddress::Inet(address)) => source = Some(*address),
            _ => {}
        }
    }
    let destination = Prefix::new(destination, header.destination_prefix_length).ok()?;
    leads_here.then_some(Route { destination, source })
}

/// Carries out an action that concerns the interface; the others change nothing here.
pub(super) async fn apply(handle: &Handle, action: &Action) -> Result<(), Error> {
    let refused = |what| move |source| Error::Link { what, source };
    match action {
        Action::Create => {
            let made = handle.link().add(LinkWireguard::new(DEVICE).build()).execute().await;
            made.map_err(|error| match refusal(&error) {
                Some(rustix::io::Errno::OPNOTSUPP) => Error::Unsupported(error),
                _ => refused("make the interface")(error),
            })
        }
        Action::Delete(index) => {
            let gone = handle.link().del(*index).execute().await;
            ignore(gone, rustix::io::Errno::NODEV).map_err(refused("remove the interface"))
        }
        Action::Up(index) => {
            let up = LinkUnspec::new_with_index(*index).mtu(MTU).up().build();
            handle.link().set(up).execute().await.map_err(refused("switch the interface on"))
        }
        Action::AddAddress(index, address) => {
            let add = handle.address().add(*index, IpAddr::V4(*address), HOST).replace();
            add.execute().await.map_err(refused("set the address of the interface"))
        }
        Action::RemoveAddress(index, address, bits) => {
            let message = AddressMessageBuilder::<Ipv4Addr>::new().index(*index);
            let message = message.address(*address, *bits).build();
            let gone = handle.address().del(message).execute().await;
            ignore(gone, rustix::io::Errno::ADDRNOTAVAIL)
                .map_err(refused("remove an address of the interface"))
        }
        Action::AddRoute(index, route) => {
            let add = handle.route().add(message(*index, route).build()).replace();
            add.execute().await.map_err(refused("set a route into the interface"))
        }
        Action::RemoveRoute(index, route) => {
            // Protocol and scope stay open: a route of any origin matches.
            let mut gone = message(*index, route).protocol(RouteProtocol::Unspec);
            gone = gone.scope(RouteScope::NoWhere);
            let gone = handle.route().del(gone.build()).execute().await;
            ignore(gone, rustix::io::Errno::SRCH)
                .map_err(refused("remove a route into the interface"))
        }
        Action::Configure | Action::Peer(_) => Ok(()),
    }
}

fn message(index: u32, route: &Route) -> RouteMessageBuilder<Ipv4Addr> {
    let Route { destination, source } = route;
    let message = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(destination.network(), destination.length())
        .output_interface(index)
        .protocol(PROTOCOL)
        .scope(RouteScope::Link);
    match source {
        Some(source) => message.pref_source(*source),
        None => message,
    }
}

/// The reason that the kernel gives.
fn refusal(error: &Refusal) -> Option<rustix::io::Errno> {
    let Refusal::NetlinkError(message) = error else { return None };
    Some(rustix::io::Errno::from_raw_os_error(message.raw_code().saturating_neg()))
}

/// An object that is gone already is the wanted result.
pub(crate) fn ignore(result: Result<(), Refusal>, errno: rustix::io::Errno) -> Result<(), Refusal> {
    match result {
        Err(error) if refusal(&error) == Some(errno) => Ok(()),
        other => other,
    }
}
