//! The follower of the ring: every record once and in order, whatever befalls the segments.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::logtree::ring::record::{Head, Line};
use crate::logtree::{Body, Entry, Origin};

/// A ring of these segments: the numbers of boot and segment, and how many records each has.
struct Disk {
    dir: tempfile::TempDir,
    records: u64,
}

impl Disk {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), records: 0 }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn ring(&self) -> Ring {
        Ring::new(self.path().to_owned(), 9)
    }

    /// Adds to a segment, and begins it if it is not there.
    fn write(&mut self, boot: u64, number: u64, lines: u64) {
        let path = Id { boot, number }.path(self.path());
        let mut text = fs::read_to_string(&path).unwrap_or_default();
        if text.is_empty() {
            let head = Head {
                boot_id: format!("boot-{boot}"),
                started: 1_700_000_000 + boot,
                image: "image".to_owned(),
                process: 7,
                first: Some(self.records),
            };
            Record::Head(head).put(&mut text);
        }
        for _ in 0..lines {
            let entry = Entry {
                number: self.records,
                at: std::time::Duration::from_secs(1),
                name: "root.a".into(),
                origin: Origin::Service,
                body: Body::Raw(format!("line {}", self.records)),
            };
            Record::Entry(Line::of(&entry)).put(&mut text);
            self.records += 1;
        }
        fs::write(path, text).unwrap();
    }

    fn remove(&self, boot: u64, number: u64) {
        segment::remove(self.path(), Id { boot, number }).unwrap();
    }

    /// The numbers of all records behind `place`, how many were missing, and the place behind
    /// them. Each line says its own number.
    fn rest(&self, mut place: Option<Place>) -> (Vec<u64>, u64, Option<Place>) {
        let (mut numbers, mut missing) = (Vec::new(), 0);
        loop {
            let stretch = after(self.path(), 9, place).unwrap();
            place = stretch.next;
            if stretch.is_empty() {
                return (numbers, missing, place);
            }
            missing += stretch.missing;
            for (number, item) in stretch.records {
                let Item::Entry(entry) = item else { panic!("nothing was lost") };
                assert_eq!(entry.body.to_string(), format!("line {number}"));
                numbers.push(number);
            }
        }
    }
}

#[tokio::test]
async fn a_follower_reads_all_boots_and_goes_on_where_it_was() {
    let mut disk = Disk::new();
    disk.write(7, 0, 3);
    disk.write(7, 1, 2);
    disk.write(9, 0, 2);
    let ring = disk.ring();
    let first = ring.after(None).await.unwrap();
    assert_eq!((first.recorder.boot_id.as_str(), first.recorder.process), ("boot-7", 7));
    assert!(!first.recorder.is_now && first.recorder.started == 1_700_000_007);
    let (numbers, missing, place) = disk.rest(first.next);
    assert_eq!((numbers, missing), (vec![3, 4, 5, 6], 0));
    let kept = serde_json::to_string(&place).unwrap();
    disk.write(9, 0, 1);
    let next = ring.after(serde_json::from_str(&kept).unwrap()).await.unwrap();
    assert!(next.recorder.is_now && next.records.len() == 1 && next.records[0].0 == 7);
}

#[test]
fn a_follower_that_comes_late_learns_how_many_records_are_gone() {
    let mut disk = Disk::new();
    for number in 0..4 {
        disk.write(7, number, 10);
    }
    let place = after(disk.path(), 9, None).unwrap().next;
    // The middle of a boot goes first, then all of it.
    disk.remove(7, 1);
    let (numbers, missing, late) = disk.rest(place);
    assert_eq!((numbers, missing), ((20..40).collect(), 10));
    disk.write(8, 0, 5);
    (0..4).for_each(|number| disk.remove(7, number));
    assert_eq!(disk.rest(place).1, 30, "of the removed ones, ten were read");
    assert_eq!(disk.rest(late).0, [40, 41, 42, 43, 44]);
    // One that begins has missed nothing.
    assert_eq!(disk.rest(None).1, 0);
}

