//! The load that a pod can put on its node, on request: it fills its disk, its memory, its
//! files and its processes, to see where the limits of the pod are.
//!
//! Each function stops at the number that it was given, or where the kernel refuses, and
//! returns one line that says how far it came: a refusal is the answer, not a failure. Nothing
//! here runs unless the arguments of the container, or a person by `kubectl exec`, ask for it.
//!
//! What this module does not do: remove what it made.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::thread;

use rustix::fs::{FallocateFlags, fallocate};

/// Bytes of one write, and of one piece of memory.
const PIECE: usize = 64 << 10;
/// Bytes that are allocated at once.
const ALLOCATED: u64 = 1 << 20;
/// The stack of a thread that does nothing.
const STACK: usize = 64 << 10;
/// The kernel gives memory by pages of this size.
const PAGE: usize = 4 << 10;

/// A number as Kubernetes writes it: `4096`, `64Mi`.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidInput`] for any other text.
pub fn number(text: &str) -> io::Result<u64> {
    let refused = || {
        let text: String = text.chars().take(40).collect();
        let allowed = "digits, and perhaps Ki, Mi or Gi behind them";
        io::Error::new(io::ErrorKind::InvalidInput, format!("{text:?} is not a number: {allowed}"))
    };
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let suffixed = units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?, *bits)));
    let (digits, bits) = suffixed.unwrap_or((text, 0));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(refused());
    }
    let number: u64 = digits.parse().map_err(|_overflow| refused())?;
    number.checked_mul(1 << bits).ok_or_else(refused)
}

/// Writes `bytes` to a new file, each piece with its place in the file, and flushes it.
///
/// # Errors
///
/// When the file cannot be made.
pub fn write(path: &Path, bytes: u64) -> io::Result<String> {
    let mut file = File::create(path)?;
    let (mut written, mut refused) = (0, None);
    while written < bytes {
        let piece = piece(written, bytes);
        match file.write(&piece) {
            Ok(count) => written += count as u64,
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    // Bytes that do not fit may be refused only now.
    let flushed = file.sync_all().err();
    Ok(line("wrote", written, bytes, "bytes", refused.or(flushed).as_ref()))
}

/// Compares a file with what [`write`] has written.
///
/// # Errors
///
/// When it cannot be read; [`io::ErrorKind::InvalidData`] with the place of the first other
/// byte.
pub fn read(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut at = 0;
    let mut found = vec![0; PIECE];
    while at < length {
        let expected = piece(at, length);
        let found = found.get_mut(..expected.len()).unwrap_or_default();
        file.read_exact(found)?;
        if let Some(other) = expected.iter().zip(found.iter()).position(|(one, two)| one != two) {
            let place = at + other as u64;
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("another byte than was written is at {place}"),
            ));
        }
        at += expected.len() as u64;
    }
    Ok(format!("read {length} bytes as they were written\n"))
}

/// Allocates `bytes` for a new file without writing them: to fill a large disk takes a moment.
///
/// # Errors
///
/// When the file cannot be made.
pub fn allocate(path: &Path, bytes: u64) -> io::Result<String> {
    let file = File::create(path)?;
    let (mut allocated, mut refused) = (0, None);
    while allocated < bytes && refused.is_none() {
        let length = ALLOCATED.min(bytes - allocated);
        match fallocate(&file, FallocateFlags::empty(), allocated, length) {
            Ok(()) => allocated += length,
            Err(error) => refused = Some(error.into()),
        }
    }
    Ok(line("allocated", allocated, bytes, "bytes", refused.as_ref()))
}

/// Makes `count` empty files in a new directory.
///
/// # Errors
///
/// When the directory cannot be made.
pub fn files(directory: &Path, count: u64) -> io::Result<String> {
    fs::create_dir(directory)?;
    let (mut made, mut refused) = (0, None);
    while made < count && refused.is_none() {
        match File::create_new(directory.join(made.to_string())) {
            Ok(_file) => made += 1,
            Err(error) => refused = Some(error),
        }
    }
    Ok(line("made", made, count, "files", refused.as_ref()))
}

