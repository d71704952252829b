//! The key, the port and the peers of the device, by generic netlink.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_packet_generic::GenlMessage;
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_wireguard::{
    WireguardAddressFamily, WireguardAllowedIp, WireguardAllowedIpAttr, WireguardAttribute,
    WireguardCmd, WireguardMessage, WireguardPeer, WireguardPeerAttribute, WireguardPeerFlags,
    WireguardTimeSpec,
};
use netlink_proto::ConnectionHandle;
use netlink_proto::sys::SocketAddr as Destination;

use polis_wire::pod_network::Prefix;

use super::super::actions::Device;
use super::super::key::{PrivateKey, PublicKey};
use super::super::plan::{Change, Peer, Present};
use super::super::{DEVICE, PORT};
use super::Error;

/// The kernel's name of the family of messages.
const FAMILY: &str = "wireguard";

const GET: &str = "read the peers of the mesh";
const SET: &str = "change the peers of the mesh";

/// The way to WireGuard in the kernel.
#[derive(Debug)]
pub(super) struct Generic {
    families: ConnectionHandle<GenlMessage<GenlCtrl>>,
    devices: ConnectionHandle<GenlMessage<WireguardMessage>>,
}

impl Generic {
    pub(super) fn new(
        families: ConnectionHandle<GenlMessage<GenlCtrl>>,
        devices: ConnectionHandle<GenlMessage<WireguardMessage>>,
    ) -> Self {
        Self { families, devices }
    }

    /// Adds the key, the port and the peers to a device.
    pub(super) async fn observe(&self, device: &mut Device) -> Result<(), Error> {
        let name = WireguardAttribute::IfName(DEVICE.to_owned());
        let request = WireguardMessage { cmd: WireguardCmd::GetDevice, attributes: vec![name] };
        for answer in self.request(request, NLM_F_DUMP, GET).await? {
            read(answer, device);
        }
        Ok(())
    }

    /// Sets the private key and the port.
    pub(super) async fn configure(&self, key: &PrivateKey) -> Result<(), Error> {
        let attributes = vec![
            WireguardAttribute::IfName(DEVICE.to_owned()),
            WireguardAttribute::PrivateKey(*key.bytes()),
            WireguardAttribute::ListenPort(PORT),
        ];
        let message = WireguardMessage { cmd: WireguardCmd::SetDevice, attributes };
        self.request(message, NLM_F_ACK, "set the key of the mesh").await.map(drop)
    }

    /// Changes one peer; the others and their sessions stay.
    pub(super) async fn change(&self, change: &Change) -> Result<(), Error> {
        self.request(message(change), NLM_F_ACK, SET).await.map(drop)
    }

    async fn request(
        &self,
        message: WireguardMessage,
        flags: u16,
        what: &'static str,
    ) -> Result<Vec<WireguardMessage>, Error> {
        let mut message = GenlMessage::from_payload(message);
        message.set_resolved_family_id(self.family().await?);
        let answers = exchange(&self.devices, message, flags, what).await?;
        Ok(answers.into_iter().map(|answer| answer.payload).collect())
    }

    /// The number of the family, which the kernel gives when WireGuard is loaded.
    async fn family(&self) -> Result<u16, Error> {
        let name = GenlCtrlAttrs::FamilyName(FAMILY.to_owned());
        let request = GenlCtrl { cmd: GenlCtrlCmd::GetFamily, nlas: vec![name] };
        let request = GenlMessage::from_payload(request);
        let answers = exchange(&self.families, request, 0, "find WireGuard in the kernel").await?;
        let mut attributes = answers.into_iter().flat_map(|answer| answer.payload.nlas);
        let number = attributes.find_map(|attribute| match attribute {
            GenlCtrlAttrs::FamilyId(number) => Some(number),
            _ => None,
        });
        number.ok_or(Error::Answer(FAMILY))
    }
}

