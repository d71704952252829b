//! The lock of a run: one `cargo xtask run` per name, since a second one would replace
//! the disks and the owner's key of the machines of the first.
//!
//! The lock is `flock(2)` on `target/run/<name>.lock`, beside the folder of the run, so
//! that it survives the removal of that folder. The file contains the process that
//! holds the lock, and since when. `cargo xtask bench` has one lock for all measurements,
//! `target/bench.lock`: each begins with an empty folder in `target/bench`.
//!
//! Invariants:
//! - The kernel releases the lock with the process that took it, however that ends:
//!   the lock of a dead process never blocks. QEMU and compilers do not inherit it.

use std::fs::{self, File, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow};

use crate::host::Help;

/// Longest text that a holder writes: two numbers.
const HOLDER_MAX: u64 = 64;
/// The longest part of a name that a suggested name keeps, before its number.
const STEM_MAX: usize = 28;

/// The lock of a run, held until the value is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of the run `name` in the folder of all runs.
    ///
    /// # Errors
    /// Another process holds it, or the file cannot be written.
    pub(crate) fn take(runs: &Path, name: &str) -> Result<Self> {
        Self::locked(runs, name, &format!("the run `{name}`"), || {
            let free = free_name(runs, name);
            format!("end that process, or run another cluster beside it with --name {free}")
        })
    }

    /// Takes the lock of all measurements, in the folder `target`.
    ///
    /// # Errors
    /// Another process holds it, or the file cannot be written.
    pub(crate) fn of_measurements(target: &Path) -> Result<Self> {
        Self::locked(target, "bench", "target/bench", || {
            "wait until that measurement is over, or end that process".to_owned()
        })
    }

    /// Takes the lock `name` in `folder`; where another process holds it, `what` is in use, and
    /// `help` says what to do.
    fn locked(
        folder: &Path,
        name: &str,
        what: &str,
        help: impl FnOnce() -> String,
    ) -> Result<Self> {
        let place = place(folder, name);
        let doing = || format!("cannot write {}", place.display());
        fs::create_dir_all(folder).with_context(doing)?;
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&place)
            .with_context(doing)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                // The refusal does not depend on what the file contains.
                let _read = file.take(HOLDER_MAX).read_to_string(&mut text);
                let held = anyhow!("{what} is in use by {}", holder(&text));
                return Err(held.context(Help(help())));
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", place.display()));
            }
        }
        let since = since_1970(SystemTime::now()).as_secs();
        file.set_len(0)
            .and_then(|()| writeln!(file, "{} {since}", std::process::id()))
            .with_context(doing)?;
        Ok(Self { _file: file })
    }

    /// Holds the lock until the process ends: a machine may outlive the function that
    /// took the lock, but not the process.
    pub(crate) fn hold_until_exit(self) {
        Box::leak(Box::new(self));
    }
}

fn place(runs: &Path, name: &str) -> PathBuf {
    runs.join(format!("{name}.lock"))
}

/// A clock before 1970 counts as 1970.
fn since_1970(at: SystemTime) -> Duration {
    at.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The process that wrote `text`, and since when it holds the lock.
fn holder(text: &str) -> String {
    let read = || -> Option<(u32, u64)> {
        let (process, since) = text.trim_end().split_once(' ')?;
        Some((process.parse().ok()?, since.parse().ok()?))
    };
    // The file is empty for a moment while its holder writes it.
    let Some((process, since)) = read() else { return "another process".to_owned() };
    let of_day = since % (24 * 60 * 60);
    let (hours, minutes, seconds) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let age = since_1970(SystemTime::now()).as_secs().saturating_sub(since);
    let age = if age < 60 { format!("{age} s") } else { format!("{} min", age / 60) };
    format!("process {process} since {hours:02}:{minutes:02}:{seconds:02} UTC ({age} ago)")
}

/// A name that has neither a lock nor a folder yet, so that its run replaces nothing.
fn free_name(runs: &Path, name: &str) -> String {
    // Names are ASCII.
    let stem = &name[..name.len().min(STEM_MAX)];
    let taken = |name: &String| place(runs, name).exists() || runs.join(name).exists();
    let mut names = (2_u32..).map(|number| format!("{stem}-{number}"));
    names.find(|name| !taken(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_of_a_name_is_refused_with_the_holder_and_a_free_name() {
        let runs = tempfile::tempdir().unwrap();
        let held = Lock::take(runs.path(), "polis").unwrap();
        fs::create_dir(runs.path().join("polis-2")).unwrap();
        let error = format!("{:#}", Lock::take(runs.path(), "polis").unwrap_err());
        let holder = format!("in use by process {} since ", std::process::id());
        assert!(error.contains(&holder), "{error}");
        assert!(error.contains("--name polis-3"), "{error}");
        Lock::take(runs.path(), "polis-3").unwrap();
        drop(held);
        Lock::take(runs.path(), "polis").unwrap();
    }

    #[test]
    fn a_second_measurement_is_refused_with_the_holder() {
        let target = tempfile::tempdir().unwrap();
        let held = Lock::of_measurements(target.path()).unwrap();
        let error = Lock::of_measurements(target.path()).unwrap_err();
        let holder = format!("target/bench is in use by process {} since ", std::process::id());
        assert!(error.is::<Help>() && format!("{error:#}").contains(&holder), "{error:#}");
        drop(held);
        Lock::of_measurements(target.path()).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_does_not_block() {
        let runs = tempfile::tempdir().unwrap();
        fs::write(place(runs.path(), "polis"), "4242 1700000000 and more\n").unwrap();
        let _held = Lock::take(runs.path(), "polis").unwrap();
        let text = fs::read_to_string(place(runs.path(), "polis")).unwrap();
        assert!(text.starts_with(&format!("{} ", std::process::id())), "{text}");
        assert_eq!(text.split_whitespace().count(), 2, "{text}");
    }

    #[test]
    fn a_holder_is_named_with_its_time_or_not_at_all() {
        let named = holder("4242 1700000000\n");
        assert!(named.starts_with("process 4242 since 22:13:20 UTC ("), "{named}");
        for torn in ["", "4242", "x y"] {
            assert_eq!(holder(torn), "another process");
        }
    }

    #[test]
    fn an_advised_name_is_a_name() {
        let runs = tempfile::tempdir().unwrap();
        let longest = "x".repeat(32);
        crate::run::name(&free_name(runs.path(), &longest)).unwrap();
    }
}
