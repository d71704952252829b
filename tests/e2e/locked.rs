//! A locked disk, and a person with its recovery key in front of the machine.
//!
//! The word `polis.fault=locked` locks it: the story follows the key on its way from the
//! keyboard into `node`, which is started once more for it.

use anyhow::{Result, ensure};
use polis_qemu::{Event, Machine};
use polis_tests::{Story, story};

use crate::guru::shows_red;
use crate::world::{BOOT, Identity, SOON, World, home};

/// As people type: small and large letters, dashes and spaces.
const KEY: &str = "rphl-UABC 2345";

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_recovery_key_typed_at_the_serial_port_starts_the_node_again).takes(40),
    story!(a_recovery_key_typed_at_the_screen_starts_the_node_again).takes(40),
];

fn a_recovery_key_typed_at_the_serial_port_starts_the_node_again() -> Result<()> {
    let (_world, mut machine, before) = locked("serial")?;
    machine.wait_for_text("U asks for its recovery key", SOON)?;
    machine.type_serial("u")?;
    machine.wait_for_text("type the recovery key", SOON)?;
    // A mistyped one, taken back.
    machine.type_serial(&format!("wrong\x15{KEY}x\x7f\r"))?;
    unlocked(&mut machine, &before)
}

fn a_recovery_key_typed_at_the_screen_starts_the_node_again() -> Result<()> {
    let (_world, mut machine, before) = locked("screen")?;
    shows_red(&mut machine)?;
    machine.qmp.press(&["u"])?;
    for c in KEY.chars() {
        let name = match c {
            '-' => "minus".to_owned(),
            ' ' => "spc".to_owned(),
            c => c.to_ascii_lowercase().to_string(),
        };
        if c.is_ascii_uppercase() {
            machine.qmp.press(&["shift", &name])?;
        } else {
            machine.qmp.press(&[&name])?;
        }
    }
    machine.qmp.press(&["ret"])?;
    unlocked(&mut machine, &before)
}

/// A machine that was home, and is locked now.
fn locked(story: &str) -> Result<(World, Machine, Identity)> {
    let world = World::new(&format!("locked-{story}"))?;
    let config = world.bootstrap_config("polis.fault=locked polis.guru-countdown=3600")?;
    let mut machine = world.boot(&config)?;
    let identity = home(&mut machine)?;
    let guru = machine.wait_for("guru", SOON, |_| true)?;
    ensure!(guru.text("code").starts_with("#0415."), "not the code of a wrong key: {guru}");
    ensure!(guru.is("unlock", "yes"), "the recovery key is not asked for: {guru}");
    Ok((world, machine, identity))
}

/// Waits until the node has its earlier identity, and checks that all of the key came to
/// it.
fn unlocked(machine: &mut Machine, before: &Identity) -> Result<()> {
    machine.wait_for_text("starting node again", SOON)?;
    let again = machine.wait_for("ready", BOOT, |_| true)?;
    ensure!(again.is("node", &before.node) && again.is("ca", &before.ca), "another node: {again}");
    let output = machine.wait_for_text("opens what polis.fault locked", SOON)?;
    let length = format!("characters={}", KEY.len());
    ensure!(output.text.contains(&length), "not all of the key arrived: {}", output.text);
    let boots = machine.seen(|event: &Event| event.word == "boot").len();
    ensure!(boots == 1, "the machine was rebooted: {boots} boots");
    let lines = machine.lines();
    let leak = lines.iter().find(|line| line.text.to_lowercase().contains(&KEY.to_lowercase()));
    ensure!(leak.is_none(), "the key is on the serial line: {leak:?}");
    Ok(())
}
