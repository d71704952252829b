//! Opening a regular file, whatever stands at its place.

use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::error::Error;

/// Opens a regular file for reading; `None` if it does not exist.
pub(super) fn open(path: &Path) -> Result<Option<std::fs::File>, Error> {
    // Without NONBLOCK, opening a pipe with this name would block without end.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => std::fs::File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(Error::io("open", path, error)),
    };
    let metadata = file.metadata().map_err(|e| Error::io("look at", path, e))?;
    if metadata.is_file() { Ok(Some(file)) } else { Err(Error::NotAFile { path: path.to_owned() }) }
}
