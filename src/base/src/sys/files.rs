//! Limits on open files, and what the kernel keeps of files in memory.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;

use rustix::fs::Advice;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files of this process to `wanted`, or to the allowed
/// maximum.
///
/// # Errors
///
/// When the kernel refuses both.
pub fn allow(wanted: u64) -> io::Result<()> {
    let limits = getrlimit(Resource::Nofile);
    if limits.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    let maximum = limits.maximum.map(|maximum| maximum.max(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    let bounded = || {
        // Without the right to raise the maximum, use the maximum.
        let current = limits.maximum.map(|maximum| maximum.min(wanted)).or(Some(wanted));
        setrlimit(Resource::Nofile, Rlimit { current, maximum: limits.maximum })
    };
    Ok(raised.or_else(|_refused| bounded())?)
}

/// Bytes that the kernel reads ahead at most for one advice: it silently ignores any
/// part beyond the readahead of the device.
const ADVICE: u64 = 128 << 10;

/// Asks the kernel to read a whole file into memory, and does not wait for it.
///
/// # Errors
///
/// When the file does not exist, or it cannot be read ahead.
pub fn readahead(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let mut at = 0;
    while at < file.metadata()?.len() {
        rustix::fs::fadvise(&file, at, NonZeroU64::new(ADVICE), Advice::WillNeed)?;
        at += ADVICE;
    }
    Ok(())
}

/// Has the kernel forget what it keeps of a file or a device in memory, so that the next read
/// comes from the disk. Pages not yet on the disk stay: flush them before.
///
/// # Errors
///
/// When it is neither a file nor a device.
pub fn forget(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_ahead_and_one_that_is_not_there_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(3 * ADVICE + 1).unwrap();
        readahead(file.path()).unwrap();
        assert!(readahead(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn a_process_gets_as_many_files_as_it_may_have() {
        let before = getrlimit(Resource::Nofile);
        allow(before.current.unwrap_or(0)).unwrap();
        assert_eq!(getrlimit(Resource::Nofile), before, "it has them already");
        let wanted = before.maximum.unwrap_or(4096);
        allow(wanted).unwrap();
        let after = getrlimit(Resource::Nofile).current;
        assert!(after.is_none_or(|current| current >= wanted), "{after:?}");
    }
}
