//! Disks that are changed, full, broken, or somebody else's.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::args::DiskFault;
use polis_qemu::{Config, disk};
use polis_tests::{Sample, Story, skip, story};
use sha2::{Digest as _, Sha256};

use crate::storage::{
    COUNT, Kind, acknowledged, bootstrap_config, bootstrap_config_small, count_and_cut, data, file,
    home_and_counting, last_counted, number, search,
};
use crate::world::{BOOT, SOON, World, guru};

/// How the content of the first two pages of a bbolt file begins: its magic number,
/// the version of the format, the size of a page.
const DATABASE: [u8; 12] = [0xed, 0xda, 0x0c, 0xed, 2, 0, 0, 0, 0, 0x10, 0, 0];

/// Where a LUKS2 header of the usual size ends, and the integrity device begins.
const LUKS_SIZE: u64 = 16 << 20;

/// Each is a fault of the disk under a node that runs.
const FAULTS: Sample = Sample { of: "storage_faults", drawn: 2 };

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_byte_that_was_changed_on_an_authenticated_disk_is_named_by_device_and_sector)
        .takes(90)
        .one_of(FAULTS),
    story!(a_full_disk_is_reported_and_no_acknowledged_write_is_lost).takes(80).one_of(FAULTS),
    story!(a_failed_write_is_reported_and_the_next_boot_has_acknowledged_writes)
        .takes(70)
        .one_of(FAULTS),
    story!(a_disk_that_stops_answering_is_named_and_prevents_no_reboot).takes(250).one_of(FAULTS),
    story!(an_ext4_in_the_free_space_and_in_the_data_partition_is_left_alone),
    story!(a_foreign_luks_header_is_left_alone),
];

fn a_byte_that_was_changed_on_an_authenticated_disk_is_named_by_device_and_sector() -> Result<()> {
    let world = World::new("storage-changed")?;
    let config = bootstrap_config_small(&world, Kind::Authenticated, COUNT)?;
    let config = world.past_stage_1(config)?;
    let mut machine = world.boot(&config)?;
    home_and_counting(&mut machine, Kind::Authenticated)?;
    acknowledged(&mut machine, 5)?;
    machine.kill();

    // The first sector holds the superblock of XFS, which every mount reads.
    let image = file(&config)?;
    let (start, _) = data(&image)?;
    disk::flip(&image, start + LUKS_SIZE + first_sector(&image, start + LUKS_SIZE)? + 99)?;
    let mut machine = world.boot(&config)?;
    let guru = guru(&mut machine, "0409")?;
    for word in ["changed", "/dev/vda4", "sector 0"] {
        ensure!(guru.text("cause").contains(word), "`{word}` is not in the cause: {guru}");
    }
    Ok(())
}

/// Where the first sector of data is on an integrity device that begins at `start`,
/// as the kernel divides it: superblock, journal, tags of the first area, data.
fn first_sector(image: &Path, start: u64) -> Result<u64> {
    let mut superblock = [0; 512];
    File::open(image)?.read_exact_at(&mut superblock, start)?;
    ensure!(superblock.starts_with(b"integrt\0"), "no integrity device");
    let interleave = u32::from(superblock[9]);
    let tag = u64::from(u16::from_le_bytes([superblock[10], superblock[11]]));
    let sections = u64::from(u32::from_le_bytes(superblock[12..16].try_into()?));
    let block = 1_u64 << superblock[28];
    // An entry has its sector, the last 8 bytes of each sector of its block, its tag.
    let entry = (8 + 8 * block + tag).next_multiple_of(8);
    let entries = (512 - 8) / entry * 8;
    let journal = sections * (entries * block + 8);
    let tags = ((1 << interleave) / block * tag).div_ceil(512).next_multiple_of(8);
    Ok((8 + journal + tags) * 512)
}

