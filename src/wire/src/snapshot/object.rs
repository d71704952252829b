//! The key of a snapshot of etcd in a bucket, behind the prefix of the target.
//!
//! ```text
//! cluster.internal-0d2f1b9c7a3e5f60/20261126T120000Z-1234-6ac1..9f.age
//! domain           etcd's number    begun            |    SHA-256 of the object, 64 digits
//!                  of the cluster                    revision of etcd
//! ```
//!
//! etcd's number is another one after a cluster was founded again from a snapshot, so the
//! snapshots of both have folders of their own.
//!
//! Invariants:
//! - Keys of a cluster sort by the time at which their snapshots were begun.
//! - A key that is read is printed as the same text, and leads to no other folder.
//!
//! What this module does not do: read or send an object (`s3`).

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time};

use polis_base::hex;

const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year][month][day]T[hour][minute][second]Z");

/// The end of the name of an object.
const END: &str = ".age";

/// The end of the year 9999, the last one of four digits.
const SECONDS_MAX: u64 = 253_402_300_799;

/// The folder of a cluster, with its slash; `number` is etcd's number of it.
#[must_use]
pub fn folder(domain: &str, number: u64) -> String {
    format!("{domain}-{number:016x}/")
}

/// The name of a snapshot in the folder of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// When it was begun, in seconds since 1970.
    pub at: u64,
    /// The revision of etcd in it.
    pub revision: u64,
    /// SHA-256 of the object.
    pub sha256: [u8; 32],
}

impl Name {
    /// Reads a name; `None` unless it is written exactly so.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_suffix(END)?.splitn(3, '-');
        let at = seconds(parts.next()?)?;
        let revision = parts.next()?.parse().ok()?;
        let sha256 = hex::decode_name(parts.next()?)?;
        let name = Self { at, revision, sha256 };
        (name.to_string() == text).then_some(name)
    }

    /// When it was begun.
    #[must_use]
    pub fn time(&self) -> SystemTime {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.at)).unwrap_or(UNIX_EPOCH)
    }

    /// A text that sorts before the names of all snapshots that were begun then or later, and
    /// behind those of all that were begun before.
    #[must_use]
    pub fn before(at: u64) -> String {
        let at = i64::try_from(at.min(SECONDS_MAX)).unwrap_or_default();
        // Every second of these years has a text.
        let time = OffsetDateTime::from_unix_timestamp(at).ok();
        time.and_then(|time| time.format(TIME).ok()).unwrap_or_default()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, revision, sha256 } = self;
        write!(f, "{}-{revision}-{}{END}", Self::before(*at), hex::encode(sha256))
    }
}

/// The seconds since 1970 of a time as names have it.
fn seconds(text: &str) -> Option<u64> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<u8>().ok();
    let year = text.get(..4)?.parse::<u16>().ok()?;
    let month = Month::try_from(number(4..6)?).ok()?;
    let date = Date::from_calendar_date(year.into(), month, number(6..8)?).ok()?;
    let time = Time::from_hms(number(9..11)?, number(11..13)?, number(13..15)?).ok()?;
    u64::try_from(PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_has_the_time_the_revision_and_the_checksum() {
        let name = Name { at: 1_795_694_400, revision: 1234, sha256: [0xab; 32] };
        let text = format!("20261126T120000Z-1234-{}.age", "ab".repeat(32));
        assert_eq!(name.to_string(), text);
        assert_eq!(Name::parse(&text), Some(name));
        assert_eq!(folder("cluster.internal", 0xd2f), "cluster.internal-0000000000000d2f/");
        for (from, to) in [
            ("T12", "T24"),
            ("2026", "1969"),
            ("-1234-", "-01234-"),
            ("-1234-", "--1234-"),
            ("ab", "AB"),
            ("ab", ""),
            (".age", ".db"),
            ("Z-", "+-"),
            ("2026", "../2026"),
        ] {
            assert_eq!(Name::parse(&text.replacen(from, to, 1)), None, "{from} to {to}");
        }
    }

    proptest! {
        #[test]
        fn names_sort_by_their_times_and_read_back(
            one in 0..=SECONDS_MAX, other in 0..=SECONDS_MAX, revision in any::<u64>(),
        ) {
            let name = |at| Name { at, revision, sha256: [7; 32] };
            let [first, second] = [one, other].map(|at| name(at).to_string());
            prop_assert_eq!(Name::parse(&first), Some(name(one)));
            prop_assert_eq!(one.cmp(&other), Name::before(one).cmp(&Name::before(other)));
            prop_assert_eq!(one >= other, first > Name::before(other), "{} {}", first, second);
        }

        #[test]
        fn any_text_is_read_or_refused(text in any::<String>(), tail in "[0-9TZ-]{0,30}") {
            for text in [text, format!("{tail}-1-{}.age", "00".repeat(32))] {
                if let Some(read) = Name::parse(&text) {
                    prop_assert_eq!(read.to_string(), text);
                }
            }
        }
    }
}
