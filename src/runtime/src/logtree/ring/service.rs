//! The service that copies the log tree to the disk as it grows.
//!
//! ```text
//!            entry: into the batch           a second, enough bytes, or an error
//! [Idle] ------------------------> [Idle] -------------------------------> [Writing]
//!    ^                                                                        |
//!    +------------- written, or failed: the batch counts as lost -------------+
//! ```
//!
//! A thread that may block writes a batch, while entries go into the next one; while
//! a disk hangs, that one fills up to [`PENDING_MAX`], and later entries are counted as
//! lost.
//!
//! Invariants:
//! - An entry is at most once in the ring, however often this service or the whole node
//!   is restarted in one boot.
//! - An error is handed to the disk at once, every other entry within a second; a power
//!   cut costs at most [`SYNC`]. A segment is flushed before the next one begins.
//!
//! What this module does not do: log each failure through `tracing`. Its own lines come
//! back to it, so a full disk would be reported without end.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};
use tracing::{info, warn};

use super::plan::victims;
use super::record::{Head, Line, Record};
use super::segment::{self, Id};
use super::{Ring, SEGMENT_MAX, Status};
use crate::logtree::{Item, Query, Reader};
use crate::supervisor::Context;
use polis_base::serial::Severity;

/// How long an ordinary entry may wait for others.
const FLUSH: Duration = Duration::from_secs(1);
/// A batch of this size is written at once.
const BATCH: usize = 64 << 10;
/// Bytes that wait while the disk is slow; half a minute of a talkative boot.
const PENDING_MAX: usize = 1 << 20;
/// How long written data may stay in the kernel's memory. Each flush to the disk also
/// slows etcd, on the same disk.
const SYNC: Duration = Duration::from_secs(10);
/// The same in the first minute: the log matters most for a machine that fails early.
const SYNC_EARLY: Duration = Duration::from_secs(2);
const EARLY: Duration = Duration::from_secs(60);
/// The same when an error was written; errors come in bursts.
const SYNC_URGENT: Duration = Duration::from_secs(1);
/// How long the last batch may take when the node stops.
const LAST_MAX: Duration = Duration::from_secs(5);

/// Where and what to write; fixed for a run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory; it exists.
    pub dir: PathBuf,
    /// The bound for all segments: see [`super::bytes_max`].
    pub bytes_max: u64,
    /// The kernel's name for this boot.
    pub boot_id: String,
    /// When the kernel started, in seconds since 1970.
    pub started: u64,
    /// The image that runs.
    pub image: String,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The state of the ring, for other services.
    pub status: watch::Sender<Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The directory of the logs is unusable.
    #[error("cannot use {dir} for logs")]
    Open {
        /// The directory.
        dir: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The thread that wrote has panicked.
    #[error("the thread that writes the logs panicked")]
    Lost,
    /// The tree was dropped.
    #[error("the log tree ended")]
    TreeEnded,
}

impl Service {
    /// Writes until cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart continues behind the data on the disk. A failed write
    /// does not end the run: the status reports it, and the next batch is tried.
    pub async fn run(self, config: Config, ctx: Context) -> Result<(), RunError> {
        let dir = config.dir.clone();
        let opening = tokio::task::spawn_blocking(move || Writer::open(config));
        let opened = opening.await.map_err(|_panicked| RunError::Lost)?;
        let (writer, after) = opened.map_err(|source| RunError::Open { dir, source })?;
        info!(boot = writer.boot, bytes = writer.bytes, "logs are kept on the disk");
        self.status.send_replace(Status {
            ring: Some(Ring::new(writer.config.dir.clone(), writer.boot)),
            bytes: writer.bytes,
            records: writer.records,
            ..Status::default()
        });
        ctx.healthy();
        // The first tick comes later: the entries already in the tree are written
        // first, in one batch.
        let mut tick = interval_at(Instant::now() + FLUSH, FLUSH);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let pump = Pump {
            reader: ctx.logs().read(Query::all()),
            status: self.status,
            batch: Batch::default(),
            idle: Some(writer),
            writing: None,
            after,
            lost: 0,
            tick,
        };
        pump.run(&ctx).await
    }
}

/// The next event.
enum Event {
    Cancelled,
    Item(Option<Item>),
    Tick,
    Written(Result<Done, RunError>),
}

/// Entries that are still to be written.
#[derive(Debug, Default)]
struct Batch {
    text: String,
    entries: u64,
    /// Entries lost before the text.
    lost: u64,
    urgent: bool,
}

