//! A further disk of a machine, taken for a volume.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use anyhow::{Result, ensure};
use polis_proto::v1::{DiskSelector, DiskVolume, NodeParameters};
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::samples;
use crate::storage::{self, Kind};
use crate::table::partitions;
use crate::world::{BOOT, DISK_SIZE_SMALL, SOON, World, comes, home};

/// Size of the further disk.
const SIZE: u64 = 1 << 30;

/// Where its partition begins.
const PARTITION: u64 = 1 << 20;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_further_disk_becomes_a_volume_that_only_its_own_disk_ever_has_again)
        .takes(140)
        .one_of(samples::DISKS)];

fn a_further_disk_becomes_a_volume_that_only_its_own_disk_ever_has_again() -> Result<()> {
    let world = World::new("further-disk")?;
    let second = world.empty_disk("disk-further.img", SIZE)?;
    let founding = Config {
        disk: Some(world.disk_of_size(DISK_SIZE_SMALL, None)?),
        second_disk: Some(second.clone()),
        fw_cfg: world.fw_cfg(&parameters().encode_to_vec())?,
        ..world.bare("")
    };
    let mut machine = world.boot(&founding)?;
    let node = home(&mut machine)?;
    let ready = volume(&mut machine, "ready")?;
    ensure!(ready.is("kind", "authenticated"), "protected otherwise: {ready}");
    off(machine)?;
    let names = partitions(&second.file)?;
    ensure!(names == ["POLIS-VOLUME"], "{names:?}");
    let mut start = [0; 6];
    File::open(&second.file)?.read_exact_at(&mut start, PARTITION)?;
    ensure!(start == *b"LUKS\xba\xbe", "the volume is not encrypted: it starts with {start:?}");

    // Without its disk the node is whole, and says what is missing.
    let alone = Config { second_disk: None, ..founding.clone() };
    let mut machine = world.boot(&alone)?;
    ensure!(home(&mut machine)? == node, "another node");
    let failed = volume(&mut machine, "failed")?;
    ensure!(failed.text("cause").contains("put its disk back"), "{failed}");
    machine.kill();

    // An empty disk that fits the selector does not take its place.
    let empty = world.empty_disk("disk-empty.img", SIZE)?;
    let mut machine =
        world.boot(&Config { second_disk: Some(empty.clone()), ..founding.clone() })?;
    ensure!(home(&mut machine)? == node, "another node");
    let failed = volume(&mut machine, "failed")?;
    ensure!(failed.text("cause").contains("put its disk back"), "{failed}");
    machine.kill();
    ensure!(fs::metadata(&empty.file)?.blocks() == 0, "the empty disk was taken");

    // Its own disk is opened again, by the record of the node alone.
    let silent = NodeParameters { volumes: Vec::new(), ..parameters() };
    let fw_cfg = world.fw_cfg(&silent.encode_to_vec())?;
    let mut machine = world.boot(&Config { fw_cfg, ..founding })?;
    ensure!(home(&mut machine)? == node, "another node");
    volume(&mut machine, "ready")?;
    off(machine)
}

/// Parameters of a cluster with protected disks, and of a volume on the further disk.
fn parameters() -> NodeParameters {
    NodeParameters { volumes: second_disk("db"), ..storage::parameters(Kind::Authenticated) }
}

/// One volume, on the second disk of the machine.
pub(crate) fn second_disk(name: &str) -> Vec<DiskVolume> {
    let serial = "polis-second".to_owned();
    let disk = Some(DiskSelector { serial, ..DiskSelector::default() });
    vec![DiskVolume { name: name.to_owned(), disk }]
}

/// Waits for this state of the volume, which may have come before the node was ready.
fn volume(machine: &mut Machine, state: &str) -> Result<Event> {
    comes(machine, "volume", BOOT, |event| event.is("name", "db") && event.is("state", state))
}

/// Ends the machine in good order: the volume is unmounted before the partition with its key.
fn off(mut machine: Machine) -> Result<()> {
    machine.qmp.power_button()?;
    machine.wait_for("off", SOON, |off| off.is("reason", "poweroff"))?;
    let lines = machine.lines();
    let in_use = lines.iter().find(|line| line.text.contains("it is in use"));
    ensure!(in_use.is_none(), "not unmounted: {in_use:?}");
    Ok(())
}
