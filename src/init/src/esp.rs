//! The mount of the EFI system partition, by the first of both stages that can.
//!
//! ```text
//! [not mounted] --mount--> [mounted]: failures are kept and counted there
//!       |                      ^
//!       +--nothing for ESP--> [silent] --the disk answers after all
//! ```
//!
//! Invariants:
//! - A disk that does not answer is waited for once. The mount that was left behind may still come,
//!   and is used then.
//!
//! What this module does not do: work with the files there (`attempts`).

use std::path::Path;

use polis_base::cause;
use polis_base::stage::Stage;

use super::attempts::Store;
use super::machine::Machine;
use super::mounts;
use super::patience;

/// Mounts the ESP, which is on `device`, unless it is mounted.
///
/// # Errors
///
/// Why it is not mounted, in words.
pub(super) fn mount(machine: &mut Machine, stage: Stage, device: &Path) -> Result<(), String> {
    if machine.attempts.is_some() {
        return Ok(());
    }
    if machine.esp_silent {
        look(machine);
        let silent = || format!("the disk of {} does not answer", device.display());
        return if machine.esp_silent { Err(silent()) } else { Ok(()) };
    }
    let what = format!("the EFI system partition ({})", device.display());
    let mount = mounts::esp(device);
    match patience::named(machine, stage, &what, patience::ESP, move || mount.apply()) {
        Ok(Ok(())) => mounted(machine),
        Ok(Err(error)) => return Err(cause::line(&error)),
        Err(error) => {
            machine.esp_silent = matches!(error, patience::Error::Overdue { .. });
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
    use polis_base::sys::clock;

    use super::*;

    #[test]
    fn an_esp_that_was_waited_for_in_stage_1_is_not_waited_for_again() {
        let mut machine = Machine::default();
        machine.esp_silent = true;
        let begun = clock::uptime();
        let error = mount(&mut machine, Stage::System, Path::new("/dev/vda1")).unwrap_err();
        assert!(clock::uptime() - begun < patience::NOTICE);
        assert_eq!(error, "the disk of /dev/vda1 does not answer");
        assert!(machine.attempts.is_none());
    }

    #[test]
    fn a_mount_that_the_kernel_refuses_is_no_disk_that_does_not_answer() {
        let mut machine = Machine::default();
        let error = mount(&mut machine, Stage::Initramfs, Path::new("/dev/none")).unwrap_err();
        assert!(error.contains("/dev/none"), "{error}");
        assert!(!machine.esp_silent && machine.attempts.is_none());
    }
}
