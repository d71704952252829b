//! The firmware's report about the place that it started the machine from.
//!
//! What this module does not do: touch a disk. The variables are the firmware's own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use polis_base::serial::Severity;
use polis_base::sys::efivar;

use super::boot_path::BootPath;
use super::disk;
use super::drivers::Drivers;
use super::gpt::Guid;
use super::machine::Machine;
use super::mounts;

/// The vendors of the firmware's variables that are read: the boot stub, which stores the
/// partition it was started from, and UEFI.
const LOADER: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
const UEFI: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// The firmware's report about the place that it started the machine from.
#[derive(Debug, Default)]
pub(super) struct Firmware {
    /// The partition.
    pub(super) esp: Option<Guid>,
    /// The way to its disk.
    pub(super) path: Option<BootPath>,
    /// Whether the kernel image has a counter in its name.
    pub(super) trial: bool,
}

/// Reads the firmware's variables.
pub(super) fn firmware(machine: &mut Machine, drivers: &mut Drivers) -> Firmware {
    if !Path::new("/sys/firmware/efi").exists() {
        return Firmware::default();
    }
    drivers.load(machine, "efivarfs");
    match mounts::firmware().apply() {
        Ok(()) => hide(machine, Path::new(mounts::VARIABLES)),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            let text = format!("{error}: {}", source.unwrap_or_default());
            machine.port.log(Severity::Warning, &text);
        }
    }
    let variable = |name: &str, vendor| {
        fs::read(Path::new(mounts::VARIABLES).join(format!("{name}-{vendor}"))).unwrap_or_default()
    };
    let esp = disk::guid_of_variable(&variable("LoaderDevicePartUUID", LOADER));
    // Four bytes of attributes, then the number of the entry.
    let path = match variable("BootCurrent", UEFI)[..] {
        [_, _, _, _, low, high] => {
            let name = format!("Boot{:04X}", u16::from_le_bytes([low, high]));
            BootPath::of_option(&variable(&name, UEFI))
        }
        _ => None,
    };
    let trial = efivar::on_trial(Path::new(mounts::VARIABLES));
    Firmware { esp, path, trial }
}

/// Lets root alone into the folder of the variables: the kernel lets every user read them, and one
/// of them may have the share of a disk's key.
fn hide(machine: &mut Machine, variables: &Path) {
    if let Err(error) = fs::set_permissions(variables, Permissions::from_mode(0o700)) {
        let text = format!("cannot keep {} from other users: {error}", variables.display());
        machine.port.log(Severity::Warning, &text);
    }
}

impl Firmware {
    /// The disk that the machine was started from, in words.
    pub(super) fn wanted(&self) -> String {
        match self.esp {
            Some(esp) => format!("the disk with partition {esp}"),
            None => "a disk with POLIS-ESP and a system".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_alone_may_enter_the_folder_of_the_variables() {
        let variables = tempfile::tempdir().unwrap();
        // The kernel mounts it with this mode.
        fs::set_permissions(variables.path(), Permissions::from_mode(0o755)).unwrap();
        hide(&mut Machine::default(), variables.path());
        let mode = fs::metadata(variables.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700);
    }
}
