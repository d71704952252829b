//! Updates: a machine takes another system over the network, tries it, and keeps it or goes
//! back. All that its disk gets is recorded, and the power goes in the middle of it.
//!
//! The new system is the image of the next version; one that fails has a kernel that finds no
//! `init`, another one gets ready and kills etcd from then on, and a third one is no program that
//! firmware starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ed25519_dalek::SigningKey;
use memchr::memmem;
use polis_image::signing::Keys;
use polis_image::{Manifest, SIZE_DEFAULT};
use polis_qemu::image::Flash;
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Sample, Story, story};
use prost::Message as _;

use crate::owner::Owner;
use crate::update_cut::{Record, Versions};
use crate::world::{BOOT, Identity, NEXT, World, bootstrap, home};

/// How long `polisctl node update` may take: it waits for two starts of a machine.
const UPDATE: &str = "8m";
/// Words of the kernel's command line, and what makes the same kernel panic at once: it
/// finds no `init`, and starts the machine again after a second.
const WORDS: &[u8] = b"quiet loglevel=4 panic=30";
const PANICS: &[u8] = b"rdinit=/absent panic=1   ";
/// The fault that makes the same system kill etcd once it is ready.
const HARMS: &[u8] = b"polis.fault=flapping-etcd";
/// The loader passes on that the firmware refuses a kernel image.
pub(crate) const REFUSED_BY_LOADER: &str = "Error loading \\EFI\\Linux\\polis-";
/// Values of the field `Subsystem` in the header of a program.
const EFI_APPLICATION: [u8; 2] = [10, 0];
const WINDOWS_CONSOLE: [u8; 2] = [3, 0];
/// How long a system that harms etcd may take to give up: its two minutes, the countdown of the
/// guru meditation, and time to spare.
const GIVEN_UP: Duration = Duration::from_secs(300);

/// Each leads back from a system that does not serve.
const BACK: Sample = Sample { of: "update", drawn: 1 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_node_takes_another_system_and_goes_back_from_one_that_panics).takes(150),
    story!(a_system_that_is_ready_and_harms_etcd_does_not_stay).takes(250).one_of(BACK),
    story!(a_kernel_image_that_the_firmware_refuses_leads_back).takes(100).one_of(BACK),
];

fn a_node_takes_another_system_and_goes_back_from_one_that_panics() -> Result<()> {
    let world = World::new("update")?;
    let next = next()?;
    let keys = Keys::generate()?;
    let owner = Owner::new(&world.path("owner"))?;
    let mut config = signed(&world, &owner, &keys, SIZE_DEFAULT)?;
    let record = Record::begin(&world, &mut config)?;
    let mut machine = world.boot(&config)?;
    runs(&mut machine, "A", &world.manifest.version)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let node = founded.node.as_str();
    let update = |bundle: &Path| {
        let bundle = bundle.display().to_string();
        owner.run_within(UPDATE, &["node", "update", node, &bundle, "--yes"])
    };

    // Refused by the machine, and it runs on.
    let same = bundle(&world, "same.update", &world.manifest, &keys)?;
    refused(update(&same), "which is not newer than")?;
    refused(update(&foreign(&world, &same)?), "it was signed by")?;
    ensure!(machine.seen(|event| event.word == "update").is_empty(), "an update began");

    // A kernel that panics before `init`: the one before comes back, and says so.
    let broken = bundle(&world, "broken.update", &panicking(&world, &next)?, &keys)?;
    let inspected = owner.run(&["update", "inspect", &broken.display().to_string()])?;
    ensure!(inspected.contains(&next.version), "{inspected}");
    refused(update(&broken), "the new system did not stay")?;
    let written = machine.wait_for("update", BOOT, |event| event.is("phase", "verify"))?;
    ensure!(written.is("slot", "B") && written.is("version", &next.version), "{written}");
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    machine.wait_for_text("Kernel panic", BOOT)?;
    runs(&mut machine, "A", &world.manifest.version)?;
    let left = machine.wait_for("update", BOOT, |event| event.is("phase", "rollback"))?;
    ensure!(left.is("slot", "B") && left.is("version", &next.version), "{left}");
    let back = home(&mut machine)?;
    ensure!(back == founded, "after going back: {back:?}, before: {founded:?}");
    let status = owner.document(&["node", "status", node])?;
    let other = format!("{} in slot B, failed", next.version);
    ensure!(status["other_system"] == *other && status["slot"] == "A", "{status}");

    // The same version, whole.
    let good = bundle(&world, "good.update", &next, &keys)?;
    let began = record.length()?;
    let said = update(&good)?;
    ensure!(said.contains(&format!("runs version {} in slot B", next.version)), "{said}");
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    runs(&mut machine, "B", &next.version)?;
    let after = home(&mut machine)?;
    ensure!(after == founded, "after the update: {after:?}, before: {founded:?}");
    machine.wait_for("update", BOOT, |event| {
        event.is("phase", "commit") && event.is("result", "done") && event.is("slot", "B")
    })?;
    let kept = record.length()?;
    let other = format!("{} in slot A, good", world.manifest.version);
    let status = owner.document(&["node", "status", node])?;
    ensure!(status["other_system"] == *other && status["trial"] != true, "{status}");

    // It stays: the next start is not a trial.
    owner.run(&["node", "reboot", node, "--yes"])?;
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    runs(&mut machine, "B", &next.version)?;
    ensure!(home(&mut machine)? == founded, "after a reboot");
    owner.run(&["cluster", "wait"])?;
    let described = owner.document(&["node", "describe", node])?;
    ensure!(described["other_system"] == *other && described["slot"] == "B", "{described}");

    // Wherever the power goes meanwhile, one of the two is home.
    let versions = Versions { old: &world.manifest.version, new: &next.version };
    record.end(machine, founded, [began, kept])?.survives(&world, &config, &versions)
}

