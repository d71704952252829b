//! The clock of deadlines: time in which the machines could run.
//!
//! The wall clock also counts the time in which a guest was ready to run and the host
//! gave its processors to something else. A deadline by that clock fails on a busy
//! host, although the guest is healthy. This clock leaves that time out:
//!
//! ```text
//! counted = wall - run delay - stolen, and at least wall / SLOWEST
//!
//! run delay   time that the most delayed thread was runnable and waited for a processor
//!             (/proc/<pid>/task/<tid>/schedstat, second number)
//! stolen      time that a hypervisor took from this host, per processor (/proc/stat)
//! ```
//!
//! The clock is read at the end of each wait and every [`STEP`] of it. Where a wait depends on
//! several machines, which are delayed one after the other, one look at the end of a long wait
//! would only see the most delayed of them.
//!
//! It covers one process and all its descendants: the QEMUs, TPMs and programs that a
//! story has started, and the story itself. A guest that waits for a timer, and one
//! that loops on an idle host, have no run delay, so their deadlines come in wall time.
//! On a kernel without these numbers this is the wall clock.
//!
//! Processor time (`utime`, `stime`) does not work as a measure here: an idle guest
//! does not use any, and a deadline that counted it would not come.
//!
//! Invariants:
//! - It never goes back, never runs faster than the wall, and never slower than a
//!   [`SLOWEST`]th of it: a silent guest fails, however busy the host is.
//!
//! What this module does not do: measure. The duration of a boot, or of a moment within
//! one, is wall time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much longer than its deadline a wait may take on the wall. A story cannot judge
/// a guest that gets less than an eighth of a processor.
pub const SLOWEST: u32 = 8;

/// Longest time between two looks at the clock during a wait: each is a walk through `/proc`.
pub const STEP: Duration = Duration::from_secs(10);

/// Shortest wait before a deadline is checked again.
const POLL_MIN: Duration = Duration::from_millis(50);

/// A clock that counts the time in which a process and its descendants could run.
#[derive(Debug)]
pub struct Clock {
    root: u32,
    last: Mutex<Last>,
}

/// The result of the last check.
#[derive(Debug)]
struct Last {
    at: Instant,
    counted: Duration,
    host: Host,
}

/// The host's processor counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Host {
    /// How long each thread has waited for a processor, by process and thread.
    delays: BTreeMap<(u32, u32), Duration>,
    /// How long a hypervisor ran other work, per processor.
    stolen: Duration,
}

impl Clock {
    /// The clock of the process `root` and its descendants. It begins at zero.
    #[must_use]
    pub fn of(root: u32) -> Self {
        let last = Last { at: Instant::now(), counted: Duration::ZERO, host: Host::look(root) };
        Self { root, last: Mutex::new(last) }
    }

    /// Its current time.
    pub fn now(&self) -> Duration {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, host) = (Instant::now(), Host::look(self.root));
        let counted = last.counted + counted(at - last.at, &last.host, &host);
        *last = Last { at, counted, host };
        counted
    }
}

/// The clock of this process and of everything that it has started.
pub fn own() -> &'static Clock {
    static OWN: LazyLock<Clock> = LazyLock::new(|| Clock::of(std::process::id()));
    &OWN
}

/// The end of a wait, by the clock of this process.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    end: Duration,
    /// The next look at the clock. The deadline cannot come before it: the clock runs at most
    /// as fast as the wall.
    next: Instant,
}

impl Deadline {
    /// The deadline of a wait that begins now.
    #[must_use]
    pub fn within(within: Duration) -> Self {
        Self { end: own().now() + within, next: Instant::now() + within.min(STEP) }
    }

    /// The time of the next check; `None` if the deadline has come.
    pub fn look(&mut self) -> Option<Instant> {
        let now = Instant::now();
        if now >= self.next {
            let left = self.end.saturating_sub(own().now());
            if left.is_zero() {
                return None;
            }
            self.next = now + left.clamp(POLL_MIN, STEP);
        }
        Some(self.next)
    }

    /// Whether it has come.
    pub fn is_over(&mut self) -> bool {
        self.look().is_none()
    }
}

