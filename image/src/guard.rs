//! The lock of a folder: one process at a time works in it, and another one says that it waits.

use std::{
    fs::{self, File, TryLockError},
    path::Path,
    time::Instant,
};

use crate::{
    error::{At as _, Result},
    step::{Observer, Report},
};

/// The step in which a process waits for another one.
const WAIT: &str = "waiting";

/// The lock of a folder, which ends with this value.
#[derive(Debug)]
pub struct Guard {
    _file: File,
}

/// Waits until no other process works in a folder, which need not exist yet.
pub(crate) fn hold(folder: &Path, observer: &dyn Observer) -> Result<Guard> {
    fs::create_dir_all(folder).at("make", folder)?;
    let path = folder.join("guard");
    let file = File::create(&path).at("create", &path)?;
    match file.try_lock() {
        Ok(()) => return Ok(Guard { _file: file }),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error).at("lock", &path),
    }
    let start = Instant::now();
    observer.waits(folder);
    observer.begin(WAIT);
    file.lock().at("lock", &path)?;
    let why = Some(format!("another process worked in {}", folder.display()));
    observer.step(&Report { name: WAIT, time: start.elapsed(), why });
    Ok(Guard { _file: file })
}

#[cfg(test)]
mod tests {
    use std::{
        path::PathBuf,
        sync::{Mutex, mpsc},
        thread,
        time::Duration,
    };

    use super::*;
    use crate::{
        moved::Moved,
        step::{Silent, Unit},
    };

    struct Seen {
        waits: mpsc::Sender<PathBuf>,
        begun: mpsc::Sender<&'static str>,
        why: Mutex<Option<String>>,
    }

    impl Observer for Seen {
        fn waits(&self, folder: &Path) {
            self.waits.send(folder.to_owned()).unwrap();
        }
        fn begin(&self, name: &'static str) {
            self.begun.send(name).unwrap();
        }
        fn step(&self, report: &Report) {
            self.why.lock().unwrap().clone_from(&report.why);
        }
        fn moved(&self, _: &Moved) {}
        fn progress(&self, _: &str, _: u64, _: u64, _: Unit) {}
    }

    #[test]
    fn a_process_that_waits_for_another_one_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let first = hold(folder.path(), &Silent).unwrap();
        let (begun, begins) = mpsc::channel();
        let (waits, waited) = mpsc::channel();
        let seen = Seen { waits, begun, why: Mutex::default() };
        thread::scope(|scope| {
            let second = scope.spawn(|| hold(folder.path(), &seen).unwrap());
            // Before the wait, which may be long.
            let told = waited.recv_timeout(Duration::from_secs(60));
            assert_eq!(told.as_deref(), Ok(folder.path()));
            assert_eq!(begins.recv_timeout(Duration::from_secs(60)), Ok(WAIT));
            drop(first);
            drop(second.join().unwrap());
        });
        let why = seen.why.lock().unwrap().clone().unwrap();
        assert_eq!(why, format!("another process worked in {}", folder.path().display()));
        // The lock of a free folder is not a step.
        drop(hold(folder.path(), &seen).unwrap());
        assert!(begins.try_recv().is_err());
    }
}
