//! Installations: from a stick to a disk of the machine.
//!
//! The disk comes first in the order of the firmware, which starts the stick as long as the
//! disk does not start.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use polis_proto::v1::disk_selector::Transport;
use polis_proto::v1::installation::Wipe;
use polis_proto::v1::{DiskSelector, Installation, NodeParameters};
use polis_qemu::args::Disk;
use polis_qemu::cut::{Cut, Random};
use polis_qemu::image::Flash;
use polis_qemu::recording::Recording;
use polis_qemu::{Bus, Config, Event, Machine};
use polis_tests::{Sample, Story, cuts, seed, story};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use crate::esp;
use crate::table::partitions;
use crate::world::{BOOT, World, bootstrap, guru, home};

/// Size of the disk that is installed to.
const SIZE: u64 = 4 << 30;

/// Places of a power cut in an ordinary run, unless `POLIS_CUTS` says another number.
const FEW: u32 = 2;

/// Places with `POLIS_ALL`.
const ALL: u32 = 10;

/// The start of a disk, with its table and the first blocks of its ESP.
const START: u64 = (1 << 20) + (64 << 10);

/// The parameters on an ESP.
const PARAMETERS: &str = "polis/parameters.pb";

/// Each leaves no disk half installed.
const REFUSED: Sample = Sample { of: "install", drawn: 1 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_stick_installs_to_an_empty_disk_once_and_the_machine_starts_from_it).takes(150),
    story!(an_installation_to_a_disk_with_foreign_data_or_without_room_changes_nothing)
        .takes(90)
        .one_of(REFUSED),
    story!(an_installation_whose_power_is_cut_is_finished).takes(300).one_of(REFUSED),
];

fn a_stick_installs_to_an_empty_disk_once_and_the_machine_starts_from_it() -> Result<()> {
    let world = World::new("install")?;
    // Not even the word for the data of a node installs a second time.
    let parameters = parameters(Transport::Nvme, Wipe::Member);
    let stick = Disk { bus: Bus::Usb, ..world.disk(Some(&parameters.encode_to_vec()))? };
    let before = partitions(&stick.file)?;
    let target = target(&world, Bus::Nvme, SIZE)?;
    let mut machine = world.boot(&behind_firmware(&world, &target, &stick)?)?;
    let phases = installed(&mut machine)?;
    for phase in ["select", "write", "verify", "boot"] {
        let done = |event: &&Event| event.is("phase", phase) && event.is("result", "done");
        ensure!(phases.iter().any(|event| done(&event)), "{phase} is not done: {phases:?}");
    }
    let percents: Vec<&str> = phases.iter().filter_map(|event| event.get("percent")).collect();
    ensure!(percents.len() > 10, "the progress is not shown: {percents:?}");
    let founded = home(&mut machine)?;
    machine.kill();
    ensure!(partitions(&stick.file)? == before, "the table of the stick has changed");
    let used = partitions(&target.file)?;
    ensure!(used == ["POLIS-ESP", "POLIS-SYSTEM-A", "POLIS-SYSTEM-B", "POLIS-DATA"], "{used:?}");
    let kept = esp::bytes(&target.file, PARAMETERS)?.context("no parameters")?;
    let expected = NodeParameters { install: None, ..parameters };
    ensure!(NodeParameters::decode(&*kept)? == expected, "the installed parameters differ");

    // The stick stays in the machine, and firmware starts it: the node is left alone.
    let mut machine = world.boot(&behind_firmware(&world, &stick, &target)?)?;
    let present = machine.wait_for("install", BOOT, |event| event.is("result", "present"))?;
    ensure!(present.is("disk", "nvme0n1"), "another disk: {present}");
    machine.wait_for("off", BOOT, |off| off.is("reason", "poweroff"))?;
    drop(machine);

    let alone = Config { second_disk: None, ..behind_firmware(&world, &target, &stick)? };
    let again = home(&mut world.boot(&alone)?)?;
    ensure!(again == founded, "another node: {again:?}, {founded:?}");
    Ok(())
}

fn an_installation_to_a_disk_with_foreign_data_or_without_room_changes_nothing() -> Result<()> {
    let world = World::new("install-refused")?;
    let parameters = parameters(Transport::Nvme, Wipe::Unspecified);
    let stick = Disk { bus: Bus::Usb, ..world.disk(Some(&parameters.encode_to_vec()))? };

    let foreign = target(&world, Bus::Nvme, SIZE)?;
    let file = File::options().write(true).open(&foreign.file)?;
    // The superblock of an ext4 file system, as far as it is recognised, and some data.
    file.write_all_at(b"\x53\xef", 0x438)?;
    file.write_all_at(b"data of another system", 5 << 20)?;
    let before = hash(&foreign.file)?;
    let mut machine = world.boot(&behind_firmware(&world, &foreign, &stick)?)?;
    let refused = guru(&mut machine, "0432")?;
    for word in ["nvme0n1", "ext"] {
        ensure!(refused.text("cause").contains(word), "{word} is not named: {refused}");
    }
    ensure!(refused.text("next").contains("--install-wipe any-data"), "{refused}");
    machine.kill();
    ensure!(hash(&foreign.file)? == before, "the refused disk has changed");

    let small = target(&world, Bus::Nvme, 2 << 30)?;
    let before = hash(&small.file)?;
    let mut machine = world.boot(&behind_firmware(&world, &small, &stick)?)?;
    let refused = guru(&mut machine, "0431")?;
    for word in ["nvme0n1", "too small", "2147483648 bytes"] {
        ensure!(refused.text("cause").contains(word), "{word} is not named: {refused}");
    }
    machine.kill();
    ensure!(hash(&small.file)? == before, "the small disk has changed");
    Ok(())
}

