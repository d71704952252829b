//! The machines of a run: their size, their files, and how QEMU starts each.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use polis_image::signing::Keys;
use polis_image::{Manifest, Options, assemble};
use polis_qemu::args::{Accelerator, Cache, Disk, FwCfg};
use polis_qemu::fleet::PARAMETERS;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::{Flash, cheap};
use polis_qemu::{Bus, Config, Image};

use super::options::{Accel, Args};
use super::{kept, make_folder};
use crate::progress::Terminal;
use crate::{kubernetes, parameters};

/// The same image, signed with keys that are made for it and kept nowhere: the machine's
/// firmware takes their public halves from the image.
pub(super) fn signed(image: Image, dir: &Path, keep: bool) -> Result<Image> {
    make_folder(dir)?;
    let out = dir.join("signed.img");
    if !keep || !out.exists() {
        eprintln!("run: making keys, and signing the image");
        let folder = image.disk.parent().unwrap_or(Path::new("."));
        let signer = Some(Arc::new(Keys::generate()?.image_signer()?));
        // Another build would replace the parts while they are read here.
        let (manifest, _guard) = Manifest::held(folder, &Terminal::default())?;
        assemble(&manifest, &Options { signer, ..Options::new(&out) })?;
    }
    Ok(Image { disk: out, ..image })
}

/// Memory in MiB and processors of a node, by its number. Several share this host: see
/// `docs/benchmarks.md` for what they need.
pub(super) fn shape(args: &Args, number: u8) -> (u32, u32) {
    let (memory, cpus) = match (args.kubernetes, args.nodes, number) {
        (false, 1, _) => (1024, 2),
        (false, _, _) => (512, 1),
        (true, _, 1) => (kubernetes::MEMORY_FIRST, 2),
        (true, _, _) => (kubernetes::MEMORY, 1),
    };
    // In system management mode, where the firmware for Secure Boot keeps its variables, every
    // processor spins until the last is there: translated, that takes up to twice as long. And
    // several translated processors need words that a TPM shows, see `words`.
    let cpus = if (args.secure_boot || args.tpm) && !args.kubernetes { 1 } else { cpus };
    (args.memory.unwrap_or(memory), args.cpus.unwrap_or(cpus))
}

/// The words to add to the kernel command line of a machine. Those that pass through firmware are
/// in register 12 of a TPM: its proof (`polisctl node attest`) would not fit the image. QEMU adds
/// others to those of several translated processors, which a machine cannot do without.
fn words(args: &Args, accelerator: Accelerator) -> &'static str {
    if args.tpm { "" } else { cheap(accelerator) }
}

/// Creates the folder of a machine that founds a cluster, and returns its configuration.
pub(super) fn prepare(args: &Args, image: &Image, dir: &Path, shown: bool) -> Result<Config> {
    let config = machine(args, image, dir, 1)?;
    let file = founding(dir, dir, shown)?;
    Ok(Config {
        fw_cfg: vec![FwCfg { name: PARAMETERS.to_owned(), file }],
        console: shown,
        ..config
    })
}

/// Writes the parameters of the machine in `dir`, with which it founds a cluster for the
/// owner of the key in `owner`.
fn founding(owner: &Path, dir: &Path, shown: bool) -> Result<PathBuf> {
    named_founding(owner, dir, shown, "")
}

/// The same for a node with a name.
pub(crate) fn named_founding(owner: &Path, dir: &Path, shown: bool, name: &str) -> Result<PathBuf> {
    let owner = parameters::owner_key(owner)?;
    let file = dir.join("parameters.pb");
    fs::write(&file, parameters::bootstrap(&owner, shown.then_some("hvc0"), name))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Creates the folder of the machine of this number, and returns its configuration.
pub(crate) fn machine(args: &Args, image: &Image, dir: &Path, number: u8) -> Result<Config> {
    make_folder(dir)?;
    let disk = dir.join("disk.img");
    if !kept::disk(args, dir) {
        let tpm = dir.join("tpm");
        if tpm.exists() {
            polis_qemu::tpm::Tpm::clear(&tpm)
                .with_context(|| format!("cannot remove {}", tpm.display()))?;
        }
        for old in [dir.join("vars.fd"), dir.join("serial.log"), dir.join("parameters.pb")] {
            if old.exists() {
                fs::remove_file(&old)
                    .with_context(|| format!("cannot remove {}", old.display()))?;
            }
        }
        new_disk(&image.disk, &disk, args.kubernetes.then_some(kubernetes::DISK))
            .with_context(|| format!("cannot copy the image to {}", disk.display()))?;
    }
    let flash = if args.secure_boot { Flash::Secure } else { Flash::Plain };
    let wish = match args.accel {
        Accel::Auto => Preference::Auto,
        Accel::Kvm => Preference::Kvm,
        Accel::Tcg => Preference::Tcg,
    };
    let cache = if args.keep { Cache::Writeback } else { Cache::Unsafe };
    let (memory, cpus) = shape(args, number);
    let accelerator = accelerator(wish, cpus);
    let words = words(args, accelerator);
    let firmware = if args.direct { image.direct(words) } else { image.uefi(flash, dir, words)? };
    Ok(Config {
        disk: Some(Disk { file: disk, bus: Bus::Virtio, cache }),
        memory,
        cpus,
        watchdog: true,
        tpm: args.tpm.then(|| dir.join("tpm")),
        ..Config::new(firmware, accelerator)
    })
}

/// Copies an image to a disk, with another size if one is given. The disk appears whole: otherwise
/// `--keep` would continue with the unfinished copy of an interrupted run.
fn new_disk(image: &Path, disk: &Path, size: Option<u64>) -> io::Result<()> {
    let new = disk.with_extension("new");
    polis_qemu::disk::copy(image, &new)?;
    if let Some(size) = size {
        polis_qemu::disk::resize(&new, size)?;
    }
    fs::rename(&new, disk)
}

#[cfg(test)]
mod tests {
    use super::super::tests::with;
    use super::*;

    #[test]
    fn a_machine_with_a_tpm_gets_no_words_that_its_proof_would_show() {
        let added = |options: &[&str], accelerator| words(&with(options), accelerator);
        assert_eq!(added(&["--tpm"], Accelerator::Tcg), "");
        assert!(added(&[], Accelerator::Tcg).contains("mitigations=off"));
        assert_eq!(added(&[], Accelerator::Kvm), "");
        // QEMU adds words for several processors, which are for a person to ask for.
        let processors = |options: &[&str]| shape(&with(options), 1).1;
        assert_eq!((processors(&[]), processors(&["--tpm"])), (2, 1));
        assert_eq!(processors(&["--tpm", "--cpus", "2"]), 2);
        assert_eq!(processors(&["--tpm", "--kubernetes"]), 2);
    }

    #[test]
    fn a_disk_whose_copy_was_not_finished_is_none_to_keep() {
        let dir = tempfile::tempdir().unwrap();
        let [image, disk] = ["polis.img", "disk.img"].map(|name| dir.path().join(name));
        fs::write(&image, "an image").unwrap();
        // No file has this size.
        new_disk(&image, &disk, Some(u64::MAX)).unwrap_err();
        assert!(!kept::disk(&with(&["--keep"]), dir.path()));
        new_disk(&image, &disk, Some(16)).unwrap();
        assert!(kept::disk(&with(&["--keep"]), dir.path()));
        assert_eq!(fs::read(&disk).unwrap(), b"an image\0\0\0\0\0\0\0\0");
        new_disk(&image, &disk, None).unwrap();
        assert_eq!(fs::read(&disk).unwrap(), b"an image");
    }
}
