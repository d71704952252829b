use std::os::unix::fs::FileExt as _;

use polis_layout::partitions::{SYSTEM_A, SYSTEM_B};

use super::super::plan::{begun, filling};
use super::super::take::take;
use super::*;
use crate::storage::plan::NAME;

pub(in super::super) const BLOCKS: u64 = 8 << 21;

/// The table of an image of which the first boot has made a mirror.
pub(in super::super) fn source() -> Disk {
    let mut partitions = Vec::new();
    let mut first = 2048;
    for (number, (name, type_id)) in (1..).zip([
        (ESP.name, ESP.type_guid),
        (SYSTEM_A.name, SYSTEM_A.type_guid),
        (SYSTEM_B.name, SYSTEM_B.type_guid),
        (backing::PARTITION, backing::TYPE_ID),
        (NAME, TYPE_ID),
    ]) {
        let id = Uuid::from_u128(number.into());
        let (name, last) = (name.to_owned(), first + 2 * 8192 - 1);
        partitions.push(Partition { number, name, type_id, id, first, last, attributes: 0 });
        first = last + 1;
    }
    let (notes, data) = (partitions[3].clone(), Some(partitions[4].clone()));
    let table = Table { disk: Uuid::nil(), block_size: 512, blocks: BLOCKS, partitions };
    let seen = Seen { record: begun(1), dropped_other: false };
    Disk { path: "/dev/vda".into(), sequence: Some(1), table, notes, data, seen }
}

#[test]
fn data_with_a_mark_is_not_copied() {
    let with = |attributes| {
        let mut disk = source();
        disk.data.as_mut().unwrap().attributes = attributes;
        disk.is_complete()
    };
    assert_eq!([0, BEING_MADE, GIVEN_UP].map(with), [true, false, false]);
    assert!(!Disk { data: None, ..source() }.is_complete());
}

/// A new disk image in a folder.
fn image(folder: &Path, name: &str) -> (PathBuf, File) {
    let path = folder.join(name);
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(BLOCKS * 512).unwrap();
    (path, file)
}

/// Takes an image, whose partitions cannot be announced to the kernel.
pub(in super::super) fn taken(path: &Path, source: &Disk) -> Disk {
    let record = filling(&source.seen.record);
    let refused = take(Path::new("/none"), path, source, &record).unwrap_err();
    let announced = matches!(refused, Error::Disk { operation: "announce the partitions of", .. });
    assert!(announced, "{refused}");
    let read = Disk::read(Path::new("/none"), path).unwrap().unwrap();
    assert_eq!((read.mirror(), read.seen.record), (source.mirror(), record));
    read
}

#[test]
fn a_disk_of_a_mirror_is_read_as_it_was_made_and_any_other_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _file) = image(folder.path(), "disk");
    let source = source();
    let read = taken(&path, &source);
    assert_eq!(read.data, source.data);
    // A disk with data is not taken, and one of the mirror has data.
    let record = filling(&source.seen.record);
    let refused = take(Path::new("/none"), &path, &source, &record).unwrap_err();
    assert!(matches!(refused, Error::Unfit { .. }), "{refused}");
}

#[test]
fn a_disk_that_was_used_for_something_else_since_is_none_of_the_mirror() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = image(folder.path(), "disk");
    let source = source();
    taken(&path, &source);
    // The first copy is torn; the rest of the disk is as it was.
    file.write_all_at(&[0; 1024], 0).unwrap();
    assert!(Disk::read(Path::new("/none"), &path).unwrap().is_some());
    // A file system on the whole disk leaves its end, and most of its start.
    file.write_all_at(&[0x53; 1024], 1024).unwrap();
    assert!(Disk::read(Path::new("/none"), &path).unwrap().is_none());
    let record = filling(&source.seen.record);
    // The same where the taking was cut before the header of the backup.
    file.write_all_at(&[0; 512], BLOCKS * 512 - 512).unwrap();
    file.write_all_at(&[0; 34 * 512], 0).unwrap();
    file.write_all_at(&[0x53; 1024], 1024).unwrap();
    let refused = take(Path::new("/none"), &path, &source, &record).unwrap_err();
    assert!(matches!(refused, Error::Unfit { .. }), "{refused}");
    // Without it, the taking is finished.
    file.write_all_at(&[0; 1024], 1024).unwrap();
    taken(&path, &source);
}

#[test]
fn a_torn_table_is_mended_before_the_disk_is_one_of_both() {
    let folder = tempfile::tempdir().unwrap();
    let source = source();
    let [(one, _), (other, file)] = ["one", "other"].map(|name| image(folder.path(), name));
    let [one, other] = [one, other].map(|path| taken(&path, &source));
    file.write_all_at(&[0; 1024], 0).unwrap();
    assert!(table::read_primary(&file).is_none());
    other.confirm(&one).unwrap();
    assert!(table::read_primary(&file).is_some());
    // The data was given up meanwhile, on one of them.
    machine::give_up(&one.path).unwrap();
    assert!(matches!(other.confirm(&one), Err(Error::Unfit { .. })));
    machine::give_up(&other.path).unwrap();
    assert!(matches!(other.confirm(&one), Err(Error::Unfit { .. })));
    let one = Disk::read(Path::new("/none"), &one.path).unwrap().unwrap();
    assert!(one.is_given_up(&other) && !other.is_given_up(&one));
}

#[test]
fn another_disk_with_the_name_of_one_that_was_pulled_is_another() {
    let sys = tempfile::tempdir().unwrap();
    let file = sys.path().join("block/vda/diskseq");
    let disk = source();
    assert!(!disk.is_there(sys.path()));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "1\n").unwrap();
    assert!(disk.is_there(sys.path()));
    std::fs::write(&file, "7\n").unwrap();
    assert!(!disk.is_there(sys.path()));
}
