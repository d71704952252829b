//! Disks that a machine cannot live on: too small, absent, damaged.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpt::GptConfig;
use polis_image::program;
use polis_qemu::args::Disk;
use polis_qemu::{Config, disk};
use polis_tests::{Story, story, workspace};
use prost::Message as _;

use crate::world::{BOOT, World, bootstrap};

/// Where a file system of type erofs has its superblock.
const SUPERBLOCK: u64 = 1024;

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_disk_without_room_for_data_is_called_too_small),
    story!(a_machine_without_a_disk_stops_in_stage_1_and_says_so),
    story!(a_system_with_a_flipped_byte_in_its_superblock_is_refused_by_partition_and_block),
    story!(a_system_with_a_flipped_byte_in_a_program_is_refused_by_partition_and_block),
];

fn a_disk_without_room_for_data_is_called_too_small() -> Result<()> {
    let world = World::new("disk-too-small")?;
    let parts = world.manifest.sizes.esp_partition + world.manifest.sizes.system_partition;
    // The two tables and their alignment, and ten megabytes for data.
    let size = (parts + (12 << 20)).next_multiple_of(1 << 20);
    let config = Config {
        disk: Some(world.disk_of_size(size, None)?),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.is("stage", "storage"), "not about storage: {guru}");
    for word in ["free", "needed"] {
        ensure!(guru.text("cause").contains(word), "not called too small: {guru}");
    }
    Ok(())
}

fn a_machine_without_a_disk_stops_in_stage_1_and_says_so() -> Result<()> {
    let world = World::new("disk-absent")?;
    let mut machine = world.boot(&world.bare(""))?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    ensure!(guru.text("cause").contains("disk"), "the disk is not named: {guru}");
    Ok(())
}

fn a_system_with_a_flipped_byte_in_its_superblock_is_refused_by_partition_and_block() -> Result<()>
{
    let world = World::new("disk-flipped-superblock")?;
    let config = world.bootstrap_config("")?;
    let system = system(&config)?;
    disk::flip(file(&config)?, system + SUPERBLOCK)?;
    let mut machine = world.boot(&config)?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    names(&guru, 0)
}

fn a_system_with_a_flipped_byte_in_a_program_is_refused_by_partition_and_block() -> Result<()> {
    let world = World::new("disk-flipped-program")?;
    let config = world.bootstrap_config("")?;
    let place = first_byte(&world, "/usr/bin/node")?;
    disk::flip(file(&config)?, system(&config)? + place)?;
    let mut machine = world.boot(&config)?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    names(&guru, place / 4096)
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
    let table = GptConfig::new().open(file(config)?)?;
    let sector = table.logical_block_size().as_u64();
    let mut partitions = table.partitions().values();
    let system = partitions.find(|partition| partition.name == "POLIS-SYSTEM-A");
    Ok(system.context("no POLIS-SYSTEM-A")?.first_lba * sector)
}
