//! The wipe of free space: the file system of an authenticated device must never read a
//! block that was not written.
//!
//! Such a read fails: the block has no tag. Files are not the trouble, since XFS
//! knows which of their blocks were written. Its journal is: after a power cut it
//! reads the old content of each block that it puts new content into, and that may
//! be one which was free until a moment before. So **free space must be written**,
//! and writing all of it at the first boot would take minutes to hours.
//!
//! ```text
//! first boot  [reserve]  a hidden file takes all free space but a little;
//!                        the little is written, while the file system stands still
//! afterwards  [release]  the end of the file is written, then cut off, bit by bit
//! afterwards  [extend]   what is behind the end of the file system is written, step by step,
//!                        and the file system grows after each
//! ```
//!
//! XFS keeps up to a fiftieth of a file system for its trees, and gives it to no file: a
//! large device begins with a file system of [`FIRST_MAX`], so that the time before the first
//! use does not grow with the disk.
//!
//! `storage::machine` reserves before the partition loses its mark; the service
//! releases and extends once others have what they need.
//!
//! Invariants:
//! - Space is free only if it was written through this device.
//! - A power cut anywhere loses no more than the progress of a few seconds.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{FallocateFlags, StatVfs};

use polis_base::sys::xfs::{self, Stretch, Use};

/// Free space that a new file system has at once: what etcd preallocates, and room
/// for its first snapshot and the logs. Written in seconds on any disk.
const KEPT: u64 = 192 << 20;

/// The bytes written before others get their turn.
pub const STEP: u64 = 16 << 20;

/// A file system begins with no more than this: its trees keep 10 GiB of it at most, minutes
/// on a slow disk. Most disks are smaller.
pub const FIRST_MAX: u64 = 512 << 30;

/// The step by which a file system grows: some seconds' writing, which a power cut loses, or
/// a full file system waits for.
const GROWTH_STEP: u64 = 1 << 30;

/// With less free space than this, the wipe does not yield to other work.
const URGENT: u64 = 48 << 20;

/// With less free space than this part of the file system, others may soon need more: an image
/// to unpack, a volume to fill.
const SCARCE: u64 = 10;

/// The bytes of one write; also the alignment of stretches of the hidden file.
const CHUNK: usize = 1 << 20;

/// The block of the device and of the file system.
const BLOCK: usize = 4096;

/// Where `mkfs.xfs` looks for former content: at the start.
const START: u64 = CHUNK as u64;

/// The blocks that `xfs_repair` reads of each allocation group before it knows
/// anything.
const GROUP_HEAD: u64 = 128 << 10;

/// Where the data of a LUKS2 partition begins: before it are headers and key slots.
const HEADS: u64 = 16 << 20;

/// The first copy of the header; the second follows it.
const FIRST_HEADER: u64 = 16 << 10;

/// The bytes at the end of a stretch that are examined.
const TAIL: u64 = super::probe::TAIL as u64;

/// How the file system is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// How many allocation groups there are.
    pub count: u64,
    /// How many bytes each has.
    pub size: u64,
}

impl Groups {
    /// Reads the plan that `mkfs.xfs -N` prints.
    #[must_use]
    pub fn parse(output: &str) -> Option<Self> {
        let number = |name: &str| -> Option<u64> {
            let after = &output[output.find(name)? + name.len()..];
            after[..after.find(|c: char| !c.is_ascii_digit())?].parse().ok()
        };
        let size = number("agsize=")?.checked_mul(BLOCK as u64)?;
        Some(Self { count: number("agcount=")?, size })
    }
}

/// Bytes where `O_DIRECT` wants them.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK).min(BLOCK);
        Self { bytes, start, length }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.length]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Past the page cache, so that it does not fill with zeros.
    File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)
}

/// Writes zeros. Both numbers are multiples of the block.
fn zero(file: &File, start: u64, length: u64) -> io::Result<()> {
    let zeros = Aligned::new(CHUNK);
    let mut at = start;
    while at < start + length {
        let left = usize::try_from(start + length - at).unwrap_or(CHUNK).min(CHUNK);
        file.write_all_at(&zeros.bytes()[..left], at)?;
        at += left as u64;
    }
    Ok(())
}

/// Overwrites everything by which the content of `device`, of `length` bytes, is recognised
/// and opened: LUKS keeps its two headers and all key slots in the first 16 MiB. Blocks.
///
/// The start goes last: a header of which the first bytes are left is recognised as ours.
///
/// # Errors
///
/// An error of the kernel.
pub fn heads(device: &Path, length: u64) -> io::Result<()> {
    let file = open(device)?;
    let block = BLOCK as u64;
    let end = HEADS.min(length / block * block);
    let tail = length.saturating_sub(TAIL).max(end) / block * block;
    zero(&file, tail, length / block * block - tail)?;
    for (start, stop) in [(START, end), (FIRST_HEADER, START), (0, FIRST_HEADER)] {
        if start < stop.min(end) {
            zero(&file, start, stop.min(end) - start)?;
            file.sync_data()?;
        }
    }
    Ok(())
}

