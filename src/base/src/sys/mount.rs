//! File systems: mounting, moving and unmounting.
//!
//! `boot` builds the machine's tree with it, and `storage` mounts the data partition.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount,
    fsopen, move_mount, open_tree,
};

/// One file system to mount: what, where, which kind, how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// A device, or a name that only people read.
    pub source: String,
    /// An existing directory.
    pub target: PathBuf,
    /// The kernel's name of the kind, for example `xfs`.
    pub kind: &'static str,
    /// `NOSUID` and so on.
    pub flags: MountFlags,
    /// Options of the kind, separated by commas.
    pub options: String,
}

/// A mount that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {source_name} ({kind}) on {target}")]
pub struct Error {
    source_name: String,
    kind: &'static str,
    target: String,
    source: io::Error,
}

impl Mount {
    /// A mount without flags and options.
    pub fn new(source: impl Into<String>, target: impl Into<PathBuf>, kind: &'static str) -> Self {
        Self {
            source: source.into(),
            target: target.into(),
            kind,
            flags: MountFlags::empty(),
            options: String::new(),
        }
    }

    /// The same mount with these flags.
    #[must_use]
    pub fn flags(self, flags: MountFlags) -> Self {
        Self { flags, ..self }
    }

    /// The same mount with these options.
    #[must_use]
    pub fn options(self, options: impl Into<String>) -> Self {
        Self { options: options.into(), ..self }
    }

    /// Mounts it.
    ///
    /// # Errors
    ///
    /// The kernel's error; `ENODEV` means that the kind's module is not loaded.
    pub fn apply(&self) -> Result<(), Error> {
        let refused = |source| Error {
            source_name: self.source.clone(),
            kind: self.kind,
            target: self.target.display().to_string(),
            source,
        };
        let options = CString::new(self.options.as_str())
            .map_err(|nul| refused(io::Error::new(io::ErrorKind::InvalidInput, nul)))?;
        rustix::mount::mount(
            self.source.as_str(),
            &self.target,
            self.kind,
            self.flags,
            Some(options.as_c_str()),
        )
        .map_err(|errno| refused(errno.into()))
    }
}

/// Mounts the file system on `device` for reading, attached to no directory: only the holder of
/// the result, its root, sees it. It is unmounted when that and every file opened below it are
/// closed. Nothing on it is executed, taken for a device, or followed as set-user-ID.
///
/// # Errors
///
/// The error of the kernel.
pub fn detached(device: &Path, kind: &str, options: &[(&str, &str)]) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device)?;
    fsconfig_set_flag(&context, "ro")?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    fsconfig_create(&context)?;
    let quiet = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, quiet)?)
}

/// Moves the file system mounted at `from` to `to`.
///
/// # Errors
///
/// The kernel's error.
pub fn move_to(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_move(from, to)?)
}

/// Makes the mount at `/`, every mount below it, and every mount that is made below it
/// later shared: a mount in one mount namespace then appears in those that were copied from
/// it and ask for that. The kernel begins with private ones.
///
/// # Errors
///
/// The error of the kernel.
pub fn share_all() -> io::Result<()> {
    let shared = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change("/", shared)?)
}

/// Makes the directory `source` appear at the existing directory `target`, too, which is not
/// followed if it is a link. Later mounts below one of both do not appear below the other.
///
/// # Errors
///
/// The error of the kernel; `EINVAL` where `target` is not a directory.
pub fn bind(source: &Path, target: &Path) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let bound = open_tree(CWD, source, flags)?;
    attach(&bound, target)?;
    // A bind of a shared mount joins its group, where each later mount below one of both
    // would appear twice. It leaves that group, and begins one of its own. By its descriptor:
    // the path may lead elsewhere by now.
    let itself = format!("/proc/self/fd/{}", bound.as_raw_fd());
    rustix::mount::mount_change(itself.as_str(), MountPropagationFlags::PRIVATE)?;
    Ok(rustix::mount::mount_change(itself.as_str(), MountPropagationFlags::SHARED)?)
}

/// Mounts an empty file system in memory, of at most this size (`tmpfs(5)`), at the existing
/// directory `target`, which is not followed if it is a link. Nothing on it is taken for a
/// device, or followed as set-user-ID.
///
/// # Errors
///
/// The error of the kernel; `EINVAL` where `target` is not a directory.
pub fn memory(target: &Path, size: &str) -> io::Result<()> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("source", "tmpfs"), ("mode", "0755"), ("size", size)] {
        fsconfig_set_string(&context, key, value)?;
    }
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    attach(&fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?, target)
}

