//! The end of a trial: `node` keeps a system by giving its kernel image a name without a counter.
//!
//! ```text
//! EFI/Linux/polis-1.2.0+0-1.efi   on trial
//! EFI/Linux/polis-1.2.0.efi       kept
//! ```
//!
//! The ESP is asked at a failure, when the answer matters: a line of `node` that says the same may
//! have been dropped.
//!
//! Invariants:
//! - A trial is over only where the ESP has the kernel image by its new name, and not by its old
//!   one: an ESP that does not answer, or is that of another disk, ends no trial.
//!
//! What this module does not do: begin a trial; the firmware's variables do (`firmware`).

use std::path::Path;

use polis_base::sys::efivar;

use super::deadline;
use super::machine::Machine;

/// Ends the trial if the system was kept; `variables` are those of the firmware, `esp` is where
/// the ESP is mounted.
pub(super) fn look(machine: &mut Machine, variables: &Path, esp: &Path) {
    let Ok(Some(image)) = efivar::image(variables) else { return };
    let esp = esp.to_owned();
    let kept = deadline::within(machine, deadline::ESP, move || is_kept(&esp, &image));
    machine.trial &= !kept.unwrap_or(false);
}

/// Whether the kernel image that the loader started by this path has another name by now.
fn is_kept(esp: &Path, image: &str) -> bool {
    let path = image.trim_start_matches('\\').replace('\\', "/");
    let Some((name, _counter)) = path.rsplit_once('+') else { return false };
    let is_gone = esp.join(&path).try_exists().is_ok_and(|there| !there);
    is_gone && esp.join(format!("{name}.efi")).is_file()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const IMAGE: &str = r"\EFI\Linux\polis-1.2.0+0-1.efi";

    /// The variables of a firmware whose loader started [`IMAGE`].
    fn variables() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let content: Vec<u8> = [6, 0, 0, 0]
            .into_iter()
            .chain(IMAGE.encode_utf16().flat_map(u16::to_le_bytes))
            .collect();
        let name = format!("{}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f", efivar::IMAGE);
        fs::write(directory.path().join(name), content).unwrap();
        directory
    }

    #[test]
    fn a_trial_is_over_when_the_kernel_image_has_its_new_name() {
        let (variables, esp) = (variables(), tempfile::tempdir().unwrap());
        let kernels = esp.path().join("EFI/Linux");
        fs::create_dir_all(&kernels).unwrap();
        let on_trial = |variables: &Path| {
            let mut machine = Machine::default();
            machine.trial = true;
            look(&mut machine, variables, esp.path());
            machine.trial
        };
        assert!(on_trial(variables.path()), "the ESP of another disk");
        fs::write(kernels.join("polis-1.1.0.efi"), "").unwrap();
        fs::write(kernels.join("polis-1.2.0+0-1.efi"), "").unwrap();
        assert!(on_trial(variables.path()));
        fs::rename(kernels.join("polis-1.2.0+0-1.efi"), kernels.join("polis-1.2.0.efi")).unwrap();
        assert!(!on_trial(variables.path()));
        assert!(on_trial(Path::new("/nowhere")), "without variables");
        fs::write(kernels.join("polis-1.2.0+0-1.efi"), "").unwrap();
        assert!(on_trial(variables.path()), "an unfinished change of the name");
    }

    #[test]
    fn a_look_begins_no_trial() {
        let mut machine = Machine::default();
        look(&mut machine, variables().path(), Path::new("/nowhere"));
        assert!(!machine.trial);
    }
}
