//! What `init` leaves open for `node`, from `node`'s end; above all the channel
//! between the two: one message a datagram.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::{Errno, FdFlags};
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Bytes of a message; `init` reads no longer ones.
pub const MESSAGE_MAX: usize = 16 * 1024;

/// Descriptors that `init` may leave open, from 3 on: far more than it does.
const INHERITED_MAX: RawFd = 8;

/// Takes over the descriptor that `init` left open at `number`. It never blocks.
///
/// # Errors
///
/// When nothing is open there, or it was taken before.
pub fn inherit(number: RawFd) -> io::Result<OwnedFd> {
    static TAKEN: AtomicU8 = AtomicU8::new(0);
    let index = (0..INHERITED_MAX).find(|index| 3 + index == number);
    let mask = 1 << index.ok_or(io::ErrorKind::InvalidInput)?;
    if TAKEN.fetch_or(mask, Ordering::Relaxed) & mask != 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    #[expect(unsafe_code, reason = "an inherited descriptor is a number, whatever one does")]
    // SAFETY: beyond the standard three, this process has opened nothing that
    // early but its own files, and this is called once for each number: if the
    // descriptor is not open, the next call says so and the guard below forgets it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC) {
        std::mem::forget(fd);
        return Err(error.into());
    }
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

/// Sends one message from where nothing may wait: a panic.
///
/// # Errors
///
/// The kernel's.
pub fn send_now(socket: &OwnedFd, message: &str) -> io::Result<()> {
    rustix::net::send(socket, message.as_bytes(), SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The open channel.
#[derive(Debug)]
pub struct Channel {
    socket: AsyncFd<OwnedFd>,
}

impl Channel {
    /// Registers `socket` with the runtime.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = super::readiness::watch(socket, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { socket })
    }

    /// Sends one message. Cancel-safe: it is sent whole or not at all.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for a message above [`MESSAGE_MAX`]; else the kernel's:
    /// `BrokenPipe` when `init` is gone.
    pub async fn send(&self, message: &str) -> io::Result<()> {
        if message.len() > MESSAGE_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            let mut ready = self.socket.writable().await?;
            match rustix::net::send(&self.socket, message.as_bytes(), SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next message; `None` when `init` is gone. Cancel-safe.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub async fn receive(&self) -> io::Result<Option<String>> {
        let mut buffer = vec![0; MESSAGE_MAX];
        loop {
            let mut ready = self.socket.readable().await?;
            match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return Ok(None),
                Ok((length, _)) => {
                    return Ok(Some(String::from_utf8_lossy(&buffer[..length]).into_owned()));
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (Channel, OwnedFd) {
        let (node, init) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        (Channel::new(node).unwrap(), init)
    }

    #[tokio::test]
    async fn messages_keep_their_bounds_both_ways() {
        let (channel, init) = pair();
        channel.send("one").await.unwrap();
        channel.send("two").await.unwrap();
        let mut buffer = [0; 16];
        assert_eq!(rustix::net::recv(&init, &mut buffer[..], RecvFlags::empty()).unwrap().0, 3);
        rustix::net::send(&init, b"stop", SendFlags::empty()).unwrap();
        rustix::net::send(&init, b"again", SendFlags::empty()).unwrap();
        assert_eq!(channel.receive().await.unwrap().as_deref(), Some("stop"));
        assert_eq!(channel.receive().await.unwrap().as_deref(), Some("again"));
    }

    #[tokio::test]
    async fn the_end_of_init_is_an_end_and_not_a_message() {
        let (channel, init) = pair();
        drop(init);
        assert_eq!(channel.receive().await.unwrap(), None);
        assert_eq!(channel.send("x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn a_message_that_init_would_cut_is_refused() {
        let (channel, _init) = pair();
        let error = channel.send(&"x".repeat(MESSAGE_MAX + 1)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_number_that_init_never_uses_is_refused() {
        for number in [-1, 0, 2, 3 + INHERITED_MAX, 1023] {
            assert_eq!(inherit(number).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
