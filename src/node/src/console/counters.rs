//! The counters of the kernel, and the fill level of the data partition.
//!
//! Invariants:
//! - A read costs a few files of /proc, and nothing that waits for a device.
//! - A counter that cannot be read is zero: a console with an empty chart is better than
//!   no console.
//!
//! What this module does not do: compute the difference between two reads (`load`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Bytes of a sector in /proc/diskstats, for disks of every sector size.
const SECTOR: u64 = 512;
/// Interfaces that are kept apart: more than a person looks at.
const INTERFACES_MAX: usize = 32;

/// The counters of the kernel, since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) processors: u32,
    /// Time of all processors in the kernel's unit, and how much of it was work.
    pub(super) time: u64,
    pub(super) busy: u64,
    pub(super) memory_total: u64,
    pub(super) memory_free: u64,
    pub(super) disk_read: u64,
    pub(super) disk_written: u64,
    /// Bytes received and sent.
    pub(super) interfaces: BTreeMap<String, (u64, u64)>,
}

impl Counters {
    /// The present values; zero where they cannot be read.
    pub(super) fn read(proc: &Path, sys: &Path) -> Self {
        let text = |name: &str| fs::read_to_string(proc.join(name)).unwrap_or_default();
        let mut counters = Self::default();
        counters.stat(&text("stat"));
        counters.meminfo(&text("meminfo"));
        let is_part = |name: &str| sys.join("class/block").join(name).join("partition").exists();
        counters.diskstats(&text("diskstats"), is_part);
        counters.net(&text("net/dev"));
        counters
    }

    /// `cpu user nice system idle iowait irq softirq steal ..`, then a line a processor.
    fn stat(&mut self, text: &str) {
        for line in text.lines() {
            let Some(rest) = line.strip_prefix("cpu") else { break };
            let Some(all) = rest.strip_prefix(' ') else {
                self.processors += 1;
                continue;
            };
            let times: Vec<u64> = numbers(all).take(8).collect();
            let idle = times.iter().skip(3).take(2).fold(0_u64, |sum, it| sum.saturating_add(*it));
            self.time = times.iter().fold(0_u64, |sum, it| sum.saturating_add(*it));
            self.busy = self.time.saturating_sub(idle);
        }
    }

    /// `MemTotal:  2023456 kB`.
    fn meminfo(&mut self, text: &str) {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(numbers(line).next()?.saturating_mul(1024))
        };
        self.memory_total = value("MemTotal:").unwrap_or(0);
        self.memory_free = value("MemAvailable:").unwrap_or(0);
    }

    /// `major minor name reads merged sectors ms writes merged sectors ..`.
    fn diskstats(&mut self, text: &str, is_part: impl Fn(&str) -> bool) {
        /// Made of other disks, or of memory: their bytes are counted there, or nowhere.
        const MADE: [&str; 5] = ["dm-", "loop", "ram", "zram", "md"];
        for line in text.lines() {
            let Some(name) = line.split_ascii_whitespace().nth(2) else { continue };
            if MADE.iter().any(|made| name.starts_with(made)) || is_part(name) {
                continue;
            }
            let fields: Vec<u64> = numbers_after(line, 3).collect();
            if let [_, _, read, _, _, _, written, ..] = fields[..] {
                self.disk_read = self.disk_read.saturating_add(read.saturating_mul(SECTOR));
                self.disk_written =
                    self.disk_written.saturating_add(written.saturating_mul(SECTOR));
            }
        }
    }

    /// `eth0: received packets errs drop fifo frame compressed multicast sent ..`.
    fn net(&mut self, text: &str) {
        let line = |line: &str| {
            let (name, rest) = line.split_once(':')?;
            let fields: Vec<u64> = numbers(rest).collect();
            let [received, _, _, _, _, _, _, _, sent, ..] = fields[..] else { return None };
            Some((name.trim().to_owned(), (received, sent)))
        };
        let real = |(name, _): &(String, _)| name != "lo";
        self.interfaces = text.lines().filter_map(line).filter(real).take(INTERFACES_MAX).collect();
    }
}

fn numbers(text: &str) -> impl Iterator<Item = u64> + '_ {
    numbers_after(text, 0)
}