fn a_full_disk_is_reported_and_no_acknowledged_write_is_lost() -> Result<()> {
    let world = World::new("storage-full")?;
    let config = bootstrap_config(&world, Kind::Insecure, "polis.exercise=fill")?;
    let mut machine = world.boot(&config)?;
    home_and_counting(&mut machine, Kind::Insecure)?;
    let full = machine.wait_for("storage", BOOT, |event| event.is("state", "full"))?;
    ensure!(number(&full, "free")? < 32 << 20, "not full: {full}");
    machine.wait_for("exercise", BOOT, |event| event.get("emptied").is_some())?;
    // There may be room before the exercise has reported it.
    machine.wait_until_text("POLIS storage state=room", SOON)?;
    // The cause is gone: it goes on by itself.
    let counted = last_counted(&machine)?;
    acknowledged(&mut machine, counted + 10)?;
    let last = count_and_cut(machine, std::time::Duration::ZERO)?;

    let mut machine = world.boot(&config)?;
    let found = home_and_counting(&mut machine, Kind::Insecure)?;
    ensure!(found >= last, "{last} was acknowledged, and {found} is there");
    Ok(())
}

fn a_failed_write_is_reported_and_the_next_boot_has_acknowledged_writes() -> Result<()> {
    let world = World::new("storage-write-error")?;
    let config =
        bootstrap_config(&world, Kind::Insecure, &format!("{COUNT} polis.guru-countdown=1"))?;
    let mut machine = world.boot(&config)?;
    home_and_counting(&mut machine, Kind::Insecure)?;
    acknowledged(&mut machine, 20)?;
    let last = count_and_cut(machine, std::time::Duration::ZERO)?;

    // Its log may move when etcd starts; the two first pages of its database stay
    // where they are, and each commit writes one of them.
    let image = file(&config)?;
    let pages = search(&image, &DATABASE)?;
    let [first, second] = pages[..] else { bail!("etcd's database begins at {pages:?}") };
    ensure!(second - first == 4096, "the pages are not neighbours: {first} and {second}");
    let sector = first / 512;
    let broken = Config { disk_fault: Some(DiskFault::Write { sector }), ..config };
    let mut machine = world.boot(&broken)?;
    let guru = guru(&mut machine, "0419")?;
    for word in ["fails writes", "vda", "sector"] {
        ensure!(guru.text("cause").contains(word), "`{word}` is not in the cause: {guru}");
    }
    let last = last.max(last_counted(&machine)?);
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    // The disk failed once: the same machine joins without help.
    machine.wait_for("boot", BOOT, |_| true)?;
    let found = home_and_counting(&mut machine, Kind::Insecure)?;
    ensure!(found >= last, "{last} was acknowledged, and {found} is there");
    acknowledged(&mut machine, found + 5)?;
    Ok(())
}

fn an_ext4_in_the_free_space_and_in_the_data_partition_is_left_alone() -> Result<()> {
    let world = World::new("storage-ext4")?;
    let folder = world.path("content");
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("letter"), "of somebody")?;
    let ext4 = world.path("ext4.img");
    File::create(&ext4)?.set_len(64 << 20)?;
    #[expect(clippy::disallowed_methods, reason = "a story may start what the host has")]
    let mut make = std::process::Command::new("mke2fs");
    match make.args(["-q", "-t", "ext4", "-d"]).arg(&folder).arg(&ext4).status() {
        Ok(made) => ensure!(made.success(), "mke2fs ended with {made}"),
        Err(_absent) => return skip("this host has no mke2fs"),
    }
    let bytes = std::fs::read(&ext4)?;
    std::fs::remove_file(&ext4)?;
    refused(&world, &bytes[..1 << 20], "ext")
}

fn a_foreign_luks_header_is_left_alone() -> Result<()> {
    let world = World::new("storage-foreign-luks")?;
    let mut header = vec![0; 1 << 20];
    header[..8].copy_from_slice(b"LUKS\xba\xbe\x00\x01");
    header[8..11].copy_from_slice(b"aes");
    refused(&world, &header, "LUKS")
}

