//! Fuzz targets of the LUKS2 header: as damage leaves it, and with a checksum that fits.

use polis_fuzz::{Accepted, Target};

use super::tests::{header, with};
use super::{COPY_SIZE, read};
use crate::storage::Kind;
use crate::storage::probe::{Content, recognise};

#[test]
fn luks_headers() {
    let samples = [Kind::Encrypted, Kind::Authenticated].map(header);
    Target::new("machine.luks").samples(samples).run(|input| {
        let luks = read(input);
        if let Some(luks) = &luks {
            assert!(luks.whole || luks.kind.is_none(), "a kind is of a whole copy");
            assert_eq!(recognise(input, &[]), Content::Luks(luks.clone()));
        }
        luks.is_some().into()
    });
}

#[test]
fn luks_metadata() {
    let json = |kind| {
        let head = header(kind);
        let json = head[4096..COPY_SIZE].split(|byte| *byte == 0).next().unwrap_or_default();
        json.to_vec()
    };
    let samples = [Kind::Encrypted, Kind::Authenticated].map(json);
    Target::new("machine.luks_metadata").samples(samples).run(|input| {
        let json = String::from_utf8_lossy(input);
        let json = json.get(..json.floor_char_boundary(COPY_SIZE - 4096)).unwrap_or_default();
        let luks = read(&with(json)).expect("the binary part is sound");
        Accepted::from(luks.kind.is_some())
    });
}
