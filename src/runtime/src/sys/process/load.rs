//! The resources that processes use, as `/proc` reports them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::process::Pid;

/// The children with a log that run, by process ID: the dotted name of that log.
static RUNNING: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// The place of a child in [`RUNNING`].
#[derive(Debug)]
pub(super) struct Listed(u32);

impl Listed {
    pub(super) fn new(id: u32, name: &str) -> Self {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(id, name.to_owned());
        Self(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// The resources that a process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The dotted name of its log.
    pub name: String,
    /// Its process ID.
    pub id: u32,
    /// Processor time since it started, of all its threads, but not of its children.
    pub cpu: Duration,
    /// Resident memory in bytes, with what it shares with other processes.
    pub memory: u64,
}

/// The resources of this process, under the name `own`, and of each of its running children
/// that has a log. A child that has just ended is left out.
#[must_use]
pub fn loads(own: &str) -> Vec<Load> {
    let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let all = std::iter::once((std::process::id(), own.to_owned())).chain(running);
    let load = |(id, name): (u32, String)| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let memory = resident(&id.to_string())?.saturating_mul(1024);
        Some(Load { name, id, cpu: parse_cpu(&stat)?, memory })
    };
    all.filter_map(load).collect()
}

/// User and system time: the 14th and the 15th field. The second is the program's name, which
/// may have spaces and parentheses in it.
fn parse_cpu(stat: &str) -> Option<Duration> {
    /// Fields between the name and the first of both.
    const BEFORE: usize = 11;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut ticks = rest.split_ascii_whitespace().skip(BEFORE).map(str::parse::<u64>);
    let ticks = ticks.next()?.ok()?.checked_add(ticks.next()?.ok()?)?;
    let second = u32::try_from(clock_ticks_per_second()).ok()?;
    let rest = u32::try_from(ticks.checked_rem(u64::from(second))?).ok()?;
    let whole = Duration::from_secs(ticks / u64::from(second));
    whole.checked_add(Duration::from_secs(1) * rest / second)
}

/// Every process whose program has this name.
#[must_use]
pub fn find(name: &str) -> Vec<Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            let command = std::fs::read_to_string(entry.path().join("comm"));
            command.is_ok_and(|command| command.trim_end() == name)
        })
        .filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Resident memory of a process in KiB; `None` where it has just ended. The process is
/// a number, or `self`.
#[must_use]
pub fn resident(process: &str) -> Option<u64> {
    parse_resident(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?)
}

fn parse_resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_s_name_cannot_shift_the_numbers_behind_it() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 9 9 9 9 250 50 1 1 20 0 1 0 77 0 0";
        let tick = Duration::from_secs(1) / u32::try_from(clock_ticks_per_second()).unwrap();
        assert_eq!(parse_cpu(stat), Some(tick * 300));
        assert_eq!(parse_cpu("7 (x) S 1"), None);
        assert_eq!(parse_cpu(""), None);
    }

    #[test]
    fn years_of_processor_time_are_measured() {
        let stat = "7 (a) S 1 7 7 0 -1 4194304 9 9 9 9 4294967296 54 1 1 20 0 1 0 77 0 0";
        let tick = Duration::from_secs(1) / u32::try_from(clock_ticks_per_second()).unwrap();
        assert_eq!(parse_cpu(stat), Some(tick * u32::MAX + tick * 55));
    }

    #[test]
    fn the_resident_part_is_read() {
        let status = "VmPeak:\t   99 kB\nVmRSS:\t    2140 kB\nVmData:\t 7 kB\n";
        assert_eq!(parse_resident(status), Some(2140));
        assert_eq!(parse_resident("Name:\tkthreadd\n"), None);
        assert!(resident("self").is_some_and(|kibibytes| kibibytes > 100));
    }
}
