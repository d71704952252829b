//! A reader of one boot's log, segment by segment.
//!
//! The start of a query for the last N entries is found from the end, so that a
//! screenful of a long boot costs a segment or two; entries are returned in the order
//! in which they were written, and at most one segment is in memory.
//!
//! What this module does not do: follow new entries (the live tree does).

use std::collections::VecDeque;
use std::sync::Arc;

use super::Error;
use super::record::{Head, Record};
use super::segment::Segment;
use crate::logtree::{Backlog, Entry, Item, Query};
use crate::supervisor::attempt;

/// The entries of one boot that a query asks for.
#[derive(Debug)]
pub struct BootLog {
    query: Arc<Query>,
    /// Segments that are still unread, in order.
    segments: VecDeque<Segment>,
    /// Entries at the start to skip.
    skip: usize,
    ready: VecDeque<Item>,
    started: u64,
}

impl BootLog {
    /// Finds the place to begin.
    pub(super) async fn open(segments: Vec<Segment>, query: Query) -> Result<Self, Error> {
        let query = Arc::new(query);
        let asked = Arc::clone(&query);
        let begun = attempt(move || begin(segments, &asked)).await?;
        let (segments, skip, started) = begun;
        Ok(Self { query, segments, skip, ready: VecDeque::new(), started })
    }

    /// When the kernel of that boot started, in seconds since 1970, by the clock of
    /// that time; zero if the boot is unreadable.
    #[must_use]
    pub fn started(&self) -> u64 {
        self.started
    }

    /// The next entry, or how many are missing here; `None` at the end.
    ///
    /// # Errors
    ///
    /// [`Error`] where a segment cannot be read; the next call continues with the
    /// segment after it.
    pub async fn next(&mut self) -> Result<Option<Item>, Error> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Ok(Some(item));
            }
            // The segment stays in the queue until it was read: a caller that drops
            // this call loses nothing.
            let Some(segment) = self.segments.front().cloned() else { return Ok(None) };
            let query = Arc::clone(&self.query);
            let dir = segment.path.clone();
            let read = attempt(move || items(&segment, &query)).await;
            self.segments.pop_front();
            let mut items = read?.map_err(|source| Error::Disk { dir, source })?;
            while self.skip > 0
                && let Some(item) = items.pop_front()
            {
                self.skip -= usize::from(matches!(item, Item::Entry(_)));
            }
            self.ready = items;
        }
    }
}

/// The segments to read, how many entries of the first to skip, and when the boot was.
/// Blocks. `next` reports an unreadable segment again.
fn begin(mut segments: Vec<Segment>, query: &Query) -> (VecDeque<Segment>, usize, u64) {
    let head = segments.iter().find_map(|it| it.head().ok().flatten());
    let started = head.map_or(0, |Head { started, .. }| started);
    let wanted = match query.backlog {
        Backlog::All => return (segments.into(), 0, started),
        Backlog::None => return (VecDeque::new(), 0, started),
        Backlog::Last(wanted) => wanted,
    };
    let mut found = 0;
    let mut first = segments.len();
    while first > 0 && found < wanted {
        first -= 1;
        let items = items(&segments[first], query).unwrap_or_default();
        found += items.iter().filter(|item| matches!(item, Item::Entry(_))).count();
    }
    (segments.split_off(first).into(), found.saturating_sub(wanted), started)
}

/// The matching entries of one segment.
fn items(segment: &Segment, query: &Query) -> std::io::Result<VecDeque<Item>> {
    let item = |record| match record {
        Record::Head(_) => None,
        Record::Lost(count) => Some(Item::Lost(count)),
        Record::Entry(line) => {
            let entry: Arc<Entry> = Arc::new(line.into_entry()?);
            query.wants(&entry).then_some(Item::Entry(entry))
        }
    };
    Ok(segment.records()?.filter_map(item).collect())
}
