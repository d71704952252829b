//! Power cuts of a machine on its way from a ticket to a vote, and of the leader in that
//! time: one member alone, of two, of three.
//!
//! The whole story runs with `--all`. In an ordinary run, `outage` takes its machines on
//! such ways: one beside a single voter, one beside three.
//!
//! Each moment is a share of the very boot that it cuts, so a slow host is cut at
//! the same place as a quick one. The seed is printed; `POLIS_SEED` draws the
//! same shares again, and `POLIS_CUTS` says how many cuts there are.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::deadline::Deadline;
use polis_qemu::fleet::{Asks, Part, asks};
use polis_qemu::history::longest_gap;
use polis_qemu::{Event, Fleet, Machine};
use polis_tests::{Story, cuts, seed, story};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::fleet::{
    APPEND, acknowledged_at, ask_until, blank_disk, checked, document, fleet, run, writes_go_on,
};
use crate::world::{BOOT, World};

/// Cuts, unless `POLIS_CUTS` says another number: each costs a boot.
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

/// How often a command of the operator is given while machines lose their power.
const TELL_MAX: usize = 3;

/// The number of a disk that no machine has.
const SPARE: usize = 99;

/// The machine whose power goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    Newcomer,
    /// The leader of etcd's members.
    Leader,
    /// The curator's; most often, the two are one.
    Curator,
}

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(a_power_cut_of_any_machine_during_a_registration_leaves_a_voter)
        .cluster()
        .takes(400)
        .of_all()];

fn a_power_cut_of_any_machine_during_a_registration_leaves_a_voter() -> Result<()> {
    let (seed, wanted) = (seed()?, cuts(CUTS, CUTS)?);
    eprintln!("POLIS_SEED={seed} POLIS_CUTS={wanted}");

    let world = World::new("newcomer")?;
    // A copy that no other first node writes to.
    let blank = blank_disk(&world, &world.disk(None)?, SPARE)?;
    let mut cluster = fleet(&world, 4, APPEND)?;
    cluster.found()?;
    // The third enters between the first way and the second; its boot costs no time.
    cluster.give_ticket(2)?;
    cluster.boot(2)?;
    let mut ways = Ways::drawn(seed, wanted);
    ways.way(&mut cluster, 1, &[0], &[Victim::Newcomer, Victim::Leader])?;
    cluster.let_in(&[(2, Part::Voter)])?;
    let voters = [0, 1, 2];
    let mut taken = 1;
    // One way after the other, until there were enough cuts; each ends with a vote.
    while ways.cuts < ways.wanted {
        taken += 1;
        if taken > 2 {
            removed(&mut cluster)?;
            cluster.nodes[3].config.disk = Some(blank_disk(&world, &blank, 3)?);
        }
        let victims = ways.one_each();
        ways.way(&mut cluster, 3, &voters, &victims)?;
    }
    writes_go_on(&mut cluster, &voters)?;
    let summary = checked(&world, 4)?;
    eprintln!("{} cuts on {taken} ways; {summary:?}", ways.cuts);
    eprintln!("longest times without a write, from the first cut to the vote: {:.1?}", ways.gaps);
    Ok(())
}

/// Ways of machines from nothing to a vote, with power cuts.
pub(crate) struct Ways {
    dice: StdRng,
    cuts: u32,
    /// The number of cuts; no cut comes after them.
    wanted: u32,
    /// Nodes beside the voters.
    pub(crate) workers: usize,
    /// On each way beside three voters, the longest time without a write from the
    /// first cut until the newcomer votes.
    gaps: Vec<Duration>,
}

impl Ways {
    /// Ways with so many cuts, at moments that `seed` draws.
    pub(crate) fn drawn(seed: u64, wanted: u32) -> Self {
        let dice = StdRng::seed_from_u64(seed);
        Self { dice, cuts: 0, wanted, workers: 0, gaps: Vec::new() }
    }

    /// A leader and the newcomer, in either order.
    pub(crate) fn one_each(&mut self) -> [Victim; 2] {
        let leader = if self.dice.random() { Victim::Leader } else { Victim::Curator };
        let mut victims = [leader, Victim::Newcomer];
        if self.dice.random() {
            victims.reverse();
        }
        victims
    }

    /// The newcomer or the only voter.
    pub(crate) fn either(&mut self) -> Victim {
        if self.dice.random() { Victim::Newcomer } else { Victim::Leader }
    }

