//! Stage 1: finds, verifies and enters the system, from the initramfs.
//!
//! ```text
//! /dev /proc /sys --> command line --> drivers, until the disk is there
//!      --> dm-verity on the system partition --> mounted --> the root
//! ```
//!
//! The process that enters the system is the one that was started: its program stays in
//! memory, where a damaged block cannot reach it, and a second start would cost time.
//!
//! Invariants:
//! - It waits for announcements of the kernel, not for time to pass, and for no disk without a
//!   deadline (`deadline`), unless the kernel does so while it loads a module.
//!
//! What this module does not do: look for the disk (`source`, `search`), or verify the system
//! (`verified`).

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use polis_base::extra;
use polis_base::serial::Severity;
use polis_base::stage::Stage;
use polis_base::sys::mount;
use polis_base::sys::signal::Signals;
use polis_base::sys::uevent::Listener;
use polis_base::sys::{self, reboot, vt};

use super::command_line::{self, CommandLine};
use super::drivers::{Drivers, MODULES};
use super::early::Early;
use super::error::Error;
use super::esp;
use super::extra::Extra;
use super::firmware;
use super::machine::{Machine, Start, System};
use super::mounts;
use super::source;
use super::verified::{self, SYSTEM};

/// By this file `init` knows that it runs in the initramfs.
pub const MARK: &str = "/stage1";

/// Where the kernel has unpacked the microcode that is before the initramfs. It has loaded what it
/// needs before that, and keeps a copy of that for processors that start later.
const MICROCODE: &str = "kernel";
/// The modules of the ESP's file system.
const ESP_MODULES: [&str; 2] = ["nls_cp437", "vfat"];
/// The modules that verify and read the system.
const SYSTEM_MODULES: [&str; 3] = ["blake2b_generic", "dm_verity", "erofs"];
/// The data partition's file system.
const DATA_MODULE: &str = "xfs";
/// The driver of QEMU's fw_cfg, and its device.
const FW_CFG_MODULE: &str = "qemu_fw_cfg";
const FW_CFG: &str = "/sys/bus/acpi/devices/QEMU0002:00";

/// The mounts that the system takes over.
const MOVED: [&str; 4] = ["dev", "proc", "sys", "esp"];

/// Signals that process 1 handles.
const SIGNALS: [Signal; 6] =
    [Signal::CHILD, Signal::INT, Signal::TERM, Signal::USR2, Signal::POWER, Signal::HUP];

/// Enters the system. `machine` holds the details of a failure.
///
/// # Errors
///
/// The first step that did not succeed.
pub fn run(machine: &mut Machine) -> Result<Start, Error> {
    let early = prepare(machine)?;
    machine.kernel_done();
    machine.started(Stage::Initramfs);
    let line = sys::command_line::read().map_err(Error::ReadCommandLine)?;
    machine.countdown = command_line::countdown(&line);
    machine.init_deadline = command_line::init_deadline(&line);
    let mut drivers = Drivers::open(machine);
    // First of all, so that every failure of a system on trial is one of a trial.
    let firmware = firmware::firmware(machine, &mut drivers);
    machine.trial = firmware.trial;
    let command_line = CommandLine::parse(&line).map_err(Error::CommandLine)?;

    let source = source::find(machine, &mut drivers, &firmware, &command_line.verity)?;
    let (disk, esp) = (Path::new("/dev").join(&source.disk.disk), source.esp.path.clone());
    // In parallel with the thread, which has the ESP's by now.
    for name in SYSTEM_MODULES {
        drivers.load(machine, name);
    }
    // Before a failure of the system ends the stage: that is kept there.
    mount_esp(machine, &mut drivers, &esp, source.esp_time);
    // The parameters may be there: `node` should not have to wait for the driver.
    if Path::new(FW_CFG).exists() {
        drivers.load(machine, FW_CFG_MODULE);
    }
    let (slot, device) = source.system(machine, &command_line.verity)?;
    slot.name().clone_into(&mut machine.identity.slot);
    let system = verified::slot_system(slot, &device);
    machine.system = Some(system.clone());
    let (extra, faults) = Extra::take(Path::new(extra::IN_INITRAMFS));
    for fault in faults {
        machine.port.log(Severity::Warning, &fault);
    }
    enter(machine, &system, &command_line, early)?;
    machine.done(Stage::Initramfs);
    Ok(Start { disk, esp, extra, command_line })
}

