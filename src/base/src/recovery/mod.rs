//! The recovery key of the disk as text, fetched from the places where a person may have left it.
//!
//! If the halves of a disk's key cannot be combined, the recovery key opens the disk.
//! There are two ways to pass it to the machine, and neither leaves a trace on a disk
//! or a command line:
//!
//! ```text
//! guru meditation --typed--> init --pipe--> [Given::typed] --+--> the opener of the disk
//! hypervisor --fw_cfg item opt/polis/recovery_key -----------+
//! ```
//!
//! A typed key takes precedence, since it was meant for this start of `node`.
//!
//! Invariants:
//! - At most [`BYTES_MAX`] bytes are read, and every buffer is wiped.
//! - Nothing here prints the text: `Debug` shows how long it is.
//!
//! What this module does not do: open anything with it. [`form`] decodes the text.

pub mod form;

use std::fmt;
use std::io::{self, Read as _};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::sys::inherit;

/// The most bytes that are read: a key with all its dashes has some 70.
pub const BYTES_MAX: usize = 256;

/// The name of the fw_cfg item.
pub const FW_CFG_ITEM: &str = "opt/polis/recovery_key";

/// A recovery key as a person wrote it down. Cheap to clone, and wiped with the last
/// clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Text(Arc<Zeroizing<String>>);

impl Text {
    /// Reads bytes as text; control characters around it are ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for more than [`BYTES_MAX`] bytes, or other bytes
    /// than those of printed ASCII characters.
    pub fn new(bytes: &[u8]) -> Result<Self, Error> {
        let bytes = bytes.trim_ascii();
        let printed = bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ');
        match std::str::from_utf8(bytes) {
            Ok(text) if printed && (1..=BYTES_MAX).contains(&text.len()) => {
                Ok(Self(Arc::new(Zeroizing::new(text.to_owned()))))
            }
            _ => Err(Error::Malformed),
        }
    }

    /// The text, for its decoder.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} characters)", self.0.len())
    }
}

/// Where a text came from, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A person at the guru meditation.
    Typed,
    /// The hypervisor.
    FwCfg,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Typed => f.write_str("the recovery key that was typed"),
            Self::FwCfg => write!(f, "the recovery key in the fw_cfg item {FW_CFG_ITEM}"),
        }
    }
}

/// Why a given key cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `init` announced a key, but the key cannot be read.
    #[error("cannot read the recovery key from init")]
    Pipe(#[source] io::Error),
    /// The kernel does not show the item.
    #[error("cannot read the fw_cfg item {FW_CFG_ITEM}")]
    FwCfg(#[source] io::Error),
    /// Not a line of text.
    #[error("a recovery key is a line of 1 to {BYTES_MAX} letters, digits, dashes and spaces")]
    Malformed,
}

/// The places to look at when the key is needed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Given {
    typed: Option<Text>,
    sys: PathBuf,
}

impl Given {
    /// Reads the typed key from the descriptor that `init` left open, if any; `sys` is
    /// where sysfs is mounted.
    ///
    /// # Errors
    ///
    /// [`Error`] when a key was typed and cannot be read.
    pub fn inherit(typed: Option<RawFd>, sys: &Path) -> Result<Self, Error> {
        let typed = typed
            .map(|number| {
                let pipe = inherit::take(number).map_err(Error::Pipe)?;
                read(std::fs::File::from(pipe), Error::Pipe)
            })
            .transpose()?;
        Ok(Self { typed, sys: sys.to_owned() })
    }

    /// Nothing typed, and `sys` to look into; for tests.
    #[must_use]
    pub fn nothing(sys: &Path) -> Self {
        Self { typed: None, sys: sys.to_owned() }
    }

    /// The key, if one was given, and its source. fw_cfg is available once the node
    /// parameters are. Blocks for a moment on fw_cfg.
    ///
    /// # Errors
    ///
    /// [`Error`] when a key was given and cannot be read.
    pub fn text(&self) -> Result<Option<(Text, Source)>, Error> {
        if let Some(typed) = &self.typed {
            return Ok(Some((typed.clone(), Source::Typed)));
        }
        let item = self.sys.join("firmware/qemu_fw_cfg/by_name").join(FW_CFG_ITEM).join("raw");
        match std::fs::File::open(item) {
            Ok(item) => Ok(Some((read(item, Error::FwCfg)?, Source::FwCfg))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::FwCfg(error)),
        }
    }
}

/// Reads to the end; `init` has written everything before `node` starts.
fn read(mut from: std::fs::File, failed: fn(io::Error) -> Error) -> Result<Text, Error> {
    // A growing vector leaves copies behind: this buffer never grows.
    let mut bytes = Zeroizing::new([0; BYTES_MAX + 2]);
    let mut length = 0;
    while length < bytes.len() {
        match from.read(&mut bytes[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Text::new(&bytes[..length])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn fw_cfg(content: &[u8]) -> (tempfile::TempDir, Given) {
        let sys = tempfile::tempdir().unwrap();
        let item = sys.path().join("firmware/qemu_fw_cfg/by_name").join(FW_CFG_ITEM);
        fs::create_dir_all(&item).unwrap();
        fs::write(item.join("raw"), content).unwrap();
        let given = Given::nothing(sys.path());
        (sys, given)
    }

    #[test]
    fn a_machine_that_was_given_nothing_has_nothing() {
        let sys = tempfile::tempdir().unwrap();
        let given = Given::inherit(None, sys.path()).unwrap();
        assert_eq!(given.text().unwrap(), None);
    }

    #[test]
    fn an_item_of_fw_cfg_is_read_without_its_line_feed() {
        let (_sys, given) = fw_cfg(b"ABCD-EFGH 2345\r\n");
        let (text, source) = given.text().unwrap().unwrap();
        assert_eq!((text.expose(), source), ("ABCD-EFGH 2345", Source::FwCfg));
    }

    #[test]
    fn what_was_typed_wins() {
        let (_sys, given) = fw_cfg(b"FROM-FW-CFG");
        let typed = Some(Text::new(b"typed").unwrap());
        let (text, source) = Given { typed, ..given }.text().unwrap().unwrap();
        assert_eq!((text.expose(), source), ("typed", Source::Typed));
    }

    #[test]
    fn a_file_that_is_no_key_is_refused_by_its_size() {
        let (_sys, given) = fw_cfg(&[b'A'; 100_000]);
        assert!(matches!(given.text(), Err(Error::Malformed)));
        let (_sys, given) = fw_cfg(b" \n");
        assert!(matches!(given.text(), Err(Error::Malformed)));
    }

    #[test]
    fn a_key_is_never_printed() {
        let text = Text::new(b"SECRET-SECRET").unwrap();
        assert_eq!(format!("{text:?}"), "Text(13 characters)");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_one_line_of_ascii_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(text) = Text::new(&bytes) {
                prop_assert!(text.expose().len() <= BYTES_MAX);
                prop_assert!(text.expose().chars().all(|c| c.is_ascii_graphic() || c == ' '));
            }
        }
    }
}
