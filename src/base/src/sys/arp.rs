//! ARP on the links of the machine: announces which machine has an address, and receives the
//! claims of other machines to one.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with, sockopt};

/// The protocol number of ARP on Ethernet.
const ETH_P_ARP: u16 = 0x0806;
/// Ethernet, IPv4, and their address lengths.
const HEADER: [u8; 6] = [0, 1, 8, 0, 6, 4];
/// The operation, which follows: RFC 5227 announces by asking.
const REQUEST: [u8; 2] = [0, 1];
const REPLY: [u8; 2] = [0, 2];
/// A message without the padding of the frame.
const LENGTH: usize = 28;
/// To this machine, to all or to a group (`linux/if_packet.h`). The higher ones are for others, and
/// those of VLANs that the machine does not have.
const PACKET_MULTICAST: u8 = 2;
/// A few hundred messages; a segment full of them loses some.
const BACKLOG_MAX: usize = 128 << 10;

/// A machine of a link that calls an address its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The link's number.
    pub link: u32,
    /// The hardware address of the machine.
    pub mac: [u8; 6],
    /// The address.
    pub address: Ipv4Addr,
}

impl Claim {
    /// Reads a message. One without an address of its sender claims none: it is a probe.
    #[must_use]
    pub fn parse(link: u32, message: &[u8]) -> Option<Self> {
        let (header, rest) = message.split_first_chunk::<{ HEADER.len() }>()?;
        let (operation, rest) = rest.split_first_chunk::<2>()?;
        let (mac, rest) = rest.split_first_chunk::<6>()?;
        let (sender, target) = rest.split_first_chunk::<4>()?;
        let is_whole = *header == HEADER && target.len() >= 10;
        let address = Ipv4Addr::from(*sender);
        let is_claim = [REQUEST, REPLY].contains(operation) && !address.is_unspecified();
        (is_whole && is_claim).then_some(Self { link, mac: *mac, address })
    }
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A claim.
    Claim(Claim),
    /// A message that claims nothing, or is not for this machine.
    Other,
    /// No more messages for now.
    Nothing,
}

/// A socket that receives the messages on all links from now on.
///
/// It sends, too. The kernel waits for all processors when such a socket is closed, so it is not
/// opened for a message.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Opens the socket.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        // Never zero; the socket expects network byte order.
        let protocol = std::num::NonZeroU32::new(ETH_P_ARP.to_be().into());
        let protocol = Protocol::from_raw(protocol.ok_or(io::ErrorKind::InvalidInput)?);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, Some(protocol))?;
        sockopt::set_socket_recv_buffer_size(&socket, BACKLOG_MAX)?;
        Ok(Self(socket))
    }

    /// Broadcasts a gratuitous ARP on the link of that index.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or the link is down.
    pub fn announce(&self, link: u32, mac: [u8; 6], address: Ipv4Addr) -> io::Result<()> {
        self.send(link, &request(mac, address, address))
    }

    /// Asks on the link of that index which other machine has the address. This machine may have
    /// it by then.
    ///
    /// # Errors
    ///
    /// The same.
    pub fn probe(&self, link: u32, mac: [u8; 6], address: Ipv4Addr) -> io::Result<()> {
        // A machine answers no request that comes from its own address.
        self.send(link, &request(mac, Ipv4Addr::UNSPECIFIED, address))
    }

    fn send(&self, link: u32, message: &[u8; LENGTH]) -> io::Result<()> {
        let to = everyone(i32::try_from(link).map_err(io::Error::other)?);
        let length = u32::try_from(size_of_val(&to)).map_err(io::Error::other)?;
        // SAFETY: the descriptor is open for the whole call; the message and the address are live
        // for as many bytes as their lengths say, and the kernel only reads them.
        #[expect(unsafe_code, reason = "rustix has no address of a link")]
        let sent = unsafe {
            libc::sendto(
                self.0.as_raw_fd(),
                message.as_ptr().cast(),
                message.len(),
                0,
                (&raw const to).cast(),
                length,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next message. Never blocks.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_message(&self) -> io::Result<Received> {
        let (mut message, mut from) = ([0_u8; LENGTH], everyone(0));
        let mut length = u32::try_from(size_of_val(&from)).map_err(io::Error::other)?;
        // SAFETY: the descriptor is open for the whole call; the kernel writes at most as many
        // bytes of the message and of the address as their lengths say, and both are live.
        #[expect(unsafe_code, reason = "rustix has no address of a link")]
        let received = unsafe {
            libc::recvfrom(
                self.0.as_raw_fd(),
                message.as_mut_ptr().cast(),
                message.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        let Ok(received) = usize::try_from(received) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(Received::Nothing),
                io::ErrorKind::Interrupted => Ok(Received::Other),
                _ => Err(error),
            };
        };
        let link = u32::try_from(from.sll_ifindex).ok();
        let link = link.filter(|_| from.sll_pkttype <= PACKET_MULTICAST);
        let message = message.get(..received).unwrap_or_default();
        let claim = link.and_then(|link| Claim::parse(link, message));
        Ok(claim.map_or(Received::Other, Received::Claim))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// All machines of a link.
fn everyone(link: i32) -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: AddressFamily::PACKET.as_raw(),
        sll_protocol: ETH_P_ARP.to_be(),
        sll_ifindex: link,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0],
    }
}

/// A question for the hardware address of `target`.
fn request(mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> [u8; LENGTH] {
    let mut message = [0; LENGTH];
    message[..6].copy_from_slice(&HEADER);
    message[6..8].copy_from_slice(&REQUEST);
    message[8..14].copy_from_slice(&mac);
    message[14..18].copy_from_slice(&sender.octets());
    message[24..].copy_from_slice(&target.octets());
    message
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

    pub(in super::super) fn announcement() -> [u8; LENGTH] {
        request(MAC, ADDRESS, ADDRESS)
    }

    #[test]
    fn an_announcement_asks_for_its_own_address() {
        let message = announcement();
        assert_eq!(message[..8], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(message[8..18], [2, 0, 0, 0, 0, 1, 10, 0, 2, 15]);
        assert_eq!(message[18..], [0, 0, 0, 0, 0, 0, 10, 0, 2, 15]);
    }

    #[test]
    fn requests_and_replies_claim_the_address_of_their_sender_and_probes_none() {
        let claim = Some(Claim { link: 7, mac: MAC, address: ADDRESS });
        let mut message = announcement();
        assert_eq!(Claim::parse(7, &message), claim);
        assert_eq!(Claim::parse(7, &[&message[..], &[0; 18]].concat()), claim, "a padded frame");
        message[7] = 2;
        assert_eq!(Claim::parse(7, &message), claim, "a reply");
        assert_eq!(Claim::parse(7, &request(MAC, Ipv4Addr::UNSPECIFIED, ADDRESS)), None, "a probe");
        for at in 0..8 {
            let mut other = announcement();
            other[at] ^= 8;
            assert_eq!(Claim::parse(7, &other), None, "byte {at}");
        }
        assert_eq!(Claim::parse(7, &announcement()[..LENGTH - 1]), None, "cut off");
    }
}
