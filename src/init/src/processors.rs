//! The processors that the kernel did not start: those that a hypervisor adds while the machine
//! runs, and those beyond `maxcpus=` of the kernel command line.
//!
//! The kernel announces a processor that was added and leaves its start to user space (Linux'
//! `Documentation/core-api/cpu_hotplug.rst`).
//!
//! What this module does not do: stop a processor.

use std::fs;
use std::io;
use std::path::Path;

use polis_base::sys::uevent::Event;

/// Where the kernel lists processors, `cpu0` and so on, each with a file `online` if it can be
/// started and stopped.
pub const PROCESSORS: &str = "/sys/devices/system/cpu";

/// The name of a processor that was added, such as `cpu1`.
#[must_use]
pub fn added(event: &Event) -> Option<&str> {
    let is_added = event.action == "add" && event.get("SUBSYSTEM") == Some("cpu");
    let (_folder, name) = event.path.rsplit_once('/')?;
    (is_added && is_processor(name)).then_some(name)
}

/// Starts all that stand still. Returns the name of each with the outcome.
pub fn start_all(folder: &Path) -> Vec<(String, io::Result<()>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| start(folder, &name).map(|outcome| (name, outcome))).collect()
}

/// Starts one. `None` if it runs, or cannot be started because it never stops.
pub fn start(folder: &Path, name: &str) -> Option<io::Result<()>> {
    if !is_processor(name) {
        return None;
    }
    let file = folder.join(name).join("online");
    match fs::read_to_string(&file) {
        Ok(online) if online.trim() == "0" => Some(fs::write(&file, "1")),
        Ok(_online) => None,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(Err(error)),
    }
}

fn is_processor(name: &str) -> bool {
    name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn processors_that_stand_still_are_started_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let online = |name: &str| folder.path().join(name).join("online");
        for (name, state) in [("cpu0", None), ("cpu1", Some("0\n")), ("cpu2", Some("1\n"))] {
            fs::create_dir(folder.path().join(name)).unwrap();
            if let Some(state) = state {
                fs::write(online(name), state).unwrap();
            }
        }
        // Folders beside them: `cpufreq`, `cpuidle`.
        fs::create_dir(folder.path().join("cpuidle")).unwrap();
        fs::write(online("cpuidle"), "0\n").unwrap();

        let started = start_all(folder.path());
        let [(name, outcome)] = started.as_slice() else { panic!("{started:?}") };
        assert_eq!(name, "cpu1");
        assert!(outcome.is_ok());
        assert_eq!(fs::read_to_string(online("cpu1")).unwrap(), "1");
        assert_eq!(fs::read_to_string(online("cpuidle")).unwrap(), "0\n");
        assert!(start(folder.path(), "cpu3").is_none());
    }

    #[test]
    fn a_processor_is_added_by_its_own_announcement() {
        let event = |action: &str, path: &str, subsystem: &str| Event {
            action: action.to_owned(),
            path: path.to_owned(),
            variables: BTreeMap::from([("SUBSYSTEM".to_owned(), subsystem.to_owned())]),
        };
        let path = "/devices/system/cpu/cpu1";
        assert_eq!(added(&event("add", path, "cpu")), Some("cpu1"));
        assert_eq!(added(&event("remove", path, "cpu")), None);
        assert_eq!(added(&event("online", path, "cpu")), None);
        assert_eq!(added(&event("add", path, "block")), None);
        assert_eq!(added(&event("add", "/devices/system/cpu/..", "cpu")), None);
    }
}
