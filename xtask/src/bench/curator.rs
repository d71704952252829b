//! `cargo xtask bench curator`: the cost and the delays of a curator with many nodes.
//!
//! The server (a real etcd with its curator) and the clients (`curator-load` twice) are
//! separate processes, so processor time and memory are those of a leader alone.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use polis_image::Kind;
use serde::Deserialize;

use super::{Row, Table};
use crate::image::workspace;

/// How many of the nodes watch all of them.
const WATCHERS: usize = 200;

/// How long each run measures: six heartbeats of every node.
const SPAN: Duration = Duration::from_secs(30);

// Goals for ten thousand nodes, and for fewer.

/// Of the 99th percentile, in milliseconds.
const HEARTBEAT_GOAL: f64 = 100.0;

/// In KiB.
const MEMORY_GOAL: f64 = 400_000.0;

/// In seconds.
const START_GOAL: f64 = 10.0;

/// In percent of a processor: half of one for a thousand nodes, a whole one for more.
fn cpu_goal(nodes: usize) -> f64 {
    if nodes > 1000 { 100.0 } else { 50.0 }
}

/// The output of `curator-load`, in milliseconds.
#[derive(Deserialize)]
struct Seen {
    heartbeats: Vec<f64>,
    events: Vec<f64>,
    failed: u64,
}

pub(super) fn measure(runs: u32, nodes: usize) -> Result<Table> {
    let mut table = Table::new("curator", runs)?;
    let program = crate::image::curator_load()?;
    let etcd = match std::env::var_os("POLIS_ETCD") {
        Some(path) => path.into(),
        None => {
            crate::image::built(Kind::Product)?;
            workspace().join("target/payload/root/usr/bin/etcd")
        }
    };
    let mut rows = [
        Row::new("start of the curator to its first answer", "s").goal(START_GOAL),
        Row::new("heartbeat, median", "ms"),
        Row::new("heartbeat, 99th percentile", "ms").goal(HEARTBEAT_GOAL),
        Row::new("call to event at a watcher, median", "ms"),
        Row::new("call to event at a watcher, 99th percentile", "ms"),
        Row::new("processor of the curator", "%").goal(cpu_goal(nodes)),
        Row::new("processor of etcd", "%"),
        Row::new("resident memory of the curator", "KiB").goal(MEMORY_GOAL),
        Row::new("resident memory of etcd", "KiB"),
        Row::new("calls that failed", ""),
    ];
    for _ in 0..runs {
        let values = once(&program, &etcd, nodes)?;
        for (row, value) in rows.iter_mut().zip(values) {
            row.values.push(value);
        }
    }
    table.rows.extend(rows);
    Ok(table)
}

/// One run: the values of all rows.
fn once(program: &Path, etcd: &Path, nodes: usize) -> Result<[f64; 10]> {
    let folder = workspace().join("target/bench/curator");
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut server = Process::start(
        Command::new(program).arg("serve").arg(&folder).arg(etcd).arg(nodes.to_string()),
    )?;
    let ready = server.next_line()?;
    let start: f64 = ready
        .trim_end()
        .strip_prefix("ready ")
        .and_then(|milliseconds| milliseconds.parse().ok())
        .with_context(|| format!("curator-load says {ready:?}"))?;
    let mut load = Process::start(
        Command::new(program)
            .arg("load")
            .arg(&folder)
            .arg(WATCHERS.to_string())
            .arg(SPAN.as_secs().to_string()),
    )?;
    load.line("measuring")?;
    let curator = server.child.id();
    let etcd = child_of(curator)?;
    let started = Instant::now();
    let before = [processor(curator)?, processor(etcd)?];
    let text = load.next_line()?;
    let after = [processor(curator)?, processor(etcd)?];
    let seconds = started.elapsed().as_secs_f64();
    let memory = [memory(curator)?, memory(etcd)?];
    let mut seen: Seen = serde_json::from_str(&text).context("cannot read the measurements")?;
    load.end()?;
    server.end()?;
    ensure!(!seen.heartbeats.is_empty() && !seen.events.is_empty(), "nothing was measured");
    let per_cent = |at: usize| 100.0 * (after[at] - before[at]) / seconds;
    #[expect(clippy::cast_precision_loss, reason = "a count of calls")]
    let failed = seen.failed as f64;
    Ok([
        start / 1e3,
        percentile(&mut seen.heartbeats, 50),
        percentile(&mut seen.heartbeats, 99),
        percentile(&mut seen.events, 50),
        percentile(&mut seen.events, 99),
        per_cent(0),
        per_cent(1),
        memory[0],
        memory[1],
        failed,
    ])
}

/// A process whose standard output is read line by line; killed when dropped.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start curator-load")?;
        let output = child.stdout.take().context("no output")?;
        Ok(Self { child, output: BufReader::new(output) })
    }

    fn next_line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).context("cannot read from curator-load")?;
        ensure!(read > 0, "curator-load ended; see the errors above");
        Ok(line)
    }

    fn line(&mut self, expected: &str) -> Result<()> {
        let line = self.next_line()?;
        ensure!(line.trim_end() == expected, "curator-load says {line:?}, not {expected:?}");
        Ok(())
    }

    /// Closes its standard input, and waits.
    fn end(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.child.wait().context("cannot wait for curator-load")?;
        ensure!(status.success(), "curator-load ended with {status}");
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process has ended already, or is not needed any more.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// A percentile.
fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get(values.len() * percent / 100).or(values.get(last)).copied().unwrap_or(f64::NAN)
}

/// Processor time in seconds.
fn processor(pid: u32) -> Result<f64> {
    let time = polis_qemu::processor::time(pid);
    time.map(|time| time.as_secs_f64()).with_context(|| format!("process {pid} is gone"))
}

fn memory(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"));
    let text = text.with_context(|| format!("process {pid} is gone"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let value = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    value.context("cannot read a status file")
}

/// The process that `parent` started.
fn child_of(parent: u32) -> Result<u32> {
    for entry in fs::read_dir("/proc").context("cannot read /proc")? {
        let name = entry.context("cannot read /proc")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process that ended meanwhile is not the one.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map(|(_name, fields)| fields);
        if fields.and_then(|fields| fields.split(' ').nth(1)) == Some(&parent.to_string()) {
            return Ok(pid);
        }
    }
    anyhow::bail!("the curator has no etcd");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_not_below_so_many_in_a_hundred() {
        let mut values: Vec<f64> = (0..200).rev().map(f64::from).collect();
        assert!((percentile(&mut values, 50) - 100.0).abs() < 1e-9);
        assert!((percentile(&mut values, 99) - 198.0).abs() < 1e-9);
        assert!((percentile(&mut [7.0], 99) - 7.0).abs() < 1e-9);
    }

    #[test]
    fn this_process_has_taken_time_and_memory() {
        assert!(processor(std::process::id()).unwrap() >= 0.0);
        assert!(memory(std::process::id()).unwrap() > 0.0);
    }
}