/// Waits for the next value of a channel.
///
/// # Errors
/// When no value has come `within`, by the clock of this process, or none can come any more.
pub fn receive<T>(values: &Receiver<T>, within: Duration) -> Result<T, RecvTimeoutError> {
    let mut deadline = Deadline::within(within);
    while let Some(look) = deadline.look() {
        match values.recv_timeout(look.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            received => return received,
        }
    }
    Err(RecvTimeoutError::Timeout)
}

/// How much of `wall` counts, from the host's counters at its start and at its end.
fn counted(wall: Duration, before: &Host, after: &Host) -> Duration {
    // A thread that began in between has waited at most since then.
    let waited = after.delays.iter().map(|(thread, delay)| {
        delay.saturating_sub(before.delays.get(thread).copied().unwrap_or_default())
    });
    let waited = waited.max().unwrap_or_default();
    let stolen = after.stolen.saturating_sub(before.stolen);
    wall.saturating_sub(waited + stolen).max(wall / SLOWEST)
}

impl Host {
    fn look(root: u32) -> Self {
        let mut delays = BTreeMap::new();
        for process in family(root, &processes()) {
            for thread in numbers(Path::new(&format!("/proc/{process}/task"))) {
                let path = format!("/proc/{process}/task/{thread}/schedstat");
                let text = fs::read_to_string(path).unwrap_or_default();
                if let Some(delay) = run_delay(&text) {
                    delays.insert((process, thread), delay);
                }
            }
        }
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        Self { delays, stolen: stolen(&stat, rustix::param::clock_ticks_per_second()) / processors }
    }
}

/// Every process with its parent.
fn processes() -> Vec<(u32, u32)> {
    let parent = |process: u32| parent(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?);
    let all = numbers(Path::new("/proc")).into_iter();
    all.filter_map(|process| Some((process, parent(process)?))).collect()
}

/// The entries of a folder whose names are numbers. A process may end at any time.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// `root` and its descendants among `processes`, each of which has its parent beside it.
fn family(root: u32, processes: &[(u32, u32)]) -> BTreeSet<u32> {
    let mut family = BTreeSet::from([root]);
    loop {
        let before = family.len();
        let born = processes.iter().filter(|(_, parent)| family.contains(parent));
        let born: Vec<u32> = born.map(|(process, _)| *process).collect();
        family.extend(born);
        if family.len() == before {
            return family;
        }
    }
}

