//! The clocks of the machine, and a check for a wall clock that is plainly wrong.
//!
//! A machine without a battery starts in 1970, and its certificates would expire before
//! those of all others begin. The time cannot be earlier than the day the image was
//! built, so that is the floor until the clock is synchronised.
//!
//! What this module does not do: decide when to set the clock to the floor, or synchronise
//! it (`time`, in the node).

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

/// 2026-11-01: no image is older than this code.
const FLOOR_SECONDS: u64 = 1_793_491_200;

/// The line of `os-release` that has the image's date, in seconds since 1970.
const KEY: &str = "BUILD_DATE=";

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

/// The earliest possible time, from the content of `os-release`.
#[must_use]
pub fn floor(os_release: &str) -> SystemTime {
    let date = os_release.lines().find_map(|line| line.strip_prefix(KEY));
    let seconds = date.and_then(|date| date.trim_matches('"').parse().ok()).unwrap_or(0);
    // A date outside of the range of `SystemTime` is ignored.
    UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds.max(FLOOR_SECONDS)))
        .unwrap_or(UNIX_EPOCH + Duration::from_secs(FLOOR_SECONDS))
}

/// The time to set the clock to, if it must be set.
#[must_use]
pub fn correction(now: SystemTime, floor: SystemTime) -> Option<SystemTime> {
    (now < floor).then_some(floor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: Duration = Duration::from_secs(FLOOR_SECONDS);

    #[test]
    fn the_image_s_date_is_the_floor() {
        let date = Duration::from_secs(FLOOR_SECONDS + 86_400);
        let release = format!("ID=polis\nBUILD_DATE={}\n", date.as_secs());
        assert_eq!(floor(&release), UNIX_EPOCH + date);
    }

    #[test]
    fn without_a_sensible_date_the_code_s_own_is_the_floor() {
        for release in ["", "BUILD_DATE=", "BUILD_DATE=1", "BUILD_DATE=x", "BUILD_DATE=-5"] {
            assert_eq!(floor(release), UNIX_EPOCH + DEFAULT, "{release}");
        }
        let _far = floor(&format!("BUILD_DATE={}", u64::MAX));
    }

    #[test]
    fn only_a_clock_before_the_floor_is_set() {
        let floor = UNIX_EPOCH + DEFAULT;
        assert_eq!(correction(UNIX_EPOCH, floor), Some(floor));
        assert_eq!(correction(floor, floor), None);
        assert_eq!(correction(floor + Duration::from_secs(1), floor), None);
    }
}
