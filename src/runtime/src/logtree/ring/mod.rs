//! The log ring: the log tree on the data partition, by boot, within a bound of bytes.
//!
//! [`service`] copies the entries of the tree, from the first line of the boot on, as
//! soon as the data partition is open. A reader of an earlier boot takes the [`Ring`]
//! from [`Status`], and so does a follower, which reads all boots one after the other
//! ([`follow`]).
//!
//! ```text
//! tree --reader--> [service] --batches--> boot 7: 0.log 1.log 2.log   a segment is 1 MiB
//!                      |                  boot 8: 0.log
//!                      +--> Status --> Ring --boots, read--> BootLog --> entries
//!                                            --after a Place--> Stretch --> next Place
//! ```
//!
//! A segment is a file of lines ([`record`]), each with a checksum. Every opening
//! begins a new segment, so a power cut can only tear the last line of a segment; it is
//! skipped, like any damaged line.
//!
//! Invariants:
//! - A writer of the tree never waits for the disk: entries that a slow disk cannot
//!   take are counted, and the count is written in their place.
//! - All segments together stay within the bound, and boots within [`BOOTS_MAX`].
//! - A boot that logs much drives out its own middle before any older boot: half of the
//!   room belongs to the other boots ([`plan`]).
//!
//! What this module does not do: find the data partition (`root` does).

mod boot_log;
mod follow;
mod plan;
mod record;
mod segment;
mod service;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use self::boot_log::BootLog;
pub use self::follow::{Place, Recorder, Stretch};
pub use self::service::{Config, RunError, Service};

use self::record::Head;
use self::segment::Segment;
use super::Query;
use crate::supervisor::{Lost, attempt};

/// Bytes of one segment: what one deletion frees, and what a reader holds.
pub const SEGMENT_MAX: u64 = 1 << 20;
/// Bytes of all segments where there is room enough.
pub const BYTES_MAX: u64 = 64 << 20;
/// Boots that are kept, with this one.
pub const BOOTS_MAX: usize = 16;
/// The part of a partition that logs may take, as a divisor: a small partition is
/// reserved for the data of the cluster.
const SHARE: u64 = 32;
/// A smaller ring would lose a boot while it is written.
const BYTES_MIN: u64 = 8 * SEGMENT_MAX;

/// The bound for a partition of `size` bytes.
#[must_use]
pub fn bytes_max(size: u64) -> u64 {
    (size / SHARE).clamp(BYTES_MIN, BYTES_MAX)
}

/// The state of the ring, for other services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The ring, once its directory exists.
    pub ring: Option<Ring>,
    /// Bytes of all segments.
    pub bytes: u64,
    /// Records that this disk ever had: the number of the next one.
    pub records: u64,
    /// Entries of this boot that are missing from it, because the disk was too slow or
    /// rejected them.
    pub lost: u64,
    /// Why writing fails at the moment.
    pub error: Option<String>,
}

/// One boot that the ring knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// How many boots ago it was: 0 for this one.
    pub ago: u32,
    /// The kernel's name for it.
    pub id: String,
    /// When the kernel started, in seconds since 1970, by the clock of that time.
    pub started: u64,
    /// The image that it ran from.
    pub image: String,
    /// Seconds from the start of the kernel to the last entry.
    pub last: Duration,
    /// Its size on the disk.
    pub bytes: u64,
}

/// Which boots have a log, where `kept` do: in the numbers that a request uses.
fn range(kept: usize) -> String {
    match kept.saturating_sub(1) {
        0 => "only the current boot's log is kept".to_owned(),
        oldest => format!("the logs of boots -{oldest} to 0 are kept"),
    }
}

/// Why an earlier boot cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The boot was dropped, or never existed.
    #[error("boot {asked} has no log: {}", range(*kept))]
    NoSuchBoot {
        /// The requested boot.
        asked: i32,
        /// How many boots are kept.
        kept: usize,
    },
    /// The disk failed.
    #[error("cannot read the logs in {dir}")]
    Disk {
        /// The directory of the logs.
        dir: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The thread that read has panicked.
    #[error("the thread that read the logs panicked")]
    Lost,
}

impl From<Lost> for Error {
    fn from(Lost: Lost) -> Self {
        Self::Lost
    }
}

/// The reading end. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    dir: Arc<PathBuf>,
    /// The number of this boot.
    boot: u64,
}

impl Ring {
    fn new(dir: PathBuf, boot: u64) -> Self {
        Self { dir: Arc::new(dir), boot }
    }

    /// Every boot that is kept, this one first.
    ///
    /// # Errors
    ///
    /// [`Error`] if the disk cannot be read.
    pub async fn boots(&self) -> Result<Vec<Boot>, Error> {
        let ring = self.clone();
        attempt(move || {
            let segments = segment::list(&ring.dir)?;
            let numbers = numbers(&segments, ring.boot);
            let boots = numbers.iter().zip(0..).map(|(number, ago)| {
                let of_it: Vec<_> = segments.iter().filter(|it| it.id.boot == *number).collect();
                describe(&of_it, ago)
            });
            Ok(boots.collect())
        })
        .await?
        .map_err(|source| self.disk(source))
    }

    /// The log of the boot `boot`: 0 is this one, as far as it is on the disk, -1 the
    /// one before. `query` selects the entries and their number.
    ///
    /// # Errors
    ///
    /// [`Error`] if the boot is missing, or the disk cannot be read.
    pub async fn read(&self, boot: i32, query: Query) -> Result<BootLog, Error> {
        let ring = self.clone();
        let segments =
            attempt(move || segment::list(&ring.dir)).await?.map_err(|source| self.disk(source))?;
        let numbers = numbers(&segments, self.boot);
        // A positive number names a later boot, which cannot exist.
        let index = boot.checked_neg().and_then(|ago| usize::try_from(ago).ok());
        let Some(number) = index.and_then(|index| numbers.get(index)) else {
            return Err(Error::NoSuchBoot { asked: boot, kept: numbers.len() });
        };
        let of_it = segments.into_iter().filter(|it| it.id.boot == *number).collect();
        BootLog::open(of_it, query).await
    }

    fn disk(&self, source: io::Error) -> Error {
        Error::Disk { dir: self.dir.as_ref().clone(), source }
    }
}

/// The numbers of all boots, the newest first; includes this one even before it has
/// written anything.
fn numbers(segments: &[Segment], now: u64) -> Vec<u64> {
    let mut numbers: Vec<_> = segments.iter().map(|it| it.id.boot).chain([now]).collect();
    numbers.sort_unstable_by(|one, other| other.cmp(one));
    numbers.dedup();
    numbers
}

/// The description of one boot from its segments. Unreadable fields stay empty, so that
/// a damaged segment does not make the list of boots fail.
fn describe(segments: &[&Segment], ago: u32) -> Boot {
    let head = segments.iter().find_map(|it| it.head().ok().flatten());
    let Head { boot_id, started, image, .. } = head.unwrap_or_default();
    let last = segments.iter().rev().find_map(|it| it.last().ok().flatten());
    Boot {
        ago,
        id: boot_id,
        started,
        image,
        last: last.unwrap_or_default(),
        bytes: segments.iter().map(|it| it.bytes).sum(),
    }
}
