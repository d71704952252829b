//! How a volume is mounted into a pod: a bind of its content, with the flags that the claim
//! and its class ask for.
//!
//! The data partition is mounted `nosuid,nodev`, and so is every volume: a pod brings no
//! set-user-ID program and no device into a volume that the next pod would use.
//!
//! What this module does not do: choose the target (`node`).

use std::fmt;
use std::io;
use std::path::Path;

use polis_base::sys::mount;
use rustix::mount::MountFlags;

/// The options that a class may have, and what they do.
const OPTIONS: [(&str, MountFlags, Effect); 9] = [
    ("ro", MountFlags::RDONLY, Effect::Sets),
    ("rw", MountFlags::RDONLY, Effect::Clears),
    ("noexec", MountFlags::NOEXEC, Effect::Sets),
    ("exec", MountFlags::NOEXEC, Effect::Clears),
    ("noatime", MountFlags::NOATIME, Effect::Sets),
    ("nodiratime", MountFlags::NODIRATIME, Effect::Sets),
    ("relatime", MountFlags::RELATIME, Effect::Sets),
    // An option that holds anyway is allowed.
    ("nosuid", MountFlags::NOSUID, Effect::Sets),
    ("nodev", MountFlags::NODEV, Effect::Sets),
];

/// The effect of an option on its flag.
#[derive(Clone, Copy, Debug)]
enum Effect {
    Sets,
    Clears,
}

/// The flags of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flags(MountFlags);

/// An option that a volume cannot be mounted with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mount option {option:?} is not allowed; allowed are {}", Allowed)]
pub(super) struct Refused {
    /// The option.
    pub(super) option: String,
}

struct Allowed;

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&OPTIONS.map(|(name, ..)| name).join(", "))
    }
}

impl Flags {
    /// The flags for these options, of which a later one holds over an earlier one.
    ///
    /// # Errors
    ///
    /// [`Refused`] for the first option that is not in the table.
    pub(super) fn read(options: &[String]) -> Result<Self, Refused> {
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        for option in options {
            let known = OPTIONS.iter().find(|(name, ..)| name == option);
            let refused = || Refused { option: option.chars().take(40).collect() };
            let (_, flag, effect) = known.ok_or_else(refused)?;
            match effect {
                Effect::Sets => flags.insert(*flag),
                Effect::Clears => flags.remove(*flag),
            }
        }
        Ok(Self(flags))
    }

    /// The same for a volume that is only read.
    #[must_use]
    pub(super) fn read_only(self) -> Self {
        Self(self.0 | MountFlags::RDONLY)
    }
}

/// The table of mounts, as the plugin uses it. The node uses [`Kernel`].
pub(super) trait Mounts: fmt::Debug + Send + Sync {
    /// How many mounts stand at this path itself, one over the other.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn at(&self, target: &Path) -> io::Result<usize>;

    /// Makes a directory appear at `target`, with these flags. Between the two steps the
    /// mount has the flags of the data partition: no pod sees it yet.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn bind(&self, source: &Path, target: &Path, flags: Flags) -> io::Result<()>;

    /// Changes the flags of the mount at `target`.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn remount(&self, target: &Path, flags: Flags) -> io::Result<()>;

    /// Unmounts the uppermost mount at `target`.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn unmount(&self, target: &Path) -> io::Result<()>;
}

/// The mounts of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel;

impl Mounts for Kernel {
    fn at(&self, target: &Path) -> io::Result<usize> {
        Ok(mount::points()?.iter().filter(|point| *point == target).count())
    }

    fn bind(&self, source: &Path, target: &Path, flags: Flags) -> io::Result<()> {
        mount::bind(source, target)?;
        self.remount(target, flags)
    }

    fn remount(&self, target: &Path, flags: Flags) -> io::Result<()> {
        mount::change_bind(target, flags.0)
    }

    fn unmount(&self, target: &Path) -> io::Result<()> {
        mount::unmount(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(options: &[&str]) -> Result<Flags, Refused> {
        Flags::read(&options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_volume_never_has_devices_or_other_users_programs() {
        let least = MountFlags::NOSUID | MountFlags::NODEV;
        assert_eq!(read(&[]), Ok(Flags(least)));
        assert_eq!(read(&["ro", "rw", "exec"]), Ok(Flags(least)));
        assert_eq!(read(&["noexec"]), Ok(Flags(least | MountFlags::NOEXEC)));
        assert_eq!(read(&["rw"]).unwrap().read_only(), Flags(least | MountFlags::RDONLY));
        for option in ["suid", "dev", "", "bind", "prjquota", "ro,suid", "remount"] {
            assert_eq!(read(&[option]), Err(Refused { option: option.to_owned() }));
        }
        assert_eq!(
            read(&["dev"]).unwrap_err().to_string(),
            "the mount option \"dev\" is not allowed; allowed are ro, rw, noexec, exec, noatime, \
             nodiratime, relatime, nosuid, nodev"
        );
    }
}
