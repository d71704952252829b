//! Which disks of a mirror have the newest data: decides by their records. Pure.
//!
//! ```text
//! records, kernel's superblocks, firmware's variable --> Both
//!                                                    \-> One, and the other is filled anew
//!                                                    \-> refusal: old data alone, or a split
//! ```
//!
//! Each use of the mirror has a [`Stamp`] of its own. Before anything is written to the data,
//! every disk in use has a [`Record`] with the new stamp and the disks in use, and with the stamps
//! by which it knows a disk that missed a use, which keeps the record of before ([`is_before`]).
//!
//! Invariants:
//! - Data that was acknowledged is never read from a disk that missed a write of it.
//! - A disk is filled anew only if all of its data is on the other one, too: where each of two
//!   was used without the other, neither is touched.
//! - A power cut between any two writes of records leaves a state that starts.
//!
//! What this module does not do: find the disks (`disks`), or write a record (`record`).

/// One of the two disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Leg {
    /// The disk of the first boot, or what has replaced it.
    First,
    /// The disk that was added.
    Second,
}

impl Leg {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::First, Self::Second];

    /// The other one.
    #[must_use]
    pub(super) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// Its place in arrays, and in the kernel's table.
    #[must_use]
    pub(super) fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }
}

/// One use of the mirror: from a boot, or from a change of the disks in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Counts the uses.
    pub(super) generation: u64,
    /// Random: distinguishes two uses with the same number, of disks that were apart.
    pub(super) nonce: u64,
}

/// The disks with the data of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Used {
    /// Both have all of it.
    Both,
    /// Only this one.
    Only(Leg),
}

impl Used {
    /// Whether `leg` has all data.
    #[must_use]
    pub(super) fn has(self, leg: Leg) -> bool {
        self == Self::Both || self == Self::Only(leg)
    }
}

/// What a disk says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Which disk it is.
    pub(super) leg: Leg,
    /// The use that it was part of last.
    pub(super) stamp: Stamp,
    /// The use of this disk before that one, or the last that the firmware has kept.
    pub(super) before: Stamp,
    /// The last use of both whose record the other one surely has, too.
    pub(super) together: Stamp,
    /// The last use of both, whose record the other one may have.
    pub(super) both: Stamp,
    /// The disks with all data of this use.
    pub(super) used: Used,
    /// The disk to whose ESP the node wrote in this use: that of the other one may be older.
    pub(super) esp: Leg,
}

/// A disk that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// What it says.
    pub(super) record: Record,
    /// Whether the kernel noted on it that it had dropped the other one.
    pub(super) dropped_other: bool,
}

/// Why no data is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The disk with the newest data is not there.
    #[error(
        "the data on this disk is old: it is of use {has} of the mirror, and the last was {last}"
    )]
    Old {
        /// The newest use of which there is data.
        has: u64,
        /// The newest use.
        last: u64,
    },
    /// The only disk was never filled to its end.
    #[error("this disk has only a part of the data: it was being filled from the other one")]
    Unfilled,
    /// Each was used without the other.
    #[error("both disks were used alone after their last use together, {together}")]
    Split {
        /// The last use together.
        together: u64,
    },
}

/// Decides which disks are used: those with all data. The other one, if it is there, may be
/// filled anew.
///
/// # Errors
///
/// [`Refusal`].
pub(super) fn plan(
    first: Option<Seen>,
    second: Option<Seen>,
    last: Option<Stamp>,
) -> Result<Used, Refusal> {
    let full = |seen: &Seen| seen.record.used.has(seen.record.leg);
    let used = match (first.filter(full), second.filter(full)) {
        (Some(first), Some(second)) => newest(first, second)?,
        (Some(_), None) => Used::Only(Leg::First),
        (None, Some(_)) => Used::Only(Leg::Second),
        (None, None) => return Err(Refusal::Unfilled),
    };
    let chosen = if used.has(Leg::First) { first } else { second };
    let Some(chosen) = chosen.map(|seen| seen.record) else { return Err(Refusal::Unfilled) };
    let alone = first.is_none() || second.is_none();
    let known = [first, second].into_iter().flatten().map(|seen| seen.record.stamp).chain(last);
    let newer = |stamp: &Stamp| {
        // The variable is written after the record, so it may have the use before.
        let unknown = Some(*stamp) == last && ![chosen.stamp, chosen.before].contains(stamp);
        stamp.generation > chosen.stamp.generation || (alone && unknown)
    };
    match known.filter(newer).max_by_key(|stamp| stamp.generation) {
        Some(stamp) => Err(Refusal::Old { has: chosen.stamp.generation, last: stamp.generation }),
        None => Ok(used),
    }
}

