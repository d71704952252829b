//! Work with a disk that has a deadline: a disk that does not answer delays neither the boot, nor
//! the screens, nor the countdown, nor the end of the machine for long.
//!
//! A call to the kernel that waits for a disk can't be taken back, so it is made on a thread of
//! its own. One that does not end in time is left behind.
//!
//! | deadline | work | when the time is up |
//! |---|---|---|
//! | [`TABLE`] | the partition tables of all disks (`tables`), a system that may be the right one | the disk is put aside, the others are looked at |
//! | [`ESP`] | the mount of the EFI system partition (`esp`), the files on it | as where it cannot be mounted, read or written; a failure counts as one whose disk does not answer |
//! | [`ESP`] | in all, the search for the other disk of a mirror and the mount of the ESP of the silent one (`source`) | a guru meditation |
//! | [`ESP`] | the start of `node` in maintenance (`maintenance`) | a guru meditation without it |
//! | [`SYSTEM`] | each step on the system (`verified`): its hash tree, its mount, the start of `node` | a guru meditation |
//! | [`STACKS`] | the calls that a `node` that hangs is in (`threads`) | they are left out |
//! | [`SETTLE`], [`SETTLE_MAX`] | the end of all mounts (`shutdown`) | they stay |
//!
//! What this module does not do: bound the time in which the kernel loads a module. It returns when
//! drivers have looked at their disks, and `loader` waits for that beside the search.

use std::fs;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::Duration;

use polis_base::stage::Stage;

use super::machine::Machine;

/// For the partition table of a disk, some thirty sectors. A disk that has to start its motor takes
/// ten seconds.
pub const TABLE: Duration = Duration::from_secs(20);

/// For the mount of the ESP, or a few small files on it; as for a partition table.
pub const ESP: Duration = Duration::from_secs(20);

/// For one step on the system, without which there is nothing to go on with: most drivers reset a
/// disk that has not answered for 30 seconds, and ask it again.
pub const SYSTEM: Duration = Duration::from_secs(90);

/// For the stacks of a process: the kernel waits for a thread of it that changes its memory, and
/// that one perhaps for a disk.
pub const STACKS: Duration = Duration::from_secs(5);

/// For the end of everything that was written and not yet flushed, and of the mounts, since a
/// disk last ended a request.
pub const SETTLE: Duration = Duration::from_secs(90);

/// The same in all: the kernel may have requests of its own without an end, as while it fills a
/// disk of a mirror, beside a disk that does not answer. A slow disk has taken 180 GB by then.
pub const SETTLE_MAX: Duration = Duration::from_secs(1800);

/// After so long, serial line and screen name what the boot waits for.
pub const NOTICE: Duration = Duration::from_secs(2);

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

/// Work on a thread of its own, which may never end.
#[derive(Debug)]
pub struct Work<T> {
    answered: Receiver<T>,
}

impl<T: Send + 'static> Work<T> {
    /// Begins `work`.
    ///
    /// # Errors
    ///
    /// There is no thread for it.
    pub fn begin(work: impl FnOnce() -> T + Send + 'static) -> Result<Self, Error> {
        let (answer, answered) = mpsc::channel();
        // The thread's end says nothing that its answer does not.
        let started = thread::Builder::new()
            .name("disk".to_owned())
            .spawn(move || drop(answer.send(work())))
            .map(drop);
        started.map_err(|_error| Error::Lost)?;
        Ok(Self { answered })
    }

    /// The result, if it is there by now.
    #[must_use]
    pub fn answer(&self) -> Option<Result<T, Error>> {
        match self.answered.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(TryRecvError::Disconnected) => Some(Err(Error::Lost)),
            Err(TryRecvError::Empty) => None,
        }
    }

    /// Waits for the result until `left` is used up. Meanwhile the watchdog is petted, and the
    /// serial port gets its lines. Time in which the machine stood still does not count.
    pub fn wait(&self, machine: &mut Machine, left: &mut Duration) -> Option<Result<T, Error>> {
        loop {
            let step = STEP.min(*left);
            match self.answered.recv_timeout(step) {
                Ok(result) => return Some(Ok(result)),
                Err(RecvTimeoutError::Disconnected) => return Some(Err(Error::Lost)),
                Err(RecvTimeoutError::Timeout) if step.is_zero() => return None,
                Err(RecvTimeoutError::Timeout) => {
                    machine.pet();
                    machine.port.flush();
                }
            }
            *left = left.saturating_sub(step);
        }
    }
}

