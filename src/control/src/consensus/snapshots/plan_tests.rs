use proptest::prelude::*;

use super::*;
use crate::consensus::{Member, MemberId, Status};

const HOUR: u64 = 3600;
const ALONE: (u64, u64) = (0, 1);

fn entry(number: u64, bytes: u64) -> Entry {
    Entry { name: Name { number, at: number * HOUR, revision: number }, bytes, sound: true }
}

fn numbers(names: &[Name]) -> Vec<u64> {
    names.iter().map(|name| name.number).collect()
}

/// A partition with this many MiB, of which so many are free.
fn space(size: u64, free: u64) -> Space {
    Space { size: size << 20, free: free << 20 }
}

#[test]
fn a_name_is_read_as_it_is_written_and_no_other_text_is_one() {
    let name = Name { number: 42, at: 1_793_491_200, revision: 7 };
    assert_eq!(name.to_string(), "00000042-1793491200-7.db");
    assert_eq!(Name::parse("00000042-1793491200-7.db"), Some(name));
    for other in [
        "",
        ".db",
        "unfinished.db",
        "42-1793491200-7.db",
        "00000042-1793491200-7",
        "00000042-1793491200-07.db",
        "00000042-1793491200-+7.db",
        "00000042-1793491200-7-8.db",
        "00000042--1-7.db",
        "../00000042-1793491200-7.db",
    ] {
        assert_eq!(Name::parse(other), None, "{other}");
    }
}

#[test]
fn voters_take_theirs_at_other_minutes_and_a_learner_has_no_turn() {
    let member = |id, learner| Member {
        id: MemberId(id),
        name: String::new(),
        peer_url: String::new(),
        learner,
    };
    let members = vec![member(2, false), member(5, true), member(7, false), member(9, false)];
    let at = |id| {
        let member = Some(MemberId(id));
        Status { member, members: members.clone(), ..Status::default() }.place()
    };
    assert_eq!([2, 7, 9].map(at), [(0, 3), (1, 3), (2, 3)]);
    assert_eq!(Status::default().place(), (0, 1));
    // Each at its third of an hour, if each took its last one an hour before.
    let now = 100 * HOUR;
    let due = [2, 7, 9].map(|id| due_in(now + 1, Some(now), HOUR, at(id)));
    assert_eq!(due, [HOUR - 1, 1200 - 1, 2400 - 1]);
}

#[test]
fn one_is_due_without_a_newest_after_a_pause_and_after_the_clock_was_set_back() {
    let now = 100 * HOUR + 60;
    assert_eq!(due_in(now, None, HOUR, ALONE), 0);
    assert_eq!(due_in(now, Some(now - HOUR), HOUR, ALONE), 0);
    assert_eq!(due_in(now, Some(now + 1), HOUR, ALONE), 0);
    assert_eq!(due_in(now, Some(now - 60), HOUR, ALONE), HOUR - 60);
    assert_eq!(due_in(now, Some(now - 61), HOUR, ALONE), 0);
}

#[test]
fn the_newest_24_sound_ones_stay_and_a_damaged_one_goes_with_its_time() {
    let mut entries: Vec<_> = (1..=24).map(|number| entry(number, 1)).collect();
    assert!(superfluous(&entries).is_empty());
    entries.push(entry(25, 1));
    assert_eq!(numbers(&superfluous(&entries)), [1]);
    // Not counted, so an older one stays in its place.
    entries[10].sound = false;
    assert!(superfluous(&entries).is_empty());
    entries.extend((26..=35).map(|number| entry(number, 1)));
    let removed = superfluous(&entries);
    assert_eq!(numbers(&removed), (1..=11).collect::<Vec<_>>(), "the damaged one is 11");
}

