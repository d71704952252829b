//! Proves that the same inputs give the same bytes: builds twice and compares.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    build::{Config, build},
    digest::sha256,
    error::{At as _, Error, Result},
    step::Observer,
};

/// Size of the disks: hashing gigabytes of zeros would prove nothing more.
const SIZE: u64 = 512 << 20;

/// What is compared, by name in the output folder.
const OUTPUTS: &[&str] = &["vmlinuz", "initramfs.cpio", "system.img", "polis.efi", "polis.img"];

/// Builds twice in two folders below `folder`, each with no step cached, and
/// returns the hash of each output.
///
/// # Errors
///
/// A build failed, or the two differ; the error names the first output that does.
pub fn verify_reproducible(
    config: &Config,
    folder: &Path,
    observer: &dyn Observer,
) -> Result<Vec<(&'static str, String)>> {
    if folder.exists() {
        fs::remove_dir_all(folder).at("clear", folder)?;
    }
    let once = |name: &str| {
        let out = folder.join(name);
        build(&Config { out: out.clone(), size: SIZE, ..config.clone() }, observer)?;
        digests(&out)
    };
    // Names of different lengths, so that a path that leaked would show.
    let (one, two) = (once("a")?, once("another")?);
    if let Some((one, _)) = one.iter().zip(&two).find(|(one, two)| one != two) {
        return Err(Error::NotReproducible(one.0.to_owned()));
    }
    fs::remove_dir_all(folder).at("clear", folder)?;
    Ok(one)
}

fn digests(out: &Path) -> Result<Vec<(&'static str, String)>> {
    let digest = |name: &&'static str| Ok((*name, sha256(&PathBuf::from(out).join(name))?));
    OUTPUTS.iter().map(digest).collect()
}
