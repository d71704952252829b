//! Machines on one segment become one cluster, come back as one, open each other's
//! disks, remove one of them, and come back after a season.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_base::sys::clock;
use polis_proto::v1::ClusterBootstrap;
use polis_qemu::Config;
use polis_qemu::args::Devices;
use polis_qemu::fleet::Part;
use polis_tests::{Story, story};
use prost::Message as _;

use crate::attended::{self, waits};
use crate::fleet::{all_vote, joined_by, run};
use crate::owner::private;
use crate::samples;
use crate::world::{self, BOOT, DISK_SIZE_SMALL, SOON, World};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(three_machines_from_nothing_become_three_voters_and_come_back_after_a_cold_start)
        .cluster()
        .takes(200)
        .one_of(samples::VOTERS),
    story!(an_encrypted_disk_is_opened_by_the_cluster_and_by_it_alone_until_the_node_is_deleted)
        .cluster()
        .takes(120)
        .one_of(samples::ADMISSION),
];

fn three_machines_from_nothing_become_three_voters_and_come_back_after_a_cold_start() -> Result<()>
{
    let world = World::new("three_machines_from_nothing")?;
    // Nothing is asked for: the disks are encrypted and authenticated.
    let parameters = world::with_cluster(ClusterBootstrap {
        owner_public_key: world::OWNER.to_vec(),
        ..ClusterBootstrap::default()
    });
    let bootstrap_config = Config {
        disk: Some(world.disk_of_size(DISK_SIZE_SMALL, None)?),
        fw_cfg: world.fw_cfg(&parameters.encode_to_vec())?,
        ..world.bare("")
    };
    let mut cluster = joined_by(&world, bootstrap_config, 3, "")?;
    let bootstrap_config = cluster.found()?;
    // Side by side: while one boots, the others would only wait.
    cluster.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    all_vote(&mut cluster)?;

    // All off, all on: no node leads before they have found each other.
    for number in 0..3 {
        cluster.cut_power(number);
    }
    cluster.boot(2)?;
    let machine = cluster.machine(2)?;
    let waits = machine.wait_for("stage", BOOT, |stage| {
        let waits = stage.is("name", "consensus") && stage.is("state", "waiting");
        waits && stage.text("for").contains("2 of 3 voters must be on")
    })?;
    let waits = waits.text("for").to_owned();
    for number in [1, 0] {
        let node = &cluster.nodes[number];
        let known = format!("{} (last address {})", node.id, node.address);
        ensure!(waits.contains(&known), "{known} is not named: {waits}");
        cluster.boot(number)?;
    }
    for number in 0..3 {
        let id = cluster.nodes[number].id.clone();
        let machine = cluster.machine(number)?;
        let ready = machine.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("ca", bootstrap_config.text("ca")), "another cluster: {ready}");
        ensure!(ready.is("node", &id), "another node: {ready}");
        let etcd = machine.seen(|event| event.word == "etcd");
        let etcd = etcd.last().context("no etcd")?;
        ensure!(etcd.is("state", "voter") && etcd.is("members", "3"), "no vote: {etcd}");
    }

    let leaver = cluster.nodes[2].id.clone();
    run(&cluster, &["node", "roles", &leaver, "--remove", "consensus-member", "--yes"])?;
    cluster.machine(2)?.wait("the end of a member of etcd", SOON, |line| {
        line.text.contains("the data of the etcd member is removed").then_some(())
    })?;
    for number in 0..2 {
        cluster.machine(number)?.wait_for("etcd", SOON, |event| event.is("members", "2"))?;
    }
    run(&cluster, &["node", "decommission", &leaver, "--yes"])?;
    let machine = cluster.machine(2)?;
    machine.wait_for("cluster", SOON, |event| event.is("state", "disowning"))?;
    world::guru(machine, "0711")?;
    // It knows its former identity, and that it has lost it.
    cluster.boot(2)?;
    let machine = cluster.machine(2)?;
    machine.wait_for("cluster", BOOT, |event| event.is("state", "disowning"))?;
    world::guru(machine, "0711")?;

    // Off for so long that the certificates of both have ended.
    let later = clock::now() + Duration::from_secs(100 * 24 * 60 * 60);
    for number in 0..2 {
        cluster.cut_power(number);
        cluster.nodes[number].config.clock = Some(later);
        // The clock of a saved machine stands where it was.
        cluster.nodes[number].config.devices = Devices::FromStart;
    }
    for number in 0..2 {
        cluster.boot(number)?;
    }
    for number in 0..2 {
        let machine = cluster.machine(number)?;
        machine.wait("a new certificate", BOOT, |line| {
            line.text.contains("the certificate of this node had ended").then_some(())
        })?;
        machine.wait_for("ready", BOOT, |_| true)?;
    }
    Ok(())
}

fn an_encrypted_disk_is_opened_by_the_cluster_and_by_it_alone_until_the_node_is_deleted()
-> Result<()> {
    let world = World::new("opened_by_the_cluster")?;
    let bootstrap_config = Config {
        disk: Some(world.disk(None)?),
        fw_cfg: world.fw_cfg(&attended::parameters().encode_to_vec())?,
        ..world.bare("")
    };
    let mut cluster = joined_by(&world, bootstrap_config, 2, "")?;
    cluster.found()?;
    cluster.admit(&[(1, Part::Worker)])?;
    let recovery = run(&cluster, &["node", "recovery-key", &cluster.nodes[0].id])?;
    let recovery = private(&world.path("recovery"), &recovery)?;
    let node = cluster.nodes[1].id.clone();

    // No keeper of the machine has a share: only a curator can give it.
    cluster.cut_power(1);
    cluster.boot(1)?;
    let machine = cluster.machine(1)?;
    machine.wait("a question for the key", BOOT, |line| {
        line.text.contains("asking the cluster for its half").then_some(())
    })?;
    let ready = machine.wait_for("ready", BOOT, |_| true)?;
    ensure!(ready.is("node", &node), "another node: {ready}");

    // All off, all on: a person opens the voter, and the voter opens the other.
    for number in [0, 1] {
        cluster.cut_power(number);
    }
    for number in [1, 0] {
        cluster.boot(number)?;
    }
    let words = waits(cluster.machine(0)?)?;
    let forward = cluster.nodes[0].forwards.iter().find(|it| it.port == 7839).context("no port")?;
    let at = format!("127.0.0.1:{}", forward.host);
    let key = recovery.display().to_string();
    let unlock = ["node", "unlock", &cluster.nodes[0].id, "--at", &at, "--fingerprint", &words];
    run(&cluster, &[&unlock[..], &["--recovery-key-file", &key]].concat())?;
    for number in [0, 1] {
        let id = cluster.nodes[number].id.clone();
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("node", &id), "another node: {ready}");
    }

    // A node that is deleted while it is off is unknown to the cluster, and its disk
    // stays shut.
    cluster.cut_power(1);
    run(&cluster, &["node", "delete", &node, "--force", "--yes"])?;
    cluster.boot(1)?;
    world::guru(cluster.machine(1)?, "0713")?;
    Ok(())
}