/// Gives a mount without a place the one at `target`, which is not followed if it is a link.
fn attach(mount: &OwnedFd, target: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Gives the mount at `target`, and no other mount of its file system, exactly these flags.
///
/// # Errors
///
/// The kernel's error: `EBUSY` where it is to become read-only while a file is open for
/// writing.
pub fn change_bind(target: &Path, flags: MountFlags) -> io::Result<()> {
    Ok(rustix::mount::mount_remount(target, MountFlags::BIND | flags, c"")?)
}

/// The mount points of this process, in the order of their mounts. Blocks.
///
/// # Errors
///
/// The error of the kernel.
pub fn points() -> io::Result<Vec<PathBuf>> {
    Ok(points_of(&std::fs::read_to_string("/proc/self/mounts")?))
}

fn points_of(table: &str) -> Vec<PathBuf> {
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .map(|word| unescape(word).into())
        .collect()
}

/// A name as the kernel writes it in a table of mounts, where blanks are `\040` and so on.
#[must_use]
pub fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Unmounts what is mounted at `target`.
///
/// # Errors
///
/// `EBUSY` while a process uses it.
pub fn unmount(target: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(target, UnmountFlags::NOFOLLOW)?)
}

/// Makes the mounted file system read-only, writing out what is not yet on the disk.
///
/// # Errors
///
/// `EBUSY` while a file is open for writing.
pub fn read_only(target: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_remount(target, MountFlags::RDONLY, c"")?)
}

/// Makes the file system mounted at `root` the root of this process, in place
/// of the initramfs, which stays below it and can't be reached any more.
///
/// # Errors
///
/// The kernel's error; the process is then between two roots and must stop.
pub fn switch_root(root: &Path) -> io::Result<()> {
    rustix::process::chdir(root)?;
    rustix::mount::mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    Ok(rustix::process::chdir("/")?)
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;

    #[test]
    fn a_refused_mount_names_what_and_where() {
        // Fails for every user: for root the directory is missing, others may not
        // mount.
        let error = Mount::new("/dev/none", "/nowhere/at/all", "xfs").apply().unwrap_err();
        assert_eq!(error.to_string(), "cannot mount /dev/none (xfs) on /nowhere/at/all");
    }

    #[test]
    fn mount_points_are_read_in_order_with_their_blanks() {
        let table = "/dev/dm-0 / erofs ro 0 0\n/dev/vda3 /data/a\\040b xfs rw 0 0\nbroken\n";
        assert_eq!(points_of(table), [Path::new("/"), Path::new("/data/a b")]);
        assert!(points().unwrap().contains(&PathBuf::from("/")));
    }

    #[test]
    fn a_missing_directory_is_not_bound() {
        assert!(bind(Path::new("/nowhere/at/all"), Path::new("/nowhere")).is_err());
    }

    /// In a mount namespace of this thread, where it may have one.
    #[test]
    fn a_link_at_the_target_is_not_followed() {
        #[expect(deprecated, reason = "the other one is unsafe because of unused flags")]
        let entered = rustix::thread::unshare(UnshareFlags::NEWNS);
        if let Err(error) = entered {
            eprintln!("skipped: a mount namespace needs root ({error})");
            return;
        }
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).unwrap();
        let base = tempfile::tempdir().unwrap();
        let [source, target, link] =
            ["source", "target", "link"].map(|name| base.path().join(name));
        for directory in [&source, &target] {
            std::fs::create_dir(directory).unwrap();
        }
        std::fs::write(source.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();

        assert!(bind(&source, &link).is_err());
        assert!(memory(&link, "1m").is_err());
        assert!(unmount(&target).is_err(), "a mount where the link leads");

        bind(&source, &target).unwrap();
        assert!(target.join("file").exists());
        memory(&target, "1m").unwrap();
        assert!(!target.join("file").exists());
        for _both in 0..2 {
            unmount(&target).unwrap();
        }
        assert!(unmount(&target).is_err());
    }

    #[test]
    fn a_nul_in_the_options_is_refused_and_not_cut_off() {
        let mount = Mount::new("none", "/nowhere", "tmpfs").options("mode=755\0,size=1");
        let error = mount.apply().unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::InvalidInput);
    }
}
