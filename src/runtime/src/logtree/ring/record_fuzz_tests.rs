//! Fuzz target of the lines of the log on the data partition.

use std::time::Duration;

use polis_fuzz::{Accepted, Target};

use super::*;

fn line(record: &Record) -> String {
    let mut text = String::new();
    record.put(&mut text);
    text.strip_suffix('\n').unwrap().to_owned()
}

fn samples() -> Vec<String> {
    let mut levelled = Levelled::new(Severity::Warning, "two\nlines");
    levelled.stamp = Some("0103 15:04".to_owned());
    levelled.fields.push(("took".to_owned(), "1 s".to_owned()));
    let entry = Entry {
        number: 17,
        at: Duration::from_millis(2702),
        name: "root.storage".into(),
        origin: Origin::Service,
        body: Body::Levelled(levelled),
    };
    let head = Head {
        boot_id: "5f3a0c11".to_owned(),
        started: 1_800_000_000,
        image: "0123456789abcdef".to_owned(),
        process: 2,
        first: Some(7),
    };
    [Record::Head(head), Record::Lost(12), Record::Entry(Line::of(&entry))]
        .iter()
        .map(line)
        .collect()
}

fn reads_back(record: Record) {
    assert_eq!(Record::parse(line(&record).as_bytes()).as_ref(), Some(&record));
    if let Record::Entry(line) = record {
        let _unknown_severity = line.into_entry();
    }
}

#[test]
fn lines_of_the_ring() {
    Target::new("runtime.ring").samples(samples()).run(|input| match Record::parse(input) {
        Some(record) => {
            reads_back(record);
            Accepted::Yes
        }
        None => Accepted::No,
    });
}

#[test]
fn lines_of_the_ring_behind_their_checksum() {
    let samples = samples().into_iter().map(|line| line[DIGITS + 1..].to_owned());
    Target::new("runtime.ring_content").samples(samples).run(|json| {
        let line = [checksum(json).as_bytes(), b" ", json].concat();
        match Record::parse(&line) {
            Some(record) => {
                reads_back(record);
                Accepted::Yes
            }
            None => Accepted::No,
        }
    });
}
