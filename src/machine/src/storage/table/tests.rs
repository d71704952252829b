//! The story of a table on disks that are torn, strange, or larger than their image.

use std::os::unix::fs::FileExt as _;

use proptest::prelude::*;

use super::*;

pub(in crate::storage) const MIB: u64 = 1 << 20;

/// An image as the builder makes it: ESP and system, on a disk that may be larger.
pub(in crate::storage) fn image(built: u64, disk: u64) -> File {
    fill(tempfile::tempfile().unwrap(), built, disk)
}

/// The same in a file with a name.
pub(in crate::storage) fn image_at(path: &std::path::Path, built: u64, disk: u64) -> File {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    fill(file.unwrap(), built, disk)
}

fn fill(file: File, built: u64, disk: u64) -> File {
    file.set_len(built).unwrap();
    let mut device = file.try_clone().unwrap();
    let blocks = u32::try_from(built / 512 - 1).unwrap();
    ProtectiveMBR::with_lb_size(blocks).overwrite_lba0(&mut device).unwrap();
    let mut disk_image = GptConfig::new().writable(true).create_from_device(device, None).unwrap();
    for (name, size) in [("POLIS-ESP", 32 * MIB), ("POLIS-SYSTEM-A", 16 * MIB)] {
        let kind = gpt::partition_types::EFI;
        disk_image.add_partition(name, size, kind, 0, Some(2048)).unwrap();
    }
    disk_image.write().unwrap();
    file.set_len(disk).unwrap();
    file
}

fn both_copies_are_sound(file: &File) {
    GptConfig::new().only_valid_headers(true).open_from_device(file.try_clone().unwrap()).unwrap();
}

#[test]
fn a_table_is_created_over_anything() {
    let file = image(64 * MIB, 1024 * MIB);
    let mut table = read(&file).unwrap();
    table.disk = Uuid::from_bytes([9; 16]);
    for noise in [0, 0xff] {
        let bytes = vec![noise; 64 << 10];
        file.write_all_at(&bytes, 0).unwrap();
        file.write_all_at(&bytes, 1024 * MIB - (64 << 10)).unwrap();
        create(&file, &table).unwrap();
        assert_eq!(read(&file).unwrap(), table);
        assert_eq!(read_primary(&file).unwrap(), table);
        assert_eq!(read_backup(&file).unwrap(), table);
        both_copies_are_sound(&file);
    }
    file.write_all_at(&[0; 512], 512).unwrap();
    assert_eq!(read_primary(&file), None);
    assert_eq!(read(&file).unwrap(), table);
}

#[test]
fn a_table_is_read_changed_and_read_back_on_a_disk_that_is_larger_than_the_image() {
    let file = image(64 * MIB, 1024 * MIB);
    let mut table = read(&file).unwrap();
    table.disk = Uuid::from_bytes([9; 16]);
    table.partitions[0].id = Uuid::from_bytes([8; 16]);
    let names: Vec<_> = table.partitions.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["POLIS-ESP", "POLIS-SYSTEM-A"]);
    assert_eq!(table.last_usable(), 1024 * MIB / 512 - 34);

    table.partitions.push(Partition {
        number: 3,
        name: "POLIS-DATA".to_owned(),
        type_id: Uuid::from_bytes([1; 16]),
        id: Uuid::from_bytes([2; 16]),
        first: 64 * MIB / 512,
        last: table.last_usable(),
        attributes: 1 << 48,
    });
    write(&file, &table).unwrap();
    assert_eq!(read(&file).unwrap(), table);
    both_copies_are_sound(&file);
    // Writing again what is there changes nothing.
    write(&file, &table).unwrap();
    assert_eq!(read(&file).unwrap(), table);
}

#[test]
fn a_write_touches_nothing_but_the_two_copies() {
    let file = image(64 * MIB, 64 * MIB);
    let inner = (34 * 512, 64 * MIB - 33 * 512);
    let marks = [inner.0, 40 * MIB, inner.1 - 8];
    for at in marks {
        file.write_all_at(b"precious", at).unwrap();
    }
    let table = read(&file).unwrap();
    write(&file, &table).unwrap();
    for at in marks {
        assert_eq!(read_at(&file, at, 8).unwrap(), b"precious");
    }
}

