//! An early DHCP request, which fixes a machine's address before the machine boots.
//!
//! The gateway gives addresses in the order of the requests, and the same one to the
//! same hardware address for as long as it runs. If the requests come once in the order
//! of the ports, a machine's address follows from its port: ports can be forwarded
//! before the first boot, and a cluster that is kept finds its addresses again behind a
//! new gateway.
//!
//! What this module does not do: keep the lease. It asks for an offer, which
//! suffices for the gateway's table.

use std::io;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::frame::{read, write_frame};

/// Between two requests: the gateway may still be starting.
const RETRY: Duration = Duration::from_millis(200);

/// How long a gateway may take to its first offer.
const OFFER_MAX: Duration = Duration::from_secs(60);

/// Where things are in an Ethernet frame with an IPv4 header without options.
const IP: usize = 14;
const UDP: usize = IP + 20;
const BOOTP: usize = UDP + 8;
const COOKIE: usize = BOOTP + 236;

/// The first bytes of the options, after which the message is one of DHCP.
const MAGIC: [u8; 4] = [99, 130, 83, 99];

/// Plugs in at `socket` as the machine with the hardware address `mac`, and asks.
pub(crate) fn offered(socket: &Path, mac: [u8; 6]) -> io::Result<Ipv4Addr> {
    let mut line = UnixStream::connect(socket)?;
    line.set_read_timeout(Some(RETRY))?;
    let mut deadline = Deadline::within(OFFER_MAX);
    let request = discover(mac);
    while !deadline.is_over() {
        write_frame(&mut line, &request)?;
        loop {
            match read(&mut line) {
                Ok(frame) => {
                    if let Some(address) = offer(&frame, mac) {
                        return Ok(address);
                    }
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "the gateway offers no address"))
}

/// A broadcast that asks for an offer.
fn discover(mac: [u8; 6]) -> Vec<u8> {
    let mut bootp = vec![0; 236];
    // A request over Ethernet.
    bootp[..4].copy_from_slice(&[1, 1, 6, 0]);
    bootp[28..34].copy_from_slice(&mac);
    bootp.extend(MAGIC);
    // The kind of message: discover. Then the end of the options.
    bootp.extend([53, 1, 1, 255]);
    let length = |bytes: usize| u16::try_from(bytes).unwrap_or_default().to_be_bytes();

    let mut udp = vec![0, 68, 0, 67];
    udp.extend(length(8 + bootp.len()));
    // No checksum: IPv4 allows that.
    udp.extend([0, 0]);
    udp.extend(bootp);

    let mut ip = vec![0x45, 0];
    ip.extend(length(20 + udp.len()));
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(Ipv4Addr::UNSPECIFIED.octets());
    ip.extend(Ipv4Addr::BROADCAST.octets());
    let sum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);

    [&[0xff; 6][..], &mac, &[8, 0], &ip, &udp].concat()
}

/// The Internet checksum of a header whose own checksum is zero.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded & 0xffff).unwrap_or_default()
}

/// The address in an answer to the machine with this hardware address.
fn offer(frame: &[u8], mac: [u8; 6]) -> Option<Ipv4Addr> {
    let answer = frame.get(BOOTP).is_some_and(|operation| *operation == 2);
    let ipv4 = frame.get(12..14)? == [8, 0] && *frame.get(IP)? == 0x45;
    let ports = frame.get(UDP..UDP + 4)? == [0, 67, 0, 68];
    let cookie = frame.get(COOKIE..COOKIE + 4)? == MAGIC;
    let ours = frame.get(BOOTP + 28..BOOTP + 34)? == mac;
    let address: [u8; 4] = frame.get(BOOTP + 16..BOOTP + 20)?.try_into().ok()?;
    (answer && ipv4 && ports && cookie && ours).then(|| address.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0x70, 0x6f, 1];

    /// A gateway's answer to a request.
    fn answered(address: Ipv4Addr) -> Vec<u8> {
        let mut frame = discover(MAC);
        frame[UDP..UDP + 4].copy_from_slice(&[0, 67, 0, 68]);
        frame[BOOTP] = 2;
        frame[BOOTP + 16..BOOTP + 20].copy_from_slice(&address.octets());
        frame
    }

    #[test]
    fn an_offer_is_read_and_only_by_whom_it_is_for() {
        let address = Ipv4Addr::new(10, 0, 2, 17);
        assert_eq!(offer(&answered(address), MAC), Some(address));
        assert_eq!(offer(&answered(address), [0; 6]), None);
        assert_eq!(offer(&discover(MAC), MAC), None);
    }

    #[test]
    fn the_header_of_a_request_sums_up() {
        // With its own checksum in it, a good header sums up to zero.
        assert_eq!(checksum(&discover(MAC)[IP..UDP]), 0);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_offer(input in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(offer(&input, MAC), None);
        }

        #[test]
        fn a_truncated_offer_is_rejected(length in 0_usize..282) {
            let frame = answered(Ipv4Addr::new(10, 0, 2, 17));
            prop_assert_eq!(offer(&frame[..length.min(frame.len())], MAC), None);
        }
    }
}
