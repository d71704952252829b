//! Project quotas of XFS: the project of a directory, and the limits of a project.
//!
//! A directory with a project passes it on to everything that is made in it later. XFS
//! counts the blocks and the inodes of a project, rejects what exceeds its limits with
//! `ENOSPC`, and answers `statfs` below such a directory with the limits as the size.
//!
//! What this module does not do: choose projects and limits (`workload::host` of the
//! node), or give a project to files that exist already.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// `FS_IOC_FSGETXATTR`: `_IOR('X', 31, struct fsxattr)`.
const GET_ATTRIBUTES: libc::Ioctl = 0x801c_581f;
/// `FS_IOC_FSSETXATTR`: `_IOW('X', 32, struct fsxattr)`.
const SET_ATTRIBUTES: libc::Ioctl = 0x401c_5820;
/// `FS_XFLAG_PROJINHERIT`: new content of the directory has its project.
const INHERIT: u32 = 0x200;

/// `QCMD(Q_XSETQLIM, PRJQUOTA)` and `QCMD(Q_XGETQUOTA, PRJQUOTA)`.
const SET_LIMITS: libc::c_uint = 0x58_0402;
const GET_QUOTA: libc::c_uint = 0x58_0302;
/// `FS_DQUOT_VERSION` and `FS_PROJ_QUOTA`.
const VERSION: i8 = 1;
const OF_A_PROJECT: i8 = 2;
/// `FS_DQ_ISOFT`, `FS_DQ_IHARD`, `FS_DQ_BSOFT` and `FS_DQ_BHARD`.
const ALL_LIMITS: u16 = 0b1111;
/// Blocks of the interface are of this many bytes, whatever the file system has.
const BLOCK: u64 = 512;

/// `struct fsxattr`, from `linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    padding: [u8; 8],
}

/// `struct fs_disk_quota`, from `linux/dqblk_xfs.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Quota {
    version: i8,
    flags: i8,
    fields: u16,
    id: u32,
    blocks_hard: u64,
    blocks_soft: u64,
    inodes_hard: u64,
    inodes_soft: u64,
    blocks: u64,
    inodes: u64,
    /// Timers and warnings of soft limits, which are not used here.
    soft: [u32; 3],
    padding: u32,
    /// The same for the realtime device.
    realtime: [u64; 3],
    realtime_soft: [u32; 2],
    reserved: [u8; 8],
}

/// A project: a number that directories share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Project(u32);

impl Project {
    /// The project with this number; `None` for 0, which every other file has.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number == 0 { None } else { Some(Self(number)) }
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// The most that a project may have; exceeding either is `ENOSPC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of file contents and directories. The kernel rounds down to 512.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

/// The usage and the limits of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of file contents and directories.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
    /// The most of both; a limit of 0 is none.
    pub limits: Limits,
}

/// The project of an open directory or file; `None` if it has none, or a directory does
/// not pass it on.
///
/// # Errors
///
/// The kernel's error: `ENOTTY` where the file system has no projects.
pub fn project(directory: &File) -> io::Result<Option<Project>> {
    let attributes = attributes(directory)?;
    let passed_on = attributes.flags & INHERIT != 0 || !directory.metadata()?.is_dir();
    Ok(Project::new(attributes.project).filter(|_| passed_on))
}

