//! `cargo xtask bench cluster`: three nodes from blank disks, a node that gets its vote back, a
//! cold start of all, and the death of each leader.
//!
//! ```text
//! found, admit two (by part, by node) --> take a vote away, give it again, on idle machines
//!     --> cut all power --> boot all until each is ready
//!     --> kill the leader of etcd --> the next acknowledged write
//!     --> boot it, kill the curator that leads --> the next call that succeeds
//! ```
//!
//! The parts are the milestones of `cargo xtask run --nodes 3`. From the cold start on,
//! each node writes numbered keys (`polis.exercise=append`) and reports the acknowledged
//! ones.
//!
//! What this module does not do: keep the machines busy while the cluster starts. The cost
//! on a busy host does not describe the cluster.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_image::Kind;
use polis_proto::v1::cluster_configuration::StorageSecurityPolicy;
use polis_qemu::args::{Cache, Disk, FwCfg};
use polis_qemu::fleet::{Milestone, PARAMETERS, Part};
use polis_qemu::host::{Preference, accelerator};
use polis_qemu::{Bus, Config, Event, Fleet, Image, Machine, Operator};

use super::{Row, Table};
use crate::run::{self, several};
use crate::{host, operator, parameters};

const NODES: u8 = 3;

/// Memory of a node, in MiB.
const MEMORY: u32 = 512;

/// `bench storage` measures encryption.
const POLICY: StorageSecurityPolicy = StorageSecurityPolicy::NeedsInsecure;

/// From a learner to a voter, in seconds.
const VOTES_GOAL: f64 = 2.0;

/// From the death of etcd's leader to the next acknowledged write, in seconds.
const WRITES_GOAL: f64 = 2.5;

/// From the death of the curator that leads to the next call that succeeds, in seconds.
const CALLS_GOAL: f64 = 5.0;

/// Makes each node write a history.
const APPEND: &str = "polis.exercise=append";

/// Upper bound of every step on a host that is fast enough to measure on.
const LONG: Duration = Duration::from_secs(300);

/// Acknowledged writes, one every tenth of a second, after which every node has found the
/// new leader.
const GOES_ON: usize = 50;

pub(super) fn measure(runs: u32) -> Result<Table> {
    host::require_memory(&[MEMORY; NODES as usize])?;
    let image = run::built_image(Kind::Measurement)?;
    let folder = crate::image::workspace().join("target/bench/cluster");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("cannot empty target/bench/cluster")?;
    }
    let mut table = Table::new("cluster", runs)?;
    for round in 1..=runs {
        let values = once(&image, &folder.join(round.to_string()))
            .with_context(|| format!("round {round}"))?;
        gather(&mut table.rows, values);
    }
    Ok(table)
}

/// A row's name, its goal and its values.
type Value = (String, Option<f64>, f64);

/// Adds the values of one round to the rows of the same names.
fn gather(rows: &mut Vec<Row>, values: Vec<Value>) {
    for (name, goal, value) in values {
        match rows.iter_mut().find(|row| row.name == name) {
            Some(row) => row.values.push(value),
            None => rows.push(Row { values: vec![value], goal, ..Row::new(name, "s") }),
        }
    }
}

