//! The project quota of workloads: pods can fill what they have, and never what etcd and
//! the node need.
//!
//! Images, containers, logs, the volumes without a name and `/var/lib` share one project. kubelet
//! knows file systems by their device: with a project each, it would see one file system of two
//! sizes. Persistent volumes have projects of their own, from [`VOLUME_FIRST`] up.
//!
//! ```text
//! data partition = XFS + reserve of the node + workloads + persistent volumes
//!                  |     |                     |           `- each its own size
//!                  |     |                     `- what is left: shrinks as volumes are made
//!                  |     `- etcd, its snapshots, the logs of the node, a bundle
//!                  `- what its trees may need, which no file gets
//! ```
//!
//! XFS does not count the blocks of inodes in any project, so the sizes here do: an inode is
//! 512 bytes, and a project may have one for each [`BYTES_AN_INODE`].
//!
//! XFS counts what it holds back for its trees in its size, and `statvfs` shows that and the
//! blocks of files as one figure, so [`limits`] computes it from the size. The hidden file of an
//! authenticated disk (`/data/.unwritten`), which is released within hours after the first boot,
//! is not subtracted.
//!
//! Invariants:
//! - All projects full, with all their inodes, leave the reserve to the node
//!   (`full_projects_leave_the_reserve`).
//! - A volume takes no room that workloads use, and leaves them a tenth of their limits
//!   (`workloads_keep_a_tenth_of_their_limits_beside_what_they_use`).
//!
//! The sum of volumes is read from their directories each time, so it is kept nowhere else.
//!
//! What this module does not do: make volumes. `csi` calls [`divide`] before it makes or
//! enlarges one, and after it has removed one, while it holds the [`turn`]. It shows the [`room`]
//! to the scheduler.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use polis_base::files::{self, Data};
use polis_base::sys::quota::{self, Limits, Project, Usage};
use rustix::fs::OFlags;

/// The project of workloads.
pub const WORKLOADS: u32 = 1;
/// Projects up to this one belong to the node; persistent volumes begin here.
pub const VOLUME_FIRST: u32 = 1000;

const GIB: u64 = 1 << 30;
/// A quarter of a small partition is the node's; on a larger one, etcd's database at its
/// largest (2 GiB), all snapshots of it (2 GiB), and 1 GiB for the rest: etcd's log and the room to
/// rewrite its database, the logs of the node and of the API server, the bundle of an update.
const RESERVE_MAX: u64 = 5 * GIB;
const RESERVE_MIN: u64 = GIB;
const RESERVE_PART: u64 = 4;
/// Of the smallest partitions, half.
const RESERVE_PART_MAX: u64 = 2;

/// XFS holds back less than a fiftieth for its trees: 1.92 %, with which those of owners, of
/// shared blocks and of free inodes may become as large as they can.
const TREES_PART: u64 = 50;
/// It also holds back 8192 blocks, with which a full file system goes on working.
const POOL: u64 = 32 << 20;

/// Bytes of a project for each inode of it: container images have one for some 10 to 40 KiB.
pub const BYTES_AN_INODE: u64 = 16 << 10;
/// `mkfs.xfs` makes inodes of this size.
const INODE: u64 = 512;
/// The least that is worth having for workloads: the images of the system and one more.
const WORKLOADS_MIN: u64 = GIB;

/// Why workloads have no quota.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The rest is too small.
    #[error(
        "the data partition has {} MiB left for workloads and volumes, and needs {} MiB: a worker \
         needs a disk of 5 GiB or more",
        left >> 20,
        WORKLOADS_MIN >> 20
    )]
    NoRoom {
        /// Bytes that are left.
        left: u64,
    },
    /// Workloads use too much of what would be left for them.
    #[error(
        "images and containers use {} already, and may use {} of the {} that would be left: remove \
         images or pods from the node",
        resource.amount(*used),
        resource.amount(used_max(*left)),
        resource.amount(*left)
    )]
    InUse {
        /// What would become scarce.
        resource: Resource,
        /// How much of it they use.
        used: u64,
        /// Their limit, as it would be.
        left: u64,
    },
    /// The directory has another project, and files.
    #[error("{} has files that its quota does not count", path.display())]
    Uncounted {
        /// The directory.
        path: PathBuf,
    },
    /// The directory cannot be made.
    #[error(transparent)]
    Directory(#[from] files::Error),
    /// The kernel refused.
    #[error("cannot {operation} {}", path.display())]
    Kernel {
        /// The request that it refused.
        operation: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
}

/// What a project has a limit of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of files and directories.
    Bytes,
    /// Files and directories: inodes.
    Files,
}

