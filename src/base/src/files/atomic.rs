//! Atomic replacement of a file: a power cut leaves the old content or the new, never half of one.
//!
//! [`File::write`](super::File::write) uses it for every file of the tree, and `init`
//! for the reports of its failures: so it must not need a runtime.
//!
//! ```text
//! temporary file --write, flush--> rename over the name --flush--> flush of the directory
//! ```
//!
//! Invariants:
//! - After [`replace`] returned, the new content survives a power cut.
//! - The rest of an interrupted write does not stop a later one.
//!
//! What this module does not do: choose the name of the temporary file, which must be
//! in the directory of the file itself, or keep two writers of it apart. It takes no
//! lock: in `init`, a write may hang with its disk, and the next must not hang with it.

use std::io::{self, Write as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::Error;

/// Makes `content` the whole content of `path`, by way of `temporary`. A new file
/// has `mode`.
///
/// # Errors
///
/// [`Error::Io`] if the new content is not known to be on the disk; the old
/// content is then still there, or the new is.
pub fn replace(path: &Path, temporary: &Path, mode: u32, content: &[u8]) -> Result<(), Error> {
    // Remove the rest of an interrupted write. Creating afresh follows no link and
    // starts with the right mode.
    remove_debris(temporary).map_err(|error| Error::io("remove", temporary, error))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(temporary, flags, Mode::from_raw_mode(mode))
        .map_err(|e| Error::io("create", temporary, e))?;
    let mut file = std::fs::File::from(file);
    file.write_all(content).map_err(|e| Error::io("write", temporary, e))?;
    file.sync_all().map_err(|e| Error::io("flush", temporary, e))?;
    rustix::fs::rename(temporary, path).map_err(|e| Error::io("put in place", path, e))?;
    // FAT keeps size and place of a file in its directory entry, makes the
    // new entry empty, and fills it when the file itself is flushed.
    file.sync_all().map_err(|e| Error::io("flush", path, e))?;
    flush_directory(path.parent().unwrap_or(Path::new("/")))
}

/// Removes any entry with the name of a temporary file. On FAT that may be a directory:
/// a torn entry has arbitrary attributes.
pub(crate) fn remove_debris(path: &Path) -> io::Result<()> {
    let removed = match rustix::fs::unlink(path).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => std::fs::remove_dir_all(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Makes a rename or removal in `directory` survive a power cut.
pub(super) fn flush_directory(directory: &Path) -> Result<(), Error> {
    std::fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|e| Error::io("flush directory", directory, e))
}