/// One round, from three blank disks.
fn once(image: &Image, folder: &Path) -> Result<Vec<Value>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut fleet = fleet(image, folder)?;
    fleet.found()?;
    fleet.admit(&[(1, Part::Voter), (2, Part::Voter)])?;
    fleet.wait_whole(NODES.into())?;
    let mut values = parts(&fleet.milestones());
    for number in 1..NODES.into() {
        let took = learnt(&mut fleet, number)?.as_secs_f64();
        let name = format!("node {}, of that from learner to voter", number + 1);
        // Other machines boot meanwhile.
        values.push((name, None, took));
    }
    let took = votes_again(&mut fleet)?.as_secs_f64();
    println!("cluster: a node was a learner for {took:.2} s on idle machines");
    values.push(("from learner to voter, on idle machines".to_owned(), Some(VOTES_GOAL), took));

    for number in 0..NODES.into() {
        fleet.cut_power(number);
        fleet.nodes[number].config.firmware = image.direct(APPEND);
    }
    let began = Instant::now();
    for number in 0..NODES.into() {
        fleet.boot(number)?;
    }
    for number in 0..NODES.into() {
        fleet.machine(number)?.wait_for("ready", LONG, |_| true)?;
    }
    values.push(("cold start of all, until each is ready".to_owned(), None, since(began)));
    println!("cluster: all are ready after {:.1} s from cold", since(began));

    // With all three nodes, so that the leader does not change soon.
    fleet.wait_whole(NODES.into())?;
    let outage = leader_dies(&mut fleet)?;
    println!("cluster: the leader was killed, and {outage:.2} s later a write went on");
    let name = "leader killed, until the next acknowledged write".to_owned();
    values.push((name, Some(WRITES_GOAL), outage));

    for number in 0..NODES.into() {
        if fleet.nodes[number].machine.is_none() {
            fleet.boot_again(number)?;
        }
    }
    fleet.wait_whole(NODES.into())?;
    let outage = curator_dies(&mut fleet)?;
    println!("cluster: the curator that led was killed, and {outage:.2} s later a call succeeded");
    let name = "leading curator killed, until the next call succeeds".to_owned();
    values.push((name, Some(CALLS_GOAL), outage));
    drop(fleet);
    for number in 1..=NODES {
        let disk = folder.join(number.to_string()).join("disk.img");
        fs::remove_file(&disk).with_context(|| format!("cannot remove {}", disk.display()))?;
    }
    Ok(values)
}

fn since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64()
}

/// Three machines, plugged in and off.
fn fleet(image: &Image, folder: &Path) -> Result<Fleet> {
    let mut configs = Vec::new();
    for number in 1..=NODES {
        let folder = folder.join(number.to_string());
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let file = folder.join("disk.img");
        polis_qemu::disk::copy(&image.disk, &file).context("cannot copy the image")?;
        configs.push(Config {
            disk: Some(Disk { file, bus: Bus::Virtio, cache: Cache::Unsafe }),
            memory: MEMORY,
            ..Config::new(image.direct(""), accelerator(Preference::Auto, 1))
        });
    }
    let owner = parameters::owner_key(folder)?;
    let file = folder.join("1/parameters.pb");
    fs::write(&file, parameters::with_policy(&owner, None, POLICY))
        .with_context(|| format!("cannot write {}", file.display()))?;
    configs[0].fw_cfg = vec![FwCfg { name: PARAMETERS.to_owned(), file }];
    let (program, config) = operator::install(folder, false)?;
    let operator = Operator::new(&program, &config, "bench");
    let mut fleet = Fleet::new(folder, configs, operator, &folder.join("owner.key"))?;
    fleet.patience = LONG;
    Ok(fleet.reporting(|milestone| println!("cluster: {}", several::describe(milestone))))
}

/// How long a node was a learner: from the first event of another member that counts it to its
/// own event as a voter. The nodes come one after the other, and a learner counts as a member.
fn learnt(fleet: &mut Fleet, number: usize) -> Result<Duration> {
    let mut votes = Vec::new();
    for number in 0..NODES.into() {
        votes.push(first_etcd(fleet.machine(number)?, |_| true).context("no vote")?);
    }
    let own = votes[number];
    let voters_before = votes.iter().filter(|vote| **vote < own).count();
    let counts_it = |event: &Event| {
        event.get("members").and_then(|members| members.parse().ok()) > Some(voters_before)
    };
    let others = fleet.nodes.iter().enumerate().filter(|(other, _)| *other != number);
    let machines = others.filter_map(|(_, node)| node.machine.as_ref());
    let added = machines.filter_map(|machine| first_etcd(machine, counts_it)).min();
    let added = added.with_context(|| format!("node {} was not added", number + 1))?;
    Ok(own.saturating_duration_since(added))
}

