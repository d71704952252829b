//! The virtual terminals: which one is shown, its content, and the silencing of the kernel.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

/// `VT_ACTIVATE`, from `linux/vt.h`.
const ACTIVATE: libc::Ioctl = 0x5606;
/// `VT_WAITACTIVE`.
const WAIT_ACTIVE: libc::Ioctl = 0x5607;
/// `SYSLOG_ACTION_CONSOLE_LEVEL`, from `linux/syslog.h`.
const CONSOLE_LEVEL: libc::c_int = 8;

/// Only a panic still reaches the consoles. The kernel would draw over the
/// screen, and write into the middle of a line on the serial port.
///
/// # Errors
///
/// When the caller may not.
#[expect(unsafe_code, reason = "a system call that rustix does not have")]
pub fn silence_kernel() -> io::Result<()> {
    // Level 1 shows emergencies alone; 0 is not allowed.
    // SAFETY: this action reads no memory; the null pointer is what it asks for.
    let result = unsafe { libc::klogctl(CONSOLE_LEVEL, std::ptr::null_mut(), 1) };
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From now on the kernel writes nothing to its consoles, not even that it stops the machine.
/// The system call of [`silence_kernel`] has no such level.
///
/// # Errors
///
/// When the caller may not, or there is no `/proc`.
pub fn mute_kernel() -> io::Result<()> {
    std::fs::write("/proc/sys/kernel/printk", "0")
}

/// Shows virtual terminal `number` on the screen.
///
/// # Errors
///
/// When the machine has no screen, or its terminal refuses.
pub fn activate(number: u8) -> io::Result<()> {
    let screen = File::options().read(true).write(true).open("/dev/tty0")?;
    turn(screen.as_fd(), Request::Activate, number)?;
    turn(screen.as_fd(), Request::WaitActive, number)
}

/// A request about one of the terminals.
#[derive(Clone, Copy)]
enum Request {
    Activate,
    WaitActive,
}

#[expect(unsafe_code, reason = "ioctls that rustix does not have")]
fn turn(screen: BorrowedFd<'_>, request: Request, number: u8) -> io::Result<()> {
    let request = match request {
        Request::Activate => ACTIVATE,
        Request::WaitActive => WAIT_ACTIVE,
    };
    // SAFETY: the descriptor is open while it is borrowed, and both requests take a
    // number in place of a pointer.
    let result = unsafe { libc::ioctl(screen.as_raw_fd(), request, libc::c_ulong::from(number)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The device with the characters of the virtual terminal at `path`, row by row, see
/// `vcs(4)`; `None` for any other terminal.
#[must_use]
pub fn characters(path: &Path) -> Option<PathBuf> {
    let number = path.file_name()?.to_str()?.strip_prefix("tty")?;
    let digits = !number.is_empty() && number.bytes().all(|c| c.is_ascii_digit());
    digits.then(|| path.with_file_name(format!("vcs{number}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_virtual_terminal_shows_its_characters() {
        let of = |name| characters(&Path::new("/dev").join(name));
        assert_eq!(of("tty1"), Some(PathBuf::from("/dev/vcs1")));
        for other in ["tty", "ttyS0", "hvc0", "console"] {
            assert_eq!(of(other), None);
        }
    }
}
