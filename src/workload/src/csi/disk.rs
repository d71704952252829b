//! The disk of the volumes: directories that survive a power cut once they are flushed, and
//! the projects of the file system.
//!
//! Each method is one step of [`Store`](super::store::Store): tests put a power cut between
//! any two of them.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;

use polis_base::files;

use super::trash::{self, Swept};
use crate::host::quota::{Kernel, Projects};

/// The operations of the store on the disk.
pub trait Disk: Projects {
    /// Makes a directory with exactly this mode; one that exists gets the mode.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn make(&self, directory: &Path, mode: u32) -> io::Result<()> {
        match DirBuilder::new().mode(mode).create(directory) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        // Independent of the umask.
        std::fs::set_permissions(directory, Permissions::from_mode(mode))
    }

    /// Replaces the content of a file.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn write(&self, file: &files::File, content: &[u8]) -> io::Result<()> {
        file.write(content).map_err(files::Error::into_io)
    }

    /// Gives a directory another name.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn remove(&self, directory: &Path) -> io::Result<()> {
        std::fs::remove_dir(directory)
    }

    /// Removes the next part of what is to be removed in the directory of volumes.
    ///
    /// # Errors
    ///
    /// The first refusal of the kernel, once it refuses to remove anything that is left.
    fn sweep(&self, volumes: &Path) -> io::Result<Swept> {
        trash::sweep(volumes)
    }

    /// Makes the entries of a directory, and its project, survive a power cut.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    fn flush(&self, directory: &Path) -> io::Result<()> {
        File::open(directory)?.sync_all()
    }
}

impl Disk for Kernel {}
