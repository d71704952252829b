//! A snapshot of a cluster that ran workloads, on another machine: the objects of the API
//! server are there again, and the pods of the lost machine get places on the new one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Machine;

use super::kubectl::Kubectl;
use super::{GONE, IN_DEMO, KUBECTL, boot_despite_races, large, takes_both_roles, visited};
use crate::esp;
use crate::owner::Owner;
use crate::world::{BOOT, SNAPSHOT, SOON, World, comes};

/// Saves etcd while the demo runs.
pub(super) fn saved(world: &World, owner: &Owner) -> Result<PathBuf> {
    let saved = world.path("etcd.age").display().to_string();
    owner.run(&["etcd", "snapshot", "--out", &saved])?;
    let file = world.path("etcd.snapshot");
    owner.run(&["etcd", "decrypt", &saved, "--out", &file.display().to_string()])?;
    Ok(file)
}

/// Founds the cluster again from the snapshot on a machine with a disk of its own. `lost` is
/// the node that the snapshot knows, and that had both roles. Returns the machine and its node.
pub(super) fn lives_on(
    world: &World,
    owner: &Owner,
    snapshot: &Path,
    lost: &str,
) -> Result<(Machine, String)> {
    let config = large(world, owner, world.bootstrap_config("")?)?;
    let disk = config.disk.as_ref().context("no disk")?;
    esp::write(&disk.file, SNAPSHOT, &std::fs::read(snapshot)?)?;
    let mut machine = boot_despite_races(|| {
        let mut machine = world.boot(&config)?;
        machine.wait_for("ready", BOOT, |_| true)?;
        // Its line may have come before that of the node.
        comes(&mut machine, "etcd", SOON, |event| event.is("state", "voter"))?;
        Ok(machine)
    })?;
    let ready = machine.seen(|event| event.word == "ready");
    let node = ready.last().context("no `POLIS ready`")?.text("node").to_owned();
    ensure!(node != lost, "a new machine is {lost}");

    owner.run(&["node", "delete", lost, "--force", "--yes"])?;
    takes_both_roles(owner, &mut machine, &node)?;
    // The way to the API leads to the new node.
    let kubectl = &Kubectl::of(world, owner)?;
    // The API server has the demo from the snapshot, with a pod on a node that no longer exists.
    let gone = ["wait", "--for=delete", &format!("node/{lost}"), KUBECTL];
    kubectl.run(&gone, "")?;
    kubectl.run(&["wait", "--for=condition=Available", "deployment/demo", IN_DEMO, KUBECTL], "")?;
    kubectl.delete(&["job/visitor", IN_DEMO, "--ignore-not-found"], GONE)?;
    visited(kubectl, &node)?;
    Ok((machine, node))
}
