//! A port scan of one machine of a segment, from any address of that segment.
//!
//! ```text
//! spare port --SYN to each port--> switch --> machine
//!                                     |          | SYN+ACK, RST
//!                                     +<---------+
//!                                     capture: which of them were answered, and how
//! ```
//!
//! The answers are read from what the switch delivers, so the scan can have the address of a
//! machine that is on: that machine resets what it did not begin, as any would.
//!
//! What this module does not do: find open UDP ports, which need not answer.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use etherparse::{
    ArpHardwareId, ArpOperation, ArpPacket, EtherType, NetSlice, PacketBuilder, SlicedPacket,
    TransportSlice,
};

use crate::frame::{read, write_frame};
use crate::plug::{Plug, Port};
use crate::segment::Links;

/// The port that the packets come from.
const OWN_PORT: u16 = 40_999;
/// Packets that are sent before the machine gets time for them: fewer than its card has room for.
const BURST: usize = 128;
/// The time that it gets.
const PAUSE: Duration = Duration::from_millis(20);
/// How long the last answers may take.
const LAST: Duration = Duration::from_secs(2);

/// The address that the packets come from.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Of a machine that is not there: the scan answers for it.
    Spare(Ipv4Addr),
    /// Of a machine that is there.
    Of(Ipv4Addr),
}

impl Source {
    fn address(self) -> Ipv4Addr {
        match self {
            Self::Spare(address) | Self::Of(address) => address,
        }
    }
}

/// The answer of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// A connection could be opened.
    pub open: BTreeSet<u16>,
    /// Nothing listens, and packets get through.
    pub closed: BTreeSet<u16>,
}

/// Sends the first packet of a connection to every port from 1 on of the machine at `to`.
///
/// `plug` is a port of the segment without a machine.
///
/// # Errors
/// When the switch is gone, or the capture had no room.
#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this is the host")]
pub fn scan(links: &Links, plug: &Plug, from: Source, to: (Plug, Ipv4Addr)) -> io::Result<Answers> {
    let (target, address) = to;
    let (own, other) = (plug.hardware_address(), target.hardware_address());
    let mut line = UnixStream::connect(&plug.socket)?;
    let incoming = line.try_clone()?;
    let spare = match from {
        Source::Spare(spare) => {
            // A question for its address tells the machine where answers go.
            let question = arp(ArpOperation::REQUEST, (own, spare), ([0xff; 6], address))?;
            write_frame(&mut line, &question)?;
            Some(spare)
        }
        Source::Of(_) => None,
    };
    // The switch loses frames for a port that does not read. The thread ends with the line.
    thread::spawn(move || attend(incoming, own, spare));
    links.capture();
    for port in 1..=u16::MAX {
        if usize::from(port) % BURST == 0 {
            thread::sleep(PAUSE);
        }
        let packet = PacketBuilder::ethernet2(own, other)
            .ipv4(from.address().octets(), address.octets(), 64)
            .tcp(OWN_PORT, port, 1, 1024)
            .syn();
        let mut frame = Vec::with_capacity(packet.size(0));
        packet.write(&mut frame, &[]).map_err(io::Error::other)?;
        write_frame(&mut line, &frame)?;
    }
    thread::sleep(LAST);
    let captured = links.captured();
    let captured =
        captured.map_err(|missed| io::Error::other(format!("{missed} frames missed")))?;
    let answers = captured.iter().filter(|it| it.from == Port::Machine(target.machine));
    let mut all = Answers::default();
    for answer in answers {
        all.take(&answer.frame, from.address());
    }
    Ok(all)
}

/// Reads what arrives, and says which hardware address has the address of the scan.
fn attend(mut line: UnixStream, own: [u8; 6], spare: Option<Ipv4Addr>) {
    while let Ok(frame) = read(&mut line) {
        let Some(spare) = spare else { continue };
        let Ok(packet) = SlicedPacket::from_ethernet(&frame) else { continue };
        let Some(NetSlice::Arp(asked)) = &packet.net else { continue };
        if asked.operation() != ArpOperation::REQUEST
            || asked.target_protocol_addr() != spare.octets()
        {
            continue;
        }
        let asker = (asked.sender_hw_addr().try_into(), asked.sender_protocol_addr().try_into());
        let (Ok(asker), Ok::<[u8; 4], _>(address)) = asker else { continue };
        let answer = arp(ArpOperation::REPLY, (own, spare), (asker, address.into()));
        let answered = answer.and_then(|answer| write_frame(&mut line, &answer));
        if answered.is_err() {
            return;
        }
    }
}

/// A frame of the address resolution protocol, from one end to another.
fn arp(
    operation: ArpOperation,
    (own, address): ([u8; 6], Ipv4Addr),
    (other, asked): ([u8; 6], Ipv4Addr),
) -> io::Result<Vec<u8>> {
    let packet = ArpPacket::new(
        ArpHardwareId::ETHERNET,
        EtherType::IPV4,
        operation,
        &own,
        &address.octets(),
        &other,
        &asked.octets(),
    );
    let packet = PacketBuilder::ethernet2(own, other).arp(packet.map_err(io::Error::other)?);
    let mut frame = Vec::with_capacity(packet.size());
    packet.write(&mut frame).map_err(io::Error::other)?;
    Ok(frame)
}

impl Answers {
    /// Adds a frame of the machine, if it is an answer to a packet of the scan.
    fn take(&mut self, frame: &[u8], scanner: Ipv4Addr) {
        let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return };
        let Some(NetSlice::Ipv4(ip)) = &packet.net else { return };
        if ip.header().destination_addr() != scanner {
            return;
        }
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { return };
        if tcp.destination_port() != OWN_PORT {
            return;
        }
        let port = tcp.source_port();
        if tcp.syn() && tcp.ack() {
            self.open.insert(port);
        } else if tcp.rst() {
            self.closed.insert(port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCANNER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 40);

    fn answer(port: u16, to: Ipv4Addr, flags: fn(&mut etherparse::TcpHeader)) -> Vec<u8> {
        let mut tcp = etherparse::TcpHeader::new(port, OWN_PORT, 1, 1024);
        flags(&mut tcp);
        let packet = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 2, 15], to.octets(), 64)
            .tcp_header(tcp);
        let mut frame = Vec::new();
        packet.write(&mut frame, &[]).unwrap();
        frame
    }

    #[test]
    fn an_answer_says_whether_a_port_is_open_or_closed() {
        let mut all = Answers::default();
        let open = answer(7839, SCANNER, |tcp| (tcp.syn, tcp.ack) = (true, true));
        let closed = answer(22, SCANNER, |tcp| (tcp.rst, tcp.ack) = (true, true));
        let other = answer(80, Ipv4Addr::new(10, 0, 2, 2), |tcp| tcp.rst = true);
        for frame in [&open, &closed, &other] {
            all.take(frame, SCANNER);
        }
        let expected = Answers { open: [7839].into(), closed: [22].into() };
        assert_eq!(all, expected);
        for length in 0..open.len() {
            all.take(&open[..length], SCANNER);
        }
        assert_eq!(all, expected);
    }
}
