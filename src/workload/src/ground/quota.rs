//! The project quota of workloads: pods can fill what they have, and never what etcd and
//! the node need.
//!
//! Images, containers, logs and the volumes without a name share one project. kubelet knows
//! file systems by their device: with a project each, it would see one file system of two
//! sizes. Persistent volumes have projects of their own, from [`VOLUME_FIRST`] up.
//!
//! ```text
//! data partition = reserve of the node + workloads + persistent volumes
//!                  |                     |           `- each its own size
//!                  |                     `- what is left: shrinks as volumes are made
//!                  `- etcd, its snapshots, the logs of the node
//! ```
//!
//! XFS does not count the blocks of inodes in any project, so the sizes here do: an inode is
//! 512 bytes, and a project may have one for each [`BYTES_AN_INODE`].
//!
//! Invariant: all projects full, with all their inodes, leave the reserve to the node
//! (`full_projects_leave_the_reserve`).
//!
//! The sum of volumes is read from their directories each time, so it is kept nowhere else.
//!
//! What this module does not do: make volumes. `csi` calls [`divide`] before it makes or
//! enlarges one, and after it has removed one, while it holds the [`turn`].

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
/// largest (2 GiB), and a snapshot of that.
const RESERVE_MAX: u64 = 4 * GIB;
const RESERVE_MIN: u64 = GIB;
const RESERVE_PART: u64 = 4;
/// Of the smallest partitions, half.
const RESERVE_PART_MAX: u64 = 2;

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
    /// Workloads have more already than would be left for them.
    #[error(
        "images and containers use {} MiB already, and would have {} MiB left",
        used >> 20,
        left >> 20
    )]
    InUse {
        /// Bytes that they use.
        used: u64,
        /// Bytes that would be left.
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

/// The limits of workloads on a file system of `size` bytes, of which persistent volumes
/// have `volumes`, the sum of their sizes.
///
/// # Errors
///
/// [`Error::NoRoom`].
pub fn limits(size: u64, volumes: u64) -> Result<Limits, Error> {
    let left = size.saturating_sub(reserve(size)).saturating_sub(cost(volumes));
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

/// Bytes of a file system of `size` that workloads and volumes never get.
#[must_use]
pub fn reserve(size: u64) -> u64 {
    (size / RESERVE_PART).clamp(RESERVE_MIN, RESERVE_MAX).min(size / RESERVE_PART_MAX)
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
    let failed =
        |operation, path: &Path, source| Error::Kernel { operation, path: path.to_owned(), source };
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(failed("list", directory, error)),
    };
    // By project: a volume that is being removed may be several directories.
    let mut sizes = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|source| failed("list", directory, source))?;
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let project = projects.project(&path);
        let project = project.map_err(|source| failed("read the project of", &path, source))?;
        let Some(project) = project.filter(|project| project.number() >= VOLUME_FIRST) else {
            continue;
        };
        let usage = projects.usage(project);
        let usage = usage.map_err(|source| failed("read the quota of", &path, source))?;
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
    let failed =
        |operation, source| Error::Kernel { operation, path: directory.to_owned(), source };
    let size = projects.size().map_err(|source| failed("look at the disk of", source))?;
    let limits = limits(size, volumes(projects, directory)?.saturating_add(more))?;
    if more > 0 {
        let usage = projects.usage(workloads());
        let usage = usage.map_err(|source| failed("read the quota of workloads beside", source))?;
        let used = usage.map_or(0, |usage| usage.bytes);
        if used > limits.bytes {
            return Err(Error::InUse { used, left: limits.bytes });
        }
    }
    projects
        .set_limits(workloads(), limits)
        .map_err(|source| failed("set the quota of workloads beside", source))?;
    Ok(limits)
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
    for directory in [&data.containerd, &data.kubelet, &data.pod_logs] {
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
    used.map_err(|source| Error::Kernel {
        operation: "read the quota of workloads on",
        path: path.to_owned(),
        source,
    })
}

/// Gives a directory its project, unless it has it already. The kernel gives it to what is
/// made in there later, so the directory must be empty.
///
/// # Errors
///
/// [`Error::Uncounted`] for a directory with files, [`Error::Kernel`].
pub fn adopt(path: &Path, project: Project) -> Result<(), Error> {
    let failed = |operation, source| Error::Kernel { operation, path: path.to_owned(), source };
    let directory = File::open(path).map_err(|source| failed("open", source))?;
    let present = quota::project(&directory);
    if present.map_err(|source| failed("read the project of", source))? == Some(project) {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(path).map_err(|source| failed("list", source))?;
    if entries.next().is_some() {
        return Err(Error::Uncounted { path: path.to_owned() });
    }
    quota::set_project(&directory, project).map_err(|source| failed("set the project of", source))
}

fn workloads() -> Project {
    const { Project::new(WORKLOADS).expect("0 is the only number that is not a project") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_reserve_grows_with_the_partition_up_to_what_etcd_needs() {
        let table = [(1, 512), (2, 1024), (4, 1024), (8, 2048), (16, 4096), (1024, 4096)];
        for (gibibytes, mebibytes) in table {
            assert_eq!(reserve(gibibytes * GIB) >> 20, mebibytes, "{gibibytes} GiB");
        }
    }

    #[test]
    fn volumes_take_their_room_from_workloads() {
        let all = limits(32 * GIB, 0).unwrap().bytes;
        let with_volumes = limits(32 * GIB, 10 * GIB).unwrap().bytes;
        let taken = all - with_volumes;
        assert!((10 * GIB..=10 * GIB + (BYTES_AN_INODE << 1)).contains(&taken), "{taken}");
        let error = limits(32 * GIB, 27 * GIB).unwrap_err();
        let text = "the data partition has 159 MiB left for workloads and volumes, and needs 1024 MiB: a \
             worker needs a disk of 5 GiB or more";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_partition_of_the_smallest_size_is_too_small() {
        assert!(matches!(limits(512 << 20, 0), Err(Error::NoRoom { .. })));
        assert!(limits(4 * GIB, 0).is_ok());
        assert!(matches!(limits(u64::MAX, u64::MAX), Err(Error::NoRoom { .. })));
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
                prop_assert!(full + reserve(size) <= size);
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
