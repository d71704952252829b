//! A segment with IPv6 only: its router, and the translation for the gateway, which forwards the
//! host's ports by IPv4 alone.
//!
//! ```text
//! machine --router solicitation----> router advertisement: a prefix, and a way out
//! machine --neighbour solicitation-> neighbour advertisement, for the router's addresses
//! machine --TCP over IPv6----------> the same over IPv4 --> gateway   (RFC 7915, one address
//! machine <----------TCP over IPv6-- the same over IPv4 <-- gateway    for one address)
//! machine --ARP, IPv4--------------> lost
//! ```
//!
//! A machine makes its address of the prefix and its hardware address (EUI-64), so the address
//! follows from its port. The router only answers: what it advertises outlasts every story.
//!
//! What this module does not do: translate anything but TCP, or name servers of names.

use std::net::{Ipv4Addr, Ipv6Addr};

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};

/// The first half of all addresses.
const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 0);
/// The router, on the link and in the network.
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
const GATEWAY: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 2);
/// The gateway, as the gateway knows itself.
const GATEWAY_4: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The hardware address of the router: that of the gateway.
const HARDWARE: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];

/// All nodes of a link (RFC 4291).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_HARDWARE: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// Types of ICMPv6 (RFC 4861).
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Discovery messages count only with this hop limit: no router has passed them on.
const ON_LINK: u8 = 255;
/// Any other packet's.
const HOPS: u8 = 64;
/// How long the router is one, in seconds: the most that there is.
const LIFETIME: u16 = 9000;

/// The addresses of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    /// As the gateway knows it.
    pub(crate) four: Ipv4Addr,
    /// Its card.
    pub(crate) hardware: [u8; 6],
}

impl Machine {
    /// The address that the machine has: the prefix and its EUI-64.
    pub(crate) fn six(&self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.hardware;
        let suffix = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        Ipv6Addr::from_bits(PREFIX.to_bits() | u128::from(suffix))
    }
}

/// The fate of a frame of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The switch delivers it.
    Pass,
    /// The router answers the whole segment or one machine with this.
    Answer(Vec<u8>),
    /// The gateway gets this.
    Gateway(Vec<u8>),
    /// It is lost.
    Lost,
}

/// The router of a segment.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    pub(crate) machines: Vec<Machine>,
}

impl Router {
    /// The fate of a frame that a machine sent.
    pub(crate) fn sent(&self, frame: &[u8]) -> Outcome {
        let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return Outcome::Lost };
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { return Outcome::Lost };
        let from = ip.header().source_addr();
        let outcome = match &packet.transport {
            Some(TransportSlice::Icmpv6(message)) => match message.type_u8() {
                ROUTER_SOLICITATION => advertisement(),
                NEIGHBOUR_SOLICITATION => {
                    let target = message.payload().first_chunk::<16>().copied();
                    let target = target.map(Ipv6Addr::from);
                    let asker = frame.get(6..12).and_then(|it| <[u8; 6]>::try_from(it).ok());
                    target.zip(asker).and_then(|(target, asker)| neighbour(target, from, asker))
                }
                _ => None,
            }
            .map(Outcome::Answer),
            Some(TransportSlice::Tcp(tcp)) if ip.header().destination_addr() == GATEWAY => {
                let machine = self.machines.iter().find(|machine| machine.six() == from);
                let packet = machine.and_then(|machine| {
                    let packet = PacketBuilder::ethernet2(machine.hardware, HARDWARE)
                        .ipv4(machine.four.octets(), GATEWAY_4.octets(), HOPS)
                        .tcp_header(tcp.to_header());
                    let mut frame = Vec::with_capacity(packet.size(tcp.payload().len()));
                    packet.write(&mut frame, tcp.payload()).ok().map(|()| frame)
                });
                Some(packet.map_or(Outcome::Lost, Outcome::Gateway))
            }
            _ => None,
        };
        outcome.unwrap_or(Outcome::Pass)
    }

    /// A frame of the gateway as the machine gets it, if it is one for a machine.
    pub(crate) fn forwarded(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(NetSlice::Ipv4(ip)) = &packet.net else { return None };
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { return None };
        let to = ip.header().destination_addr();
        let machine = self.machines.iter().find(|machine| machine.four == to)?;
        let packet = PacketBuilder::ethernet2(HARDWARE, machine.hardware)
            .ipv6(GATEWAY.octets(), machine.six().octets(), HOPS)
            .tcp_header(tcp.to_header());
        let mut frame = Vec::with_capacity(packet.size(tcp.payload().len()));
        packet.write(&mut frame, tcp.payload()).ok()?;
        Some(frame)
    }
}

/// The router, its prefix, and that addresses are made of it (RFC 4861, 4.2 and 4.6).
fn advertisement() -> Option<Vec<u8>> {
    let [high, low] = LIFETIME.to_be_bytes();
    let mut body = vec![0; 8];
    // The sender's hardware address.
    body.extend([1, 1]);
    body.extend(HARDWARE);
    // The prefix, of 64 bits, on the link and for addresses; valid and preferred for ever.
    body.extend([3, 4, 64, 0xc0]);
    body.extend([0xff; 8]);
    body.extend([0; 4]);
    body.extend(PREFIX.octets());
    let to = (ALL_NODES, ALL_NODES_HARDWARE);
    message(ROUTER, to, (ROUTER_ADVERTISEMENT, [HOPS, 0, high, low]), &body)
}

