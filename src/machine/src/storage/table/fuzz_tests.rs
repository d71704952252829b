//! Fuzz targets of the partition table of the disk that the machine runs from: header and
//! entries as damage leaves them, and with checksums that fit.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use polis_fuzz::{Accepted, Target};

use super::tests::{MIB, image};
use super::{read, read_at, read_backup, restore, write};

/// Protective MBR, header, and the first entries.
const HEAD: usize = 1024 + 4 * 128;

/// A view of the disk in memory: both copies.
const MEMORY: usize = 1 << 20;

/// The rules of a table, however it came to be.
fn check(disk: &File, before: &[u8]) -> Accepted {
    let _backup = read_backup(disk);
    let table = read(disk);
    if let Ok(table) = &table
        && write(disk, table).is_ok()
    {
        assert_eq!(read(disk).as_ref().ok(), Some(table), "a table that is written reads back");
    }
    let _restored = restore(disk);
    disk.write_all_at(before, 0).unwrap();
    table.is_ok().into()
}

/// The checksum of the entries and of the header at sector `at`.
fn seal(head: &mut [u8], entries: &[u8]) {
    let sum = crc32(entries);
    head[512 + 88..512 + 92].copy_from_slice(&sum.to_le_bytes());
    head[512 + 16..512 + 20].fill(0);
    let sum = crc32(&head[512..512 + 92]);
    head[512 + 16..512 + 20].copy_from_slice(&sum.to_le_bytes());
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _bit| match sum & 1 {
            1 => (sum >> 1) ^ 0xedb8_8320,
            _ => sum >> 1,
        })
    })
}

#[test]
fn tables() {
    let disk = image(64 * MIB, 64 * MIB);
    let whole = read_at(&disk, 0, 34 * 512).unwrap();
    Target::new("machine.table").samples([&whole[..HEAD]]).memory(MEMORY).run(|input| {
        disk.write_all_at(&input[..input.len().min(HEAD)], 0).unwrap();
        check(&disk, &whole)
    });
}

#[test]
fn tables_with_checksums_that_fit() {
    let disk = image(64 * MIB, 64 * MIB);
    let whole = read_at(&disk, 0, 34 * 512).unwrap();
    Target::new("machine.table_content").samples([&whole[..HEAD]]).memory(MEMORY).run(|input| {
        let mut head = whole.clone();
        let length = input.len().min(HEAD);
        head[..length].copy_from_slice(&input[..length]);
        let entries = head[1024..].to_vec();
        seal(&mut head, &entries);
        disk.write_all_at(&head, 0).unwrap();
        check(&disk, &whole)
    });
}