/// The numbers of `text` after its first `skip` words.
fn numbers_after(text: &str, skip: usize) -> impl Iterator<Item = u64> + '_ {
    text.split_ascii_whitespace().skip(skip).map_while(|word| word.parse().ok())
}

/// The file system of the data partition, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) total: u64,
    /// The space that files and the file system itself take.
    pub(super) used: u64,
    /// Free space that must be written before it can be used.
    pub(super) unwritten: u64,
}

/// Reads the file system at `data`; nothing while it is not mounted. The file `unwritten`
/// reserves the space that storage has still to write.
pub(super) fn space(data: &Path, unwritten: &Path) -> Option<Space> {
    use std::os::unix::fs::MetadataExt as _;
    let device = |path: &Path| Some(fs::metadata(path).ok()?.dev());
    if device(data)? == device(data.parent()?)? {
        return None;
    }
    let stat = rustix::fs::statvfs(data).ok()?;
    let [total, free] = [stat.f_blocks, stat.f_bfree].map(|it| it.saturating_mul(stat.f_frsize));
    let reserved = fs::metadata(unwritten).map_or(0, |reserved| reserved.len());
    Some(Space::of(total, free, reserved))
}

impl Space {
    /// Of a file system of `total` bytes; a file of `reserved` bytes holds no data, and the
    /// rest that is not `free` is used.
    fn of(total: u64, free: u64, reserved: u64) -> Self {
        let taken = total.saturating_sub(free);
        let unwritten = reserved.min(taken);
        Self { total, used: taken - unwritten, unwritten }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAT: &str = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 50 0 25 400 25 0 0 0 0 0\n\
                        cpu1 50 0 25 400 25 0 0 0 0 0\nintr 7\ncpus 3\n";
    const DISKS: &str = " 254 0 vda 10 0 200 5 7 0 300 2 0 0 0 0 0\n 254 1 vda1 9 9 9 9 9 9 9\n \
                         253 0 dm-0 1 0 8 0 1 0 8 0 0 0 0\n torn line\n";
    const NET: &str = "Inter-|   Receive  | Transmit\n face |bytes packets\n\
                       \x20   lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n\
                       \x20 eth0: 1000 9 0 0 0 0 0 0 500 8 0 0 0 0 0 0\n";

    fn counters() -> Counters {
        let mut counters = Counters::default();
        counters.stat(STAT);
        counters.meminfo("MemTotal:    1000 kB\nMemFree: 1 kB\nMemAvailable:  750 kB\n");
        counters.diskstats(DISKS, |name| name == "vda1");
        counters.net(NET);
        counters
    }

    #[test]
    fn the_kernel_s_counters_are_read() {
        let counters = counters();
        assert_eq!((counters.processors, counters.time, counters.busy), (2, 1000, 150));
        assert_eq!((counters.memory_total, counters.memory_free), (1_024_000, 768_000));
        assert_eq!((counters.disk_read, counters.disk_written), (200 * 512, 300 * 512));
        assert_eq!(counters.interfaces.len(), 1);
        assert_eq!(counters.interfaces["eth0"], (1000, 500));
    }

    #[test]
    fn space_that_has_still_to_be_written_is_not_used() {
        // An empty disk behind its first boot: the reserve takes nearly all of it.
        let space = Space::of(100, 2, 94);
        assert_eq!((space.used, space.unwritten), (4, 94));
        assert_eq!(Space::of(100, 40, 0).used, 60);
        // Between two reads, the reserve may have shrunk.
        assert_eq!(Space::of(100, 90, 94), Space { total: 100, used: 0, unwritten: 10 });
        assert_eq!(Space::of(0, 1, 1), Space::default());
    }

    #[test]
    fn this_machine_is_sampled() {
        let counters = Counters::read(Path::new("/proc"), Path::new("/sys"));
        assert!(counters.processors > 0 && counters.memory_total > 0 && counters.time > 0);
        assert_eq!(Counters::read(Path::new("/nowhere"), Path::new("/")), Counters::default());
        assert_eq!(space(Path::new("/nowhere/data"), Path::new("/nowhere/data/.unwritten")), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "(cpu ?|eth0:|[0-9]{1,22} |MemTotal:|vda |\n|.){0,60}") {
            let mut counters = Counters::default();
            counters.stat(&text);
            counters.meminfo(&text);
            counters.diskstats(&text, |_| false);
            counters.net(&text);
        }
    }
}
