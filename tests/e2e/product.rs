//! The product image; every other story boots the development image.
//!
//! With `--all` it is the image as `cargo xtask image` ships it, and in an ordinary run one whose
//! `node` is compiled as that of the development image, which takes a part of the time.

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Config;
use polis_tests::{Story, story};

use crate::restart::orderly_end;
use crate::world::{POWER_BUTTON, SOON, World, home};

/// Most resident memory that each process may have at rest, in KiB.
const MEMORY: [(&str, u64); 2] = [("init", 4 * 1024), ("node", 40 * 1024)];

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_product_ignores_fault_injection_and_keeps_to_its_memory).takes(40)];

fn a_product_ignores_fault_injection_and_keeps_to_its_memory() -> Result<()> {
    let world = World::of_product("product")?;
    // In a development image the first word kills the node once it is ready, and the
    // second counts in etcd from then on.
    let firmware = world.image.direct("polis.fault=kill-node polis.exercise=count");
    let mut machine = world.boot(&Config { firmware, ..world.bootstrap_config("")? })?;
    home(&mut machine)?;
    // Printed when a node has been at rest for some seconds; a guru would end the wait.
    let memory = machine.wait_for("memory", SOON, |_| true)?;
    for (process, most) in MEMORY {
        let resident: u64 =
            memory.text(process).parse().with_context(|| format!("no `{process}`: {memory}"))?;
        ensure!(resident <= most, "{process} has {resident} KiB resident, more than {most}");
    }
    let counted = machine.seen(|event| event.word == "exercise");
    ensure!(counted.is_empty(), "the product has a workload generator: {counted:?}");
    machine.wait_until_text(POWER_BUTTON, SOON)?;
    machine.qmp.power_button()?;
    orderly_end(&mut machine, "poweroff")
}
