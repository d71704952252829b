//! First boots: from an empty disk to a cluster of one node.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use polis_base::hex;
use polis_proto::v1::ClusterConfiguration;
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_proto::v1::node_parameters::Cluster;
use polis_qemu::args::Disk;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::operator::Operator;
use polis_qemu::{Config, Machine};
use polis_tests::{Story, polisctl, story};
use prost::Message as _;

use crate::config_drive;
use crate::world::{OWNER, World, bootstrap, home_with, text, this_boot};

/// The stages that a boot goes through one after the other.
const IN_ORDER: [&str; 3] = ["kernel", "initramfs", "system"];

/// The stages that wait for each other as their services need it.
const SERVICES: [&str; 6] = ["storage", "network", "parameters", "cluster", "consensus", "roles"];

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_machine_with_firmware_and_parameters_on_its_esp_founds_a_cluster).takes(35),
    story!(a_machine_with_parameters_in_an_oem_string_of_smbios_founds_a_cluster),
    story!(a_nocloud_disk_founds_a_cluster_and_stays_as_it_is),
    story!(a_config_drive_in_a_cd_rom_drive_founds_a_cluster).takes(30),
    story!(where_both_sources_differ_fw_cfg_wins_and_a_warning_names_both),
];

fn a_machine_with_firmware_and_parameters_on_its_esp_founds_a_cluster() -> Result<()> {
    let world = World::new("first-boot-uefi")?;
    let firmware = world.image.uefi(Flash::Plain, &world.path("flash"), "")?;
    let config = Config {
        disk: Some(world.disk(Some(&bootstrap().encode_to_vec()))?),
        ..Config::new(firmware, accelerator(Preference::Auto, 1))
    };
    let mut machine = world.boot(&config)?;
    founds_a_cluster(&mut machine, &world.image.version)
}

fn a_machine_with_parameters_in_an_oem_string_of_smbios_founds_a_cluster() -> Result<()> {
    let world = World::new("first-boot-smbios")?;
    let config = Config {
        disk: Some(world.disk(None)?),
        oem_strings: vec![
            "another:string,with=more".to_owned(),
            text(&bootstrap().encode_to_vec()),
        ],
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    founds_a_cluster(&mut machine, &world.image.version)
}

fn a_nocloud_disk_founds_a_cluster_and_stays_as_it_is() -> Result<()> {
    let world = World::new("first-boot-nocloud")?;
    let file = world.path("cidata.img");
    nocloud(&world, &file)?;
    let before = std::fs::read(&file)?;
    let disk = world.disk(None)?;
    let config = Config {
        second_disk: Some(Disk { file: file.clone(), ..disk.clone() }),
        disk: Some(disk),
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    founds_a_cluster(&mut machine, &world.image.version)?;
    ensure!(std::fs::read(&file)? == before, "the disk with the user data has changed");
    Ok(())
}

/// The disk image that `polisctl` writes for a person, with the parameters of [`bootstrap`].
fn nocloud(world: &World, file: &Path) -> Result<()> {
    let key = world.path("owner.pub");
    std::fs::write(&key, hex::encode(&OWNER))?;
    let (key, file) = (key.display().to_string(), file.display().to_string());
    let operator = Operator::new(&polisctl()?, &world.path("operator"), "story");
    let parameters = ["parameters", "bootstrap", "--owner-key", &key, "--storage", "insecure"];
    operator.run(&[&parameters[..], &["--format", "disk", "-o", &file]].concat())?;
    Ok(())
}

fn a_config_drive_in_a_cd_rom_drive_founds_a_cluster() -> Result<()> {
    let world = World::new("first-boot-config-drive")?;
    let disc = world.path("config-2.iso");
    config_drive::write(&disc, text(&bootstrap().encode_to_vec()).as_bytes())?;
    let config = Config { disk: Some(world.disk(None)?), disc: Some(disc), ..world.bare("") };
    let mut machine = world.boot(&config)?;
    founds_a_cluster(&mut machine, &world.image.version)
}

/// Every promise about a first boot, in the order in which it is kept.
fn founds_a_cluster(machine: &mut Machine, image: &str) -> Result<()> {
    let (_identity, events) = home_with(machine, this_boot)?;
    let boot = events.iter().find(|event| event.word == "boot").context("no `POLIS boot`")?;
    ensure!(boot.is("slot", "A") && boot.is("image", image), "another system: {boot}");

    let place = |stage: &str, state: &str| {
        let found = events.iter().position(|event| {
            event.word == "stage" && event.is("name", stage) && event.is("state", state)
        });
        found.with_context(|| format!("no `POLIS stage name={stage} state={state}`"))
    };
    let order = IN_ORDER.map(|stage| place(stage, "done"));
    let order = order.into_iter().collect::<Result<Vec<_>>>()?;
    ensure!(order.is_sorted(), "{IN_ORDER:?} ended in another order: {order:?}");
    let ready = events.iter().position(|event| event.word == "ready").context("no ready")?;
    for stage in SERVICES {
        let (started, done) = (place(stage, "started")?, place(stage, "done")?);
        ensure!(started < done && done < ready, "{stage}: {started}, {done}, ready {ready}");
    }
    let times: Vec<f64> = events.iter().filter_map(polis_qemu::Event::uptime).collect();
    ensure!(times.len() == events.len(), "an event without a time");
    ensure!(events.iter().all(|event| event.word != "guru"), "a guru meditation on the way");
    Ok(())
}

fn where_both_sources_differ_fw_cfg_wins_and_a_warning_names_both() -> Result<()> {
    let world = World::new("parameters-both")?;
    // The content of the ESP would end this boot, if the machine took it.
    let mut other = bootstrap();
    if let Some(Cluster::ClusterBootstrap(bootstrap)) = &mut other.cluster {
        bootstrap.cluster_configuration = Some(ClusterConfiguration {
            storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
            ..ClusterConfiguration::default()
        });
    }
    let config = Config {
        disk: Some(world.disk(Some(&other.encode_to_vec()))?),
        fw_cfg: world.fw_cfg(&bootstrap().encode_to_vec())?,
        ..world.bare("")
    };
    let mut machine = world.boot(&config)?;
    founds_a_cluster(&mut machine, &world.image.version)?;
    let warned = machine.lines().iter().any(|line| {
        line.text.contains("] W ")
            && line.text.contains("fw_cfg")
            && line.text.contains("polis/parameters.pb")
    });
    ensure!(warned, "no warning names both sources");
    Ok(())
}
