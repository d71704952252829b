//! The rule by which segments make room for a new one.
//!
//! Pure. Older boots have half of the room for themselves: a boot that logs much loses
//! its own middle first, and keeps its first segment, which describes its start, and
//! its newest.
//!
//! ```text
//! too many boots ------------> all of the oldest one
//! too many bytes, this boot above its half --> its second segment
//!                 else ------> the oldest segment of all
//! ```
//!
//! Invariants:
//! - After the deletions there is room for one more segment, unless the bound is
//!   below three segments.
//! - The newest segment is never a victim.

use super::segment::Id;
use super::{BOOTS_MAX, SEGMENT_MAX};

/// The segments to delete, given all of them in order with their bytes, before a
/// segment of the boot `now` is added. `bytes_max` is the bound for all together.
pub(super) fn victims(segments: &[(Id, u64)], now: u64, bytes_max: u64) -> Vec<Id> {
    let mut left: Vec<_> = segments.to_vec();
    let mut victims = Vec::new();
    let mut boots: Vec<_> =
        left.iter().map(|(id, _)| id.boot).filter(|boot| *boot != now).collect();
    boots.dedup();
    // This boot is one of them.
    let surplus = (boots.len() + 1).saturating_sub(BOOTS_MAX);
    for boot in boots.into_iter().take(surplus) {
        victims.extend(left.extract_if(.., |(id, _)| id.boot == boot).map(|(id, _)| id));
    }
    let bytes = |left: &[(Id, u64)]| left.iter().map(|(_, bytes)| bytes).sum::<u64>();
    while bytes(&left) + SEGMENT_MAX > bytes_max && left.len() > 1 {
        let own: Vec<_> = left.iter().filter(|(id, _)| id.boot == now).copied().collect();
        // Neither the first nor the newest.
        let middle = (bytes(&own) + SEGMENT_MAX > bytes_max / 2 && own.len() > 2).then(|| own[1].0);
        let victim = middle.unwrap_or(left[0].0);
        left.retain(|(id, _)| *id != victim);
        victims.push(victim);
    }
    victims
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(boot: u64, number: u64) -> Id {
        Id { boot, number }
    }

    #[test]
    fn a_ring_with_room_keeps_everything() {
        let segments = [(id(1, 0), 100), (id(2, 0), SEGMENT_MAX)];
        assert_eq!(victims(&segments, 3, 8 * SEGMENT_MAX), []);
    }

    #[test]
    fn the_oldest_boot_goes_when_there_are_too_many() {
        let segments: Vec<_> = (0..20).map(|boot| (id(boot, 0), 10)).collect();
        let gone = victims(&segments, 20, 64 * SEGMENT_MAX);
        assert_eq!(gone, (0..5).map(|boot| id(boot, 0)).collect::<Vec<_>>());
    }

    #[test]
    fn a_boot_that_talks_much_loses_its_middle_before_any_older_boot() {
        let mut segments = vec![(id(1, 0), SEGMENT_MAX), (id(2, 0), SEGMENT_MAX)];
        segments.extend((0..6).map(|number| (id(3, number), SEGMENT_MAX)));
        assert_eq!(victims(&segments, 3, 8 * SEGMENT_MAX), [id(3, 1)]);
    }

    proptest! {
        #[test]
        fn there_is_room_afterwards_and_the_newest_is_kept(
            boots in prop::collection::vec(prop::collection::vec(0..=SEGMENT_MAX, 1..6), 0..30),
            bound in 3_u64..64,
        ) {
            let segments: Vec<_> = (0..)
                .zip(&boots)
                .flat_map(|(boot, sizes)| {
                    (0..).zip(sizes).map(move |(number, bytes)| (id(boot, number), *bytes))
                })
                .collect();
            for now in [boots.len() as u64, boots.len().saturating_sub(1) as u64] {
                let gone = victims(&segments, now, bound * SEGMENT_MAX);
                let left: Vec<_> = segments.iter().filter(|(id, _)| !gone.contains(id)).collect();
                let bytes: u64 = left.iter().map(|(_, bytes)| bytes).sum();
                prop_assert!(bytes + SEGMENT_MAX <= bound * SEGMENT_MAX);
                let mut kept: Vec<_> = left.iter().map(|(id, _)| id.boot).chain([now]).collect();
                kept.dedup();
                prop_assert!(kept.len() <= BOOTS_MAX);
                if let Some((newest, _)) = segments.last() {
                    prop_assert!(!gone.contains(newest));
                }
            }
        }
    }
}