impl Batch {
    /// Adds one line, if there is room.
    fn put(&mut self, line: Line, urgent: bool) -> bool {
        let fits = self.text.len() < PENDING_MAX;
        if fits {
            Record::Entry(line).put(&mut self.text);
            self.entries += 1;
            self.urgent |= urgent;
        }
        fits
    }
}

/// A batch and its result.
struct Done {
    writer: Writer,
    /// Entries of the batch that are missing from the disk.
    failed: u64,
    /// Entries lost before it, whose count is not on the disk yet.
    untold: u64,
    error: Option<io::Error>,
}

struct Pump {
    reader: Reader,
    status: watch::Sender<Status>,
    batch: Batch,
    /// The writer, unless it is writing.
    idle: Option<Writer>,
    writing: Option<JoinHandle<Done>>,
    /// Entries up to this number are on the disk already.
    after: Option<u64>,
    /// Entries that are missing, in total.
    lost: u64,
    tick: Interval,
}

impl Pump {
    async fn run(mut self, ctx: &Context) -> Result<(), RunError> {
        loop {
            match self.next_event(ctx).await {
                Event::Cancelled => break,
                Event::Item(Some(item)) => {
                    self.take(item);
                    self.hurry();
                }
                Event::Item(None) => return Err(RunError::TreeEnded),
                Event::Tick => self.write(),
                Event::Written(done) => {
                    self.written(done?);
                    self.hurry();
                }
            }
        }
        while let Some(item) = self.reader.try_next() {
            self.take(item);
        }
        // A slower disk does not delay the stop any longer.
        match timeout(LAST_MAX, self.finish()).await {
            Ok(finished) => finished,
            Err(_elapsed) => {
                warn!("the disk is too slow for the last lines of the log");
                Ok(())
            }
        }
    }

    async fn next_event(&mut self, ctx: &Context) -> Event {
        let written = async {
            match &mut self.writing {
                Some(writing) => writing.await.map_err(|_panicked| RunError::Lost),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Event::Cancelled,
            // Cancel-safe: a handle that is waited for by reference.
            done = written => Event::Written(done),
            // Cancel-safe per its documentation.
            item = self.reader.next() => Event::Item(item),
            // Cancel-safe per its documentation.
            _now = self.tick.tick() => Event::Tick,
        }
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Entry(entry) if self.after.is_some_and(|after| entry.number <= after) => {}
            Item::Entry(entry) => {
                let urgent = entry.body.severity() >= Severity::Error;
                if !self.batch.put(Line::of(&entry), urgent) {
                    self.lose(1);
                }
            }
            Item::Lost(count) => self.lose(count),
        }
    }

    fn lose(&mut self, count: u64) {
        self.lost += count;
        self.batch.lost += count;
    }

    /// Starts writing if the batch is urgent or full.
    fn hurry(&mut self) {
        if self.batch.urgent || self.batch.text.len() >= BATCH {
            self.write();
        }
    }

    /// Hands the batch to the disk, if the writer is idle and the batch is not empty.
    fn write(&mut self) {
        if let Some(writer) = self.idle.take_if(|writer| {
            self.batch.entries > 0 || self.batch.lost > 0 || writer.is_sync_due(false)
        }) {
            let batch = std::mem::take(&mut self.batch);
            self.writing = Some(tokio::task::spawn_blocking(move || writer.write(batch)));
        }
    }

    fn written(&mut self, done: Done) {
        self.writing = None;
        // The count of lost entries comes before later entries.
        self.lose(done.failed);
        self.batch.lost += done.untold;
        let lost = self.lost;
        let (bytes, records) = (done.writer.bytes, done.writer.records);
        self.idle = Some(done.writer);
        let error = done.error.map(|error| error.to_string());
        self.status.send_if_modified(|status| {
            let before = status.clone();
            status.bytes = bytes;
            status.records = records;
            status.lost = lost;
            if status.error.is_none()
                && let Some(error) = &error
            {
                // Once: this line goes to the disk, too.
                warn!(error, "the log cannot be written to the disk");
            }
            status.error = error;
            before != *status
        });
    }

    /// Writes the remaining entries, and flushes them to the disk.
    async fn finish(&mut self) -> Result<(), RunError> {
        if let Some(writing) = self.writing.take() {
            let done = writing.await.map_err(|_panicked| RunError::Lost)?;
            self.written(done);
        }
        self.batch.urgent = true;
        if let Some(mut writer) = self.idle.take() {
            let batch = std::mem::take(&mut self.batch);
            // The last batch is flushed at once.
            writer.synced = None;
            let last = tokio::task::spawn_blocking(move || writer.write(batch));
            self.written(last.await.map_err(|_panicked| RunError::Lost)?);
        }
        Ok(())
    }
}

