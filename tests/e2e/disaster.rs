//! The end of every machine of a cluster, and its second life from a snapshot.

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::fleet::Part;
use polis_qemu::history::Summary;
use polis_tests::{Story, draws_all, story};

use crate::esp;
use crate::fleet::{APPEND, blank_disk, checked, document, fleet, raise, run};
use crate::samples;
use crate::world::{BOOT, SNAPSHOT, SOON, World};

/// Voters in an ordinary run: the lost one and the intact one. With `--all` another one
/// is lost, whose place a new machine takes.
const DRAWN: usize = 2;
const ALL: usize = 3;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_cluster_that_is_lost_begins_again_from_a_snapshot_and_an_old_disk_comes_back)
        .cluster()
        .takes(150)
        .one_of(samples::VOTERS)];

fn a_cluster_that_is_lost_begins_again_from_a_snapshot_and_an_old_disk_comes_back() -> Result<()> {
    let world = World::new("disaster")?;
    let voters = if draws_all() { ALL } else { DRAWN };
    let mut cluster = fleet(&world, voters, APPEND)?;
    raise(&mut cluster, voters)?;
    let before = checked(&world, voters)?;
    // The disks of all but the last are lost; its disk is found whole later.
    let intact = voters - 1;
    restored(&world, &mut cluster, &before, intact)?;
    comes_back(&mut cluster, intact)?;
    Ok(cluster.wait_whole(voters)?)
}

/// Saves etcd, destroys all machines, and brings the cluster up on new ones. `before`
/// sums up the acknowledged writes before the snapshot; the disks of the nodes before
/// `intact` are lost.
fn restored(world: &World, cluster: &mut Fleet, before: &Summary, intact: usize) -> Result<()> {
    let info = ["cluster", "info"];
    let ca = document(cluster, &info)?["ca_fingerprint"].clone();
    let old: Vec<String> = cluster.nodes.iter().map(|node| node.id.clone()).collect();
    let saved = world.path("etcd.age").display().to_string();
    run(cluster, &["etcd", "snapshot", "--out", &saved])?;
    for number in 0..cluster.nodes.len() {
        cluster.cut_power(number);
    }

    // The cluster is gone: the owner's key alone reads it.
    let file = world.path("etcd.snapshot");
    let out = file.display().to_string();
    cluster.operator.run(&["etcd", "decrypt", &saved, "--out", &out])?;

    let blank = world.disk(None)?;
    for number in 0..intact {
        cluster.nodes[number].config.disk = Some(blank_disk(world, &blank, number)?);
    }
    let first = cluster.nodes[0].config.disk.as_ref().context("no disk")?.file.clone();
    esp::write(&first, SNAPSHOT, &std::fs::read(&file)?)?;
    // The owner's certificate is as good as it was: ownership is not taken again.
    let ready = cluster.boot_again(0)?;
    ready.text("node").clone_into(&mut cluster.nodes[0].id);
    ensure!(!old.contains(&cluster.nodes[0].id), "a new machine with an old name: {ready}");
    let machine = cluster.machine(0)?;
    let listed = machine.wait_for("exercise", SOON, |event| event.get("listed").is_some())?;
    let kept: usize = listed.text("listed").parse()?;
    let output: usize = before.acknowledged.values().sum();
    ensure!(kept >= output, "{kept} writes are left of {output}");
    let left = esp::bytes(&first, SNAPSHOT)?.context("the file of the snapshot is gone")?;
    ensure!(left.iter().all(|byte| *byte == 0), "the snapshot is still on the ESP");
    ensure!(document(cluster, &info)?["ca_fingerprint"] == ca, "another cluster");

    let nodes = document(cluster, &["node", "list"])?;
    let nodes = nodes.as_array().context("no nodes")?;
    for id in &old {
        let is_it = |node: &&serde_json::Value| node["id"] == **id;
        let node = nodes.iter().find(is_it).with_context(|| format!("{id} was forgotten"))?;
        ensure!(node["former_voter"] == true, "{id} has no mark of a former voter: {node}");
    }
    for id in &old[..intact] {
        run(cluster, &["node", "delete", id, "--force", "--yes"])?;
    }
    let others = (1..intact).map(|number| (number, Part::Voter));
    Ok(cluster.admit(&others.collect::<Vec<_>>())?)
}

/// A voter of the lost cluster, whose disk is whole, is given parameters like a new
/// machine. It is the node that it was, and gives up its etcd on an operator's word and
/// not before.
fn comes_back(cluster: &mut Fleet, intact: usize) -> Result<()> {
    let id = cluster.nodes[intact].id.clone();
    cluster.give_ticket(intact)?;
    cluster.boot(intact)?;
    let machine = cluster.machine(intact)?;
    machine.wait_for("stage", BOOT, |stage| {
        let waits = stage.is("name", "cluster") && stage.is("state", "waiting");
        waits && stage.text("for").contains("founded again from a snapshot")
    })?;
    ensure!(machine.seen(|event| event.word == "ready").is_empty(), "it took its etcd for whole");
    let role = |cluster: &Fleet, change: &str| {
        run(cluster, &["node", "roles", &id, change, "consensus-member", "--yes"])
    };
    role(cluster, "--remove")?;
    let ready = cluster.machine(intact)?.wait_for("ready", BOOT, |_| true)?;
    ensure!(ready.is("node", &id), "another node: {ready}");
    role(cluster, "--add")?;
    let machine = cluster.machine(intact)?;
    let members = (intact + 1).to_string();
    machine
        .wait_for("etcd", SOON, |etcd| etcd.is("state", "voter") && etcd.is("members", &members))?;
    Ok(())
}
