//! Reads the clocks.

use std::io;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// Time since the kernel started (`CLOCK_BOOTTIME`).
#[must_use]
pub fn uptime() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    // Neither part is ever negative for this clock.
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The wall clock. It may be wrong until it is synchronised: use it for dates
/// in certificates and for people, never to order events.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
pub fn now() -> SystemTime {
    SystemTime::now()
}

/// Sets the wall clock.
///
/// # Errors
///
/// When the kernel refuses, for example to anyone but root.
pub fn set(time: SystemTime) -> io::Result<()> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
    let time = Timespec {
        tv_sec: i64::try_from(since.as_secs()).map_err(io::Error::other)?,
        tv_nsec: since.subsec_nanos().into(),
    };
    Ok(clock_settime(ClockId::Realtime, time)?)
}
