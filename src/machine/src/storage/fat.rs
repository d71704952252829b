//! New names on a file system without a journal, the ESP: after a power cut, each name has all of
//! its content.
//!
//! `update` gives a kernel image its names by this, and `mirror` the files that it copies.
//!
//! What this module does not do: write the records of a node, which keep their names
//! (`polis_base::files`).

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Renames a flushed file within its folder, for good; a file that has the name goes.
///
/// The kernel writes a new name at first without its clusters, and the old one away with it:
/// to flush the folder first would put that on the disk. To flush the file writes its whole
/// entry, and the old name is in the same sector, since the folder has few files.
///
/// # Errors
///
/// An error of the kernel: the file may have either name.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    File::open(to)?.sync_all()?;
    flush(to.parent().unwrap_or(Path::new("/")))
}

/// Has the disk keep a folder, and all else of its file system.
///
/// # Errors
///
/// An error of the kernel.
pub(crate) fn flush(folder: &Path) -> io::Result<()> {
    let folder = File::open(folder)?;
    folder.sync_all()?;
    Ok(rustix::fs::syncfs(&folder)?)
}
