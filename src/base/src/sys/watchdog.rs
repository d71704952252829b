//! The watchdog, which resets a machine that hangs: a device of the machine, or the kernel's own
//! timer (`softdog`) where it has none.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use crate::serial::is_control;

/// `WDIOC_SETTIMEOUT`: `_IOWR('W', 6, int)`.
const SET_TIMEOUT: libc::Ioctl = 0xc004_5706;

/// `WDIOC_GETSUPPORT`: `_IOR('W', 0, struct watchdog_info)`.
const GET_SUPPORT: libc::Ioctl = 0x8028_5700;

/// The name of the kernel's own timer.
const SOFTWARE: &str = "Software Watchdog";

/// `struct watchdog_info` of `linux/watchdog.h`.
#[repr(C)]
#[derive(Default)]
struct Support {
    options: u32,
    firmware_version: u32,
    identity: [u8; 32],
}

/// The watchdog resets a machine whose `init` has been silent for so long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running watchdog. Dropping it without [`Watchdog::disarm`] leaves it running.
#[derive(Debug)]
pub struct Watchdog {
    file: File,
    name: String,
}

impl Watchdog {
    /// Opens the device, which starts the watchdog, and asks for its timeout: a minute, or
    /// `software` of the kernel's own timer.
    ///
    /// # Errors
    ///
    /// When the device is missing, or another process has it open.
    pub fn open(path: &Path, software: Duration) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).open(path)?;
        let mut watchdog = Self { file, name: String::new() };
        watchdog.name = watchdog.identity().unwrap_or_else(|_error| "without a name".to_owned());
        // Hardware with a fixed timeout keeps it; most are longer than our interval.
        let timeout = if watchdog.is_software() { software } else { TIMEOUT };
        watchdog.set_timeout(timeout).ok();
        watchdog.pet()?;
        Ok(watchdog)
    }

    /// The name that its driver gives it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is the kernel's own timer, which ends with the kernel.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.name == SOFTWARE
    }

    #[expect(unsafe_code, reason = "an ioctl that rustix does not have")]
    fn identity(&self) -> io::Result<String> {
        let mut support = Support::default();
        // SAFETY: the descriptor is open, and the request writes one `struct watchdog_info`,
        // which `support` is and which outlives the call.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), GET_SUPPORT, &raw mut support) };
        if result == 0 { Ok(text(&support.identity)) } else { Err(io::Error::last_os_error()) }
    }

    #[expect(unsafe_code, reason = "an ioctl that rustix does not have")]
    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let mut seconds = libc::c_int::try_from(timeout.as_secs()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open, and the request reads and writes one
        // `int`, which `seconds` is and which outlives the call.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), SET_TIMEOUT, &raw mut seconds) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Pets the watchdog: this process is alive.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    pub fn pet(&mut self) -> io::Result<()> {
        self.file.write_all(b"\0")
    }

    /// Stops the watchdog, if the driver allows it.
    pub fn disarm(mut self) {
        // The magic character; a driver without it goes on, and the machine is
        // off before the time is up.
        self.file.write_all(b"V").ok();
    }
}

/// The text before the first zero, without characters that a terminal would act on.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default());
    text.chars().filter(|c| !is_control(*c)).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_watchdog_ends_at_its_first_zero() {
        let mut bytes = [0; 32];
        bytes[..17].copy_from_slice(SOFTWARE.as_bytes());
        bytes[20] = b'x';
        assert_eq!(text(&bytes), SOFTWARE);
        assert_eq!(text(b"i6300\x1b[2JESB timer\xff\0"), "i6300[2JESB timer\u{fffd}");
        assert_eq!(text("i6300\u{202e}ESB\u{2028}".as_bytes()), "i6300ESB");
        assert_eq!(text(&[b'a'; 32]), "a".repeat(32));
    }

    #[test]
    fn a_file_that_is_no_watchdog_has_no_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let watchdog = Watchdog::open(file.path(), TIMEOUT).unwrap();
        assert_eq!(watchdog.name(), "without a name");
        assert!(!watchdog.is_software());
        assert!(Watchdog::open(Path::new("/nowhere/watchdog"), TIMEOUT).is_err());
    }
}
