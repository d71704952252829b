//! A segment with IPv6 only: its router, and the translation for the gateway, which forwards the
//! host's ports by IPv4 alone.
//!
//! ```text
//! machine --router solicitation----> router advertisement: a prefix, a way out, a name server
//! machine --neighbour solicitation-> neighbour advertisement, for the router's addresses
//! machine --TCP over IPv6----------> the same over IPv4 --> gateway   (RFC 7915, one address
//! machine <----------TCP over IPv6-- the same over IPv4 <-- gateway    for one address)
//! machine --ARP, IPv4--------------> lost
//! machine --DHCPv6-----------------> name servers; with `Addresses::Dhcpv6` an address (RFC 8415)
//! ```
//!
//! A machine makes its address of the prefix and its hardware address (EUI-64), or gets it by
//! DHCPv6; both follow from its port. The router only answers: what it advertises outlasts every
//! story, and an address by DHCPv6 is one that a machine soon has to renew.
//!
//! What this module does not do: translate anything but TCP, or answer as a server of names.

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

/// The server of names that DHCPv6 names; nothing answers there.
const NAME_SERVER: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 0x53);
/// The one that the router itself advertises.
const ROUTERS_NAME_SERVER: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, 0x54);
/// Ports of DHCPv6, kinds of its messages, and the numbers of its options (RFC 8415, RFC 3646).
const DHCP_SERVER: u16 = 547;
const DHCP_CLIENT: u16 = 546;
const SOLICIT: u8 = 1;
const ADVERTISE: u8 = 2;
const REPLY: u8 = 7;
const INFORMATION_REQUEST: u8 = 11;
const CLIENT_ID: u16 = 1;
const SERVER_ID: u16 = 2;
const IA_NA: u16 = 3;
const ADDRESS: u16 = 5;
const NAME_SERVERS: u16 = 23;
/// How long an address is a machine's, and when it has to ask again, in seconds.
const VALID: u32 = 60;
const RENEW: u32 = 6;
const REBIND: u32 = 30;

/// Where the addresses of machines come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// The prefix; DHCPv6 names servers (the flag O).
    Prefix,
    /// DHCPv6 (the flag M); the prefix is only on the link.
    Dhcpv6,
}

/// The addresses of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    /// As the gateway knows it.
    pub(crate) four: Ipv4Addr,
    /// Its card.
    pub(crate) hardware: [u8; 6],
}

impl Machine {
    /// The address that the machine has: the prefix, and its EUI-64 or the end of that of IPv4.
    pub(crate) fn ipv6(&self, addresses: Addresses) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.hardware;
        let suffix = match addresses {
            Addresses::Prefix => u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]),
            Addresses::Dhcpv6 => 0xd_0000 | u64::from(self.four.octets()[3]),
        };
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
    pub(crate) addresses: Addresses,
}

