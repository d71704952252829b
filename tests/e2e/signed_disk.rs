//! A disk that the TPM opens for the systems of one policy key: the one that founded the node,
//! and the next version by the same keys; not one of another owner, and not one with another
//! command line.
//!
//! Secure Boot is off, so the firmware starts each of them, and only the TPM tells them apart.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use memchr::memmem;
use polis_image::signing::Keys;
use polis_qemu::args::Disk;
use polis_qemu::image::Flash;
use polis_qemu::{Config, Machine, disk};
use polis_tests::{Story, story};

use crate::esp;
use crate::keys::{copy_tpm, ordinary};
use crate::owner::Owner;
use crate::samples;
use crate::update::{bundle, next};
use crate::world::{BOOT, DISK_SIZE_SMALL, World, guru, home, says};

/// How long `polisctl node update` may take: it waits for two starts of a machine.
const UPDATE: &str = "8m";
/// A word of the kernel's command line, and the same with another value.
const WORD: &[u8] = b"quiet loglevel=4";
const OTHER_WORD: &[u8] = b"quiet loglevel=5";

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_disk_opens_after_an_update_by_the_same_keys_and_for_no_other_system)
        .takes(300)
        .one_of(samples::TRUST)];

fn a_disk_opens_after_an_update_by_the_same_keys_and_for_no_other_system() -> Result<()> {
    let world = World::new("signed-disk")?;
    let owner = Owner::new(&world.path("owner"))?;
    let (keys, others) = (Keys::generate()?, Keys::generate()?);
    let next = next()?;
    let config = Config {
        firmware: world.image.uefi(Flash::Plain, &world.path("flash"), "")?,
        disk: Some(world.signed_disk_of_size("disk-signed.img", &keys, DISK_SIZE_SMALL)?),
        fw_cfg: world.fw_cfg(&ordinary())?,
        forwards: owner.forwards.clone(),
        tpm: Some(world.path("tpm")),
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    says(&machine, "kind=authenticated")?;
    says(&machine, "keeper=TPM")?;
    owner.take(&founded.ca)?;

    // The next version, by the same keys: on trial, and after that.
    let update = bundle(&world, "signed.update", &next, &keys)?.display().to_string();
    owner.run_within(UPDATE, &["node", "update", &founded.node, &update, "--yes"])?;
    for start in ["on trial", "kept"] {
        machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
        let boot = machine.wait_for("boot", BOOT, |_| true)?;
        ensure!(boot.is("version", &next.version), "{start}: {boot}");
        let back = home(&mut machine)?;
        ensure!(back == founded, "{start}: {back:?}, before: {founded:?}");
        if start == "on trial" {
            machine.wait_for("update", BOOT, |event| {
                event.is("phase", "commit") && event.is("result", "done")
            })?;
            owner.run(&["node", "reboot", &founded.node, "--yes"])?;
        }
    }
    machine.kill();

    // The same kernel image and the same system, which another owner signed.
    let path = format!("EFI/Linux/polis-{}.efi", next.version);
    let own = kernel(&config.disk.as_ref().context("no disk")?.file, &path)?;
    let signer = others.image_signer()?;
    let foreign = world.signed_disk_of("disk-foreign.img", &next, signer, DISK_SIZE_SMALL)?;
    let foreign = kernel(&foreign.file, &path)?;
    refuses(&world, &config, "foreign", &path, &foreign, "another owner")?;
    // The own one with another command line, and with its signature.
    let mut changed = own.clone();
    let place = memmem::find(&changed, WORD).context("the command line has other words")?;
    changed[place..place + WORD.len()].copy_from_slice(OTHER_WORD);
    refuses(&world, &config, "changed", &path, &changed, "register 11")?;
    // The disk itself is as it was.
    ensure!(home(&mut world.boot(&config)?)? == founded, "the system of before");
    Ok(())
}

fn kernel(disk: &Path, path: &str) -> Result<Vec<u8>> {
    esp::bytes(disk, path)?.with_context(|| format!("{path} is not on {}", disk.display()))
}

/// Starts a copy of the machine with another kernel image: its TPM does not open the disk.
fn refuses(
    world: &World,
    config: &Config,
    name: &str,
    path: &str,
    kernel: &[u8],
    cause: &str,
) -> Result<()> {
    let (disk, tpm) = (config.disk.as_ref().context("no disk")?, config.tpm.as_ref());
    let file = world.path(&format!("disk-{name}.img"));
    disk::copy(&disk.file, &file)?;
    esp::write(&file, path, kernel)?;
    let state = copy_tpm(tpm.context("no TPM")?, world.path(&format!("tpm-{name}")))?;
    let disk = Disk { file: file.clone(), ..disk.clone() };
    let config = Config { disk: Some(disk), tpm: Some(state), ..config.clone() };
    let mut machine: Machine = world.boot(&config)?;
    let guru = guru(&mut machine, "0412").with_context(|| name.to_owned())?;
    ensure!(guru.is("unlock", "yes"), "{name}: the recovery key is not asked for: {guru}");
    ensure!(guru.text("cause").contains(cause), "{name}: `{cause}` is not the cause: {guru}");
    machine.kill();
    fs::remove_file(&file)?;
    Ok(())
}
