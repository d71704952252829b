//! The archive format that the kernel unpacks at boot ("newc"), written from a file tree.
//!
//! The format is 110 bytes of hexadecimal before each name; a crate for it would be
//! larger than this file, and would need options to leave out times, owners and inode
//! numbers, which is the point here.

use std::io::Write as _;

use crate::{
    error::Result,
    tree::{Entry, Tree},
};

/// Begins each entry.
const MAGIC: &[u8] = b"070701";
/// Bytes of an entry before its name: the magic, and 13 fields of 8 digits.
const HEADER: usize = 110;
/// Marks the end of the archive.
const TRAILER: &str = "TRAILER!!!";

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

impl Tree {
    /// The tree as the archive that a kernel unpacks at boot.
    ///
    /// # Errors
    ///
    /// A file of the host cannot be read.
    pub fn archive(&self) -> Result<Vec<u8>> {
        self.aligned_archive(1)
    }

    /// The same, with the content of each entry at a multiple of `alignment`. Zeros after its
    /// name fill the gap; every reader ends the name at the first one.
    pub(crate) fn aligned_archive(&self, alignment: usize) -> Result<Vec<u8>> {
        let mut archive = Vec::new();
        for (index, (path, entry)) in (1..).zip(self.iter()) {
            let (mode, device, content) = match entry {
                Entry::Folder { mode } => (FOLDER | mode, (0, 0), Vec::new()),
                Entry::File { content, mode } => (FILE | mode, (0, 0), content.read()?),
                Entry::Link { target } => (LINK | 0o777, (0, 0), target.clone().into_bytes()),
                Entry::Device { major, minor, mode } => {
                    (CHARACTER_DEVICE | mode, (*major, *minor), Vec::new())
                }
            };
            let end = archive.len() + HEADER + path.len() + 1;
            let zeros = "\0".repeat(end.next_multiple_of(alignment) - end);
            append(&mut archive, index, &(path.to_owned() + &zeros), mode, device, &content);
        }
        append(&mut archive, 0, TRAILER, 0, (0, 0), &[]);
        Ok(archive)
    }
}

/// The content of a file in the archive at the beginning of these bytes.
pub(crate) fn find<'a>(archive: &'a [u8], path: &str) -> Option<&'a [u8]> {
    let mut rest = archive;
    while rest.starts_with(MAGIC) {
        let field = |index: usize| {
            let start = MAGIC.len() + index * 8;
            let digits = str::from_utf8(rest.get(start..start + 8)?).ok()?;
            usize::from_str_radix(digits, 16).ok()
        };
        let (size, name_size) = (field(6)?, field(11)?);
        let name = rest.get(HEADER..HEADER + name_size)?.split(|byte| *byte == 0).next()?;
        let start = (HEADER + name_size).next_multiple_of(4);
        let content = rest.get(start..start + size)?;
        if name == path.as_bytes() {
            return Some(content);
        }
        if name == TRAILER.as_bytes() {
            return None;
        }
        rest = rest.get((start + size).next_multiple_of(4)..)?;
    }
    None
}

fn append(
    archive: &mut Vec<u8>,
    inode: u32,
    path: &str,
    mode: u32,
    device: (u32, u32),
    content: &[u8],
) {
    let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
    let (size, name_size) = (content.len(), path.len() + 1);
    let (major, minor) = device;
    // Fields: inode, mode, user, group, links, time, size, the archive's device,
    // the entry's device, length of the name, checksum (unused in this variant).
    let header = format!(
        "070701{inode:08x}{mode:08x}{0:08x}{0:08x}{links:08x}{0:08x}{size:08x}{0:08x}{0:08x}{major:08x}{minor:08x}{name_size:08x}{0:08x}",
        0
    );
    // Writing to memory cannot fail.
    write!(archive, "{header}{path}\0").unwrap_or_default();
    pad(archive);
    archive.extend_from_slice(content);
    pad(archive);
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_every_entry_in_order_and_no_time_or_owner() {
        let mut tree = Tree::default();
        tree.text("dev/note", "hello");
        tree.device("dev/console", 5, 1);
        tree.link("init", "dev/note");
        let archive = tree.archive().unwrap();
        assert_eq!(archive, tree.archive().unwrap());
        assert!(archive.len().is_multiple_of(4));
        let text = String::from_utf8_lossy(&archive);
        let expected = "07070100000001000041ed000000000000000000000002000000000000000000000000\
                        0000000000000000000000000000000400000000dev\0";
        assert!(text.starts_with(expected), "{text}");
        let places: Vec<_> = ["dev/console\0", "dev/note\0", "init\0", TRAILER]
            .map(|name| text.find(name).unwrap())
            .into();
        assert!(places.is_sorted());
        // The character device 5:1.
        assert!(text.contains("0000000500000001"));
    }

    #[test]
    fn a_file_is_found_in_its_own_archive_only_and_never_past_the_end() {
        let mut tree = Tree::default();
        tree.text("a/one", "first");
        tree.text("a/two", "");
        let mut other = Tree::default();
        other.text("a/three", "x");
        let first = tree.archive().unwrap();
        let both = [&first[..], &other.archive().unwrap()].concat();
        assert_eq!(find(&both, "a/one"), Some(&b"first"[..]));
        assert_eq!(find(&both, "a/two"), Some(&b""[..]));
        assert_eq!(find(&both[first.len()..], "a/three"), Some(&b"x"[..]));
        for path in ["a/three", "a/on", "one", ""] {
            assert_eq!(find(&both, path), None, "{path}");
        }
        // Cut short at any byte, and with any byte that is no digit.
        for length in 0..first.len() {
            find(&first[..length], "a/two");
            let mut damaged = first.clone();
            damaged[length] = 0xff;
            find(&damaged, "a/two");
        }
        let end = first.windows(5).position(|bytes| bytes == b"first").unwrap() + 5;
        assert_eq!(find(&first[..end], "a/one"), Some(&b"first"[..]));
        assert_eq!(find(&first[..end - 1], "a/one"), None);
    }

    #[test]
    fn zeros_after_a_name_align_the_content_and_change_nothing_else() {
        let mut tree = Tree::default();
        for (length, content) in [(1, "one"), (2, "second"), (9, "third"), (16, "the last")] {
            tree.text(&"n".repeat(length), content);
        }
        let aligned = tree.aligned_archive(16).unwrap();
        for (length, content) in [(1, "one"), (2, "second"), (9, "third"), (16, "the last")] {
            let place = aligned.windows(content.len()).position(|at| at == content.as_bytes());
            assert!(place.unwrap().is_multiple_of(16), "{content}");
            assert_eq!(find(&aligned, &"n".repeat(length)), Some(content.as_bytes()));
        }
        assert!(aligned.len().is_multiple_of(4));
    }
}
