//! Files of the EFI system partition: two copies in a file of a fixed size, each written in
//! place, so that the file system around them never changes.
//!
//! A disk may lose any of the writes since its last flush, in any order. FAT has no journal:
//! the kernel gives no order to a directory entry, the two tables and the data, so each
//! creation, rename or removal of a file may leave an entry without its clusters, or clusters
//! with two owners. The kernel makes such a file system read-only at the next write, and
//! firmware reads the same tables. So nothing is created, renamed, resized or removed here:
//! the image has every file at its full size, and a write changes blocks of data alone.
//!
//! ```text
//! 0                          COPY                         2 * COPY
//! | content | padding | seal | content | padding | seal |
//!
//! write:  second copy made like the first -> flush -> new first copy -> flush
//!         -> new second copy -> flush
//! read:   the first copy if it is whole, else the second, else the file is damaged
//! ```
//!
//! A copy of zeros is whole and says that the file has no content, so the image and a removal
//! need nothing else. The seal is a line of text with the length of the content and the
//! SHA-256 of all before; the padding is empty lines: a report reads as text on any computer.
//!
//! Invariants:
//! - After a write that returned, both copies have the new content and no old one.
//! - A power cut at any moment of a write leaves the old content or the new, whole; the next
//!   read makes both copies alike again, so that nothing of the other remains.
//! - A write to an existing file of the right size changes no table and no name. The kernel
//!   writes the time of the change into the directory entry, in one sector that is
//!   otherwise the same.
//!
//! What this module does not do: keep two writers of a file apart ([`File`](super::File)).
//! It takes no lock: in `init`, a write may hang with its disk, and the next must not hang
//! with it. A file that is missing, since a person removed it, is made again, and for that
//! once FAT decides what a power cut leaves.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::atomic::flush_directory;
use super::error::Error;
use super::regular;
use crate::hex;

/// Bytes of a copy: twice the largest node parameters, which a journal contains, and a
/// multiple of every disk's block, so that no block has a part of both copies.
const COPY: usize = 128 << 10;

/// Bytes of a file.
pub const SIZE: u64 = 2 * COPY as u64;

/// How much content a file can have.
pub const CONTENT_MAX: usize = COPY - SEAL;

/// The beginning of the seal; the length of the content follows.
const SEAL_START: &[u8] = b"\nend of this copy: ";
/// Between the length and the checksum.
const SEAL_MIDDLE: &[u8] = b" bytes, SHA-256 ";
/// Digits of the length, with zeros before it.
const DIGITS: usize = 10;
const CHECKSUM: usize = 64;
const SEAL: usize = SEAL_START.len() + DIGITS + SEAL_MIDDLE.len() + CHECKSUM + 1;

/// The content of a file, and whether both of its copies agree on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// `None` if it was never written or was cleared, or does not exist.
    pub content: Option<Vec<u8>>,
    /// Whether the copies are the same. They are not after a write that was interrupted, or
    /// while one is under way.
    pub alike: bool,
}

/// Reads the file. It changes nothing.
///
/// # Errors
///
/// [`Error::Damaged`] if neither copy is whole or the file has another size;
/// [`Error::NotAFile`], [`Error::Io`].
pub fn read(path: &Path) -> Result<Found, Error> {
    let Some(file) = regular::open(path)? else { return Ok(Found { content: None, alike: true }) };
    let metadata = file.metadata().map_err(|error| Error::io("look at", path, error))?;
    if metadata.len() != SIZE {
        return Err(Error::Damaged { path: path.to_owned() });
    }
    let copies = Copies::read(&Disk(file)).map_err(|error| Error::io("read", path, error))?;
    let alike = copies.alike();
    let content = copies.content().map_err(|Damaged| Error::Damaged { path: path.to_owned() })?;
    Ok(Found { content, alike })
}

/// Makes `content` the whole content of the file, or clears the file for `None`.
///
/// # Errors
///
/// [`Error::TooLarge`] above [`CONTENT_MAX`]; [`Error::Io`] if the new content is not known
/// to be on the disk: the old content is then still there, or the new is.
pub fn write(path: &Path, content: Option<&[u8]>) -> Result<(), Error> {
    let too_large = Error::TooLarge { path: path.to_owned(), size_max: CONTENT_MAX as u64 };
    let copy = encode(content, COPY).ok_or(too_large)?;
    match open(path)? {
        Some(file) => replace(&mut Disk(file), &copy),
        None if content.is_none() => return Ok(()),
        None => replace(&mut Disk(make(path)?), &copy),
    }
    .map_err(|error| Error::io("write", path, error))
}

/// Makes both copies alike after a write that was interrupted.
///
/// # Errors
///
/// [`Error::Io`]: the content is as before.
pub fn mend(path: &Path) -> Result<(), Error> {
    let Some(file) = open(path)? else { return Ok(()) };
    settle(&mut Disk(file)).map(drop).map_err(|error| Error::io("mend", path, error))
}

/// The file, of the right size; `None` if it does not exist.
fn open(path: &Path) -> Result<Option<File>, Error> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        // Polis never makes a directory of this name, so it is a damaged entry.
        Err(rustix::io::Errno::ISDIR) => {
            std::fs::remove_dir_all(path).map_err(|error| Error::io("remove", path, error))?;
            return Ok(None);
        }
        Err(error) => return Err(Error::io("open", path, error)),
    };
    let metadata = file.metadata().map_err(|error| Error::io("look at", path, error))?;
    if !metadata.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    if metadata.len() != SIZE {
        extend(&file).map_err(|error| Error::io("extend", path, error))?;
    }
    Ok(Some(file))
}

