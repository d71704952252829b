//! Signals received through a descriptor, so that the main loop waits in one place.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, Signal};

/// A descriptor that is ready when one of its signals has arrived.
#[derive(Debug)]
pub struct Signals {
    descriptor: OwnedFd,
}

/// The set of these signals.
#[expect(unsafe_code, reason = "rustix leaves signal sets to libc implementations")]
fn set_of(signals: &[Signal]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` writes the whole set and reads no part of it.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `sigemptyset` has just initialised it.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: the set is initialised and the number is one of a real signal.
        unsafe { libc::sigaddset(&raw mut set, signal.as_raw()) };
    }
    set
}

/// Sets the mask of this thread, and returns the one before; threads and processes that it starts
/// inherit it.
#[expect(unsafe_code, reason = "rustix leaves signal masks to libc implementations")]
fn set_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is initialised, and there is room for the old mask.
    let result = unsafe { libc::pthread_sigmask(how, &raw const *set, before.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    // SAFETY: the call succeeded, so it has written the old mask.
    Ok(unsafe { before.assume_init() })
}

impl Signals {
    /// Blocks `signals` and receives them here instead. Call it before any thread starts.
    ///
    /// # Errors
    ///
    /// When the process has too many descriptors.
    #[expect(unsafe_code, reason = "rustix has no signalfd")]
    pub fn receive(signals: &[Signal]) -> io::Result<Self> {
        let set = set_of(signals);
        set_mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: `set` is initialised and read only; -1 asks for a new descriptor.
        let raw =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above has just made this descriptor, and it has no other
        // owner.
        let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self { descriptor })
    }

    /// The number of the next signal that has arrived. Never blocks.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn next_signal(&self) -> io::Result<Option<i32>> {
        // `struct signalfd_siginfo` begins with the number, in 32 bits.
        let mut info = [0_u8; 128];
        loop {
            match rustix::io::read(&self.descriptor, &mut info) {
                Ok(length) if length == info.len() => {
                    return Ok(Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])));
                }
                Ok(_) | Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Unblocks every signal for this thread. Async-signal-safe: a child calls it between
/// fork and exec.
///
/// # Errors
///
/// Never for a valid set; what the kernel says otherwise.
pub fn unblock_all() -> io::Result<()> {
    set_mask(libc::SIG_SETMASK, &set_of(&[])).map(|_before| ())
}

/// Does `work` without an end by Ctrl-C, `kill` or the end of the terminal: such a signal to this
/// thread acts behind it, when `work` has restored what it changed, as the modes of a terminal.
/// `work` gets the descriptor of these signals, so that it can end its own waits. Signals that it
/// does not read act.
///
/// # Errors
///
/// When the process has too many descriptors.
pub(super) fn uninterrupted<T>(work: impl FnOnce(Signals) -> T) -> io::Result<T> {
    held(&[Signal::INT, Signal::TERM, Signal::HUP], work)
}

/// The same for any signals. Those that were held before stay held.
fn held<T>(signals: &[Signal], work: impl FnOnce(Signals) -> T) -> io::Result<T> {
    let before = set_mask(libc::SIG_BLOCK, &set_of(signals))?;
    let done = Signals::receive(signals).map(work);
    set_mask(libc::SIG_SETMASK, &before)?;
    done
}

/// Sends `signal` to every process that may get it, except the caller.
///
/// # Errors
///
/// `ESRCH` when no process is left.
#[expect(unsafe_code, reason = "rustix has no kill of every process")]
pub fn send_to_all(signal: Signal) -> io::Result<()> {
    // SAFETY: takes two numbers and touches no memory.
    let result = unsafe { libc::kill(-1, signal.as_raw()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends `signal` to one process.
///
/// # Errors
///
/// `ESRCH` when it is gone.
pub fn send(process: Pid, signal: Signal) -> io::Result<()> {
    Ok(rustix::process::kill_process(process, signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a signal that is blocked here to this thread alone: the test's process has others
    /// without the mask.
    #[expect(unsafe_code, reason = "raise is not in rustix")]
    fn raise(signal: Signal) {
        // SAFETY: takes a number; the signal is blocked in this thread.
        let raised = unsafe { libc::raise(signal.as_raw()) };
        assert_eq!(raised, 0);
    }

    #[test]
    fn a_signal_is_received_and_nothing_after_it() {
        let signals = Signals::receive(&[Signal::USR2]).unwrap();
        assert_eq!(signals.next_signal().unwrap(), None);
        raise(Signal::USR2);
        assert_eq!(signals.next_signal().unwrap(), Some(Signal::USR2.as_raw()));
        assert_eq!(signals.next_signal().unwrap(), None);
        unblock_all().unwrap();
    }

    #[test]
    fn a_signal_waits_for_the_end_of_the_work() {
        // Not held, it would end the process of this test.
        let taken = held(&[Signal::USR1], |signals| {
            raise(Signal::USR1);
            signals.next_signal().unwrap()
        });
        assert_eq!(taken.unwrap(), Some(Signal::USR1.as_raw()));
    }

    #[test]
    fn a_signal_that_the_work_does_not_read_acts_behind_it() {
        // Where it is not held, it does nothing.
        held(&[Signal::WINCH], |_signals| raise(Signal::WINCH)).unwrap();
        let signals = Signals::receive(&[Signal::WINCH]).unwrap();
        assert_eq!(signals.next_signal().unwrap(), None);
        unblock_all().unwrap();
    }

    #[test]
    fn a_signal_that_is_held_twice_waits_for_the_end_of_both() {
        let taken = held(&[Signal::WINCH], |signals| {
            held(&[Signal::WINCH], |_inner| raise(Signal::WINCH)).unwrap();
            signals.next_signal().unwrap()
        });
        assert_eq!(taken.unwrap(), Some(Signal::WINCH.as_raw()));
    }

    #[test]
    fn every_signal_that_ends_a_program_waits_for_the_end_of_the_work() {
        let taken = uninterrupted(|signals| {
            [Signal::INT, Signal::TERM, Signal::HUP].map(|signal| {
                raise(signal);
                signals.next_signal().unwrap() == Some(signal.as_raw())
            })
        });
        assert_eq!(taken.unwrap(), [true; 3]);
    }
}
