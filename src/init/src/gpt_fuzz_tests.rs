//! Fuzz targets of a partition table: as damage leaves it, and with checksums that fit.

use std::io::Cursor;

use polis_fuzz::{Accepted, Target};

use super::tests::{SECTOR, disk, put, sectors};
use super::{ENTRIES_MAX, checksum, read};

/// The disk of the test, and what reading its table takes.
const MEMORY: usize = (1 << 18) + (256 << 10);

/// The table that a disk has.
fn accepted(disk: &[u8]) -> Accepted {
    let table = read(&mut Cursor::new(disk), SECTOR, sectors(disk)).unwrap();
    table.is_some_and(|table| table.len() <= ENTRIES_MAX).into()
}

#[test]
fn partition_tables() {
    let (disk, _guid) = disk();
    // Protective MBR, header and entries; the backup is at the end.
    let head = disk[..34 * 512].to_vec();
    Target::new("init.gpt").samples([head]).memory(MEMORY).run(|input| {
        let mut disk = disk.clone();
        put(&mut disk, 0, &input[..input.len().min(34 * 512)]);
        accepted(&disk)
    });
}

#[test]
fn partition_tables_with_checksums_that_fit() {
    let (disk, _guid) = disk();
    let header = disk[512 + 24..512 + 92].to_vec();
    Target::new("init.gpt_header").samples([header]).length_max(68).memory(MEMORY).run(|input| {
        let mut disk = disk.clone();
        put(&mut disk, 512 + 24, input);
        let count = |at: usize| u32::from_le_bytes(disk[at..at + 4].try_into().unwrap()) as usize;
        let length = count(512 + 80).saturating_mul(count(512 + 84)).min(disk.len() - 1024);
        let sum = checksum(&disk[1024..1024 + length]);
        put(&mut disk, 512 + 88, &sum.to_le_bytes());
        put(&mut disk, 512 + 16, &[0; 4]);
        let sum = checksum(&disk[512..512 + 92]);
        put(&mut disk, 512 + 16, &sum.to_le_bytes());
        accepted(&disk)
    });
}