/// Makes the file that a person removed, or the image lacks.
fn make(path: &Path) -> Result<File, Error> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))
        .map_err(|error| Error::io("create", path, error))?;
    let file = File::from(file);
    extend(&file).map_err(|error| Error::io("extend", path, error))?;
    flush_directory(path.parent().unwrap_or(Path::new("/")))?;
    Ok(file)
}

/// Fills a file of another size with zeros: its content is foreign.
fn extend(mut file: &File) -> io::Result<()> {
    file.set_len(SIZE)?;
    file.write_all(&vec![0; 2 * COPY])?;
    file.sync_all()
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    First,
    Second,
}

/// The medium of two copies; a simulated disk in tests.
trait Medium {
    /// Reads a copy.
    fn read(&self, which: Which) -> io::Result<Zeroizing<Vec<u8>>>;

    /// Writes a copy, so that it survives a power cut once this returns.
    fn write(&mut self, which: Which, copy: &[u8]) -> io::Result<()>;
}

struct Disk(File);

impl Which {
    fn start(self) -> u64 {
        match self {
            Self::First => 0,
            Self::Second => COPY as u64,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

impl Medium for Disk {
    fn read(&self, which: Which) -> io::Result<Zeroizing<Vec<u8>>> {
        let mut copy = Zeroizing::new(vec![0; COPY]);
        self.0.read_exact_at(&mut copy, which.start())?;
        Ok(copy)
    }

    fn write(&mut self, which: Which, copy: &[u8]) -> io::Result<()> {
        self.0.write_all_at(copy, which.start())?;
        // Size and place of the file are the same, so nothing but data needs the flush.
        self.0.sync_data()
    }
}

/// No copy is whole.
#[derive(Debug)]
struct Damaged;

/// Both copies, as they are: `None` where the disk cannot read one.
struct Copies {
    first: Option<Zeroizing<Vec<u8>>>,
    second: Option<Zeroizing<Vec<u8>>>,
}

impl Copies {
    /// Fails only if the disk can read neither: one is enough.
    fn read(medium: &impl Medium) -> io::Result<Self> {
        match (medium.read(Which::First), medium.read(Which::Second)) {
            (Err(error), Err(_)) => Err(error),
            (first, second) => Ok(Self { first: first.ok(), second: second.ok() }),
        }
    }

    fn alike(&self) -> bool {
        self.first == self.second
    }

    fn content(&self) -> Result<Option<Vec<u8>>, Damaged> {
        let whole = self.whole().ok_or(Damaged)?;
        Ok(whole.content.map(<[u8]>::to_vec))
    }

    /// The copy that counts: the first one that is whole.
    fn whole(&self) -> Option<Whole<'_>> {
        let copies = [(Which::First, &self.first), (Which::Second, &self.second)];
        copies.into_iter().find_map(|(which, copy)| {
            let copy = copy.as_ref()?;
            Some(Whole { which, copy, content: decode(copy)? })
        })
    }
}

/// A copy that is whole.
struct Whole<'a> {
    which: Which,
    copy: &'a [u8],
    content: Option<&'a [u8]>,
}

/// Makes both copies what the one that counts is. Leaves a damaged file as it is.
fn settle(medium: &mut impl Medium) -> io::Result<Copies> {
    let copies = Copies::read(medium)?;
    if let Some(whole) = copies.whole().filter(|_whole| !copies.alike()) {
        medium.write(whole.which.other(), whole.copy)?;
    }
    Ok(copies)
}

/// Replaces both copies. A whole copy is only overwritten while the other one is whole, too.
fn replace(medium: &mut impl Medium, copy: &[u8]) -> io::Result<()> {
    let before = settle(medium)?;
    // The same content again: nothing to write, as when a file is cleared that has none.
    if before.alike() && before.first.as_ref().is_some_and(|first| first.as_slice() == copy) {
        return Ok(());
    }
    medium.write(Which::First, copy)?;
    medium.write(Which::Second, copy)
}

/// A copy of `size` bytes; `None` if the content is too large for it.
fn encode(content: Option<&[u8]>, size: usize) -> Option<Zeroizing<Vec<u8>>> {
    let Some(content) = content else { return Some(Zeroizing::new(vec![0; size])) };
    let body = size.checked_sub(SEAL).filter(|body| content.len() <= *body)?;
    // The final capacity: a vector that is moved leaves its content behind.
    let mut copy = Zeroizing::new(Vec::with_capacity(size));
    copy.extend(content);
    copy.resize(body, b'\n');
    copy.extend(SEAL_START);
    copy.extend(format!("{:0DIGITS$}", content.len()).bytes());
    copy.extend(SEAL_MIDDLE);
    let checksum = hex::encode(&Sha256::digest(&*copy));
    copy.extend(checksum.bytes());
    copy.push(b'\n');
    Some(copy)
}

/// The content of a copy, which is `Some(None)` for zeros; `None` if the copy is not whole.
fn decode(copy: &[u8]) -> Option<Option<&[u8]>> {
    if copy.iter().all(|byte| *byte == 0) {
        return Some(None);
    }
    let (body, seal) = copy.split_at_checked(copy.len().checked_sub(SEAL)?)?;
    let digits = seal.strip_prefix(SEAL_START)?.get(..DIGITS)?;
    let length = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let content = body.get(..length)?;
    // Encoding is exact: a copy is whole if it is what this content makes.
    (encode(Some(content), copy.len())?.as_slice() == copy).then_some(Some(content))
}

#[cfg(test)]
#[path = "in_place_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "in_place_fuzz_tests.rs"]
mod fuzz_tests;
