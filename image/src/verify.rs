//! The check that the same inputs give the same bytes: it builds again, and compares.

use std::{fs, path::Path};

use crate::{
    build::{Config, build},
    digest::sha256,
    error::{At as _, Error, Result},
    manifest::{self, Manifest, Options},
    step::Observer,
};

/// Size of the disks: little more than the partitions need, since hashing zeros adds nothing
/// to the check.
const SIZE: u64 = 2600 << 20;

/// The compared files, by name in the output folder.
const OUTPUTS: &[&str] = &["vmlinuz", "initramfs.cpio", "system.img", "polis.efi", "polis.img"];

/// Builds from the inputs of `built` again, in another folder below `folder` and with
/// no step cached, and returns the hash of each output.
///
/// The steps of `built` may have been cached. So this also compares the earlier inputs
/// of a step with its current ones.
///
/// # Errors
///
/// A build failed, or the two differ; the error names the first output that does.
pub fn verify_reproducible(
    built: &Manifest,
    config: &Config,
    folder: &Path,
    observer: &dyn Observer,
) -> Result<Vec<(&'static str, String)>> {
    if folder.exists() {
        fs::remove_dir_all(folder).at("clear", folder)?;
    }
    let again = folder.join("again");
    build(&Config { out: again.clone(), size: SIZE, ..config.clone() }, observer)?;
    let disk = folder.join("built.img");
    let (parameters, signer) = (config.parameters.clone(), config.signer.clone());
    let options = Options { size: SIZE, parameters, signer, ..Options::new(&disk) };
    manifest::assemble(built, &options)?;
    let compare = |name: &&'static str| {
        let first = if *name == "polis.img" { disk.clone() } else { built.folder.join(name) };
        let digest = sha256(&first)?;
        if sha256(&again.join(name))? != digest {
            return Err(Error::NotReproducible((*name).to_owned()));
        }
        Ok((*name, digest))
    };
    let digests = OUTPUTS.iter().map(compare).collect::<Result<_>>()?;
    fs::remove_dir_all(folder).at("clear", folder)?;
    Ok(digests)
}
