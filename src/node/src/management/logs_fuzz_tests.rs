//! Fuzz target of the log of an earlier boot, as its disk has it: moments and counts of any
//! size.

use polis_fuzz::{Accepted, Target};
use polis_runtime::logtree::Origin;

use super::*;

/// A number of eight bytes, zero behind the end of the input.
fn number(input: &mut &[u8]) -> u64 {
    let (number, rest) = input.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
    *input = rest;
    u64::from_be_bytes(*number)
}

#[test]
fn logs_of_an_earlier_boot() {
    let numbers = [1_800_000_000_u64, 2_702_113, 12, 7];
    let sample: Vec<u8> = numbers.into_iter().flat_map(u64::to_be_bytes).collect();
    Target::new("node.past_logs").samples([sample]).length_max(64).run(|mut input| {
        let mut message = Message::new(started_at(number(&mut input)), Visibility::All);
        let entry = Entry {
            number: 1,
            at: Duration::from_micros(number(&mut input)),
            name: "root".into(),
            origin: Origin::Service,
            body: Body::Raw("text".to_owned()),
        };
        message.take(Item::Entry(Arc::new(entry)));
        message.take(Item::Lost(number(&mut input)));
        message.take(Item::Lost(number(&mut input)));
        assert!(message.response.entries.iter().all(|entry| entry.time_unix_nanos >= 0));
        Accepted::Yes
    });
}

#[test]
fn a_moment_that_no_clock_has_counts_as_1970() {
    assert_eq!(started_at(u64::MAX), SystemTime::UNIX_EPOCH);
    assert_eq!(started_at(7), SystemTime::UNIX_EPOCH + Duration::from_secs(7));
}
