//! The mounts of the machine, and the code that makes them.
//!
//! What this module does not do: mount the system itself (`verified`) or the data
//! partition (`storage`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;

use polis_base::cause;
use polis_base::serial::Severity;
use polis_base::sys::mount::{self, Mount};

/// The kernel's own file systems; both stages need them first.
#[must_use]
pub fn first() -> Vec<Mount> {
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC;
    vec![
        Mount::new("dev", "/dev", "devtmpfs").flags(MountFlags::NOSUID).options("mode=0755"),
        Mount::new("proc", "/proc", "proc").flags(safe | MountFlags::NODEV),
        Mount::new("sysfs", "/sys", "sysfs").flags(safe | MountFlags::NODEV),
    ]
}

/// Whether a machine can go on without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// `node` requires it.
    Must,
    /// Not every kernel or firmware has it.
    May,
}

/// The rest of the tree, in order.
#[must_use]
pub fn rest() -> Vec<(Mount, Need)> {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let memory = MountFlags::NOSUID | MountFlags::NODEV;
    let tmpfs = |target: &str, flags, options: &str| {
        (Mount::new("tmpfs", target, "tmpfs").flags(flags).options(options), Need::Must)
    };
    let kernel = |target: &str, kind| (Mount::new(kind, target, kind).flags(quiet), Need::May);
    vec![
        (
            Mount::new("devpts", "/dev/pts", "devpts")
                .flags(MountFlags::NOSUID | MountFlags::NOEXEC)
                .options("gid=5,mode=0620,ptmxmode=0666"),
            Need::Must,
        ),
        tmpfs("/dev/shm", memory, "mode=1777"),
        tmpfs("/run", memory, "mode=0755,size=25%"),
        tmpfs("/tmp", memory, "mode=1777,size=25%"),
        tmpfs("/ephemeral", memory, "mode=0755,size=25%"),
        (
            Mount::new("cgroup2", "/sys/fs/cgroup", "cgroup2")
                .flags(quiet)
                .options("nsdelegate,memory_recursiveprot"),
            Need::Must,
        ),
        kernel("/sys/fs/bpf", "bpf"),
        kernel("/sys/kernel/security", "securityfs"),
    ]
}

/// The records that the kernel has of its panics.
#[must_use]
pub fn pstore() -> Mount {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Mount::new("pstore", "/sys/fs/pstore", "pstore").flags(quiet)
}

/// Where the variables of the firmware are.
pub const VARIABLES: &str = "/sys/firmware/efi/efivars";

/// The variables of the firmware.
#[must_use]
pub fn firmware() -> Mount {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Mount::new("efivarfs", VARIABLES, "efivarfs").flags(quiet)
}

/// Where the ESP is.
pub const ESP: &str = "/esp";

/// The ESP. A file system with errors turns read-only, so that a damaged one is
/// not damaged further. Polis writes its records in place (`files::in_place`), which no power
/// cut damages; an update creates and renames kernel images there (`node`, `update`). The code
/// page is the one that kernels load by themselves; with the same for long names, one module
/// serves both. All our names are ASCII.
#[must_use]
pub fn esp(device: &Path) -> Mount {
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    Mount::new(device.display().to_string(), ESP, "vfat")
        .flags(quiet)
        .options("umask=0077,codepage=437,iocharset=cp437,shortname=mixed,errors=remount-ro")
}

/// Mounts all of [`first`]; an existing mount stays.
///
/// # Errors
///
/// The first one that the kernel refuses.
pub fn apply_first() -> Result<(), mount::Error> {
    for mount in first() {
        if fs::create_dir_all(&mount.target).is_ok() && is_mounted(&mount.target) {
            continue;
        }
        mount.apply()?;
    }
    Ok(())
}

/// Whether something is mounted at `target`.
#[must_use]
pub fn is_mounted(target: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(1).is_some_and(|at| Path::new(at) == target))
}

/// Makes all of [`rest`]; returns the lines of the log, too.
///
/// # Errors
///
/// The kernel refuses one that must be there.
pub fn make_tree() -> (Vec<(Severity, String)>, Result<(), mount::Error>) {
    let mut lines = Vec::new();
    // Before the first mount of the tree, which inherits it. Containers that ask for mounts
    // of the host get them; everything else works without.
    if let Err(error) = mount::share_all() {
        lines.push((Severity::Error, format!("cannot share the mounts: {error}")));
    }
    for (mount, need) in rest() {
        match (apply(&mount), need) {
            (Ok(()), _) => {}
            (Err(error), Need::Must) => return (lines, Err(error)),
            (Err(error), Need::May) => lines.push((Severity::Debug, cause::line(&error))),
        }
    }
    (lines, Ok(()))
}

