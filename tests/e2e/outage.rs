//! One cluster, three voters, a worker and a newcomer, and every outage that may befall
//! it.
//!
//! The cluster is raised once, since that takes longer than any outage. Every voter
//! writes from its first boot to the end, and the acknowledgements are compared with the
//! content of etcd, at each boot of each and at the very end.
//!
//! Two machines come to their vote on ways on which the power goes, at moments that the
//! seed draws (`newcomer`): the second, beside one voter, and the last, beside three.
//! With `--all` there is a second worker, and every voter is rebooted, not the leader and
//! another.

use std::ops::Range;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::Fleet;
use polis_qemu::fleet::Part;
use polis_qemu::machine::Error;
use polis_tests::{Story, draws_all, pick, seed, story};

use crate::fleet::{
    APPEND, ask_until, becomes, catch_up, checked, document, fleet, run, writes_go_on,
    writes_have_stopped,
};
use crate::newcomer::{Ways, leaders};
use crate::samples;
use crate::watched::Watch;
use crate::world::{BOOT, SOON, World, chapters};

const VOTERS: [usize; 3] = [0, 1, 2];
/// Workers in an ordinary run, and with `--all`.
const WORKERS: [usize; 2] = [1, 2];

/// Power cuts on the two ways: one beside a single voter, two beside three.
const CUTS: u32 = 3;

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(three_voters_and_their_workers_keep_every_acknowledged_write_through_each_outage)
        .cluster()
        .takes(320)
        .one_of(samples::VOTERS)];

fn three_voters_and_their_workers_keep_every_acknowledged_write_through_each_outage() -> Result<()>
{
    let (seed, whole) = (seed()?, draws_all());
    let workers = WORKERS[usize::from(whole)];
    eprintln!("POLIS_SEED={seed}, {workers} workers");
    let mut ways = Ways::drawn(seed, CUTS);
    let world = World::new("outage")?;
    // The last machine is the newcomer.
    let mut cluster = fleet(&world, VOTERS.len() + workers + 1, APPEND)?;
    let chapter = chapters();

    raised(&mut cluster, &mut ways)?;
    chapter("three vote, the others work");
    leader_dies(&mut cluster)?;
    chapter("the leader was killed, and came back");
    leader_is_cut_off(&mut cluster)?;
    chapter("the leader was cut off, and came back");
    majority_is_cut_off(&mut cluster)?;
    chapter("the majority was cut off, and came back");
    restarted_one_by_one(&mut cluster, seed)?;
    chapter("voters were rebooted, one by one");
    all_die_and_move(&mut cluster)?;
    chapter("all lost their power, and came back at other addresses");

    ways.workers = workers;
    let victims = ways.one_each();
    let newcomer = members(&cluster);
    ways.way(&mut cluster, newcomer, &VOTERS, &victims)?;
    writes_go_on(&mut cluster, &[0, 1, 2, newcomer])?;
    chapter("a newcomer votes, and the power of a leader and its own was cut on its way");

    let summary = checked(&world, cluster.nodes.len())?;
    chapter(&format!("{summary:?}"));
    ensure!(summary.acknowledged.len() == VOTERS.len() + 1, "not all wrote: {summary:?}");
    ensure!(summary.listings >= 10, "too seldom read: {summary:?}");
    Ok(())
}

/// How many machines are members until the newcomer comes.
fn members(cluster: &Fleet) -> usize {
    cluster.nodes.len() - 1
}

fn workers(cluster: &Fleet) -> Range<usize> {
    VOTERS.len()..members(cluster)
}

fn raised(cluster: &mut Fleet, ways: &mut Ways) -> Result<()> {
    cluster.found()?;
    let victim = ways.either();
    ways.way(cluster, VOTERS[1], &[VOTERS[0]], &[victim])?;
    let workers = workers(cluster).map(|number| (number, Part::Worker));
    let rest = std::iter::once((VOTERS[2], Part::Voter)).chain(workers);
    cluster.admit(&rest.collect::<Vec<_>>())?;
    cluster.wait_whole(members(cluster))?;
    // During an election no leader answers.
    ask_until("three members vote, and one of them leads", || {
        let listed = cluster.operator.document(&["etcd", "members"])?;
        let listed = listed.as_array().context("no members")?;
        let voters = listed.iter().filter(|member| member["role"] == "voter").count();
        let leaders = listed.iter().filter(|member| member["leader"] == true).count();
        ensure!((listed.len(), voters) == (3, 3) && leaders < 2, "{listed:?}");
        Ok((leaders == 1).then_some(()))
    })?;
    writes_go_on(cluster, &VOTERS)
}

/// The voters but one.
fn but(one: usize) -> Vec<usize> {
    VOTERS.into_iter().filter(|number| *number != one).collect()
}

/// The power of the leader of the curators is cut. A person sees that in time, writes go on,
/// the workers find the new leader, and neither of the two that are left can be removed.
fn leader_dies(cluster: &mut Fleet) -> Result<()> {
    let (_etcd, leader) = leaders(cluster)?;
    let rest = but(leader);
    let watch = Watch::open(cluster, leader, rest[0])?;
    cluster.cut_power(leader);
    watch.is_right_in_time()?;
    writes_go_on(cluster, &rest)?;
    followed(cluster, leader)?;
    watch.was_never_well("the leader's power is cut")?;

    let survivor = cluster.nodes[rest[0]].id.clone();
    let remove = ["node", "roles", &survivor, "--remove", "consensus-member", "--yes"];
    let remove = [&["--timeout", "1m"][..], &remove].concat();
    let output = ask_until("a refusal that counts one voter", || {
        let refused = cluster.operator.run(&remove);
        let Err(Error::Operator { output, .. }) = refused else {
            anyhow::bail!("the quorum was given away: {refused:?}");
        };
        eprintln!("refused: {output}");
        // A voter that is busy may answer too late to be counted.
        let counted = output.contains("2 of 2 voters must answer, of which 1 can be reached");
        Ok(counted.then_some(output))
    })?;
    ensure!(output.contains(&cluster.nodes[leader].id), "the dead one is not named: {output}");

    cluster.boot_again(leader)?;
    listed(cluster, leader)?;
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(members(cluster))?)
}