fn a_system_that_is_ready_and_harms_etcd_does_not_stay() -> Result<()> {
    let world = World::new("update_harms")?;
    let keys = Keys::generate()?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = signed(&world, &owner, &keys, SIZE_DEFAULT)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let harm = Harm { words: HARMS, cause: "etcd", within: GIVEN_UP };
    does_not_stay(&world, &owner, &mut machine, &founded, &next()?, &keys, &harm)?;
    owner.run(&["cluster", "wait"])?;
    Ok(())
}

/// How a system does harm once it is ready.
pub(crate) struct Harm<'a> {
    /// Its words on the command line, in the place of [`WORDS`].
    pub(crate) words: &'a [u8],
    /// What its cause names.
    pub(crate) cause: &'a str,
    /// How long it may take to give up.
    pub(crate) within: Duration,
}

/// Installs `next` with a harm: it gets ready, gives up with the cause, and the system before
/// is home again by itself.
pub(crate) fn does_not_stay(
    world: &World,
    owner: &Owner,
    machine: &mut Machine,
    founded: &Identity,
    next: &Manifest,
    keys: &Keys,
    harm: &Harm<'_>,
) -> Result<()> {
    let node = founded.node.as_str();
    let uki = with_words(world, next, harm.words)?;
    let harmful = Manifest { uki, system: next.path(&next.system), ..next.clone() };
    let harmful = bundle(world, "harmful.update", &harmful, keys)?.display().to_string();
    owner.run_within(UPDATE, &["node", "update", node, &harmful, "--no-reboot", "--yes"])?;
    owner.run(&["node", "reboot", node, "--yes"])?;
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    runs(machine, "B", &next.version)?;
    // It is ready, and it is not kept.
    home(machine)?;
    let failed = machine.wait_for("update", harm.within, |event| {
        event.is("phase", "commit") && !event.is("result", "started")
    })?;
    let cause = failed.get("cause").unwrap_or_default();
    ensure!(failed.is("result", "failed") && cause.contains(harm.cause), "{failed}");
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.get("code").is_some_and(|code| code.contains("0311")), "{guru}");
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    runs(machine, "A", &world.manifest.version)?;
    let left = machine.wait_for("update", BOOT, |event| event.is("phase", "rollback"))?;
    ensure!(left.get("cause").is_some_and(|cause| cause.contains("0311")), "{left}");
    ensure!(home(machine)? == *founded, "after going back");
    Ok(())
}

/// Without Secure Boot, on firmware that has a shell behind the disk in its list of options.
fn a_kernel_image_that_the_firmware_refuses_leads_back() -> Result<()> {
    let world = World::new("update_refused")?;
    let next = next()?;
    let keys = Keys::generate()?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = signed(&world, &owner, &keys, SIZE_DEFAULT)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let other = with_kernel(&world, &next, for_another_system(&world, &next)?)?;
    let other = bundle(&world, "refused.update", &other, &keys)?;
    leads_back(&world, &owner, &mut machine, &founded, &other)
}

/// A machine with firmware and a disk of `size` bytes that takes bundles of these keys.
pub(crate) fn signed(world: &World, owner: &Owner, keys: &Keys, size: u64) -> Result<Config> {
    Ok(Config {
        firmware: world.image.uefi(Flash::Plain, &world.path("flash"), "")?,
        disk: Some(world.signed_disk_of_size("disk-signed.img", keys, size)?),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        forwards: owner.forwards.clone(),
        ..world.bare("")
    })
}

