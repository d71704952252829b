//! DHCP servers on a wire, each as little as a test needs.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::net::UdpSocket;
use tokio::time::Instant;

use super::{LEASED, SERVER};

/// A socket of a server on this wire; several share the port.
fn server(wire: &str) -> UdpSocket {
    let (family, flags) = (AddressFamily::INET, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC);
    let socket = net::socket_with(family, SocketType::DGRAM, flags, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    sockopt::set_socket_broadcast(&socket, true).unwrap();
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 67)).unwrap();
    let socket = UdpSocket::from_std(socket.into()).unwrap();
    socket.bind_device(Some(wire.as_bytes())).unwrap();
    socket
}

/// The server of most tests, on `wire`.
pub(super) async fn serve(lifetime: u32) {
    serve_on("wire", LEASED, Some(SERVER), lifetime).await;
}

/// The least that a DHCP server can be: one address for everyone, with a way out or without.
pub(super) async fn serve_on(
    wire: &str,
    leased: Ipv4Addr,
    way_out: Option<Ipv4Addr>,
    lifetime: u32,
) {
    let socket = server(wire);
    let mut options: Vec<u8> = Vec::new();
    if let Some(way_out) = way_out {
        options.extend([3, 4]);
        options.extend(way_out.octets());
    }
    options.extend([51, 4]);
    options.extend(lifetime.to_be_bytes());
    let mut asked = [0; 1500];
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        let answer = if kind == DISCOVER { OFFER } else { ACK };
        let reply = reply(&asked, answer, leased, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

/// A server that gives `first`, is asked to renew it after a second and to rebind it after two,
/// and takes it back then: it has `second` instead.
pub(super) async fn serve_and_take_back(first: Ipv4Addr, second: Ipv4Addr) {
    let socket = server("wire");
    // The lease lasts an hour.
    let options = [51, 4, 0, 0, 14, 16, 58, 4, 0, 0, 0, 1, 59, 4, 0, 0, 0, 2];
    let mut leased = first;
    let mut asked = [0; 1500];
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        // A client that has an address names it.
        let answer = if asked[12..16] == [0; 4] {
            if kind == DISCOVER { OFFER } else { ACK }
        } else {
            leased = second;
            NAK
        };
        let reply = reply(&asked, answer, leased, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

/// A server that wants its lease renewed after a second; returns after what time it was asked.
pub(super) async fn serve_without_patience() -> Duration {
    let socket = server("wire");
    // The lease lasts an hour; it is to be renewed after one second, and rebound after two.
    let options = [51, 4, 0, 0, 14, 16, 58, 4, 0, 0, 0, 1, 59, 4, 0, 0, 0, 2];
    let (mut asked, mut leased) = ([0; 1500], None);
    loop {
        let length = socket.recv(&mut asked).await.unwrap();
        let Some(kind) = kind(&asked[..length]) else { continue };
        // A client that has an address names it.
        if let Some(since) = leased
            && asked[12..16] != [0; 4]
        {
            return Instant::elapsed(&since);
        }
        let answer = if kind == DISCOVER { OFFER } else { ACK };
        if answer == ACK {
            leased = Some(Instant::now());
        }
        let reply = reply(&asked, answer, LEASED, &options);
        socket.send_to(&reply, (Ipv4Addr::BROADCAST, 68)).await.unwrap();
    }
}

const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const ACK: u8 = 5;
const NAK: u8 = 6;

/// The kind of a message of a DHCP client.
fn kind(asked: &[u8]) -> Option<u8> {
    asked[240..].windows(3).find(|option| option[..2] == [53, 1]).map(|option| option[2])
}

/// An answer of this kind to the question, for this address.
fn reply(asked: &[u8], kind: u8, leased: Ipv4Addr, options: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; 240];
    reply[..4].copy_from_slice(&[2, 1, 6, 0]);
    reply[4..8].copy_from_slice(&asked[4..8]);
    reply[16..20].copy_from_slice(&leased.octets());
    reply[28..44].copy_from_slice(&asked[28..44]);
    reply[236..].copy_from_slice(&asked[236..240]);
    reply.extend([53, 1, kind, 1, 4, 255, 255, 255, 0]);
    for option in [54, 6] {
        reply.extend([option, 4]);
        reply.extend(SERVER.octets());
    }
    reply.extend(options);
    reply.push(255);
    reply
}
