//! One cluster, three voters and two workers, and everything that may befall it.
//!
//! The cluster is raised once, since that takes longer than any outage. Every
//! voter writes from its first boot to the end, and what they were told is
//! compared with what is found, at each boot of each and at the very end.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::fleet::Part;
use polis_qemu::machine::Error;

use crate::fleet::{
    APPEND, ask_until, becomes, catch_up, checked, fleet, writes_go_on, writes_have_stopped,
};
use crate::world::{BOOT, SOON, World};

const VOTERS: [usize; 3] = [0, 1, 2];
const WORKERS: [usize; 2] = [3, 4];
const ALL: usize = VOTERS.len() + WORKERS.len();

#[test]
fn three_voters_and_two_workers_keep_every_acknowledged_write_through_each_outage() -> Result<()> {
    let world = World::new("outage")?;
    let mut cluster = fleet(&world, ALL, APPEND)?;
    let began = Instant::now();
    let chapter = |title: &str| eprintln!("{:6.1} s  {title}", began.elapsed().as_secs_f64());

    raised(&mut cluster)?;
    chapter("three vote, two work");
    leader_dies(&mut cluster)?;
    chapter("the leader was killed, and came back");
    leader_is_cut_off(&mut cluster)?;
    chapter("the leader was cut off, and came back");
    majority_is_cut_off(&mut cluster)?;
    chapter("the majority was cut off, and came back");
    restarted_one_by_one(&mut cluster)?;
    chapter("all voters were rebooted, one by one");
    all_die_and_move(&mut cluster)?;
    chapter("all lost their power, and came back at other addresses");

    let summary = checked(&world, VOTERS.len())?;
    chapter(&format!("{summary:?}"));
    ensure!(summary.acknowledged.len() == VOTERS.len(), "not all wrote: {summary:?}");
    ensure!(summary.listings >= 10, "too seldom read: {summary:?}");
    Ok(())
}

fn raised(cluster: &mut Fleet) -> Result<()> {
    cluster.found()?;
    let voters = VOTERS[1..].iter().map(|number| (*number, Part::Voter));
    let workers = WORKERS.iter().map(|number| (*number, Part::Worker));
    cluster.admit(&voters.chain(workers).collect::<Vec<_>>())?;
    cluster.wait_whole(ALL)?;
    let members = cluster.operator.document(&["etcd", "members"])?;
    let members = members.as_array().context("no members")?;
    let voters = members.iter().filter(|member| member["role"] == "voter").count();
    let leaders = members.iter().filter(|member| member["leader"] == true).count();
    ensure!((members.len(), voters, leaders) == (3, 3, 1), "{members:?}");
    writes_go_on(cluster, &VOTERS)
}

/// The voters but one.
fn but(one: usize) -> Vec<usize> {
    VOTERS.into_iter().filter(|number| *number != one).collect()
}

/// The leader's power is cut. Writes go on, the workers find the new leader, and
/// nobody can remove one of the two that are left.
fn leader_dies(cluster: &mut Fleet) -> Result<()> {
    let leader = cluster.etcd_leader()?;
    cluster.cut_power(leader);
    let rest = but(leader);
    writes_go_on(cluster, &rest)?;
    followed(cluster, leader)?;

    let survivor = cluster.nodes[rest[0]].id.clone();
    let remove = ["node", "roles", &survivor, "--remove", "consensus-member"];
    let refused = cluster.operator.run(&[&["--timeout", "1m"][..], &remove].concat());
    let Err(Error::Operator { said, .. }) = refused else {
        anyhow::bail!("the quorum was given away: {refused:?}");
    };
    ensure!(
        said.contains("2 of 2 voters must answer, of which 1 can be reached"),
        "no count: {said}"
    );
    ensure!(said.contains(&cluster.nodes[leader].id), "the dead one is not named: {said}");

    cluster.boot_again(leader)?;
    listed(cluster, leader)?;
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(ALL)?)
}

