//! Secure Boot: firmware that has an owner's keys starts what the owner signed, and nothing
//! else.
//!
//! The keys come into the firmware as on a machine: from the ESP of the image, by the loader,
//! while the firmware is in setup mode.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, ensure};
use memchr::memmem;
use polis_image::signing::Keys;
use polis_qemu::args::Disk;
use polis_qemu::image::Flash;
use polis_qemu::{Config, Machine, disk};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::world::{BOOT, World, bootstrap, home};

/// The loader's last words in setup mode.
const ENROLLED: &str = "Custom Secure Boot keys successfully enrolled";
/// The firmware refuses a program: `failed to load Boot0001 ... : Access Denied`.
const REFUSED: &str = "Access Denied";
/// The loader passes on what the firmware says of a kernel image.
const REFUSED_BY_LOADER: &str = "Error loading \\EFI\\Linux\\polis-";
/// The beginning of a disk in which its ESP has the loader and the kernel image.
const FILES: u64 = 96 << 20;
/// Length of the piece by which a program is found on the disk: long enough to be there once.
const PIECE: usize = 512;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(secure_boot).takes(120)];

fn secure_boot() -> Result<()> {
    let world = World::new("secure-boot")?;
    let (keys, others) = (Keys::generate()?, Keys::generate()?);
    let signed = world.signed_disk("disk-signed.img", &keys)?;
    let flipped = Disk { file: world.path("disk-flipped.img"), ..signed.clone() };
    disk::copy(&signed.file, &flipped.file)?;

    // Setup mode: the loader enrols, the machine starts again, and is home.
    let mut machine = boot(&world, &signed)?;
    machine.wait_for_text(ENROLLED, BOOT)?;
    home(&mut machine)?;
    machine.kill();

    // The same firmware, with the keys in its variables.
    refused(&world, &world.disk(None)?, REFUSED).context("an unsigned image")?;
    let foreign = world.signed_disk("disk-foreign.img", &others)?;
    refused(&world, &foreign, REFUSED).context("an image that another owner signed")?;
    flip(&flipped, &fs::read(world.manifest.path(&world.manifest.uki))?)?;
    refused(&world, &flipped, REFUSED_BY_LOADER).context("a flipped kernel image")?;
    disk::copy(&signed.file, &flipped.file)?;
    flip(&flipped, &fs::read(world.manifest.path(&world.manifest.loader))?)?;
    refused(&world, &flipped, REFUSED).context("a flipped loader")?;

    // And it still starts the image that it knows: the disk, too, is as it was.
    home(&mut boot(&world, &signed)?)?;
    Ok(())
}

fn boot(world: &World, disk: &Disk) -> Result<Machine> {
    world.boot(&Config {
        firmware: world.image.uefi(Flash::Secure, &world.path("flash"), "")?,
        disk: Some(disk.clone()),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        ..world.bare("")
    })
}

/// Waits until the serial line names the refusing program, and says that no kernel started.
fn refused(world: &World, disk: &Disk, words: &str) -> Result<()> {
    let mut machine = boot(world, disk)?;
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
