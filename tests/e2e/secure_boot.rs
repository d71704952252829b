//! Secure Boot: firmware that has an owner's keys starts what the owner signed and did not
//! revoke, and nothing else; a machine with a TPM opens its disk for that alone.
//!
//! The keys, and the list of what is revoked, come into the firmware as on a machine: from the ESP
//! of the image, by the loader, while the firmware is in setup mode.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use memchr::memmem;
use polis_image::authenticode_hash;
use polis_image::signing::{ImageSigner, Keys, Passphrase, revoke};
use polis_qemu::args::Disk;
use polis_qemu::image::Flash;
use polis_qemu::{Config, disk};
use polis_tests::{Story, story};

use crate::keys::ordinary;
use crate::owner::Owner;
use crate::samples;
use crate::update::{REFUSED_BY_LOADER, bundle, leads_back, next, with_kernel};
use crate::world::{BOOT, DISK_SIZE_SMALL, World, guru, home, says};

/// The loader's last words in setup mode.
const ENROLLED: &str = "Custom Secure Boot keys successfully enrolled";
/// The firmware refuses a program: `failed to load Boot0001 ... : Access Denied`.
const REFUSED: &str = "Access Denied";
/// The kernel's word that it trusts nothing unsigned: not the memory, not a module.
const LOCKED_DOWN: &str = "Kernel is locked down from EFI Secure Boot";
/// The kernel's words of a module that it does not trust: `Loading of ... is rejected`.
const REJECTED: &str = "is rejected";
/// The beginning of a disk in which its ESP has the loader and the kernel image.
const FILES: u64 = 96 << 20;
/// Length of the piece by which a program is found on the disk: long enough to be there once.
const PIECE: usize = 512;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(secure_boot).takes(170).one_of(samples::TRUST)];

fn secure_boot() -> Result<()> {
    let world = World::new("secure-boot")?;
    let owner = Owner::new(&world.path("owner"))?;
    let (keys, others) = (Keys::generate()?, Keys::generate()?);
    // Another version, which the owner has signed and revoked.
    let next = next()?;
    let revoked = with_kernel(&world, &next, std::path::absolute(next.path(&next.uki))?)?;
    let revoked = bundle(&world, "revoked.update", &revoked, &keys)?;
    let signer = revoking(&world, &keys, &revoked)?;
    let image = &world.manifest;
    let signed = world.signed_disk_of("disk-signed.img", image, signer, DISK_SIZE_SMALL)?;
    let flipped = Disk { file: world.path("disk-flipped.img"), ..signed.clone() };
    disk::copy(&signed.file, &flipped.file)?;
    let config = Config {
        forwards: owner.forwards.clone(),
        tpm: Some(world.path("tpm")),
        ..config(&world, &signed)?
    };

    // Setup mode: the loader enrols, the machine starts again, and is home.
    let mut machine = world.boot(&config)?;
    machine.wait_for_text(ENROLLED, BOOT)?;
    let founded = home(&mut machine)?;
    says(&machine, "kind=authenticated")?;
    says(&machine, "keeper=TPM")?;
    machine.kill();

    // The same firmware, with the keys in its variables.
    refused(&world, &world.disk(None)?, REFUSED).context("an unsigned image")?;
    let foreign = world.signed_disk("disk-foreign.img", &others)?;
    refused(&world, &foreign, REFUSED).context("an image that another owner signed")?;
    flip(&flipped, &fs::read(image.path(&image.uki))?)?;
    refused(&world, &flipped, REFUSED_BY_LOADER).context("a flipped kernel image")?;
    flip(&flipped, &fs::read(image.path(&image.loader))?)?;
    refused(&world, &flipped, REFUSED).context("a flipped loader")?;

    // And it still starts the image that it knows, locked down; the TPM opens the disk.
    let mut machine = world.boot(&config)?;
    let again = home(&mut machine)?;
    ensure!(again == founded, "after a restart: {again:?}, before: {founded:?}");
    owner.take(&founded.ca)?;
    let log = owner.run(&["node", "logs", &founded.node, "--name", "kernel"])?;
    ensure!(log.contains(LOCKED_DOWN), "the kernel is not locked down: {log}");
    let module = log.lines().find(|line| line.contains(REJECTED));
    ensure!(module.is_none(), "a module was rejected: {module:?}");

    // The firmware refuses the system that is revoked. The machine goes back by itself, and what
    // was measured before that does not keep the TPM from opening the disk.
    leads_back(&world, &owner, &mut machine, &founded, &revoked)?;
    machine.kill();

    // The firmware starts the signed image also with what a hypervisor adds to its command line;
    // the TPM does not open the disk for it.
    let firmware = world.image.uefi(Flash::Secure, &world.path("flash"), "added=1")?;
    let guru = guru(&mut world.boot(&Config { firmware, ..config })?, "0412")?;
    ensure!(guru.is("unlock", "yes"), "the recovery key is not asked for: {guru}");
    ensure!(guru.text("cause").contains("registers"), "it is another cause: {guru}");
    Ok(())
}

/// The signer of an image that enrols the keys, and a list with the kernel image of this bundle as
/// revoked.
fn revoking(world: &World, keys: &Keys, bundle: &Path) -> Result<ImageSigner> {
    let folder = world.path("keys");
    let passphrase = Passphrase::new("correct horse".to_owned().into())?;
    keys.store(&folder, &passphrase)?;
    let added = revoke(&folder, &passphrase, &[authenticode_hash(bundle)?])?;
    ensure!(added == 1, "{added} programs were revoked");
    Ok(ImageSigner::open(&folder, &passphrase)?)
}

/// A machine without a TPM, whose firmware keeps its variables for all machines of this story.
fn config(world: &World, disk: &Disk) -> Result<Config> {
    Ok(Config {
        firmware: world.image.uefi(Flash::Secure, &world.path("flash"), "")?,
        disk: Some(disk.clone()),
        fw_cfg: world.fw_cfg(&ordinary())?,
        ..world.bare("")
    })
}

/// Waits until the serial line names the refusing program, and says that no kernel started.
fn refused(world: &World, disk: &Disk, words: &str) -> Result<()> {
    let mut machine = world.boot(&config(world, disk)?)?;
    machine.wait_for_text(words, BOOT)?;
    let started = machine.seen(|event| event.word == "boot");
    ensure!(started.is_empty(), "it started: {started:?}");
    machine.kill();
    Ok(())
}

/// Flips a bit of a program on the ESP of a disk.
fn flip(disk: &Disk, program: &[u8]) -> Result<()> {
    // A third into the kernel image is the packed kernel, into the loader its code.
    let start = program.len() / 3;
    let piece = program.get(start..start + PIECE).context("a short program")?;
    let mut files = Vec::new();
    File::open(&disk.file)?.take(FILES).read_to_end(&mut files)?;
    let places: Vec<usize> = memmem::find_iter(&files, piece).collect();
    let [place] = places[..] else { anyhow::bail!("the program is at {places:?}") };
    let byte = [files[place] ^ 1];
    File::options().write(true).open(&disk.file)?.write_all_at(&byte, place as u64)?;
    Ok(())
}
