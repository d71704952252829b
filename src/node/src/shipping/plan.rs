//! The decisions about the bucket: from where it is listed, which of its objects are snapshots,
//! and whether it has one already.
//!
//! This module only computes.
//!
//! Invariants:
//! - A snapshot is sent unless the bucket has one that is as new and not a day older, whatever
//!   else is in the bucket.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use polis_control::consensus::snapshots::Taken;
use polis_wire::s3::Object;
use polis_wire::snapshot::object::Name;

use super::Shipped;

/// A snapshot of etcd without changes since the last one is sent once a day all the same, so that
/// a rule of the bucket that removes old objects never leaves it empty.
const AGAIN: Duration = Duration::from_secs(24 * 60 * 60);

/// The key behind which the listing begins.
pub(super) fn begin(folder: &str, taken: &Taken) -> String {
    let seconds = seconds(taken.at).saturating_sub(AGAIN.as_secs());
    format!("{folder}{}", Name::before(seconds))
}

/// The snapshots among these objects, in the order of their names; objects with another name
/// belong to a person.
pub(super) fn snapshots(folder: &str, objects: &[Object]) -> Vec<Shipped> {
    let read = |object: &Object| {
        let name = Name::parse(object.key.strip_prefix(folder)?)?;
        Some(Shipped { at: name.time(), revision: name.revision, bytes: object.size })
    };
    objects.iter().filter_map(read).collect()
}

/// The snapshot in the bucket that makes this one superfluous.
pub(super) fn instead(shipped: &[Shipped], taken: &Taken) -> Option<Shipped> {
    let oldest = taken.at.checked_sub(AGAIN).unwrap_or(UNIX_EPOCH);
    let is_it = |it: &&Shipped| it.revision >= taken.revision && it.at > oldest;
    shipped.iter().filter(is_it).max_by_key(|it| (it.revision, it.at)).copied()
}

/// The newest of them.
pub(super) fn newest(shipped: &[Shipped]) -> Option<Shipped> {
    shipped.iter().max_by_key(|it| (it.revision, it.at)).copied()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: u64 = 3600;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn taken(seconds: u64, revision: u64) -> Taken {
        Taken { number: 1, at: at(seconds), bytes: 7, revision }
    }

    fn object(folder: &str, seconds: u64, revision: u64) -> Object {
        let name = Name { at: seconds, revision, sha256: [3; 32] };
        Object { key: format!("{folder}{name}"), size: 9 }
    }

    #[test]
    fn a_snapshot_is_sent_once_a_revision_and_once_a_day() {
        let has = |seconds, revision| {
            snapshots(
                "f/",
                &[object("f/", seconds, revision), Object { key: "f/notes".into(), size: 1 }],
            )
        };
        let now = 100 * HOUR;
        assert_eq!(instead(&[], &taken(now, 5)), None);
        assert_eq!(instead(&has(now - HOUR, 4), &taken(now, 5)), None, "etcd has changed");
        assert!(instead(&has(now - HOUR, 5), &taken(now, 5)).is_some(), "etcd has not changed");
        assert!(instead(&has(now - HOUR, 6), &taken(now, 5)).is_some(), "another voter's is newer");
        assert_eq!(instead(&has(now - 24 * HOUR, 5), &taken(now, 5)), None, "a day has passed");
    }

    proptest! {
        #[test]
        fn a_snapshot_is_superfluous_only_beside_one_as_new_of_the_last_day(
            now in 0_u64..1 << 34,
            revision in any::<u64>(),
            there in prop::collection::vec((0_u64..1 << 34, any::<u64>()), 0..20),
            noise in prop::collection::vec(any::<String>(), 0..5),
        ) {
            let mut objects: Vec<_> =
                there.iter().map(|(at, revision)| object("f/", *at, *revision)).collect();
            objects.extend(noise.into_iter().map(|key| Object { key, size: 1 }));
            let shipped = snapshots("f/", &objects);
            prop_assert_eq!(shipped.len(), there.len());
            let taken = taken(now, revision);
            let as_new = there.iter().any(|(at, has)| {
                *has >= revision && at.saturating_add(24 * HOUR) > now.max(24 * HOUR)
            });
            prop_assert_eq!(instead(&shipped, &taken).is_some(), as_new);
            // Objects that the listing leaves out would not make any superfluous.
            let begin = begin("f/", &taken);
            for (at, has) in &there {
                let listed = object("f/", *at, *has).key > begin;
                let alone = snapshots("f/", &[object("f/", *at, *has)]);
                prop_assert!(listed || instead(&alone, &taken).is_none());
            }
        }
    }
}
