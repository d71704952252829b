//! Atomic replacement of a file: a power cut leaves the old content or the new, never half of one.
//!
//! [`File::write`](super::File::write) uses it for the files of the data partition and of
//! memory. It needs a file system whose journal orders a rename behind the flushed content,
//! as that of XFS does; FAT has none (`in_place`).
//!
//! ```text
//! temporary file --write, flush--> rename over the name --> flush of the directory
//! ```
//!
//! Invariants:
//! - After [`replace`] returned, the new content survives a power cut.
//! - The rest of an interrupted write does not stop a later one.
//!
//! What this module does not do: choose the name of the temporary file, which must be
//! in the directory of the file itself, or keep two writers of it apart.

use std::io::Write as _;
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags};

use super::error::Error;
use super::owner;

/// The part of a mode that is the owner's.
const OWNERS: u32 = 0o700;

/// Makes `content` the whole content of `path`, by way of `temporary`. The new file
/// has `mode`, and belongs to `group` from before it has its name.
///
/// # Errors
///
/// [`Error::Io`] if the new content is not known to be on the disk; the old
/// content is then still there, or the new is.
pub(super) fn replace(
    path: &Path,
    temporary: &Path,
    mode: u32,
    group: Option<u32>,
    content: &[u8],
) -> Result<(), Error> {
    // Remove the rest of an interrupted write. Creating afresh follows no link. Only the owner may
    // open the file until it has its group: an open descriptor keeps its right to read.
    match rustix::fs::unlink(temporary) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(Error::io("remove", temporary, error)),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(temporary, flags, Mode::from_raw_mode(mode & OWNERS))
        .map_err(|e| Error::io("create", temporary, e))?;
    if let Some(group) = group
        && owner::may_give()
    {
        rustix::fs::fchown(&file, None, Some(Gid::from_raw(group)))
            .map_err(|e| Error::io("set the group of", temporary, e))?;
    }
    if mode & !OWNERS != 0 {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
            .map_err(|e| Error::io("set the mode of", temporary, e))?;
    }
    let mut file = std::fs::File::from(file);
    file.write_all(content).map_err(|e| Error::io("write", temporary, e))?;
    file.sync_all().map_err(|e| Error::io("flush", temporary, e))?;
    rustix::fs::rename(temporary, path).map_err(|e| Error::io("put in place", path, e))?;
    flush_directory(path.parent().unwrap_or(Path::new("/")))
}

/// Makes a rename or removal in `directory` survive a power cut.
pub(super) fn flush_directory(directory: &Path) -> Result<(), Error> {
    std::fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|e| Error::io("flush directory", directory, e))
}
