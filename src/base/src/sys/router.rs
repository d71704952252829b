//! The name servers in router advertisements of IPv6, as the kernel announces them, and the
//! solicitation of routers.
//!
//! The kernel makes addresses and routes of an advertisement itself, and announces the options
//! that it does not use: `RTM_NEWNDUSEROPT` (`linux/rtnetlink.h`), a message for each. Of these,
//! this module reads name servers (RDNSS, RFC 8106, 5.1). The kernel has checked before that the
//! sender is a neighbour, by the hop limit and the address, and the length.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType, sockopt};

use super::netlink::{self, Socket};

/// The group of these announcements, `RTNLGRP_ND_USEROPT`, as a bit.
const GROUP: u32 = 1 << (20 - 1);
/// `RTM_NEWNDUSEROPT`.
const OPTION: u16 = 68;
/// `struct nlmsghdr`, and `struct nduseroptmsg` behind it.
const HEADER: usize = 16;
const MESSAGE: usize = 16;
/// `ROUTER_SOLICITATION` and `ROUTER_ADVERTISEMENT` of ICMPv6 (RFC 4861).
const SOLICITATION: u8 = 133;
const ADVERTISEMENT: u8 = 134;
/// The option of name servers, and the lifetime that has no end.
const NAME_SERVERS: u8 = 25;
const FOREVER: u32 = u32::MAX;
/// An option has at most 255 times eight bytes.
const DATAGRAM_MAX: usize = 4096;
/// Many more than an advertisement has options; a segment full of them loses some.
const BACKLOG_MAX: usize = 128 << 10;

/// Name servers that a router advertises on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameServers {
    /// The link's number.
    pub link: u32,
    /// The servers, best first; at least one.
    pub servers: Vec<Ipv6Addr>,
    /// How long they may be used from now on. Zero: not any longer; `None`: without an end.
    pub lifetime: Option<Duration>,
}

impl NameServers {
    /// Reads a datagram of the kernel. Other announcements in it are left out, as is an option
    /// that is cut off.
    #[must_use]
    pub fn parse(datagram: &[u8]) -> Vec<Self> {
        let mut found = Vec::new();
        let mut rest = datagram;
        while let Some(length) = rest.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes)) {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let Some(message) = rest.get(..length).filter(|_| length >= HEADER) else { break };
            found.extend(announced(message));
            // Messages begin at multiples of four bytes.
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        found
    }
}

/// The name servers in one announcement.
fn announced(message: &[u8]) -> Vec<NameServers> {
    let number = |at: usize| message.get(at..).and_then(|bytes| bytes.first_chunk());
    let is_option = number(4).map(|kind| u16::from_ne_bytes(*kind)) == Some(OPTION);
    let Some(body) = message.get(HEADER..).filter(|_| is_option) else { return Vec::new() };
    let Some((head, options)) = body.split_first_chunk::<MESSAGE>() else { return Vec::new() };
    let [family, _, a, b, link @ .., kind, _, _, _, _, _, _, _] = *head;
    let length = usize::from(u16::from_ne_bytes([a, b]));
    let is_advertised = u16::from(family) == AddressFamily::INET6.as_raw() && kind == ADVERTISEMENT;
    let options = options.get(..length).filter(|_| is_advertised);
    let link = u32::from_ne_bytes(link);
    let mut rest = options.unwrap_or_default();
    let mut found = Vec::new();
    while let Some(&[kind, eights]) = rest.first_chunk() {
        let length = usize::from(eights) * 8;
        let Some((option, after)) = rest.split_at_checked(length).filter(|_| length > 0) else {
            break;
        };
        found.extend(name_servers(link, option).filter(|_| kind == NAME_SERVERS));
        rest = after;
    }
    found
}

/// Reads the option: type, length, two reserved bytes, lifetime, addresses.
fn name_servers(link: u32, option: &[u8]) -> Option<NameServers> {
    let (_, option) = option.split_first_chunk::<4>()?;
    let (lifetime, addresses) = option.split_first_chunk()?;
    let lifetime = u32::from_be_bytes(*lifetime);
    let lifetime = (lifetime != FOREVER).then(|| Duration::from_secs(lifetime.into()));
    let (addresses, rest) = addresses.as_chunks::<16>();
    let servers: Vec<_> = addresses.iter().map(|octets| Ipv6Addr::from(*octets)).collect();
    let is_whole = !servers.is_empty() && rest.is_empty();
    is_whole.then_some(NameServers { link, servers, lifetime })
}