#[test]
fn damage_costs_the_damaged_line_and_is_counted() {
    let mut disk = Disk::new();
    disk.write(7, 0, 10);
    disk.write(7, 1, 10);
    let path = Id { boot: 7, number: 0 }.path(disk.path());
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, whole.replace("line 9\"", "line X\"")).unwrap();
    let (numbers, missing, _) = disk.rest(None);
    assert_eq!((numbers.len(), missing), (19, 1));
    // The torn end of a segment that a power cut left.
    fs::write(&path, &whole[..whole.len() - 4]).unwrap();
    assert_eq!(disk.rest(None).1, 1);
    fs::write(&path, [whole.as_bytes(), &vec![0; 600_000]].concat()).unwrap();
    assert_eq!(disk.rest(None).0, (0..20).collect::<Vec<_>>());
}

#[test]
fn a_line_that_is_being_written_is_read_once_it_is_whole() {
    let mut disk = Disk::new();
    disk.write(9, 0, 1);
    let path = Id { boot: 9, number: 0 }.path(disk.path());
    let before = fs::read(&path).unwrap();
    disk.write(9, 0, 1);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &before).unwrap();
    let (_, _, place) = disk.rest(None);
    for end in before.len()..whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        assert_eq!(disk.rest(place), (Vec::new(), 0, place));
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(disk.rest(place).0, [1]);
}

#[test]
fn a_place_of_another_disk_is_no_place_here() {
    let mut disk = Disk::new();
    disk.write(3, 0, 2);
    let foreign = Place { boot: 4, segment: 0, offset: 10, number: 1000 };
    assert_eq!(disk.rest(Some(foreign)).0, [0, 1]);
    // A segment that is shorter than the place says was cut by a power cut.
    let cut = Place { boot: 3, segment: 0, offset: 1 << 40, number: 2 };
    disk.write(4, 0, 1);
    assert_eq!(disk.rest(Some(cut)).0, [2]);
}

proptest! {
    #[test]
    fn every_record_is_read_once_or_counted(
        steps in prop::collection::vec((0_u8..4, 1_u64..8), 1..40),
    ) {
        let mut disk = Disk::new();
        let (mut boot, mut segment) = (0, 0);
        let (mut place, mut read, mut missed) = (None, Vec::new(), 0);
        let mut began = false;
        for (step, count) in steps {
            match step {
                0 => disk.write(boot, segment, count),
                1 => {
                    segment += 1;
                    disk.write(boot, segment, count);
                }
                2 => {
                    (boot, segment) = (boot + 1, 0);
                    disk.write(boot, segment, count);
                }
                // The newest segment is never removed.
                _ => {
                    let all = segment::list(disk.path()).unwrap();
                    if let Some((_, older)) = all.split_last()
                        && let Some(victim) = older.get(usize::try_from(count).unwrap())
                    {
                        disk.remove(victim.id.boot, victim.id.number);
                    }
                }
            }
            if step != 1 {
                let (numbers, missing, next) = disk.rest(place);
                if !began && let Some(first) = numbers.first() {
                    // Entries that were gone before the first look do not count.
                    missed += first;
                    began = true;
                }
                read.extend(numbers);
                missed += missing;
                place = next;
            }
        }
        prop_assert!(read.windows(2).all(|pair| pair[0] < pair[1]), "{read:?}");
        if began {
            let behind = place.unwrap().number;
            prop_assert_eq!(read.len() as u64 + missed, behind);
        }
    }

    #[test]
    fn arbitrary_segments_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..300), offset: u64, number: u64, boot in 0_u64..3,
    ) {
        let disk = Disk::new();
        fs::write(Id { boot: 1, number: 0 }.path(disk.path()), bytes).unwrap();
        let place = Place { boot, segment: 0, offset, number };
        let _read = after(disk.path(), 1, Some(place));
    }
}
