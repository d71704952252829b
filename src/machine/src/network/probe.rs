//! A wait until the driver of a card has finished its probe.
//!
//! A driver announces its card in the middle of the probe, and some are not ready to bring it up
//! then: `e100` of Linux 6.12 uses memory that it allocates only behind the announcement, and the
//! kernel ends the thread that asked. The kernel holds the lock of a device during the probe, and
//! the file `driver_override` of a PCI device is read under that lock
//! (`driver_override_show` in `drivers/pci/pci-sysfs.c`).
//!
//! What this module does not do: wait for cards that are on no PCI bus of their own, such as
//! those of USB and virtio; they have no such file.

use std::path::Path;
use std::time::Duration;

use polis_runtime::supervisor::attempt;
use tokio::time::timeout;
use tracing::warn;

/// Longest wait: a probe takes some seconds for large cards, and one that hangs must not keep the
/// other cards from their addresses.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// Waits until the driver of this card has finished its probe. `sys` is where sysfs is mounted.
pub(super) async fn ended(sys: &Path, card: &str) {
    let lock = sys.join("class/net").join(card).join("device/driver_override");
    let read = attempt(move || std::fs::read(lock));
    // No such file: nothing to wait for.
    if timeout(PROBE_MAX, read).await.is_err() {
        warn!("the driver of {card} has not finished its start after {PROBE_MAX:?}; going on");
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[tokio::test]
    async fn a_card_is_waited_for_until_its_driver_lets_go_of_the_device() {
        let sys = tempfile::tempdir().unwrap();
        let device = sys.path().join("class/net/eth0/device");
        std::fs::create_dir_all(&device).unwrap();
        // A pipe answers a reader once a writer is there, as the kernel does at the end of a probe.
        let lock = device.join("driver_override");
        mknodat(CWD, &lock, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let mut ended = pin!(ended(sys.path(), "eth0"));
        assert!(timeout(Duration::from_millis(20), &mut ended).await.is_err());
        let release = attempt(move || std::fs::write(lock, "(null)\n"));
        let (released, ()) = tokio::join!(release, ended);
        released.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_card_without_a_lock_is_not_waited_for() {
        let sys = tempfile::tempdir().unwrap();
        timeout(PROBE_MAX / 2, ended(sys.path(), "eth0")).await.unwrap();
    }
}
