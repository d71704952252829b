//! The disk that a machine runs from, mirrored on another one: pulled, alone, old, replaced.

use anyhow::{Result, ensure};
use polis_proto::v1::{DiskSelector, NodeParameters};
use polis_qemu::args::Disk;
use polis_qemu::image::Flash;
use polis_qemu::{Config, Event, Machine};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::samples;
use crate::storage::{
    COUNT, Kind, acknowledged, count_and_cut, home_and_counting, last_counted, parameters,
};
use crate::table::partitions;
use crate::world::{BOOT, DISK_SIZE_SMALL, SOON, World, guru, this_boot};

/// The kind of the data: the mirror lies below the encryption.
const KIND: Kind = Kind::Encrypted;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(of_two_mirrored_disks_either_alone_has_every_acknowledged_write)
        .takes(320)
        .one_of(samples::DISKS)];

fn of_two_mirrored_disks_either_alone_has_every_acknowledged_write() -> Result<()> {
    let world = World::new("mirror")?;
    let image = world.disk_of_size(DISK_SIZE_SMALL, None)?;
    let first = Disk { file: world.path("disk-first.img"), ..image.clone() };
    std::fs::rename(&image.file, &first.file)?;
    let second = world.empty_disk("disk-second.img", DISK_SIZE_SMALL)?;
    let both = config(&world, &first, Some(&second))?;

    // The first boot makes the mirror, and fills the other disk.
    let mut machine = world.boot(&both)?;
    home_and_counting(&mut machine, KIND)?;
    filled(&mut machine)?;
    let names = partitions(&second.file)?;
    ensure!(names.len() == 5 && names[3] == "POLIS-MIRROR", "{names:?}");

    // A disk is pulled while the node counts: it goes on with the other one.
    machine.qmp.pull("second")?;
    let degraded = mirror(&mut machine, "degraded")?;
    ensure!(degraded.is("disks", "vda"), "another disk is left: {degraded}");
    let last = counted(machine)?;

    // That one starts alone, and comes back with every acknowledged write.
    let mut machine = world.boot(&config(&world, &first, None)?)?;
    let last = comes_back(&mut machine, last)?;
    machine.kill();

    // The pulled one is old.
    let mut machine = world.boot(&config(&world, &second, None)?)?;
    guru(&mut machine, "0425")?;
    machine.kill();

    // Firmware starts the old one first: the machine turns to the other one, and fills it.
    let mut machine = world.boot(&config(&world, &second, Some(&first))?)?;
    machine.wait_for_text("the machine starts again, from", BOOT)?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    comes_back(&mut machine, last)?;
    filled(&mut machine)?;

    // Now the disk is pulled that the machine runs from.
    machine.qmp.pull("second")?;
    machine.wait_for_text("the machine was started from the lost disk", SOON)?;
    let degraded = mirror(&mut machine, "degraded")?;
    ensure!(degraded.is("disks", "vda"), "another disk is left: {degraded}");
    let last = counted(machine)?;

    // The other one starts; an empty disk is pushed in for the lost one.
    let mut machine = world.boot(&config(&world, &second, None)?)?;
    let last = comes_back(&mut machine, last)?;
    let third = world.empty_disk("disk-third.img", DISK_SIZE_SMALL)?;
    machine.qmp.push("second", &third.file, "polis-third")?;
    filled(&mut machine)?;
    let last = counted(machine)?.max(last);

    let mut machine = world.boot(&config(&world, &third, None)?)?;
    comes_back(&mut machine, last)?;
    machine.kill();
    Ok(())
}

/// A machine with these disks, which firmware tries in this order.
fn config(world: &World, first: &Disk, second: Option<&Disk>) -> Result<Config> {
    // Each order of disks has the same firmware, which knows the last use.
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), COUNT)?;
    let disk = DiskSelector { size_min: 1 << 30, ..DiskSelector::default() };
    let parameters = NodeParameters { mirror: Some(disk), ..parameters(KIND) };
    Ok(Config {
        firmware,
        disk: Some(first.clone()),
        second_disk: second.cloned(),
        bays: true,
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..world.bare("")
    })
}

/// Waits for this state of the mirror, which may have come before.
fn mirror(machine: &mut Machine, state: &str) -> Result<Event> {
    let wanted = |event: &Event| event.word == "mirror" && event.is("state", state);
    let last = this_boot(machine).into_iter().rev().find(|event| event.word == "mirror");
    match last.filter(wanted) {
        Some(event) => Ok(event),
        None => Ok(machine.wait_for("mirror", BOOT, wanted)?),
    }
}

/// Waits until a disk was filled, in this boot, and the mirror is whole.
fn filled(machine: &mut Machine) -> Result<()> {
    mirror(machine, "whole")?;
    let filling = |event: &Event| event.word == "mirror" && event.is("state", "filling");
    ensure!(this_boot(machine).iter().any(filling), "no disk was filled");
    Ok(())
}

/// Has it count on, and cuts the power.
fn counted(mut machine: Machine) -> Result<u64> {
    let last = last_counted(&machine)?;
    acknowledged(&mut machine, last + 5)?;
    count_and_cut(machine, std::time::Duration::from_secs(2))
}

/// Waits until it is home with all that was acknowledged. Returns what is there.
fn comes_back(machine: &mut Machine, last: u64) -> Result<u64> {
    let found = home_and_counting(machine, KIND)?;
    ensure!(found >= last, "{last} was acknowledged, and {found} is there");
    Ok(found)
}
