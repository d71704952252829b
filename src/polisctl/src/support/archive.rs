//! A tar archive in the format of POSIX (ustar), written file after file.
//!
//! The archive of a bug report has plain files with short names and nothing else, so the
//! format is a header of 512 bytes before each of them.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::error::Error;
use crate::unfinished::Unfinished;

/// Headers and contents begin at multiples of this.
const BLOCK: usize = 512;
/// The longest name of a file.
const NAME_MAX: usize = 100;
/// Two empty blocks end an archive.
const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// An archive that is being written. It gets its name when it is whole.
#[derive(Debug)]
pub(super) struct Archive {
    file: Unfinished,
    /// The time of every file, in seconds since 1970.
    at: u64,
    bytes: u64,
}

impl Archive {
    /// Begins the archive that becomes `out`, with files of the time `at`.
    pub(super) fn begin(out: &Path, at: SystemTime) -> Result<Self, Error> {
        let at = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        Ok(Self { file: Unfinished::begin(out)?, at, bytes: 0 })
    }

    /// Appends a file.
    pub(super) fn add(&mut self, name: &str, content: &[u8]) -> Result<(), Error> {
        self.file.write(&header(name, content.len(), self.at)?)?;
        self.file.write(content)?;
        let padding = content.len().next_multiple_of(BLOCK) - content.len();
        self.file.write(&END[..padding])?;
        self.bytes += (BLOCK + content.len() + padding) as u64;
        Ok(())
    }

    /// How long the archive is by now, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ends the archive and gives it its name; returns its length in bytes.
    pub(super) fn finish(mut self) -> Result<u64, Error> {
        self.file.write(&END)?;
        self.file.finish()?;
        Ok(self.bytes + END.len() as u64)
    }
}

fn header(name: &str, size: usize, at: u64) -> Result<[u8; BLOCK], Error> {
    if name.len() > NAME_MAX {
        return Err(Error::new(format!("the name {name} is too long for an archive")));
    }
    let mut header = [0; BLOCK];
    let mut put = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    put(0, name);
    // Mode, user and group; size and time; an empty checksum; the type of a plain file.
    put(100, "0000600\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    // The field ends in the year 2242.
    put(136, &format!("{:011o}\0", at.min(0o77_777_777_777)));
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An independent program reads it.
    fn tar(arguments: &[&str], archive: &Path) -> String {
        #[expect(clippy::disallowed_methods, reason = "a test asks a real program")]
        let ended = std::process::Command::new("tar")
            .args(arguments)
            .arg(archive)
            .env("TZ", "UTC")
            .output()
            .unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).unwrap()
    }

    #[test]
    fn another_program_reads_what_was_put_in() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("a.tar");
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut archive = Archive::begin(&out, at).unwrap();
        let long = "x".repeat(1500);
        let longest = "n".repeat(NAME_MAX);
        let files =
            [("a/empty", ""), ("a/b/block", &long[..512]), (longest.as_str(), long.as_str())];
        for (name, content) in files {
            archive.add(name, content.as_bytes()).unwrap();
        }
        let bytes = archive.finish().unwrap();
        assert_eq!(std::fs::metadata(&out).unwrap().len(), bytes);
        let listed = tar(&["--full-time", "-tvf"], &out);
        assert!(listed.starts_with("-rw------- 0/0"), "{listed}");
        assert!(listed.contains("2027-01-15 08:00:00 a/empty\n"), "{listed}");
        let names: Vec<&str> = listed.lines().filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(names, files.map(|(name, _)| name));
        assert_eq!(tar(&["-xOf"], &out).len(), 512 + 1500);
    }

    #[test]
    fn a_name_that_does_not_fit_is_an_error() {
        assert!(header(&"n".repeat(NAME_MAX + 1), 0, 0).is_err());
    }
}
