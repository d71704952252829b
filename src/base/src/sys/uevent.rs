//! The kernel's announcements of devices that appear, change or go.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

/// The multicast group of the kernel's own messages. Group 2 is udev's.
const GROUP_KERNEL: u32 = 1;

/// The kernel's own bound for the variables of one event is 2 KiB.
const EVENT_MAX: usize = 8192;

/// How much the kernel keeps while the socket is not read: enough for a machine full of
/// devices that all appear while modules load.
const BACKLOG_MAX: usize = 1 << 20;

/// The event of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `add`, `change`, `remove` and so on.
    pub action: String,
    /// Below `/sys`, for example `/devices/pci0000:00/0000:00:02.0/virtio0`.
    pub path: String,
    /// `SUBSYSTEM`, `DEVNAME`, `MODALIAS` and so on.
    pub variables: BTreeMap<String, String>,
}

impl Event {
    /// Reads a message of the kernel. `None` if it is not one.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut parts = text.split('\0');
        let (action, path) = parts.next()?.split_once('@')?;
        let variables = parts
            .filter_map(|part| part.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        Some(Self { action: action.to_owned(), path: path.to_owned(), variables })
    }

    /// The value of a variable.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.variables.get(key).map(String::as_str)
    }
}

/// The result of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A device changed.
    Event(Event),
    /// Announcements were lost: look at `/sys` again.
    Lost,
    /// No more announcements for now.
    Nothing,
}

/// A socket that receives every event from now on.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// Opens the socket. Look at `/sys` after this, and no event is missed in between.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        let socket = net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(netlink::KOBJECT_UEVENT),
        )?;
        // Only root may exceed the system's bound; otherwise the default is used.
        if sockopt::set_socket_recv_buffer_size_force(&socket, BACKLOG_MAX).is_err() {
            sockopt::set_socket_recv_buffer_size(&socket, BACKLOG_MAX)?;
        }
        net::bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL))?;
        Ok(Self { socket })
    }

    /// The next event. Never blocks.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_event(&self) -> io::Result<Received> {
        let mut buffer = [0; EVENT_MAX];
        loop {
            match net::recvfrom(&self.socket, &mut buffer, RecvFlags::empty()) {
                Ok((length, _whole, from)) => {
                    // Port 0 is the kernel; a process could pretend to be a device.
                    let port = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    if port.is_none_or(|port| port.pid() != 0) {
                        continue;
                    }
                    if let Some(event) = Event::parse(&buffer[..length]) {
                        return Ok(Received::Event(event));
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

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_event_reads_as_the_kernel_wrote_it() {
        let bytes = b"add@/devices/virtual/mem/kmsg\0ACTION=add\0SUBSYSTEM=mem\0DEVNAME=kmsg\0";
        let event = Event::parse(bytes).unwrap();
        assert_eq!(event.action, "add");
        assert_eq!(event.path, "/devices/virtual/mem/kmsg");
        assert_eq!(event.get("DEVNAME"), Some("kmsg"));
        assert_eq!(event.get("MODALIAS"), None);
    }

    #[test]
    fn udev_s_own_messages_are_not_events() {
        assert_eq!(Event::parse(b"libudev\0\xfe\xed\xca\xfe"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _event = Event::parse(&bytes);
        }
    }
}
