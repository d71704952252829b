//! Power cuts between any two steps, on a disk image.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};

use uuid::Uuid;

use super::super::plan::{LABEL, Refusal, TYPE_ID, given_up, place, plan};
use super::super::probe::{self, Content};
use super::super::table::tests::{MIB, image};
use super::*;

const ID: Uuid = Uuid::from_bytes([7; 16]);
const ANOTHER: Uuid = Uuid::from_bytes([8; 16]);

/// A machine whose disk is a file and whose power goes at a chosen step.
struct Cut {
    disk: File,
    steps_left: AtomicU32,
    mounted: AtomicU32,
}

impl Cut {
    fn new(disk: &File, steps: u32) -> Self {
        let disk = disk.try_clone().unwrap();
        Self { disk, steps_left: AtomicU32::new(steps), mounted: AtomicU32::new(0) }
    }

    fn step(&self) -> Result<(), Error> {
        let took = |left: u32| left.checked_sub(1);
        let left = self.steps_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, took);
        left.map(drop).map_err(|_none| Error::Lost)
    }

    /// The result of `mkfs.xfs`, whole or half way.
    fn superblock(&self, partition: &Partition, in_progress: bool) {
        let start = partition.first * 512;
        let put =
            |offset: u64, bytes: &[u8]| self.disk.write_all_at(bytes, start + offset).unwrap();
        put(0, b"XFSB");
        put(4, &4096_u32.to_be_bytes());
        put(8, &(partition.blocks() / 8).to_be_bytes());
        put(32, partition.id.as_bytes());
        put(108, LABEL.as_bytes());
        put(126, &[u8::from(in_progress)]);
    }
}

impl Machine for Cut {
    async fn write_table(&self, table: &Table) -> Result<(), Error> {
        self.step()?;
        table::write(&self.disk, table).map_err(Error::Table)
    }

    async fn register(&self, _partition: &Partition) -> Result<(), Error> {
        self.step()
    }

    async fn protect(&self, _partition: &Partition) -> Result<(), Error> {
        self.step()
    }

    async fn settle(&self, _partition: &Partition) -> Result<(), Error> {
        self.step()
    }

    async fn format(&self, partition: &Partition) -> Result<(), Error> {
        self.step()?;
        // Old bytes in the middle, then a superblock that is not complete yet.
        self.disk.write_all_at(b"half a file system", partition.first * 512 + 8192).unwrap();
        self.step()?;
        self.superblock(partition, true);
        self.step()?;
        self.superblock(partition, false);
        Ok(())
    }

    async fn mount(&self, partition: &Partition) -> Result<(), Error> {
        self.step()?;
        let content = content(&self.disk, partition);
        assert!(matches!(content, Content::Xfs(xfs) if !xfs.in_progress && xfs.id == partition.id));
        self.mounted.store(partition.number, Ordering::Relaxed);
        Ok(())
    }

    async fn clear(&self, partition: &Partition) -> Result<(), Error> {
        self.step()?;
        // The start goes last.
        let start = partition.first * 512;
        self.disk.write_all_at(&[0; 8192], start + 4096).unwrap();
        self.step()?;
        self.disk.write_all_at(&[0; 4096], start).unwrap();
        Ok(())
    }

    async fn grow(&self, partition: &Partition) -> Result<(), Error> {
        self.step()?;
        self.superblock(partition, false);
        Ok(())
    }
}

fn content(disk: &File, partition: &Partition) -> Content {
    let mut head = vec![0; probe::HEAD];
    disk.read_exact_at(&mut head, partition.first * 512).unwrap();
    probe::recognise(&head, &[])
}

/// One boot: look, decide, do.
async fn boot(machine: &Cut) -> Result<Partition, Error> {
    let table = table::read(&machine.disk).unwrap();
    let place = place(&table, ID).unwrap();
    let found = content(&machine.disk, place.partition());
    let plan = plan(&table, place, &found, || ANOTHER).unwrap();
    if let Plan::Clear { partition } = plan {
        clear(machine, table, partition, ANOTHER).await?;
        return Box::pin(boot(machine)).await;
    }
    apply(machine, table, plan).await
}