impl Resource {
    /// So much of it, for people.
    fn amount(self, number: u64) -> String {
        match self {
            Self::Bytes => format!("{} MiB", number >> 20),
            Self::Files => format!("{number} files"),
        }
    }
}

/// The limits of workloads on a file system of `size` bytes, of which persistent volumes
/// have `volumes`, the sum of their sizes.
///
/// # Errors
///
/// [`Error::NoRoom`].
pub fn limits(size: u64, volumes: u64) -> Result<Limits, Error> {
    let others = reserve(size).saturating_add(held_back(size)).saturating_add(cost(volumes));
    let left = size.saturating_sub(others);
    // The inverse of `cost`, rounded down.
    let bytes = left / (BYTES_AN_INODE + INODE) * BYTES_AN_INODE;
    if bytes < WORKLOADS_MIN {
        return Err(Error::NoRoom { left });
    }
    Ok(limits_of(bytes))
}

/// The limits of a persistent volume, or of any project, of `bytes`.
#[must_use]
pub fn limits_of(bytes: u64) -> Limits {
    Limits { bytes, inodes: bytes / BYTES_AN_INODE }
}

/// Bytes of the partition that projects of `bytes` take when they are full, with all their
/// inodes.
fn cost(bytes: u64) -> u64 {
    bytes.saturating_add((bytes / BYTES_AN_INODE + 1) * INODE)
}

/// Bytes of a file system of `size` that are for the node, and never for workloads and volumes.
#[must_use]
pub fn reserve(size: u64) -> u64 {
    (size / RESERVE_PART).clamp(RESERVE_MIN, RESERVE_MAX).min(size / RESERVE_PART_MAX)
}

/// Bytes of a file system of `size` that XFS gives to no file.
fn held_back(size: u64) -> u64 {
    size / TREES_PART + POOL
}

/// How much of a limit workloads may use when a volume takes the rest: with less than a tenth
/// free kubelet removes images, and with less than 5 % it evicts pods (`worker::configuration`).
fn used_max(limit: u64) -> u64 {
    limit / 10 * 9
}

/// The projects of one file system. The node uses [`Kernel`].
pub trait Projects: Debug + Send + Sync {
    /// Bytes of the whole file system.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn size(&self) -> io::Result<u64>;

    /// The project of a directory.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn project(&self, directory: &Path) -> io::Result<Option<Project>>;

    /// Gives a directory its project.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn set_project(&self, directory: &Path, project: Project) -> io::Result<()>;

    /// The usage and the limits of a project; `None` for one without files and limits.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn usage(&self, project: Project) -> io::Result<Option<Usage>>;

    /// Sets the limits of a project.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn set_limits(&self, project: Project, limits: Limits) -> io::Result<()>;
}

/// The projects that the kernel keeps for a mounted file system.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The mount point, or any directory of the file system.
    pub mount: PathBuf,
}

impl Kernel {
    fn root(&self) -> io::Result<File> {
        File::open(&self.mount)
    }
}

impl Projects for Kernel {
    fn size(&self) -> io::Result<u64> {
        let size = rustix::fs::statvfs(&self.mount)?;
        Ok(size.f_blocks.saturating_mul(size.f_frsize))
    }

    fn project(&self, directory: &Path) -> io::Result<Option<Project>> {
        quota::project(&open(directory)?)
    }

