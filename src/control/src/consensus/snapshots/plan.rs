//! The decisions about the snapshots of this node: their names, when the next one is due, which
//! ones go, and whether there is room.
//!
//! This module only computes: it reads no clock and no disk.
//!
//! ```text
//! hour:     |-------------------|-------------------|-------------------|
//! voter 1:  x                   x                   x
//! voter 2:        x                   x                   x
//! voter 3:              x                   x                   x
//! ```
//!
//! Invariants:
//! - The newest checked snapshot stays until a newer one is checked.
//! - All snapshots together never take more than their share of the partition, and the next one
//!   is taken only where the member keeps room to rewrite its database.
//! - A clock that was set causes one snapshot too many at most: the order is that of the
//!   numbers, not of the times.

use std::fmt;

use crate::consensus::QUOTA;
use polis_base::files::Space;

/// A day of them.
pub(super) const KEPT: usize = 24;

/// The share of the partition that all snapshots may have together, and its bound: as much as the
/// largest database. A worker keeps room for both, and for more (`workload::host::quota`).
const SHARE: u64 = 16;
const BUDGET_MAX: u64 = QUOTA;

/// Bytes that stay free beside a second database: etcd preallocates two files of its log.
const RESERVE: u64 = 128 << 20;

/// The digits of a number, so that names sort as numbers do.
const DIGITS: usize = 8;

/// The end of the name of a snapshot.
const END: &str = ".db";

/// The file name of a snapshot: `NUMBER-SECONDS-REVISION.db`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    /// Its place in the order of the snapshots of this node.
    pub(super) number: u64,
    /// When it was begun, in seconds since 1970.
    pub(super) at: u64,
    /// The revision of etcd in it.
    pub(super) revision: u64,
}

impl Name {
    /// Reads a name; `None` unless it is written exactly so.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_suffix(END)?.splitn(3, '-').map(|part| part.parse().ok());
        let [number, at, revision] = [parts.next()??, parts.next()??, parts.next()??];
        let name = Self { number, at, revision };
        (name.to_string() == text).then_some(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, at, revision } = self;
        write!(f, "{number:0DIGITS$}-{at}-{revision}{END}")
    }
}

/// A file with the name of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its name.
    pub(super) name: Name,
    /// Its bytes.
    pub(super) bytes: u64,
    /// Whether its content is the one that was checked.
    pub(super) sound: bool,
}

/// Why no snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// It has no room beside the newest one.
    #[error(
        "all snapshots of this node may have {} MiB, a part of its data partition, and the newest \
         one and a copy of the database take {} MiB; a larger disk makes room",
        mebibytes(*budget),
        mebibytes(*needs)
    )]
    TooLarge {
        /// Bytes of the newest one and of the next.
        needs: u64,
        /// Bytes that all may have.
        budget: u64,
    },
    /// It has no room beside the newest one on any disk.
    #[error(
        "all snapshots of this node may have {} MiB on a disk of any size, and the newest one and a \
         copy of the database take {} MiB; a smaller database makes room, and \
         `polisctl etcd snapshot` saves a copy elsewhere",
        mebibytes(BUDGET_MAX),
        mebibytes(*needs)
    )]
    Capped {
        /// Bytes of the newest one and of the next.
        needs: u64,
    },
    /// The member needs the room.
    #[error(
        "{} MiB of the data partition must be free for a snapshot, so that etcd keeps room for \
         itself, and {} MiB are; a larger disk or fewer volumes make room",
        mebibytes(*needs),
        mebibytes(*free)
    )]
    NoRoom {
        /// Bytes that must be free.
        needs: u64,
        /// Bytes that are free, or could be.
        free: u64,
    },
}

/// Rounded up: a bound is never shown as kept when it is not.
fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// The seconds until the next snapshot is due; zero: now. `now` and `newest` are seconds since
/// 1970, and each period has a part for each voter.
pub(super) fn due_in(
    now: u64,
    newest: Option<u64>,
    period: u64,
    (before, voters): (u64, u64),
) -> u64 {
    let phase = period * before / voters;
    let since = (now + period - phase) % period;
    match newest {
        // One from the future was taken by another clock.
        Some(at) if at <= now && at + since >= now => period - since,
        _ => 0,
    }
}

/// Bytes that all snapshots of a node together may have, on a data partition of `size` bytes.
#[must_use]
pub fn budget(size: u64) -> u64 {
    (size / SHARE).min(BUDGET_MAX)
}

/// The snapshots to remove before the next one of so many bytes is taken: those that do not fit
/// beside it, oldest first.
pub(super) fn room(entries: &[Entry], next: u64, space: Space) -> Result<Vec<Name>, Refusal> {
    let budget = budget(space.size);
    let needs = next.saturating_mul(2).saturating_add(RESERVE);
    let newest = newest(entries).map(|entry| entry.name);
    let mut taken: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let mut free = space.free;
    let mut old: Vec<_> = entries.iter().filter(|entry| Some(entry.name) != newest).collect();
    old.sort_by_key(|entry| entry.name);
    let mut removed = Vec::new();
    let mut old = old.into_iter();
    while taken.saturating_add(next) > budget || free < needs {
        let Some(entry) = old.next() else {
            return Err(match taken.saturating_add(next) {
                all if all > BUDGET_MAX => Refusal::Capped { needs: all },
                all if all > budget => Refusal::TooLarge { needs: all, budget },
                _ => Refusal::NoRoom { needs, free },
            });
        };
        taken -= entry.bytes;
        free = free.saturating_add(entry.bytes);
        removed.push(entry.name);
    }
    Ok(removed)
}

/// The snapshots to remove after one was taken: all that are older than the [`KEPT`] newest.
pub(super) fn superfluous(entries: &[Entry]) -> Vec<Name> {
    let mut sound: Vec<_> =
        entries.iter().filter(|entry| entry.sound).map(|entry| entry.name).collect();
    sound.sort();
    let Some(oldest) = sound.len().checked_sub(KEPT).map(|at| sound[at]) else {
        return Vec::new();
    };
    entries.iter().map(|entry| entry.name).filter(|name| *name < oldest).collect()
}

/// The newest checked snapshot.
pub(super) fn newest(entries: &[Entry]) -> Option<&Entry> {
    entries.iter().filter(|entry| entry.sound).max_by_key(|entry| entry.name)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
