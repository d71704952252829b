//! A follower of the ring: reads every record of all boots in order, from a place that it
//! may keep over a restart.
//!
//! Records are numbered on a disk, from the first on: an entry, or the count of lost ones.
//! The head of a segment has the number of its first record, so a follower that comes late
//! learns how many records it missed.
//!
//! ```text
//! boot 7: [0: 0..412]  [1: 413..905]     boot 8: [0: 906..]
//!                           ^
//!                         Place: segment, bytes that were read, number of the next record
//! ```
//!
//! Invariants:
//! - A record is returned once to a follower that keeps its place, however segments come
//!   and go; a record that is gone is counted.
//! - A line that is still being written is not read; a torn one costs no line after it.
//!
//! What this module does not do: wait for records ([`super::Status`] changes with each
//! batch), or keep a place.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::record::{Head, Record};
use super::segment::{self, Id, Segment};
use super::{Error, Ring};
use crate::logtree::Item;
use crate::supervisor::attempt;

/// Bytes that are read at a time; more than the longest line.
const CHUNK: u64 = 256 << 10;

/// A place in the ring: a follower has read everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    boot: u64,
    segment: u64,
    /// Bytes of the segment before it.
    offset: u64,
    /// The number of the next record.
    pub number: u64,
}

impl Place {
    fn id(self) -> Id {
        Id { boot: self.boot, number: self.segment }
    }

    /// The start of a segment, where `number` is expected.
    fn at_start(id: Id, number: u64) -> Self {
        Self { boot: id.boot, segment: id.number, offset: 0, number }
    }
}

/// The process that wrote records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorder {
    /// The kernel's name for its boot; empty if the segment does not say it.
    pub boot_id: String,
    /// When its kernel started, in seconds since 1970, by the clock of that time.
    pub started: u64,
    /// The image that it ran from.
    pub image: String,
    /// Its number.
    pub process: u32,
    /// Whether it ran in the boot of now.
    pub is_now: bool,
}

/// The next records of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// The process.
    pub recorder: Recorder,
    /// The records with their numbers.
    pub records: Vec<(u64, Item)>,
    /// How many records before these are not in the ring any more.
    pub missing: u64,
    /// The place behind them; `None` in an empty ring.
    pub next: Option<Place>,
}

impl Stretch {
    /// Whether there is nothing new.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty() && self.missing == 0
    }
}

impl Ring {
    /// The next records behind `place`, or from the oldest on; empty if there are none yet.
    ///
    /// # Errors
    ///
    /// [`Error`] if the disk cannot be read.
    pub async fn after(&self, place: Option<Place>) -> Result<Stretch, Error> {
        let ring = self.clone();
        let read = attempt(move || after(&ring.dir, ring.boot, place)).await?;
        read.map_err(|source| self.disk(source))
    }
}

/// Blocks.
fn after(dir: &Path, now: u64, place: Option<Place>) -> io::Result<Stretch> {
    let segments = segment::list(dir)?;
    let newest = segments.last().map(|segment| segment.id);
    // A place behind the newest segment is of another disk: everything here is new.
    let place = place.filter(|place| newest.is_none_or(|newest| place.id() <= newest));
    let mut stretch = Stretch { next: place, ..Stretch::default() };
    let is_due = |segment: &&Segment| place.is_none_or(|place| segment.id >= place.id());
    for segment in segments.iter().filter(is_due) {
        read(segment, Some(segment.id) == newest, &mut stretch)?;
        if !stretch.is_empty() {
            stretch.recorder.is_now = segment.id.boot == now;
            break;
        }
    }
    Ok(stretch)
}

/// Adds the next records of one segment, if it has any.
fn read(segment: &Segment, is_newest: bool, stretch: &mut Stretch) -> io::Result<()> {
    let before = stretch.next;
    let known = before.filter(|place| place.id() == segment.id);
    let number = before.map_or(0, |place| place.number);
    let mut place = known.unwrap_or(Place::at_start(segment.id, number));
    // A power cut, or a write that failed, may have left less than was read.
    place.offset = place.offset.min(segment.bytes);
    let mut head = if place.offset > 0 { segment.head()? } else { None };
    while stretch.records.is_empty() {
        let bytes = segment.read(place.offset, CHUNK)?;
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => end + 1,
            // Damage that is longer than any line, or the torn end of a finished segment.
            None if bytes.len() as u64 == CHUNK || !is_newest => bytes.len(),
            None => 0,
        };
        if whole == 0 {
            break;
        }
        for record in bytes[..whole].split(|byte| *byte == b'\n').filter_map(Record::parse) {
            let item = match record {
                Record::Head(found) => {
                    if let Some(first) = found.first {
                        // A follower that begins has missed nothing.
                        let missing = before.map_or(0, |_| first.saturating_sub(place.number));
                        stretch.missing = stretch.missing.saturating_add(missing);
                        place.number = first;
                    }
                    head = Some(found);
                    continue;
                }
                Record::Lost(count) => Some(Item::Lost(count)),
                Record::Entry(line) => line.into_entry().map(|entry| Item::Entry(Arc::new(entry))),
            };
            stretch.records.extend(item.map(|item| (place.number, item)));
            place.number = place.number.saturating_add(1);
        }
        place.offset = place.offset.saturating_add(whole as u64);
    }
    let Head { boot_id, started, image, process, .. } = head.unwrap_or_default();
    stretch.recorder = Recorder { boot_id, started, image, process, is_now: false };
    stretch.next = Some(place);
    Ok(())
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
