//! Stage 2: builds the tree of mounts, starts `node`, and runs the main loop.
//!
//! ```text
//! mounts --> ESP --> panics --> node --> [main loop] --> how it ended
//!                                 |          ^
//!                                 |          |  node's lines, its messages, its end
//!                                 |          |  signals, buttons, devices, the kernel's log
//!                                 +----------+
//! ```
//!
//! Invariants:
//! - Until `node` runs, nothing waits for a disk without a deadline (`deadline`).

mod main_loop;
mod panics;

use std::fs;
use std::io;
use std::path::Path;

use polis_base::extra;
use polis_base::files;
use polis_base::recovery;
use polis_base::serial::{EventLine, Severity};
use polis_base::stage::Stage;
use polis_base::sys::reboot::Reason;
use polis_base::sys::{files as sys_files, spawn, vt};
use polis_base::trapdoor::{Report, code};

use super::deadline::{self, Work};
use super::error::Error;
use super::esp;
use super::machine::{Machine, Start};
use super::mounts;
use super::node::{Late, NODE, Node, variables};
use super::verified;

/// How the machine is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// In order.
    Off(Reason),
    /// With a guru meditation.
    Guru(Report),
}

/// Runs the machine until it is to end.
///
/// # Errors
///
/// When it can't even start.
pub fn run(machine: &mut Machine, start: Start) -> Result<End, Error> {
    identify(machine)?;
    let identity = machine.identity.clone();
    let line = EventLine::new("boot")
        .field("version", &identity.version)
        .field("image", &identity.image)
        .field("slot", &identity.slot);
    machine.port.event(line);
    machine.started(Stage::System);
    // Only a hint: a fault of the file is reported when it is started.
    Work::begin(|| sys_files::readahead(Path::new(NODE)).ok()).ok();
    mount_tree(machine)?;
    if let Err(error) = start.extra.give(Path::new(extra::DIRECTORY)) {
        let text = format!("cannot hand on the signed measurements of this system: {error}");
        machine.port.log(Severity::Error, &text);
    }
    // A placeholder until the machine has a name.
    rustix::system::sethostname(b"polis").ok();
    greet();
    let unmountable = mount_esp(machine, &start.esp);
    machine.previous = last_failure(machine);
    machine.start = Some(start);
    // The records of a panic are taken from firmware also where nothing else goes on.
    if let Some(report) = panics::count(machine).or(unmountable) {
        return Ok(End::Guru(report));
    }
    machine.done(Stage::System);
    machine.find_devices();
    node(machine, None)
}

/// Starts `node` once more, on the machine that the first one left behind, with
/// the recovery key of the disk. Every mount is still there: the tree is `init`'s,
/// and a data partition that is mounted already is as good as one that is not.
///
/// # Errors
///
/// When `node` can't be started.
pub fn again(machine: &mut Machine, key: &recovery::Text) -> Result<End, Error> {
    machine.port.log(Severity::Info, "starting node again, with the recovery key that was typed");
    greet();
    node(machine, Some(key))
}

/// Starts `node` and stays.
fn node(machine: &mut Machine, key: Option<&recovery::Text>) -> Result<End, Error> {
    let mut variables = variables(machine);
    if key.is_some() {
        variables.push(("POLIS_RECOVERY_FD".to_owned(), spawn::SECRET_FD.to_string()));
    }
    let key = key.cloned();
    let started = verified::step(machine, "start node", move || {
        let key = key.as_ref().map(|key| key.expose().as_bytes());
        spawn::start(Path::new(NODE), variables, key).map(Late::new)
    });
    let node = started?.and_then(Late::take);
    let node = node.map_err(|source| Error::StartNode { program: NODE, source })?;
    Ok(main_loop::run(machine, Node::new(node)))
}

/// Reads the identity of the system.
fn identify(machine: &mut Machine) -> Result<(), Error> {
    let read = || fs::read_to_string("/etc/os-release").unwrap_or_default();
    let text = verified::step(machine, "read the version of the system", read)?;
    for (key, place) in [
        ("VERSION_ID", &mut machine.identity.version),
        ("IMAGE_VERSION", &mut machine.identity.image),
    ] {
        if let Some(value) = os_release(&text, key) {
            value.clone_into(place);
        }
    }
    Ok(())
}

/// The value of `key` in the text of an `os-release` file.
fn os_release<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))?;
    Some(value.trim().trim_matches('"')).filter(|value| !value.is_empty())
}

fn mount_tree(machine: &mut Machine) -> Result<(), Error> {
    // Each mount looks its directory up in the system.
    let (lines, mounted) = verified::step(machine, "mount the tree", mounts::make_tree)?;
    lines.iter().for_each(|(severity, text)| machine.port.log(*severity, text));
    mounted.map_err(Error::Tree)
}

