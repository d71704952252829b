//! Disks that a machine cannot live on: too small, absent, damaged.

use anyhow::{Context as _, Result, ensure};
use gpt::GptConfig;
use polis_qemu::args::Disk;
use polis_qemu::{Config, disk};
use prost::Message as _;

use crate::world::{BOOT, World, bootstrap};

/// Where a file system of type erofs has its superblock.
const SUPERBLOCK: u64 = 1024;

#[test]
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
    ensure!(guru.text("cause").contains("small"), "not called too small: {guru}");
    Ok(())
}

#[test]
fn a_machine_without_a_disk_stops_in_stage_1_and_says_so() -> Result<()> {
    let world = World::new("disk-absent")?;
    let mut machine = world.boot(&world.bare(""))?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    ensure!(guru.text("cause").contains("disk"), "the disk is not named: {guru}");
    Ok(())
}

#[test]
fn a_system_with_a_flipped_byte_in_its_superblock_is_refused_by_partition_and_block() -> Result<()>
{
    let world = World::new("disk-flipped-superblock")?;
    let config = world.founder("")?;
    let system = system(&config)?;
    disk::flip(file(&config)?, system + SUPERBLOCK)?;
    let mut machine = world.boot(&config)?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    ensure!(guru.is("stage", "initramfs"), "not in stage 1: {guru}");
    names(&guru, 0)
}

#[test]
fn a_system_with_a_flipped_byte_in_a_program_is_refused_by_partition_and_block() -> Result<()> {
    let world = World::new("disk-flipped-program")?;
    let config = world.founder("")?;
    let (file, system) = (file(&config)?, system(&config)?);
    // A string of the node that every boot reads; packed data keeps the first
    // occurrence of a string as it is.
    let place = disk::find(file, b"parameters.pb", system)?.context("no such string")?;
    disk::flip(file, place)?;
    let mut machine = world.boot(&config)?;
    let guru = machine.wait_for("guru", BOOT, |_| true)?;
    names(&guru, (place - system) / 4096)
}

fn names(guru: &polis_qemu::Event, block: u64) -> Result<()> {
    let cause = guru.text("cause");
    ensure!(cause.contains("POLIS-SYSTEM-A"), "the partition is not named: {guru}");
    ensure!(cause.contains(&format!("block {block}")), "block {block} is not named: {guru}");
    Ok(())
}

fn file(config: &Config) -> Result<&std::path::Path> {
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
