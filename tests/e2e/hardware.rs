//! Hardware, as far as QEMU has it: ready on each.
//!
//! Every kind of disk, card, screen and firmware is there at least once, and the
//! combinations are chosen so that most pairs of neighbours meet, not all. All
//! machines here have 512 MiB, as everywhere in these stories.

use std::fs;

use anyhow::{Result, ensure};
use polis_proto::v1::NodeParameters;
use polis_qemu::args::{Card, Disk, Firmware};
use polis_qemu::host::{Preference, accelerator, has_device};
use polis_qemu::image::Flash;
use polis_qemu::{Bus, Config, Network, Screen, Serial};
use polis_tests::{Story, skip, story};
use prost::Message as _;

use crate::world::{BOOT, World, bootstrap, home};

#[derive(Clone, Copy)]
enum Start {
    Direct,
    Uefi(Flash),
}

struct Hardware {
    start: Start,
    bus: Bus,
    network: Network,
    screen: Screen,
    cpus: u32,
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(an_nvme_disk_an_e1000e_card_and_a_virtio_screen_behind_firmware).takes(40),
    story!(a_sata_disk_a_card_that_needs_firmware_and_no_screen).takes(25),
    story!(a_usb_disk_behind_firmware).takes(45),
    story!(firmware_that_is_built_for_secure_boot).takes(40),
    story!(four_processors).takes(45),
    story!(an_igb_card_and_an_nvme_disk),
    story!(three_cards_give_the_same_address_at_each_boot).takes(60),
    story!(a_machine_whose_only_serial_port_is_the_second).takes(20),
    story!(a_machine_whose_firmware_names_the_second_serial_port).takes(20),
];

fn an_nvme_disk_an_e1000e_card_and_a_virtio_screen_behind_firmware() -> Result<()> {
    ready(
        "hardware-nvme",
        &Hardware {
            start: Start::Uefi(Flash::Plain),
            bus: Bus::Nvme,
            network: Network::E1000e,
            screen: Screen::Virtio,
            cpus: 1,
        },
    )
}

fn a_sata_disk_a_card_that_needs_firmware_and_no_screen() -> Result<()> {
    ready(
        "hardware-ahci",
        &Hardware {
            start: Start::Direct,
            bus: Bus::Ahci,
            network: Network::I82551,
            screen: Screen::None,
            cpus: 1,
        },
    )
}

fn a_usb_disk_behind_firmware() -> Result<()> {
    ready(
        "hardware-usb",
        &Hardware {
            start: Start::Uefi(Flash::Plain),
            bus: Bus::Usb,
            network: Network::Virtio,
            screen: Screen::Std,
            cpus: 1,
        },
    )
}

/// The flash has no keys enrolled (setup mode): a Secure Boot build of the
/// firmware, with its system management mode and its stricter memory, runs the
/// unsigned image. Enforcing is for an image that is signed.
fn firmware_that_is_built_for_secure_boot() -> Result<()> {
    ready(
        "hardware-secure-boot",
        &Hardware {
            start: Start::Uefi(Flash::Secure),
            bus: Bus::Virtio,
            network: Network::Virtio,
            screen: Screen::Virtio,
            cpus: 1,
        },
    )
}

fn four_processors() -> Result<()> {
    ready(
        "hardware-four-processors",
        &Hardware {
            start: Start::Direct,
            bus: Bus::Virtio,
            network: Network::Virtio,
            screen: Screen::Std,
            cpus: 4,
        },
    )
}

fn an_igb_card_and_an_nvme_disk() -> Result<()> {
    if !has_device("igb") {
        return skip("this QEMU has no igb card; 8.0 and later have it");
    }
    ready(
        "hardware-igb",
        &Hardware {
            start: Start::Direct,
            bus: Bus::Nvme,
            network: Network::Igb,
            screen: Screen::Virtio,
            cpus: 1,
        },
    )
}

/// One network without a gateway, first on the bus; one with, which counts; one behind USB.
fn three_cards_give_the_same_address_at_each_boot() -> Result<()> {
    const BOOTS: u32 = 3;
    let world = World::new("hardware-cards")?;
    let cards = vec![Card::NoWayOut, Card::Usb];
    let config = Config { cards, ..world.bootstrap_config("")? };
    for boot in 1..=BOOTS {
        let mut machine = world.boot(&config)?;
        let ready = machine.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.text("address") == "10.0.2.15", "boot {boot}: {ready}");
        machine.kill();
    }
    Ok(())
}

fn a_machine_whose_only_serial_port_is_the_second() -> Result<()> {
    let world = World::new("hardware-ttys1")?;
    let config = Config { serial: Serial::Only, ..world.bootstrap_config("")? };
    home(&mut world.boot(&config)?).map(drop)
}

fn a_machine_whose_firmware_names_the_second_serial_port() -> Result<()> {
    let world = World::new("hardware-spcr")?;
    let table = world.path("spcr.aml");
    fs::write(&table, spcr())?;
    let config = Config { serial: Serial::Named(table), ..world.bootstrap_config("")? };
    let mut machine = world.boot(&config)?;
    machine.wait_until_text("ttyS1 has these lines: the firmware names it", BOOT)?;
    home(&mut machine).map(drop)
}

/// The ACPI table by which firmware names its serial console: revision 2, a port like 16550 at
/// 0x2f8 with 115,200 baud. QEMU writes the checksum.
fn spcr() -> Vec<u8> {
    let mut table = b"SPCR\x50\0\0\0\x02\0POLIS POLISTST".to_vec();
    table.resize(80, 0);
    // A register of 8 bits in the space of ports.
    table[40..44].copy_from_slice(&[1, 8, 0, 1]);
    table[44..52].copy_from_slice(&0x2f8_u64.to_le_bytes());
    table[58] = 7;
    table
}

fn ready(story: &str, hardware: &Hardware) -> Result<()> {
    let world = World::new(story)?;
    let parameters: NodeParameters = bootstrap();
    let firmware: Firmware = match hardware.start {
        Start::Direct => world.image.direct(""),
        Start::Uefi(flash) => world.image.uefi(flash, &world.path("flash"), "")?,
    };
    let config = Config {
        disk: Some(Disk { bus: hardware.bus, ..world.disk(None)? }),
        network: hardware.network,
        screen: hardware.screen,
        cpus: hardware.cpus,
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..Config::new(firmware, accelerator(Preference::Auto, hardware.cpus))
    };
    let mut machine = world.boot(&config)?;
    home(&mut machine)?;
    Ok(())
}
