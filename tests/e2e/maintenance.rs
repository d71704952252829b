//! A machine that shows a guru meditation, and its owner somewhere else: without parameters it is
//! reached by the code on its screen, with an owner by the owner's key alone.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use ed25519_dalek::SigningKey;
use polis_qemu::{Config, Machine};
use polis_tests::{Story, story};
use polis_wire::pki;
use prost::Message as _;

use crate::owner::{Owner, private};
use crate::world::{BOOT, SOON, World, bootstrap, guru, home};

/// The port that `polisctl maintenance` calls.
const PORT: u16 = 7839;

/// The beginning of the text that reaches the machine.
const REACH: &str = "in maintenance: polisctl maintenance describe 10.0.2.15 ";

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_machine_without_parameters_gets_them_by_its_code_and_then_obeys_its_owner_alone)
        .takes(60)];

fn a_machine_without_parameters_gets_them_by_its_code_and_then_obeys_its_owner_alone() -> Result<()>
{
    let world = World::new("maintenance")?;
    let owner = Owner::new(&world.path("owner"))?;
    let config = Config {
        disk: Some(world.disk(None)?),
        forwards: owner.forwards.clone(),
        // The node dies once it is ready, in each boot.
        ..world.bare("polis.fault=kill-node polis.guru-countdown=300")
    };
    let mut machine = world.boot(&config)?;
    let at = owner.at(PORT)?;
    let call = |words: &[&str]| {
        let mut args = vec!["maintenance", words[0], &*at];
        args.extend(&words[1..]);
        owner.run(&args)
    };
    let refused = |words: &[&str], why: &str| {
        let Err(error) = call(words) else { anyhow::bail!("{words:?} was done") };
        let error = format!("{error:#}");
        ensure!(error.contains(why), "{words:?}: not `{why}`: {error}");
        Ok(())
    };

    guru(&mut machine, "0601")?;
    let code = option(&mut machine, "--code ")?;
    // The code of another machine: the handshake ends it.
    refused(&["describe", "--code", "MYKT-F9X7-MYKT-F9X7-Z01G"], "does not have this code")?;
    // The owner of no parameters is a stranger.
    let stranger = ["describe", "--fingerprint", "zoo-zoo-zoo-zoo"];
    refused(&stranger, "another key")?;
    let described = call(&["describe", "--code", &code])?;
    ensure!(described.contains("#0601"), "{described}");
    ensure!(described.contains("vda, ") && described.contains("10.0.2.15"), "{described}");
    machine.wait_until_text("no reboot for 600 s", SOON)?;
    let log = call(&["logs", "--code", &code])?;
    ensure!(log.contains("no node parameters"), "{log}");
    ensure!(!log.contains(&code), "the code is in the log: {log}");
    let log = call(&["logs", "--log", "kernel", "--code", &code])?;
    ensure!(log.contains("Linux version"), "{log}");

    let (good, bad) = (world.path("good.pb"), world.path("bad.pb"));
    fs::write(&good, bootstrap().encode_to_vec())?;
    fs::write(&bad, &bootstrap().encode_to_vec()[..20])?;
    refused(&["parameters", text(&bad)?, "--code", &code, "--yes"], "invalid parameters")?;
    call(&["parameters", text(&good)?, "--code", &code, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    home(&mut machine)?;

    // The node is killed. Now there is an owner, and a home.
    guru(&mut machine, "0302")?;
    let words = option(&mut machine, "--fingerprint ")?;
    refused(&["describe", "--code", &code], "does not have this code")?;
    let another = world.path("another.key");
    private(&another, &pki::key_pem(&SigningKey::from_bytes(&[7; 32])))?;
    let stranger = ["reboot", "--fingerprint", &words, "--owner-key", text(&another)?, "--yes"];
    refused(&stranger, "the owner's key that the node parameters of this machine name")?;
    let log = call(&["logs", "--fingerprint", &words])?;
    ensure!(log.contains("root"), "{log}");
    let reports = call(&["logs", "--log", "reports", "--fingerprint", &words])?;
    ensure!(reports.contains("#0601") && reports.contains("#0302"), "{reports}");
    refused(
        &["parameters", text(&good)?, "--fingerprint", &words, "--replace", "--yes"],
        "is a member of a cluster",
    )?;
    call(&["reboot", "--fingerprint", &words, "--yes"])?;
    machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
    machine.wait_for("boot", BOOT, |_| true)?;
    Ok(())
}

/// The value of an option in the text that reaches the machine.
fn option(machine: &mut Machine, name: &str) -> Result<String> {
    let line = machine.wait_for_text(REACH, SOON)?;
    let value = line.text.split_once(name).with_context(|| format!("no {name}: {}", line.text))?;
    Ok(value.1.trim().to_owned())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not text")
}