impl Router {
    /// The fate of a frame that a machine sent.
    pub(crate) fn sent(&self, frame: &[u8]) -> Outcome {
        let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return Outcome::Lost };
        let Some(NetSlice::Ipv6(ip)) = &packet.net else { return Outcome::Lost };
        let from = ip.header().source_addr();
        let outcome = match &packet.transport {
            Some(TransportSlice::Icmpv6(message)) => match message.type_u8() {
                ROUTER_SOLICITATION => advertisement(self.addresses),
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
                let mut machines = self.machines.iter();
                let machine = machines.find(|machine| machine.ipv6(self.addresses) == from);
                let packet = machine.and_then(|machine| {
                    let packet = PacketBuilder::ethernet2(machine.hardware, HARDWARE)
                        .ipv4(machine.four.octets(), GATEWAY_4.octets(), HOPS)
                        .tcp_header(tcp.to_header());
                    let mut frame = Vec::with_capacity(packet.size(tcp.payload().len()));
                    packet.write(&mut frame, tcp.payload()).ok().map(|()| frame)
                });
                Some(packet.map_or(Outcome::Lost, Outcome::Gateway))
            }
            Some(TransportSlice::Udp(udp)) if udp.destination_port() == DHCP_SERVER => {
                let asker = frame.get(6..12).and_then(|it| <[u8; 6]>::try_from(it).ok());
                let answer = asker.and_then(|asker| {
                    let answer = self.dhcp(asker, udp.payload())?;
                    let packet = PacketBuilder::ethernet2(HARDWARE, asker)
                        .ipv6(ROUTER.octets(), from.octets(), HOPS)
                        .udp(DHCP_SERVER, DHCP_CLIENT);
                    let mut frame = Vec::with_capacity(packet.size(answer.len()));
                    packet.write(&mut frame, &answer).ok().map(|()| frame)
                });
                Some(answer.map_or(Outcome::Lost, Outcome::Answer))
            }
            _ => None,
        };
        outcome.unwrap_or(Outcome::Pass)
    }

    /// The answer of the DHCPv6 server to a message of the machine with this card.
    fn dhcp(&self, hardware: [u8; 6], message: &[u8]) -> Option<Vec<u8>> {
        let machine = self.machines.iter().find(|machine| machine.hardware == hardware)?;
        let (head, mut rest) = message.split_first_chunk::<4>()?;
        let (mut client, mut association) = (None, None);
        while let Some((&[a, b, c, d], after)) = rest.split_first_chunk() {
            let length = usize::from(u16::from_be_bytes([c, d]));
            let (value, after) = after.split_at_checked(length)?;
            match u16::from_be_bytes([a, b]) {
                CLIENT_ID => client = Some(value),
                IA_NA => association = value.first_chunk::<4>(),
                _ => {}
            }
            rest = after;
        }
        let client = client?;
        // It is its card's at each boot (RFC 8415, 11.4).
        if client.strip_prefix(&[0, 3, 0, 1]) != Some(&hardware) {
            return None;
        }
        let mut answer = vec![if head[0] == SOLICIT { ADVERTISE } else { REPLY }];
        answer.extend(&head[1..]);
        let mut put = |option: u16, value: &[u8]| {
            answer.extend(option.to_be_bytes());
            answer.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
            answer.extend(value);
        };
        put(CLIENT_ID, client);
        put(SERVER_ID, &[&[0, 3, 0, 1], &HARDWARE[..]].concat());
        put(NAME_SERVERS, &NAME_SERVER.octets());
        if head[0] != INFORMATION_REQUEST {
            // A client that may make its address asks for none.
            let six = Some(machine.ipv6(self.addresses));
            let six = six.filter(|_| self.addresses == Addresses::Dhcpv6)?;
            let numbers = |all: [u32; 2]| all.map(u32::to_be_bytes).concat();
            let mut value = [&association?[..], &numbers([RENEW, REBIND])].concat();
            value.extend(ADDRESS.to_be_bytes());
            value.extend([0, 24]);
            value.extend(six.octets());
            value.extend(numbers([VALID, VALID]));
            put(IA_NA, &value);
        }
        Some(answer)
    }

    /// A frame of the gateway as the machine gets it, if it is one for a machine.
    pub(crate) fn forwarded(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(NetSlice::Ipv4(ip)) = &packet.net else { return None };
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { return None };
        let to = ip.header().destination_addr();
        let machine = self.machines.iter().find(|machine| machine.four == to)?;
        let packet = PacketBuilder::ethernet2(HARDWARE, machine.hardware)
            .ipv6(GATEWAY.octets(), machine.ipv6(self.addresses).octets(), HOPS)
            .tcp_header(tcp.to_header());
        let mut frame = Vec::with_capacity(packet.size(tcp.payload().len()));
        packet.write(&mut frame, tcp.payload()).ok()?;
        Some(frame)
    }
}

