//! The disk that the firmware starts next: the machine asks for the one with the newest data.
//!
//! Invariants:
//! - The firmware is asked for a disk once, until a start goes on: where it does not obey, or each
//!   of two disks asks for the other, the machine stops instead of starting again and again.

use std::path::Path;

use tracing::warn;

use super::disks::Disk;
use polis_base::sys::efivar::{self, Variable};

/// The loader of a disk, as firmware finds it there.
const LOADER: &str = r"\EFI\BOOT\BOOTX64.EFI";
/// The boot option that is started once: the number is ours alone.
const OPTION: u16 = 0x7150;
/// The variable with the ESP that it was asked to start from.
const ASKED: &str = "PolisMirrorStart";

/// Has the firmware start the machine from `disk` the next time, once; false if it cannot, or was
/// asked for a disk before. Blocks.
pub(super) fn start_from(directory: &Path, disk: &Disk) -> bool {
    let Some((_, esp)) = disk.named(polis_layout::partitions::ESP.name) else { return false };
    let place = efivar::Place {
        number: esp.number,
        first: esp.first,
        blocks: esp.blocks(),
        id: esp.id.to_bytes_le(),
    };
    let asked = Variable::new(directory, ASKED);
    let ask = || {
        // Of its own: some firmware forgets an option that is not in its list.
        if asked.read()?.is_some() {
            return Ok(false);
        }
        efivar::start_once(directory, OPTION, "Polis mirror", &place, LOADER)?;
        // Behind it: a power cut in between must not leave it unasked for ever.
        asked.write(&place.id)?;
        Ok::<_, std::io::Error>(true)
    };
    match ask() {
        Ok(new) => new,
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "the firmware takes no boot option");
            false
        }
    }
}

/// Forgets that the machine was started from another disk. Blocks.
pub(super) fn forget(directory: &Path) {
    let forgotten = efivar::forget_option(directory, OPTION);
    if let Err(error) = forgotten.and_then(|()| Variable::new(directory, ASKED).remove()) {
        warn!(error = &error as &dyn std::error::Error, "the firmware keeps a boot option");
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::super::disks::tests::source;
    use super::*;

    #[test]
    fn the_firmware_is_asked_for_one_disk_until_a_start_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let (one, mut other) = (source(), source());
        other.table.partitions[0].id = Uuid::from_u128(9);
        assert!(start_from(folder.path(), &one));
        assert!(!start_from(folder.path(), &one), "the firmware has not obeyed");
        assert!(!start_from(folder.path(), &other), "two disks would ask for each other for ever");
        forget(folder.path());
        assert!(start_from(folder.path(), &other));
    }
}
