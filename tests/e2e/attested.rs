//! A machine with a TPM proves what it was started with, and an addition to its command line
//! shows.

use anyhow::{Result, ensure};
use polis_qemu::Config;
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_tests::{Story, story};
use prost::Message as _;
use serde_json::Value;

use crate::owner::Owner;
use crate::world::{World, bootstrap, home};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_machine_proves_what_it_was_started_with_and_an_addition_shows).takes(200)];

fn a_machine_proves_what_it_was_started_with_and_an_addition_shows() -> Result<()> {
    let world = World::new("attested")?;
    let owner = Owner::new(&world.path("owner"))?;
    // Firmware and boot stub measure what they start, so the machine starts by them. Its disk is
    // not encrypted: an addition would lock it.
    let firmware = |append: &str| world.image.uefi(Flash::Plain, &world.path("flash"), append);
    let config = Config {
        disk: Some(world.disk(Some(&bootstrap().encode_to_vec()))?),
        forwards: owner.forwards.clone(),
        tpm: Some(world.path("tpm")),
        ..Config::new(firmware("")?, accelerator(Preference::Auto, 1))
    };
    let mut machine = world.boot(&config)?;
    let identity = home(&mut machine)?;
    owner.take(&identity.ca)?;
    let image = world.image.disk.display().to_string();
    let attest = ["node", "attest", &identity.node, "--image", &image, "--output", "json"]
        .map(str::to_owned);
    let proved: Value = serde_json::from_str(&owner.run(&attest)?)?;
    ensure!(proved["as_expected"] == true, "{proved}");
    let register = |number: u64| {
        let registers = proved["registers"].as_array().into_iter().flatten();
        registers.clone().find(|register| register["number"] == number).cloned()
    };
    for number in [11, 12, 13] {
        let compared = register(number).is_some_and(|register| register["as_expected"] == true);
        ensure!(compared, "register {number}: {proved}");
    }
    // A TPM without a certificate has no maker.
    ensure!(proved["tpm"]["issuer"].is_null(), "{proved}");
    machine.kill();

    let changed = Config { firmware: firmware("polis.guru-countdown=61")?, ..config };
    let mut machine = world.boot(&changed)?;
    let back = home(&mut machine)?;
    ensure!(back == identity, "another node: {back:?}");
    let refused = match owner.run(&attest) {
        Ok(output) => anyhow::bail!("the addition does not show: {output}"),
        Err(error) => error.to_string(),
    };
    ensure!(refused.contains("register 12 (additions to the command line)"), "{refused}");
    ensure!(!refused.contains("register 11"), "{refused}");
    Ok(())
}
