//! A machine with a TPM proves what it was started with, and an addition to its command line
//! shows, to an operator who asks and in the health of a cluster with an attestation policy; such
//! a cluster lets only machines in that fit it.

use anyhow::{Result, bail, ensure};
use polis_qemu::fleet::{Asks, asks};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::image::Flash;
use polis_qemu::{Config, Fleet};
use polis_tests::{Story, story};
use prost::Message as _;
use serde_json::Value;

use crate::fleet::{ask_until, blank_disk, of};
use crate::owner::Owner;
use crate::samples;
use crate::world::{BOOT, World, bootstrap, home};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_machine_proves_what_it_was_started_with_and_an_addition_shows)
        .takes(220)
        .one_of(samples::TRUST),
    story!(a_machine_enters_only_with_a_start_and_a_maker_of_the_policy)
        .cluster()
        .takes(200)
        .one_of(samples::ADMISSION),
];

/// The machine with an addition to its command line, and the one without.
const CHANGED: usize = 1;
const RIGHT: usize = 2;

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
    let attest = ["node", "attest", &identity.node, "--image", &image];
    let proved = owner.document(&attest)?;
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

    // The first node of a cluster has proved its start to the leader, too. The cluster wants the
    // image that it runs, and is healthy.
    let first = recorded(&owner, &identity.node, None)?;
    let recorded_11 = register_of(&first, 11);
    ensure!(recorded_11.is_some() && recorded_11 == register_of(&proved, 11), "{first}");
    let policy = ["cluster", "configure", "--attestation-image", &image];
    owner.run(&policy)?;
    owner.run(&["cluster", "wait"])?;
    machine.kill();

    let changed = Config { firmware: firmware("polis.guru-countdown=61")?, ..config };
    let mut machine = world.boot(&changed)?;
    let back = home(&mut machine)?;
    ensure!(back == identity, "another node: {back:?}");
    let refused = match owner.document(&attest) {
        Ok(proved) => bail!("the addition does not show: {proved}"),
        Err(error) => error.to_string(),
    };
    ensure!(refused.contains("register 12 (additions to the command line)"), "{refused}");
    ensure!(!refused.contains("register 11"), "{refused}");

    // The member proves that start to the leader, which lets it stay, and says so.
    let again = recorded(&owner, &identity.node, first["attestation"]["boot_id"].as_str())?;
    ensure!(register_of(&again, 11) == register_of(&first, 11), "{again}");
    let addition = "started with another system: register 12 (additions to the command line) is ";
    let problems = ask_until("the addition is a problem of the cluster", || {
        let problems = owner.document(&["cluster", "status"])?["problems"].to_string();
        Ok(problems.contains(addition).then_some(problems))
    })?;
    ensure!(!problems.contains("register 11"), "{problems}");
    let described = owner.run(&["node", "describe", &identity.node])?;
    ensure!(described.contains("SOMETHING WAS ADDED to its start"), "{described}");
    ensure!(described.contains(addition), "{described}");
    ensure!(!described.contains("EARLIER BOOT"), "{described}");
    Ok(())
}

/// The node as the leader knows it, once its record has a proof that is not of the boot `former`.
fn recorded(owner: &Owner, node: &str, former: Option<&str>) -> Result<Value> {
    ask_until("the record has a proof of this boot", || {
        let described = owner.document(&["node", "describe", node])?;
        let boot_id = described["attestation"]["boot_id"].as_str();
        let is_new = boot_id.is_some() && boot_id != former;
        Ok(is_new.then_some(described))
    })
}

/// The value of a register in the output of `node attest`, or of `node describe`.
fn register_of(shown: &Value, number: u64) -> Option<String> {
    let registers = shown["registers"].as_array().or(shown["attestation"]["registers"].as_array());
    let found = registers?.iter().find(|register| register["number"] == number)?;
    found["actual"].as_str().map(str::to_owned)
}

