//! Receiving the parts of a bundle into files, and going on where a transfer broke.
//!
//! ```text
//! head --checked--> the bytes that are there, read again --> the bytes that arrive --> written
//!                        \---------------- hashed as one ----------------/
//! ```
//!
//! A transfer that breaks leaves its bytes where they are, and an [`Unfinished`] in memory. The
//! next transfer of the same bundle sends only the rest. Memory is enough: the process `node`
//! does not end without a restart of the machine, and after one the bundle is sent whole.
//!
//! Invariants:
//! - What was received before counts only as bytes: it is read again and hashed with the rest,
//!   as if all had arrived now.
//! - A transfer that fails for another reason than its end leaves nothing to go on with.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::os::unix::fs::FileExt as _;

use ed25519_dalek::VerifyingKey;
use polis_bundle::{Bundle, Manifest, PartName, Refusal};
use tokio::sync::watch;

use super::{Error, Phase, Progress};

/// Bytes between two flushes.
const STEP: u64 = 32 << 20;

/// The purpose of a bundle: each has its place on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its system goes to the other slot.
    Install,
    /// It is kept for other nodes.
    Keep,
}

/// A bundle that did not come whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    head: Vec<u8>,
    image: String,
    /// Bytes of its parts that were written.
    written: u64,
}

impl Unfinished {
    /// What is left of a transfer that ended with an error; `None` where the next one begins
    /// anew.
    pub(super) fn after(error: &Error, head: &[u8], image: &str, written: u64) -> Option<Self> {
        let broke = matches!(error, Error::Refused(Refusal::Short { .. }));
        let unfinished = || Self { head: head.to_vec(), image: image.to_owned(), written };
        (broke && written > 0).then(unfinished)
    }

    /// Whether it is of the bundle with this head.
    #[must_use]
    pub fn is_of(&self, head: &[u8]) -> bool {
        self.head == head
    }

    /// The image of the bundle.
    #[must_use]
    pub fn image(&self) -> &str {
        &self.image
    }

    /// The byte of the bundle at which the rest begins.
    #[must_use]
    pub fn at(&self) -> u64 {
        self.head.len() as u64 + self.written
    }
}

/// The bundles that did not come whole.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) system: Option<Unfinished>,
    pub(super) bundle: Option<Unfinished>,
}

/// Opens a bundle of which `bundle` is everything, or, where `at` is the end of the unfinished
/// one, the rest. Returns the bytes of its parts that are there.
pub(super) fn open<R: Read>(
    unfinished: Option<&Unfinished>,
    at: u64,
    bundle: R,
    key: &VerifyingKey,
) -> Result<(Bundle<impl Read + use<R>>, u64), Error> {
    let unfinished = unfinished.filter(|unfinished| unfinished.at() == at);
    let head = unfinished.map(|unfinished| unfinished.head.clone()).unwrap_or_default();
    let bundle = Bundle::open(Cursor::new(head).chain(bundle), Some(key)).map_err(unread)?;
    Ok((bundle, unfinished.map_or(0, |unfinished| unfinished.written)))
}

/// The place of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) file: &'a File,
    /// Its first byte.
    pub(super) at: u64,
}

/// Writes the parts to their places, but for the first `written` bytes, which are there.
/// `written` grows with the bytes that are.
pub(super) fn parts<R: Read>(
    bundle: Bundle<R>,
    places: [Place<'_>; 2],
    written: &mut u64,
    progress: &watch::Sender<Progress>,
) -> Result<Manifest, Error> {
    let manifest = bundle.manifest();
    let (before, total) = (*written, total(manifest));
    let sizes = [manifest.kernel.size, manifest.system.size];
    let there = [before.min(sizes[0]), before.saturating_sub(sizes[0])];
    let has_old = |part| match part {
        PartName::Kernel => there[0] > 0,
        PartName::System => there[1] > 0,
    };
    let [kernel, system] = [0, 1].map(|part| Again { place: places[part], left: there[part] });
    let [mut kernel_part, mut system_part] = [0, 1].map(|part| Steady {
        place: places[part],
        there: there[part],
        left: sizes[part],
        unflushed: 0,
    });
    let mut bytes = 0;
    let mut more = |count| {
        bytes += count;
        *written = bytes.max(before);
        progress.send_replace(Progress { phase: Phase::Write, bytes, total });
    };
    let bundle = bundle.resumed(kernel.chain(system));
    bundle.parts([&mut kernel_part, &mut system_part], &mut more).map_err(|error| match error {
        // The sender did not send these bytes now, so it can do nothing about them.
        polis_bundle::Error::Refused(Refusal::Changed { part }) if has_old(part) => {
            Error::Differs(part)
        }
        error => unread(error),
    })
}

/// Why a bundle could not be read.
fn unread(error: polis_bundle::Error) -> Error {
    match error {
        polis_bundle::Error::Refused(refusal) => refusal.into(),
        polis_bundle::Error::Read(source) => Error::io("receive the bundle")(source),
        polis_bundle::Error::Write { part, source } => {
            Error::io(format!("write its {part}"))(source)
        }
    }
}

/// Bytes of the parts.
pub(super) fn total(manifest: &Manifest) -> u64 {
    manifest.kernel.size + manifest.system.size
}

/// Reads bytes that were received before.
struct Again<'a> {
    place: Place<'a>,
    left: u64,
}

impl Read for Again<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self.place.file.read_at(&mut buffer[..most], self.place.at)?;
        if count == 0 {
            let text = "bytes that were received before are not on the disk any more";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        self.place.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// A part that the disk gets in steps. One flush of a whole system would keep the disk from
/// etcd for as long as it takes, and a file on the ESP is at risk until it is flushed.
struct Steady<'a> {
    place: Place<'a>,
    /// Bytes that are there.
    there: u64,
    /// Bytes until the end.
    left: u64,
    unflushed: u64,
}

impl io::Write for Steady<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let there = usize::try_from(self.there).unwrap_or(usize::MAX).min(bytes.len());
        let written = match there {
            0 => self.place.file.write_at(bytes, self.place.at)?,
            _ => there,
        };
        let count = written as u64;
        self.place.at += count;
        self.left = self.left.saturating_sub(count);
        if there > 0 {
            self.there -= count;
            return Ok(written);
        }
        self.unflushed += count;
        if self.left == 0 || self.unflushed >= STEP {
            self.place.file.sync_all()?;
            self.unflushed = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
