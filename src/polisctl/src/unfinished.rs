//! Atomic creation of a secret file that takes a while to write.
//!
//! ```text
//! begin --> a file without a name --write--> finish: it gets its name, if it is free
//!                 \--> Ctrl-C, an error, a crash: nothing is left
//! ```
//!
//! Invariants:
//! - An existing file is never overwritten, nor one that another process writes.
//! - Only its owner may read it.
//!
//! What this module does not do: protect the content from a person who reads the disk. On a
//! file system without unnamed files, the file of a killed program stays until the operator
//! removes it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::error::{Error, Explain as _};

/// Fails where `out` is there already: before a command asks anything for it.
pub(super) fn must_be_new(out: &Path) -> Result<(), Error> {
    if out.symlink_metadata().is_err() {
        return Ok(());
    }
    Err(Error::new(format!("{} exists already", out.display())).or_help("name another file"))
}

/// A file without its final name.
#[derive(Debug)]
pub(super) struct Unfinished {
    file: File,
    out: PathBuf,
    /// Its temporary name, where it needs one.
    named: Option<PathBuf>,
}

impl Unfinished {
    /// Creates the file that becomes `out`.
    pub(super) fn begin(out: &Path) -> Result<Self, Error> {
        let folder = match out.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Self { file: file.into(), out: out.to_owned(), named: None }),
            // An old kernel opens the folder for writing instead.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => Self::with_name(out),
            Err(error) => Err(error).doing(|| format!("cannot write in {}", folder.display())),
        }
    }

    fn with_name(out: &Path) -> Result<Self, Error> {
        let mut named = out.as_os_str().to_owned();
        named.push(".part");
        let named = PathBuf::from(named);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&named);
        let file = file.doing(|| format!("cannot make {}", named.display())).help(|| {
            "if it exists and no other command writes it, an earlier command was interrupted: \
             remove it"
                .to_owned()
        })?;
        Ok(Self { file, out: out.to_owned(), named: Some(named) })
    }

    /// Appends.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).doing(|| format!("cannot write {}", self.out.display()))
    }

    /// Gives the file its final name.
    pub(super) fn finish(self) -> Result<(), Error> {
        // A link fails where a rename would overwrite an existing file.
        let linked = self.file.sync_all().and_then(|()| match &self.named {
            Some(named) => fs::hard_link(named, &self.out),
            None => {
                let nameless = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                let follow = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(CWD, nameless, CWD, &self.out, follow).map_err(io::Error::from)
            }
        });
        linked.doing(|| format!("cannot make {}", self.out.display()))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(named) = &self.named {
            let _removed = fs::remove_file(named);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    type Begin = fn(&Path) -> Result<Unfinished, Error>;

    /// Both kinds of file system.
    const KINDS: [Begin; 2] = [Unfinished::begin, Unfinished::with_name];

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        for begin in KINDS {
            let folder = tempfile::tempdir().unwrap();
            let mut file = begin(&folder.path().join("etcd.db")).unwrap();
            file.write(b"secret").unwrap();
            drop(file);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn two_that_write_the_same_file_at_once_do_not_mix() {
        for begin in KINDS {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("etcd.db");
            let mut first = begin(&out).unwrap();
            first.write(b"who").unwrap();
            let second = begin(&out);
            first.write(b"le").unwrap();
            first.finish().unwrap();
            // Some file systems let the start succeed.
            let refused = second.and_then(|mut second| {
                second.write(b"another")?;
                second.finish()
            });
            assert!(refused.is_err());
            assert_eq!(fs::read(&out).unwrap(), b"whole");
            assert_eq!(fs::metadata(&out).unwrap().mode() & 0o777, 0o600);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }
}
