//! The files that the boot stub adds to the initramfs: stage 1 takes them, and stage 2 gives them
//! to `node`, since the switch of roots loses the initramfs.
//!
//! What this module does not do: judge the content.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use polis_base::extra::{PUBLIC_KEY, SIGNATURE, SIZE_MAX};

/// The files that were there, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra(Vec<(&'static str, Vec<u8>)>);

impl Extra {
    /// Takes the files out of `directory`; reports those that cannot be read. An image without
    /// keys has none.
    #[must_use]
    pub fn take(directory: &Path) -> (Self, Vec<String>) {
        let (mut files, mut faults) = (Vec::new(), Vec::new());
        for name in [SIGNATURE, PUBLIC_KEY] {
            match content(&directory.join(name)) {
                Ok(content) => files.push((name, content)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => faults.push(format!("cannot read {name} of the boot stub: {error}")),
            }
        }
        (Self(files), faults)
    }

    /// Writes them into `directory`, which is made where there are any.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn give(&self, directory: &Path) -> io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        fs::create_dir_all(directory)?;
        self.0.iter().try_for_each(|(name, content)| fs::write(directory.join(name), content))
    }
}

fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    File::open(path)?.take(SIZE_MAX + 1).read_to_end(&mut content)?;
    match content.len() as u64 > SIZE_MAX {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(content),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_stub_added_arrives_and_what_is_too_long_is_left_out() {
        let base = tempfile::tempdir().unwrap();
        let (from, to) = (base.path().join("from"), base.path().join("to"));
        // An image without keys.
        let (none, faults) = Extra::take(&from);
        none.give(&to).unwrap();
        assert!(faults.is_empty() && !to.exists());

        fs::create_dir(&from).unwrap();
        fs::write(from.join(SIGNATURE), "{}").unwrap();
        fs::write(from.join(PUBLIC_KEY), "key").unwrap();
        fs::write(from.join("another"), "").unwrap();
        let (both, faults) = Extra::take(&from);
        both.give(&to).unwrap();
        assert!(faults.is_empty(), "{faults:?}");
        assert_eq!(fs::read(to.join(SIGNATURE)).unwrap(), b"{}");
        assert_eq!(fs::read(to.join(PUBLIC_KEY)).unwrap(), b"key");
        assert_eq!(fs::read_dir(&to).unwrap().count(), 2);

        let longest = usize::try_from(SIZE_MAX).unwrap();
        fs::write(from.join(SIGNATURE), vec![b'x'; longest + 1]).unwrap();
        fs::write(from.join(PUBLIC_KEY), vec![b'x'; longest]).unwrap();
        let (one, faults) = Extra::take(&from);
        assert_eq!(one.0.iter().map(|(name, _)| *name).collect::<Vec<_>>(), [PUBLIC_KEY]);
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert!(faults[0].contains(SIGNATURE), "{faults:?}");
    }
}