    /// Takes machine `newcomer` from nothing to a vote beside `voters`, and cuts
    /// the power of each of `victims` on the way.
    pub(crate) fn way(
        &mut self,
        cluster: &mut Fleet,
        newcomer: usize,
        voters: &[usize],
        victims: &[Victim],
    ) -> Result<()> {
        let nodes = voters.len() + 1 + self.workers;
        cluster.give_ticket(newcomer)?;
        let (etcd, curator) = leaders(cluster)?;
        let mut victims = victims.iter();
        cluster.boot(newcomer)?;
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
                votes = follow(cluster, newcomer, members, share)? == End::Votes;
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
                // A learner may have a vote by now without a line that says it.
                let learns = |event: &Event| event.word == "etcd" && event.is("state", "learner");
                if !cluster.machine(newcomer)?.seen(learns).is_empty() {
                    voted.get_or_insert_with(Instant::now);
                }
            } else {
                died = Some(machine);
            }
            cluster.cut_power(machine);
            cluster.boot(machine)?;
        }
        cluster.wait_whole(nodes)?;
        let listed = cluster.operator.document(&["node", "list"])?;
        let listed = listed.as_array().context("no nodes")?;
        // One may be registered, and wait for approval.
        let up = listed.iter().filter(|node| node["state"] != "new").count();
        ensure!(up == nodes, "one node too many: {listed:?}");
        let Some(since) = cut.filter(|_| voters.len() > 2) else { return Ok(()) };
        let end = voted.context("it never voted")?;
        let others = voters.iter().filter(|voter| Some(**voter) != died);
        let mut times = Vec::new();
        for &other in others {
            times.extend(acknowledged_at(cluster.machine(other)?));
        }
        let gap = longest_gap(times, since, end);
        eprintln!("without a write for {gap:.1?}");
        ensure!(gap < ELECTION_MAX, "nothing was acknowledged for {gap:.1?}");
        self.gaps.push(gap);
        Ok(())
    }
}

/// The leader of etcd, and of the curators.
pub(crate) fn leaders(cluster: &Fleet) -> Result<(usize, usize)> {
    let etcd = cluster.etcd_leader()?;
    let curator = ask_until("a curator leads", || {
        let status = document(cluster, &["cluster", "status"])?;
        let named = |node: &polis_qemu::fleet::Node| status["leader"] == node.id.as_str();
        Ok(cluster.nodes.iter().position(named))
    })?;
    Ok((etcd, curator))
}

/// How a boot of the newcomer went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It votes.
    Votes,
    /// The moment has come.
    Due,
}

/// Admits the newcomer, step by step, until it is one of so many `members` that vote, or
/// the moment comes that is `share` of its boot.
fn follow(cluster: &mut Fleet, newcomer: usize, members: usize, share: Option<f64>) -> Result<End> {
    let operator = cluster.operator.clone();
    let members = members.to_string();
    let machine = cluster.machine(newcomer)?;
    let mut patience = Deadline::within(BOOT);
    let named = |machine: &Machine| -> String {
        let seen = machine.seen(|event| event.text("node").starts_with("polis-"));
        seen.last().map_or(String::new(), |event| event.text("node").to_owned())
    };
    // A command on its way must not delay the moment. A leader that takes over, or a voter
    // that is off, may be a reason to refuse it: a person gives it again.
    let tell = |args: Vec<String>| {
        let operator = operator.clone();
        thread::spawn(move || {
            for _ in 0..TELL_MAX {
                match operator.run(&args) {
                    Ok(_) => return,
                    Err(error) => eprintln!("{error}"),
                }
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
        // A moment is one of the wall clock; a deadline is not.
        let end = due.or_else(|| patience.look()).unwrap_or_else(Instant::now);
        let left = end.saturating_duration_since(Instant::now());
        let Some(line) = machine.next_line(left) else {
            ensure!(Instant::now() >= end, "the machine ended by itself");
            let node = named(machine);
            if due.is_none() {
                ensure!(!patience.is_over(), "{node:?} does not vote after {BOOT:?}");
                continue;
            }
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

/// Keeps the name of a node; one that comes back may vote before it prints it.
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
    run(cluster, &["node", "roles", &node, "--remove", "consensus-member", "--yes"])?;
    cluster.cut_power(3);
    run(cluster, &["node", "delete", &node, "--force", "--yes"]).map(drop)
}