fn flip(file: &File, at: u64) {
    let mut byte = read_at(file, at, 1).unwrap();
    byte[0] ^= 4;
    file.write_all_at(&byte, at).unwrap();
}

#[test]
fn a_primary_table_that_claims_the_unusual_is_refused() {
    for at in [512 + 80, 512 + 84] {
        let file = image(64 * MIB, 64 * MIB);
        flip(&file, at);
        assert!(matches!(read(&file), Err(Error::Unusual(_))), "byte {at}");
    }
}

#[test]
fn a_torn_primary_table_is_restored_from_its_backup_which_stays_as_it_is() {
    let backup = 64 * MIB - 33 * 512;
    // The signature, the header's checksum, the entries.
    for at in [512, 512 + 16, 1024 + 40] {
        let file = image(64 * MIB, 64 * MIB);
        let table = read(&file).unwrap();
        let kept = read_at(&file, backup, 33 * 512).unwrap();
        flip(&file, at);
        assert_eq!(read(&file).unwrap(), table, "byte {at}");
        assert!(matches!(write(&file, &table), Err(Error::Unusual(_))), "byte {at}");
        assert!(restore(&file).unwrap(), "byte {at}");
        assert_eq!(read_at(&file, backup, 33 * 512).unwrap(), kept);
        both_copies_are_sound(&file);
        assert!(!restore(&file).unwrap());
        assert_eq!(read(&file).unwrap(), table);
        write(&file, &table).unwrap();
    }
}

fn lost() -> io::Result<Vec<u8>> {
    Err(io::Error::from_raw_os_error(libc::EIO))
}

#[test]
fn a_primary_table_that_cannot_be_read_is_restored_from_its_backup() {
    let file = image(64 * MIB, 64 * MIB);
    let table = read(&file).unwrap();
    let geometry = Geometry::of(&file).unwrap();
    file.write_all_at(&[0xff; 34 * 512], 0).unwrap();
    let ends = || {
        let tail = read_at(&file, 64 * MIB - 33 * 512, 33 * 512);
        Ends::of(geometry, lost(), tail)
    };
    let opened = open_at(&file, geometry, ends()).unwrap();
    assert_eq!(table_of(&opened, geometry).unwrap(), table);
    assert_eq!(backup_of(&file, geometry, ends()).unwrap().as_ref(), Some(&table));
    assert!(mend(opened, geometry).unwrap());
    both_copies_are_sound(&file);
    assert_eq!(read_primary(&file).unwrap(), table);
}

#[test]
fn a_backup_that_cannot_be_read_does_not_stop_anything_but_a_look_for_it() {
    let file = image(64 * MIB, 64 * MIB);
    let table = read(&file).unwrap();
    let geometry = Geometry::of(&file).unwrap();
    let kept = read_at(&file, 64 * MIB - 33 * 512, 33 * 512).unwrap();
    let ends = || Ends::of(geometry, read_at(&file, 0, 34 * 512), lost());
    let opened = open_at(&file, geometry, ends()).unwrap();
    assert_eq!(table_of(&opened, geometry).unwrap(), table);
    assert!(!mend(opened, geometry).unwrap());
    assert_eq!(read_at(&file, 64 * MIB - 33 * 512, 33 * 512).unwrap(), kept);
    // It may be that of an earlier table, with data.
    let missed = backup_of(&file, geometry, ends());
    assert!(matches!(missed, Err(Error::Io { .. })), "{missed:?}");
    assert_eq!(find_backup(&file).unwrap(), Some(table));
}

