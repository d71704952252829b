//! Fuzz targets of the journal of a registration on the ESP.

use polis_fuzz::{Accepted, Target};

use super::tests::registering;
use super::*;
use crate::cluster::tests::{begun, blob};

fn samples() -> Vec<Vec<u8>> {
    let sealed = || Guarded::Tpm(blob());
    let registering = [None, Some(Kind::Authenticated)].map(|kind| registering(sealed(), kind));
    registering.iter().map(|journal| journal.to_record().to_vec()).collect()
}

fn check(record: &[u8]) -> Accepted {
    match Journal::from_record(record) {
        Ok(Journal::Register(read)) => {
            let again = Journal::from_record(&read.to_record());
            assert_eq!(again, Ok(Journal::Register(read)));
            Accepted::Yes
        }
        Ok(Journal::Bootstrap(_)) => Accepted::Yes,
        Err(_) => Accepted::No,
    }
}

#[test]
fn journals() {
    let samples = samples().into_iter().chain([begun().to_record().to_vec()]);
    Target::new("control.journal").samples(samples).run(check);
}

#[test]
fn journals_of_a_registration() {
    let contents = samples().into_iter().map(|record| {
        let (_protection, payload) = record::read(REGISTER, &record).unwrap();
        payload.to_vec()
    });
    Target::new("control.journal_content")
        .samples(contents)
        .run(|input| check(&record::write(REGISTER, record::Protection::Tpm, input)));
}