/// Overwrites all of `device`, of `length` bytes. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn all(device: &Path, length: u64) -> io::Result<()> {
    let file = open(device)?;
    zero(&file, 0, length)?;
    file.sync_data()
}

/// Writes what `mkfs.xfs` and `xfs_repair` read before anything is there. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn prepare(device: &Path, groups: Groups) -> io::Result<()> {
    let device = open(device)?;
    zero(&device, 0, START)?;
    for group in 1..groups.count {
        zero(&device, group * groups.size, GROUP_HEAD.min(groups.size))?;
    }
    Ok(())
}

/// Leaves a new file system with little free space, all of it written; the rest is in
/// the file `hidden`. The file system must not be in use. Returns how many bytes were
/// written. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn reserve(device: &Path, mount: &Path, hidden: &Path) -> io::Result<u64> {
    let root = File::open(mount)?;
    let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(hidden)?;
    let mut length = free(&root)?.saturating_sub(KEPT) / CHUNK as u64 * CHUNK as u64;
    while length > 0 {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length) {
            Ok(()) => break,
            // Each allocation group keeps something back.
            Err(rustix::io::Errno::NOSPC) => length = length.saturating_sub(STEP),
            Err(error) => return Err(error.into()),
        }
    }
    file.sync_all()?;
    rustix::fs::syncfs(&root)?;
    let device = open(device)?;
    xfs::freeze(&root)?;
    let written = xfs::map(&root).and_then(|map| write_free(&device, &map));
    let thawed = xfs::thaw(&root);
    let written = written?;
    thawed.map(|()| written)
}

fn write_free(device: &File, map: &[Stretch]) -> io::Result<u64> {
    let mut written = 0;
    for stretch in map {
        match stretch.used {
            Use::Free => {
                zero(device, stretch.start, stretch.length)?;
                written += stretch.length;
            }
            // Some of these blocks are trees, and some are kept for more of them.
            Use::Trees => mend(device, stretch)?,
            Use::Other => {}
        }
    }
    device.sync_data()?;
    Ok(written)
}

/// Writes the blocks that do not read. There is nothing yet that could be lost.
fn mend(device: &File, stretch: &Stretch) -> io::Result<()> {
    let mut block = Aligned::new(BLOCK);
    let mut at = stretch.start;
    while at < stretch.start + stretch.length {
        if device.read_exact_at(block.bytes_mut(), at).is_err() {
            zero(device, at, BLOCK as u64)?;
        }
        at += BLOCK as u64;
    }
    Ok(())
}

/// Writes the end of the file `hidden` and cuts it off; returns how much is left, and
/// `None` once that file is gone. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn release(hidden: &Path) -> io::Result<Option<u64>> {
    let file = match open(hidden) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let length = file.metadata()?.len();
    if length == 0 {
        std::fs::remove_file(hidden)?;
        return Ok(None);
    }
    let left = length.saturating_sub(STEP);
    zero(&file, left, length - left)?;
    // The part that is cut off is free in the next moment: it must be written for good.
    file.sync_data()?;
    file.set_len(left)?;
    Ok(Some(left))
}

/// How much others need the space that is not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// More than the processor and the disk.
    Now,
    /// As much.
    Soon,
    /// Less.
    Later,
}

/// Looks at the free space. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn need(mount: &Path) -> io::Result<Need> {
    let stat = rustix::fs::fstatvfs(File::open(mount)?.as_fd())?;
    Ok(need_of(available(&stat), stat.f_blocks * stat.f_frsize))
}

/// The need with so many bytes free in a file system of this size.
fn need_of(free: u64, size: u64) -> Need {
    if free < URGENT {
        Need::Now
    } else if free < size / SCARCE {
        Need::Soon
    } else {
        Need::Later
    }
}

/// The size that a file system on a device of so many bytes begins with; `None` for all of it.
#[must_use]
pub fn first_size(device: u64) -> Option<u64> {
    (device >= FIRST_MAX.saturating_add(GROWTH_STEP)).then_some(FIRST_MAX)
}

/// Where a file system that ends at `from` ends after its next growth, on a device of `size`
/// bytes.
#[must_use]
pub fn next_end(from: u64, size: u64) -> u64 {
    let size = size / BLOCK as u64 * BLOCK as u64;
    let end = from.saturating_add(GROWTH_STEP);
    // XFS takes no group of a few blocks: the rest goes with the last step.
    if size.saturating_sub(end) < GROWTH_STEP { size } else { end }
}