/// Takes the vote of a node that leads nothing, and gives it again; returns how long the node was
/// a learner.
fn votes_again(fleet: &mut Fleet) -> Result<Duration> {
    let leaders = [fleet.etcd_leader()?, curator_leader(fleet)?];
    let number = follower(leaders).context("one node")?;
    let id = fleet.nodes[number].id.clone();
    let roles = ["--timeout", "2m", "node", "roles", &id];
    let role = "consensus-member";
    fleet.operator.run(&[&roles[..], &["--remove", role, "--yes"]].concat())?;
    fleet.machine(number)?.wait("the end of its member of etcd", LONG, |line| {
        line.text.contains("the data of the etcd member is removed").then_some(())
    })?;
    let began = Instant::now();
    fleet.operator.run(&[&roles[..], &["--add", role, "--yes"]].concat())?;
    let whole = |event: &Event| event.is("state", "voter") && event.is("members", "3");
    fleet.machine(number)?.wait_for("etcd", LONG, whole)?;
    fleet.wait_whole(NODES.into())?;
    let first = |machine: &Machine| {
        let whole = machine.seen(|event| event.word == "etcd" && whole(event));
        whole.iter().map(|event| machine.started() + event.at).find(|at| *at > began)
    };
    let own = first(fleet.machine(number)?).context("no vote")?;
    let others = fleet.nodes.iter().enumerate().filter(|(other, _)| *other != number);
    let machines = others.filter_map(|(_, node)| node.machine.as_ref());
    let added = machines.filter_map(first).min().context("no other member counts it")?;
    Ok(own.saturating_duration_since(added))
}

/// The last node that is not one of these.
fn follower(leaders: [usize; 2]) -> Option<usize> {
    (0..NODES.into()).rfind(|number| !leaders.contains(number))
}

/// The node whose curator leads.
fn curator_leader(fleet: &Fleet) -> Result<usize> {
    let status = fleet.operator.document(&["cluster", "status"])?;
    let leads = |node: &polis_qemu::fleet::Node| status["leader"] == node.id.as_str();
    fleet.nodes.iter().position(leads).context("no curator leads")
}

/// When this machine was first a voter with an event like that.
fn first_etcd(machine: &Machine, is: impl Fn(&Event) -> bool) -> Option<Instant> {
    let votes = |event: &Event| event.word == "etcd" && event.is("state", "voter") && is(event);
    Some(machine.started() + machine.seen(votes).first()?.at)
}

/// How long each part took, of each node; each starts at the end of the one before.
fn parts(milestones: &[Milestone]) -> Vec<Value> {
    // A fast learner votes before it reports that it learns.
    let reported = milestones.iter().filter(|milestone| milestone.what != "learns");
    let reported: Vec<Milestone> = reported.cloned().collect();
    let mut values: Vec<Value> = several::steps(&reported)
        .into_iter()
        .map(|(Milestone { node, what, .. }, took)| {
            (format!("node {}, {what}", node + 1), None, took.as_secs_f64())
        })
        .collect();
    if let Some(last) = milestones.last() {
        values.push(("all vote, from the first power-on".to_owned(), None, last.at.as_secs_f64()));
    }
    values
}

