//! The reading end of the log tree: a backlog first, then a stream that may lose entries.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

use super::{Body, Entry};
use polis_base::serial::Severity;

/// Entries that wait for one reader: a screen full, many times over.
const STREAM_MAX: usize = 512;

/// How many earlier entries a reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// All that are kept.
    All,
    /// The newest ones, so many.
    Last(usize),
    /// None.
    None,
}

/// Which kinds of entries a reader wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinds {
    /// Levelled and raw ones.
    All,
    /// Only levelled ones.
    Levelled,
    /// Only raw ones.
    Raw,
}

/// The query of a reader. It applies to the backlog and to the stream alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The dotted name; empty for the whole tree.
    pub name: String,
    /// Whether names below `name` are included.
    pub children: bool,
    /// Entries of a lower severity are left out.
    pub severity_min: Severity,
    /// Which kinds of entries.
    pub kinds: Kinds,
    /// How much of the backlog.
    pub backlog: Backlog,
}

impl Query {
    /// Every entry of every name.
    #[must_use]
    pub fn all() -> Self {
        Self {
            name: String::new(),
            children: true,
            severity_min: Severity::Debug,
            kinds: Kinds::All,
            backlog: Backlog::All,
        }
    }

    pub(super) fn wants_name(&self, name: &str) -> bool {
        if self.name.is_empty() {
            return self.children || name.is_empty();
        }
        match name.strip_prefix(self.name.as_str()) {
            Some("") => true,
            Some(rest) => self.children && rest.starts_with('.'),
            None => false,
        }
    }

    /// Whether `entry` matches the query.
    #[must_use]
    pub fn wants(&self, entry: &Entry) -> bool {
        let kind = match (self.kinds, &entry.body) {
            (Kinds::All, _) | (Kinds::Levelled, Body::Levelled(_)) | (Kinds::Raw, Body::Raw(_)) => {
                true
            }
            (Kinds::Levelled, Body::Raw(_)) | (Kinds::Raw, Body::Levelled(_)) => false,
        };
        kind && entry.body.severity() >= self.severity_min && self.wants_name(&entry.name)
    }
}

/// The next item of a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// An entry.
    Entry(Arc<Entry>),
    /// The reader was too slow, and lost so many entries.
    Lost(u64),
}

/// The reading end. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Reader {
    backlog: VecDeque<Arc<Entry>>,
    stream: mpsc::Receiver<Arc<Entry>>,
    lost: Arc<AtomicU64>,
}

impl Reader {
    /// The next entry; `None` when the tree was dropped. Cancel-safe.
    pub async fn next(&mut self) -> Option<Item> {
        if let Some(item) = self.ready() {
            return Some(item);
        }
        self.stream.recv().await.map(Item::Entry)
    }

    /// The next entry, if one is available.
    pub fn try_next(&mut self) -> Option<Item> {
        self.ready().or_else(|| self.stream.try_recv().ok().map(Item::Entry))
    }

    /// The backlog, then the count of lost entries.
    ///
    /// Lost entries come behind those that still wait in the full queue; the reader
    /// receives the count before them, which is as near as a counter can be.
    fn ready(&mut self) -> Option<Item> {
        if let Some(entry) = self.backlog.pop_front() {
            return Some(Item::Entry(entry));
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        (lost > 0).then_some(Item::Lost(lost))
    }
}

/// The writing end, held by the tree.
pub(super) struct Writer {
    query: Query,
    stream: mpsc::Sender<Arc<Entry>>,
    lost: Arc<AtomicU64>,
    /// The same count, summed over all readers that ever existed.
    lost_by_all: Arc<AtomicU64>,
}

impl Writer {
    /// Passes `entry` on if it matches the query. `false` when the reader is gone.
    pub(super) fn offer(&mut self, entry: &Arc<Entry>) -> bool {
        if !self.query.wants(entry) {
            return !self.stream.is_closed();
        }
        match self.stream.try_send(Arc::clone(entry)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                self.lost_by_all.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }
}

pub(super) fn channel(
    query: Query,
    backlog: Vec<Arc<Entry>>,
    lost_by_all: Arc<AtomicU64>,
) -> (Writer, Reader) {
    let (stream, entries) = mpsc::channel(STREAM_MAX);
    let lost = Arc::<AtomicU64>::default();
    let writer = Writer { query, stream, lost: Arc::clone(&lost), lost_by_all };
    (writer, Reader { backlog: backlog.into(), stream: entries, lost })
}
