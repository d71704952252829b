//! The copy of the systems that start a machine, from the disk that it runs from to the other one
//! of the mirror: compared piece by piece; what differs is written, and read back.
//!
//! They go before the ESP (`esp`): no kernel image names a system that is not there.
//!
//! Invariants:
//! - A system that runs is never written to: the kernel refuses to open it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use polis_layout::partitions::{SYSTEM_A, SYSTEM_B};
use polis_layout::verity;

use super::Error;
use super::disks::Disk;
use polis_base::sys::block;
use polis_base::sys::files::forget;

/// How much is compared at a time.
const CHUNK: usize = 1 << 20;
/// Where a file system of type erofs has its superblock, how it begins, and where it says its
/// number of blocks.
const SUPERBLOCK: usize = 1024;
const MAGIC: [u8; 4] = [0xe2, 0xe1, 0xf5, 0xe0];
const BLOCKS: usize = SUPERBLOCK + 36;

/// Makes the systems of `target` those of `source`, but for that in the slot `joined`, which is
/// read from both. Returns how many bytes were written. Blocks.
pub(super) fn systems(source: &Disk, target: &Disk, joined: Option<&str>) -> Result<u64, Error> {
    let failed =
        |source| Error::Copy { operation: "copy the systems", disk: target.name(), source };
    let mut written = 0;
    for kind in [SYSTEM_A, SYSTEM_B] {
        if joined.is_some_and(|slot| kind.name.ends_with(slot)) {
            continue;
        }
        let (Some((from, _)), Some((to, _))) = (source.named(kind.name), target.named(kind.name))
        else {
            continue;
        };
        let from = File::open(from).map_err(failed)?;
        let to = OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(to);
        written += system(&from, &to.map_err(failed)?).map_err(failed)?;
    }
    Ok(written)
}

/// Makes one system the other; where there is none, none is found there.
fn system(from: &File, to: &File) -> io::Result<u64> {
    let mut written = 0;
    for file in [from, to] {
        forget(file)?;
    }
    let length = used(from)?;
    let size = block::size(from)?.min(block::size(to)?);
    let (mut wanted, mut found) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 0;
    let end = length.unwrap_or(CHUNK as u64).min(size);
    while at < end {
        let piece = usize::try_from(size - at).unwrap_or(CHUNK).min(CHUNK);
        if length.is_some() {
            from.read_exact_at(&mut wanted[..piece], at)?;
        }
        to.read_exact_at(&mut found[..piece], at)?;
        if wanted[..piece] != found[..piece] {
            to.write_all_at(&wanted[..piece], at)?;
            to.sync_data()?;
            forget(to)?;
            to.read_exact_at(&mut found[..piece], at)?;
            if wanted[..piece] != found[..piece] {
                return Err(io::Error::other("what was written does not read back"));
            }
            written += piece as u64;
        }
        at += piece as u64;
    }
    for file in [from, to] {
        forget(file)?;
    }
    Ok(written)
}

/// How many bytes a system with its hash tree takes; `None` where there is none.
fn used(system: &File) -> io::Result<Option<u64>> {
    let mut start = vec![0; verity::BLOCK];
    system.read_exact_at(&mut start, 0)?;
    if start[SUPERBLOCK..SUPERBLOCK + MAGIC.len()] != MAGIC {
        return Ok(None);
    }
    let blocks =
        start[BLOCKS..BLOCKS + 4].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    Ok(Some(blocks * verity::BLOCK as u64 + verity::length(blocks)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(content: &[u8], size: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    }

    /// A system of so many blocks.
    fn erofs(blocks: u32, fill: u8) -> Vec<u8> {
        let blocks_usize = usize::try_from(blocks).unwrap();
        let mut bytes = vec![fill; blocks_usize * verity::BLOCK];
        bytes[SUPERBLOCK..SUPERBLOCK + 4].copy_from_slice(&MAGIC);
        bytes[BLOCKS..BLOCKS + 4].copy_from_slice(&blocks.to_le_bytes());
        let tree = usize::try_from(verity::length(blocks.into())).unwrap();
        bytes.extend(vec![fill ^ 0xff; tree]);
        bytes
    }

    #[test]
    fn a_system_is_copied_with_its_hash_tree_and_again_only_where_it_differs() {
        const SIZE: u64 = 8 << 20;
        let wanted = erofs(700, 3);
        let from = partition(&wanted, SIZE);
        let to = partition(b"an earlier use", SIZE);
        assert!(system(&from, &to).unwrap() >= wanted.len() as u64);
        let mut found = vec![0; wanted.len()];
        to.read_exact_at(&mut found, 0).unwrap();
        assert!(found == wanted);
        assert_eq!(system(&from, &to).unwrap(), 0);
        to.write_all_at(b"x", 5000).unwrap();
        assert_eq!(system(&from, &to).unwrap(), CHUNK as u64);
    }

    #[test]
    fn where_there_is_no_system_none_is_found_on_the_other_disk() {
        let (from, to) = (partition(&[], 2 << 20), partition(&erofs(100, 9), 2 << 20));
        system(&from, &to).unwrap();
        assert_eq!(used(&to).unwrap(), None);
    }
}