/// The router, its prefix, and where addresses come from (RFC 4861, 4.2 and 4.6).
fn advertisement(addresses: Addresses) -> Option<Vec<u8>> {
    // The flags of the router, and those of the prefix: on the link, and for addresses.
    let (flags, prefix) = match addresses {
        Addresses::Prefix => (0x40, 0xc0),
        Addresses::Dhcpv6 => (0x80, 0x80),
    };
    let [high, low] = LIFETIME.to_be_bytes();
    let mut body = vec![0; 8];
    // The sender's hardware address.
    body.extend([1, 1]);
    body.extend(HARDWARE);
    // A name server, for ever (RFC 8106, 5.1).
    body.extend([25, 3, 0, 0]);
    body.extend([0xff; 4]);
    body.extend(ROUTERS_NAME_SERVER.octets());
    // The prefix, of 64 bits; valid and preferred for ever.
    body.extend([3, 4, 64, prefix]);
    body.extend([0xff; 8]);
    body.extend([0; 4]);
    body.extend(PREFIX.octets());
    let to = (ALL_NODES, ALL_NODES_HARDWARE);
    message(ROUTER, to, (ROUTER_ADVERTISEMENT, [HOPS, flags, high, low]), &body)
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
        Router { machines: vec![MACHINE], addresses: Addresses::Prefix }
    }

    fn own() -> Ipv6Addr {
        MACHINE.ipv6(Addresses::Prefix)
    }

    #[test]
    fn dhcpv6_gives_an_address_to_the_card_that_asks_and_only_servers_where_the_prefix_does() {
        let association = [0, 3, 0, 12, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0];
        let asks = |kind, card: [u8; 6], addresses| {
            let head = [kind, 1, 2, 3, 0, 1, 0, 10, 0, 3, 0, 1];
            let message = [&head[..], &card, &association].concat();
            let mut frame = Vec::new();
            PacketBuilder::ethernet2(MACHINE.hardware, [0x33, 0x33, 0, 1, 0, 2])
                .ipv6(ROUTER.octets(), ALL_NODES.octets(), 1)
                .udp(DHCP_CLIENT, DHCP_SERVER)
                .write(&mut frame, &message)
                .unwrap();
            Router { addresses, ..router() }.sent(&frame)
        };
        let text = |frame: Outcome| {
            let Outcome::Answer(frame) = frame else { panic!("{frame:?}") };
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(udp)) = &packet.transport else { panic!("not UDP") };
            udp.payload().to_vec()
        };
        let given = MACHINE.ipv6(Addresses::Dhcpv6).octets();
        let has = |answer: &[u8]| answer.windows(16).any(|window| window == given);
        let offer = text(asks(SOLICIT, MACHINE.hardware, Addresses::Dhcpv6));
        assert_eq!(offer[..4], [ADVERTISE, 1, 2, 3]);
        assert!(has(&offer) && has(&text(asks(5, MACHINE.hardware, Addresses::Dhcpv6))));
        let servers = text(asks(INFORMATION_REQUEST, MACHINE.hardware, Addresses::Prefix));
        assert!(!has(&servers) && servers.ends_with(&NAME_SERVER.octets()));
        assert_eq!(asks(SOLICIT, MACHINE.hardware, Addresses::Prefix), Outcome::Lost);
        assert_eq!(asks(SOLICIT, [2; 6], Addresses::Dhcpv6), Outcome::Lost, "a foreign identity");
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
        assert_eq!(own(), "2001:db8:0:2:5054:ff:fe70:6f01".parse::<Ipv6Addr>().unwrap());
        let asked = router().sent(&solicitation(ROUTER_SOLICITATION, ROUTER, &[]));
        let Outcome::Answer(answer) = asked else { panic!("{asked:?}") };
        assert_eq!(checked(&answer), (ROUTER_ADVERTISEMENT, ALL_NODES_HARDWARE));
        assert!(answer.ends_with(&PREFIX.octets()));
        let asks = |target: Ipv6Addr, from| {
            router().sent(&solicitation(NEIGHBOUR_SOLICITATION, from, &target.octets()))
        };
        let asked = asks(GATEWAY, own());
        let Outcome::Answer(answer) = asked else { panic!("{asked:?}") };
        assert_eq!(checked(&answer), (NEIGHBOUR_ADVERTISEMENT, MACHINE.hardware));
        assert!(answer.ends_with(&HARDWARE));
        assert_eq!(asks(own(), ROUTER), Outcome::Pass, "another machine's");
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
        assert_eq!((ip.header().source_addr(), ip.header().destination_addr()), (GATEWAY, own()));
        let sum = tcp.to_header().calc_checksum_ipv6(&ip.header().to_header(), payload).unwrap();
        assert_eq!((tcp.checksum(), tcp.payload()), (sum, &payload[..]));

        let mut outward = Vec::new();
        PacketBuilder::ethernet2(MACHINE.hardware, HARDWARE)
            .ipv6(own().octets(), GATEWAY.octets(), HOPS)
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