/// Which of several disks in the other place counts beside `started`: as one that was replaced,
/// its replacement, and a copy of either. One that `started` is older than comes first, since its
/// data must not be taken for old; then one with the same data.
#[must_use]
pub(super) fn beside(started: Seen, others: &[Seen], last: Option<Stamp>) -> Option<usize> {
    let place = |other: &Seen| {
        let pair = match started.record.leg {
            Leg::First => [started, *other],
            Leg::Second => [*other, started],
        };
        let used = plan(Some(pair[0]), Some(pair[1]), last);
        let rank = match used {
            Ok(Used::Only(leg)) if leg == other.record.leg => 0,
            Ok(Used::Both) => 1,
            Ok(Used::Only(_)) => 2,
            Err(_) => 3,
        };
        let record = &other.record;
        (rank, !record.used.has(record.leg), u64::MAX - record.stamp.generation)
    };
    (0..others.len()).min_by_key(|at| place(&others[*at]))
}

/// Whether two disks are one and its copy: each has all data of the same use, in the same place.
#[must_use]
pub(super) fn are_copies(one: &Record, other: &Record) -> bool {
    one.used.has(one.leg) && (one.leg, one.stamp, one.used) == (other.leg, other.stamp, other.used)
}

/// Which of two disks that both had all data at some time.
fn newest(first: Seen, second: Seen) -> Result<Used, Refusal> {
    let split = Err(Refusal::Split { together: first.record.together.generation });
    let before = if first.record.stamp == second.record.stamp {
        // The kernel drops a disk before the node can note that.
        (second.dropped_other, first.dropped_other)
    } else {
        (
            is_before(&first.record, &second.record) && !first.dropped_other,
            is_before(&second.record, &first.record) && !second.dropped_other,
        )
    };
    match before {
        (false, false) if first.record.stamp == second.record.stamp => Ok(Used::Both),
        (true, false) => Ok(Used::Only(Leg::Second)),
        (false, true) => Ok(Used::Only(Leg::First)),
        (true, true) | (false, false) => split,
    }
}

/// Whether `one` has no data that `other` lacks: its last use is one of both that `other` knows,
/// or began after such a one and without the other, so that it never wrote anything.
fn is_before(one: &Record, other: &Record) -> bool {
    let known = |stamp: Stamp| [other.together, other.both].contains(&stamp);
    let never_began = one.used == Used::Both && other.used != Used::Both && known(one.together);
    known(one.stamp) || never_began
}

/// The record of the next use, of the disks `used` and the ESP of `esp`, on a disk with the record
/// `before`.
#[must_use]
pub(super) fn next(before: &Record, used: Used, esp: Leg, nonce: u64) -> Record {
    let stamp = Stamp { generation: before.stamp.generation.saturating_add(1), nonce };
    let (together, both) = match used {
        // Each has the record of before: of a use of both, or of that in which it was filled.
        Used::Both => (before.stamp, stamp),
        Used::Only(_) => (before.together, before.both),
    };
    Record { stamp, before: before.stamp, together, both, used, esp, ..*before }
}

/// The record of a disk that is being filled from one with the record `source`.
#[must_use]
pub(super) fn filling(source: &Record) -> Record {
    Record { leg: source.leg.other(), used: Used::Only(source.leg), ..*source }
}

/// The record of a new mirror, of the first disk alone.
#[must_use]
pub(super) fn begun(nonce: u64) -> Record {
    let stamp = Stamp { generation: 1, nonce };
    let never = Stamp { generation: 0, nonce };
    let (leg, used) = (Leg::First, Used::Only(Leg::First));
    Record { leg, stamp, before: never, together: never, both: never, used, esp: leg }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