#[tokio::test]
async fn a_power_cut_after_any_step_is_followed_by_a_boot_that_finishes() {
    for steps in 0.. {
        let disk = image(64 * MIB, 1024 * MIB);
        let whole = boot(&Cut::new(&disk, steps)).await.is_ok();
        let machine = Cut::new(&disk, 100);
        let partition = boot(&machine).await.unwrap();
        assert_eq!(machine.mounted.load(Ordering::Relaxed), partition.number, "{steps} steps");
        let table = table::read(&disk).unwrap();
        assert_eq!(table.partitions.len(), 3, "{steps} steps");
        assert_eq!(table.partitions[2].type_id, TYPE_ID);
        assert_eq!(table.partitions[2].attributes, 0, "{steps} steps");
        if whole {
            assert!(steps > 5, "the cuts came between the steps");
            return;
        }
    }
}

#[tokio::test]
async fn a_second_power_cut_while_finishing_changes_nothing() {
    for first in 0..8 {
        for second in 0..8 {
            let disk = image(64 * MIB, 1024 * MIB);
            drop(boot(&Cut::new(&disk, first)).await);
            drop(boot(&Cut::new(&disk, second)).await);
            boot(&Cut::new(&disk, 100)).await.unwrap();
            let table = table::read(&disk).unwrap();
            assert_eq!(table.partitions[2].attributes, 0, "{first} and {second} steps");
        }
    }
}

#[tokio::test]
async fn a_finished_partition_is_only_mounted() {
    let disk = image(64 * MIB, 1024 * MIB);
    boot(&Cut::new(&disk, 100)).await.unwrap();
    // Register and mount: two steps.
    boot(&Cut::new(&disk, 2)).await.unwrap();
}

#[tokio::test]
async fn a_larger_disk_makes_it_grow_whatever_is_cut() {
    for steps in 2..6 {
        let disk = image(64 * MIB, 1024 * MIB);
        boot(&Cut::new(&disk, 100)).await.unwrap();
        disk.set_len(4096 * MIB).unwrap();
        // Growing is not worth a failed boot.
        let cut = boot(&Cut::new(&disk, steps)).await;
        assert!(cut.is_ok(), "{steps} steps");
        let partition = boot(&Cut::new(&disk, 100)).await.unwrap();
        assert_eq!(partition.last, 4095 * MIB / 512 - 1, "{steps} steps");
        let Content::Xfs(xfs) = content(&disk, &partition) else { panic!("no file system") };
        assert_eq!(xfs.size, partition.blocks() * 512, "{steps} steps");
    }
}

#[tokio::test]
async fn a_zeroed_superblock_on_a_finished_partition_is_never_formatted() {
    let disk = image(64 * MIB, 1024 * MIB);
    let partition = boot(&Cut::new(&disk, 100)).await.unwrap();
    disk.write_all_at(&[0; 4096], partition.first * 512).unwrap();
    let table = table::read(&disk).unwrap();
    let place = place(&table, ID).unwrap();
    let found = content(&disk, &partition);
    assert_eq!(plan(&table, place, &found, || ANOTHER), Err(Refusal::Damaged { number: 3 }));
}

#[tokio::test]
async fn a_partition_that_was_given_up_is_a_new_one_whatever_is_cut() {
    for steps in 0.. {
        let disk = image(64 * MIB, 1024 * MIB);
        let before = boot(&Cut::new(&disk, 100)).await.unwrap();
        let table = given_up(&table::read(&disk).unwrap()).unwrap();
        table::write(&disk, &table).unwrap();
        let whole = boot(&Cut::new(&disk, steps)).await.is_ok();
        let after = boot(&Cut::new(&disk, 100)).await.unwrap();
        assert_eq!((before.id, after.id), (ID, ANOTHER), "{steps} steps");
        assert_eq!((after.first, after.last, after.attributes), (before.first, before.last, 0));
        assert_eq!(table::read(&disk).unwrap().partitions.len(), 3, "{steps} steps");
        if whole {
            assert!(steps > 8, "the cuts came between the steps");
            return;
        }
    }
}
