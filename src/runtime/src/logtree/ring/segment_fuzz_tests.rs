//! Fuzz target of the names of the files of the log on the data partition.

use polis_fuzz::{Accepted, Target};

use super::Id;

#[test]
fn names_of_segments() {
    let samples = ["00000007-000012.log", "00000000-000000.log", "18446744073709551614-000000.log"];
    Target::new("runtime.segments").samples(samples).length_max(64).run(|input| {
        let name = String::from_utf8_lossy(input);
        let Some(id) = Id::parse(&name) else { return Accepted::No };
        assert_eq!(id.name(), name, "a segment has one name");
        assert!(id.boot.checked_add(1).is_some() && id.number.checked_add(1).is_some());
        Accepted::Yes
    });
}

#[test]
fn a_segment_without_a_next_number_is_foreign() {
    assert_eq!(Id::parse(&format!("{}-000000.log", u64::MAX)), None);
    assert_eq!(Id::parse(&format!("00000000-{}.log", u64::MAX)), None);
}