/// Kills the leader while all nodes write; returns the time without an acknowledged write.
fn leader_dies(fleet: &mut Fleet) -> Result<f64> {
    let leader = fleet.etcd_leader()?;
    for number in (0..usize::from(NODES)).filter(|number| *number != leader) {
        acknowledged(fleet.machine(number)?, 1)?;
    }
    let killed = Instant::now();
    fleet.cut_power(leader);
    let rest = fleet.nodes.iter_mut().filter_map(|node| node.machine.as_mut());
    // The outage ends with the first write of another node.
    let outages: Vec<Result<f64>> = thread::scope(|scope| {
        let threads: Vec<_> = rest
            .map(|machine| {
                scope.spawn(move || {
                    let times = acknowledged(machine, GOES_ON)?;
                    let times = times.iter().map(|at| at.saturating_duration_since(killed));
                    Ok(after_the_gap(&times.collect::<Vec<_>>()).as_secs_f64())
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|outage| outage.unwrap_or_else(|_| anyhow::bail!("a thread panicked"))).collect()
    });
    let mut least = f64::INFINITY;
    for outage in outages {
        least = least.min(outage?);
    }
    ensure!(least.is_finite(), "no node is left");
    Ok(least)
}

/// Kills the node whose curator leads; returns the time until a person's next command, which
/// begins at once, has its answer from another one. The command asks the leader alone: one that
/// asks each node waits for the dead one, too.
fn curator_dies(fleet: &mut Fleet) -> Result<f64> {
    let leader = curator_leader(fleet)?;
    let killed = Instant::now();
    fleet.cut_power(leader);
    fleet.operator.document(&["--timeout", "2m", "node", "list"])?;
    Ok(since(killed))
}

/// The time after this number of further acknowledged writes.
fn acknowledged(machine: &mut Machine, count: usize) -> Result<Vec<Instant>> {
    while machine.next_line(Duration::ZERO).is_some() {}
    let written = |event: &polis_qemu::Event| event.get("acknowledged").is_some();
    (0..count)
        .map(|_| {
            machine.wait_for("exercise", LONG, written)?;
            Ok(Instant::now())
        })
        .collect()
}

/// The end of the longest silence: writes that were in transit when the leader died come
/// before it.
fn after_the_gap(times: &[Duration]) -> Duration {
    let before = std::iter::once(Duration::ZERO).chain(times.iter().copied());
    let gaps = before.zip(times).map(|(before, at)| (at.saturating_sub(before), *at));
    gaps.max_by_key(|(gap, _)| *gap).map_or(Duration::ZERO, |(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_that_gives_its_vote_away_leads_neither_etcd_nor_the_curators() {
        assert_eq!(follower([0, 0]), Some(2));
        assert_eq!(follower([0, 2]), Some(1));
        assert_eq!(follower([1, 2]), Some(0));
        assert_eq!(follower([2, 2]), Some(1));
    }

    #[test]
    fn writes_that_were_on_their_way_do_not_end_an_outage() {
        let times = [10, 40, 2_500, 2_600, 2_690].map(Duration::from_millis);
        assert_eq!(after_the_gap(&times), Duration::from_millis(2_500));
        assert_eq!(after_the_gap(&times[..1]), times[0]);
        assert_eq!(after_the_gap(&[]), Duration::ZERO);
    }

    #[test]
    fn a_part_begins_where_the_one_before_ended_whether_it_was_seen_to_learn_or_not() {
        let milestone = |node, what, at| Milestone { node, what, at: Duration::from_secs(at) };
        let all = [
            milestone(0, "founded the cluster", 20),
            milestone(0, "has an owner", 22),
            milestone(1, "asked for approval", 40),
            milestone(2, "has its role", 41),
            milestone(1, "learns", 44),
            milestone(2, "votes", 45),
            milestone(1, "votes", 47),
        ];
        let shown: Vec<String> = parts(&all)
            .into_iter()
            .map(|(name, goal, value)| format!("{name}: {value} {goal:?}"))
            .collect();
        assert_eq!(
            shown,
            [
                "node 1, founded the cluster: 20 None",
                "node 1, has an owner: 2 None",
                "node 2, asked for approval: 18 None",
                "node 2, votes: 7 None",
                "node 3, has its role: 19 None",
                "node 3, votes: 4 None",
                "all vote, from the first power-on: 47 None",
            ]
        );
    }
}
