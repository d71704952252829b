//! The kernel's announcements of devices that appear, change or go.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::netlink::KOBJECT_UEVENT;

use super::netlink::{self, Socket};

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
pub struct Listener(Socket);

impl Listener {
    /// Opens the socket. Look at `/sys` after this, and no event is missed in between.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn open() -> io::Result<Self> {
        Socket::open(Some(KOBJECT_UEVENT), GROUP_KERNEL, BACKLOG_MAX).map(Self)
    }

    /// The next event. Never blocks.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_event(&self) -> io::Result<Received> {
        let mut buffer = [0; EVENT_MAX];
        loop {
            match self.0.next_datagram(&mut buffer)? {
                netlink::Received::Datagram(bytes) => {
                    if let Some(event) = Event::parse(bytes) {
                        return Ok(Received::Event(event));
                    }
                }
                netlink::Received::Lost => return Ok(Received::Lost),
                netlink::Received::Nothing => return Ok(Received::Nothing),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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
