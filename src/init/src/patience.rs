//! Work with a disk that has a deadline: a disk that does not answer delays neither the screens,
//! nor the countdown, nor the end of the machine for long.
//!
//! A call to the kernel that waits for a disk can't be taken back, so it is made on a thread of
//! its own. One that does not end in time is left behind.
//!
//! What this module does not do: bound the search for the disk and the mounts in stages 1 and 2.
//! Only the watchdog does.

use std::fs;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::machine::Machine;

/// For a few small files on the ESP. A disk that has to start its motor takes ten seconds.
pub const ESP: Duration = Duration::from_secs(20);

/// For the end of everything that was written and not yet flushed, and of the mounts, since a
/// disk last ended a request.
pub const SETTLE: Duration = Duration::from_secs(90);

/// How long the watchdog may go without being looked at.
const STEP: Duration = Duration::from_secs(1);

/// Why the result is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The disk has not answered.
    #[error("the disk has not answered within {} s", .waited.as_secs())]
    Overdue {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The work has no thread, or panicked.
    #[error("the work with the disk did not run to its end")]
    Lost,
}

/// Does `work` on a thread of its own for at most `time`, and pets the watchdog meanwhile. Time in
/// which the machine stood still does not count.
///
/// # Errors
///
/// The time is up; the work may still go on. It panicked, or got no thread.
pub fn within<T: Send + 'static>(
    machine: &mut Machine,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    watched(machine, time, || 0, work)
}

/// The same, and `time` begins anew whenever a disk has ended a request.
///
/// # Errors
///
/// As above.
pub fn while_disks_work<T: Send + 'static>(
    machine: &mut Machine,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    watched(
        machine,
        time,
        || ended(&fs::read_to_string("/proc/diskstats").unwrap_or_default()),
        work,
    )
}

fn watched<T: Send + 'static>(
    machine: &mut Machine,
    time: Duration,
    progress: impl Fn() -> u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let (answer, answered) = mpsc::channel();
    // The thread's end says nothing that its answer does not.
    let started = thread::Builder::new()
        .name("disk".to_owned())
        .spawn(move || drop(answer.send(work())))
        .map(drop);
    started.map_err(|_error| Error::Lost)?;
    let (mut waited, mut before) = (Duration::ZERO, progress());
    loop {
        let step = STEP.min(time.saturating_sub(waited));
        match answered.recv_timeout(step) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Lost),
            Err(RecvTimeoutError::Timeout) if step.is_zero() => {
                return Err(Error::Overdue { waited: time });
            }
            Err(RecvTimeoutError::Timeout) => machine.pet(),
        }
        let now = progress();
        waited = if now == before { waited + step } else { Duration::ZERO };
        before = now;
    }
}

/// How many reads and writes all disks have ended, by the kernel's table
/// (`Documentation/admin-guide/iostats.rst`): the first and the fifth number of each line, which
/// begins with two numbers and a name.
fn ended(table: &str) -> u64 {
    let numbers = table.lines().flat_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        [3, 7].map(|at| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or_default())
    });
    numbers.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_ends_in_time_gives_its_result() {
        let mut machine = Machine::default();
        assert_eq!(within(&mut machine, ESP, || 7), Ok(7));
    }

    #[test]
    fn work_that_never_ends_is_left_behind() {
        let mut machine = Machine::default();
        let waited = Duration::from_millis(50);
        let (end, never) = mpsc::channel::<()>();
        let hung = within(&mut machine, waited, move || never.recv().is_ok());
        assert_eq!(hung, Err(Error::Overdue { waited }));
        drop(end);
    }

    #[test]
    fn work_goes_on_for_as_long_as_a_disk_ends_requests() {
        let mut machine = Machine::default();
        let (count, left) = (std::cell::Cell::new(0), 20);
        let progress = || {
            count.set(count.get() + 1);
            count.get().min(left)
        };
        let (end, never) = mpsc::channel::<()>();
        let waited = Duration::from_millis(10);
        let hung = watched(&mut machine, waited, progress, move || never.recv().is_ok());
        assert_eq!(hung, Err(Error::Overdue { waited }));
        assert!(count.get() > left, "it waited on after the last request");
        drop(end);
    }

    #[test]
    fn reads_and_writes_of_all_disks_are_counted() {
        let table = " 254  0 vda 100 5 6 7 30 9 10 11 0 13 14\n 254 16 vdb 1 0 0 0 2 0 0 0 0 0 0\n";
        assert_eq!(ended(table), 133);
        assert_eq!(ended("x\n\n1 2 name y 3 4 5 -1"), 0);
    }

    #[test]
    fn work_that_panics_is_lost_at_once() {
        let mut machine = Machine::default();
        let lost = within(&mut machine, ESP, || -> u8 { panic!("on purpose") });
        assert_eq!(lost, Err(Error::Lost));
    }
}
