//! Waits for devices that the runtime has no type for.

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers an open file, opened with `O_NONBLOCK`, with the runtime.
///
/// # Errors
///
/// The kernel's, for example for a file that is always ready.
pub fn watch_file(file: File, interest: Interest) -> io::Result<AsyncFd<File>> {
    #[expect(unsafe_code, reason = "the runtime cannot know that a type keeps its descriptor open")]
    // SAFETY: a `File` returns the same descriptor each time, and owns it, so
    // that it stays open until the `AsyncFd`, which owns the file, is dropped.
    let watched = unsafe { AsyncFd::register_with_interest(file, interest) };
    watched.map_err(Into::into)
}
