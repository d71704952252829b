//! The plan of the mesh, by the records of the nodes, and the changes that lead to it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use super::PORT;
use super::key::PublicKey;
use polis_wire::identity::NodeId;
use polis_wire::pod_network::{Networks, Prefix};

/// Seconds between packets to a peer whose address is unknown: its answers keep the way
/// open through a router that translates addresses.
const KEEPALIVE: u16 = 25;

/// The time for which a handshake holds: WireGuard takes no packet of an older session
/// (`REJECT_AFTER_TIME`), and agrees on new keys before, while there are packets.
const SESSION: Duration = Duration::from_secs(180);

/// A node of the mesh, as its record has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The public half of its key.
    pub key: PublicKey,
    /// The addresses of its pods.
    pub prefix: Prefix,
    /// Its last known address.
    pub address: Option<IpAddr>,
}

/// Another node, as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its key, which identifies the peer in the kernel.
    pub key: PublicKey,
    /// The destination of packets to it; without one, the kernel waits until the peer sends.
    pub endpoint: Option<SocketAddr>,
    /// The addresses that it may send from, and whose packets go to it.
    pub allowed: Prefix,
    /// Seconds between packets that only keep the way open.
    pub keepalive: Option<u16>,
}

/// A peer, as the kernel has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// The destination of packets to it: the source of its last packet.
    pub endpoint: Option<SocketAddr>,
    /// The addresses that it may send from; `None` if they are not one range.
    pub allowed: Option<Prefix>,
    /// Seconds between packets that only keep the way open.
    pub keepalive: Option<u16>,
    /// When the two last agreed on keys, by the clock of this machine.
    pub handshake: Option<SystemTime>,
}

/// The mesh of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// The device's address, with all 32 bits: packets of the node itself to pods of others
    /// come from it, so that answers find their way back through the tunnel.
    pub address: Ipv4Addr,
    /// The routes into the device, from `address`.
    ///
    /// The network of Services is among it. The kernel routes a packet of this node to a
    /// Service before kube-proxy sends it on to a pod, so there has to be a route, and it
    /// chooses the packet's source. Packets that kube-proxy does not send on end in the
    /// device, where no peer takes them.
    pub routes: Vec<Prefix>,
    /// The others, by their keys.
    pub peers: BTreeMap<PublicKey, Peer>,
}

impl Mesh {
    /// The mesh without the endpoints that the kernel knows better than the records: a peer
    /// behind a router that translates addresses calls from another one than it reports, and
    /// the kernel answers to where the last authentic packet came from.
    ///
    /// An endpoint of the records counts for a peer that never called, when it is another one
    /// than the one in `last_set`, and once the session with the peer is over.
    #[must_use]
    pub fn without_roamed(
        &self,
        present: &BTreeMap<PublicKey, Present>,
        last_set: &BTreeMap<PublicKey, SocketAddr>,
        now: SystemTime,
    ) -> Self {
        let mut mesh = self.clone();
        for peer in mesh.peers.values_mut() {
            let Some(present) = present.get(&peer.key) else { continue };
            let has_moved =
                last_set.get(&peer.key).is_some_and(|last_set| Some(*last_set) != peer.endpoint);
            if present.endpoint.is_some() && present.is_in_session(now) && !has_moved {
                peer.endpoint = None;
            }
        }
        mesh
    }

    /// The endpoints of the records.
    #[must_use]
    pub fn endpoints(&self) -> BTreeMap<PublicKey, SocketAddr> {
        self.peers.values().filter_map(|peer| Some((peer.key, peer.endpoint?))).collect()
    }
}

impl Present {
    /// Whether the last handshake still holds. One that the clock says is to come does.
    fn is_in_session(&self, now: SystemTime) -> bool {
        self.handshake.is_some_and(|at| now.duration_since(at).unwrap_or_default() < SESSION)
    }
}

/// The reason why a node is not in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// Its pods have addresses outside the network of all pods.
    Outside(Prefix),
    /// Its pods share addresses with those of this other node.
    Overlap(NodeId),
    /// It has the key of this other node.
    SameKey(NodeId),
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside(prefix) => {
                write!(f, "its pod prefix {prefix} is outside the pod network")
            }
            Self::Overlap(other) => write!(f, "its pod prefix overlaps that of {other}"),
            Self::SameKey(other) => write!(f, "it has the key of {other}"),
        }
    }
}

