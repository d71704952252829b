//! A file tree in memory: the plan of the root or of the initramfs.
//!
//! A tree is a plan: paths in order, with the kind of each. It is then laid out in a
//! folder for `mkfs.erofs`, or written as a cpio archive (`cpio`).
//!
//! Invariants:
//! - Every folder on the way to a file is in the tree.
//! - The order is that of the paths, independent of the order of insertion.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use crate::{
    digest::hash,
    error::{At as _, Result},
};

/// The kind of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Folder {
        mode: u32,
    },
    File {
        content: Content,
        mode: u32,
    },
    Link {
        target: String,
    },
    /// A character device.
    Device {
        major: u32,
        minor: u32,
        mode: u32,
    },
}

/// The source of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Bytes(Vec<u8>),
    File(PathBuf),
}

impl Content {
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.clone()),
            Self::File(path) => fs::read(path).at("read", path),
        }
    }
}

/// The tree. Paths have no slash at either end.
#[derive(Clone, Debug, Default)]
pub struct Tree(BTreeMap<String, Entry>);

impl Tree {
    /// Adds a folder.
    pub fn folder(&mut self, path: &str, mode: u32) {
        self.insert(path, Entry::Folder { mode });
    }

    /// Adds a file with this content.
    pub fn text(&mut self, path: &str, text: impl Into<Vec<u8>>) {
        self.insert(path, Entry::File { content: Content::Bytes(text.into()), mode: 0o644 });
    }

    /// Adds a copy of a file of the host.
    pub fn file(&mut self, path: &str, source: impl Into<PathBuf>) {
        self.insert(path, Entry::File { content: Content::File(source.into()), mode: 0o644 });
    }

    /// Adds a copy of a program of the host.
    pub fn program(&mut self, path: &str, source: impl Into<PathBuf>) {
        self.insert(path, Entry::File { content: Content::File(source.into()), mode: 0o755 });
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.insert(path, Entry::Link { target: target.to_owned() });
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.insert(path, Entry::Device { major, minor, mode: 0o600 });
    }

    /// Adds everything of another tree below a folder.
    pub fn place(&mut self, folder: &str, other: Self) {
        for (path, entry) in other.0 {
            self.insert(&format!("{folder}/{path}"), entry);
        }
    }

    fn insert(&mut self, path: &str, entry: Entry) {
        for (slash, _) in path.match_indices('/') {
            self.0.entry(path[..slash].to_owned()).or_insert(Entry::Folder { mode: 0o755 });
        }
        self.0.insert(path.to_owned(), entry);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.0.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// A text that changes whenever the tree does. `origin` names a file of the host;
    /// the name must cover the file's content.
    pub(crate) fn listing(&self, origin: impl Fn(&Path) -> String) -> String {
        let mut text = String::new();
        for (path, entry) in self.iter() {
            let what = match entry {
                Entry::Folder { mode } => format!("folder {mode:o}"),
                Entry::File { content: Content::Bytes(bytes), mode } => {
                    format!("text {mode:o} {}", hash(bytes))
                }
                Entry::File { content: Content::File(file), mode } => {
                    format!("file {mode:o} {}", origin(file))
                }
                Entry::Link { target } => format!("link {target}"),
                Entry::Device { major, minor, mode } => format!("device {mode:o} {major} {minor}"),
            };
            text += &format!("{path} {what}\n");
        }
        text
    }

    /// Lays the tree out below `root`, which is emptied first. Devices are left out:
    /// making them takes a privilege, and the root does not need them.
    pub fn lay_out(&self, root: &Path) -> Result<()> {
        if root.exists() {
            fs::remove_dir_all(root).at("clear", root)?;
        }
        fs::create_dir_all(root).at("make", root)?;
        fs::set_permissions(root, fs::Permissions::from_mode(0o755)).at("set the mode of", root)?;
        for (path, entry) in self.iter() {
            let path = root.join(path);
            let mode = match entry {
                Entry::Folder { mode } => {
                    fs::create_dir(&path).at("make", &path)?;
                    *mode
                }
                Entry::File { content: Content::Bytes(bytes), mode } => {
                    fs::write(&path, bytes).at("write", &path)?;
                    *mode
                }
                Entry::File { content: Content::File(source), mode } => {
                    fs::copy(source, &path).at("copy", source)?;
                    *mode
                }
                Entry::Link { target } => {
                    symlink(target, &path).at("make", &path)?;
                    continue;
                }
                Entry::Device { .. } => continue,
            };
            // The caller's umask must not show in the image.
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .at("set the mode of", &path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_on_the_way_come_before_what_is_in_them() {
        let mut tree = Tree::default();
        tree.text("a/b/c", "x");
        tree.link("a-link", "a");
        let paths: Vec<_> = tree.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["a", "a-link", "a/b", "a/b/c"]);
    }

    #[test]
    fn a_listing_changes_with_anything_in_the_tree() {
        let listing = |tree: &Tree| tree.listing(|path| path.display().to_string());
        let mut tree = Tree::default();
        tree.text("a", "one");
        tree.file("b", "/x/b");
        let first = listing(&tree);
        assert_eq!(first, format!("a text 644 {}\nb file 644 /x/b\n", hash(b"one")));
        tree.text("a", "two");
        let second = listing(&tree);
        assert_ne!(first, second);
        tree.program("b", "/x/b");
        assert_ne!(listing(&tree), second);
    }

    #[test]
    fn a_tree_is_laid_out_with_its_own_modes() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        fs::write(&source, "program").unwrap();
        let mut tree = Tree::default();
        tree.program("usr/bin/p", &source);
        tree.folder("run", 0o700);
        tree.link("bin", "usr/bin");
        let root = folder.path().join("root");
        tree.lay_out(&root).unwrap();
        tree.lay_out(&root).unwrap();
        assert_eq!(fs::read_to_string(root.join("bin/p")).unwrap(), "program");
        let mode = |path: &str| fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("usr/bin/p"), mode("run")), (0o755, 0o700));
    }
}
