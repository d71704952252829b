//! The disk of the machine that this node runs on.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::MountFlags;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::Kind;
use super::apply::{Error, Machine};
use super::backing::{self, Backing};
use super::detached::{detached, name_of, step};
use super::health::Devices;
use super::key::{Key, Keys, Passphrase};
use super::luks::{self, OpenError};
use super::plan::{self, GROWTH_MIN, LABEL};
use super::probe::{self, Content};
use super::table::{self, Partition, Table};
use super::unlock;
use super::wipe::{self, Groups};
use polis_base::files::Root;
use polis_base::sys::block;
use polis_base::sys::mount::{self, Mount};
use polis_base::sys::xfs;
use polis_runtime::logtree::Sink;
use polis_runtime::sys::process::Command;

/// Where the image keeps the programs of XFS.
const MKFS: &str = "/usr/sbin/mkfs.xfs";
const GROWFS: &str = "/usr/sbin/xfs_growfs";

/// How long an open file may keep the file system, when everybody should have ended.
const RELEASE: Duration = Duration::from_secs(5);
const RELEASE_PACE: Duration = Duration::from_millis(50);

/// The block of a file system: the one that `mkfs.xfs` takes by itself.
const XFS_BLOCK: u64 = 4096;

/// Project quotas bound the space of a volume.
pub const MOUNT_OPTIONS: &str = "prjquota";

/// Nothing on the data partition is a device or gains privileges, and access times are
/// never read.
const MOUNT_FLAGS: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOATIME);

/// Where a partition goes: its mount, and its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The mount point.
    pub mount: PathBuf,
    /// The file in it that holds what was never written; see `storage::wipe`.
    pub hidden: PathBuf,
    /// The name in the device mapper, once it is open.
    pub mapper: String,
    /// The label of the file system; XFS has room for twelve bytes.
    pub label: &'static str,
}

impl Target {
    /// That of the data partition.
    #[must_use]
    pub fn data(root: &Root) -> Self {
        Self {
            mount: root.data.mount.path().to_owned(),
            hidden: root.data.unwritten.path().to_owned(),
            mapper: luks::NAME.to_owned(),
            label: LABEL,
        }
    }
}

/// The disk, and where its data partition is mounted.
#[derive(Clone, Debug)]
pub struct Live {
    /// A whole disk, for example `/dev/vda`.
    pub disk: PathBuf,
    /// Where the partition goes.
    pub target: Target,
    /// Options of the mount: [`MOUNT_OPTIONS`].
    pub mount_options: &'static str,
    /// On what the data partition lies.
    pub backing: Backing,
    /// Bytes in a block of the disk.
    pub block_size: u64,
    /// How the data partition is protected.
    pub kind: Kind,
    /// The key for a new partition, where it needs one.
    pub keys: Option<Keys>,
    /// Where the programs write.
    pub log: Sink,
}

/// A file system that is smaller than its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The end of the file system, in bytes.
    pub end: u64,
    /// The size of the device, in bytes.
    pub size: u64,
}

impl Live {
    /// The device that carries the file system of `partition`.
    #[must_use]
    pub fn device(&self, partition: &Partition) -> PathBuf {
        match self.kind {
            // Nothing lies between the file system and the partition.
            Kind::Insecure => self.raw(partition),
            Kind::Encrypted | Kind::Authenticated => luks::path(&self.target.mapper),
        }
    }

    /// The device of `partition` itself, or of the mirror that it belongs to.
    #[must_use]
    pub fn raw(&self, partition: &Partition) -> PathBuf {
        match self.backing {
            Backing::Partition => block::partition_path(&self.disk, partition.number),
            Backing::Mirror { .. } => backing::path(),
        }
    }

    /// Whether an earlier run of the service has opened or mounted `partition`.
    #[must_use]
    pub fn is_in_use(&self, partition: &Partition) -> bool {
        self.is_open() || is_mounted(&self.raw(partition), self.mount_point())
    }

    /// Whether an earlier run of the service has opened the partition.
    #[must_use]
    pub fn is_open(&self) -> bool {
        luks::is_open(&self.target.mapper)
    }

    fn mount_point(&self) -> &Path {
        &self.target.mount
    }