/// Sets up all that reporting a failure needs, and the thread that loads modules.
fn prepare(machine: &mut Machine) -> Result<Option<Early>, Error> {
    let mounted = mounts::apply_first();
    machine.port.open();
    // Where this is not allowed, kernel messages share the port: a nuisance.
    vt::silence_kernel().ok();
    mounted.map_err(Error::Prepare)?;
    let own = |what| move |source| Error::Own { what, source };
    machine.signals = Some(Signals::receive(&SIGNALS).map_err(own("receive signals"))?);
    // As soon as signals can't be lost to another thread. Nothing takes longer than what the next
    // thread loads: the other processors start before it, and share that work.
    machine.start_processors();
    let early = order_modules();
    // From here on Ctrl-Alt-Del is a request and not a reset.
    reboot::catch_ctrl_alt_del().map_err(own("take over Ctrl-Alt-Del"))?;
    machine.uevents = Some(Listener::open().map_err(own("receive device announcements"))?);
    Ok(early)
}

/// Starts to load the modules that the boot needs soon. Without the thread, they are
/// loaded one after another.
fn order_modules() -> Option<Early> {
    let early = Early::start(Path::new(MODULES)).ok()?;
    ESP_MODULES.into_iter().for_each(|module| early.load(module));
    if Path::new(FW_CFG).exists() {
        early.load(FW_CFG_MODULE);
    }
    early.hurry();
    early.load(DATA_MODULE);
    Some(early)
}

/// Mounts the ESP as early as possible: failures are kept and counted there.
fn mount_esp(machine: &mut Machine, drivers: &mut Drivers, device: &Path, time: Duration) {
    for name in ESP_MODULES {
        drivers.load(machine, name);
    }
    fs::create_dir_all(mounts::ESP).ok();
    // Where the initramfs has no vfat, stage 2 mounts it.
    if let Err(error) = esp::mount(machine, Stage::Initramfs, device, time)
        && machine.esp_silent
    {
        machine.port.log(Severity::Error, &error);
    }
}

fn enter(
    machine: &mut Machine,
    system: &System,
    command_line: &CommandLine,
    early: Option<Early>,
) -> Result<(), Error> {
    verified::mount(machine, system, &command_line.verity, &MOVED)?;
    switch().map_err(|(step, source)| Error::Switch { step, source })?;
    if let Some(early) = early {
        early.give_back();
    }
    Ok(())
}

/// Makes the system the root, and frees the initramfs's memory.
fn switch() -> Result<(), (&'static str, io::Error)> {
    let system = Path::new(SYSTEM);
    for name in MOVED {
        let (from, to) = (Path::new("/").join(name), system.join(name));
        match mount::move_to(&from, &to) {
            Ok(()) => {}
            // The ESP is not mounted yet where the initramfs has no vfat, or its disk is silent.
            Err(error) if name == "esp" && error.kind() == io::ErrorKind::InvalidInput => {}
            Err(error) => return Err(("move a mount into the system", error)),
        }
    }
    free(Path::new("/"));
    mount::switch_root(system).map_err(|error| ("change the root", error))
}

/// Removes what nothing reads any more from the initramfs below `root`. Our own program stays as
/// long as we run it, the modules as long as one is loaded.
fn free(root: &Path) {
    for path in [MARK, "/init"] {
        fs::remove_file(root.join(path.trim_start_matches('/'))).ok();
    }
    // A development image has no microcode.
    fs::remove_dir_all(root.join(MICROCODE)).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_of_roots_leaves_the_modules_and_neither_microcode_nor_the_program() {
        let root = tempfile::tempdir().unwrap();
        let files = ["stage1", "init", "modules/a.ko", "kernel/x86/microcode/GenuineIntel.bin"];
        for file in files.map(|file| root.path().join(file)) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        free(root.path());
        let left = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["modules"]);
        assert!(root.path().join("modules/a.ko").exists());
        // An image without microcode.
        free(root.path());
        assert!(root.path().join("modules/a.ko").exists());
    }
}
