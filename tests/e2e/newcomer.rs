//! Power cuts of a machine on its way from a ticket to a vote, and of the member
//! that lets it in.
//!
//! Each moment is a share of the very boot that it cuts, so a slow host is cut at
//! the same place as a quick one. The seed is printed; `POLIS_SEED` draws the
//! same shares again, and `POLIS_CUTS` says how many cuts there are.

use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use polis_qemu::fleet::{Asks, asks};
use polis_qemu::{Event, Fleet, Machine};
use rand::{RngExt as _, SeedableRng as _};

use crate::fleet::{blank_disk, fleet};
use crate::world::{BOOT, World};

/// Cuts in an ordinary run: each costs a boot.
const CUTS: u32 = 5;

/// The usual length of the way from `POLIS boot` to a vote, as a multiple of
/// what came before.
const REST: f64 = 4.0;

/// Every so many cuts, it is the founder's power that goes.
const FOUNDER_EACH: u32 = 3;

/// The number of a disk that no machine has.
const SPARE: usize = 99;

const FOUNDER: usize = 0;
const NEWCOMER: usize = 1;

#[test]
fn a_machine_whose_power_is_cut_anywhere_between_its_ticket_and_its_vote_ends_as_a_voter()
-> Result<()> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>());
    let seed = number("POLIS_SEED").transpose().context("POLIS_SEED is no number")?;
    let seed = seed.unwrap_or_else(rand::random);
    let wanted = number("POLIS_CUTS").transpose().context("POLIS_CUTS is no number")?;
    let wanted = wanted.map_or(Ok(CUTS), u32::try_from)?;
    eprintln!("POLIS_SEED={seed} POLIS_CUTS={wanted}");
    let mut dice = rand::rngs::StdRng::seed_from_u64(seed);

    let world = World::new("newcomer")?;
    // A copy that no founder writes on.
    let blank = blank_disk(&world, &world.disk(None)?, SPARE)?;
    let mut cluster = fleet(&world, 2, "")?;
    cluster.found()?;
    let mut cuts = 0;
    let mut ways = 0;
    // One way after the other, until there were enough cuts; each ends with a vote.
    while cuts < wanted {
        ways += 1;
        let disk = blank_disk(&world, &blank, NEWCOMER)?;
        cluster.nodes[NEWCOMER].config.disk = Some(disk);
        cluster.give_ticket(NEWCOMER)?;
        cluster.boot(NEWCOMER)?;
        let node = loop {
            // One whose founder was cut is past its own moment, and goes on.
            let share = (cuts < wanted).then(|| dice.random::<f64>());
            match follow(&mut cluster, share)? {
                End::Votes(node) => break node,
                End::Due => {}
            }
            cuts += 1;
            let (who, victim) = match cuts % FOUNDER_EACH {
                0 => ("founder", FOUNDER),
                _ => ("newcomer", NEWCOMER),
            };
            eprintln!("cut {cuts}, of the {who}");
            cluster.cut_power(victim);
            cluster.boot(victim)?;
        };
        cluster.wait_whole(2)?;
        let nodes = cluster.operator.document(&["node", "list"])?;
        let nodes = nodes.as_array().context("no nodes")?;
        ensure!(nodes.len() == 2, "way {ways} left more than one node: {nodes:?}");
        if cuts < wanted {
            removed(&mut cluster, &node)?;
        }
    }
    eprintln!("{cuts} cuts on {ways} ways");
    Ok(())
}

/// How a boot of the newcomer went.
enum End {
    /// It votes: its ID.
    Votes(String),
    /// The moment has come.
    Due,
}

/// Lets the newcomer in, step by step, until it votes or the moment comes that is
/// `share` of its boot.
fn follow(cluster: &mut Fleet, share: Option<f64>) -> Result<End> {
    let operator = cluster.operator.clone();
    let machine = cluster.machine(NEWCOMER)?;
    let begun = Instant::now();
    let mut due = begun + BOOT;
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
    loop {
        let left = due.saturating_duration_since(Instant::now());
        let Some(line) = machine.next_line(left) else {
            ensure!(Instant::now() >= due, "the machine ended by itself");
            let late = due == begun + BOOT;
            ensure!(!late, "{:?} does not vote after {BOOT:?}", named(machine));
            return Ok(End::Due);
        };
        let Some(event) = line.event() else { continue };
        match (event.word.as_str(), share) {
            ("guru", _) => bail!("the newcomer gave up: {event}"),
            ("boot", Some(share)) => due = begun + event.at.mul_f64(1.0 + REST * share),
            _ => {}
        }
        let node = named(machine);
        if votes(&event) {
            return Ok(End::Votes(node));
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

fn votes(event: &Event) -> bool {
    event.word == "etcd" && event.is("state", "voter") && event.is("members", "2")
}

/// Makes the founder alone again.
fn removed(cluster: &mut Fleet, node: &str) -> Result<()> {
    let run = |cluster: &Fleet, args: &[&str]| {
        cluster.operator.run(&[&["--timeout", "2m"][..], args].concat()).map(drop)
    };
    run(cluster, &["node", "roles", node, "--remove", "consensus-member"])?;
    cluster.cut_power(NEWCOMER);
    run(cluster, &["node", "delete", node, "--force", "--yes"])?;
    Ok(())
}
