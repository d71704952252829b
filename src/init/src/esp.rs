//! The mount of the EFI system partition, by the first of both stages that can.
//!
//! ```text
//! [not mounted] --mount--> [mounted]: failures are kept and counted there
//!       |                      ^
//!       +--nothing for ESP--> [silent] --the disk answers after all
//! ```
//!
//! Invariants:
//! - A mount that was left behind in stage 1 and comes later is one of the root of before: stage 2
//!   mounts anew. One that was left behind in stage 2 is used when it comes.
//!
//! What this module does not do: work with the files there (`attempts`).

use std::path::Path;
use std::time::Duration;

use polis_base::cause;
use polis_base::stage::Stage;

use super::attempts::Store;
use super::deadline;
use super::machine::Machine;
use super::mounts;

/// Mounts the ESP, which is on `device`, unless it is mounted. Waits for `time` at most.
///
/// # Errors
///
/// Why it is not mounted, in words.
pub(super) fn mount(
    machine: &mut Machine,
    stage: Stage,
    device: &Path,
    time: Duration,
) -> Result<(), String> {
    look(machine);
    if machine.attempts.is_some() {
        return Ok(());
    }
    let what = format!("the EFI system partition ({})", device.display());
    let mount = mounts::esp(device);
    match deadline::named(machine, stage, &what, time, move || mount.apply()) {
        Ok(Ok(())) => mounted(machine),
        Ok(Err(error)) => {
            machine.esp_silent = false;
            return Err(cause::line(&error));
        }
        Err(error) => {
            machine.esp_silent = matches!(error, deadline::Error::Overdue { .. });
            return Err(format!("cannot mount {what}: {error}"));
        }
    }
    Ok(())
}

/// Uses a mount that was left behind, if it has come.
pub(super) fn look(machine: &mut Machine) {
    if machine.esp_silent && mounts::is_mounted(Path::new(mounts::ESP)) {
        mounted(machine);
    }
}

fn mounted(machine: &mut Machine) {
    machine.esp_silent = false;
    machine.attempts = Some(Store::in_tree(Path::new("/")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_that_the_kernel_refuses_is_no_disk_that_does_not_answer() {
        let mut machine = Machine::default();
        let (none, time) = (Path::new("/dev/none"), deadline::ESP);
        let error = mount(&mut machine, Stage::Initramfs, none, time).unwrap_err();
        assert!(error.contains("/dev/none"), "{error}");
        assert!(!machine.esp_silent && machine.attempts.is_none());
        // One that did not answer in stage 1 is asked again.
        machine.esp_silent = true;
        mount(&mut machine, Stage::System, none, time).unwrap_err();
        assert!(!machine.esp_silent);
    }
}
