//! Power cuts of a machine on its way from a ticket to a vote, and of whoever
//! leads while it is on it: one member alone, of two, of three.
//!
//! Each moment is a share of the very boot that it cuts, so a slow host is cut at
//! the same place as a quick one. The seed is printed; `POLIS_SEED` draws the
//! same shares again, and `POLIS_CUTS` says how many cuts there are.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::fleet::{Asks, Part, asks};
use polis_qemu::{Event, Fleet, Machine};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::fleet::{
    APPEND, acknowledged_at, blank_disk, checked, fleet, longest_gap, writes_go_on,
};
use crate::world::{BOOT, World, cuts, seed};

/// Cuts in an ordinary run: each costs a boot.
const CUTS: u32 = 4;

/// The usual length of the way from `POLIS boot` to a vote, as a multiple of
/// what came before.
const REST: f64 = 4.0;

/// Longest that nothing may be acknowledged while two of three voters are on, which
/// they are until the newcomer votes: without it and one more, two of four are. An
/// election takes a second, and a write that a leader was asked for just before it
/// died is made again after five. On a busy host a member may miss the heartbeats of
/// the new leader, too, and another election follows: with twice as many machines as
/// processors it was 19 s.
const ELECTION_MAX: Duration = Duration::from_secs(60);

/// The number of a disk that no machine has.
const SPARE: usize = 99;

/// Whose power goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Newcomer,
    /// The leader of etcd's members.
    Leader,
    /// The curator's; most often, the two are one.
    Curator,
}

#[test]
fn whoever_loses_its_power_while_a_machine_is_let_in_the_machine_ends_as_a_voter() -> Result<()> {
    let (seed, wanted) = (seed()?, cuts(CUTS)?);
    eprintln!("POLIS_SEED={seed} POLIS_CUTS={wanted}");

    let world = World::new("newcomer")?;
    // A copy that no founder writes on.
    let blank = blank_disk(&world, &world.disk(None)?, SPARE)?;
    let mut cluster = fleet(&world, 4, APPEND)?;
    cluster.found()?;
    // The third enters between the first way and the second; its boot costs no time.
    cluster.give_ticket(2)?;
    cluster.boot(2)?;
    let dice = StdRng::seed_from_u64(seed);
    let mut story = Story { cluster, dice, cuts: 0, wanted, gaps: Vec::new() };
    story.way(1, &[0], &[Victim::Newcomer, Victim::Leader])?;
    story.cluster.let_in(&[(2, Part::Voter)])?;
    let voters = [0, 1, 2];
    let mut ways = 1;
    // One way after the other, until there were enough cuts; each ends with a vote.
    while story.cuts < story.wanted {
        ways += 1;
        if ways > 2 {
            removed(&mut story.cluster)?;
            story.cluster.nodes[3].config.disk = Some(blank_disk(&world, &blank, 3)?);
        }
        let leader = if story.dice.random() { Victim::Leader } else { Victim::Curator };
        let mut victims = [leader, Victim::Newcomer];
        if story.dice.random() {
            victims.reverse();
        }
        story.way(3, &voters, &victims)?;
    }
    writes_go_on(&mut story.cluster, &voters)?;
    let summary = checked(&world, 4)?;
    eprintln!("{} cuts on {ways} ways; {summary:?}", story.cuts);
    eprintln!("longest times without a write, from the first cut to the vote: {:.1?}", story.gaps);
    Ok(())
}

struct Story {
    cluster: Fleet,
    dice: StdRng,
    cuts: u32,
    wanted: u32,
    /// On each way beside three voters, the longest time without a write from the
    /// first cut until the newcomer votes.
    gaps: Vec<Duration>,
}

impl Story {
    /// Takes machine `newcomer` from nothing to a vote beside `voters`, and cuts
    /// the power of each of `victims` on the way.
    fn way(&mut self, newcomer: usize, voters: &[usize], victims: &[Victim]) -> Result<()> {
        self.cluster.give_ticket(newcomer)?;
        let (etcd, curator) = self.leaders()?;
        let mut victims = victims.iter();
        self.cluster.boot(newcomer)?;
        let mut cut: Option<Instant> = None;
        let mut died = None;
        let mut votes = false;
        let mut voted: Option<Instant> = None;
        loop {
            let victim = victims.next().filter(|_| self.cuts < self.wanted);
            let share = victim.map(|_| self.dice.random::<f64>());
            // A vote that comes before the moment is the moment.
            if !votes {
                let members = voters.len() + 1;
                votes = follow(&mut self.cluster, newcomer, members, share)? == End::Votes;
            }
            if votes {
                voted.get_or_insert_with(Instant::now);
            }
            let Some(victim) = victim else { break };
            self.cuts += 1;
            let machine = match victim {
                Victim::Newcomer => newcomer,
                Victim::Leader => etcd,
                Victim::Curator => curator,
            };
            eprintln!("cut {}: {victim:?}, node {}", self.cuts, machine + 1);
            cut.get_or_insert_with(Instant::now);
            if machine == newcomer {
                votes = false;
                // A learner may have a vote by now and not have said so.
                let learns = |event: &Event| event.word == "etcd" && event.is("state", "learner");
                if !self.cluster.machine(newcomer)?.seen(learns).is_empty() {
                    voted.get_or_insert_with(Instant::now);
                }
            } else {
                died = Some(machine);
            }
            self.cluster.cut_power(machine);
            self.cluster.boot(machine)?;
        }
        self.cluster.wait_whole(voters.len() + 1)?;
        let nodes = self.cluster.operator.document(&["node", "list"])?;
        let nodes = nodes.as_array().context("no nodes")?;
        // One may have asked to be let in, and wait.
        let up = nodes.iter().filter(|node| node["state"] != "new").count();
        ensure!(up == voters.len() + 1, "one node too many: {nodes:?}");
        let Some(since) = cut.filter(|_| voters.len() > 2) else { return Ok(()) };
        let end = voted.context("it never voted")?;
        let others = voters.iter().filter(|voter| Some(**voter) != died);
        let mut times = Vec::new();
        for &other in others {
            times.extend(acknowledged_at(self.cluster.machine(other)?));
        }
        let gap = longest_gap(times, since, end);
        eprintln!("without a write for {gap:.1?}");
        ensure!(gap < ELECTION_MAX, "nothing was acknowledged for {gap:.1?}");
        self.gaps.push(gap);
        Ok(())
    }