#[test]
fn a_copy_that_cannot_be_read_is_the_error_where_the_other_one_is_not_sound() {
    // The disk is larger than its image: nothing is at its end.
    let file = image(64 * MIB, 1024 * MIB);
    let geometry = Geometry::of(&file).unwrap();
    let head = || read_at(&file, 0, 34 * 512);
    let tail = read_at(&file, 1024 * MIB - 33 * 512, 33 * 512);
    // One byte of the entries.
    let torn = head().map(|mut head| {
        head[1024 + 40] ^= 4;
        head
    });
    let blank = Ok(vec![0; 34 * 512]);
    for (head, tail) in [(lost(), tail), (torn, lost()), (blank, lost()), (lost(), lost())] {
        let refused = open_at(&file, geometry, Ends::of(geometry, head, tail)).unwrap_err();
        assert!(matches!(refused, Error::Io { operation: "read", .. }), "{refused:?}");
    }
    assert!(open_at(&file, geometry, Ends::of(geometry, head(), lost())).is_ok());
}

#[test]
fn a_write_that_was_torn_at_any_block_leaves_the_old_table_or_the_new() {
    let before = image(64 * MIB, 1024 * MIB);
    let old = read(&before).unwrap();
    let mut new = old.clone();
    let (first, last) = (64 * MIB / 512, old.last_usable());
    let (type_id, id) = (Uuid::from_bytes([1; 16]), Uuid::from_bytes([2; 16]));
    let name = "POLIS-DATA".to_owned();
    new.partitions.push(Partition { number: 3, name, type_id, id, first, last, attributes: 0 });
    let after = image(64 * MIB, 1024 * MIB);
    after.write_all_at(&read_at(&before, 0, 34 * 512).unwrap(), 0).unwrap();
    write(&after, &new).unwrap();
    let tail = 1024 * MIB - 33 * 512;
    for written in 0_u64..=33 + 34 {
        let torn = image(64 * MIB, 1024 * MIB);
        torn.write_all_at(&read_at(&before, 0, 34 * 512).unwrap(), 0).unwrap();
        let (backup, primary) = (written.min(33) * 512, written.saturating_sub(33) * 512);
        torn.write_all_at(&read_at(&after, tail, backup).unwrap(), tail).unwrap();
        torn.write_all_at(&read_at(&after, 0, primary).unwrap(), 0).unwrap();
        restore(&torn).unwrap();
        let found = read(&torn).unwrap();
        assert!(found == old || found == new, "after {written} blocks: {found:?}");
        write(&torn, &new).unwrap();
        both_copies_are_sound(&torn);
    }
}

#[test]
fn a_table_that_is_torn_without_a_backup_is_refused() {
    let file = image(64 * MIB, 1024 * MIB);
    flip(&file, 1024 + 40);
    assert!(read(&file).is_err());
    assert!(restore(&file).is_err());
}

#[test]
fn a_strange_backup_does_not_stop_anything() {
    let file = image(64 * MIB, 64 * MIB);
    let mut strange = vec![0xff; 512];
    strange[..8].copy_from_slice(b"EFI PART");
    file.write_all_at(&strange, 64 * MIB - 512).unwrap();
    let table = read(&file).unwrap();
    write(&file, &table).unwrap();
    both_copies_are_sound(&file);
}

#[test]
fn overlaps_gaps_and_ends_outside_the_disk_are_refused() {
    let file = image(64 * MIB, 64 * MIB);
    let table = read(&file).unwrap();
    let mut overlap = table.clone();
    overlap.partitions[1].first = overlap.partitions[0].last;
    let mut gap = table.clone();
    gap.partitions[1].number = 3;
    let mut outside = table.clone();
    outside.partitions[1].last = table.last_usable() + 1;
    let mut backwards = table;
    backwards.partitions[1].last = backwards.partitions[1].first - 1;
    for bad in [overlap, gap, outside, backwards] {
        assert!(matches!(write(&file, &bad), Err(Error::Unusual(_))), "{bad:?}");
    }
}

#[test]
fn what_is_no_disk_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(read(&file), Err(Error::TooSmall(0))));
    file.set_len(64 * MIB).unwrap();
    assert!(matches!(read(&file), Err(Error::Unusual(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_arbitrary_table_never_panics(
        bytes in prop::collection::vec((0_usize..34 * 512, any::<u8>()), 1..40),
    ) {
        let file = image(64 * MIB, 64 * MIB);
        for (at, byte) in bytes {
            file.write_all_at(&[byte], at as u64).unwrap();
        }
        drop(read(&file));
        drop(restore(&file));
    }
}
