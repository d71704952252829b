//! The sockets to the kernel: one for requests and their answers, one for announcements.
//!
//! The kernel drops what does not fit into the queue of a socket. The two are apart, so that
//! announcements, of which any machine of a segment can cause some, displace no answer: a dropped
//! announcement costs nothing, since the loss itself is announced and everything is read again.
//!
//! What this module does not do: read what arrives (`observe`, `wake`).

use std::io;

use futures::channel::mpsc::UnboundedReceiver;
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::proto::Connection;
use rtnetlink::sys::AsyncSocket as _;
use rtnetlink::{Handle, MulticastGroup};
use rustix::net::sockopt;

use super::wake::Notice;

/// Bytes that the kernel queues of announcements, which it doubles for its own overhead. One of a
/// link takes 2 to 4 KiB of that: enough for hundreds of links that appear at once, in place of
/// some 50.
const BACKLOG: usize = 1 << 20;

/// The sockets of a run. Both connections have to be polled while the run uses them.
pub(in super::super) struct Sockets {
    /// Moves requests and answers.
    pub(in super::super) requests: Connection<RouteNetlinkMessage>,
    /// Sends requests.
    pub(in super::super) handle: Handle,
    /// Moves announcements.
    pub(in super::super) announcements: Connection<RouteNetlinkMessage>,
    /// What the kernel announces: a change of a link or an address, or that the queue was full.
    pub(in super::super) notices: UnboundedReceiver<Notice>,
}

impl Sockets {
    /// Opens both; changes are announced from now on.
    pub(in super::super) fn open() -> io::Result<Self> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv6Ifinfo,
        ];
        let (mut announcements, _handle, notices) = rtnetlink::new_multicast_connection(&groups)?;
        let socket = announcements.socket_mut().socket_ref();
        // Only with the capability for networks, which a test without a namespace may lack.
        if sockopt::set_socket_recv_buffer_size_force(socket, BACKLOG).is_err() {
            sockopt::set_socket_recv_buffer_size(socket, BACKLOG)?;
        }
        // The kernel sends nothing but answers to a socket without groups.
        let (requests, handle, _unasked) = rtnetlink::new_connection()?;
        Ok(Self { requests, handle, announcements, notices })
    }
}
