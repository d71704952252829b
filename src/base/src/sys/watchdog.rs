//! The hardware watchdog, which resets a machine that hangs.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

/// `WDIOC_SETTIMEOUT`: `_IOWR('W', 6, int)`.
const SET_TIMEOUT: libc::Ioctl = 0xc004_5706;

/// The watchdog resets a machine whose `init` has been silent for so long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running watchdog. Dropping it without [`Watchdog::disarm`] leaves it running.
#[derive(Debug)]
pub struct Watchdog {
    file: File,
}

impl Watchdog {
    /// Opens the device, which starts the watchdog, and asks for `TIMEOUT`.
    ///
    /// # Errors
    ///
    /// When the device is missing, or another process has it open.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).open(path)?;
        let mut watchdog = Self { file };
        // Hardware with a fixed timeout keeps it; most are longer than our interval.
        watchdog.set_timeout().ok();
        watchdog.pet()?;
        Ok(watchdog)
    }

    #[expect(unsafe_code, reason = "an ioctl that rustix does not have")]
    fn set_timeout(&self) -> io::Result<()> {
        let mut seconds = libc::c_int::try_from(TIMEOUT.as_secs()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open, and the request reads and writes one
        // `int`, which `seconds` is and which outlives the call.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), SET_TIMEOUT, &raw mut seconds) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Pets the watchdog: this process is alive.
    ///
    /// # Errors
    ///
    /// What the driver says.
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
