//! The archive format of container layers ("ustar"), written from a file tree.
//!
//! As with [`crate::cpio`], a crate for it would need options to leave out times, owners
//! and inode numbers, which is the point here.
//!
//! Invariant: the same tree gives the same bytes (`an_archive_has_no_time_or_owner`).
//!
//! What this module does not do: names above 100 bytes, and files of 8 GiB or more. Both
//! are errors.

use std::path::PathBuf;

use crate::{
    error::{Error, Result},
    tree::{Entry, Tree},
};

/// Headers and contents begin at multiples of this.
const BLOCK: usize = 512;
/// Bytes of a name in a header.
const NAME_MAX: usize = 100;
/// Bytes of a file whose size fits in eleven octal digits.
const SIZE_MAX: usize = 0o77_777_777_777;

/// The kinds of entries that a tree has.
const FILE: u8 = b'0';
const LINK: u8 = b'2';
const CHARACTER_DEVICE: u8 = b'3';
const FOLDER: u8 = b'5';

/// The archive of a tree, in which everything is root's.
pub(crate) fn write(tree: &Tree) -> Result<Vec<u8>> {
    let mut archive = Vec::new();
    for (path, entry) in tree.iter() {
        let mut header = Header { mode: 0o777, ..Header::default() };
        let mut content = Vec::new();
        let mut name = path.to_owned();
        match entry {
            Entry::Folder { mode } => {
                name.push('/');
                (header.kind, header.mode) = (FOLDER, *mode);
            }
            Entry::File { content: source, mode } => {
                content = source.read()?;
                (header.kind, header.mode) = (FILE, *mode);
            }
            Entry::Link { target } => {
                (header.kind, header.target) = (LINK, target.clone());
            }
            Entry::Device { major, minor, mode } => {
                (header.kind, header.mode) = (CHARACTER_DEVICE, *mode);
                header.device = (*major, *minor);
            }
        }
        header.name = name;
        header.size = content.len();
        archive.extend_from_slice(&header.bytes()?);
        archive.extend_from_slice(&content);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    // Two empty blocks are its end.
    archive.resize(archive.len() + 2 * BLOCK, 0);
    Ok(archive)
}

#[derive(Default)]
struct Header {
    name: String,
    mode: u32,
    size: usize,
    kind: u8,
    target: String,
    device: (u32, u32),
}

impl Header {
    fn bytes(&self) -> Result<[u8; BLOCK]> {
        let Self { name, mode, size, kind, target, device } = self;
        let refused = |reason: &str| Error::Malformed {
            path: PathBuf::from(name),
            expected: "entry of a container's layer",
            reason: reason.to_owned(),
        };
        if name.len() > NAME_MAX || target.len() > NAME_MAX {
            return Err(refused("its name is longer than 100 bytes"));
        }
        if *size > SIZE_MAX {
            return Err(refused("it is larger than 8 GiB"));
        }
        let mut block = [0; BLOCK];
        let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
        put(0, name.as_bytes());
        put(100, format!("{mode:07o}\0").as_bytes());
        // User, group; both are 0.
        put(108, format!("{0:07o}\0{0:07o}\0", 0).as_bytes());
        put(124, format!("{size:011o}\0").as_bytes());
        // The time.
        put(136, format!("{:011o}\0", 0).as_bytes());
        // The sum counts its own field as blanks.
        put(148, b"        ");
        put(156, &[*kind]);
        put(157, target.as_bytes());
        put(257, b"ustar\x0000");
        if *kind == CHARACTER_DEVICE {
            put(329, format!("{:07o}\0{:07o}\0", device.0, device.1).as_bytes());
        }
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{host, run};

    #[test]
    fn an_archive_has_no_time_or_owner() {
        let mut tree = Tree::default();
        tree.text("etc/note", "hello");
        tree.folder("run", 0o700);
        tree.link("bin", "usr/bin");
        tree.device("dev/null", 1, 3);
        let archive = write(&tree).unwrap();
        assert_eq!(archive, write(&tree).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layer.tar");
        std::fs::write(&path, archive).unwrap();
        let listed = run(host("tar").args(["--utc", "-tvf"]).arg(&path)).unwrap();
        let listed = String::from_utf8(listed).unwrap();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = listed.lines().map(words).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        lrwxrwxrwx 0/0 0 1970-01-01 00:00 bin -> usr/bin
        drwxr-xr-x 0/0 0 1970-01-01 00:00 dev/
        crw------- 0/0 1,3 1970-01-01 00:00 dev/null
        drwxr-xr-x 0/0 0 1970-01-01 00:00 etc/
        -rw-r--r-- 0/0 5 1970-01-01 00:00 etc/note
        drwx------ 0/0 0 1970-01-01 00:00 run/
        ");
        let text = run(host("tar").arg("-xOf").arg(&path).arg("etc/note")).unwrap();
        assert_eq!(text, b"hello");
    }

    #[test]
    fn a_name_that_does_not_fit_is_an_error_and_not_cut() {
        let mut tree = Tree::default();
        tree.text(&"x".repeat(101), "");
        let error = write(&tree).unwrap_err();
        assert!(error.to_string().contains("longer than 100 bytes"), "{error}");
    }
}
