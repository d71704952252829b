//! A machine that no keeper opens: after each start it waits for a person, who opens it
//! from afar with `polisctl` and the recovery key.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use polis_base::recovery::form;
use polis_proto::v1::cluster_configuration::{ColdStart, StorageSecurityPolicy};
use polis_proto::v1::{ClusterConfiguration, NodeParameters};
use polis_qemu::{Config, Machine};
use polis_tests::{Story, story};
use prost::Message as _;

use crate::esp;
use crate::owner::{Owner, private};
use crate::storage::file;
use crate::world::{BOOT, SOON, World, founding, home};

const SHARE: &str = "polis/cold_start.pb";

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(an_attended_machine_waits_after_a_reboot_until_its_owner_opens_it_from_afar)
        .takes(110)];

fn an_attended_machine_waits_after_a_reboot_until_its_owner_opens_it_from_afar() -> Result<()> {
    let world = World::new("attended")?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = Config {
        disk: Some(world.disk(None)?),
        fw_cfg: world.fw_cfg(&parameters().encode_to_vec())?,
        forwards: owner.forwards.clone(),
        ..world.bare("")
    };
    let config = world.past_stage_1(config)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    let recovery = owner.run(&["node", "recovery-key", &founded.node])?;
    let right = private(&world.path("right"), &recovery)?;
    let wrong = private(&world.path("wrong"), &form::write(&[7; form::SIZE]))?;
    owner.run(&["node", "reboot", &founded.node, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;

    // While the machine is off, a person with its disk does not have both halves of the
    // key.
    let words = waits(&mut machine)?;
    machine.kill();
    ensure!(esp::record(&file(&config)?, SHARE)?.is_none(), "a share is on the disk");

    // It waits again, and accepts nothing else: not another key, not a person who reads
    // another machine's words.
    let mut machine = world.boot(&config)?;
    let again = waits(&mut machine)?;
    ensure!(again == words, "the words were {words}, and are {again}");
    let at = owner.at(7839)?;
    let unlock = |key: &Path, words: &str| {
        let key = key.display().to_string();
        let node = ["node", "unlock", &founded.node, "--at", &at];
        owner.run(&[&node[..], &["--recovery-key-file", &key, "--fingerprint", words]].concat())
    };
    let refusal = |printed: Result<String>| match printed {
        Ok(printed) => anyhow::bail!("it was opened: {printed}"),
        Err(error) => Ok(format!("{error:#}")),
    };
    let output = refusal(unlock(&wrong, &words))?;
    ensure!(output.contains("does not open the disk"), "another key: {output}");
    let output = refusal(unlock(&right, &"00".repeat(32)))?;
    ensure!(output.contains("has another key"), "another fingerprint: {output}");

    unlock(&right, &words)?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after unlocking: {back:?}, before: {founded:?}");
    let output = refusal(unlock(&right, &words))?;
    ensure!(output.contains("has another key"), "a node that is home: {output}");
    owner.run(&["cluster", "wait"])?;
    ensure!(
        machine.lines().iter().all(|line| !line.text.contains(&recovery)),
        "the recovery key is on the serial line"
    );
    machine.kill();

    // The data partition that was made again on the way has left no share, either.
    let mut machine = world.boot(&config)?;
    waits(&mut machine)?;
    machine.kill();
    ensure!(esp::record(&file(&config)?, SHARE)?.is_none(), "a share is on the disk");
    Ok(())
}

/// Parameters that found a cluster with encrypted disks, each of which a person opens.
pub(crate) fn parameters() -> NodeParameters {
    founding(ClusterConfiguration {
        storage_security_policy: StorageSecurityPolicy::NeedsEncryption.into(),
        cold_start: ColdStart::Attended.into(),
        ..ClusterConfiguration::default()
    })
}

/// Waits until the machine prints what it waits for; returns the words that it shows
/// meanwhile.
pub(crate) fn waits(machine: &mut Machine) -> Result<String> {
    let waits = machine.wait_for("stage", BOOT, |stage| {
        stage.is("name", "cluster") && stage.is("state", "waiting")
    })?;
    let what = waits.text("for");
    ensure!(what.contains("polisctl node unlock"), "no command: {waits}");
    let (_, words) = what.split_once("--fingerprint ").with_context(|| format!("{waits}"))?;
    Ok(words.trim_end_matches('`').to_owned())
}
