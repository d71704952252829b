//! Whether the disk answers: requests that the kernel has given it, and that do not end.
//!
//! A disk that hangs reports nothing. The kernel gives up on most after some minutes, and then
//! logs an error (`health` reads it); on others, virtual ones among them, it waits for ever, and
//! every program that writes with it.
//!
//! ```text
//!            requests without an end of one for SLOW,         or for HUNG
//!            or a flush that has not
//! [answers] ---------------------------------------> [stalled] ----------> given up
//!     ^                one ended, or no request is left |
//!     +-------------------------------------------------+
//! ```
//!
//! The kernel counts no flush of the disk's cache among the requests, and everything that must
//! be durable waits for one: so the disk is asked for one now and then, and the time of the
//! answer counts like that of any request.
//!
//! What this module does not do: ask again while the disk owes an answer.

use std::fs::{self, File};
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use polis_base::sys::command_line;

/// Without an answer for so long, a disk is called stalled. A disk that reads a bad sector again
/// and again takes seven seconds, one that starts its motor ten.
pub const SLOW: Duration = Duration::from_secs(15);

/// Without one for so long, the partition is given up. The other path of a storage network may
/// take five minutes, and a kernel that gives up has tried six times thirty seconds by then.
const HUNG: Duration = Duration::from_secs(600);

/// Bounds of `polis.disk-deadline`, in seconds.
const HUNG_SECONDS: RangeInclusive<u64> = 30..=3600;

/// How often the disk is asked to flush its cache.
const FLUSH: Duration = Duration::from_secs(10);

/// A look that comes so much later than the one before says that the machine stood still: the
/// disk had no time to answer, either.
const GAP: Duration = Duration::from_secs(10);

/// After how long without an answer the partition is given up, by the kernel command line.
#[must_use]
pub fn deadline(line: &str) -> Duration {
    command_line::seconds(line, "polis.disk-deadline", HUNG_SECONDS).unwrap_or(HUNG)
}

/// A disk whose answers are watched: to its requests, and to the flushes that it is asked for.
#[derive(Debug)]
pub struct Watched {
    /// The kernel's counters of it.
    counters: PathBuf,
    requests: Watch,
    pub(crate) flushes: Flushes,
}

impl Watched {
    /// The disk with this device, which sysfs at `sys` describes.
    #[must_use]
    pub fn of(sys: &Path, device: &Path) -> Self {
        let counters = sys.join("block").join(device.file_name().unwrap_or_default()).join("stat");
        Self { counters, requests: Watch::default(), flushes: Flushes::of(device) }
    }

    /// Looks at it, and asks it for a flush when it is time; returns since when it owes an answer.
    pub fn look(&mut self, now: Duration) -> Option<Duration> {
        let counters = fs::read_to_string(&self.counters);
        let requests = counters.ok().and_then(|text| Requests::parse(&text));
        let requests = self.requests.look(requests, now);
        requests.into_iter().chain(self.flushes.look(now)).min()
    }
}

/// The kernel's counters of a disk, in `/sys/block/DISK/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Requests {
    /// Reads, writes, discards and flushes that have ended since the disk was found.
    done: u64,
    /// Those that it has now.
    waiting: u64,
}

impl Requests {
    /// Reads the numbers (`Documentation/block/stat.rst` of the kernel): reads are the first,
    /// writes the fifth, requests in flight the ninth, discards the twelfth, flushes the
    /// sixteenth; older kernels end earlier.
    fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u64> =
            text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        let waiting = *numbers.get(8)?;
        let ended = [0, 4, 11, 15].into_iter().filter_map(|at| numbers.get(at));
        Some(Self { done: ended.fold(0, |sum, count| sum.wrapping_add(*count)), waiting })
    }
}

/// The looks at a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Looks {
    last: Option<Duration>,
}

