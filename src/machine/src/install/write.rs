//! The writes of an installation, in the order that makes a power cut harmless.
//!
//! ```text
//! start of the ESP: zeros --> table --> places cleared --> system --> read back, hashed
//!   --> ESP but for its first block --> read back --> first block of the ESP
//!         `------ each step is flushed before the next begins ------'
//! ```
//!
//! Firmware starts no disk whose ESP has no first block, so the last write is the one that
//! completes the installation.
//!
//! Invariants:
//! - The ESP of an earlier use is unreadable before the new table is there.
//! - The first block of the ESP is written only when all else was read back from the disk, and
//!   the system hashes to the root hash of the running kernel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use polis_layout::verity::{self, BLOCK};

use super::plan::Plan;
use super::{Error, Phase, Progress};
use crate::storage::table;
use polis_base::sys::files::forget;

/// How much is copied, and read back, at a time.
const CHUNK: usize = 1 << 20;
/// Bytes between two flushes, so that the progress is that of the disk.
const STEP: u64 = 32 << 20;
/// How much of the start of an ESP is cleared: its boot sector and the copy of it.
const BOOT: usize = 64 << 10;

/// The system that is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct System {
    /// The hash that the kernel verifies it by.
    pub(super) root_hash: Vec<u8>,
    /// The salt of its hashes.
    pub(super) salt: Vec<u8>,
    /// Its data blocks.
    pub(super) blocks: u64,
}

impl System {
    /// Bytes of its file system.
    fn data(&self) -> u64 {
        self.blocks.saturating_mul(BLOCK as u64)
    }

    /// Bytes of it with its hash tree.
    pub(super) fn length(&self) -> u64 {
        self.data().saturating_add(verity::length(self.blocks))
    }
}

/// The system to install.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) plan: &'a Plan,
    pub(super) system: &'a System,
    /// The partition that the machine runs from.
    pub(super) source: &'a File,
    pub(super) esp: &'a [u8],
}

/// Installs. Blocks; may be repeated, whatever an earlier run has left.
pub(super) fn apply(
    disk: &File,
    job: &Job<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), Error> {
    let Job { plan, system, source, esp } = job;
    let (start, block) = (plan.esp.start, usize::try_from(plan.table.block_size).unwrap_or(BLOCK));
    let (first, rest) = esp.split_at(block.min(esp.len()));
    let total = system.length() + esp.len() as u64;
    let mut target = Target { disk, progress, phase: Phase::Write, bytes: 0, total, unflushed: 0 };
    let writing = |what: &'static str| Error::io("write", what);

    target.begin(Phase::Write);
    disk.write_all_at(&[0; BOOT], start).map_err(writing("the EFI system partition"))?;
    disk.sync_all().map_err(writing("the EFI system partition"))?;
    table::create(disk, &plan.table).map_err(Error::Table)?;
    for range in &plan.clear {
        target.clear(range.start, range.end).map_err(writing("the free space"))?;
    }
    target.copy(source, plan.system, system.length())?;
    for (at, piece) in (0..).step_by(CHUNK).zip(rest.chunks(CHUNK)) {
        target
            .put(piece, start + block as u64 + at)
            .map_err(writing("the EFI system partition"))?;
    }
    disk.sync_all().map_err(writing("the disk"))?;
    forget(disk).map_err(Error::io("read back", "the disk"))?;

    target.begin(Phase::Verify);
    target.hashes_to(system, plan.system)?;
    target.holds(rest, start + block as u64)?;

    target.begin(Phase::Boot);
    disk.write_all_at(first, start).map_err(writing("the boot sector"))?;
    disk.sync_all().map_err(writing("the boot sector"))?;
    forget(disk).map_err(Error::io("read back", "the boot sector"))?;
    target.holds(first, start)
}

/// The disk, and how far the phase is.
struct Target<'a> {
    disk: &'a File,
    progress: &'a mut dyn FnMut(Progress),
    phase: Phase,
    bytes: u64,
    total: u64,
    unflushed: u64,
}

impl Target<'_> {
    fn begin(&mut self, phase: Phase) {
        (self.phase, self.bytes) = (phase, 0);
        self.advance(0);
    }

    fn advance(&mut self, bytes: u64) {
        self.bytes += bytes;
        (self.progress)(Progress { phase: self.phase, bytes: self.bytes, total: self.total });
    }

    fn put(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.disk.write_all_at(bytes, at)?;
        self.unflushed += bytes.len() as u64;
        if self.unflushed >= STEP {
            self.disk.sync_data()?;
            self.unflushed = 0;
        }
        self.advance(bytes.len() as u64);
        Ok(())
    }

    fn clear(&self, start: u64, end: u64) -> io::Result<()> {
        let zeros = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        self.disk.write_all_at(&zeros, start)?;
        self.disk.sync_data()
    }

    /// Copies the system.
    fn copy(&mut self, source: &File, start: u64, length: u64) -> Result<(), Error> {
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < length {
            let piece = piece(&mut buffer, length - at);
            let reading = Error::io("read", "the system of the medium");
            source.read_exact_at(piece, at).map_err(reading)?;
            self.put(piece, start + at).map_err(Error::io("write", "the system"))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Fails unless the system on the disk has the root hash, and the tree that leads to it.
    fn hashes_to(&mut self, system: &System, start: u64) -> Result<(), Error> {
        let reading = || Error::io("read back", "the system");
        let mut buffer = vec![0; CHUNK];
        let (mut at, mut hashes) = (0, Vec::new());
        while at < system.data() {
            let piece = piece(&mut buffer, system.data() - at);
            self.disk.read_exact_at(piece, start + at).map_err(reading())?;
            hashes.extend(verity::level(piece, &system.salt));
            at += piece.len() as u64;
            self.advance(piece.len() as u64);
        }
        let (root, tree) = verity::above(hashes, &system.salt);
        if root[..] != system.root_hash {
            return Err(Error::Differs("system"));
        }
        let mut found = vec![0; tree.len()];
        self.disk.read_exact_at(&mut found, start + at).map_err(reading())?;
        if found != tree {
            return Err(Error::Differs("hash tree of the system"));
        }
        self.advance(tree.len() as u64);
        Ok(())
    }

    /// Fails unless the ESP on the disk has these bytes.
    fn holds(&mut self, bytes: &[u8], start: u64) -> Result<(), Error> {
        let mut buffer = vec![0; CHUNK];
        for (at, wanted) in (0..).step_by(CHUNK).zip(bytes.chunks(CHUNK)) {
            let found = piece(&mut buffer, wanted.len() as u64);
            let reading = Error::io("read back", "the EFI system partition");
            self.disk.read_exact_at(found, start + at).map_err(reading)?;
            if found != wanted {
                return Err(Error::Differs("EFI system partition"));
            }
            self.advance(wanted.len() as u64);
        }
        Ok(())
    }
}

/// The start of a buffer, for the `left` bytes that are left.
fn piece(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
    &mut buffer[..length]
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