/// Mounts one of [`rest`], making its directory where the kernel allows that.
///
/// # Errors
///
/// When the kernel refuses.
pub fn apply(mount: &Mount) -> Result<(), mount::Error> {
    // On a read-only file system the directory exists, or the mount reports that it is
    // missing.
    fs::create_dir_all(&mount.target).ok();
    mount.apply()
}

/// Kinds of file systems that lie on a disk.
const ON_DISK: &[&str] = &["xfs", "ext4", "vfat", "btrfs"];
/// The kind of a container's root: it keeps the directories on the disk that it shows busy.
const OVERLAY: &str = "overlay";

/// The mounts that have to go before every disk is unmounted, the last one first, by the
/// text of `/proc/self/mounts`: file systems on a disk, everything mounted below one, and
/// the roots of containers.
#[must_use]
pub fn to_unmount(table: &str) -> Vec<PathBuf> {
    let mut disks: Vec<PathBuf> = Vec::new();
    let mut targets = Vec::new();
    for line in table.lines() {
        let mut words = line.split(' ');
        let (_device, Some(target), Some(kind)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let target = PathBuf::from(mount::unescape(target));
        let on_disk = ON_DISK.contains(&kind);
        if on_disk || kind == OVERLAY || disks.iter().any(|disk| target.starts_with(disk)) {
            targets.push(target.clone());
        }
        if on_disk {
            disks.push(target);
        }
    }
    targets.reverse();
    targets
}

/// Unmounts every disk before the machine ends. Returns the errors.
pub fn settle() -> Vec<(PathBuf, io::Error)> {
    rustix::fs::sync();
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let failed = to_unmount(&table).into_iter().filter_map(|target| {
        // Busy: a process that no signal can end. Read-only is as good.
        let error = mount::unmount(&target).err()?;
        mount::read_only(&target).is_err().then_some((target, error))
    });
    let failed = failed.collect();
    rustix::fs::sync();
    failed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn disks_are_put_in_order_from_the_last_mount_to_the_first() {
        let table = "/dev/dm-0 / erofs ro 0 0\n\
            tmpfs /ephemeral tmpfs rw 0 0\n\
            /dev/vda1 /esp vfat rw 0 0\n\
            /dev/vda3 /data xfs rw 0 0\n\
            /dev/vda3 /data/a\\040b xfs rw 0 0\n";
        let expected = ["/data/a b", "/data", "/esp"].map(Path::new);
        assert_eq!(to_unmount(table), expected);
    }

    #[test]
    fn mounts_of_containers_go_before_the_disk_that_they_keep_busy() {
        let table = "/dev/dm-0 / erofs ro 0 0\n\
            tmpfs /run tmpfs rw 0 0\n\
            /dev/vda3 /data xfs rw 0 0\n\
            /dev/vda3 /var/lib xfs rw 0 0\n\
            /dev/vda3 /var/lib/kubelet xfs rw 0 0\n\
            tmpfs /var/lib/kubelet/pods/1/volumes/token tmpfs rw 0 0\n\
            tmpfs /var/lib/cni tmpfs rw 0 0\n\
            overlay /run/containerd/1/rootfs overlay rw 0 0\n";
        let expected = [
            "/run/containerd/1/rootfs",
            "/var/lib/cni",
            "/var/lib/kubelet/pods/1/volumes/token",
            "/var/lib/kubelet",
            "/var/lib",
            "/data",
        ];
        assert_eq!(to_unmount(table), expected.map(Path::new));
    }

    #[test]
    fn no_file_system_lets_a_file_become_root() {
        let all = first().into_iter().chain(rest().into_iter().map(|(mount, _)| mount));
        for mount in all.chain([pstore(), firmware(), esp(Path::new("/dev/vda1"))]) {
            assert!(mount.flags.contains(MountFlags::NOSUID), "{mount:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _targets = to_unmount(&text);
            let _name = mount::unescape(&format!("\\{text}"));
        }
    }
}
