//! Durations, ages and dates, in the form that people use.
//!
//! Not by the crate `humantime`: it also reads months and years, which have no fixed length,
//! and prints every unit of a span, where one or two are enough.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

/// The longest duration that is accepted: a hundred years.
const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Reads `90s`, `500ms`, `15m`, `2h`, `7d`. A number without a unit is an error.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    duration_up_to(DURATION_MAX, text)
}

/// The same for a duration of at most `max`, which is whole days.
pub(super) fn duration_up_to(max: Duration, text: &str) -> Result<Duration, String> {
    let allowed = "a number with the unit ms, s, m, h or d, such as 90s";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_not| format!("allowed is {allowed}"))?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(format!("allowed is {allowed}")),
    };
    let duration = number.checked_mul(milliseconds).map(Duration::from_millis);
    let days = max.as_secs() / 86_400;
    let fits = duration.filter(|duration| *duration <= max);
    fits.ok_or_else(|| format!("it is too long; allowed are at most {days}d"))
}

/// The two largest units of a time span.
pub(super) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match seconds {
        0..60 if duration < Duration::from_secs(10) => format!("{:.1} s", duration.as_secs_f64()),
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{minutes} min {} s", seconds % 60),
        3_600..86_400 => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// Date and time in UTC.
pub(super) fn date(at: SystemTime) -> String {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second] UTC");
    OffsetDateTime::from(at).format(&format).unwrap_or_else(|_outside| "unknown".to_owned())
}

/// A time: in a document as RFC 3339, which programs read; on a screen as [`date`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time(pub(super) SystemTime);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&date(self.0))
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&rfc3339(self.0))
    }
}

/// A time for people; empty without a time.
pub(super) fn text(at: Option<Time>) -> String {
    at.map(|at| at.to_string()).unwrap_or_default()
}

/// A time in UTC as RFC 3339, with as many digits of the second as it has.
pub(super) fn rfc3339(at: SystemTime) -> String {
    let at = OffsetDateTime::from(at);
    at.format(&Rfc3339).unwrap_or_else(|_outside| "unknown".to_owned())
}

/// Seconds since 1970; zero and less mean no time.
pub(super) fn since_1970(seconds: i64) -> Option<SystemTime> {
    let seconds = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0)?;
    // Beyond the year 9999 no date can be written.
    let known = seconds < 253_402_300_800;
    known.then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// The same, to the nanosecond.
pub(super) fn nanos_since_1970(nanos: i64) -> Option<SystemTime> {
    let nanos = u64::try_from(nanos).ok().filter(|nanos| *nanos > 0)?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos))
}

/// The nanoseconds from 1970 to a time; zero before.
pub(super) fn since_1970_nanos(at: SystemTime) -> i64 {
    let nanos = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    i64::try_from(nanos).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read_as_they_are_written() {
        for (text, seconds) in [
            ("0s", 0.0),
            ("90s", 90.0),
            ("500ms", 0.5),
            ("15m", 900.0),
            ("2h", 7200.0),
            ("7d", 604_800.0),
        ] {
            assert_eq!(duration(text).unwrap().as_secs_f64(), seconds, "{text}");
        }
        for text in
            ["", "0", "90", "s", "-1", "1.5s", "1 s", "1w", "99999999999d", "18446744073709551616"]
        {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(duration("99999999999d").unwrap_err().contains("at most 36500d"));
        assert!(duration("36500d").is_ok() && duration("36501d").is_err());
    }

    #[test]
    fn spans_are_short() {
        let spans =
            [0.2, 9.94, 42.0, 61.0, 7_260.0, 200_000.0].map(|s| span(Duration::from_secs_f64(s)));
        assert_eq!(spans, ["0.2 s", "9.9 s", "42 s", "1 min 1 s", "2 h 1 min", "2 d 7 h"]);
    }

    #[test]
    fn a_date_is_in_utc_and_nothing_is_no_date() {
        assert_eq!(date(since_1970(1_700_000_000).unwrap()), "2023-11-14 22:13:20 UTC");
        assert_eq!([-1, 0, i64::MAX].map(since_1970), [None; 3]);
    }

    #[test]
    fn a_time_in_a_document_is_rfc_3339() {
        let at = since_1970(1_700_000_000).unwrap();
        assert_eq!(serde_json::to_value(Time(at)).unwrap(), "2023-11-14T22:13:20Z");
        let at = at + Duration::from_nanos(123_456_789);
        assert_eq!(rfc3339(at), "2023-11-14T22:13:20.123456789Z");
        assert_eq!(Time(at).to_string(), "2023-11-14 22:13:20 UTC");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>(), seconds in any::<i64>(), millis in any::<u64>()) {
            let _read = duration(&text);
            let _written = since_1970(seconds).map(date);
            let _written = since_1970(seconds).map(rfc3339);
            let _written = span(Duration::from_millis(millis));
        }
    }
}