    /// Closes the layers below the file system. Blocks.
    fn closing(&self) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let name = self.target.mapper.clone();
        move || luks::close(&name)
    }

    /// Closes the layers below the file system, unless that is mounted.
    pub(crate) async fn close(&self) -> io::Result<()> {
        if self.kind == Kind::Insecure {
            return Ok(());
        }
        let (device, target) = (luks::path(&self.target.mapper), self.target.mount.clone());
        let close = self.closing();
        detached(move || if is_mounted(&device, &target) { Ok(()) } else { close() }).await?
    }

    /// Opens `partition`, and gives it a new passphrase if there is one.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unfit`] when the key is wrong.
    pub async fn open_with(
        &self,
        partition: &Partition,
        key: &Key,
        rekey: Option<&Passphrase>,
    ) -> Result<(), OpenError> {
        luks::load_ciphers(self.kind, &self.log).await;
        unlock::unlock(&Unlocking { live: self, partition, key, rekey }).await
    }

    /// The room of the integrity device, from its own superblock.
    async fn integrity_size(&self, partition: &Partition) -> Option<u64> {
        /// Where the data of a LUKS2 partition begins, and in it that number.
        const PLACE: u64 = (16 << 20) + 16;
        if self.kind != Kind::Authenticated {
            return None;
        }
        let device = self.raw(partition);
        let read = move || {
            let device = File::open(device).ok()?;
            rustix::fs::fadvise(&device, 0, None, rustix::fs::Advice::DontNeed).ok()?;
            let mut bytes = [0; 8];
            device.read_exact_at(&mut bytes, PLACE).ok()?;
            Some(u64::from_le_bytes(bytes))
        };
        detached(read).await.ok().flatten()
    }

    /// Where the mounted file system and its device end, if there is room between that is worth
    /// it. The file system says so itself: its superblock on the disk, and what the kernel keeps
    /// of that, may be from before it has grown.
    ///
    /// # Errors
    ///
    /// An error of the kernel.
    pub async fn room(&self, partition: &Partition) -> io::Result<Option<Room>> {
        let device = self.device(partition);
        let mount = self.mount_point().to_owned();
        let look = move || {
            let size = block::size(&File::open(device)?)?;
            let end = xfs::size(&File::open(mount)?)?;
            Ok((size >= end.saturating_add(GROWTH_MIN)).then_some(Room { end, size }))
        };
        detached(look).await.unwrap_or(Ok(None))
    }

    /// The devices whose messages in the kernel's log are about `partition`, once it is open.
    #[must_use]
    pub fn devices(&self, partition: &Partition) -> Devices {
        let disk = name_of(&self.disk);
        let (disk, counted) = match &self.backing {
            Backing::Partition => (disk.clone(), disk),
            Backing::Mirror { alone, .. } => {
                let device = backing::kernel_name().unwrap_or(disk);
                (alone.clone().unwrap_or_else(|| device.clone()), device)
            }
        };
        Devices {
            disk,
            counted,
            partition: self.raw(partition).display().to_string(),
            mounted: mounted(&self.device(partition)),
            integrity: mounted(&luks::integrity_path(&self.target.mapper)),
        }
    }

    /// Leaves the file system clean, if it is not in use any more, and closes the layers
    /// below it.
    /// Returns whether it is unmounted.
    pub async fn leave(&self) -> bool {
        let deadline = Instant::now() + RELEASE;
        let partition = self.target.label;
        loop {
            let target = self.target.mount.clone();
            match detached(move || mount::unmount(&target)).await {
                Ok(Ok(())) => break,
                Ok(Err(_busy)) if Instant::now() < deadline => sleep(RELEASE_PACE).await,
                Ok(Err(_busy)) => {
                    let target = self.target.mount.clone();
                    match detached(move || mount::read_only(&target)).await {
                        Ok(Ok(())) => warn!(partition, "it is in use: it is read-only now"),
                        // XFS has a journal: the next mount replays it.
                        Ok(Err(error)) => warn!(
                            error = &error as &dyn std::error::Error,
                            partition, "it stays mounted"
                        ),
                        Err(_lost) => {}
                    }
                    return false;
                }
                Err(_lost) => return false,
            }
        }
        if let Err(error) = self.close().await {
            warn!(error = &error as &dyn std::error::Error, partition, "it stays open");
        }
        true
    }

    /// Lets the mounted file system fill its device.
    ///
    /// # Errors
    ///
    /// The output of `xfs_growfs`.
    pub async fn fill(&self, partition: &Partition) -> Result<(), Error> {
        self.growfs(partition, &["-d".to_owned()]).await?;
        let stat = rustix::fs::statvfs(self.mount_point());
        let mib = stat.map(|stat| (stat.f_blocks * stat.f_frsize) >> 20).unwrap_or_default();
        info!(mib, "the file system has grown");
        Ok(())
    }

    /// Lets the mounted file system end at byte `end` of its device.
    ///
    /// # Errors
    ///
    /// The output of `xfs_growfs`.
    pub async fn grow_to(&self, partition: &Partition, end: u64) -> Result<(), Error> {
        // In blocks, as `mkfs.xfs` makes them by default.
        self.growfs(partition, &["-D".to_owned(), (end / XFS_BLOCK).to_string()]).await
    }

    async fn growfs(&self, partition: &Partition, args: &[String]) -> Result<(), Error> {
        let command = Command::new(GROWFS).args(args).arg(self.mount_point());
        let device = self.device(partition);
        let grown = command.log(self.log.clone()).run().await;
        grown.map(drop).map_err(|source| Error::Grow { device, source })
    }

    /// The size that the new file system begins with, where that is not its device's.
    async fn first_size(&self, partition: &Partition) -> Result<Option<u64>, Error> {
        if self.kind != Kind::Authenticated {
            return Ok(None);
        }
        let device = self.device(partition);
        step(move || {
            let size = File::open(&device).and_then(|device| block::size(&device));
            let failed = |source| Error::Wipe { device: device.clone(), source };
            size.map(wipe::first_size).map_err(failed)
        })
        .await
    }

    /// The preparation that authentication needs before there is a file system.
    async fn prepare(&self, partition: &Partition, size: Option<u64>) -> Result<(), Error> {
        let device = self.device(partition);
        let output = self.mkfs(partition, size).arg("-N").arg(&device).run().await;
        let output = output.map_err(|source| Error::Format { device: device.clone(), source })?;
        let groups = Groups::parse(&String::from_utf8_lossy(&output));
        let strange = || io::Error::other("mkfs.xfs does not report its groups");
        let failed = |source| Error::Wipe { device: device.clone(), source };
        let groups = groups.ok_or_else(strange).map_err(failed)?;
        let target = device.clone();
        step(move || {
            let failed = |source| Error::Wipe { device: target.clone(), source };
            wipe::prepare(&target, groups).map_err(failed)
        })
        .await
    }

    /// Everything but the device; `size` in bytes, where it is not the device's.
    fn mkfs(&self, partition: &Partition, size: Option<u64>) -> Command {
        Command::new(MKFS)
            .args(size.into_iter().flat_map(|size| ["-d".to_owned(), format!("size={size}")]))
            // Discarding the whole device first would take longer than all the rest,
            // and would undo what integrity needs.
            .args(["-K", "-f", "-L", self.target.label, "-m"])
            // Distinguishes our file system from any other: see `plan`.
            .arg(format!("uuid={}", partition.id))
            .log(self.log.clone())
    }

    fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(&self.disk)
    }

    /// Makes the kernel know partition `number` as `start` and `length` say.
    fn notify_kernel(&self, number: u32, (start, length): (u64, u64)) -> Result<(), Error> {
        let failed = |source| Error::Register { number, source };
        let device = block::partition_path(&self.disk, number);
        match block::known_extent(&device).map_err(failed)? {
            Some(known) if known == (start, length) => Ok(()),
            Some((known, _)) if known != start => {
                let what = format!("the kernel has it at byte {known} instead of {start}");
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
/// if a power cut tore it, or if it cannot be read. Blocks.
///
/// # Errors
///
/// [`table::Error`].
pub fn read_table(disk: &Path) -> Result<Table, table::Error> {
    let opened = File::options().read(true).write(true).open(disk);
    let disk = opened.map_err(|source| table::Error::Io { operation: "open", source })?;
    if table::restore(&disk)? {
        warn!("the partition table was damaged; it is restored from its backup");
    }
    table::read(&disk)
}

/// Reads the backup of the partition table, if it is sound. Blocks.
///
/// # Errors
///
/// [`table::Error`] where there may be one that cannot be read.
pub fn read_backup(disk: &Path) -> Result<Option<Table>, table::Error> {
    let opened = File::open(disk);
    let disk = opened.map_err(|source| table::Error::Io { operation: "open", source })?;
    table::find_backup(&disk)
}

/// Returns the content of the stretch of `partition`. Blocks.
///
/// # Errors
///
/// An error of the kernel: an unreadable stretch is not blank.
pub fn read_content(disk: &Path, table: &Table, partition: &Partition) -> io::Result<Content> {
    let disk = File::open(disk)?;
    let start = partition.first * table.block_size;
    let length = partition.blocks() * table.block_size;
    // The cache of the disk does not see data that was written through the device of
    // the partition, and may still have older content.
    rustix::fs::fadvise(&disk, start, NonZeroU64::new(length), rustix::fs::Advice::DontNeed)?;
    read_stretch(&disk, start, length)
}

fn read_stretch(disk: &File, start: u64, length: u64) -> io::Result<Content> {
    let take = |wanted: usize| usize::try_from(length).unwrap_or(usize::MAX).min(wanted);
    let mut head = vec![0; take(probe::HEAD)];
    disk.read_exact_at(&mut head, start)?;
    let mut tail = vec![0; take(probe::TAIL)];
    let tail_start = start + length - tail.len() as u64;
    disk.read_exact_at(&mut tail, tail_start)?;
    Ok(probe::recognise(&head, &tail))
}

/// Returns the content of a whole device. Blocks.
///
/// # Errors
///
/// An error of the kernel.
pub fn read_device(device: &Path) -> io::Result<Content> {
    let device = File::open(device)?;
    polis_base::sys::files::forget(&device)?;
    let size = block::size(&device)?;
    read_stretch(&device, 0, size)
}

/// The steps of an unlock on this machine.
struct Unlocking<'a> {
    live: &'a Live,
    partition: &'a Partition,
    key: &'a Key,
    rekey: Option<&'a Passphrase>,
}

impl unlock::Steps for Unlocking<'_> {
    async fn open(&self) -> Result<(), OpenError> {
        let (live, device) = (self.live, self.live.raw(self.partition));
        luks::open(&device, &live.target.mapper, self.key, &live.log).await
    }

    async fn integrity_size(&self) -> Option<u64> {
        self.live.integrity_size(self.partition).await
    }

    async fn close(&self) -> io::Result<()> {
        detached(self.live.closing()).await?
    }

    async fn rekey(&self) -> Result<(), OpenError> {
        let Some(passphrase) = self.rekey else { return Ok(()) };
        let device = self.live.raw(self.partition);
        luks::rekey(&device, self.key, passphrase, &self.live.log).await?;
        Ok(())
    }
}

impl Machine for Live {
    async fn write_table(&self, table: &Table) -> Result<(), Error> {
        let (live, table) = (self.clone(), table.clone());
        step(move || {
            let disk = live.open();
            let disk = disk.map_err(|source| table::Error::Io { operation: "open", source });
            disk.and_then(|disk| table::write(&disk, &table)).map_err(Error::Table)
        })
        .await
    }

    async fn register(&self, partition: &Partition) -> Result<(), Error> {
        let wanted = self.extent(partition);
        let (live, number) = (self.clone(), partition.number);
        step(move || {
            live.notify_kernel(number, wanted)?;
            let Backing::Mirror { last: Some(_), .. } = live.backing else { return Ok(()) };
            let device = block::partition_path(&live.disk, number);
            let failed = |source| Error::Register { number, source };
            backing::make(&backing::linear(&device, wanted.1)).map_err(failed)
        })
        .await
    }

    async fn protect(&self, partition: &Partition) -> Result<(), Error> {
        let device = self.raw(partition);
        let Some(keys) = &self.keys else { return Ok(()) };
        luks::load_ciphers(self.kind, &self.log).await;
        // An earlier run of the service may have come this far.
        if self.is_open() {
            let number = partition.number;
            let failed = move |source| Error::Register { number, source };
            let close = self.closing();
            step(move || close().map_err(failed)).await?;
        }
        let made =
            luks::format(&device, self.target.label, partition.id, self.kind, keys, &self.log)
                .await;
        made.map_err(|source| Error::Protect { device: device.clone(), source })?;
        info!(kind = %self.kind, "the partition is encrypted");
        let key = Key::Passphrase(keys.passphrase.clone());
        luks::open(&device, &self.target.mapper, &key, &self.log).await.map_err(|error| match error
        {
            OpenError::Failed(source) => Error::Open { device, source },
            OpenError::Unfit { .. } => Error::OwnKey { device },
        })
    }

    async fn format(&self, partition: &Partition) -> Result<(), Error> {
        let size = self.first_size(partition).await?;
        if self.kind == Kind::Authenticated {
            self.prepare(partition, size).await?;
        }
        let device = self.device(partition);
        let made = self.mkfs(partition, size).arg("-q").arg(&device).run().await;
        made.map(drop).map_err(|source| Error::Format { device, source })
    }

    async fn settle(&self, partition: &Partition) -> Result<(), Error> {
        if self.kind != Kind::Authenticated {
            return Ok(());
        }
        let (device, target) = (self.device(partition), self.target.clone());
        let reserved = step(move || {
            let failed = |source| Error::Wipe { device: device.clone(), source };
            wipe::reserve(&device, &target.mount, &target.hidden).map_err(failed)
        });
        let written = reserved.await?;
        info!(mib = written >> 20, "the initial free space is written");
        Ok(())
    }

    async fn mount(&self, partition: &Partition) -> Result<(), Error> {
        let device = self.device(partition);
        let target = self.mount_point().to_owned();
        let options = self.mount_options;
        let (kind, mapper) = (self.kind, self.target.mapper.clone());
        step(move || {
            if is_mounted(&device, &target) {
                return Ok(());
            }
            let weakened = |source| Error::Weakened { device: device.clone(), source };
            luks::confirm(&mapper, kind).map_err(weakened)?;
            let mount = Mount::new(device.to_string_lossy(), target, "xfs");
            Ok(mount.flags(MOUNT_FLAGS).options(options).apply()?)
        })
        .await
    }

    async fn clear(&self, partition: &Partition) -> Result<(), Error> {
        let device = self.raw(partition);
        let length = partition.blocks() * self.block_size;
        step(move || {
            let failed = |source| Error::Clear { device: device.clone(), source };
            wipe::heads(&device, length).map_err(failed)
        })
        .await
    }

    async fn grow(&self, partition: &Partition) -> Result<(), Error> {
        self.register(partition).await?;
        self.fill(partition).await
    }
}

/// Writes the mark on the data partition of `disk` that ends it at the next boot. Blocks.
///
/// # Errors
///
/// [`table::Error`].
pub fn give_up(disk: &Path) -> Result<(), table::Error> {
    let table = read_table(disk)?;
    let Some(table) = plan::given_up(&table) else { return Ok(()) };
    let opened = File::options().read(true).write(true).open(disk);
    let disk = opened.map_err(|source| table::Error::Io { operation: "open", source })?;
    table::write(&disk, &table)
}

/// The name of a device in the kernel.
fn mounted(device: &Path) -> String {
    let Ok(id) = std::fs::metadata(device).map(|metadata| metadata.rdev()) else {
        return name_of(device);
    };
    let (major, minor) = (rustix::fs::major(id), rustix::fs::minor(id));
    let name = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}"));
    name.map_or_else(|_error| name_of(device), |name| name_of(&name))
}

/// Whether `target` is where `device` is mounted: an earlier run of the service did it.
fn is_mounted(device: &Path, target: &Path) -> bool {
    let (Ok(device), Ok(target)) = (std::fs::metadata(device), std::fs::metadata(target)) else {
        return false;
    };
    device.rdev() == target.dev()
}
