//! The format of a segment's lines: encoding and decoding.
//!
//! A line is eight hexadecimal digits of a checksum, a space, and one JSON object. A
//! person can read it on another machine, and the parser resynchronises behind any
//! damage at the next line feed.
//!
//! ```text
//! 5f3a0c11 {"entry":{"n":17,"t":2702113,"name":"root.storage","o":"service",...}}
//! ```
//!
//! Invariants:
//! - A line that is torn, foreign or from another version is `None`, never an error:
//!   the lines after it may be valid.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::logtree::{Body, Entry, Levelled, Origin};
use polis_base::hex;
use polis_base::serial::Severity;

/// Hexadecimal digits of the checksum. It detects a torn line, not an attacker.
const DIGITS: usize = 8;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Record {
    /// The first line of each segment.
    Head(Head),
    /// A log entry.
    Entry(Line),
    /// The number of entries that are missing here.
    Lost(u64),
}

/// The boot to which a segment belongs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// The kernel's name of the boot.
    pub(super) boot_id: String,
    /// When the kernel started, in seconds since 1970.
    pub(super) started: u64,
    /// The image.
    pub(super) image: String,
    /// The process that wrote it: each process numbers its entries from the start.
    pub(super) process: u32,
    /// The number of its first record among all records that this disk had; `None` in a
    /// segment of an earlier version.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) first: Option<u64>,
}

/// An entry in its stored form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    n: u64,
    /// Microseconds since the kernel started.
    t: u64,
    name: String,
    o: Source,
    /// The letter of the severity; absent for a raw line.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    s: Option<char>,
    m: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    from: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    stamp: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    f: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    Service,
    Program,
    Kernel,
}

impl Line {
    pub(super) fn of(entry: &Entry) -> Self {
        let o = match entry.origin {
            Origin::Service => Source::Service,
            Origin::Program => Source::Program,
            Origin::Kernel => Source::Kernel,
        };
        let line = Self {
            n: entry.number,
            t: u64::try_from(entry.at.as_micros()).unwrap_or(u64::MAX),
            name: entry.name.to_string(),
            o,
            s: None,
            m: String::new(),
            from: String::new(),
            stamp: None,
            f: Vec::new(),
        };
        match entry.body.clone() {
            Body::Raw(m) => Self { m, ..line },
            Body::Levelled(it) => Self {
                s: Some(it.severity.letter()),
                m: it.message,
                from: it.source,
                stamp: it.stamp,
                f: it.fields,
                ..line
            },
        }
    }

    /// The number of the entry in its tree.
    pub(super) fn number(&self) -> u64 {
        self.n
    }

    /// When it was written.
    pub(super) fn at(&self) -> Duration {
        Duration::from_micros(self.t)
    }

    /// The entry; `None` for an unknown severity.
    pub(super) fn into_entry(self) -> Option<Entry> {
        let at = self.at();
        let origin = match self.o {
            Source::Service => Origin::Service,
            Source::Program => Origin::Program,
            Source::Kernel => Origin::Kernel,
        };
        let body = match self.s {
            None => Body::Raw(self.m),
            Some(letter) => Body::Levelled(Levelled {
                severity: severity(letter)?,
                source: self.from,
                stamp: self.stamp,
                message: self.m,
                fields: self.f,
            }),
        };
        Some(Entry { number: self.n, at, name: Arc::from(self.name), origin, body })
    }
}

fn severity(letter: char) -> Option<Severity> {
    use Severity::{Debug, Error, Fatal, Info, Warning};
    [Debug, Info, Warning, Error, Fatal].into_iter().find(|one| one.letter() == letter)
}

impl Record {
    /// Adds the line to `text`, with its line feed.
    pub(super) fn put(&self, text: &mut String) {
        // Map keys are strings here, and nothing else can fail.
        let Ok(json) = serde_json::to_string(self) else { return };
        // Writing into a string cannot fail.
        let _infallible = writeln!(text, "{} {json}", checksum(json.as_bytes()));
    }

    /// Reads a line without its line feed.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let (sum, rest) = line.split_at_checked(DIGITS)?;
        let json = rest.strip_prefix(b" ")?;
        (sum == checksum(json).as_bytes()).then(|| serde_json::from_slice(json).ok())?
    }
}

fn checksum(json: &[u8]) -> String {
    hex::encode(&Sha256::digest(json)[..DIGITS / 2])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_entry() -> impl Strategy<Value = Entry> {
        let levelled = (
            prop::sample::select(vec!['D', 'I', 'W', 'E', 'F']),
            any::<String>(),
            prop::option::of(any::<String>()),
            any::<String>(),
            prop::collection::vec((any::<String>(), any::<String>()), 0..4),
        );
        let levelled = levelled.prop_map(|(letter, source, stamp, message, fields)| {
            let severity = severity(letter).unwrap();
            Body::Levelled(Levelled { severity, source, stamp, message, fields })
        });
        let body = prop_oneof![any::<String>().prop_map(Body::Raw), levelled];
        let origin = prop::sample::select(vec![Origin::Service, Origin::Program, Origin::Kernel]);
        (any::<u64>(), 0..u64::MAX, any::<String>(), origin, body).prop_map(
            |(number, at, name, origin, body)| {
                let at = Duration::from_micros(at);
                Entry { number, at, name: name.into(), origin, body }
            },
        )
    }

    #[test]
    fn a_line_can_be_read_by_people() {
        let mut levelled = Levelled::new(Severity::Warning, "two\nlines");
        levelled.fields.push(("took".to_owned(), "1 s".to_owned()));
        let entry = Entry {
            number: 17,
            at: Duration::from_millis(2702),
            name: "root.storage".into(),
            origin: Origin::Service,
            body: Body::Levelled(levelled),
        };
        let mut text = String::new();
        Record::Entry(Line::of(&entry)).put(&mut text);
        insta::assert_snapshot!(text, @r#"a28e9e26 {"entry":{"n":17,"t":2702000,"name":"root.storage","o":"service","s":"W","m":"two\nlines","f":[["took","1 s"]]}}"#);
    }

    #[test]
    fn a_truncated_or_changed_line_is_rejected() {
        let mut text = String::new();
        Record::Lost(12).put(&mut text);
        let line = text.trim_end().as_bytes();
        assert_eq!(Record::parse(line), Some(Record::Lost(12)));
        for end in 0..line.len() {
            assert_eq!(Record::parse(&line[..end]), None);
        }
        for at in 0..line.len() {
            let mut changed = line.to_vec();
            changed[at] ^= 1;
            assert_eq!(Record::parse(&changed), None);
        }
    }

    proptest! {
        #[test]
        fn an_entry_is_one_line_and_reads_back(entry in any_entry()) {
            let mut text = String::new();
            Record::Entry(Line::of(&entry)).put(&mut text);
            let line = text.strip_suffix('\n').unwrap();
            prop_assert!(!line.contains('\n'));
            let Some(Record::Entry(read)) = Record::parse(line.as_bytes()) else { panic!("{line}") };
            prop_assert_eq!(read.into_entry(), Some(entry));
        }

        #[test]
        fn arbitrary_bytes_are_no_record(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Record::parse(&bytes), None);
        }
    }
}

#[cfg(test)]
#[path = "record_fuzz_tests.rs"]
mod fuzz_tests;
