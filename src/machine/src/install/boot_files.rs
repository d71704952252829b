//! The EFI system partition of an installed disk: the files that start this machine, from the
//! medium, with the parameters of the installed node.
//!
//! It is made in memory, as the builder of images makes it, and not copied as a partition: the
//! medium has reports and records of its own, and its sectors may have another size.
//!
//! Invariants:
//! - The records of the installed node are empty.
//! - The files of the medium are bounded before they are read.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use polis_layout::esp::{self, Entry};
use polis_layout::partitions::ESP_SIZE;

/// The folders with what starts a machine.
const FOLDERS: [&str; 2] = ["EFI", "loader"];
/// The loader's file of random numbers, a seed which no two machines may share.
const SEED: &str = "loader/random-seed";
/// A kernel image that an update has not finished.
const UNFINISHED: &str = "EFI/Linux/polis.new";
/// Bounds of what is copied: an ESP has a loader, a kernel image or two, and keys. The build of an
/// image permits a kernel image a quarter of an ESP.
const FILES_MAX: usize = 64;
const DEPTH_MAX: usize = 5;
const BYTES_MAX: u64 = ESP_SIZE / 4 * 3;

/// The files of the medium, whose ESP is mounted at `root`, that start a machine.
pub(crate) fn read(root: &Path) -> io::Result<Vec<Entry>> {
    let mut found = Found { files: Vec::new(), left: BYTES_MAX };
    for folder in FOLDERS {
        if root.join(folder).exists() {
            found.walk(root, folder, DEPTH_MAX)?;
        }
    }
    let has = |path: &str| found.files.iter().any(|(name, _)| name.eq_ignore_ascii_case(path));
    if !has(esp::LOADER) {
        return Err(io::Error::other(format!("{} is not there", esp::LOADER)));
    }
    Ok(found.files)
}

/// The bytes of the ESP of the installed disk.
pub(super) fn build(
    seed: &str,
    block_size: u64,
    mut files: Vec<Entry>,
    parameters: &[u8],
) -> esp::Result<Vec<u8>> {
    files.push((esp::PARAMETERS.to_owned(), parameters.to_vec()));
    esp::build(seed, block_size, &files)
}

struct Found {
    files: Vec<Entry>,
    left: u64,
}

impl Found {
    fn walk(&mut self, root: &Path, folder: &str, depth: usize) -> io::Result<()> {
        let too_much = || io::Error::other(format!("{folder} has more than an ESP of Polis"));
        let mut names = Vec::new();
        for entry in fs::read_dir(root.join(folder))? {
            let entry = entry?;
            let name = entry.file_name().into_string();
            let name = name.map_err(|name| io::Error::other(format!("a file {name:?}")))?;
            names.push((name, entry.file_type()?));
            if names.len() > FILES_MAX {
                return Err(too_much());
            }
        }
        names.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (name, kind) in names {
            let path = format!("{folder}/{name}");
            let skipped = [SEED, UNFINISHED].iter().any(|skip| path.eq_ignore_ascii_case(skip));
            if skipped {
                continue;
            }
            if kind.is_dir() {
                self.walk(root, &path, depth.checked_sub(1).ok_or_else(too_much)?)?;
            } else {
                let content = self.content(&root.join(&path))?.ok_or_else(too_much)?;
                self.files.push((path, content));
            }
            if self.files.len() > FILES_MAX {
                return Err(too_much());
            }
        }
        Ok(())
    }

    /// The content of a file; `None` beyond the bound.
    fn content(&mut self, path: &Path) -> io::Result<Option<Vec<u8>>> {
        let mut content = Vec::new();
        File::open(path)?.take(self.left + 1).read_to_end(&mut content)?;
        let Some(left) = self.left.checked_sub(content.len() as u64) else { return Ok(None) };
        self.left = left;
        Ok(Some(content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medium(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        root
    }

    #[test]
    fn what_starts_a_machine_is_copied_and_nothing_of_the_medium_s_own() {
        let root = medium(&[
            "EFI/BOOT/BOOTX64.EFI",
            "EFI/Linux/polis-1.0.0.efi",
            "EFI/Linux/polis.new",
            "loader/loader.conf",
            "loader/keys/auto/db.auth",
            "loader/random-seed",
            "polis/parameters.pb",
            "polis/guru/attempts",
        ]);
        let names: Vec<String> = read(root.path()).unwrap().into_iter().map(|(n, _)| n).collect();
        let expected = [
            "EFI/BOOT/BOOTX64.EFI",
            "EFI/Linux/polis-1.0.0.efi",
            "loader/keys/auto/db.auth",
            "loader/loader.conf",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn the_two_largest_kernel_images_are_within_the_bound_and_more_than_an_esp_has_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "keys").unwrap();
        let after = |kernels: u64| {
            let left = BYTES_MAX.saturating_sub(kernels * (ESP_SIZE / 4));
            Found { files: Vec::new(), left }.content(&file).unwrap()
        };
        assert_eq!(after(2).as_deref(), Some(&b"keys"[..]));
        assert_eq!(after(3), None);
    }

    #[test]
    fn a_medium_without_a_boot_file_or_with_too_many_files_is_refused() {
        let error = read(medium(&["loader/loader.conf"]).path()).unwrap_err();
        assert_eq!(error.to_string(), "EFI/BOOT/BOOTX64.EFI is not there");
        let many: Vec<String> = (0..=FILES_MAX).map(|at| format!("EFI/BOOT/{at}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(read(medium(&many).path()).is_err());
        assert!(read(medium(&["EFI/1/2/3/4/5/6/7"]).path()).is_err());
    }
}
