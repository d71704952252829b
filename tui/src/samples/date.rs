//! The dates of the samples: counts days from the moment at which all of them are
//! taken.

use std::sync::Arc;

use crate::snapshot::Snapshot;

/// When that is, as a header prints it.
pub(super) const NOW: &str = "2026-02-17 14:03:22 UTC";

/// The same day, in days since 1970-01-01.
const TODAY: i64 = 20_501;

/// The day that is `days` after that of [`NOW`], ready to print.
pub(super) fn day(days: i64) -> String {
    // Years begin in March, so that a leap day is the last of its year; the calendar
    // repeats after 400 years of 146,097 days.
    let day = TODAY + days + 719_468;
    let (era, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, past) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", year + era * 400 + past)
}

/// The time of [`NOW`], in seconds of its day.
const SECONDS: i64 = (14 * 60 + 3) * 60 + 22;

/// The same with the time of day at each entry of its log.
pub(super) fn dated(mut snapshot: Snapshot) -> Snapshot {
    let uptime = snapshot.header.uptime;
    let logs = Arc::make_mut(&mut snapshot.logs);
    logs.today = day(0);
    for entry in &mut logs.entries {
        let age = uptime.saturating_sub(entry.time).as_secs();
        let second = SECONDS - i64::try_from(age).unwrap_or(0);
        let entry = Arc::make_mut(entry);
        entry.day = day(second.div_euclid(86_400));
        let second = second.rem_euclid(86_400);
        entry.clock = format!("{:02}:{:02}:{:02}", second / 3_600, second / 60 % 60, second % 60);
    }
    snapshot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_counted_over_months_and_leap_days() {
        assert_eq!(day(0), NOW[..10]);
        assert_eq!(
            [day(-17), day(12), day(745)].map(|day| day[2..].to_owned()),
            ["26-01-31", "26-03-01", "28-03-03"]
        );
    }
}