fn a_machine_enters_only_with_a_start_and_a_maker_of_the_policy() -> Result<()> {
    let world = World::new("attestation_policy")?;
    let first = world.bootstrap_config("")?;
    // Those that enter start by firmware and boot stub, which measure; the first needs no TPM.
    let enters = |number: usize, append: &str| -> Result<Config> {
        let disk = first.disk.as_ref().map(|disk| blank_disk(&world, disk, number)).transpose()?;
        let flash = world.path(&format!("flash-{number}"));
        let firmware = world.image.uefi(Flash::Plain, &flash, append)?;
        let tpm = Some(world.path(&format!("tpm-{number}")));
        Ok(Config { disk, tpm, ..Config::new(firmware, accelerator(Preference::Auto, 1)) })
    };
    let changed = enters(CHANGED, "polis.guru-countdown=61")?;
    let right = enters(RIGHT, "")?;
    let mut cluster = of(&world, vec![first, changed, right])?;
    cluster.found()?;
    // Side by side: while one boots, the other would only wait.
    for number in [CHANGED, RIGHT] {
        cluster.give_ticket(number)?;
        cluster.boot(number)?;
    }
    let image = world.image.disk.display().to_string();
    let policy = ["--timeout", "2m", "cluster", "configure", "--attestation-image", &image];
    cluster.operator.run(&policy)?;

    // Another command line.
    let [node, words] = waits(&mut cluster, CHANGED)?;
    let refused = keeps_out(&cluster, &node, &words)?;
    let additions = "register 12 (additions to the command line) is ";
    ensure!(refused.contains(additions), "{refused}");
    ensure!(refused.contains("expected 0000000000000000…"), "{refused}");
    ensure!(!refused.contains("register 11"), "{refused}");
    cluster.cut_power(CHANGED);

    // An emulated TPM, which no maker has certified.
    let [node, words] = waits(&mut cluster, RIGHT)?;
    let maker = world.path("maker.der");
    std::fs::write(&maker, polis_wire::attestation::software::Maker::new("Maker of TPMs").der)?;
    let maker = maker.display().to_string();
    cluster.operator.run(&[&policy[..], &["--attestation-maker", &maker]].concat())?;
    let refused = keeps_out(&cluster, &node, &words)?;
    ensure!(refused.contains("its TPM has no certificate of a maker"), "{refused}");
    ensure!(refused.contains("expected one signed by \"CN=Maker of TPMs\""), "{refused}");
    ensure!(!refused.contains("register 1"), "{refused}");

    // The policy without makers.
    cluster.operator.run(&policy)?;
    approve(&cluster, &node, &words)?;
    let patience = cluster.patience;
    let ready = cluster.machine(RIGHT)?.wait_for("ready", patience, |_| true)?;
    ensure!(ready.is("node", &node), "another node: {ready}");
    Ok(cluster.wait_whole(2)?)
}

/// Waits until a machine asks for its approval; returns its node and its fingerprint.
fn waits(cluster: &mut Fleet, number: usize) -> Result<[String; 2]> {
    let machine = cluster.machine(number)?;
    let what = "the fingerprint of a node that waits for approval";
    let Asks::Approval(words) = machine.wait(what, BOOT, |line| asks(&line.event()?))? else {
        bail!("machine {} is in without an approval", number + 1);
    };
    let foreign = machine.seen(|event| event.is("state", "foreign"));
    let node = foreign.last().map(|event| event.text("node").to_owned());
    Ok([node.unwrap_or_default(), words])
}

fn approve(cluster: &Fleet, node: &str, words: &str) -> Result<(), polis_qemu::Error> {
    let approve = ["--timeout", "2m", "node", "approve", node, "--fingerprint", words];
    cluster.operator.run(&approve).map(drop)
}

/// Has a machine approved that does not fit; returns the refusal.
fn keeps_out(cluster: &Fleet, node: &str, words: &str) -> Result<String> {
    match approve(cluster, node, words) {
        Ok(()) => bail!("{node} may enter"),
        Err(error) => Ok(error.to_string()),
    }
}