/// Gives an open directory its project, which everything made in it later has.
///
/// # Errors
///
/// The kernel's error: `ENOTTY` or `EOPNOTSUPP` where the file system has no projects.
#[expect(unsafe_code, reason = "no safe wrapper of FSSETXATTR exists")]
pub fn set_project(directory: &File, project: Project) -> io::Result<()> {
    let mut attributes = attributes(directory)?;
    attributes.project = project.0;
    attributes.flags |= INHERIT;
    // SAFETY: the descriptor is open, and the kernel reads one `struct fsxattr` from the
    // pointer, which lives across the call.
    let result =
        unsafe { libc::ioctl(directory.as_raw_fd(), SET_ATTRIBUTES, &raw const attributes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[expect(unsafe_code, reason = "no safe wrapper of FSGETXATTR exists")]
fn attributes(file: &File) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the descriptor is open, and the kernel writes one `struct fsxattr` to the
    // pointer, which lives across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES, &raw mut attributes) };
    if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
}

/// Sets the limits of `project` on the file system of `root`, any open file of it. A limit
/// below what the project has stops its growth and removes nothing.
///
/// # Errors
///
/// The kernel's error: `ENOSYS` or `ESRCH` where it is mounted without `prjquota`.
pub fn set_limits(root: BorrowedFd<'_>, project: Project, limits: Limits) -> io::Result<()> {
    let Limits { bytes, inodes } = limits;
    let mut quota = Quota {
        version: VERSION,
        flags: OF_A_PROJECT,
        fields: ALL_LIMITS,
        id: project.0,
        blocks_hard: bytes / BLOCK,
        blocks_soft: bytes / BLOCK,
        inodes_hard: inodes,
        inodes_soft: inodes,
        ..Quota::default()
    };
    call(root, SET_LIMITS, project, &mut quota)
}

/// The usage of `project` on the file system of `root`, any open file of it.
///
/// # Errors
///
/// The kernel's error: `ENOENT` for a project without files and limits, `ENOSYS` or
/// `ESRCH` where the file system is mounted without `prjquota`.
pub fn usage(root: BorrowedFd<'_>, project: Project) -> io::Result<Usage> {
    let mut quota = Quota::default();
    call(root, GET_QUOTA, project, &mut quota)?;
    Ok(Usage {
        bytes: quota.blocks.saturating_mul(BLOCK),
        inodes: quota.inodes,
        limits: Limits {
            bytes: quota.blocks_hard.saturating_mul(BLOCK),
            inodes: quota.inodes_hard,
        },
    })
}

#[expect(unsafe_code, reason = "no safe wrapper of quotactl_fd exists")]
fn call(
    root: BorrowedFd<'_>,
    command: libc::c_uint,
    project: Project,
    quota: &mut Quota,
) -> io::Result<()> {
    let (root, quota) = (root.as_raw_fd(), &raw mut *quota);
    // SAFETY: the descriptor is open while it is borrowed. Both commands read or write one
    // `struct fs_disk_quota` at the pointer, which lives across the call.
    let result = unsafe { libc::syscall(libc::SYS_quotactl_fd, root, command, project.0, quota) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn the_layout_is_the_kernel_s() {
        // As a C compiler lays out the structs of `linux/fs.h` and `linux/dqblk_xfs.h`.
        assert_eq!(size_of::<Attributes>(), 28);
        assert_eq!(offset_of!(Attributes, project), 12);
        assert_eq!(offset_of!(Attributes, padding), 20);
        assert_eq!(size_of::<Quota>(), 112);
        assert_eq!(offset_of!(Quota, fields), 2);
        assert_eq!(offset_of!(Quota, id), 4);
        assert_eq!(offset_of!(Quota, blocks_hard), 8);
        assert_eq!(offset_of!(Quota, inodes_soft), 32);
        assert_eq!(offset_of!(Quota, blocks), 40);
        assert_eq!(offset_of!(Quota, inodes), 48);
        assert_eq!(offset_of!(Quota, soft), 56);
        assert_eq!(offset_of!(Quota, realtime), 72);
        assert_eq!(offset_of!(Quota, realtime_soft), 96);
        assert_eq!(offset_of!(Quota, reserved), 104);
    }

    #[test]
    fn the_requests_carry_the_size_of_their_struct() {
        let size = |request: libc::Ioctl| (request >> 16) & 0x3fff;
        assert_eq!(usize::try_from(size(GET_ATTRIBUTES)).unwrap(), size_of::<Attributes>());
        assert_eq!(usize::try_from(size(SET_ATTRIBUTES)).unwrap(), size_of::<Attributes>());
        // QCMD: the command in the upper bits, the kind of quota in the lower eight.
        assert_eq!((GET_QUOTA & 0xff, SET_LIMITS & 0xff), (2, 2));
        assert_eq!((GET_QUOTA >> 8, SET_LIMITS >> 8), (0x5803, 0x5804));
    }

    #[test]
    fn zero_is_no_project() {
        assert_eq!(Project::new(0), None);
        assert_eq!(Project::new(1).map(Project::number), Some(1));
    }

    #[test]
    fn a_file_system_without_projects_is_an_error() {
        let file = File::open("/proc").unwrap();
        let project = Project::new(1).unwrap();
        assert!(super::project(&file).is_err());
        assert!(set_project(&file, project).is_err());
        assert!(usage(file.as_fd(), project).is_err());
        let limits = Limits { bytes: 1 << 20, inodes: 1 };
        assert!(set_limits(file.as_fd(), project, limits).is_err());
    }
}
