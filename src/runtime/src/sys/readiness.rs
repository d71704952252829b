//! Readiness of descriptors for which the runtime has no type.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Reports when `fd`, opened with `O_NONBLOCK`, can be used again.
///
/// The runtime watches a second descriptor of the same open file, so the owner of the
/// first may close it at any time.
///
/// # Errors
///
/// The kernel's, for example for a file that is always ready.
pub fn watch(fd: impl AsFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    let second = fd.as_fd().try_clone_to_owned()?;
    #[expect(
        unsafe_code,
        reason = "the runtime cannot know which types keep their descriptor open"
    )]
    // SAFETY: an `OwnedFd` returns the same descriptor each time, and keeps it
    // open until the `AsyncFd`, which owns it, is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(second, interest) };
    watched.map_err(Into::into)
}