/// Puts `bytes` where a data partition would begin, then where one does begin.
fn refused(world: &World, bytes: &[u8], name: &str) -> Result<()> {
    let config = world.past_stage_1(bootstrap_config(world, Kind::Authenticated, "")?)?;
    let image = file(&config)?;
    // Where the free space begins, at the next MiB.
    let system = gpt::GptConfig::new().open(&image)?;
    let end = system.partitions().values().map(|partition| partition.last_lba).max();
    let start = ((end.context("an empty table")? + 1) * 512).next_multiple_of(1 << 20);
    put(&image, start, bytes)?;
    let before = digest(&image, start)?;
    let mut machine = world.boot(&config)?;
    let occupied = guru(&mut machine, "0404")?;
    ensure!(occupied.text("cause").contains(name), "{name} is not named: {occupied}");
    ensure!(occupied.text("next").contains("wipe"), "the help is missing: {occupied}");
    machine.kill();
    ensure!(digest(&image, start)? == before, "the free space was touched");

    // A partition of ours that somebody has used for something else, on a disk of its own.
    let config = world.bootstrap_config("")?;
    let (machine, _identity) = world.at_home(&config)?;
    machine.kill();
    let (start, _) = data(&image)?;
    put(&image, start, bytes)?;
    let before = digest(&image, start)?;
    let mut machine = world.boot(&world.past_stage_1(config)?)?;
    let foreign = guru(&mut machine, "0405")?;
    ensure!(foreign.text("cause").contains(name), "{name} is not named: {foreign}");
    ensure!(
        foreign.text("next").contains("wipe the first 16 MiB of the partition and delete it"),
        "the help is missing: {foreign}"
    );
    machine.kill();
    ensure!(digest(&image, start)? == before, "the data partition was touched");
    Ok(())
}

fn put(image: &Path, start: u64, bytes: &[u8]) -> Result<()> {
    Ok(File::options().write(true).open(image)?.write_all_at(bytes, start)?)
}

/// The flush of a hung disk stops everything that must be durable, and shows in no count of the
/// kernel's. The ESP is on the same disk, so `init` cannot write there, either.
fn a_disk_that_stops_answering_is_named_and_prevents_no_reboot() -> Result<()> {
    let world = World::new("storage-hangs")?;
    let words = format!("{COUNT} polis.disk-deadline=60 polis.guru-countdown=1");
    let config = bootstrap_config(&world, Kind::Insecure, &words)?;
    let config = Config { disk_fault: Some(DiskFault::Flush), ..config };
    let mut machine = world.boot(&config)?;
    let found = home_and_counting(&mut machine, Kind::Insecure)?;

    machine.qmp.hold_flushes(true)?;
    let stalled = machine.wait_for("storage", SOON, |event| event.is("state", "stalled"))?;
    ensure!(stalled.text("seconds") == "15", "{stalled}");
    machine.qmp.hold_flushes(false)?;
    machine.wait_for("storage", SOON, |event| event.is("state", "answers"))?;
    // It was slow, and nothing else: the node goes on.
    acknowledged(&mut machine, found + 5)?;
    ensure!(machine.seen(|event| event.word == "guru").is_empty(), "a guru meditation");

    machine.qmp.hold_flushes(true)?;
    let last = last_counted(&machine)?;
    let guru = guru(&mut machine, "0419")?;
    ensure!(guru.text("cause").contains("does not answer"), "{guru}");
    // No operator acts: the machine shows the failure, and reboots ten times as late as usual.
    machine.wait_until_text("the disk does not answer: rebooting in 10 s", BOOT)?;
    machine.wait_for("off", BOOT, |off| off.is("reason", "reboot"))?;
    machine.kill();

    let config = Config { disk_fault: None, ..config };
    let mut machine = world.boot(&config)?;
    let found = home_and_counting(&mut machine, Kind::Insecure)?;
    ensure!(found >= last, "{last} was acknowledged, and {found} is there");
    Ok(())
}

/// The content of the 64 MiB from `start` on.
fn digest(image: &Path, start: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; 64 << 20];
    File::open(image)?.read_exact_at(&mut bytes, start)?;
    Ok(Sha256::digest(&bytes).to_vec())
}
