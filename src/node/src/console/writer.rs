//! The writer of a terminal: gives it its bytes from a thread of its own.
//!
//! A write to a terminal can take any time, in spite of its flags: some drivers spin
//! until the other end takes the bytes. So no thread of the runtime ever writes to one.
//! A thread that is stuck for good is left behind, and ends with the process.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;

use polis_base::sys::poll::{self, Interest};

/// How often the thread looks whether it is still wanted while the terminal
/// takes nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// The way to the thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Writer {
    /// One picture waits at most: a newer one is worth more.
    pictures: mpsc::Sender<Vec<u8>>,
    shared: Arc<Shared>,
}

/// The state that both ends share.
#[derive(Debug, Default)]
struct Shared {
    /// Pictures that were handed over and are not written whole.
    pending: AtomicUsize,
    unwanted: AtomicBool,
}

impl Writer {
    /// Starts the thread.
    pub(super) fn start(terminal: File) -> io::Result<Self> {
        let (pictures, queue) = mpsc::channel(1);
        let shared = Arc::<Shared>::default();
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("terminal".to_owned());
        thread.stack_size(64 * 1024).spawn(move || write(terminal, queue, &its))?;
        Ok(Self { pictures, shared })
    }

    /// Waits until the thread can take a picture; `false` when the terminal is
    /// gone. Cancel-safe.
    pub(super) async fn ready(&self) -> bool {
        // The place is given back at once: this code is its only user.
        self.pictures.reserve().await.is_ok()
    }

    /// Whether the thread can take a picture now.
    pub(super) fn has_room(&self) -> bool {
        self.pictures.capacity() > 0
    }

    /// Hands over a picture; `false` without room, or if the writer is gone.
    pub(super) fn send(&self, picture: Vec<u8>) -> bool {
        // Before the thread can be through with it.
        self.shared.pending.fetch_add(1, Ordering::AcqRel);
        let taken = self.pictures.try_send(picture).is_ok();
        if !taken {
            self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        }
        taken
    }

    /// Hands over something small if the terminal is through with all before it;
    /// `false` if it is not, and nothing was taken.
    pub(super) fn offer(&self, bytes: &[u8]) -> bool {
        self.shared.pending.load(Ordering::Acquire) == 0 && self.send(bytes.to_vec())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.unwanted.store(true, Ordering::Relaxed);
    }
}

fn write(mut terminal: File, mut queue: mpsc::Receiver<Vec<u8>>, shared: &Shared) {
    while let Some(picture) = queue.blocking_recv() {
        let mut rest = &picture[..];
        while !rest.is_empty() {
            match terminal.write(rest) {
                Ok(0) => return,
                Ok(taken) => rest = &rest[taken..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let wait = [(terminal.as_fd(), Interest::Write)];
                    if poll::wait(&wait, Some(PATIENCE)).is_err()
                        || shared.unwanted.load(Ordering::Relaxed)
                    {
                        return;
                    }
                }
                // Hung up: the reader finds out too.
                Err(_) => return,
            }
        }
        shared.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[tokio::test]
    async fn pictures_arrive_in_order() {
        let (mut far, near) = std::io::pipe().unwrap();
        let writer = Writer::start(File::from(std::os::fd::OwnedFd::from(near))).unwrap();
        for picture in ["one ", "two"] {
            assert!(writer.ready().await && writer.send(picture.into()));
        }
        let mut read = [0; 7];
        far.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"one two");
    }

    #[tokio::test]
    async fn a_blocked_terminal_delays_no_other() {
        let (_far, near) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        let writer = Writer::start(File::from(std::os::fd::OwnedFd::from(near))).unwrap();
        // More than a pipe holds: the thread is stuck with it.
        assert!(writer.ready().await && writer.send(vec![0; 1 << 20]));
        assert!(writer.ready().await && writer.send(vec![0]));
        assert!(!writer.offer(b"not waited for"));
        let third = tokio::time::timeout(Duration::from_millis(50), writer.ready()).await;
        assert!(third.is_err(), "a stuck terminal took a third picture");
    }

    #[tokio::test]
    async fn something_small_is_taken_once_the_terminal_is_through_with_all_before() {
        let (mut far, near) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        let writer = Writer::start(File::from(std::os::fd::OwnedFd::from(near))).unwrap();
        let picture = vec![b'x'; 1 << 20];
        assert!(writer.send(picture.clone()));
        // The thread has it, and a place is free: that is not enough.
        assert!(writer.ready().await && !writer.offer(b"early"));
        let mut read = vec![0; picture.len()];
        far.read_exact(&mut read).unwrap();
        while !writer.offer(b"late!") {
            tokio::task::yield_now().await;
        }
        far.read_exact(&mut read[..5]).unwrap();
        assert_eq!(&read[..5], b"late!");
    }

    #[tokio::test]
    async fn a_terminal_that_is_gone_is_noticed() {
        let (far, near) = std::io::pipe().unwrap();
        let writer = Writer::start(File::from(std::os::fd::OwnedFd::from(near))).unwrap();
        drop(far);
        while writer.ready().await {
            writer.send(b"x".to_vec());
        }
    }
}
