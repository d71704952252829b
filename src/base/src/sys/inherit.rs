//! The descriptors that `init` leaves open for `node`, from `node`'s end.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::FdFlags;

/// Descriptors that `init` may leave open, from 3 on: far more than it does.
const INHERITED_MAX: RawFd = 8;

/// Takes over the descriptor that `init` left open at `number`. It never blocks.
///
/// # Errors
///
/// When nothing is open there, or it was taken before.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    static TAKEN: AtomicU8 = AtomicU8::new(0);
    let index = (0..INHERITED_MAX).find(|index| 3 + index == number);
    let mask = 1 << index.ok_or(io::ErrorKind::InvalidInput)?;
    if TAKEN.fetch_or(mask, Ordering::Relaxed) & mask != 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    #[expect(unsafe_code, reason = "an inherited descriptor is a number, whatever one does")]
    // SAFETY: beyond the standard three, this process has opened nothing that
    // early but its own files, and this is called once for each number: if the
    // descriptor is not open, the next call fails and the guard below forgets it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC) {
        std::mem::forget(fd);
        return Err(error.into());
    }
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_init_never_uses_is_refused() {
        for number in [-1, 0, 2, 3 + INHERITED_MAX, 1023] {
            assert_eq!(take(number).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