/// Waits until another node leads, and the leader has contact with the workers.
fn followed(cluster: &Fleet, dead: usize) -> Result<()> {
    let dead = cluster.nodes[dead].id.as_str();
    ask_until("the workers follow the new leader", || {
        let status = document(cluster, &["cluster", "status"])?;
        let new = status["leader"].as_str().is_some_and(|leader| leader != dead);
        let nodes = status["nodes"].as_array().context("no nodes")?;
        let healthy = |number: &usize| {
            let id = cluster.nodes[*number].id.as_str();
            nodes.iter().any(|node| node["id"] == id && node["health"] == "healthy")
        };
        Ok((new && workers(cluster).all(|number| healthy(&number))).then_some(()))
    })
}

/// Waits until a node that has booted has read everything that is there.
fn listed(cluster: &mut Fleet, number: usize) -> Result<()> {
    let machine = cluster.machine(number)?;
    machine.wait_for("exercise", SOON, |event| event.get("listed").is_some())?;
    Ok(())
}

/// The leader loses its network. The others go on without it; it reports that it is
/// split, and heals by itself.
fn leader_is_cut_off(cluster: &mut Fleet) -> Result<()> {
    let leader = cluster.etcd_leader()?;
    let watch = Watch::open(cluster, leader, but(leader)[0])?;
    cluster.segment.links().isolate(Fleet::port(leader));
    watch.is_right_in_time()?;
    writes_go_on(cluster, &but(leader))?;
    becomes(cluster, leader, "split")?;
    watch.was_never_well("the leader of etcd is cut off")?;
    cluster.segment.links().heal();
    becomes(cluster, leader, "home")?;
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(members(cluster))?)
}

/// No node reaches another: nothing is acknowledged until they are joined again.
fn majority_is_cut_off(cluster: &mut Fleet) -> Result<()> {
    for number in 0..members(cluster) {
        catch_up(cluster.machine(number)?);
    }
    for number in 0..2 {
        cluster.segment.links().isolate(Fleet::port(number));
    }
    for number in 0..members(cluster) {
        becomes(cluster, number, "split")?;
    }
    for number in VOTERS {
        writes_have_stopped(cluster, number)?;
    }
    cluster.segment.links().heal();
    for number in 0..members(cluster) {
        becomes(cluster, number, "home")?;
    }
    writes_go_on(cluster, &VOTERS)?;
    Ok(cluster.wait_whole(members(cluster))?)
}

/// Voters are rebooted one by one, each once the cluster is whole: one that follows, then
/// the leader; with `--all`, every one. The others never lose the quorum.
fn restarted_one_by_one(cluster: &mut Fleet, seed: u64) -> Result<()> {
    let leader = cluster.etcd_leader()?;
    let mut order = but(leader);
    if !draws_all() {
        let drawn = pick(seed, "rebooted", order.len(), 1);
        order = drawn.into_iter().map(|at| order[at]).collect();
    }
    order.push(leader);
    for number in order {
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
        run(cluster, &["node", "reboot", &id, "--yes"])?;
        let machine = cluster.machine(number)?;
        machine.wait_for("off", SOON, |off| off.is("reason", "reboot"))?;
        writes_go_on(cluster, &but(number))?;
        cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        listed(cluster, number)?;
        cluster.wait_whole(members(cluster))?;
        ensure!(split(cluster)? == before, "the others lost the quorum meanwhile");
    }
    writes_go_on(cluster, &VOTERS)
}

/// The power of all goes at once, and comes back one after the other, the last one first,
/// while the DHCP server has forgotten the address of each node: every node has moved from
/// the address that the others knew, and no leader could publish the new ones.
fn all_die_and_move(cluster: &mut Fleet) -> Result<()> {
    let before: Vec<_> = cluster.nodes.iter().map(|node| node.address).collect();
    // A worker goes first: a person sees that, too.
    let worker = workers(cluster).start;
    let watch = Watch::open(cluster, worker, VOTERS[0])?;
    cluster.cut_power(worker);
    watch.is_right_in_time()?;
    watch.was_never_well("a worker's power is cut")?;
    (0..members(cluster)).for_each(|number| cluster.cut_power(number));
    cluster.renumber()?;
    for number in (0..members(cluster)).rev() {
        cluster.boot(number)?;
    }
    for number in 0..members(cluster) {
        let address = cluster.nodes[number].address;
        ensure!(!before.contains(&address), "{address} is an old address");
        let ready = cluster.machine(number)?.wait_for("ready", BOOT, |_| true)?;
        ensure!(ready.is("address", &address.to_string()), "not at {address}: {ready}");
    }
    for number in VOTERS {
        listed(cluster, number)?;
    }
    writes_go_on(cluster, &VOTERS)?;
    cluster.wait_whole(members(cluster)).context("not healthy at the new addresses")
}
