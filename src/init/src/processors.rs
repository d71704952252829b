//! The processors that the kernel did not start: those that a hypervisor adds while the machine
//! runs, and those beyond `maxcpus=` of the kernel command line.
//!
//! The kernel announces a processor that was added and leaves its start to user space (Linux'
//! `Documentation/core-api/cpu_hotplug.rst`).
//!
//! Invariants:
//! - Process 1 never waits for a processor: a thread does, since the kernel waits ten seconds for
//!   one that does not respond.
//! - A processor that failed is tried again only when it is announced.
//!
//! What this module does not do: stop a processor, or start one against the kernel command line
//! (`nosmt`, `nr_cpus=`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender, TryIter};
use std::thread;

use rustix::io::Errno;

use polis_base::sys::uevent::Event;

/// Where the kernel lists processors, `cpu0` and so on, each with a file `online` if it can be
/// started and stopped.
const PROCESSORS: &str = "/sys/devices/system/cpu";

/// The name of a processor that was to be started, and the result.
pub type Outcome = (String, io::Result<()>);

/// An order to the thread.
#[derive(Debug)]
enum Order {
    /// Start all that are offline.
    All,
    /// Start this one, if it is offline.
    One(String),
}

/// The handle of the thread that starts processors.
#[derive(Debug)]
pub struct Processors {
    orders: Sender<Order>,
    outcomes: Receiver<Outcome>,
}

impl Processors {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// There is no memory for it.
    pub fn begin() -> io::Result<Self> {
        Self::of(Path::new(PROCESSORS))
    }

    fn of(folder: &Path) -> io::Result<Self> {
        let (orders, ordered) = mpsc::channel();
        let (outcome, outcomes) = mpsc::channel();
        let folder = folder.to_owned();
        thread::Builder::new()
            .name("processors".to_owned())
            .spawn(move || run(&folder, &ordered, &outcome))?;
        Ok(Self { orders, outcomes })
    }

    /// Starts all that are offline, except those that failed.
    pub fn start_all(&self) {
        self.order(Order::All);
    }

    /// Starts the one that this event announces, if it does.
    pub fn notice(&self, event: &Event) {
        if let Some(name) = added(event) {
            self.order(Order::One(name.to_owned()));
        }
    }

    /// The results since the last call.
    #[must_use]
    pub fn outcomes(&self) -> TryIter<'_, Outcome> {
        self.outcomes.try_iter()
    }

    fn order(&self, order: Order) {
        // The thread ends only by a panic: the machine goes on with the processors that it has.
        self.orders.send(order).ok();
    }
}

fn run(folder: &Path, ordered: &Receiver<Order>, outcomes: &Sender<Outcome>) {
    let mut failed = BTreeSet::new();
    while let Ok(order) = ordered.recv() {
        let names: Vec<String> = match order {
            Order::All => names(folder).filter(|name| !failed.contains(name)).collect(),
            Order::One(name) => vec![name],
        };
        for name in names {
            let Some(outcome) = start(folder, &name) else { continue };
            if outcome.is_err() {
                failed.insert(name.clone());
            }
            // The receiver lasts as long as the machine.
            outcomes.send((name, outcome)).ok();
        }
    }
}

/// The name of a processor that was added, such as `cpu1`.
fn added(event: &Event) -> Option<&str> {
    let is_added = event.action == "add" && event.get("SUBSYSTEM") == Some("cpu");
    let (_folder, name) = event.path.rsplit_once('/')?;
    (is_added && is_processor(name)).then_some(name)
}

fn names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_processor(name))
}

/// Starts one. `None` if it runs, or cannot be started because it never stops, or must not.
fn start(folder: &Path, name: &str) -> Option<io::Result<()>> {
    let file = folder.join(name).join("online");
    let started = match fs::read_to_string(&file) {
        Ok(online) if online.trim() == "0" => fs::write(&file, "1"),
        Ok(_online) => return None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(error),
    };
    (!started.as_ref().is_err_and(is_disabled)).then_some(started)
}

/// With `nosmt`, the kernel starts the second thread of a core only for its first moment, and then
/// refuses it.
fn is_disabled(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    [Some(Errno::CANCELED), Some(Errno::PERM)].contains(&errno)
}

