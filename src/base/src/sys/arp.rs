//! Gratuitous ARP: announces to a link which machine has an address.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};

/// The protocol number of ARP on Ethernet.
const ETH_P_ARP: u16 = 0x0806;
/// Ethernet, IPv4, their address lengths, and "request": RFC 5227 announces by asking.
const HEADER: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];

/// The announcement: sender and target are the same address.
fn packet(mac: [u8; 6], address: Ipv4Addr) -> [u8; 28] {
    let mut packet = [0; 28];
    packet[..8].copy_from_slice(&HEADER);
    packet[8..14].copy_from_slice(&mac);
    packet[14..18].copy_from_slice(&address.octets());
    packet[24..].copy_from_slice(&address.octets());
    packet
}

/// Broadcasts a gratuitous ARP on the link of that index.
///
/// # Errors
///
/// When the kernel refuses, or the link is down.
pub fn announce(link: u32, mac: [u8; 6], address: Ipv4Addr) -> io::Result<()> {
    let protocol = Protocol::from_raw(
        // Never zero; the socket expects network byte order.
        std::num::NonZeroU32::new(ETH_P_ARP.to_be().into()).ok_or(io::ErrorKind::InvalidInput)?,
    );
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, Some(protocol))?;
    let to = libc::sockaddr_ll {
        sll_family: AddressFamily::PACKET.as_raw(),
        sll_protocol: ETH_P_ARP.to_be(),
        sll_ifindex: i32::try_from(link).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0],
    };
    let packet = packet(mac, address);
    let length = u32::try_from(size_of_val(&to)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open for the whole call; the packet and the address are live
    // for as many bytes as their lengths say, and the kernel only reads them.
    #[expect(unsafe_code, reason = "rustix has no address of a link")]
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            0,
            (&raw const to).cast(),
            length,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_asks_for_its_own_address() {
        let packet = packet([2, 0, 0, 0, 0, 1], Ipv4Addr::new(10, 0, 2, 15));
        assert_eq!(packet[8..18], [2, 0, 0, 0, 0, 1, 10, 0, 2, 15]);
        assert_eq!(packet[18..], [0, 0, 0, 0, 0, 0, 10, 0, 2, 15]);
    }
}
