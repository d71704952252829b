//! An update whose system gets ready, and whose containerd does not: the trial of the new system
//! compares the workload stack with what ran before it.
//!
//! The machine is a worker without an API server: containerd needs none, and the story waits for
//! ten minutes of the machine.

use std::time::Duration;

use anyhow::Result;
use polis_image::signing::Keys;
use polis_qemu::Config;
use polis_tests::{Story, skip, story};

use super::{DISK, PART};
use crate::owner::Owner;
use crate::update::{Harm, does_not_stay, named, signed};
use crate::world::{NEXT_FULL, World, home};

/// The fault that ends containerd whenever it runs.
const HARMS: &[u8] = b"polis.fault=no-containerd";
/// How long the system may take to give up: the ten minutes that its workloads have, the time
/// until the cluster is healthy, and time to spare.
const GIVEN_UP: Duration = Duration::from_secs(15 * 60);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(an_update_without_containerd_does_not_stay)
    .takes(900)
    .at_most(Duration::from_secs(40 * 60))
    .of_all()];

fn an_update_without_containerd_does_not_stay() -> Result<()> {
    if std::env::var_os(NEXT_FULL).is_none() {
        return skip("no image with Kubernetes was built: see docs/testing.md");
    }
    let world = World::of_full("workloads_updated")?;
    let keys = Keys::generate()?;
    let owner = Owner::new(&world.path("owner"))?;
    let small = signed(&world, &owner, &keys, DISK)?;
    let mut machine = world.boot(&Config { memory: 1536, ..small })?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    owner.run(&["node", "roles", &founded.node, "--add", "kubernetes-worker", "--yes"])?;
    let runs =
        |event: &polis_qemu::Event| event.is("part", "containerd") && event.is("state", "ready");
    machine.wait_for("workload", PART, runs)?;

    let cause = "containerd was ready before the update and is not";
    let harm = Harm { words: HARMS, cause, within: GIVEN_UP };
    does_not_stay(&world, &owner, &mut machine, &founded, &named(NEXT_FULL)?, &keys, &harm)?;
    // The system before has it again.
    machine.wait_for("workload", PART, runs)?;
    Ok(())
}