    fn set_project(&self, directory: &Path, project: Project) -> io::Result<()> {
        quota::set_project(&open(directory)?, project)
    }

    fn usage(&self, project: Project) -> io::Result<Option<Usage>> {
        match quota::usage(self.root()?.as_fd(), project) {
            Ok(usage) => Ok(Some(usage)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn set_limits(&self, project: Project, limits: Limits) -> io::Result<()> {
        quota::set_limits(self.root()?.as_fd(), project, limits)
    }
}

/// A directory, and not what a link in its place leads to.
fn open(directory: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    File::options().read(true).custom_flags(flags).open(directory)
}

/// One at a time divides the partition: from the sum of the volumes to the limits, and to the
/// directory of the volume that they are for.
static DIVIDING: Mutex<()> = Mutex::new(());

/// The turn to divide the partition.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "held, never read")] MutexGuard<'static, ()>);

/// Waits for the turn. Blocks.
pub fn turn() -> Turn {
    Turn(DIVIDING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Bytes that the persistent volumes in this directory may have, those that are being removed
/// too. Blocks.
///
/// # Errors
///
/// [`Error::Kernel`].
pub fn volumes(projects: &dyn Projects, directory: &Path) -> Result<u64, Error> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(refused("list", directory)(error)),
    };
    // By project: a volume that is being removed may be several directories.
    let mut sizes = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(refused("list", directory))?;
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let project = projects.project(&path);
        let project = project.map_err(refused("read the project of", &path))?;
        let Some(project) = project.filter(|project| project.number() >= VOLUME_FIRST) else {
            continue;
        };
        let usage = projects.usage(project);
        let usage = usage.map_err(refused("read the quota of", &path))?;
        sizes.insert(project, usage.map_or(0, |usage| usage.limits.bytes));
    }
    Ok(sizes.into_values().fold(0, u64::saturating_add))
}

/// Sets the limits of workloads to what the volumes in this directory leave, and `more` bytes
/// for a volume that the caller is about to make or enlarge; returns the limits. Blocks.
///
/// # Errors
///
/// [`Error`]: then nothing is changed.
pub fn divide(
    _turn: &Turn,
    projects: &dyn Projects,
    directory: &Path,
    more: u64,
) -> Result<Limits, Error> {
    let size = size(projects, directory)?;
    let volumes = volumes(projects, directory)?.saturating_add(more);
    let used = if more > 0 { used(projects, directory)? } else { None };
    let limits = limits_beside(size, volumes, used)?;
    projects
        .set_limits(workloads(), limits)
        .map_err(refused("set the quota of workloads beside", directory))?;
    Ok(limits)
}

/// Bytes that another volume in this directory could have now, in whole units of `unit` bytes: the
/// most that [`divide`] has room for. Blocks.
///
/// # Errors
///
/// [`Error::Kernel`].
pub fn room(
    _turn: &Turn,
    projects: &dyn Projects,
    directory: &Path,
    unit: u64,
) -> Result<u64, Error> {
    let size = size(projects, directory)?;
    let (volumes, used) = (volumes(projects, directory)?, used(projects, directory)?);
    let fits = |units: u64| limits_beside(size, volumes.saturating_add(units * unit), used).is_ok();
    // The first always counts as room, the second is more than the disk.
    let (mut fit, mut too_many) = (0, size / unit + 1);
    while too_many - fit > 1 {
        let middle = fit + (too_many - fit) / 2;
        if fits(middle) { fit = middle } else { too_many = middle }
    }
    Ok(fit * unit)
}

/// The usage of workloads beside the volumes in this directory.
fn used(projects: &dyn Projects, directory: &Path) -> Result<Option<Usage>, Error> {
    projects.usage(workloads()).map_err(refused("read the quota of workloads beside", directory))
}

/// The size of the disk of this directory.
fn size(projects: &dyn Projects, directory: &Path) -> Result<u64, Error> {
    projects.size().map_err(refused("look at the disk of", directory))
}

/// The error of an operation that the kernel refuses.
fn refused(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Kernel { operation, path: path.to_owned(), source }
}

/// The limits of workloads, if those with this usage can go on beside `volumes`.
fn limits_beside(size: u64, volumes: u64, used: Option<Usage>) -> Result<Limits, Error> {
    let limits = limits(size, volumes)?;
    if let Some(used) = used {
        leave_enough(used, limits)?;
    }
    Ok(limits)
}

/// Fails unless workloads with this usage can go on with these limits.
fn leave_enough(usage: Usage, limits: Limits) -> Result<(), Error> {
    let both = [
        (Resource::Bytes, usage.bytes, limits.bytes),
        (Resource::Files, usage.inodes, limits.inodes),
    ];
    for (resource, used, left) in both {
        if used > used_max(left) {
            return Err(Error::InUse { resource, used, left });
        }
    }
    Ok(())
}

/// Gives the directories of workloads on the mounted data partition their project, and the
/// project its limits; returns the limits. Blocks.
///
/// # Errors
///
/// [`Error`]; the call may be repeated.
pub fn apply(data: &Data) -> Result<Limits, Error> {
    let kernel = Kernel { mount: data.mount.path().to_owned() };
    // Before the directories: nothing is ever in the project without a limit.
    let limits = divide(&turn(), &kernel, data.volumes.path(), 0)?;
    // Not their parent: keys and certificates in it are the node's.
    data.kubernetes.create()?;
    for directory in [&data.containerd, &data.kubelet, &data.pod_logs, &data.host_paths] {
        directory.create()?;
        adopt(directory.path(), workloads())?;
    }
    Ok(limits)
}

/// The usage and the limits of workloads on the mounted data partition. Blocks.
///
/// # Errors
///
/// [`Error::Kernel`].
pub fn usage(data: &Data) -> Result<Usage, Error> {
    let path = data.mount.path();
    let used = File::open(path).and_then(|root| quota::usage(root.as_fd(), workloads()));
    used.map_err(refused("read the quota of workloads on", path))
}

/// Gives a directory its project, unless it has it already. The kernel gives it to what is
/// made in there later, so the directory must be empty.
///
/// # Errors
///
/// [`Error::Uncounted`] for a directory with files, [`Error::Kernel`].
pub fn adopt(path: &Path, project: Project) -> Result<(), Error> {
    let directory = File::open(path).map_err(refused("open", path))?;
    let present = quota::project(&directory);
    if present.map_err(refused("read the project of", path))? == Some(project) {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(path).map_err(refused("list", path))?;
    if entries.next().is_some() {
        return Err(Error::Uncounted { path: path.to_owned() });
    }
    quota::set_project(&directory, project).map_err(refused("set the project of", path))
}

fn workloads() -> Project {
    const { Project::new(WORKLOADS).expect("0 is the only number that is not a project") }
}

#[cfg(test)]
mod tests {
    use polis_control::consensus::{QUOTA, snapshots};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_reserve_grows_with_the_partition_up_to_what_etcd_needs() {
        let table =
            [(1, 512), (2, 1024), (4, 1024), (8, 2048), (16, 4096), (20, 5120), (1024, 5120)];
        for (gibibytes, mebibytes) in table {
            assert_eq!(reserve(gibibytes * GIB) >> 20, mebibytes, "{gibibytes} GiB");
        }
    }

    #[test]
    fn the_reserve_has_room_for_the_largest_database_all_its_snapshots_and_the_rest() {
        for gibibytes in 16..=1024 {
            let size = gibibytes * GIB;
            let needs = QUOTA + snapshots::budget(size) + GIB;
            assert!(needs <= reserve(size), "{gibibytes} GiB: {} MiB", needs >> 20);
        }
    }

    #[test]
    fn volumes_take_their_room_from_workloads() {
        let all = limits(32 * GIB, 0).unwrap().bytes;
        let with_volumes = limits(32 * GIB, 10 * GIB).unwrap().bytes;
        let taken = all - with_volumes;
        assert!((10 * GIB..=10 * GIB + (BYTES_AN_INODE << 1)).contains(&taken), "{taken}");
        // 5 GiB are the node's, 687 MiB are held back, and a volume has inodes, too.
        let error = limits(32 * GIB, 25 * GIB).unwrap_err();
        let text = "the data partition has 560 MiB left for workloads and volumes, and needs 1024 MiB: a \
             worker needs a disk of 5 GiB or more";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_partition_of_the_smallest_size_is_too_small() {
        assert!(matches!(limits(512 << 20, 0), Err(Error::NoRoom { .. })));
        assert!(limits(4 * GIB, 0).is_ok());
        assert!(matches!(limits(u64::MAX, u64::MAX), Err(Error::NoRoom { .. })));
    }

    /// Bytes that XFS gives to no file, as the kernel computes them for blocks of 4 KiB and
    /// inodes of 512 bytes (`xfs_rmapbt_calc_reserves`, `xfs_refcountbt_calc_reserves`,
    /// `xfs_finobt_calc_reserves`, `xfs_default_resblks`), where all is one allocation group.
    fn held_back_by_xfs(size: u64) -> u64 {
        let blocks = size / 4096;
        // The largest tree of so many records, with the fewest entries in each leaf and node.
        let tree = |records: u64, leaf: u64, node: u64| {
            let mut level = records.div_ceil(leaf);
            let mut all = level;
            while level > 1 {
                level = level.div_ceil(node);
                all += level;
            }
            all
        };
        let owners = tree(blocks, 84, 45).max(blocks / 100);
        let shared = tree(blocks, 168, 252);
        let free_inodes = tree(blocks / 8, 126, 252);
        let pool = (blocks / 20).min(8192);
        (owners + shared + free_inodes + pool) * 4096
    }

    #[test]
    fn a_large_file_system_holds_back_more_than_the_reserve() {
        let size = 1024 * GIB;
        assert_eq!(held_back_by_xfs(size) / GIB, 19);
        let free = size - held_back_by_xfs(size);
        let limits = limits(size, 0).unwrap();
        assert!(limits.bytes + limits.inodes * INODE + reserve(size) <= free);
    }

    #[test]
    fn workloads_keep_a_tenth_of_their_limits_beside_what_they_use() {
        let limits = limits_of(10 * GIB);
        let with = |bytes, inodes| leave_enough(Usage { bytes, inodes, limits }, limits);
        with(9 * GIB, 589_824).unwrap();
        assert!(with(9 * GIB + 1, 0).is_err());
        assert!(with(0, 589_825).is_err());
        // At equality, workloads would have nothing left.
        let error = with(10 * GIB, 0).unwrap_err();
        let text = "images and containers use 10240 MiB already, and may use 9216 MiB of the \
             10240 MiB that would be left: remove images or pods from the node";
        assert_eq!(error.to_string(), text);
        let error = with(0, 700_000).unwrap_err();
        let text = "images and containers use 700000 files already, and may use 589824 files of \
             the 655360 files that would be left: remove images or pods from the node";
        assert_eq!(error.to_string(), text);
    }

    proptest! {
        #[test]
        fn full_projects_leave_the_reserve(
            size in 0_u64..1 << 50,
            sizes in prop::collection::vec(0_u64..1 << 40, 0..20),
        ) {
            let volumes: u64 = sizes.iter().sum();
            if let Ok(limits) = limits(size, volumes) {
                let all = sizes.iter().map(|bytes| limits_of(*bytes)).chain([limits]);
                let full: u64 = all.map(|it| it.bytes + it.inodes * INODE).sum();
                prop_assert!(full + reserve(size) + held_back_by_xfs(size) <= size);
                prop_assert!(limits.bytes >= WORKLOADS_MIN);
            }
        }
    }

    #[test]
    fn a_directory_of_a_file_system_without_projects_is_an_error() {
        let error = adopt(Path::new("/proc"), workloads()).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the project of /proc");
    }
}
