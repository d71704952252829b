//! A socket on which the kernel announces what changes, to the members of a multicast group.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, sockopt};

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received<'a> {
    /// A datagram of the kernel.
    Datagram(&'a [u8]),
    /// Announcements were lost: the queue was full.
    Lost,
    /// No more announcements for now.
    Nothing,
}

/// A member of one group.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Joins a group: bit `group - 1`. Without a protocol it is that of links and routes
    /// (`NETLINK_ROUTE`), whose number is zero. The kernel queues `backlog` bytes while the
    /// socket is not read.
    pub(super) fn open(
        protocol: Option<Protocol>,
        groups: u32,
        backlog: usize,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let family = AddressFamily::NETLINK;
        let socket = net::socket_with(family, SocketType::DGRAM, flags, protocol)?;
        // Only root may exceed the system's bound; otherwise the default is used.
        if sockopt::set_socket_recv_buffer_size_force(&socket, backlog).is_err() {
            sockopt::set_socket_recv_buffer_size(&socket, backlog)?;
        }
        net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self(socket))
    }

    /// The next announcement; a longer one than `buffer` is cut off. Never blocks.
    pub(super) fn next_datagram<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Received<'a>> {
        loop {
            match net::recvfrom(&self.0, &mut *buffer, RecvFlags::empty()) {
                Ok((length, _whole, from)) => {
                    // Port 0 is the kernel; another process could pretend to be it.
                    let port = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    if port.is_some_and(|port| port.pid() == 0) {
                        return Ok(Received::Datagram(&buffer[..length]));
                    }
                }
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::NOBUFS) => return Ok(Received::Lost),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