#[test]
fn the_oldest_make_room_and_the_newest_stays() {
    let entries: Vec<_> = (1..=3).map(|number| entry(number, 100 << 20)).collect();
    let next = 100 << 20;
    assert_eq!(numbers(&room(&entries, next, space(8192, 4000)).unwrap()), [0; 0]);
    assert_eq!(numbers(&room(&entries, next, space(4096, 4000)).unwrap()), [1, 2]);
    // 328 MiB must be free; each that goes gives 100.
    assert_eq!(numbers(&room(&entries, next, space(8192, 200)).unwrap()), [1, 2]);
    let refused = room(&entries, next, space(8192, 100)).unwrap_err();
    assert_eq!(refused, Refusal::NoRoom { needs: 328 << 20, free: 300 << 20 });
    assert!(refused.to_string().starts_with("328 MiB of the data partition must be free"));
    let refused = room(&entries, next, space(2048, 2000)).unwrap_err();
    assert_eq!(refused, Refusal::TooLarge { needs: 200 << 20, budget: 128 << 20 });
    let mut damaged = entries;
    damaged[2].sound = false;
    assert_eq!(numbers(&room(&damaged, next, space(4096, 4000)).unwrap()), [1, 3]);
}

#[test]
fn a_large_disk_has_room_for_the_largest_database_and_for_two_of_half_its_size() {
    let large = space(64 << 10, 60 << 10);
    assert_eq!(room(&[], QUOTA, large), Ok(Vec::new()));
    assert_eq!(room(&[entry(1, 1 << 30)], 1 << 30, large), Ok(Vec::new()));
    // A worker leaves 1 GiB more than this to the node on a large partition (`host::quota`).
    assert_eq!(QUOTA + BUDGET_MAX, 4 << 30);
    assert_eq!([16 << 30, 32 << 30, 1 << 40].map(budget), [1 << 30, BUDGET_MAX, BUDGET_MAX]);
}

#[test]
fn a_refusal_names_the_disk_where_a_larger_one_helps_and_the_bound_where_none_does() {
    let taken = |next: u64, size| {
        let (kept, next) = ([entry(1, next << 20)], next << 20);
        room(&kept, next, space(size, size)).unwrap_err()
    };
    let small = taken(900, 16 << 10);
    assert_eq!(small, Refusal::TooLarge { needs: 1800 << 20, budget: 1 << 30 });
    assert!(small.to_string().ends_with("; a larger disk makes room"), "{small}");
    for size in [16 << 10, 64 << 10] {
        let capped = taken(1100, size);
        assert_eq!(capped, Refusal::Capped { needs: 2200 << 20 });
        let text = capped.to_string();
        assert!(text.starts_with("all snapshots of this node may have 2048 MiB on a disk of any"));
        assert!(!text.contains("larger disk"), "{text}");
    }
}

#[test]
fn the_smallest_partition_has_room_for_a_young_database() {
    // etcd has preallocated its log by then.
    assert_eq!(room(&[entry(1, 1 << 20)], 2 << 20, space(512, 340)), Ok(Vec::new()));
}

proptest! {
    #[test]
    fn the_next_one_is_due_within_a_period_and_then_not_again(
        now in HOUR..u64::from(u32::MAX), ago in prop::option::of(0..3 * HOUR), voters in 1..8_u64,
        before in 0..8_u64,
    ) {
        let place = (before % voters, voters);
        let newest = ago.map(|ago| now.saturating_sub(ago));
        let due = due_in(now, newest, HOUR, place);
        prop_assert!(due <= HOUR);
        let after = due_in(now + due, Some(now + due), HOUR, place);
        prop_assert!(after > 0 && after <= HOUR, "again after {after}");
    }

    #[test]
    fn kept_snapshots_and_the_next_one_fit_into_their_share(
        sizes in prop::collection::vec(0..300_u64, 0..30), next in 0..600_u64,
        size in 0..40_000_u64, free in 0..40_000_u64, damaged in any::<u32>(),
    ) {
        let entries: Vec<_> = sizes.iter().zip(0..).map(|(size, number)| Entry {
            sound: damaged >> number & 1 == 0,
            ..entry(number, size << 20)
        }).collect();
        let space = space(size, free);
        let Ok(removed) = room(&entries, next << 20, space) else { return Ok(()) };
        let stay = entries.iter().filter(|entry| !removed.contains(&entry.name));
        let taken: u64 = stay.map(|entry| entry.bytes).sum();
        prop_assert!(taken + (next << 20) <= (space.size / SHARE).min(BUDGET_MAX));
        prop_assert!(newest(&entries).is_none_or(|newest| !removed.contains(&newest.name)));
    }
}
