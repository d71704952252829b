//! Fuzz target of the head of etcd's write-ahead log.

use polis_fuzz::{Accepted, Target};

use super::is_bare;
use super::tests::{ENTRY, frame, new, snapshot, state};

#[test]
fn write_ahead_logs() {
    let end = vec![0; 64];
    let log = |records: &[Vec<u8>]| [&new()[..], &records.concat(), &end].concat();
    let samples = [log(&[]), log(&[state(0), snapshot(7), state(3)])];
    let entry = frame(ENTRY, b"entry");
    Target::new("control.wal").samples(samples).run(|input| {
        let bare = is_bare(input);
        // A log with an entry before it is never bare.
        assert!(!is_bare(&[&entry[..], input].concat()));
        // As for etcd itself, its end is a length of zero.
        assert!(!bare || input.windows(8).any(|length| length == [0; 8]));
        Accepted::from(bare)
    });
}
