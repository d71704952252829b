//! The state of the snapshots on this node, as others may know it.
//!
//! It is a part of the member's status, from which the console, the metrics and the heartbeat
//! take it.

use std::fs::File;
use std::time::{SystemTime, UNIX_EPOCH};

use polis_proto::v1;

use super::plan::Name;
use polis_base::files::{self, Dir};

/// Bytes of a text about a problem.
const TEXT_MAX: usize = 512;

/// The snapshots on the disk of this node, at the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshots {
    /// The number of those that count.
    pub kept: usize,
    /// The newest of them.
    pub newest: Option<Taken>,
    /// Why the last attempt failed; empty after a success.
    pub failure: Option<String>,
    /// The files in their folder that do not count, each with the reason.
    pub rejected: Vec<String>,
}

/// A snapshot that was taken and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its place in the order of the snapshots of this node.
    pub number: u64,
    /// When it was begun, by the clock of the node then.
    pub at: SystemTime,
    /// Bytes of the file.
    pub bytes: u64,
    /// The revision of etcd in it.
    pub revision: u64,
}

impl Taken {
    /// Opens its file in the folder of the snapshots; `None` once it is removed. Blocks.
    ///
    /// # Errors
    ///
    /// [`files::Error`] if it cannot be opened, or is not a file.
    pub fn open(&self, dir: &Dir) -> Result<Option<File>, files::Error> {
        let Self { number, at, revision, .. } = *self;
        dir.open(&Name { number, at: seconds(at), revision }.to_string())
    }
}

impl Snapshots {
    /// The text for an operator: the failure, and the first file that does not count.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let rejected = self.rejected.first().map(|first| match self.rejected.len() - 1 {
            0 => format!("a file does not count: {first}"),
            more => format!("{} files do not count: {first}, and {more} more", more + 1),
        });
        let parts: Vec<_> = self.failure.iter().cloned().chain(rejected).collect();
        (!parts.is_empty()).then(|| cut(&parts.join("; ")))
    }

    /// As a member reports it.
    pub(in crate::consensus) fn message(&self) -> v1::LocalSnapshots {
        let newest = self.newest;
        v1::LocalSnapshots {
            kept: u32::try_from(self.kept).unwrap_or(u32::MAX),
            newest_at: newest.map_or(0, |it| i64::try_from(seconds(it.at)).unwrap_or(i64::MAX)),
            newest_bytes: newest.map_or(0, |it| it.bytes),
            newest_revision: newest.map_or(0, |it| it.revision),
            problem: self.problem().unwrap_or_default(),
        }
    }
}

/// Seconds since 1970.
pub(super) fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The beginning of a text.
pub(super) fn cut(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_MAX)).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or_default()].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_the_failure_and_the_first_file_that_does_not_count() {
        let mut shown = Snapshots::default();
        assert_eq!(shown.problem(), None);
        shown.rejected = vec!["a: damaged".to_owned()];
        assert_eq!(shown.problem().unwrap(), "a file does not count: a: damaged");
        shown.rejected.push("b: damaged".to_owned());
        shown.failure = Some("no room".to_owned());
        let problem = shown.problem().unwrap();
        assert_eq!(problem, "no room; 2 files do not count: a: damaged, and 1 more");
        shown.failure = Some("ü".repeat(TEXT_MAX));
        assert_eq!(shown.problem().unwrap().len(), TEXT_MAX);
    }
}