fn an_installation_whose_power_is_cut_is_finished() -> Result<()> {
    let world = World::new("install-cut")?;
    let stick = Disk { bus: Bus::Usb, ..world.disk(None)? };
    let parameters = parameters(Transport::Virtio, Wipe::Unspecified).encode_to_vec();
    let target = target(&world, Bus::Virtio, SIZE)?;
    let log = world.path("disk.log");
    File::create(&log)?;
    // The installed disk finds the same parameters, and installs nothing.
    let config =
        Config { fw_cfg: world.fw_cfg(&parameters)?, ..behind_firmware(&world, &target, &stick)? };
    let mut machine = world.boot(&Config { recording: Some(log.clone()), ..config.clone() })?;
    let done = |event: &Event| event.is("phase", "boot") && event.is("result", "done");
    machine.wait_for("install", BOOT, done)?;
    // Waits for every write that is under way, so that the recording is whole.
    machine.qmp.stop()?;
    machine.kill();
    let recording = Recording::read(&mut File::open(&log)?, SIZE)?;
    let empty = world.empty_disk("disk-empty.img", SIZE)?.file;

    let delicate: Vec<Range<usize>> = {
        let at_an_end = |at: u64| !(START..=SIZE - (1 << 20)).contains(&at);
        let entries = recording.entries();
        let has = |window: &Range<usize>| entries[window.clone()].iter().any(|e| at_an_end(e.at));
        recording.windows().into_iter().filter(has).collect()
    };
    ensure!(delicate.len() > 4, "table and boot sector were hardly written: {delicate:?}");
    let seed = seed()?;
    fs::write(world.path("seed"), format!("{seed}\n"))?;
    let mut random = Random::new(seed);
    let places = cuts(FEW, ALL)?;
    for place in 1..=places {
        let among = match place % 2 {
            0 => 0..recording.entries().len(),
            _ => delicate[random.below(delicate.len())].clone(),
        };
        let cut = Cut::draw(&recording, &among, &mut random).context("no writes")?;
        let named = format!("POLIS_SEED={seed}, place {place} of {places}: {cut}");
        println!("{named}");
        cut.disk(&recording, &log, &empty, &target.file)?;
        finished(&mut world.boot(&config)?).context(named)?;
    }
    // Only a story that failed needs its recording.
    fs::remove_file(log)?;
    Ok(())
}

/// Waits until a machine is home, which installs before where its disk does not start.
fn finished(machine: &mut Machine) -> Result<()> {
    let first = machine.wait("`POLIS ready`, or the end of an installation", BOOT, |line| {
        line.event().filter(|event| ["ready", "off"].contains(&&*event.word))
    })?;
    let installs = machine.seen(|event| event.word == "install");
    if first.word == "ready" {
        ensure!(installs.is_empty(), "it installs and is a node: {installs:?}");
        println!("the cut disk was complete");
        return Ok(());
    }
    ensure!(first.is("reason", "reboot"), "it does not reboot: {first}");
    home(machine)?;
    println!("installed again");
    Ok(())
}

/// Waits for the end of an installation, and returns its lines.
fn installed(machine: &mut Machine) -> Result<Vec<Event>> {
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    Ok(machine.seen(|event| event.word == "install"))
}

/// Parameters that install to the one disk of this kind, and found a cluster.
fn parameters(transport: Transport, wipe: Wipe) -> NodeParameters {
    let disk = DiskSelector { transport: transport.into(), ..DiskSelector::default() };
    let install = Installation { disk: Some(disk), wipe: wipe.into(), id: vec![7; 16] };
    NodeParameters { install: Some(install), ..bootstrap() }
}

/// An empty disk.
fn target(world: &World, bus: Bus, size: u64) -> Result<Disk> {
    Ok(Disk { bus, ..world.empty_disk("disk-target.img", size)? })
}

/// A machine whose firmware starts from `first`, if it can, and else from `second`.
fn behind_firmware(world: &World, first: &Disk, second: &Disk) -> Result<Config> {
    let flash = world.path("flash");
    // The remains of another start there must not decide.
    if flash.exists() {
        fs::remove_dir_all(&flash)?;
    }
    Ok(Config {
        firmware: world.image.uefi(Flash::Plain, &flash, "")?,
        disk: Some(first.clone()),
        second_disk: Some(second.clone()),
        ..world.bare("")
    })
}

fn hash(disk: &Path) -> Result<Vec<u8>> {
    let mut hash = Sha256::new();
    std::io::copy(&mut File::open(disk)?, &mut hash)?;
    Ok(hash.finalize().to_vec())
}
