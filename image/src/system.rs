//! The content of a system partition: an erofs file system with a dm-verity hash tree
//! behind it.
//!
//! Everything is in one file system, including our own programs. Compressing all of it
//! takes a second on four cores, and only frequently changed files could be moved out:
//! some 20 MB of 90, at the price of a second device to open at each boot.

use std::{fs, path::Path};

use crate::{
    digest::{hash, hex},
    error::{At as _, Result},
    program,
    tree::Tree,
    verity::{self, Verity},
};

/// UUID of the file system: fixed, since the hash already identifies it.
const UUID: &str = "00000000-0000-0000-0000-0000706f6c69";
/// LZ4 at level 9 of 12: the last three are ten times as slow for half a percent.
/// Clusters of 64 KiB, since reading is bound by hashing, not by seeking. No times, no
/// owners, no extended attributes.
const OPTIONS: &[&str] = &["-zlz4hc,level=9", "-C65536", "-T0", "--all-root", "-x-1", "--quiet"];
/// Modules are packed already: trying again costs time and gains nothing.
const HINTS: &str = "0 \\.ko\\.xz$\n";

/// Makes the file `output` from a tree. `scratch` is a folder for work.
pub(crate) fn make(
    payload: &Path,
    tree: &Tree,
    seed: &str,
    scratch: &Path,
    output: &Path,
) -> Result<Verity> {
    let folder = scratch.join("root");
    tree.lay_out(&folder)?;
    let hints = scratch.join("hints");
    fs::write(&hints, HINTS).at("write", &hints)?;
    if output.exists() {
        fs::remove_file(output).at("remove", output)?;
    }
    let mut mkfs = program::payload(payload, "usr/bin/mkfs.erofs");
    mkfs.args(OPTIONS).arg(format!("-U{UUID}"));
    mkfs.arg(format!("--compress-hints={}", hints.display())).arg(output).arg(&folder);
    program::run(&mut mkfs)?;
    fs::remove_dir_all(scratch).at("clear", scratch)?;
    append_verity(output, seed)
}

/// Appends the hash tree to a file system and returns the parameters for opening both.
fn append_verity(path: &Path, seed: &str) -> Result<Verity> {
    let mut data = fs::read(path).at("read", path)?;
    data.resize(data.len().next_multiple_of(verity::BLOCK), 0);
    let blocks = (data.len() / verity::BLOCK) as u64;
    // The salt need not be secret, only unique to the image: two images share no hash.
    let salt = hash(seed.as_bytes());
    let (root, tree) = verity::tree(&data, &verity::bytes(&salt).unwrap_or_default());
    data.extend(tree);
    fs::write(path, &data).at("write", path)?;
    Ok(Verity { root_hash: hex(&root), salt, blocks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_tree_follows_its_data_and_is_described() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("system");
        fs::write(&path, vec![3; 2 * verity::BLOCK + 1]).unwrap();
        let verity = append_verity(&path, "seed").unwrap();
        assert_eq!(verity.blocks, 3);
        assert_eq!(verity.salt, hash(b"seed"));
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 * verity::BLOCK as u64);
    }
}