/// The parent in `/proc/<pid>/stat`: `PID (NAME) STATE PARENT ...`, where the name may
/// have any character in it.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The second number of `schedstat`: nanoseconds.
fn run_delay(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// The eighth number of the first line of `/proc/stat`, in ticks of all processors.
fn stolen(stat: &str, ticks_per_second: u64) -> Duration {
    let line = stat.lines().next().and_then(|line| line.strip_prefix("cpu "));
    let ticks = line.and_then(|line| line.split_whitespace().nth(7)?.parse::<u64>().ok());
    Duration::from_millis(ticks.unwrap_or_default() * 1000 / ticks_per_second.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn host(delays: &[(u32, u64)], stolen: u64) -> Host {
        let delays = delays.iter().map(|(thread, ms)| ((1, *thread), Duration::from_millis(*ms)));
        Host { delays: delays.collect(), stolen: Duration::from_millis(stolen) }
    }

    #[test]
    fn on_an_idle_host_a_second_is_a_second() {
        assert_eq!(counted(SECOND, &host(&[(1, 5)], 7), &host(&[(1, 5)], 7)), SECOND);
        assert_eq!(counted(SECOND, &Host::default(), &Host::default()), SECOND);
    }

    #[test]
    fn what_the_most_delayed_thread_waited_for_a_processor_does_not_count() {
        let before = host(&[(1, 100), (2, 0)], 0);
        let after = host(&[(1, 300), (2, 500)], 0);
        assert_eq!(counted(SECOND, &before, &after), SECOND / 2);
    }

    #[test]
    fn of_threads_that_wait_by_turns_each_counts_if_the_clock_is_read_in_between() {
        let moments: [&[(u32, u64)]; 3] =
            [&[(1, 0), (2, 0)], &[(1, 500), (2, 0)], &[(1, 500), (2, 500)]];
        let [begun, between, ended] = moments.map(|delays| host(delays, 0));
        let read = counted(SECOND, &begun, &between) + counted(SECOND, &between, &ended);
        assert_eq!(read, SECOND);
        assert_eq!(counted(SECOND * 2, &begun, &ended), SECOND * 3 / 2);
    }

    #[test]
    fn a_long_wait_reads_the_clock_at_every_step() {
        let mut deadline = Deadline::within(STEP * 60);
        let look = deadline.look().unwrap();
        assert!(look <= Instant::now() + STEP, "the next look is too late");
    }

    #[test]
    fn a_value_is_received_and_one_that_does_not_come_is_given_up() {
        let (sender, values) = std::sync::mpsc::channel();
        sender.send(7).unwrap();
        assert_eq!(receive(&values, STEP), Ok(7));
        let (within, began) = (Duration::from_millis(30), Instant::now());
        assert_eq!(receive(&values, within), Err(RecvTimeoutError::Timeout));
        assert!(began.elapsed() >= within);
        drop(sender);
        assert_eq!(receive(&values, STEP), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_thread_that_has_ended_or_just_begun_spoils_nothing() {
        let before = host(&[(1, 90_000)], 0);
        assert_eq!(counted(SECOND, &before, &host(&[(2, 250)], 0)), SECOND * 3 / 4);
    }

    #[test]
    fn what_a_hypervisor_took_does_not_count() {
        assert_eq!(counted(SECOND, &host(&[], 100), &host(&[], 600)), SECOND / 2);
        let stat = "cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 1 1 1 1 1 1 1 999 1 1\n";
        assert_eq!(stolen(stat, 100), Duration::from_millis(2500));
        assert_eq!(stolen("", 100), Duration::ZERO);
    }

    #[test]
    fn however_busy_the_host_is_the_clock_goes_on() {
        assert_eq!(counted(SECOND, &host(&[], 0), &host(&[(1, 99_000)], 0)), SECOND / SLOWEST);
    }

    #[test]
    fn the_files_of_proc_are_read() {
        assert_eq!(run_delay("8 70885 1\n"), Some(Duration::from_nanos(70885)));
        assert_eq!(run_delay(""), None);
        assert_eq!(parent("7 (a) b) c) S 42 7 7 0"), Some(42));
        assert_eq!(parent("7 (cut"), None);
    }

    #[test]
    fn a_family_is_a_process_with_all_its_descendants() {
        let processes = [(1, 0), (9, 5), (5, 3), (3, 1), (4, 1), (6, 3)];
        assert_eq!(family(3, &processes), BTreeSet::from([3, 5, 6, 9]));
    }

    #[test]
    fn the_clock_of_a_process_never_goes_back_and_is_no_faster_than_the_wall() {
        let (began, clock) = (Instant::now(), Clock::of(std::process::id()));
        let mut last = Duration::ZERO;
        while began.elapsed() < Duration::from_millis(50) {
            let now = clock.now();
            assert!(now >= last && now <= began.elapsed(), "{now:?} after {last:?}");
            last = now;
        }
        assert!(last >= Duration::from_millis(50) / (2 * SLOWEST), "it stands still: {last:?}");
    }

    #[test]
    fn threads_that_wait_for_a_processor_slow_the_clock_down() {
        // A kernel without the numbers has nothing to test.
        if run_delay(&fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default())
            .is_none()
        {
            return;
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let (clock, began) = (Clock::of(std::process::id()), Instant::now());
        let end = began + Duration::from_millis(600);
        std::thread::scope(|scope| {
            for _ in 0..processors * 4 {
                scope.spawn(|| while Instant::now() < end {});
            }
            // The threads must exist when the clock reads them.
            while Instant::now() + Duration::from_millis(50) < end {
                std::thread::yield_now();
            }
            let (wall, counted) = (began.elapsed(), clock.now());
            assert!(
                counted < wall * 3 / 4,
                "{counted:?} of {wall:?} with four threads a processor"
            );
        });
    }

    #[test]
    fn a_deadline_comes_and_not_before_its_time() {
        let within = Duration::from_millis(30);
        let (mut deadline, began) = (Deadline::within(within), Instant::now());
        assert!(!deadline.is_over());
        while !deadline.is_over() {
            assert!(began.elapsed() < within * SLOWEST * 10, "it does not come");
            std::thread::yield_now();
        }
        assert!(began.elapsed() >= within);
    }
}
