//! The `append` exercise: writes a history that can be checked, with a key of its own
//! for each number.
//!
//! ```text
//! list all writers' keys --> print --> n = own last + 1
//!      --> create key n --acknowledged--> print n, its revision --> n + 1
//!             |   ^
//!             +---+ no answer: it may have happened, so the same n again
//! ```
//!
//! A number is created once or not at all: the transaction demands that its key is
//! absent, and where it finds the key, an earlier attempt without an answer made it.
//! The line then reports the revision at which the key was created.
//!
//! Every node of a cluster may do this at the same time, each with its own keys. A
//! story compares the lines of each node with the keys that each boot finds.

use std::fmt::Write as _;

use tokio::time::sleep;
use tracing::warn;

use super::{RETRY, Service};
use polis_base::serial::EventLine;
use polis_control::consensus::client::{Client, Kv, Txn};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::pki::{Guard, Write};
use std::time::Duration;

/// Numbers in a line of a boot's findings.
const LINE: usize = 40;

/// The key of a number. Padded, so that keys are in the order of their numbers.
fn key(writer: &str, number: u64) -> String {
    format!("append/{writer}/{number:010}")
}

/// The writer and the number of a key.
fn parts(key: &str) -> Option<(&str, u64)> {
    let (writer, number) = key.strip_prefix("append/")?.split_once('/')?;
    Some((writer, number.parse().ok()?))
}

fn line() -> EventLine {
    EventLine::new("exercise").field("name", "append")
}

/// Reports the existing keys, then writes until the end, with this pause after each number.
pub(super) async fn run(mut service: Service, ctx: &Context, pace: Duration) -> Result<(), Closed> {
    let writer = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut number = loop {
        match service.etcd().await?.list("append/").await {
            Ok(listing) => {
                let found = lines(&listing.entries);
                for line in found {
                    ctx.lines().event(line.field("as_of", listing.revision));
                    // Other code writes to the serial line too.
                    sleep(Duration::from_millis(5)).await;
                }
                let count = listing.entries.len();
                ctx.lines().event(line().field("listed", count).field("as_of", listing.revision));
                break last(&listing.entries, &writer);
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "cannot read the history");
                sleep(RETRY).await;
            }
        }
    };
    loop {
        number += 1;
        let revision = loop {
            match create(&service.etcd().await?, &key(&writer, number)).await {
                Ok(revision) => break revision,
                Err(error) => {
                    warn!(number, error = &error as &dyn std::error::Error, "not acknowledged");
                    sleep(RETRY).await;
                }
            }
        };
        ctx.lines().event(
            line()
                .field("writer", &writer)
                .field("acknowledged", number)
                .field("revision", revision),
        );
        sleep(pace).await;
    }
}

/// Creates a key, unless an earlier attempt has; returns the revision at which it was
/// created.
async fn create(etcd: &Client, key: &str) -> Result<i64, polis_control::consensus::client::Error> {
    let txn = Txn {
        guards: vec![Guard::Absent(key.to_owned())],
        writes: vec![Write::Put(key.to_owned(), super::PLAINTEXT.into())],
        reads: vec![key.to_owned()],
        ..Txn::default()
    };
    let outcome = etcd.txn(txn).await?;
    let before = outcome.read.into_iter().flatten().next().map(|kv| kv.created);
    Ok(before.unwrap_or(outcome.revision))
}

fn last(entries: &[Kv], writer: &str) -> u64 {
    let numbers = entries.iter().filter_map(|kv| parts(&kv.key));
    numbers.filter(|(of, _)| *of == writer).map(|(_, number)| number).max().unwrap_or(0)
}

/// The existing keys: of each writer, each number and the revision at which it was
/// created, in the order of the keys.
fn lines(entries: &[Kv]) -> Vec<EventLine> {
    let mut lines = Vec::new();
    let keys: Vec<(&str, u64, i64)> = entries
        .iter()
        .filter_map(|kv| parts(&kv.key).map(|(writer, number)| (writer, number, kv.created)))
        .collect();
    for same in keys.chunk_by(|a, b| a.0 == b.0) {
        for chunk in same.chunks(LINE) {
            let mut text = String::new();
            for (_writer, number, created) in chunk {
                let _infallible = write!(text, "{number}@{created} ");
            }
            let writer = chunk.first().map_or("", |first| first.0);
            lines.push(line().field("writer", writer).field("holds", text.trim_end()));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(writer: &str, number: u64, created: i64) -> Kv {
        let key = key(writer, number);
        Kv { key, value: Vec::new(), created, modified: created, lease: 0 }
    }

    #[test]
    fn a_key_tells_its_writer_and_its_number() {
        assert_eq!(parts(&key("polis-01", 17)), Some(("polis-01", 17)));
        assert_eq!(parts("append/polis-01"), None);
        assert_eq!(parts("append/polis-01/x"), None);
        assert!(key("a", 9) < key("a", 10));
    }

    #[test]
    fn a_writer_goes_on_behind_its_own_last_number() {
        let entries = [kv("a", 1, 5), kv("a", 2, 9), kv("b", 7, 6)];
        assert_eq!((last(&entries, "a"), last(&entries, "b"), last(&entries, "c")), (2, 7, 0));
    }

    #[test]
    fn the_history_is_listed_by_writer_in_lines_of_a_bounded_length() {
        let mut entries: Vec<Kv> = (1..=41).map(|n| kv("a", n, 100)).collect();
        entries.push(kv("b", 1, 7));
        let listed: Vec<String> = lines(&entries).iter().map(ToString::to_string).collect();
        assert_eq!(listed.len(), 3);
        assert!(
            listed[0].contains("writer=a") && listed[0].contains("\"1@100 2@100"),
            "{listed:?}"
        );
        assert!(listed[1].contains("41@100") && listed[2].contains("1@7"), "{listed:?}");
    }
}