    /// Who leads etcd, and the curators.
    fn leaders(&self) -> Result<(usize, usize)> {
        let etcd = self.cluster.etcd_leader()?;
        let status = self.cluster.operator.document(&["--timeout", "2m", "cluster", "status"])?;
        let named = |node: &polis_qemu::fleet::Node| status["leader"] == node.id.as_str();
        let curator = self.cluster.nodes.iter().position(named);
        Ok((etcd, curator.with_context(|| format!("no leader: {status}"))?))
    }
}

/// How a boot of the newcomer went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It votes.
    Votes,
    /// The moment has come.
    Due,
}

/// Lets the newcomer in, step by step, until it is one of so many `members` that
/// vote, or the moment comes that is `share` of its boot.
fn follow(cluster: &mut Fleet, newcomer: usize, members: usize, share: Option<f64>) -> Result<End> {
    let operator = cluster.operator.clone();
    let members = members.to_string();
    let machine = cluster.machine(newcomer)?;
    let begun = Instant::now();
    let named = |machine: &Machine| -> String {
        let seen = machine.seen(|event| event.text("node").starts_with("polis-"));
        seen.last().map_or(String::new(), |event| event.text("node").to_owned())
    };
    // A command on its way must not delay the moment.
    let tell = |args: Vec<String>| {
        let operator = operator.clone();
        thread::spawn(move || {
            if let Err(error) = operator.run(&args) {
                eprintln!("{error}");
            }
        });
    };
    let words = |args: &[&str]| -> Vec<String> {
        ["--timeout", "3m"].iter().chain(args).map(|arg| (*arg).to_owned()).collect()
    };
    let moment = |machine: &Machine, share: f64| {
        let boot = machine.seen(|event| event.word == "boot");
        boot.last().map(|boot| machine.started() + boot.at.mul_f64(1.0 + REST * share))
    };
    // A second cut on the same way may be drawn for a time that has gone by.
    let mut due = share.and_then(|share| moment(machine, share));
    loop {
        let end = due.unwrap_or(begun + BOOT);
        let left = end.saturating_duration_since(Instant::now());
        let Some(line) = machine.next_line(left) else {
            ensure!(Instant::now() >= end, "the machine ended by itself");
            let node = named(machine);
            ensure!(due.is_some(), "{node:?} does not vote after {BOOT:?}");
            remember(cluster, newcomer, node);
            return Ok(End::Due);
        };
        let Some(event) = line.event() else { continue };
        match (event.word.as_str(), share) {
            ("guru", _) => bail!("the newcomer gave up: {event}"),
            ("boot", Some(share)) => due = moment(machine, share),
            _ => {}
        }
        let node = named(machine);
        if votes(&event, &members) {
            remember(cluster, newcomer, node);
            return Ok(End::Votes);
        }
        match asks(&event) {
            Some(Asks::Approval(shown)) => {
                tell(words(&["node", "approve", &node, "--fingerprint", &shown]));
            }
            Some(Asks::Ready(_)) => {
                tell(words(&["node", "roles", &node, "--add", "consensus-member"]));
            }
            None => {}
        }
    }
}

/// Keeps the name of a node; one that comes back may vote before it says it.
fn remember(cluster: &mut Fleet, number: usize, node: String) {
    if !node.is_empty() {
        cluster.nodes[number].id = node;
    }
}

fn votes(event: &Event, members: &str) -> bool {
    event.word == "etcd" && event.is("state", "voter") && event.is("members", members)
}

/// Makes the first three alone again.
fn removed(cluster: &mut Fleet) -> Result<()> {
    let node = cluster.nodes[3].id.clone();
    let run = |cluster: &Fleet, args: &[&str]| {
        cluster.operator.run(&[&["--timeout", "2m"][..], args].concat()).map(drop)
    };
    run(cluster, &["node", "roles", &node, "--remove", "consensus-member"])?;
    cluster.cut_power(3);
    run(cluster, &["node", "delete", &node, "--force", "--yes"])?;
    Ok(())
}