fn is_processor(name: &str) -> bool {
    name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;

    /// A folder with these processors, and the files of their states.
    fn folder(
        processors: &[(&str, Option<&str>)],
    ) -> (tempfile::TempDir, impl Fn(&str) -> PathBuf + use<>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let online = move |name: &str| path.join(name).join("online");
        for (name, state) in processors {
            fs::create_dir(folder.path().join(name)).unwrap();
            if let Some(state) = state {
                fs::write(online(name), state).unwrap();
            }
        }
        (folder, online)
    }

    fn next(processors: &Processors) -> (String, bool) {
        let (name, outcome) = processors.outcomes.recv_timeout(Duration::from_secs(60)).unwrap();
        (name, outcome.is_ok())
    }

    fn announcement(action: &str, path: &str, subsystem: &str) -> Event {
        Event {
            action: action.to_owned(),
            path: path.to_owned(),
            variables: BTreeMap::from([("SUBSYSTEM".to_owned(), subsystem.to_owned())]),
        }
    }

    #[test]
    fn processors_that_are_offline_are_started_and_no_others() {
        // Folders beside them: `cpufreq`, `cpuidle`.
        let all = [
            ("cpu0", None),
            ("cpu1", Some("0\n")),
            ("cpu2", Some("1\n")),
            ("cpuidle", Some("0\n")),
        ];
        let (folder, online) = folder(&all);
        let processors = Processors::of(folder.path()).unwrap();
        processors.start_all();
        assert_eq!(next(&processors), ("cpu1".to_owned(), true));
        assert_eq!(fs::read_to_string(online("cpu1")).unwrap(), "1");
        assert_eq!(fs::read_to_string(online("cpuidle")).unwrap(), "0\n");
        assert!(start(folder.path(), "cpu3").is_none());
        // One is added.
        fs::create_dir(folder.path().join("cpu3")).unwrap();
        fs::write(online("cpu3"), "0\n").unwrap();
        processors.notice(&announcement("add", "/devices/system/cpu/cpu3", "cpu"));
        assert_eq!(next(&processors), ("cpu3".to_owned(), true));
        assert!(processors.outcomes().next().is_none());
    }

    #[test]
    fn a_processor_that_does_not_respond_keeps_only_the_thread_waiting() {
        let (folder, online) = folder(&[("cpu1", None)]);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, online("cpu1"), kind, mode, 0).unwrap();
        let processors = Processors::of(folder.path()).unwrap();
        // To open a pipe waits for its other end, as the start waits for the processor.
        processors.start_all();
        assert!(processors.outcomes().next().is_none());
        File::options().write(true).open(online("cpu1")).unwrap().write_all(b"0\n").unwrap();
        let mut written = String::new();
        File::open(online("cpu1")).unwrap().read_to_string(&mut written).unwrap();
        assert_eq!((written.as_str(), next(&processors)), ("1", ("cpu1".to_owned(), true)));
    }

    #[test]
    fn a_processor_that_failed_is_tried_again_when_it_is_announced() {
        // A folder in place of the file: it cannot be read.
        let (folder, online) = folder(&[("cpu1", None), ("cpu2", Some("0\n"))]);
        fs::create_dir(online("cpu1")).unwrap();
        let processors = Processors::of(folder.path()).unwrap();
        processors.start_all();
        let mut both = [next(&processors), next(&processors)];
        both.sort();
        assert_eq!(both, [("cpu1".to_owned(), false), ("cpu2".to_owned(), true)]);
        processors.start_all();
        processors.notice(&announcement("add", "/devices/system/cpu/cpu1", "cpu"));
        assert_eq!(next(&processors), ("cpu1".to_owned(), false));
        processors.start_all();
        fs::write(online("cpu2"), "0\n").unwrap();
        processors.notice(&announcement("add", "/devices/system/cpu/cpu2", "cpu"));
        assert_eq!(next(&processors), ("cpu2".to_owned(), true));
    }

    #[test]
    fn a_thread_of_a_core_that_the_command_line_disables_is_no_failure() {
        for (errno, is) in [(Errno::CANCELED, true), (Errno::PERM, true), (Errno::IO, false)] {
            assert_eq!(is_disabled(&errno.into()), is, "{errno}");
        }
    }

    #[test]
    fn a_processor_is_added_by_its_own_announcement() {
        let path = "/devices/system/cpu/cpu1";
        for (action, path, subsystem, name) in [
            ("add", path, "cpu", Some("cpu1")),
            ("remove", path, "cpu", None),
            ("online", path, "cpu", None),
            ("add", path, "block", None),
            ("add", "/devices/system/cpu/..", "cpu", None),
        ] {
            assert_eq!(added(&announcement(action, path, subsystem)), name);
        }
    }
}
