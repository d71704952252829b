//! The log tree: every line of every service, child process and the kernel, by dotted name.
//!
//! Services write through `tracing` ([`layer`]), child processes through a
//! [`Sink`], the kernel through [`kernel`]. The console reads the tree, and important
//! entries are copied to the serial port as they are written.
//!
//! ```text
//! tracing --layer--+                       +--> names: 8,192 entries each
//! child ----sink---+--> Tree::append ------+--> readers: bounded, lossy, informed
//! /dev/kmsg -------+                       +--> serial::Lines, if it matters enough
//! ```
//!
//! Invariants:
//! - A writer never waits for a reader: a slow reader loses entries and receives the
//!   number of lost ones.
//! - Memory is bounded twice, by entries a name and by bytes overall; the name
//!   that holds most bytes pays first, so a chatty one cannot drive out the rest.
//! - The same line of a program is kept once in half a minute, with the number of the
//!   others.
//! - Backlog and stream of a reader meet without a gap or a repeated entry.
//!
//! What this module does not do: keep entries beyond the boot ([`ring`] does).

pub mod kernel;
pub mod layer;
pub mod parse;
mod reader;
mod repeats;
pub mod ring;
mod sink;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use self::parse::Parser;
pub use self::reader::{Backlog, Item, Kinds, Query, Reader};
pub use self::sink::{Rule, Sink, text};
use crate::lines::Lines;
use polis_base::serial::{self, Severity};

/// Entries kept of one name: some hours of a talkative service.
pub const ENTRIES_MAX: usize = 8192;
/// Bytes kept overall. The node as a whole must stay below 40 MiB.
pub const BYTES_MAX: usize = 6 * 1024 * 1024;
/// Bytes of one message; more is cut off and marked.
pub const MESSAGE_MAX: usize = 8 * 1024;
/// Fields of one entry; more are dropped.
const FIELDS_MAX: usize = 64;
/// Bytes of the name of a field, once the entry is full.
const FIELD_NAME_MAX: usize = 64;
/// The approximate size of an entry without its texts.
const ENTRY_OVERHEAD: usize = 160;

/// The kind of writer of an entry; decides which entries go to the slow serial line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A service of the node: from `Info` on.
    Service,
    /// A program that a service started: from `Warning` on.
    Program,
    /// The kernel: from `Warning` on, and only messages from now on, since the kernel
    /// printed the earlier ones itself.
    Kernel,
}

/// One entry of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Grows by one with every entry of the tree.
    pub number: u64,
    /// Seconds since the kernel started.
    pub at: Duration,
    /// The dotted name of the writer.
    pub name: Arc<str>,
    /// The writer.
    pub origin: Origin,
    /// The content.
    pub body: Body,
}

/// The content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The writer gave a severity.
    Levelled(Levelled),
    /// A line of text without metadata.
    Raw(String),
}

/// A message with its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levelled {
    /// How much it matters.
    pub severity: Severity,
    /// Where in the writer's code it comes from; empty if unknown.
    pub source: String,
    /// The time as the writer gave it, if present.
    pub stamp: Option<String>,
    /// The message itself.
    pub message: String,
    /// All other fields, in the writer's order.
    pub fields: Vec<(String, String)>,
}

impl Levelled {
    /// A message without other fields.
    #[must_use]
    pub fn new(severity: Severity, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { severity, source: String::new(), stamp: None, message, fields: Vec::new() }
    }
}

impl Body {
    /// Its severity; a raw line counts as `Info`.
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Self::Levelled(levelled) => levelled.severity,
            Self::Raw(_) => Severity::Info,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Raw(text) => text.len(),
            Self::Levelled(it) => {
                let fields: usize = it.fields.iter().map(|(k, v)| k.len() + v.len() + 48).sum();
                it.source.len()
                    + it.stamp.as_ref().map_or(0, String::len)
                    + it.message.len()
                    + fields
            }
        }
    }

    /// Cuts the message down to [`MESSAGE_MAX`], and drops fields beyond the same
    /// bound.
    fn limit(&mut self) {
        match self {
            Self::Raw(text) => cut(text, MESSAGE_MAX),
            Self::Levelled(it) => {
                cut(&mut it.message, MESSAGE_MAX);
                let mut left = MESSAGE_MAX;
                for (key, value) in &mut it.fields {
                    cut(value, MESSAGE_MAX);
                    let fits = left.checked_sub(key.len() + value.len());
                    left = fits.unwrap_or(0);
                    if fits.is_none() {
                        value.clear();
                        value.push('…');
                        cut(key, FIELD_NAME_MAX);
                    }
                }
                it.fields.truncate(FIELDS_MAX);
            }
        }
    }
}

fn cut(text: &mut String, max: usize) {
    if text.len() > max {
        let end = (0..=max).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
}

impl fmt::Display for Body {
    /// The message, then ` key=value` for each field.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw(text) => f.write_str(text),
            Self::Levelled(it) => {
                f.write_str(&it.message)?;
                for (key, value) in &it.fields {
                    let quote = if value.is_empty() || value.contains(' ') { "\"" } else { "" };
                    write!(f, " {key}={quote}{value}{quote}")?;
                }
                Ok(())
            }
        }
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        ENTRY_OVERHEAD + self.body.bytes()
    }

    /// The entry as the serial line shows it.
    #[must_use]
    pub fn line(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _infallible = write!(text, "{}", self.body);
        serial::log_line(self.at, self.body.severity(), &self.name, &text)
    }

    fn is_for_serial(&self, started: Duration) -> bool {
        let severity = self.body.severity();
        match self.origin {
            Origin::Service => severity >= Severity::Info,
            Origin::Program => severity >= Severity::Warning,
            Origin::Kernel => severity >= Severity::Warning && self.at >= started,
        }
    }
}