/// The result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// Name servers that routers advertise; empty where the announcement is about something else.
    Advertised(Vec<NameServers>),
    /// Announcements were lost. Routers repeat theirs.
    Lost,
    /// No more announcements for now.
    Nothing,
}

/// A socket that receives every announcement from now on.
#[derive(Debug)]
pub struct Listener(Socket);

impl Listener {
    /// Opens the socket. Links that come up after this are not missed.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        Socket::open(None, GROUP, BACKLOG_MAX).map(Self)
    }

    /// The next announcement. Never blocks.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_announcement(&self) -> io::Result<Received> {
        let mut buffer = [0; DATAGRAM_MAX];
        Ok(match self.0.next_datagram(&mut buffer)? {
            netlink::Received::Datagram(bytes) => Received::Advertised(NameServers::parse(bytes)),
            netlink::Received::Lost => Received::Lost,
            netlink::Received::Nothing => Received::Nothing,
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Asks the routers of a link for an advertisement (RFC 4861, 4.1). The kernel solicits by itself
/// when a link comes up, and not later.
///
/// # Errors
///
/// The kernel's, for example while the link has no address yet.
pub fn solicit(link: u32) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, icmp) = (AddressFamily::INET6, Some(net::ipproto::ICMPV6));
    let socket = net::socket_with(family, SocketType::RAW, flags, icmp)?;
    // Any other hop limit is a packet from elsewhere.
    sockopt::set_ipv6_multicast_hops(&socket, 255)?;
    let routers = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
    let to = SocketAddrV6::new(routers, 0, 0, link);
    // The kernel fills in the checksum.
    net::sendto(&socket, &[SOLICITATION, 0, 0, 0, 0, 0, 0, 0], SendFlags::empty(), &to)?;
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SERVER: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x53);

    fn option(lifetime: u32, servers: &[Ipv6Addr]) -> Vec<u8> {
        let eights = u8::try_from(servers.len() * 2 + 1).unwrap();
        let mut option = vec![NAME_SERVERS, eights, 0, 0];
        option.extend(lifetime.to_be_bytes());
        option.extend(servers.iter().flat_map(|server| server.octets()));
        option
    }

    /// As the kernel writes it, with the address of the router behind the options.
    pub(in super::super) fn announcement(options: &[u8]) -> Vec<u8> {
        let source = [20, 0, 1, 0].into_iter().chain([0xfe; 16]);
        let mut message = vec![0; 4];
        message.extend(OPTION.to_ne_bytes());
        message.extend([0; 10]);
        message.extend([10, 0]);
        message.extend(u16::try_from(options.len()).unwrap().to_ne_bytes());
        message.extend(7_u32.to_ne_bytes());
        message.extend([ADVERTISEMENT, 0, 0, 0, 0, 0, 0, 0]);
        message.extend(options);
        message.extend(source);
        let length = u32::try_from(message.len()).unwrap();
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message
    }

    pub(in super::super) fn sample() -> Vec<u8> {
        announcement(&option(600, &[SERVER, Ipv6Addr::LOCALHOST]))
    }

    #[test]
    fn servers_and_lifetimes_read_as_the_router_wrote_them() {
        let servers = vec![SERVER, Ipv6Addr::LOCALHOST];
        let lifetime = Some(Duration::from_secs(600));
        assert_eq!(NameServers::parse(&sample()), [NameServers { link: 7, servers, lifetime }]);
        let [ended, forever] = [0, FOREVER].map(|lifetime| {
            NameServers::parse(&announcement(&option(lifetime, &[SERVER])))[0].lifetime
        });
        assert_eq!((ended, forever), (Some(Duration::ZERO), None));
    }

    #[test]
    fn several_messages_and_other_options_are_read_past() {
        // A list of domains, of eight bytes.
        let other = [31, 1, 0, 0, 0, 0, 0, 1];
        let both = announcement(&[&other[..], &option(60, &[SERVER])].concat());
        let mut address = sample();
        address[4] = 20;
        let all = [&address[..], &both, &sample()].concat();
        let lengths: Vec<_> =
            NameServers::parse(&all).iter().map(|found| found.servers.len()).collect();
        assert_eq!(lengths, [1, 2]);
    }

    #[test]
    fn an_option_without_a_server_or_with_half_of_one_is_left_out() {
        let half = [&option(60, &[])[..], &[9; 8]].concat();
        let mut half_of_one = half;
        half_of_one[1] = 2;
        for options in [option(60, &[]), half_of_one, vec![NAME_SERVERS, 0], vec![NAME_SERVERS, 9]]
        {
            assert_eq!(NameServers::parse(&announcement(&options)), []);
        }
    }
}
