//! Fuzz targets of the records on the ESP: the frame, and the content behind a frame that
//! fits.

use std::fmt::Debug;

use polis_fuzz::{Accepted, Target};

use super::tests::{begun, plain, sealed};
use super::*;
use crate::cluster::tests::blob;

/// The records of one kind, and how they are read and written.
struct Records<T> {
    magic: Magic,
    samples: Vec<Vec<u8>>,
    read: fn(&[u8]) -> Result<T, Damage>,
    write: fn(&T) -> Zeroizing<Vec<u8>>,
}

impl<T: PartialEq + Debug> Records<T> {
    fn check(&self, record: &[u8]) -> Accepted {
        let Ok(value) = (self.read)(record) else { return Accepted::No };
        assert_eq!((self.read)(&(self.write)(&value)), Ok(value));
        Accepted::Yes
    }

    fn fuzz(&self, name: &'static str, name_of_content: &'static str) {
        Target::new(name).samples(&self.samples).run(|input| self.check(input));
        // The protection, which the frame has, then the content.
        let contents = self.samples.iter().map(|record| {
            let (protection, payload) = record::read(self.magic, record).unwrap();
            [&[protection as u8][..], payload].concat()
        });
        Target::new(name_of_content).samples(contents).run(|input| {
            let Some((protection, payload)) = input.split_first() else { return Accepted::No };
            let protection = match protection % 2 {
                0 => Protection::Plain,
                _ => Protection::Tpm,
            };
            self.check(&record::write(self.magic, protection, payload))
        });
    }
}

/// Every way in which secrets are kept.
fn ways() -> [Option<Guarded<Secrets>>; 3] {
    [None, Some(plain()), Some(Guarded::Tpm(blob()))]
}

#[test]
fn sealed_configurations() {
    let samples = ways().map(|secrets| sealed(secrets).to_record().to_vec()).to_vec();
    let records =
        Records { magic: SEALED, samples, read: Sealed::from_record, write: Sealed::to_record };
    records.fuzz("control.sealed", "control.sealed_content");
}

#[test]
fn journals_of_a_bootstrap() {
    let samples = ways().map(|secrets| begun(secrets).to_record().to_vec()).to_vec();
    let records =
        Records { magic: JOURNAL, samples, read: Begun::from_record, write: Begun::to_record };
    records.fuzz("control.bootstrap", "control.bootstrap_content");
}

#[test]
fn changes_of_a_key() {
    let samples = ways().into_iter().flatten();
    let samples = samples.map(|secrets| change_to_record(&secrets).to_vec()).collect();
    let records =
        Records { magic: CHANGE, samples, read: change_from_record, write: change_to_record };
    records.fuzz("control.key_change", "control.key_change_content");
}
