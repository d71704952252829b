//! A capture: the frames that a segment's switch delivers, with the ports that they pass.
//!
//! The links of a segment start one (`Links::capture`). It holds the frames in memory, so a story
//! captures the seconds of which it wants to know what was on the wire.
//!
//! Invariants:
//! - A frame that the switch lost, or a cut link swallowed, is not in the capture.
//! - A capture that did not have room for every frame says so, and is never shown as whole.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use crate::plug::Port;

/// Bytes of frames that one capture holds: minutes of the traffic of a busy cluster.
const BYTES_MAX: usize = 512 << 20;

/// The length of the header of an Ethernet frame, and its type for IPv4 (RFC 894).
const ETHERNET: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
/// The number of UDP (RFC 768) in the header of IPv4, and the length of its own header.
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;

/// One frame that one port received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    /// The port of the sender.
    pub from: Port,
    /// The port of the receiver. A frame for all has one entry for each.
    pub to: Port,
    /// The frame, from its Ethernet header on.
    pub frame: Arc<[u8]>,
}

/// A datagram of UDP over IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Its sender.
    pub source: SocketAddrV4,
    /// Its receiver.
    pub destination: SocketAddrV4,
    /// Its content; of a datagram in fragments, the first part.
    pub payload: &'a [u8],
}

impl Captured {
    /// Whether these bytes are in the frame.
    #[must_use]
    pub fn contains(&self, wanted: &[u8]) -> bool {
        !wanted.is_empty() && self.frame.windows(wanted.len()).any(|window| window == wanted)
    }

    /// Whether both ends are machines: the gateway is the world outside of the segment.
    #[must_use]
    pub fn is_between_machines(&self) -> bool {
        matches!((self.from, self.to), (Port::Machine(_), Port::Machine(_)))
    }

    /// The datagram in the frame, if it is one.
    #[must_use]
    pub fn datagram(&self) -> Option<Datagram<'_>> {
        let packet = self.frame.get(ETHERNET..)?;
        let header = usize::from(packet.first()? & 0x0f) * 4;
        if self.frame.get(12..ETHERNET)? != TYPE_IPV4 || *packet.get(9)? != UDP {
            return None;
        }
        let address = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
        let datagram = packet.get(header..)?;
        let port = |at: usize| Some(u16::from_be_bytes(*datagram.get(at..)?.first_chunk::<2>()?));
        Some(Datagram {
            source: SocketAddrV4::new(address(12)?, port(0)?),
            destination: SocketAddrV4::new(address(16)?, port(2)?),
            payload: datagram.get(UDP_HEADER..)?,
        })
    }
}

/// The frames of a capture that goes on.
#[derive(Debug, Default)]
pub(crate) struct Capture {
    frames: Vec<Captured>,
    bytes: usize,
    missed: usize,
}

impl Capture {
    /// Adds a frame, while there is room.
    pub(crate) fn add(&mut self, from: Port, to: Port, frame: &Arc<[u8]>) {
        self.bytes = self.bytes.saturating_add(frame.len());
        if self.bytes > BYTES_MAX {
            self.missed += 1;
        } else {
            self.frames.push(Captured { from, to, frame: Arc::clone(frame) });
        }
    }

    /// The frames in their order; the number of those that had no room, if there were any.
    pub(crate) fn end(self) -> Result<Vec<Captured>, usize> {
        if self.missed == 0 { Ok(self.frames) } else { Err(self.missed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured(to: Port, frame: &[u8]) -> Captured {
        Captured { from: Port::Machine(0), to, frame: frame.into() }
    }

    /// A datagram from 10.0.2.15, port 7838, to 10.0.2.16, port 53.
    fn frame() -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 8, 0];
        frame.extend([0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0]);
        frame.extend([10, 0, 2, 15, 10, 0, 2, 16]);
        frame.extend([0x1e, 0x9e, 0, 53, 0, 12, 0, 0]);
        frame.extend(b"word");
        frame
    }

    #[test]
    fn a_datagram_has_its_ends_and_its_content() {
        let captured = captured(Port::Machine(1), &frame());
        let datagram = captured.datagram().unwrap();
        assert_eq!(datagram.source, "10.0.2.15:7838".parse().unwrap());
        assert_eq!(datagram.destination, "10.0.2.16:53".parse().unwrap());
        assert_eq!(datagram.payload, b"word");
        assert!(captured.contains(b"word") && !captured.contains(b"sword"));
        assert!(!captured.contains(b""));
    }

    #[test]
    fn another_frame_and_a_short_one_are_no_datagram() {
        let whole = frame();
        for length in 0..whole.len() - 4 {
            assert_eq!(captured(Port::Gateway, &whole[..length]).datagram(), None);
        }
        for (at, byte) in [(12, 0x86), (23, 6)] {
            let mut other = frame();
            other[at] = byte;
            assert_eq!(captured(Port::Gateway, &other).datagram(), None);
        }
    }

    #[test]
    fn what_goes_to_the_gateway_leaves_the_segment() {
        assert!(captured(Port::Machine(1), b"").is_between_machines());
        assert!(!captured(Port::Gateway, b"").is_between_machines());
    }

    #[test]
    fn a_capture_without_room_says_how_many_frames_are_missing() {
        let mut capture = Capture::default();
        let frame: Arc<[u8]> = vec![0; 1024].into();
        capture.add(Port::Machine(0), Port::Machine(1), &frame);
        capture.bytes = BYTES_MAX;
        capture.add(Port::Machine(0), Port::Machine(1), &frame);
        assert_eq!(capture.end(), Err(1));
    }
}
