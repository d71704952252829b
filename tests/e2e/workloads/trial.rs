//! The report of a demo pod about its limits, and their effect on etcd.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use polis_qemu::deadline::Deadline;
use polis_qemu::{Event, Machine};

use super::PART;
use super::kubectl::Kubectl;
use crate::owner::Owner;

/// Longest that etcd may acknowledge nothing while a pod does its worst, and that `node` may
/// send no heartbeat, in seconds of the machine: half of what `init` lets `node` be silent. A
/// machine that is translated on a busy host stands still for seconds by itself.
const SILENT_MAX: f64 = 30.0;

/// Printed by `init` when `node` beats after twice its interval or later.
const LATE: &str = "node's heartbeat is late: ";

/// One line of `demo write`, `allocate`, `files`, `memory` or `threads`.
#[derive(Debug)]
pub(super) struct Trial {
    /// How far it came.
    pub(super) done: u64,
    /// Why it came no further.
    pub(super) refused: Option<String>,
}

impl Trial {
    /// Runs the demo with these arguments in a pod that runs.
    pub(super) fn run(kubectl: &Kubectl, pod: &str, args: &[&str]) -> Result<Self> {
        let said = demo(kubectl, pod, args)?;
        println!("{pod}: {}", said.trim());
        Self::read(&said)
    }

    /// Reads the line.
    pub(super) fn read(line: &str) -> Result<Self> {
        let (figures, refused) = match line.trim().split_once(": ") {
            Some((figures, refused)) => (figures, Some(refused.to_owned())),
            None => (line, None),
        };
        let number = |at| figures.split_whitespace().nth(at).and_then(|word| word.parse().ok());
        let numbers: Option<(u64, u64)> = number(1).zip(number(3));
        let (done, wanted) = numbers.with_context(|| format!("not a line of a trial: {line}"))?;
        ensure!((done == wanted) == refused.is_none(), "neither all nor a reason: {line}");
        Ok(Self { done, refused })
    }

    /// Fails unless the disk was full.
    pub(super) fn is_full(&self) -> Result<()> {
        let full = self.refused.as_deref().is_some_and(|why| why.contains("os error 28"));
        ensure!(full, "the disk was not full: {self:?}");
        Ok(())
    }

    /// Fails unless everything was done.
    pub(super) fn is_whole(&self) -> Result<()> {
        ensure!(self.refused.is_none(), "not all of it: {self:?}");
        Ok(())
    }
}

/// Runs the demo with these arguments in a pod that runs; returns what it prints.
pub(super) fn demo(kubectl: &Kubectl, pod: &str, args: &[&str]) -> Result<String> {
    kubectl.run(&[&["exec", pod, "--", "/demo"], args].concat(), "")
}

/// The same after a boot: until kubelet has reported, the API server shows pods as they were
/// before, so a pod that is Ready may have no process yet.
pub(super) fn demo_again(
    machine: &mut Machine,
    kubectl: &Kubectl,
    pod: &str,
    args: &[&str],
) -> Result<String> {
    let mut deadline = Deadline::within(PART);
    loop {
        match demo(kubectl, pod, args) {
            Err(error) if deadline.look().is_some() => {
                println!("{pod}: not yet: {error:#}");
                machine.next_line(Duration::from_secs(2));
            }
            done => return done,
        }
    }
}

/// The node and its etcd, while pods do their worst. The story's machine writes to etcd all
/// the time (`polis.exercise=append`), and prints what etcd has acknowledged.
pub(super) struct Calm {
    term: u64,
    since: f64,
    /// How many lines the machine had printed.
    lines: usize,
}

impl Calm {
    /// Begins to look.
    pub(super) fn begins(owner: &Owner, machine: &Machine) -> Result<Self> {
        let since = acknowledged(machine).last().copied();
        let since = since.context("etcd has acknowledged nothing in this boot")?;
        Ok(Self { term: term(owner)?, since, lines: machine.lines().len() })
    }

    /// Fails if etcd has held an election since, if it or `node` was silent for too long, or if
    /// anything of the cluster needs a person.
    pub(super) fn held(self, owner: &Owner, machine: &Machine, what: &str) -> Result<()> {
        let term = term(owner)?;
        ensure!(term == self.term, "{what}: term {} became {term}", self.term);
        let health = owner.run(&["cluster", "health"]);
        let health = health.with_context(|| format!("{what}: the cluster is not well"))?;
        let times: Vec<_> =
            acknowledged(machine).into_iter().filter(|time| *time >= self.since).collect();
        let gap = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
        let (count, last) = (times.len(), times.last().copied().unwrap_or(self.since));
        let late = self.late(machine);
        println!(
            "{what}: {count} writes to etcd in {:.0} s, the longest time without one {gap:.1} s, \
             no election, heartbeats of node that were late: {late:?}, {}",
            last - self.since,
            health.trim()
        );
        ensure!(count > 1, "{what}: etcd has acknowledged nothing");
        ensure!(gap < SILENT_MAX, "{what}: {gap:.1} s without an acknowledged write");
        let late = late.into_iter().fold(0.0, f64::max);
        ensure!(late < SILENT_MAX, "{what}: {late:.1} s without a heartbeat of node");
        Ok(())
    }

    /// The seconds of the heartbeats that were late since.
    fn late(&self, machine: &Machine) -> Vec<f64> {
        let seconds = |text: &str| text.split_once(LATE)?.1.split_whitespace().next()?.parse().ok();
        machine.lines().iter().skip(self.lines).filter_map(|line| seconds(&line.text)).collect()
    }
}

/// When etcd acknowledged a write, in the newest boot of this machine.
fn acknowledged(machine: &Machine) -> Vec<f64> {
    let written = |event: &Event| event.word == "exercise" && event.get("acknowledged").is_some();
    machine.seen(written).iter().filter_map(Event::uptime).collect()
}

fn term(owner: &Owner) -> Result<u64> {
    let status = owner.document(&["etcd", "status"])?;
    status["term"].as_u64().with_context(|| format!("no term in {status}"))
}
