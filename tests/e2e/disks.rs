//! Disks that a machine cannot live on: too small, absent, damaged, one too many.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpt::GptConfig;
use polis_image::program;
use polis_qemu::args::Disk;
use polis_qemu::image::Flash;
use polis_qemu::{Bus, Config, disk};
use polis_tests::{Story, story, workspace};
use prost::Message as _;

use crate::table::partition;
use crate::world::{World, bootstrap, guru, home};

/// Where a file system of type erofs has its superblock.
const SUPERBLOCK: u64 = 1024;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_disk_without_room_for_data_is_called_too_small),
    story!(a_machine_without_a_disk_stops_in_stage_1_and_says_so),
    story!(of_two_disks_with_one_image_the_one_that_firmware_started_from_is_used).takes(120),
    story!(two_disks_that_nothing_tells_apart_are_named_and_left_alone).takes(30),
    story!(a_disk_that_never_answers_keeps_no_machine_from_its_own).takes(100),
    story!(a_system_with_a_flipped_byte_in_its_superblock_is_refused_by_partition_and_block),
    story!(a_system_with_a_flipped_byte_in_a_program_is_refused_by_partition_and_block),
];

fn a_disk_without_room_for_data_is_called_too_small() -> Result<()> {
    let world = World::new("disk-too-small")?;
    let sizes = &world.manifest.sizes;
    let parts = sizes.esp_partition + 2 * sizes.system_partition;
    // The two tables and their alignment, and ten megabytes for data.
    let size = (parts + (12 << 20)).next_multiple_of(1 << 20);
    let config = Config {
        disk: Some(world.disk_of_size(size, None)?),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        ..world.bare("")
    };
    let guru = guru(&mut world.boot(&world.past_stage_1(config)?)?, "0403")?;
    ensure!(guru.is("stage", "storage"), "not about storage: {guru}");
    for word in ["free", "needed"] {
        ensure!(guru.text("cause").contains(word), "not called too small: {guru}");
    }
    Ok(())
}

fn a_machine_without_a_disk_stops_in_stage_1_and_says_so() -> Result<()> {
    let world = World::new("disk-absent")?;
    let guru = guru(&mut world.boot(&world.bare(""))?, "0203")?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    ensure!(guru.text("cause").contains("disk"), "the disk is not named: {guru}");
    Ok(())
}

fn of_two_disks_with_one_image_the_one_that_firmware_started_from_is_used() -> Result<()> {
    let world = World::new("disks-alike")?;
    // The one on USB appears seconds after the other.
    let (usb, nvme) = two_disks(&world, Bus::Usb, Bus::Nvme)?;
    let image = table(&nvme)?;
    ensure!(table(&usb)? == image, "the disks were not made alike");
    home(&mut world.boot(&behind_firmware(&world, &usb, &nvme)?)?)?;
    ensure!(table(&nvme)? == image, "the disk that was not started from has changed");
    let used = table(&usb)?;
    ensure!(used.names == ["POLIS-ESP", "POLIS-SYSTEM-A", "POLIS-SYSTEM-B", "POLIS-DATA"]);
    let own = used.ids.iter().all(|id| !image.ids.contains(id));
    ensure!(own, "GUIDs of the image: {used:?}, {image:?}");

    // The other one is another node, and leaves the first disk as it is.
    home(&mut world.boot(&behind_firmware(&world, &nvme, &usb)?)?)?;
    ensure!(table(&usb)? == used, "the first disk has changed");
    ensure!(table(&nvme)?.names.len() == 4, "the second disk has no data partition");
    Ok(())
}

fn two_disks_that_nothing_tells_apart_are_named_and_left_alone() -> Result<()> {
    let world = World::new("disks-twins")?;
    let (one, other) = two_disks(&world, Bus::Ahci, Bus::Ahci)?;
    let image = table(&one)?;
    let guru = guru(&mut world.boot(&behind_firmware(&world, &one, &other)?)?, "0210")?;
    for disk in ["sda", "sdb"] {
        ensure!(guru.text("cause").contains(disk), "{disk} is not named: {guru}");
    }
    ensure!(table(&one)? == image && table(&other)? == image, "a table was written");
    Ok(())
}