/// The tree. Cheap to clone.
#[derive(Clone)]
pub struct Tree(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    serial: Option<Lines>,
    started: Duration,
    lost: Arc<AtomicU64>,
    /// The number of the kernel's next message; zero before the first one.
    kernel: AtomicU64,
}

#[derive(Default)]
struct State {
    number: u64,
    bytes: usize,
    names: BTreeMap<Arc<str>, Name>,
    readers: Vec<reader::Writer>,
}

#[derive(Default)]
struct Name {
    bytes: usize,
    entries: VecDeque<Arc<Entry>>,
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Tree")
            .field("names", &state.names.len())
            .field("bytes", &state.bytes)
            .finish_non_exhaustive()
    }
}

impl Tree {
    /// An empty tree that copies important entries to `serial`.
    #[must_use]
    pub fn new(serial: Option<Lines>) -> Self {
        let started = polis_base::sys::clock::uptime();
        let (state, lost, kernel) = Default::default();
        Self(Arc::new(Inner { state, serial, started, lost, kernel }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change below leaves the state consistent, so a panic elsewhere does no
        // harm.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry that was written now.
    pub fn append(&self, name: &str, origin: Origin, body: Body) {
        self.put(None, name, origin, body);
    }

    /// Adds an entry that was written at `at`.
    pub fn append_at(&self, at: Duration, name: &str, origin: Origin, body: Body) {
        self.put(Some(at), name, origin, body);
    }

    fn put(&self, at: Option<Duration>, name: &str, origin: Origin, mut body: Body) {
        body.limit();
        let mut state = self.lock();
        // Inside the lock: of entries that are written now, a later one has no earlier time.
        let at = at.unwrap_or_else(polis_base::sys::clock::uptime);
        let name = match state.names.get_key_value(name) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::from(name),
        };
        let entry =
            Arc::new(Entry { number: state.number, at, name: Arc::clone(&name), origin, body });
        state.number += 1;
        state.keep(name, Arc::clone(&entry));
        state.readers.retain_mut(|reader| reader.offer(&entry));
        // Inside the lock, so that the serial line has the order of the tree.
        if let Some(lines) = &self.0.serial
            && entry.is_for_serial(self.0.started)
        {
            lines.put(entry.line());
        }
    }

    /// The sink for a child process of the service `name`.
    #[must_use]
    pub fn sink(&self, name: impl Into<String>, parser: Parser) -> Sink {
        Sink::new(self.clone(), name.into(), parser)
    }

    /// The matching entries written so far, and a reader of the following ones.
    #[must_use]
    pub fn read(&self, query: Query) -> Reader {
        let mut state = self.lock();
        let backlog = state.backlog(&query);
        let (writer, reader) = reader::channel(query, backlog, Arc::clone(&self.0.lost));
        state.readers.push(writer);
        reader
    }

    /// How many entries all readers together have lost because they were too slow.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// The matching entries written so far.
    #[must_use]
    pub fn backlog(&self, query: &Query) -> Vec<Arc<Entry>> {
        self.lock().backlog(query)
    }
}

impl State {
    fn keep(&mut self, name: Arc<str>, entry: Arc<Entry>) {
        let bytes = entry.bytes();
        self.bytes += bytes;
        let kept = self.names.entry(name).or_default();
        kept.bytes += bytes;
        kept.entries.push_back(entry);
        if kept.entries.len() > ENTRIES_MAX {
            self.bytes -= kept.drop_oldest();
        }
        while self.bytes > BYTES_MAX {
            let Some(fattest) = self.names.values_mut().max_by_key(|name| name.bytes) else {
                break;
            };
            self.bytes -= fattest.drop_oldest();
        }
    }

    fn backlog(&self, query: &Query) -> Vec<Arc<Entry>> {
        let wanted = match query.backlog {
            Backlog::All => usize::MAX,
            Backlog::Last(count) => count,
            Backlog::None => return Vec::new(),
        };
        let mut found: Vec<_> = self
            .names
            .iter()
            .filter(|(name, _)| query.wants_name(name))
            // The newest `wanted` of all are among the newest `wanted` of each.
            .flat_map(|(_, kept)| {
                kept.entries.iter().rev().filter(|entry| query.wants(entry)).take(wanted)
            })
            .map(Arc::clone)
            .collect();
        found.sort_unstable_by_key(|entry| entry.number);
        found.split_off(found.len().saturating_sub(wanted))
    }
}

impl Name {
    /// Drops the oldest entry; returns how many bytes that freed.
    fn drop_oldest(&mut self) -> usize {
        let freed = self.entries.pop_front().map_or(0, |entry| entry.bytes());
        self.bytes -= freed;
        freed
    }
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tests;
