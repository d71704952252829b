//! Fuzz target of the share of a disk's key that the machine keeps, in a variable of the
//! firmware or on the ESP.

use polis_fuzz::{Accepted, Target};

use super::*;
use crate::cluster::tests::{blob, half};

#[test]
fn shares() {
    let shares = [Guarded::Plain(half(1)), Guarded::Tpm(blob())];
    let check = |record: &[u8]| {
        let Ok(share) = from_record(record) else { return Accepted::No };
        assert_eq!(from_record(&to_record(&share)), Ok(share));
        Accepted::Yes
    };
    let records = shares.iter().map(|share| to_record(share).to_vec());
    Target::new("control.share").samples(records).run(check);
    let contents = shares.iter().map(|share| {
        let record = to_record(share);
        let (protection, payload) = record::read(MAGIC, &record).unwrap();
        [&[protection as u8][..], payload].concat()
    });
    Target::new("control.share_content").samples(contents).run(|input| {
        let Some((protection, payload)) = input.split_first() else { return Accepted::No };
        let protection = match protection % 2 {
            0 => Protection::Plain,
            _ => Protection::Tpm,
        };
        check(&record::write(MAGIC, protection, payload))
    });
}
