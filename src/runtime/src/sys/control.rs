//! The channel between `init` and `node`, from `node`'s end: one message a datagram.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Bytes of a message; `init` does not read longer ones.
pub const MESSAGE_MAX: usize = 16 * 1024;

/// Sends one message without waiting, for a panic.
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
}