impl Looks {
    /// Notes a look; returns how long the machine stood still before it.
    fn gap(&mut self, now: Duration) -> Duration {
        let gap = self.last.replace(now).map_or(Duration::ZERO, |last| now.saturating_sub(last));
        if gap > GAP { gap } else { Duration::ZERO }
    }
}

/// The requests of a disk, watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Watch {
    /// How many had ended, since when nothing has changed, while requests waited.
    still: Option<(u64, Duration)>,
    looks: Looks,
}

impl Watch {
    /// Notes what the kernel counts `now`; returns since when requests wait without an end of one.
    fn look(&mut self, requests: Option<Requests>, now: Duration) -> Option<Duration> {
        let gap = self.looks.gap(now);
        if let Some((_done, since)) = &mut self.still {
            *since += gap;
        }
        self.still = match (requests, self.still) {
            (Some(Requests { done, waiting: 1.. }), Some((before, since))) if done == before => {
                Some((before, since))
            }
            (Some(Requests { done, waiting: 1.. }), _) => Some((done, now)),
            // A disk that is gone has no requests; the kernel logs their errors.
            (Some(Requests { waiting: 0, .. }) | None, _) => None,
        };
        self.still.map(|(_done, since)| since)
    }
}

/// The flushes that a disk is asked for.
#[derive(Debug)]
pub(crate) struct Flushes {
    device: PathBuf,
    /// The one that the disk owes, and since when.
    asked: Option<(Duration, JoinHandle<io::Result<()>>)>,
    looks: Looks,
    next: Duration,
}

impl Flushes {
    /// Nothing was asked yet of the disk with this device.
    fn of(device: &Path) -> Self {
        let (device, looks) = (device.to_owned(), Looks::default());
        Self { device, asked: None, looks, next: Duration::ZERO }
    }

