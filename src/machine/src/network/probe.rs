//! A wait until the driver of a card has finished its probe.
//!
//! A driver announces its card in the middle of the probe, and some are not ready to bring it up
//! then: `e100` of Linux 6.12 uses memory that it allocates only behind the announcement, and the
//! kernel ends the thread that asked.
//!
//! The kernel holds the lock of a device during the probe. A write to its file `power/control`
//! waits for that lock, and a word that the kernel does not know changes nothing (`control_store`
//! in `drivers/base/power/sysfs.c`).
//!
//! What this module does not do: wait for links without a device, such as bonds and VLANs.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use polis_runtime::supervisor::attempt;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

/// Longest wait: a probe takes some seconds for large cards, and one that hangs must not keep the
/// other cards from their addresses.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// The waits that go on at a time. A probe that hangs holds its thread for ever, and the node has
/// few threads that may wait.
static PLACES: Semaphore = Semaphore::const_new(2);

/// A word that `power/control` refuses.
const UNKNOWN: &[u8] = b"?";

/// Waits until the driver of this card has finished its probe. `sys` is where sysfs is mounted.
pub(super) async fn ended(sys: &Path, card: &str) {
    ended_in(&PLACES, sys, card).await;
}

async fn ended_in(places: &'static Semaphore, sys: &Path, card: &str) {
    let Ok(place) = places.try_acquire() else { return };
    let lock = sys.join("class/net").join(card).join("device/power/control");
    let waits = attempt(move || {
        let _place = place;
        // The kernel answers once the lock is free. A link without this file has no lock.
        let _refused = OpenOptions::new().write(true).open(lock)?.write_all(UNKNOWN);
        std::io::Result::Ok(())
    });
    if timeout(PROBE_MAX, waits).await.is_err() {
        warn!("the driver of {card} has not finished its start after {PROBE_MAX:?}; going on");
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A card whose lock stays held: a pipe accepts a writer once it has a reader.
    fn card(sys: &Path) -> std::path::PathBuf {
        let power = sys.join("class/net/eth0/device/power");
        std::fs::create_dir_all(&power).unwrap();
        let lock = power.join("control");
        mknodat(CWD, &lock, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        lock
    }

    #[tokio::test]
    async fn a_card_is_waited_for_until_its_driver_lets_go_of_the_device() {
        static PLACES: Semaphore = Semaphore::const_new(1);
        let sys = tempfile::tempdir().unwrap();
        let lock = card(sys.path());
        let mut ended = pin!(ended_in(&PLACES, sys.path(), "eth0"));
        assert!(timeout(Duration::from_millis(20), &mut ended).await.is_err());
        // Another card is not waited for: the only place is taken.
        timeout(PROBE_MAX / 2, ended_in(&PLACES, sys.path(), "eth0")).await.unwrap();
        let release = attempt(move || std::fs::read(lock));
        let (released, ()) = tokio::join!(release, ended);
        assert_eq!(released.unwrap().unwrap(), UNKNOWN);
        assert_eq!(PLACES.available_permits(), 1);
    }

    #[tokio::test]
    async fn a_card_without_a_lock_is_not_waited_for() {
        static PLACES: Semaphore = Semaphore::const_new(1);
        let sys = tempfile::tempdir().unwrap();
        timeout(PROBE_MAX / 2, ended_in(&PLACES, sys.path(), "eth0")).await.unwrap();
    }
}
