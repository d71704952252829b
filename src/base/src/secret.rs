//! Secret texts that a person keeps in files: keys in PEM, passphrases and passwords. `polisctl`
//! and `cargo xtask` read them by these rules; each has its own messages.

use std::fs::Metadata;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt as _;

use zeroize::Zeroizing;

/// The most bytes of a secret text: far above the size of a key in PEM or a passphrase.
pub const SIZE_MAX: usize = 64 * 1024;

/// Reads a secret text to its end, into one buffer that is wiped when it is dropped.
///
/// # Errors
///
/// [`ErrorKind::InvalidData`] if it is not UTF-8, [`ErrorKind::FileTooLarge`] if it has more than
/// [`SIZE_MAX`] bytes, and the error of the source.
pub fn read(source: impl Read) -> io::Result<Zeroizing<String>> {
    // Allocated once: the former buffers of a text that grows are not wiped.
    let mut text = Zeroizing::new(String::with_capacity(SIZE_MAX + 1));
    source.take(SIZE_MAX as u64 + 1).read_to_string(&mut text)?;
    if text.len() > SIZE_MAX { Err(ErrorKind::FileTooLarge.into()) } else { Ok(text) }
}

/// The first line of a secret text, which is the passphrase in a file.
#[must_use]
pub fn first_line(text: &str) -> Zeroizing<String> {
    Zeroizing::new(text.lines().next().unwrap_or_default().to_owned())
}

/// The permission bits of a file that others than its owner may use; `None` if they may not.
#[must_use]
pub fn exposed(file: &Metadata) -> Option<u32> {
    let mode = file.mode() & 0o7777;
    (mode & 0o077 != 0).then_some(mode)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_secret_is_read_into_one_buffer() {
        let read = |text: &str| read(text.as_bytes()).unwrap();
        let (short, long) = (read("horse"), read(&"a".repeat(SIZE_MAX)));
        assert_eq!((short.as_str(), long.len()), ("horse", SIZE_MAX));
        assert_eq!((short.capacity(), long.capacity()), (SIZE_MAX + 1, SIZE_MAX + 1));
    }

    #[test]
    fn a_text_that_is_too_long_or_no_text_is_refused_and_not_cut() {
        let kind = |bytes: &[u8]| read(bytes).unwrap_err().kind();
        assert_eq!(kind(&vec![b'a'; SIZE_MAX + 1]), ErrorKind::FileTooLarge);
        assert_eq!(kind(&vec![b'a'; SIZE_MAX * 2]), ErrorKind::FileTooLarge);
        assert_eq!(kind(&[0xff; 9]), ErrorKind::InvalidData);
    }

    #[test]
    fn a_file_that_its_group_or_all_may_use_is_exposed() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("secret")).unwrap();
        for (mode, expected) in [(0o600, None), (0o640, Some(0o640)), (0o604, Some(0o604))] {
            file.set_permissions(Permissions::from_mode(mode)).unwrap();
            assert_eq!(exposed(&file.metadata().unwrap()), expected, "{mode:o}");
        }
    }

    #[test]
    fn a_passphrase_is_the_first_line() {
        assert_eq!(first_line("horse\nbattery\n").as_str(), "horse");
        assert_eq!(first_line("").as_str(), "");
    }
}
