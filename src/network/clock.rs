//! Sets a clock that is plainly wrong to the date of the image.
//!
//! A machine without a battery starts in 1970, and every certificate it makes
//! would end before anyone else's begins. It cannot be earlier than the day the
//! image was built, so that is the floor until the clock is synchronised.
//!
//! What this module does not do: synchronise.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// 2026-11-01: no image is older than this code.
const FLOOR_SECONDS: u64 = 1_793_491_200;

/// The line of `os-release` that has the image's date, in seconds since 1970.
const KEY: &str = "BUILD_DATE=";

/// The earliest time that it can be, from the content of `os-release`.
#[must_use]
pub fn floor(os_release: &str) -> SystemTime {
    let date = os_release.lines().find_map(|line| line.strip_prefix(KEY));
    let seconds = date.and_then(|date| date.trim_matches('"').parse().ok()).unwrap_or(0);
    // A date beyond the arithmetic of time is no date.
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