/// The number of the record behind those of all segments. Blocks.
fn next_record(segments: &[segment::Segment]) -> io::Result<u64> {
    let mut count = 0_u64;
    for segment in segments.iter().rev() {
        let is_counted = |record: &Record| !matches!(record, Record::Head(_));
        count += segment.records()?.filter(is_counted).count() as u64;
        // The records of a segment whose head is torn follow those of the one before it.
        if let Some(head) = segment.head()? {
            return Ok(head.first.unwrap_or(0).saturating_add(count));
        }
    }
    Ok(count)
}

/// The writing end. Every method blocks on the disk.
#[derive(Debug)]
struct Writer {
    config: Config,
    boot: u64,
    /// The number of the next segment.
    next: u64,
    file: Option<File>,
    /// Bytes in the open file.
    length: u64,
    /// Bytes of all segments.
    bytes: u64,
    /// The number of the next record.
    records: u64,
    opened: Instant,
    /// The time of the last flush.
    synced: Option<Instant>,
    dirty: bool,
}

impl Writer {
    /// Continues behind the existing segments; returns the number up to which entries
    /// of this process are on the disk.
    fn open(config: Config) -> io::Result<(Self, Option<u64>)> {
        let segments = segment::list(&config.dir)?;
        let newest = segments.last().map_or(0, |segment| segment.id.boot);
        let of_newest: Vec<_> = segments.iter().filter(|it| it.id.boot == newest).collect();
        let heads = of_newest.iter().map(|it| it.head().ok().flatten());
        // A boot without an ID never matches the one before.
        let named = !config.boot_id.is_empty();
        let is_ours = |head: &Head| named && head.boot_id == config.boot_id;
        let is_now = heads.flatten().any(|head| is_ours(&head));
        let (boot, next) = match of_newest.last() {
            Some(last) if is_now => (newest, last.id.number + 1),
            // A segment without a head does not belong to this boot.
            Some(_) => (newest + 1, 0),
            None => (newest, 0),
        };
        let mut after = None;
        for segment in of_newest.iter().rev().filter(|_| is_now) {
            let head = segment.head()?;
            if head.is_none_or(|head| !is_ours(&head) || head.process != std::process::id()) {
                break;
            }
            let numbers = segment.records()?.rev().find_map(|record| match record {
                Record::Entry(line) => Some(line.number()),
                Record::Head(_) | Record::Lost(_) => None,
            });
            if numbers.is_some() {
                after = numbers;
                break;
            }
        }
        let bytes = segments.iter().map(|segment| segment.bytes).sum();
        let writer = Self {
            config,
            boot,
            next,
            file: None,
            length: 0,
            bytes,
            records: next_record(&segments)?,
            opened: Instant::now(),
            synced: None,
            dirty: false,
        };
        Ok((writer, after))
    }

    /// Whether a flush is due.
    fn is_sync_due(&self, urgent: bool) -> bool {
        let interval = match (urgent, self.opened.elapsed() < EARLY) {
            (true, _) => SYNC_URGENT,
            (false, true) => SYNC_EARLY,
            (false, false) => SYNC,
        };
        self.dirty && self.synced.is_none_or(|synced| synced.elapsed() >= interval)
    }

    fn write(mut self, batch: Batch) -> Done {
        let (failed, untold) = (batch.entries, batch.lost);
        match self.try_write(batch) {
            Ok(()) => Done { writer: self, failed: 0, untold: 0, error: None },
            Err(error) => {
                // The file may end with a torn line: nothing may follow it. A full disk can still
                // flush what it has; the error of another one is reported already.
                self.leave().ok();
                Done { writer: self, failed, untold, error: Some(error) }
            }
        }
    }

    fn try_write(&mut self, batch: Batch) -> io::Result<()> {
        let mut text = String::new();
        if batch.lost > 0 {
            Record::Lost(batch.lost).put(&mut text);
        }
        text.push_str(&batch.text);
        if !text.is_empty() {
            if self.length + text.len() as u64 > SEGMENT_MAX {
                self.leave()?;
            }
            if self.file.is_none() {
                self.begin()?;
            }
            self.append(text.as_bytes())?;
            self.records = self.records.saturating_add(batch.entries + u64::from(batch.lost > 0));
        }
        if self.is_sync_due(batch.urgent) {
            if let Some(file) = &self.file {
                file.sync_data()?;
            }
            self.synced = Some(Instant::now());
            self.dirty = false;
        }
        Ok(())
    }

