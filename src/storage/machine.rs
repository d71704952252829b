//! The disk of the machine that this node runs on.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;
use tracing::warn;

use super::Kind;
use super::apply::{Error, Machine};
use super::plan::LABEL;
use super::probe::{self, Content};
use super::table::{self, Partition, Table};
use crate::logtree::Sink;
use crate::sys::block;
use crate::sys::mount::Mount;
use crate::sys::process::Command;

/// Where the image keeps the programs of XFS.
const MKFS: &str = "/usr/sbin/mkfs.xfs";
const GROWFS: &str = "/usr/sbin/xfs_growfs";

/// Project quotas bound what a volume may take.
pub const MOUNT_OPTIONS: &str = "prjquota";

/// Nothing on the data partition is a device or gains privileges, and nobody
/// reads access times.
const MOUNT_FLAGS: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOATIME);

/// The disk, and where its data partition is mounted.
#[derive(Clone, Debug)]
pub struct Live {
    /// A whole disk, for example `/dev/vda`.
    pub disk: PathBuf,
    /// Where the data partition is mounted.
    pub mount_point: PathBuf,
    /// Options of the mount: [`MOUNT_OPTIONS`].
    pub mount_options: &'static str,
    /// Bytes in a block of the disk.
    pub block_size: u64,
    /// How the data partition is protected.
    pub kind: Kind,
    /// Where the programs write.
    pub log: Sink,
}

impl Live {
    /// The device that carries the file system of `partition`.
    #[must_use]
    pub fn device(&self, partition: &Partition) -> PathBuf {
        match self.kind {
            // Nothing lies between the file system and the partition.
            Kind::Insecure | Kind::Encrypted | Kind::Authenticated => {
                block::partition_path(&self.disk, partition.number)
            }
        }
    }

    fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.disk)
    }

    /// Makes the kernel know partition `number` as `start` and `length` say.
    fn tell_kernel(&self, number: u32, (start, length): (u64, u64)) -> Result<(), Error> {
        let failed = |source| Error::Register { number, source };
        let device = block::partition_path(&self.disk, number);
        match block::known_extent(&device).map_err(failed)? {
            Some(known) if known == (start, length) => Ok(()),
            Some((known, _)) if known != start => {
                let what = format!("it knows it at byte {known} instead of {start}");
                Err(failed(io::Error::other(what)))
            }
            Some(_) => {
                let disk = self.open().map_err(failed)?;
                block::resize_partition(&disk, number, start, length).map_err(failed)
            }
            None => {
                let disk = self.open().map_err(failed)?;
                block::add_partition(&disk, number, start, length).map_err(failed)
            }
        }
    }

    /// First byte and length of `partition`.
    fn extent(&self, partition: &Partition) -> (u64, u64) {
        (partition.first * self.block_size, partition.blocks() * self.block_size)
    }
}

/// Reads the partition table of `disk`, and makes its primary copy whole again
/// if a power cut tore it. Blocks.
///
/// # Errors
///
/// [`table::Error`].
pub fn read_table(disk: &Path) -> Result<Table, table::Error> {
    let opened = File::options().read(true).write(true).open(disk);
    let disk = opened.map_err(|source| table::Error::Io { operation: "open", source })?;
    if table::restore(&disk)? {
        warn!("the partition table was torn; it is as its backup again");
    }
    table::read(&disk)
}

/// Reads the backup of the partition table, if it is sound. Blocks.
#[must_use]
pub fn read_backup(disk: &Path) -> Option<Table> {
    table::read_backup(&File::open(disk).ok()?)
}

/// Says what the stretch of `partition` carries. Blocks.
///
/// # Errors
///
/// What the kernel says: a stretch that cannot be read is not blank.
pub fn read_content(disk: &Path, table: &Table, partition: &Partition) -> io::Result<Content> {
    let disk = File::open(disk)?;
    let start = partition.first * table.block_size;
    let length = partition.blocks() * table.block_size;
    // What was written through the device of the partition is news to the cache of
    // the disk, which may still have what stood there before.
    rustix::fs::fadvise(&disk, start, NonZeroU64::new(length), rustix::fs::Advice::DontNeed)?;
    let take = |wanted: usize| usize::try_from(length).unwrap_or(usize::MAX).min(wanted);
    let mut head = vec![0; take(probe::HEAD)];
    disk.read_exact_at(&mut head, start)?;
    let mut tail = vec![0; take(probe::TAIL)];
    let tail_start = start + length - tail.len() as u64;
    disk.read_exact_at(&mut tail, tail_start)?;
    Ok(probe::recognise(&head, &tail))
}

impl Machine for Live {
    async fn write_table(&self, table: &Table) -> Result<(), Error> {
        let (live, table) = (self.clone(), table.clone());
        blocking(move || {
            let disk = live.open();
            let disk = disk.map_err(|source| table::Error::Io { operation: "open", source });
            disk.and_then(|disk| table::write(&disk, &table)).map_err(Error::Table)
        })
        .await
    }

    async fn register(&self, partition: &Partition) -> Result<(), Error> {
        let wanted = self.extent(partition);
        let (live, number) = (self.clone(), partition.number);
        blocking(move || live.tell_kernel(number, wanted)).await
    }

    async fn format(&self, partition: &Partition) -> Result<(), Error> {
        let device = self.device(partition);
        let made = Command::new(MKFS)
            // Discarding the whole device first would take longer than all the rest.
            .args(["-q", "-K", "-f", "-L", LABEL, "-m"])
            // Tells our file system from any other: see `plan`.
            .arg(format!("uuid={}", partition.id))
            .arg(&device)
            .log(self.log.clone())
            .run()
            .await;
        made.map(drop).map_err(|source| Error::Format { device, source })
    }

    async fn mount(&self, partition: &Partition) -> Result<(), Error> {
        let device = self.device(partition);
        let target = self.mount_point.clone();
        let options = self.mount_options;
        blocking(move || {
            if is_mounted(&device, &target) {
                return Ok(());
            }
            let mount = Mount::new(device.to_string_lossy(), target, "xfs");
            Ok(mount.flags(MOUNT_FLAGS).options(options).apply()?)
        })
        .await
    }

    async fn grow(&self, partition: &Partition) -> Result<(), Error> {
        self.register(partition).await?;
        let grown =
            Command::new(GROWFS).arg("-d").arg(&self.mount_point).log(self.log.clone()).run().await;
        grown.map(drop).map_err(|source| Error::Grow { device: self.device(partition), source })
    }
}

/// Whether `target` is where `device` is mounted: an earlier run of the service did it.
fn is_mounted(device: &Path, target: &Path) -> bool {
    let (Ok(device), Ok(target)) = (std::fs::metadata(device), std::fs::metadata(target)) else {
        return false;
    };
    device.rdev() == target.dev()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(Error::Lost))
}
