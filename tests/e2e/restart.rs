//! Restarts of a machine that was home: it must be the same node of the same cluster.

use anyhow::{Context as _, Result, ensure};
use polis_qemu::{Machine, Reset};
use polis_tests::{Story, story};

use crate::world::{POWER_BUTTON, SOON, World, home};

/// Printed when the log goes to the disk, with the number of the boot and of the bytes
/// that were there before.
const LOGS: &str = "logs are kept on the disk";

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(a_reset_and_an_orderly_stop_end_at_home_as_the_same_node).takes(50),
    story!(a_reboot_by_the_keyboard_is_orderly_and_ends_at_home).takes(40),
    story!(a_power_cut_after_ready_ends_at_home_as_the_same_node).takes(45),
];

fn a_reset_and_an_orderly_stop_end_at_home_as_the_same_node() -> Result<()> {
    let world = World::new("restart-reset")?;
    let config = world.bootstrap_config("")?;
    let (mut machine, founded) = world.at_home(&config)?;

    // Of the boot that ends here: behind the reset it would be taken for the next one's.
    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.reset()?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a reset: {back:?}, before: {founded:?}");

    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    orderly_end(&mut machine, "poweroff")?;
    machine.wait_end(SOON)?;
    let mut machine = world.boot(&config)?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a power-off: {back:?}, before: {founded:?}");
    Ok(())
}

fn a_reboot_by_the_keyboard_is_orderly_and_ends_at_home() -> Result<()> {
    let world = World::new("restart-keyboard")?;
    let config = polis_qemu::Config { reset: Reset::Exit, ..world.bootstrap_config("")? };
    let (mut machine, founded) = world.at_home(&config)?;
    machine.qmp.press(&["ctrl", "alt", "delete"])?;
    orderly_end(&mut machine, "reboot")?;
    machine.wait_end(SOON)?;
    let mut machine = world.boot(&config)?;
    let back = home(&mut machine)?;
    ensure!(back == founded, "after a reboot: {back:?}, before: {founded:?}");
    Ok(())
}

fn a_power_cut_after_ready_ends_at_home_as_the_same_node() -> Result<()> {
    let world = World::new("restart-power-cut")?;
    let config = world.bootstrap_config("")?;
    let (mut machine, founded) = world.at_home(&config)?;
    for cut in 1..=2 {
        machine.kill();
        machine = world.boot(&config)?;
        let back = home(&mut machine)?;
        ensure!(back == founded, "after power cut {cut}: {back:?}, before: {founded:?}");
        // Each boot has its own log, and those before it are still there.
        let logs = machine.lines().into_iter().find(|line| line.text.contains(LOGS));
        let logs = logs.context("home without a line about the logs")?;
        ensure!(logs.text.contains(&format!(" boot={cut} ")), "another boot: {}", logs.text);
        ensure!(!logs.text.ends_with("bytes=0"), "nothing is left of it: {}", logs.text);
    }
    Ok(())
}

pub(crate) fn orderly_end(machine: &mut Machine, reason: &str) -> Result<()> {
    let off = machine.wait_for("off", SOON, |_| true)?;
    ensure!(off.is("reason", reason), "another reason than {reason}: {off}");
    Ok(())
}