    /// Closes the open segment. It is flushed here, since no later flush reaches it.
    fn leave(&mut self) -> io::Result<()> {
        let Some(file) = self.file.take() else { return Ok(()) };
        if self.dirty {
            file.sync_data()?;
            self.dirty = false;
        }
        Ok(())
    }

    /// Makes room, and begins a segment.
    fn begin(&mut self) -> io::Result<()> {
        let dir = &self.config.dir;
        let segments = segment::list(dir)?;
        let sizes: Vec<_> = segments.iter().map(|it| (it.id, it.bytes)).collect();
        let gone = victims(&sizes, self.boot, self.config.bytes_max);
        for id in &gone {
            segment::remove(dir, *id)?;
        }
        let left = sizes.iter().filter(|(id, _)| !gone.contains(id));
        self.bytes = left.map(|(_, bytes)| bytes).sum();
        // A name that is taken costs one batch, and is skipped by the next: it may be a torn
        // segment of this boot.
        let id = Id { boot: self.boot, number: self.next };
        self.next += 1;
        self.file = Some(id.create(dir)?);
        self.length = 0;
        // The name must survive a power cut, or its content is lost with it.
        File::open(dir)?.sync_all()?;
        let mut head = String::new();
        Record::Head(Head {
            boot_id: self.config.boot_id.clone(),
            started: self.config.started,
            image: self.config.image.clone(),
            process: std::process::id(),
            first: Some(self.records),
        })
        .put(&mut head);
        self.append(head.as_bytes())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        self.dirty = true;
        let written = file.write_all(bytes);
        if written.is_err() {
            // A batch that counts as lost must not be on the disk in part; a disk that
            // rejects even this leaves a torn line, which is skipped.
            file.set_len(self.length).ok();
        }
        let length = file.metadata().map_or(self.length, |metadata| metadata.len());
        self.bytes = self.bytes.saturating_sub(self.length) + length;
        self.length = length;
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(dir: &tempfile::TempDir) -> Writer {
        let config = Config {
            dir: dir.path().to_owned(),
            bytes_max: 8 * SEGMENT_MAX,
            boot_id: "one".to_owned(),
            started: 1_700_000_000,
            image: "image".to_owned(),
        };
        Writer::open(config).unwrap().0
    }

    fn batch() -> Batch {
        Batch { text: "line\n".to_owned(), entries: 1, ..Batch::default() }
    }

    /// The kernel refuses to flush this device.
    fn unflushable() -> Option<File> {
        Some(File::options().append(true).open("/dev/null").unwrap())
    }

    #[tokio::test]
    async fn a_segment_is_flushed_before_the_next_one_begins() {
        let dir = tempfile::tempdir().unwrap();
        let full = Writer { file: unflushable(), length: SEGMENT_MAX, ..writer(&dir) };
        let done = Writer { dirty: true, ..full }.write(batch());
        let error = done.error.map(|error| error.kind());
        assert_eq!((error, done.failed), (Some(io::ErrorKind::InvalidInput), 1));
        assert!(segment::list(dir.path()).unwrap().is_empty());
        // The next batch begins a segment all the same.
        let done = done.writer.write(batch());
        assert!(done.error.is_none(), "{:?}", done.error);
        assert_eq!(segment::list(dir.path()).unwrap().len(), 1);
        // A segment that is on the disk is not flushed again.
        let flushed = Writer { file: unflushable(), length: SEGMENT_MAX, ..done.writer };
        let done = Writer { dirty: false, ..flushed }.write(batch());
        assert!(done.error.is_none(), "{:?}", done.error);
        assert_eq!(segment::list(dir.path()).unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_name_that_is_taken_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let writer = writer(&dir);
        let taken = Id { boot: writer.boot, number: writer.next }.path(dir.path());
        std::fs::create_dir(taken).unwrap();
        let done = writer.write(batch());
        let error = done.error.map(|error| error.kind());
        assert_eq!((error, done.failed), (Some(io::ErrorKind::AlreadyExists), 1));
        let done = done.writer.write(batch());
        assert!(done.error.is_none(), "{:?}", done.error);
    }

    #[tokio::test]
    async fn a_segment_that_takes_no_more_is_flushed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("full");
        std::fs::write(&path, "written before").unwrap();
        let full = Writer { file: Some(File::open(&path).unwrap()), length: 14, ..writer(&dir) };
        let done = Writer { dirty: true, ..full }.write(batch());
        assert_eq!((done.error.is_some(), done.failed), (true, 1));
        assert!(done.writer.file.is_none() && !done.writer.dirty);
    }
}