/// Waits until somebody else leads, and both workers are heard by whoever does.
fn followed(cluster: &Fleet, dead: usize) -> Result<()> {
    let dead = cluster.nodes[dead].id.as_str();
    ask_until("the workers follow the new leader", || {
        let status = cluster.operator.document(&["--timeout", "2m", "cluster", "status"])?;
        let new = status["leader"].as_str().is_some_and(|leader| leader != dead);
        let nodes = status["nodes"].as_array().context("no nodes")?;
        let healthy = |number: &usize| {
            let id = cluster.nodes[*number].id.as_str();
            nodes.iter().any(|node| node["id"] == id && node["health"] == "healthy")
        };
        Ok((new && WORKERS.iter().all(healthy)).then_some(()))
    })
}

/// Waits until a node that has booted has read everything that is there.
fn listed(cluster: &mut Fleet, number: usize) -> Result<()> {
    let machine = cluster.machine(number)?;
    machine.wait_for("exercise", SOON, |event| event.get("listed").is_some())?;
    Ok(())
}

/// The leader loses its network. The others go on without it; it says that it is
/// split, and heals by itself.
fn leader_is_cut_off(cluster: &mut Fleet) -> Result<()> {
    let leader = cluster.etcd_leader()?;
    cluster.segment.links().isolate(Fleet::port(leader));
    writes_go_on(cluster, &but(leader))?;
    becomes(cluster, leader, "split")?;
    cluster.segment.links().heal();
    becomes(cluster, leader, "home")?;
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(ALL)?)
}

/// Nobody hears anybody: nothing is acknowledged until they are joined again.
fn majority_is_cut_off(cluster: &mut Fleet) -> Result<()> {
    for number in 0..ALL {
        catch_up(cluster.machine(number)?);
    }
    for number in 0..2 {
        cluster.segment.links().isolate(Fleet::port(number));
    }
    for number in 0..ALL {
        becomes(cluster, number, "split")?;
    }
    for number in VOTERS {
        writes_have_stopped(cluster, number)?;
    }
    cluster.segment.links().heal();
    for number in 0..ALL {
        becomes(cluster, number, "home")?;
    }
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(ALL)?)
}

/// Each voter is rebooted in order, once the cluster is whole. The others never
/// lose the quorum.
fn restarted_one_by_one(cluster: &mut Fleet) -> Result<()> {
    for number in VOTERS {
        let split = |cluster: &mut Fleet| -> Result<usize> {
            let mut times = 0;
            for other in but(number) {
                let split = |event: &polis_qemu::Event| event.is("state", "split");
                times += cluster.machine(other)?.seen(split).len();
            }
            Ok(times)
        };
        let before = split(cluster)?;
        let id = cluster.nodes[number].id.clone();
        cluster.operator.run(&["--timeout", "2m", "node", "reboot", &id, "--yes"])?;
        let machine = cluster.machine(number)?;
        machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
        writes_go_on(cluster, &but(number))?;
        cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        listed(cluster, number)?;
        cluster.wait_whole(ALL)?;
        ensure!(split(cluster)? == before, "the others lost the quorum meanwhile");
    }
    writes_go_on(cluster, &VOTERS)
}

/// The power of all goes at once, and comes back one after the other, the last one
/// first, while the DHCP server has forgotten who had which address: nobody is where
/// the others knew it, and no leader could tell.
fn all_die_and_move(cluster: &mut Fleet) -> Result<()> {
    let before: Vec<_> = cluster.nodes.iter().map(|node| node.address).collect();
    (0..ALL).for_each(|number| cluster.cut_power(number));
    cluster.renumber()?;
    for number in (0..ALL).rev() {
        cluster.boot(number)?;
    }
    for number in 0..ALL {
        let address = cluster.nodes[number].address;
        ensure!(!before.contains(&address), "{address} is an old address");
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("address", &address.to_string()), "not at {address}: {ready}");
    }
    for number in VOTERS {
        listed(cluster, number)?;
    }
    writes_go_on(cluster, &VOTERS)?;
    cluster.wait_whole(ALL).context("not whole at the new addresses")
}