/// Sends a bundle whose kernel image the firmware refuses to start: the machine is home again by
/// itself, with the system before, and says why.
pub(crate) fn leads_back(
    world: &World,
    owner: &Owner,
    machine: &mut Machine,
    founded: &Identity,
    bundle: &Path,
) -> Result<()> {
    const CAUSE: &str = "the firmware refused its kernel image";
    let file = bundle.display().to_string();
    let update = ["node", "update", &founded.node, &file, "--yes"];
    refused(owner.run_within(UPDATE, &update), CAUSE)?;
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    machine.wait_for_text(REFUSED_BY_LOADER, BOOT)?;
    runs(machine, "A", &world.manifest.version)?;
    let left = machine.wait_for("update", BOOT, |event| event.is("phase", "rollback"))?;
    ensure!(left.is("slot", "B") && left.is("cause", CAUSE), "{left}");
    let back = home(machine)?;
    ensure!(back == *founded, "after going back: {back:?}, before: {founded:?}");
    Ok(())
}

/// The image of the next version.
pub(crate) fn next() -> Result<Manifest> {
    named(NEXT)
}

/// The image that a variable names.
pub(crate) fn named(variable: &str) -> Result<Manifest> {
    let folder = std::env::var_os(variable)
        .with_context(|| format!("{variable} names no image; use `cargo xtask test e2e`"))?;
    Ok(Manifest::load(Path::new(&folder))?)
}

/// Waits until a system is started, and compares which.
fn runs(machine: &mut Machine, slot: &str, version: &str) -> Result<Event> {
    let boot = machine.wait_for("boot", BOOT, |_| true)?;
    ensure!(
        boot.is("slot", slot) && boot.is("version", version),
        "{boot}, not {version} in {slot}"
    );
    Ok(boot)
}

/// Checks why an update was refused.
pub(crate) fn refused(outcome: Result<String>, why: &str) -> Result<()> {
    let error = format!("{:#}", outcome.err().context("it was taken")?);
    ensure!(error.contains(why), "not {why:?}: {error}");
    Ok(())
}

/// The bundle of an image, signed by its owner.
pub(crate) fn bundle(world: &World, name: &str, image: &Manifest, keys: &Keys) -> Result<PathBuf> {
    let file = world.path(name);
    polis_image::bundle(image, &keys.image_signer()?, &keys.release_key()?, &file)?;
    Ok(file)
}

/// The bundle that another key has signed: the signature is made anew, and nothing else.
fn foreign(world: &World, bundle: &Path) -> Result<PathBuf> {
    use ed25519_dalek::Signer as _;
    let mut bytes = fs::read(bundle)?;
    let key = SigningKey::from_bytes(&[5; 32]);
    // Magic, key, signature, length of the manifest, manifest: `docs/updates.md`.
    let length: [u8; 4] = bytes[112..116].try_into()?;
    let end = 116 + usize::try_from(u32::from_le_bytes(length))?;
    let signed = [&bytes[..16], &bytes[112..end]].concat();
    bytes[16..48].copy_from_slice(key.verifying_key().as_bytes());
    bytes[48..112].copy_from_slice(&key.sign(&signed).to_bytes());
    let file = world.path("foreign.update");
    fs::write(&file, bytes)?;
    Ok(file)
}

/// The image with a kernel that panics before `init`.
pub(crate) fn panicking(world: &World, image: &Manifest) -> Result<Manifest> {
    with_kernel(world, image, with_words(world, image, PANICS)?)
}

/// The image with another kernel image, by its absolute path. It never opens its system, so it
/// gets none that is worth sending.
pub(crate) fn with_kernel(world: &World, image: &Manifest, uki: PathBuf) -> Result<Manifest> {
    let system = std::path::absolute(world.path("none.img"))?;
    fs::write(&system, [0; 4096])?;
    // Absolute paths count as they are.
    Ok(Manifest { uki, system, ..image.clone() })
}

/// The kernel image of an image as a program for another operating system: the loader lists it,
/// and firmware does not load it.
fn for_another_system(world: &World, image: &Manifest) -> Result<PathBuf> {
    let mut kernel = fs::read(image.path(&image.uki))?;
    // The PE signature, and from there on the field `Subsystem` of the optional header.
    let start: [u8; 4] = kernel[0x3c..0x40].try_into()?;
    let place = usize::try_from(u32::from_le_bytes(start))? + 24 + 68;
    ensure!(kernel[place..place + 2] == EFI_APPLICATION, "it is no program for UEFI");
    kernel[place..place + 2].copy_from_slice(&WINDOWS_CONSOLE);
    let uki = std::path::absolute(world.path("other-system.efi"))?;
    fs::write(&uki, kernel)?;
    Ok(uki)
}

/// The kernel image of an image with other words on its command line, by its absolute path.
fn with_words(world: &World, image: &Manifest, words: &[u8]) -> Result<PathBuf> {
    let mut kernel = fs::read(image.path(&image.uki))?;
    let place = memmem::find(&kernel, WORDS).context("the command line has other words")?;
    ensure!(WORDS.len() == words.len(), "the words have another length");
    kernel[place..place + WORDS.len()].copy_from_slice(words);
    let uki = std::path::absolute(world.path("other-words.efi"))?;
    fs::write(&uki, kernel)?;
    Ok(uki)
}
