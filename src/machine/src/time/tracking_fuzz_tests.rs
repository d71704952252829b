//! Fuzz target of chronyd's answers.

use std::time::SystemTime;

use polis_fuzz::{Accepted, Target};

use super::tests::own;
use super::*;

#[test]
fn answers_of_chronyd() {
    Target::new("machine.chronyd").samples([own()]).length_max(LENGTH + 1).run(|input| {
        let century = i64::try_from(100 * 366 * 86_400_u64 * 1_000_000).unwrap();
        if let Some(data) = data(SOURCE, input, 7) {
            let ahead = source(data).map_or(0, |(_, ahead)| ahead);
            assert!(ahead.abs() <= century);
        }
        let Some(data) = data(TRACKING, input, 7) else { return Accepted::No };
        let tracking = Tracking::read(data);
        assert!(tracking.offset.abs() <= century && tracking.error <= century.unsigned_abs());
        for now in [SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 33)] {
            let _status = tracking.status(Status::default(), now);
        }
        // As the answer to every other question.
        let _source = source(data);
        Accepted::Yes
    });
}