/// The kernel's driver waits for that disk, too, for ever: so the right one has to prove itself,
/// by the data partition of an earlier boot.
fn a_disk_that_never_answers_keeps_no_machine_from_its_own() -> Result<()> {
    let world = World::new("disk-silent")?;
    let config = world.bootstrap_config("")?;
    let (machine, founded) = world.at_home(&config)?;
    machine.kill();

    let mut machine = world.boot(&Config { silent_disk: true, ..config })?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "another node: {back:?}, {founded:?}");
    machine.kill();
    Ok(())
}

/// Two disks with the same image.
fn two_disks(world: &World, one: Bus, other: Bus) -> Result<(Disk, Disk)> {
    let one = Disk { bus: one, ..world.disk(None)? };
    let copy = world.path("disk-second.img");
    std::fs::rename(&one.file, &copy)?;
    Ok((Disk { bus: one.bus, ..world.disk(None)? }, Disk { file: copy, bus: other, ..one }))
}

/// A machine whose firmware starts from `first`.
fn behind_firmware(world: &World, first: &Disk, second: &Disk) -> Result<Config> {
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    Ok(Config {
        firmware,
        disk: Some(first.clone()),
        second_disk: Some(second.clone()),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        ..world.bare("")
    })
}

/// A partition table: its names, and all its GUIDs.
#[derive(Debug, PartialEq, Eq)]
struct Table {
    names: Vec<String>,
    ids: Vec<String>,
}

fn table(disk: &Disk) -> Result<Table> {
    let table = GptConfig::new().open(&disk.file)?;
    let partitions = || table.partitions().values();
    let ids = partitions().map(|partition| partition.part_guid).chain([*table.guid()]);
    Ok(Table {
        names: partitions().map(|partition| partition.name.clone()).collect(),
        ids: ids.map(|id| id.to_string()).collect(),
    })
}

fn a_system_with_a_flipped_byte_in_its_superblock_is_refused_by_partition_and_block() -> Result<()>
{
    let world = World::new("disk-flipped-superblock")?;
    let config = world.bootstrap_config("")?;
    let system = system(&config)?;
    disk::flip(file(&config)?, system + SUPERBLOCK)?;
    let guru = guru(&mut world.boot(&config)?, "0206")?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    names(&guru, 0)
}

fn a_system_with_a_flipped_byte_in_a_program_is_refused_by_partition_and_block() -> Result<()> {
    let world = World::new("disk-flipped-program")?;
    let config = world.bootstrap_config("")?;
    let place = first_byte(&world, "/usr/bin/node")?;
    disk::flip(file(&config)?, system(&config)? + place)?;
    // The kernel reads this block to start the program.
    names(&guru(&mut world.boot(&config)?, "0304")?, place / 4096)
}

fn names(guru: &polis_qemu::Event, block: u64) -> Result<()> {
    let cause = guru.text("cause");
    ensure!(cause.contains("POLIS-SYSTEM-A"), "the partition is not named: {guru}");
    ensure!(cause.contains(&format!("block {block}")), "block {block} is not named: {guru}");
    Ok(())
}

/// Where a file of the system begins in its partition: the first byte of the
/// first extent, as the tools of its file system see it.
fn first_byte(world: &World, path: &str) -> Result<u64> {
    let payload = workspace().join("target/payload/root");
    let mut dump = program::payload(&payload, "usr/bin/dump.erofs");
    dump.arg("-e").arg(format!("--path={path}"));
    let text = program::run(dump.arg(world.manifest.path(&world.manifest.system)))?;
    // `   0:        0..  233376 |  233376 :   19382272..  19447808 |   65536`
    let text = String::from_utf8(text)?;
    let first = text.lines().find_map(|line| line.trim_start().strip_prefix("0:"));
    let physical = first.and_then(|line| line.rsplit_once(':')).map(|(_, physical)| physical);
    let start = physical.and_then(|physical| physical.split("..").next());
    start.with_context(|| format!("no extents in {text}"))?.trim().parse().context("bad extent")
}

fn file(config: &Config) -> Result<&Path> {
    let Disk { file, .. } = config.disk.as_ref().context("no disk")?;
    Ok(file)
}

/// Where POLIS-SYSTEM-A starts, in bytes.
fn system(config: &Config) -> Result<u64> {
    Ok(partition(file(config)?, "POLIS-SYSTEM-A")?.0)
}