/// Does `work` on a thread of its own for at most `time`.
///
/// # Errors
///
/// The time is up; the work may still go on. It panicked, or got no thread.
pub fn within<T: Send + 'static>(
    machine: &mut Machine,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    watched(machine, [time; 2], || 0, work)
}

/// The same for a step of the boot: if it takes longer than [`NOTICE`], serial line and screen say
/// that `stage` waits for `what`.
///
/// # Errors
///
/// As above.
pub fn named<T: Send + 'static>(
    machine: &mut Machine,
    stage: Stage,
    what: &str,
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let work = Work::begin(work)?;
    let mut left = NOTICE.min(time);
    if let Some(result) = work.wait(machine, &mut left) {
        return result;
    }
    let text = format!(
        "{what}; its disk has not answered yet, and is waited for {} s at most; check the disk and \
         its cable",
        time.as_secs()
    );
    machine.waiting(stage, text);
    left = time.saturating_sub(NOTICE);
    work.wait(machine, &mut left).unwrap_or(Err(Error::Overdue { waited: time }))
}

/// The same without words: the first of `times` begins anew whenever a disk has ended a request,
/// and the second one is for all of the work.
///
/// # Errors
///
/// As above.
pub fn while_disks_work<T: Send + 'static>(
    machine: &mut Machine,
    times: [Duration; 2],
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    watched(
        machine,
        times,
        || ended(&fs::read_to_string("/proc/diskstats").unwrap_or_default()),
        work,
    )
}

fn watched<T: Send + 'static>(
    machine: &mut Machine,
    [time, all]: [Duration; 2],
    progress: impl Fn() -> u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let work = Work::begin(work)?;
    let (mut left, mut left_of_all, mut before) = (time, all, progress());
    loop {
        let step = STEP.min(left).min(left_of_all);
        if let Some(result) = work.wait(machine, &mut step.clone()) {
            return result;
        }
        if step.is_zero() {
            return Err(Error::Overdue { waited: if left.is_zero() { time } else { all } });
        }
        left_of_all = left_of_all.saturating_sub(step);
        let now = progress();
        left = if now == before { left.saturating_sub(step) } else { time };
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
    fn work_that_was_left_behind_may_answer_later() {
        let mut machine = Machine::default();
        let (end, ended) = mpsc::channel::<()>();
        let work = Work::begin(move || ended.recv().is_ok()).unwrap();
        assert_eq!(work.wait(&mut machine, &mut Duration::from_millis(20)), None);
        assert_eq!(work.answer(), None);
        end.send(()).unwrap();
        assert_eq!(work.wait(&mut machine, &mut ESP.clone()), Some(Ok(true)));
    }

    #[test]
    fn a_step_of_the_boot_that_never_ends_is_left_behind() {
        let mut machine = Machine::default();
        let (what, waited) = ("the system", Duration::from_millis(50));
        let (end, never) = mpsc::channel::<()>();
        let hung = named(&mut machine, Stage::System, what, waited, move || never.recv().is_ok());
        assert_eq!(hung, Err(Error::Overdue { waited }));
        let named_with_a_remedy = "check the disk and its cable";
        assert!(machine.port.kept().any(|line| line.contains(named_with_a_remedy)));
        assert_eq!(named(&mut machine, Stage::System, what, waited, || 7), Ok(7));
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
        let (waited, all) = (Duration::from_millis(10), Duration::from_secs(3600));
        let hung = watched(&mut machine, [waited, all], progress, move || never.recv().is_ok());
        assert_eq!(hung, Err(Error::Overdue { waited }));
        assert!(count.get() > left, "it waited on after the last request");
        drop(end);
    }

    #[test]
    fn requests_of_another_disk_without_an_end_keep_work_for_a_bounded_time_only() {
        let mut machine = Machine::default();
        let count = std::cell::Cell::new(0);
        let progress = || count.replace(count.get() + 1);
        let (end, never) = mpsc::channel::<()>();
        let (time, waited) = (Duration::from_millis(10), Duration::from_millis(100));
        let hung = watched(&mut machine, [time, waited], progress, move || never.recv().is_ok());
        assert_eq!(hung, Err(Error::Overdue { waited }));
        assert!(count.get() > 2, "it did not wait on");
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
