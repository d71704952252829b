//! Waiting until one of several descriptors is ready, or for a time.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// The condition to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something can be read, or the other end is gone.
    Read,
    /// Something can be written.
    Write,
}

/// Waits until at least one descriptor is ready, at most `timeout` (`None`: without
/// limit). Returns which are, in the order given; all false after the timeout or a
/// signal.
///
/// # Errors
///
/// When the kernel is out of memory.
pub fn wait(
    descriptors: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> io::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|(descriptor, interest)| {
            let flags = match interest {
                Interest::Read => PollFlags::IN,
                Interest::Write => PollFlags::OUT,
            };
            PollFd::from_borrowed_fd(*descriptor, flags)
        })
        .collect();
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    match rustix::event::poll(&mut polled, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    // An error or a hang-up counts as ready: the read or write returns it.
    Ok(polled.iter().map(|polled| !polled.revents().is_empty()).collect())
}

/// Sleeps. Only for programs without an async runtime, such as `init`.
pub fn sleep(time: Duration) {
    wait(&[], Some(time)).ok();
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_ready_one_is_reported() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let waited = [(read.as_fd(), Interest::Read), (write.as_fd(), Interest::Write)];
        assert_eq!(wait(&waited, None).unwrap(), [false, true]);
    }

    #[test]
    fn a_lost_writer_is_ready() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        drop(write);
        assert_eq!(wait(&[(read.as_fd(), Interest::Read)], None).unwrap(), [true]);
    }
}
