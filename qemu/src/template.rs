//! Saved machines: a machine is stopped at some moment and saved, and any number start there.
//!
//! ```text
//! running --save--> folder: memory, state, disk.img, said --restore--> running, again and again
//! ```
//!
//! The guest's memory is a file (`x-ignore-shared`): while the saved machine runs it
//! writes there, and a restored one maps the same file privately. So a restore copies
//! only the disk, and starts in a second. The state of the devices is a stream of some
//! megabytes.
//!
//! A restored machine has the same devices and kernel command line as the saved one. Its
//! forwarded ports and its reaction to a reset may differ. Its guest cannot see that it was
//! saved or that time has passed: its clock continues where it stopped. A `vmgenid` makes
//! the kernel reseed its random numbers.
//!
//! A machine is saved at one of two moments:
//! - at home ([`save`], [`restore`]): its disk and its card are in it. All machines that
//!   start from it are the same node, so two of them never share a segment.
//! - in stage 1 ([`save_in_stage_1`], [`start`]): kernel and drivers are ready, and it waits
//!   for a disk. Disk and card are plugged into its slots after the restore, so each machine
//!   that starts from it has its own, and is a node of its own. Its parameters are on the
//!   ESP: its driver of fw_cfg has read the list of items before.
//!
//! What this module does not do: choose the machines to save, or keep the folder
//! (`cache`).

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::args::{Config, Devices, Memory, plugged};
use crate::deadline::Deadline;
use crate::disk;
use crate::machine::{Error, Machine};

/// Longest that a state may take to be written or read: it takes a tenth of a second.
const MOVE_MAX: Duration = Duration::from_secs(60);

/// QEMU reports its progress only on request.
const LOOK: Duration = Duration::from_millis(10);

const MEMORY: &str = "memory";
const STATE: &str = "state";
const DISK: &str = "disk.img";
const LINES: &str = "said";

/// The machine to be saved in `dir`: the same, with its memory in a file there.
#[must_use]
pub fn to_be_saved(config: &Config, dir: &Path) -> Config {
    Config { memory_file: Some(Memory::Own(dir.join(MEMORY))), ..config.clone() }
}

/// Stops a machine of [`to_be_saved`], saves it in the same folder and ends it.
///
/// # Errors
/// When QEMU cannot save it, or its disk cannot be copied.
pub fn save(mut machine: Machine, config: &Config, dir: &Path) -> Result<(), Error> {
    machine.qmp.stop()?;
    memory_stays(&mut machine)?;
    let state = format!("exec:cat > {}", quoted(&dir.join(STATE)));
    machine.qmp.execute("migrate", json!({ "uri": state }))?;
    until(|| {
        let answer = machine.qmp.execute("query-migrate", Value::Null)?;
        match answer["status"].as_str() {
            Some("completed") => Ok(true),
            Some("failed" | "cancelled") => Err(failed("save the machine", &answer.to_string())),
            _ => Ok(false),
        }
    })?;
    match &config.disk {
        Some(disk) if config.devices == Devices::FromStart => {
            let copied = disk::copy(&disk.file, &dir.join(DISK));
            copied.map_err(host("copy the machine's disk"))?;
        }
        _ => {}
    }
    let lines: String = machine.lines().iter().map(|line| line.text.clone() + "\n").collect();
    fs::write(dir.join(LINES), lines).map_err(host("keep the machine's lines"))?;
    machine.kill();
    Ok(())
}

/// Boots a machine like `config` without a disk until it waits for one, and saves it in
/// `dir`.
///
/// # Errors
/// When it does not come so far within `within`, or QEMU cannot save it.
pub fn save_in_stage_1(config: &Config, dir: &Path, within: Duration) -> Result<(), Error> {
    let config = Config { devices: Devices::Absent, ..to_be_saved(config, dir) };
    let mut machine = Machine::start(&config, &dir.join("boot"))?;
    machine.wait_for("stage", within, |stage| {
        stage.is("name", "initramfs") && stage.is("state", "waiting")
    })?;
    save(machine, &config, dir)
}

/// Switches a machine on: one that was saved in stage 1 goes on from there with its own
/// disk and card, every other one boots.
///
/// # Errors
/// When QEMU does not start, or rejects the state, as it does for another machine.
pub fn start(config: &Config, logs: &Path) -> Result<Machine, Error> {
    match &config.devices {
        Devices::Plugged(saved) => resume(config, saved, logs),
        Devices::FromStart | Devices::Absent => Machine::start(config, logs),
    }
}

/// Starts the machine that was saved in `saved`, with a copy of its disk in the place
/// that `config` names. Its first lines are those of the saved one; a wait starts with
/// its new lines.
///
/// # Errors
/// When QEMU rejects the state, as it does for another machine.
pub fn restore(config: &Config, saved: &Path, logs: &Path) -> Result<Machine, Error> {
    if let Some(disk) = &config.disk {
        let copied = disk::copy(&saved.join(DISK), &disk.file);
        copied.map_err(host("copy the saved disk"))?;
    }
    resume(config, saved, logs)
}

fn resume(config: &Config, saved: &Path, logs: &Path) -> Result<Machine, Error> {
    let lines = fs::read_to_string(saved.join(LINES)).map_err(host("read the saved lines"))?;
    let memory = Some(Memory::Saved(saved.join(MEMORY)));
    let mut machine = Machine::start(&Config { memory_file: memory, ..config.clone() }, logs)?;
    machine.restore_lines(lines.lines());
    memory_stays(&mut machine)?;
    let state = format!("exec:cat {}", quoted(&saved.join(STATE)));
    machine.qmp.execute("migrate-incoming", json!({ "uri": state }))?;
    until(|| {
        let answer = machine.qmp.execute("query-status", Value::Null)?;
        Ok(answer["status"] != "inmigrate")
    })?;
    if matches!(config.devices, Devices::Plugged(_)) {
        for device in plugged(config) {
            machine.qmp.execute("device_add", device)?;
        }
    }
    machine.qmp.execute("cont", Value::Null)?;
    Ok(machine)
}

/// Keeps the memory out of the stream, because it is in the file.
fn memory_stays(machine: &mut Machine) -> Result<(), Error> {
    let ignore = json!([{ "capability": "x-ignore-shared", "state": true }]);
    let arguments = json!({ "capabilities": ignore });
    Ok(machine.qmp.execute("migrate-set-capabilities", arguments).map(drop)?)
}

#[expect(clippy::disallowed_methods, reason = "the rule is for the node; this runs on the host")]
fn until(mut done: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
    let mut deadline = Deadline::within(MOVE_MAX);
    while !done()? {
        if deadline.is_over() {
            return Err(failed("move the machine's state", "it takes too long"));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn host(doing: &str) -> impl FnOnce(io::Error) -> Error {
    let doing = doing.to_owned();
    move |source| Error::Host { doing, source }
}

fn failed(doing: &str, why: &str) -> Error {
    host(doing)(io::Error::other(why.to_owned()))
}

/// A path as one word of a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
