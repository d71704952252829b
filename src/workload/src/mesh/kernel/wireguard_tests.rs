//! The bytes of requests, and answers as the kernel gives them.

use std::net::SocketAddr;

use netlink_packet_core::Emitable as _;

use super::*;

fn key(number: u8) -> PublicKey {
    PublicKey::new([number; 32]).unwrap()
}

/// The payload of a request after the header of the family, eight bytes a line.
fn bytes(change: &Change) -> String {
    let message = message(change);
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    let lines: Vec<_> = bytes.chunks(8).map(polis_base::hex::encode).collect();
    lines.join("\n")
}

#[test]
fn a_peer_is_set_without_touching_the_others() {
    let peer = Peer {
        key: key(0xaa),
        endpoint: Some("10.0.2.7:7838".parse().unwrap()),
        allowed: "10.192.3.0/24".parse().unwrap(),
        keepalive: None,
    };
    // Attribute 5 of the device, which would replace all peers, is not in it.
    insta::assert_snapshot!(bytes(&Change::Set(peer)));
}

#[test]
fn a_peer_is_removed_by_its_key() {
    insta::assert_snapshot!(bytes(&Change::Remove(key(0xaa))));
}

fn range(text: &str, bits: u8) -> WireguardAllowedIp {
    WireguardAllowedIp(vec![
        WireguardAllowedIpAttr::Cidr(bits),
        WireguardAllowedIpAttr::IpAddr(text.parse().unwrap()),
    ])
}

fn answer(number: u8, rest: Vec<WireguardPeerAttribute>) -> WireguardMessage {
    let name = WireguardPeerAttribute::PublicKey([number; 32]);
    let peer = WireguardPeer([vec![name], rest].concat());
    let attributes = vec![
        WireguardAttribute::PrivateKey([9; 32]),
        WireguardAttribute::PublicKey([1; 32]),
        WireguardAttribute::ListenPort(7838),
        WireguardAttribute::Peers(vec![peer]),
    ];
    WireguardMessage { cmd: WireguardCmd::GetDevice, attributes }
}

#[test]
fn an_answer_in_parts_is_one_device() {
    use WireguardPeerAttribute::{AllowedIps, Endpoint, LastHandshake, PersistentKeepalive};
    let at: SocketAddr = "[2001:db8::7]:7838".parse().unwrap();
    let time = WireguardTimeSpec { seconds: 5, nano_seconds: 7 };
    let known = vec![
        Endpoint(at),
        PersistentKeepalive(25),
        LastHandshake(time),
        AllowedIps(vec![range("10.192.3.0", 24)]),
    ];
    let silent = vec![
        PersistentKeepalive(0),
        LastHandshake(WireguardTimeSpec::default()),
        AllowedIps(vec![range("10.192.4.0", 24), range("2001:db8::", 64)]),
    ];
    let mut device = Device::default();
    read(answer(2, known), &mut device);
    read(answer(3, silent), &mut device);
    assert_eq!((device.key, device.port), (Some(key(1)), 7838));
    let expected = Present {
        endpoint: Some(at),
        allowed: "10.192.3.0/24".parse().ok(),
        keepalive: Some(25),
        handshake: Some(SystemTime::UNIX_EPOCH + Duration::new(5, 7)),
    };
    assert_eq!(device.peers, [(key(2), expected), (key(3), Present::default())].into());
}

#[test]
fn a_device_and_a_peer_without_a_key_have_none() {
    let mut device = Device { key: Some(key(1)), ..Device::default() };
    let attributes = vec![WireguardAttribute::PublicKey([0; 32])];
    read(WireguardMessage { cmd: WireguardCmd::GetDevice, attributes }, &mut device);
    assert_eq!(device.key, None);
    assert_eq!(peer(WireguardPeer(Vec::new())), None);
}