/// Sends a request and collects the answers.
async fn exchange<F>(
    handle: &ConnectionHandle<GenlMessage<F>>,
    message: GenlMessage<F>,
    flags: u16,
    what: &'static str,
) -> Result<Vec<GenlMessage<F>>, Error>
where
    F: std::fmt::Debug,
    GenlMessage<F>: NetlinkSerializable + NetlinkDeserializable,
{
    let mut packet = NetlinkMessage::from(message);
    packet.header.flags = NLM_F_REQUEST | flags;
    packet.finalize();
    let closed = |_closed| Error::Closed;
    let mut answers = handle.request(packet, Destination::new(0, 0)).map_err(closed)?;
    let mut all = Vec::new();
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => all.push(message),
            // An error without a code is an acknowledgement.
            NetlinkPayload::Error(error) if error.code.is_some() => {
                return Err(Error::WireGuard { what, source: io::Error::from(error) });
            }
            _ => {}
        }
    }
    Ok(all)
}

/// The request for a change.
fn message(change: &Change) -> WireguardMessage {
    let peer = match change {
        Change::Remove(key) => vec![
            WireguardPeerAttribute::PublicKey(*key.bytes()),
            WireguardPeerAttribute::Flags(WireguardPeerFlags::RemoveMe),
        ],
        Change::Set(Peer { key, endpoint, allowed, keepalive }) => {
            let endpoint = endpoint.map(WireguardPeerAttribute::Endpoint);
            let allowed = WireguardAllowedIp(vec![
                WireguardAllowedIpAttr::Family(WireguardAddressFamily::Ipv4),
                WireguardAllowedIpAttr::IpAddr(IpAddr::V4(allowed.network())),
                WireguardAllowedIpAttr::Cidr(allowed.length()),
            ]);
            let head = [
                WireguardPeerAttribute::PublicKey(*key.bytes()),
                WireguardPeerAttribute::Flags(WireguardPeerFlags::ReplaceAllowedIps),
                // Zero switches it off.
                WireguardPeerAttribute::PersistentKeepalive(keepalive.unwrap_or_default()),
            ];
            let ranges = WireguardPeerAttribute::AllowedIps(vec![allowed]);
            head.into_iter().chain(endpoint).chain([ranges]).collect()
        }
    };
    let name = WireguardAttribute::IfName(DEVICE.to_owned());
    let peers = WireguardAttribute::Peers(vec![WireguardPeer(peer)]);
    WireguardMessage { cmd: WireguardCmd::SetDevice, attributes: vec![name, peers] }
}

/// Adds what one part of an answer has. An answer about many peers comes in parts.
fn read(answer: WireguardMessage, device: &mut Device) {
    for attribute in answer.attributes {
        match attribute {
            WireguardAttribute::PublicKey(key) => device.key = PublicKey::new(key),
            WireguardAttribute::ListenPort(port) => device.port = port,
            WireguardAttribute::Peers(peers) => {
                device.peers.extend(peers.into_iter().filter_map(peer));
            }
            _ => {}
        }
    }
}

fn peer(peer: WireguardPeer) -> Option<(PublicKey, Present)> {
    let mut key = None;
    let mut present = Present::default();
    for attribute in peer.0 {
        match attribute {
            WireguardPeerAttribute::PublicKey(bytes) => key = PublicKey::new(bytes),
            WireguardPeerAttribute::Endpoint(endpoint) => present.endpoint = Some(endpoint),
            WireguardPeerAttribute::PersistentKeepalive(seconds) => {
                present.keepalive = (seconds != 0).then_some(seconds);
            }
            WireguardPeerAttribute::LastHandshake(time) => present.handshake = moment(time),
            WireguardPeerAttribute::AllowedIps(ranges) => {
                let [range] = ranges.as_slice() else { continue };
                present.allowed = prefix(range);
            }
            _ => {}
        }
    }
    Some((key?, present))
}

/// Zero means that there was none.
fn moment(time: WireguardTimeSpec) -> Option<SystemTime> {
    let seconds = u64::try_from(time.seconds).ok().filter(|seconds| *seconds != 0)?;
    let nanos = u32::try_from(time.nano_seconds).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))
}

fn prefix(range: &WireguardAllowedIp) -> Option<Prefix> {
    let mut network = None;
    let mut length = None;
    for attribute in &range.0 {
        match attribute {
            WireguardAllowedIpAttr::IpAddr(IpAddr::V4(address)) => network = Some(*address),
            WireguardAllowedIpAttr::Cidr(bits) => length = Some(*bits),
            _ => {}
        }
    }
    Prefix::new(network?, length?).ok()
}

#[cfg(test)]
#[path = "wireguard_tests.rs"]
mod tests;
