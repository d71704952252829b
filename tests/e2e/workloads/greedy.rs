//! Pods that take all they can get: volumes hold their size and survive power cuts, a pod keeps
//! what is on a further disk, and neither the node nor its console notices a pod without memory,
//! processes or room.

use std::time::Duration;

use anyhow::{Result, ensure};
use polis_tests::{Story, story};

use super::kubectl::Kubectl;
use super::{
    GONE, KEEPER, boot_despite_races, further, limits, serves, takes_both_roles, volumes, writing,
};
use crate::console::Terminal;
use crate::world::home;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(volumes_keep_their_size_and_data_and_greedy_pods_hurt_nothing_else)
        .cluster()
        .takes(900)
        .at_most(Duration::from_secs(40 * 60))];

fn volumes_keep_their_size_and_data_and_greedy_pods_hurt_nothing_else() -> Result<()> {
    let (world, owner, config) = writing("greedy", further::attached)?;
    let mut machine = world.boot(&config)?;
    let founded = home(&mut machine)?;
    owner.take(&founded.ca)?;
    takes_both_roles(&owner, &mut machine, &founded.node)?;

    let kubectl = Kubectl::of(&world, &owner)?;
    kubectl.apply(KEEPER)?;
    kubectl.ready(&["pod/keeper"])?;
    further::written(&kubectl, &founded.node)?;
    volumes::hold_their_size(&kubectl, &owner, &machine)?;
    // The pods are there again without a person.
    let mut machine = volumes::survive_power_cuts(&kubectl, machine, || {
        boot_despite_races(|| {
            let mut machine = world.boot(&config)?;
            let back = home(&mut machine)?;
            ensure!(back == founded, "after a power cut: {back:?}, before: {founded:?}");
            serves(&mut machine)?;
            Ok(machine)
        })
    })?;
    kubectl.ready(&["pod/keeper"])?;
    further::kept(&kubectl)?;

    let mut console = Terminal::new(&mut machine, [30, 100])?;
    limits::memory_and_processes(&kubectl, &owner, &machine, &mut console)?;
    limits::the_disk(&kubectl, &owner, &machine, &mut console, "keeper")?;
    kubectl.delete(&["pod/keeper"], GONE)?;
    kubectl.delete(&["pvc/box"], GONE)?;
    volumes::leave_nothing(&kubectl, &mut machine)
}