    /// Asks when it is time; returns since when the disk owes an answer. An error is an answer:
    /// the kernel logs it. Each flush has a thread of its own, which nothing else can keep busy.
    pub(crate) fn look(&mut self, now: Duration) -> Option<Duration> {
        let gap = self.looks.gap(now);
        if let Some((since, _thread)) = &mut self.asked {
            *since += gap;
        }
        self.asked.take_if(|(_since, thread)| thread.is_finished());
        if self.asked.is_none() && now >= self.next {
            let device = self.device.clone();
            // On the device of the whole disk this writes nothing, and flushes
            // (`blkdev_fsync`).
            let flush = move || File::open(device)?.sync_all();
            let thread = thread::Builder::new().name("flush".to_owned()).spawn(flush);
            // Without memory for a thread it is asked the next time.
            self.asked = thread.ok().map(|thread| (now, thread));
            self.next = now + FLUSH;
        }
        self.asked.as_ref().map(|(since, _thread)| *since)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn requests(done: u64, waiting: u64) -> Option<Requests> {
        Some(Requests { done, waiting })
    }

    #[test]
    fn the_numbers_of_a_kernel_are_read_in_their_places() {
        let now = "    4097        0   255214     1210     9001     1024   123456     8000        3 \
                   \x20    2000     9300       10        0     4000       20      300      999\n";
        assert_eq!(Requests::parse(now), requests(4097 + 9001 + 10 + 300, 3));
        let old = "1 2 3 4 5 6 7 8 9 10 11";
        assert_eq!(Requests::parse(old), requests(1 + 5, 9));
        for bad in ["", "1 2 3", "1 2 3 4 5 6 7 8 x 10 11", "1 2 3 4 5 6 7 8 -9 10 11"] {
            assert_eq!(Requests::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_disk_with_requests_of_which_none_ends_stalls_from_the_moment_that_was_first_seen() {
        let mut watch = Watch::default();
        assert_eq!(watch.look(requests(7, 0), at(1)), None);
        assert_eq!(watch.look(requests(7, 2), at(2)), Some(at(2)));
        assert_eq!(watch.look(requests(7, 4), at(10)), Some(at(2)));
        assert_eq!(watch.look(requests(8, 3), at(11)), Some(at(11)), "one has ended");
        assert_eq!(watch.look(requests(8, 0), at(12)), None);
        assert_eq!(watch.look(requests(8, 1), at(13)), Some(at(13)));
        assert_eq!(watch.look(None, at(14)), None, "the disk is gone");
    }

    #[test]
    fn the_time_in_which_the_machine_stood_still_is_not_the_disk_s() {
        let mut watch = Watch::default();
        assert_eq!(watch.look(requests(7, 1), at(1)), Some(at(1)));
        assert_eq!(watch.look(requests(7, 1), at(3)), Some(at(1)));
        assert_eq!(watch.look(requests(7, 1), at(1003)), Some(at(1001)));
        assert_eq!(watch.look(requests(7, 1), at(1005)), Some(at(1001)));
    }

    #[test]
    fn a_busy_disk_never_stalls_and_an_idle_one_does_not_either() {
        let mut watch = Watch::default();
        for second in 0..1000 {
            assert!(watch.look(requests(second, 32), at(second)).is_none_or(|s| s == at(second)));
        }
        let mut watch = Watch::default();
        for second in 0..1000 {
            assert_eq!(watch.look(requests(5, 0), at(second)), None);
        }
    }

    #[test]
    fn the_deadline_has_bounds() {
        assert_eq!(deadline("quiet"), Duration::from_secs(600));
        assert_eq!(deadline("polis.disk-deadline=30"), Duration::from_secs(30));
        assert_eq!(deadline("polis.disk-deadline=5"), Duration::from_secs(600));
    }

    /// To open a pipe without a writer waits, as a flush of a hung disk does.
    #[test]
    fn a_flush_that_does_not_end_counts_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("disk");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let mut flushes = Flushes::of(&pipe);
        assert_eq!(flushes.look(at(1)), Some(at(1)));
        assert_eq!(flushes.look(at(8)), Some(at(1)));
        assert_eq!(flushes.look(at(16)), Some(at(1)), "one is enough");
        assert_eq!(flushes.look(at(1016)), Some(at(1001)), "the machine stood still");
        let _writer = File::options().write(true).open(pipe).unwrap();
        let (_since, thread) = flushes.asked.as_ref().unwrap();
        while !thread.is_finished() {
            thread::yield_now();
        }
        // It has answered, with an error, and is asked again.
        assert_eq!(flushes.look(at(1017)), Some(at(1017)));
    }

    #[test]
    fn a_disk_that_answers_is_asked_every_ten_seconds() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut flushes = Flushes::of(file.path());
        assert_eq!(flushes.look(at(1)), Some(at(1)));
        while !flushes.asked.as_ref().unwrap().1.is_finished() {
            thread::yield_now();
        }
        for second in 2..11 {
            assert_eq!(flushes.look(at(second)), None);
        }
        assert_eq!(flushes.look(at(11)), Some(at(11)));
    }

    #[test]
    fn a_disk_is_watched_by_its_counters_and_its_flushes() {
        let folder = tempfile::tempdir().unwrap();
        let counters = folder.path().join("block/vdb");
        fs::create_dir_all(&counters).unwrap();
        // Without a device, a flush ends with an error.
        let mut disk = Watched::of(folder.path(), &folder.path().join("vdb"));
        let mut look = |second, stat: &str| {
            fs::write(counters.join("stat"), stat).unwrap();
            let owes = disk.look(at(second));
            while disk.flushes.look(at(second)).is_some() {
                thread::yield_now();
            }
            owes
        };
        look(1, "7 0 0 0 0 0 0 0 0");
        assert_eq!(look(2, "7 0 0 0 0 0 0 0 3"), Some(at(2)));
        assert_eq!(look(9, "7 0 0 0 0 0 0 0 3"), Some(at(2)));
        assert_eq!(look(10, "8 0 0 0 0 0 0 0 0"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "[ 0-9x\n-]{0,200}") {
            let _requests = Requests::parse(&text);
        }
    }
}