/// The mesh of the node `own` in the networks of its cluster, and the nodes that are left out
/// with the reason of each. `None` until the node itself has its place.
///
/// The leader gives out prefixes one by one and takes a key once, so a rejection is a bug
/// or a forged record. Both nodes of a pair are left out, on every node alike: a packet that
/// goes nowhere is better than one that goes to the wrong pod.
#[must_use]
pub fn plan(
    own: NodeId,
    networks: Networks,
    members: &BTreeMap<NodeId, Member>,
) -> (Option<Mesh>, BTreeMap<NodeId, Rejected>) {
    let Networks { pods, services } = networks;
    let rejected = rejected(pods, members);
    let sound = members.iter().filter(|(id, _)| !rejected.contains_key(*id));
    let (mine, others): (Vec<_>, Vec<_>) = sound.partition(|(id, _)| **id == own);
    let peers = others.into_iter().map(|(_, member)| (member.key, peer(member)));
    let mesh = mine.first().map(|(_, member)| Mesh {
        address: member.prefix.gateway(),
        routes: vec![pods, services],
        peers: peers.collect(),
    });
    (mesh, rejected)
}

fn peer(Member { key, prefix, address }: &Member) -> Peer {
    Peer {
        key: *key,
        endpoint: address.map(|address| SocketAddr::new(address, PORT)),
        allowed: *prefix,
        keepalive: address.is_none().then_some(KEEPALIVE),
    }
}

fn rejected(pods: Prefix, members: &BTreeMap<NodeId, Member>) -> BTreeMap<NodeId, Rejected> {
    let mut rejected = BTreeMap::new();
    for (id, member) in members {
        if !pods.contains(member.prefix) || pods == member.prefix {
            rejected.insert(*id, Rejected::Outside(member.prefix));
        }
    }
    // Both orders, so that each of a pair is rejected. Prefixes in the order of their
    // addresses overlap a neighbour if they overlap any: a few thousand nodes stay cheap.
    let mut by_prefix: Vec<_> = members.iter().collect();
    by_prefix.sort_by_key(|(_, member)| member.prefix);
    let mut widest: Option<(&NodeId, &Member)> = None;
    for (id, member) in by_prefix {
        if let Some((other, wide)) = widest.filter(|(_, wide)| wide.prefix.overlaps(member.prefix))
        {
            rejected.entry(*id).or_insert(Rejected::Overlap(*other));
            rejected.entry(*other).or_insert(Rejected::Overlap(*id));
            // Prefixes nest or are apart, so the earlier one is at least as wide.
            widest = Some((other, wide));
        } else {
            widest = Some((id, member));
        }
    }
    let mut by_key: BTreeMap<PublicKey, NodeId> = BTreeMap::new();
    for (id, member) in members {
        if let Some(other) = by_key.get(&member.key) {
            rejected.entry(*id).or_insert(Rejected::SameKey(*other));
            rejected.entry(*other).or_insert(Rejected::SameKey(*id));
        } else {
            by_key.insert(member.key, *id);
        }
    }
    rejected
}

/// One step from the peers of the kernel to those of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Forget the peer with this key.
    Remove(PublicKey),
    /// Add the peer, or replace what is known of it; its session goes on.
    Set(Peer),
}

/// The changes to make, removals first: an address that moves from one peer to another has
/// no peer for a moment, never two.
#[must_use]
pub fn changes(
    present: &BTreeMap<PublicKey, Present>,
    wanted: &BTreeMap<PublicKey, Peer>,
) -> Vec<Change> {
    let keys: BTreeSet<_> = wanted.keys().collect();
    let gone = present.keys().filter(|key| !keys.contains(key)).map(|key| Change::Remove(*key));
    let set = wanted.values().filter(|peer| differs(present.get(&peer.key), peer));
    gone.chain(set.cloned().map(Change::Set)).collect()
}

/// Whether the kernel needs an update. It learns the address of a peer from its packets, so
/// an endpoint is only set where the records have one.
fn differs(present: Option<&Present>, wanted: &Peer) -> bool {
    let Some(present) = present else { return true };
    let endpoint = wanted.endpoint.is_some() && wanted.endpoint != present.endpoint;
    endpoint || present.allowed != Some(wanted.allowed) || present.keepalive != wanted.keepalive
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
