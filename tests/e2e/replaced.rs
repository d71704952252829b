//! Members that die for good, are removed while they are off or while they run, or come
//! back without their data; and the machine that takes a place.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::args::Devices;
use polis_qemu::fleet::Part;
use polis_qemu::host::free_port;
use polis_tests::{Story, story};

use crate::fleet::{LOOK, ask_within, document, fleet, run};
use crate::samples;
use crate::stolen::Stolen;
use crate::world::{BOOT, SOON, World, chapters, guru};

const FIRST: usize = 0;
/// Loses its role while it is off, gets it again, and is deleted while it runs.
const SECOND: usize = 1;
/// Dies, is deleted, and comes back.
const DEAD: usize = 2;
/// Takes the place of the dead one, and loses its data.
const HEIR: usize = 3;

/// The stolen keys are tried from an address that is not a member's, which the firewall keeps away
/// from etcd.
const OPEN: &str = "polis.fault=no-firewall";

/// Longest that a certificate may be good after the command that ends it: a curator
/// that follows learns it from a watch.
const AT_ONCE: Duration = Duration::from_secs(30);

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[story!(a_dead_voter_is_replaced_and_removed_nodes_learn_it)
    .cluster()
    .takes(220)
    .one_of(samples::VOTERS)];

fn a_dead_voter_is_replaced_and_removed_nodes_learn_it() -> Result<()> {
    let world = World::new("replaced")?;
    let mut cluster = fleet(&world, 4, OPEN)?;
    cluster.found()?;
    let chapter = chapters();
    cluster.admit(&[(SECOND, Part::Voter), (DEAD, Part::Voter)])?;
    cluster.wait_whole(3)?;
    chapter("three vote");
    // Boots while the rest goes on, and waits for approval.
    cluster.give_ticket(HEIR)?;
    cluster.boot(HEIR)?;
    dead_one_is_deleted(&mut cluster)?;
    chapter("the dead one is deleted, and its keys open nothing");
    cluster.let_in(&[(HEIR, Part::Voter)])?;
    chapter("a new machine votes in its place");
    // No curator takes its certificate, so it registers.
    cluster.boot(DEAD)?;
    role_is_taken_while_off(&mut cluster)?;
    chapter("one has lost its role while it was off, and got it again");
    disowned(&mut cluster, DEAD)?;
    chapter("the deleted node came back and received its removal");
    data_is_lost(&world, &mut cluster)?;
    chapter("one came back without its data");
    run(&cluster, &["node", "delete", &cluster.nodes[SECOND].id, "--force", "--yes"])?;
    disowned(&mut cluster, SECOND)?;
    chapter("a node was deleted while it ran and received its removal");
    let nodes = document(&cluster, &["node", "list"])?;
    let nodes = nodes.as_array().context("no nodes")?;
    ensure!(nodes.len() == 1 && nodes[0]["id"] == *cluster.nodes[FIRST].id, "{nodes:?}");
    Ok(())
}

/// The disk of a voter that died is in other hands, until the voter is deleted.
fn dead_one_is_deleted(cluster: &mut Fleet) -> Result<()> {
    let dead = cluster.nodes[DEAD].id.clone();
    cluster.cut_power(DEAD);
    let disk = cluster.nodes[DEAD].config.disk.as_ref().context("no disk")?;
    let stolen = Stolen::from_disk(&disk.file, dead.parse()?)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let mut doors = Vec::new();
    for number in [FIRST, SECOND] {
        let etcd = free_port()?;
        cluster.segment.forward(etcd, cluster.nodes[number].address, 7834)?;
        let at = |port: u16| {
            let forward = cluster.nodes[number].forwards.iter().find(|it| it.port == port);
            forward.map(|it| it.host).with_context(|| format!("no way to {port}"))
        };
        doors.push((number, [at(7835)?, at(7839)?, etcd]));
    }
    let opens = |cluster: &Fleet, number: usize, ports| {
        runtime.block_on(stolen.is_taken(ports, &cluster.nodes[number].id))
    };
    for &(number, ports) in &doors {
        let taken = opens(cluster, number, ports)?;
        ensure!(taken == [true; 3], "node {} does not know its own: {taken:?}", number + 1);
    }
    run(cluster, &["node", "delete", &dead, "--force", "--yes"])?;
    let deleted = Instant::now();
    ask_within("the keys of a deleted node are refused everywhere", AT_ONCE, LOOK, || {
        for &(number, ports) in &doors {
            if opens(cluster, number, ports)? != [false; 3] {
                return Ok(None);
            }
        }
        Ok(Some(()))
    })?;
    eprintln!("its keys were refused everywhere {:.1?} after the command", deleted.elapsed());
    let members = document(cluster, &["etcd", "members"])?;
    ensure!(members.as_array().is_some_and(|all| all.len() == 2), "{members}");
    Ok(())
}

/// A voter that is off is taken out of etcd, and gets the role again before it is back.
/// It finds that its member was removed, leaves, and enters as another.
fn role_is_taken_while_off(cluster: &mut Fleet) -> Result<()> {
    let id = cluster.nodes[SECOND].id.clone();
    cluster.cut_power(SECOND);
    run(cluster, &["node", "roles", &id, "--remove", "consensus-member", "--yes"])?;
    run(cluster, &["node", "roles", &id, "--add", "consensus-member"])?;
    let ready = cluster.boot_again(SECOND)?;
    ensure!(ready.is("roles", "none"), "it has a role: {ready}");
    let machine = cluster.machine(SECOND)?;
    machine.wait_for("etcd", BOOT, |etcd| etcd.is("state", "voter") && etcd.is("members", "3"))?;
    Ok(())
}

/// Waits until a machine reports that it was removed, and stops.
fn disowned(cluster: &mut Fleet, number: usize) -> Result<()> {
    let machine = cluster.machine(number)?;
    machine.wait_for("cluster", SOON, |event| event.is("state", "disowning"))?;
    guru(machine, "0711").map(drop)
}

/// A voter whose data is gone stops, and prints the next step. The story takes it.
fn data_is_lost(world: &World, cluster: &mut Fleet) -> Result<()> {
    let heir = &mut cluster.nodes[HEIR];
    let id = heir.id.clone();
    heir.config.firmware = world.quick.direct("polis.fault=lose-etcd");
    heir.config.devices = Devices::FromStart;
    cluster.cut_power(HEIR);
    cluster.boot_again(HEIR)?;
    let lost = guru(cluster.machine(HEIR)?, "0801")?;
    ensure!(lost.text("next").contains("remove this node"), "no next step: {lost}");
    cluster.cut_power(HEIR);
    run(cluster, &["node", "delete", &id, "--force", "--yes"])?;
    cluster.wait_whole(2).map_err(Into::into)
}