/// A short text for the screen before `node` draws on it.
fn greet() {
    // Without a screen this fails, which is harmless.
    vt::activate(1).ok();
    let version = env!("CARGO_PKG_VERSION");
    let text = format!("\x1b[2J\x1b[H\n  Polis {version} is starting\n");
    if let Ok(mut terminal) = polis_base::sys::terminal::Terminal::open(Path::new("/dev/tty1")) {
        io::Write::write_all(&mut terminal, text.as_bytes()).ok();
    }
}

/// Mounts the ESP unless stage 1 has. Returns a report where it cannot be mounted: `node` has its
/// records there.
fn mount_esp(machine: &mut Machine, device: &Path) -> Option<Report> {
    let error = esp::mount(machine, Stage::System, device, deadline::ESP).err()?;
    // The guru meditation may be about a panic.
    machine.port.log(Severity::Error, &error);
    let cause = "node cannot run without the EFI system partition".to_owned();
    Some(Report::new(code::ESP_UNMOUNTABLE, vec![cause, error]))
}

/// Why the last boot failed, if it did.
fn last_failure(machine: &mut Machine) -> Option<String> {
    let store = machine.attempts.clone()?;
    match on_esp(machine, move || store.load()) {
        Ok(ledger) => ledger.last,
        Err(error) => {
            let text = format!("cannot read how many boots have failed: {error}");
            machine.port.log(Severity::Warning, &text);
            None
        }
    }
}

/// Does work with the files on the ESP before `node` runs, and says so if that takes long.
fn on_esp<T: Send + 'static>(
    machine: &mut Machine,
    work: impl FnOnce() -> Result<T, files::Error> + Send + 'static,
) -> Result<T, io::Error> {
    let what = "the records on the EFI system partition";
    answered(deadline::named(machine, Stage::System, what, deadline::ESP, work))
}

/// The result of work with the files on the ESP.
fn answered<T>(work: Result<Result<T, files::Error>, deadline::Error>) -> Result<T, io::Error> {
    work.map_err(io::Error::other)?.map_err(files::Error::into_io)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polis_base::sys::poll;

    use super::super::attempts::Store;
    use super::super::machine::Times;
    use super::super::node::stages;
    use super::*;

    #[test]
    fn the_system_says_its_version_with_and_without_quotes() {
        let text = "ID=polis\nNAME=\"Polis\"\nVERSION_ID=\"0.1.0\"\nIMAGE_VERSION=abcd\nX=\n";
        assert_eq!(os_release(text, "VERSION_ID"), Some("0.1.0"));
        assert_eq!(os_release(text, "IMAGE_VERSION"), Some("abcd"));
        assert_eq!(os_release(text, "X"), None);
        assert_eq!(os_release(text, "VERSION"), None);
    }

    #[test]
    fn an_esp_that_cannot_be_mounted_is_a_failure_of_its_own_with_the_error_of_the_mount() {
        let mut machine = Machine::default();
        let report = mount_esp(&mut machine, Path::new("/dev/none")).unwrap();
        assert_eq!((report.code, report.stage), (code::ESP_UNMOUNTABLE, Stage::System));
        assert!(report.causes[1].contains("/dev/none"), "{:?}", report.causes);
        assert!(report.next.contains("fsck.vfat"), "{}", report.next);
        assert_eq!(last_failure(&mut machine), None);

        machine.attempts = Some(Store::in_tree(Path::new("/nowhere")));
        assert_eq!(mount_esp(&mut machine, Path::new("/dev/none")), None, "stage 1 has mounted it");
    }

    #[test]
    fn a_boot_that_waits_for_the_files_on_the_esp_says_so() {
        let mut machine = Machine::default();
        let slow = || {
            poll::sleep(deadline::NOTICE + Duration::from_millis(200));
            Ok(7)
        };
        assert_eq!(on_esp(&mut machine, slow).unwrap(), 7);
        let what = "the records on the EFI system partition";
        assert!(machine.port.kept().any(|line| line.contains(what)));
    }

    #[test]
    fn only_stages_that_are_over_are_handed_on() {
        let second = Duration::from_secs(1);
        let times = Times::from([
            (Stage::Kernel, (Duration::ZERO, Some(second))),
            (Stage::Initramfs, (second, Some(second * 2))),
            (Stage::System, (second * 2, None)),
        ]);
        assert_eq!(stages(&times), "kernel=0.000-1.000,initramfs=1.000-2.000");
    }
}
