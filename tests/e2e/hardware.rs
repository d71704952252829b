//! Hardware, as far as QEMU has it: ready on each.
//!
//! Every kind of disk, card, screen and firmware is there at least once, and the
//! combinations are chosen so that most pairs of neighbours meet, not all. All
//! machines here have 512 MiB, as everywhere in these stories.

use anyhow::Result;
use polis_proto::v1::NodeParameters;
use polis_qemu::args::{Disk, Firmware};
use polis_qemu::host::{Preference, accelerator, has_device};
use polis_qemu::image::Flash;
use polis_qemu::{Bus, Config, Network, Screen};
use polis_tests::{Story, skip, story};
use prost::Message as _;

use crate::world::{World, bootstrap, home};

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
    story!(a_sata_disk_and_no_screen_at_all).takes(25),
    story!(a_usb_disk_behind_firmware).takes(45),
    story!(firmware_that_is_built_for_secure_boot).takes(40),
    story!(four_processors).takes(45),
    story!(an_igb_card_and_an_nvme_disk),
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

fn a_sata_disk_and_no_screen_at_all() -> Result<()> {
    ready(
        "hardware-ahci",
        &Hardware {
            start: Start::Direct,
            bus: Bus::Ahci,
            network: Network::E1000e,
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