/// Takes `bytes` of memory, writes to each page of it, and gives it back.
#[must_use]
pub fn memory(bytes: u64) -> String {
    let (mut pieces, mut taken) = (Vec::new(), 0);
    while taken < bytes {
        let mut piece = vec![0_u8; PIECE];
        for page in piece.chunks_mut(PAGE) {
            if let Some(first) = page.first_mut() {
                *first = 1;
            }
        }
        // Else the compiler may leave all of it out.
        pieces.push(std::hint::black_box(piece));
        taken += PIECE as u64;
    }
    line("took", taken.min(bytes), bytes, "bytes of memory", None)
}

/// Starts `count` threads that wait until the process ends. The limit of a pod's processes
/// counts threads, too.
#[must_use]
pub fn threads(count: u64) -> String {
    let (mut started, mut refused) = (0, None);
    while started < count && refused.is_none() {
        let thread = thread::Builder::new().stack_size(STACK);
        match thread.spawn(|| {
            loop {
                thread::park();
            }
        }) {
            Ok(_thread) => started += 1,
            Err(error) => refused = Some(error),
        }
    }
    line("started", started, count, "threads", refused.as_ref())
}

/// The bytes of a file of `length` from `at` on: the number of each eight bytes.
fn piece(at: u64, length: u64) -> Vec<u8> {
    let count = usize::try_from(length - at).unwrap_or(PIECE).min(PIECE);
    let skip = usize::try_from(at % 8).unwrap_or_default();
    (at / 8..).flat_map(u64::to_le_bytes).skip(skip).take(count).collect()
}

fn line(verb: &str, done: u64, of: u64, what: &str, refused: Option<&io::Error>) -> String {
    match refused {
        Some(error) => format!("{verb} {done} of {of} {what}: {error}\n"),
        None => format!("{verb} {done} of {of} {what}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_digits_and_perhaps_a_unit() {
        let read = |text| number(text).map_err(|error| error.to_string());
        assert_eq!(read("4096"), Ok(4096));
        assert_eq!(read("64Mi"), Ok(64 << 20));
        assert_eq!(read("2Gi"), Ok(2 << 30));
        for text in ["", "Mi", "-1", "+1", "1.5Gi", "64M", "18446744073709551616", "99999999999Gi"]
        {
            assert!(read(text).unwrap_err().contains("is not a number: digits"), "{text}");
        }
    }

    #[test]
    fn what_was_written_is_read_and_another_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let length = PIECE as u64 + 13;
        assert_eq!(write(&file, length).unwrap(), "wrote 65549 of 65549 bytes\n");
        assert_eq!(read(&file).unwrap(), "read 65549 bytes as they were written\n");
        let mut bytes = fs::read(&file).unwrap();
        bytes[PIECE + 7] ^= 1;
        fs::write(&file, bytes).unwrap();
        let error = read(&file).unwrap_err();
        assert_eq!(error.to_string(), "another byte than was written is at 65543");
        assert_eq!(allocate(&file, 3).unwrap(), "allocated 3 of 3 bytes\n");
    }

    #[test]
    fn each_trial_says_how_far_it_came() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("files");
        assert_eq!(files(&made, 3).unwrap(), "made 3 of 3 files\n");
        assert_eq!(fs::read_dir(&made).unwrap().count(), 3);
        assert!(files(&made, 3).is_err());
        assert_eq!(memory(100_000), "took 100000 of 100000 bytes of memory\n");
        assert_eq!(threads(2), "started 2 of 2 threads\n");
        // The kernel's own refusal is a part of the answer.
        if let Ok(full) = write(Path::new("/dev/full"), 10) {
            assert_eq!(full, "wrote 0 of 10 bytes: No space left on device (os error 28)\n");
        }
    }
}
