//! The steps from the mesh in the kernel to the mesh of a plan. Pure.
//!
//! ```text
//! Observed, Option<Mesh> --actions--> [Action]      empty: the kernel has the mesh
//! ```
//!
//! The service observes and acts until there is nothing left to do: a new device has its
//! number only once it exists.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::SystemTime;

use polis_wire::pod_network::Prefix;

use super::key::PublicKey;
use super::plan::{Change, Mesh, Present, changes};
use super::{MTU, PORT};

/// The interface with the name of the mesh, as the kernel has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Observed {
    /// No interface has this name.
    #[default]
    Absent,
    /// The interface with this number, which is not a WireGuard device.
    Foreign(u32),
    /// The device.
    Device(Device),
}

/// A WireGuard device, as the kernel has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its number in the kernel.
    pub index: u32,
    /// Whether it is up.
    pub up: bool,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// Its IPv4 addresses, with the number of their fixed bits.
    pub addresses: BTreeSet<(Ipv4Addr, u8)>,
    /// The IPv4 routes of the main table that lead into it.
    pub routes: BTreeSet<Route>,
    /// The public half of its key; `None` without a key.
    pub key: Option<PublicKey>,
    /// Its UDP port.
    pub port: u16,
    /// The other nodes.
    pub peers: BTreeMap<PublicKey, Present>,
}

impl Device {
    /// The last handshake with each peer that had one, by the clock of this machine.
    pub fn handshakes(&self) -> impl Iterator<Item = (PublicKey, Option<SocketAddr>, SystemTime)> {
        self.peers.iter().filter_map(|(key, peer)| Some((*key, peer.endpoint, peer.handshake?)))
    }
}

/// A route into the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The destination.
    pub destination: Prefix,
    /// The source address of packets of this node.
    pub source: Option<Ipv4Addr>,
}

/// One change in the kernel, which may be repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make the device.
    Create,
    /// Remove the interface with this number, and with it its addresses and routes.
    Delete(u32),
    /// Set the private key and the port.
    Configure,
    /// Change one peer.
    Peer(Change),
    /// Set the size of packets and switch it on.
    Up(u32),
    /// Add an address.
    AddAddress(u32, Ipv4Addr),
    /// Remove an address.
    RemoveAddress(u32, Ipv4Addr, u8),
    /// Add a route, or replace the one to the same destination.
    AddRoute(u32, Route),
    /// Remove a route.
    RemoveRoute(u32, Route),
}

/// The steps from `observed` to `wanted`, in order. `key` is the public half of the own key.
#[must_use]
pub fn actions(observed: &Observed, wanted: Option<(&Mesh, PublicKey)>) -> Vec<Action> {
    match (observed, wanted) {
        (Observed::Absent, None) => Vec::new(),
        (Observed::Absent, Some(_)) => vec![Action::Create],
        (Observed::Foreign(index), _) | (Observed::Device(Device { index, .. }), None) => {
            vec![Action::Delete(*index)]
        }
        (Observed::Device(device), Some((mesh, key))) => differences(device, mesh, key),
    }
}

fn differences(device: &Device, mesh: &Mesh, key: PublicKey) -> Vec<Action> {
    let index = device.index;
    let mut actions = Vec::new();
    if device.key != Some(key) || device.port != PORT {
        actions.push(Action::Configure);
    }
    actions.extend(changes(&device.peers, &mesh.peers).into_iter().map(Action::Peer));
    // The old addresses first: a route with such a source would go with them.
    let own = (mesh.address, u32::BITS.try_into().unwrap_or(u8::MAX));
    let old = device.addresses.iter().filter(|address| **address != own);
    actions.extend(old.map(|(address, bits)| Action::RemoveAddress(index, *address, *bits)));
    if !device.addresses.contains(&own) {
        actions.push(Action::AddAddress(index, mesh.address));
    }
    if !device.up || device.mtu != MTU {
        actions.push(Action::Up(index));
    }
    let wanted: BTreeSet<_> = routes(mesh).collect();
    let missing = wanted.difference(&device.routes);
    actions.extend(missing.map(|route| Action::AddRoute(index, *route)));
    // One to a destination of the plan was replaced by the one above.
    let stays = |route: &&Route| !wanted.iter().any(|one| one.destination == route.destination);
    let gone = device.routes.iter().filter(stays);
    actions.extend(gone.map(|route| Action::RemoveRoute(index, *route)));
    actions
}

/// The routes into the device.
fn routes(mesh: &Mesh) -> impl Iterator<Item = Route> {
    let source = Some(mesh.address);
    mesh.routes.iter().map(move |destination| Route { destination: *destination, source })
}

#[cfg(test)]
#[path = "actions_tests.rs"]
mod tests;
