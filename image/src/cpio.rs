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
            append(&mut archive, index, path, mode, device, &content);
        }
        append(&mut archive, 0, TRAILER, 0, (0, 0), &[]);
        Ok(archive)
    }
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
}