/// The answer to the question for an address, if the router has it (RFC 4861, 4.4).
fn neighbour(target: Ipv6Addr, asker: Ipv6Addr, hardware: [u8; 6]) -> Option<Vec<u8>> {
    let ours = [ROUTER, GATEWAY].contains(&target) && !asker.is_unspecified();
    let mut body = target.octets().to_vec();
    body.extend([2, 1]);
    body.extend(HARDWARE);
    // A router, asked, and its word replaces what the asker knew.
    let flags = [0xe0, 0, 0, 0];
    let answer = || message(target, (asker, hardware), (NEIGHBOUR_ADVERTISEMENT, flags), &body);
    ours.then(answer).flatten()
}

/// A message of ICMPv6 with its checksum.
fn message(
    from: Ipv6Addr,
    (to, hardware): (Ipv6Addr, [u8; 6]),
    (kind, head): (u8, [u8; 4]),
    body: &[u8],
) -> Option<Vec<u8>> {
    let packet = PacketBuilder::ethernet2(HARDWARE, hardware)
        .ipv6(from.octets(), to.octets(), ON_LINK)
        .icmpv6_raw(kind, 0, head);
    let mut frame = Vec::with_capacity(packet.size(body.len()));
    packet.write(&mut frame, body).ok()?;
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MACHINE: Machine =
        Machine { four: Ipv4Addr::new(10, 0, 2, 16), hardware: [0x52, 0x54, 0, 0x70, 0x6f, 1] };

    fn router() -> Router {
        Router { machines: vec![MACHINE] }
    }

    fn solicitation(kind: u8, from: Ipv6Addr, body: &[u8]) -> Vec<u8> {
        let packet = PacketBuilder::ethernet2(MACHINE.hardware, [0x33, 0x33, 0, 0, 0, 2])
            .ipv6(from.octets(), ALL_NODES.octets(), ON_LINK)
            .icmpv6_raw(kind, 0, [0; 4]);
        let mut frame = Vec::new();
        packet.write(&mut frame, body).unwrap();
        frame
    }

    /// The type of a message whose checksum is right, and its end.
    fn checked(frame: &[u8]) -> (u8, [u8; 6]) {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { panic!("not IPv6") };
        let Some(TransportSlice::Icmpv6(message)) = &packet.transport else { panic!("no message") };
        let (from, to) = (ip.header().source(), ip.header().destination());
        assert!(message.is_checksum_valid(from, to));
        assert_eq!(ip.header().hop_limit(), ON_LINK);
        (message.type_u8(), frame[..6].try_into().unwrap())
    }

    #[test]
    fn a_machine_learns_the_prefix_and_the_hardware_address_of_the_router() {
        assert_eq!(MACHINE.six().to_string(), "2001:db8:0:2:5054:ff:fe70:6f01");
        let asked = router().sent(&solicitation(ROUTER_SOLICITATION, ROUTER, &[]));
        let Outcome::Answer(answer) = asked else { panic!("{asked:?}") };
        assert_eq!(checked(&answer), (ROUTER_ADVERTISEMENT, ALL_NODES_HARDWARE));
        assert!(answer.ends_with(&PREFIX.octets()));
        let asks = |target: Ipv6Addr, from| {
            router().sent(&solicitation(NEIGHBOUR_SOLICITATION, from, &target.octets()))
        };
        let asked = asks(GATEWAY, MACHINE.six());
        let Outcome::Answer(answer) = asked else { panic!("{asked:?}") };
        assert_eq!(checked(&answer), (NEIGHBOUR_ADVERTISEMENT, MACHINE.hardware));
        assert!(answer.ends_with(&HARDWARE));
        assert_eq!(asks(MACHINE.six(), ROUTER), Outcome::Pass, "another machine's");
        assert_eq!(asks(GATEWAY, Ipv6Addr::UNSPECIFIED), Outcome::Pass, "a machine's own check");
    }

    #[test]
    fn connections_are_translated_both_ways_and_ipv4_of_machines_is_lost() {
        let payload = b"hello";
        let mut inward = Vec::new();
        PacketBuilder::ethernet2(HARDWARE, MACHINE.hardware)
            .ipv4(GATEWAY_4.octets(), MACHINE.four.octets(), HOPS)
            .tcp(1234, 7835, 5, 1000)
            .write(&mut inward, payload)
            .unwrap();
        assert_eq!(router().sent(&inward), Outcome::Lost);
        let six = router().forwarded(&inward).unwrap();
        let packet = SlicedPacket::from_ethernet(&six).unwrap();
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { panic!("not IPv6") };
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { panic!("not TCP") };
        assert_eq!(
            (ip.header().source_addr(), ip.header().destination_addr()),
            (GATEWAY, MACHINE.six())
        );
        let sum = tcp.to_header().calc_checksum_ipv6(&ip.header().to_header(), payload).unwrap();
        assert_eq!((tcp.checksum(), tcp.payload()), (sum, &payload[..]));

        let mut outward = Vec::new();
        PacketBuilder::ethernet2(MACHINE.hardware, HARDWARE)
            .ipv6(MACHINE.six().octets(), GATEWAY.octets(), HOPS)
            .tcp(7835, 1234, 9, 1000)
            .write(&mut outward, payload)
            .unwrap();
        let Outcome::Gateway(four) = router().sent(&outward) else { panic!("lost") };
        let packet = SlicedPacket::from_ethernet(&four).unwrap();
        let Some(NetSlice::Ipv4(ip)) = &packet.net else { panic!("not IPv4") };
        assert_eq!(
            (ip.header().source_addr(), ip.header().destination_addr()),
            (MACHINE.four, GATEWAY_4)
        );
    }

    proptest! {
        #[test]
        fn arbitrary_frames_do_no_harm(frame in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _outcome = router().sent(&frame);
            let _forwarded = router().forwarded(&frame);
        }
    }
}