/// Writes a part of the space behind the end of the file system, up to `until`; `from` is where
/// the last call ended. Returns where this one ended: `None` at the end. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn extend(device: &Path, from: u64, until: u64) -> io::Result<Option<u64>> {
    let device = open(device)?;
    let end = from.saturating_add(STEP).min(until);
    if from >= end {
        device.sync_data()?;
        return Ok(None);
    }
    zero(&device, from, end - from)?;
    Ok(Some(end))
}

/// Bytes that anybody may use.
fn free(root: &File) -> io::Result<u64> {
    Ok(available(&rustix::fs::fstatvfs(root.as_fd())?))
}

fn available(stat: &StatVfs) -> u64 {
    stat.f_bavail * stat.f_frsize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_are_read_from_what_mkfs_says() {
        let output = "meta-data=/dev/mapper/polis-data isize=512    agcount=4, agsize=128017 blks\n\
                    \x20        =                       sectsz=4096  attr=2, projid32bit=1\n";
        assert_eq!(Groups::parse(output), Some(Groups { count: 4, size: 128_017 * 4096 }));
        for input in ["", "agcount=", "agcount=x, agsize=7 blks", "agcount=4, agsize=7"] {
            assert_eq!(Groups::parse(input), None, "{input}");
        }
    }

    #[test]
    fn a_hidden_file_shrinks_from_its_end_until_it_is_gone() {
        // On this disk, since memory has no `O_DIRECT`.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let hidden = directory.path().join("hidden");
        std::fs::write(&hidden, vec![7; 2 * CHUNK]).unwrap();
        let file = File::options().write(true).open(&hidden).unwrap();
        file.set_len(STEP + CHUNK as u64).unwrap();
        assert_eq!(release(&hidden).unwrap(), Some(CHUNK as u64));
        assert_eq!(std::fs::read(&hidden).unwrap(), vec![7; CHUNK]);
        assert_eq!(release(&hidden).unwrap(), Some(0));
        assert_eq!(release(&hidden).unwrap(), None);
        assert!(!hidden.exists());
        assert_eq!(release(&hidden).unwrap(), None);
    }

    #[test]
    fn what_is_behind_the_file_system_is_written_step_by_step() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let device = directory.path().join("device");
        let size = 2 * STEP + CHUNK as u64;
        std::fs::write(&device, vec![7; usize::try_from(size).unwrap()]).unwrap();
        let until = size - BLOCK as u64;
        assert_eq!(extend(&device, STEP, until).unwrap(), Some(2 * STEP));
        assert_eq!(extend(&device, 2 * STEP, until).unwrap(), Some(until));
        assert_eq!(extend(&device, until, until).unwrap(), None);
        let bytes = std::fs::read(&device).unwrap();
        let (before, behind) = bytes.split_at(usize::try_from(STEP).unwrap());
        let (written, rest) = behind.split_at(usize::try_from(until - STEP).unwrap());
        assert!(before.iter().chain(rest).all(|byte| *byte == 7));
        assert!(written.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_is_written_before_the_first_use_does_not_grow_with_the_disk() {
        let gib = |count: u64| count << 30;
        assert_eq!(first_size(gib(500)), None);
        assert_eq!(first_size(gib(512)), None);
        for disk in [gib(513), gib(8 << 10), u64::MAX] {
            assert_eq!(first_size(disk), Some(gib(512)), "{disk}");
        }
    }

    #[test]
    fn space_is_needed_more_the_less_there_is() {
        let (mib, size) = (1 << 20, 8 << 30);
        assert_eq!(need_of(0, size), Need::Now);
        assert_eq!(need_of(48 * mib - 1, size), Need::Now);
        assert_eq!(need_of(48 * mib, size), Need::Soon);
        assert_eq!(need_of(819 * mib, size), Need::Soon);
        assert_eq!(need_of(820 * mib, size), Need::Later);
    }

    #[test]
    fn a_file_system_reaches_the_end_of_its_device_in_steps_that_xfs_takes() {
        let size = first_size(u64::MAX).unwrap() + (100 << 30) + 5000;
        let (mut end, mut steps) = (FIRST_MAX, 0);
        while end < size / 4096 * 4096 {
            let next = next_end(end, size);
            assert!((GROWTH_STEP..2 * GROWTH_STEP).contains(&(next - end)), "from {end} to {next}");
            (end, steps) = (next, steps + 1);
        }
        assert_eq!((end, steps), (size / 4096 * 4096, 100));
        // A disk that has grown by little is filled at once.
        assert_eq!(next_end(4096, 8192), 8192);
    }
}
