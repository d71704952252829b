//! The damage check: classifies by etcd's last lines whether its database is damaged.
//!
//! etcd checks what it reads and ends at once where the data is not valid. The next start
//! finds the same bytes, so restarts without end would be a loop in silence. Only errors
//! that etcd itself attributes to its files count: an address in use, a full disk or a
//! wrong certificate may be right the next time.
//!
//! etcd cannot classify one case: the database is mapped into its memory, and a page that
//! cannot be read is a fault, whether the file is too short or the disk does not answer.
//! The disk may come back, so this module reads the file to find out.
//!
//! What this module does not do: repair files, or decide what follows from damage (`service`).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use polis_base::serial::Severity;
use polis_runtime::logtree::{Body, Levelled};

/// The texts of etcd, its log (the WAL) and its storage (bbolt) for damage, as parts of the
/// message or of the field `error`.
const PHRASES: [&str; 16] = [
    // The database: no valid header, or a damaged page.
    "invalid database",
    "version mismatch",
    "assertion failed: Page expected to be",
    "freepages: failed to get all reachable pages",
    "invalid page type",
    "already freed",
    "freelist page",
    // The log of entries that are not in the database yet.
    "crc mismatch",
    "max entry size limit exceeded",
    "failed to read WAL, cannot be repaired",
    "wal: unexpected",
    "cannot use none as id",
    // A part is missing, or belongs to another time.
    "failed to find database snapshot file",
    "snap: no available snapshot",
    "is out of range [lastIndex",
    // The other members have different data.
    "found data inconsistency with peers",
];

/// The texts of a Go program that accessed a missing page.
const FAULTS: [&str; 2] = ["unexpected fault address", "fatal error: fault"];

/// The size of one read.
const CHUNK: usize = 1 << 20;

/// The damage to files that the lines of one etcd report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing.
    Sound,
    /// The files are damaged, with the text by which etcd reports it.
    Damaged(String),
    /// A page of the database could not be read.
    Fault,
}

/// Looks for the first line in which etcd blames its files.
pub(super) fn classify<'a>(lines: impl Iterator<Item = &'a Body> + Clone) -> Verdict {
    if let Some(words) = lines.clone().find_map(damage) {
        return Verdict::Damaged(words);
    }
    let faulted = |body: &Body| match body {
        Body::Raw(line) => FAULTS.iter().any(|fault| line.starts_with(fault)),
        Body::Levelled(_) => false,
    };
    let mut lines = lines;
    if lines.any(faulted) { Verdict::Fault } else { Verdict::Sound }
}

fn damage(body: &Body) -> Option<String> {
    match body {
        // Not every line of a stack: it names functions, which are not complaints.
        Body::Raw(line) => {
            let output = line.strip_prefix("panic: ")?;
            blames(output).then(|| output.to_owned())
        }
        Body::Levelled(entry) if entry.severity == Severity::Fatal => fatal(entry),
        Body::Levelled(_) => None,
    }
}

fn fatal(entry: &Levelled) -> Option<String> {
    let error = entry.fields.iter().find(|(name, _)| name == "error");
    let output = match error {
        Some((_, error)) => format!("{}: {error}", entry.message),
        None => entry.message.clone(),
    };
    blames(&output).then_some(output)
}

fn blames(output: &str) -> bool {
    PHRASES.iter().any(|phrase| output.contains(phrase))
}

/// Whether every byte of the file can be read. Blocks.
pub(super) fn is_readable(file: &Path) -> bool {
    let read = || {
        let mut file = File::open(file)?;
        let mut buffer = vec![0; CHUNK];
        while file.read(&mut buffer)? > 0 {}
        Ok::<_, io::Error>(())
    };
    read().is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use polis_runtime::logtree::Parser;

    fn classified(lines: &[&str]) -> Verdict {
        let lines: Vec<_> = lines.iter().map(|line| Parser::Json.parse(line)).collect();
        classify(lines.iter())
    }

    #[test]
    fn what_etcd_says_of_damaged_files_is_understood() {
        let wal = r#"{"level":"fatal","caller":"etcdmain/etcd.go:204","msg":"discovery failed","error":"walpb: crc mismatch","stacktrace":"go.etcd.io"}"#;
        let db = r#"{"level":"panic","caller":"backend/backend.go:201","msg":"failed to open database","path":"/data","error":"invalid database"}"#;
        let page = "panic: assertion failed: Page expected to be: 36, but self identifies as 17";
        let output = |output: &str| Verdict::Damaged(output.to_owned());
        assert_eq!(classified(&[wal]), output("discovery failed: walpb: crc mismatch"));
        assert_eq!(classified(&[db]), output("failed to open database: invalid database"));
        assert_eq!(classified(&["", page, "goroutine 1 [running]:"]), output(&page[7..]));
        assert_eq!(
            classified(&["unexpected fault address 0x7f", "fatal error: fault"]),
            Verdict::Fault
        );
    }

    #[test]
    fn other_deaths_are_no_damage() {
        let warned =
            r#"{"level":"warn","msg":"failed to find [SNAPSHOT-INDEX].snap.db","error":"snap"}"#;
        let busy = r#"{"level":"fatal","msg":"discovery failed","error":"listen tcp: address already in use"}"#;
        let full = r#"{"level":"fatal","msg":"failed to save Raft hard state and entries","error":"no space left on device"}"#;
        for line in [warned, busy, full, "panic: nil map", "  freepages crc mismatch.go:12"] {
            assert_eq!(classified(&[line]), Verdict::Sound, "{line}");
        }
    }

    #[test]
    fn a_short_file_can_be_read_and_a_directory_cannot() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("db");
        std::fs::write(&file, [7; 100]).unwrap();
        assert!(is_readable(&file));
        assert!(!is_readable(directory.path()));
        assert!(!is_readable(&directory.path().join("absent")));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(lines in prop::collection::vec(any::<String>(), 0..5)) {
            let lines: Vec<_> = lines.iter().map(|line| Parser::Json.parse(line)).collect();
            let _verdict = classify(lines.iter());
        }
    }
}
