//! The processor time of a process, as the kernel counts it.
//!
//! A busy host or a slow neighbour lengthens the wall time of a measurement much more than
//! its processor time, so two versions of a program are compared by the second.

use std::fs;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;

/// The time of the process and of its children that it has waited for, in user mode and in
/// the kernel; `None` on a kernel that does not report it, and of a process that is gone.
#[must_use]
pub fn time(process: u32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    parse(&stat, clock_ticks_per_second())
}

/// Fields 14 to 17 of `/proc/<pid>/stat` (proc_pid_stat(5)), in ticks.
fn parse(stat: &str, ticks_per_second: u64) -> Option<Duration> {
    // The name, which is field 2, may have any character in it.
    let fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(4);
    let times: Vec<u64> = fields.map(str::parse).collect::<Result<_, _>>().ok()?;
    let ticks: u64 = (times.len() == 4).then(|| times.iter().sum())?;
    Some(Duration::from_millis(ticks * 1000 / ticks_per_second.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_count_and_a_name_may_have_brackets() {
        let stat = "7 (a) b) Z 1 7 7 0 -1 4 0 0 0 0 10 20 300 4000 20 0 1 0 5 0 0";
        assert_eq!(parse(stat, 100), Some(Duration::from_millis(43_300)));
        assert_eq!(parse("7 (a) Z 1 7", 100), None);
        assert!(time(std::process::id()).is_some());
    }
}
