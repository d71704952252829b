//! Maintenance of the mounted data partition: work that can wait until others have the
//! partition.
//!
//! The service runs [`maintain`] while the partition is mounted: the free space of an
//! authenticated device is written and given away, and a file system that is
//! smaller than its device grows.
//!
//! The disk's encryption takes processors, too, and takes them from everybody alike: no group
//! of the kernel's scheduler holds its threads. So the work rests after each step, and rests
//! longer while others wait for a processor or a disk.
//!
//! Invariants:
//! - This work only gains room: a failure is logged, and the next boot tries again.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::apply::Error;
use super::detached::detached;
use super::machine::{Live, Room};
use super::table::Partition;
use super::wipe::Need;
use super::{Kind, wipe};
use polis_base::sys::pressure::{self, Resource};

/// The work of the boot comes first.
const START: Duration = Duration::from_secs(20);
/// How often the service checks whether somebody needs the room before that.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The longest rest after a step, in times that the step took.
const RESTS_MAX: u32 = 8;
/// Others wait for the machine if a task has waited for this part of a rest: half of it.
const BUSY: u32 = 2;

/// After how many bytes the log says how far a growing file system is.
const REPORT_EVERY: u64 = 64 << 30;

/// Works until there is nothing left. A step that has begun goes on when this is dropped.
pub async fn maintain(live: &Live, partition: &Partition) {
    if live.kind == Kind::Authenticated {
        wait(live).await;
        if let Err(error) = release(live).await {
            warn!(error = &error as &dyn std::error::Error, "free space is not released");
            return;
        }
    }
    if let Err(error) = grow(live, partition).await {
        warn!(error = &error as &dyn std::error::Error, "the file system did not grow");
    }
}

async fn wait(live: &Live) {
    let started = Instant::now();
    while started.elapsed() < START && need(live).await != Need::Now {
        sleep(POLL_INTERVAL).await;
    }
}

/// Gives away, bit by bit, the space that the file system began without.
async fn release(live: &Live) -> Result<(), Error> {
    let mut announced = false;
    loop {
        let hidden = live.target.hidden.clone();
        let device = live.target.mount.clone();
        let begun = Instant::now();
        let left = optional(move || {
            let failed = |source| Error::Wipe { device: device.clone(), source };
            wipe::release(&hidden).map_err(failed)
        });
        let Some(left) = left.await? else {
            if announced {
                let partition = live.target.label;
                info!(partition, "all free space is written and usable");
            }
            return Ok(());
        };
        if !announced {
            let mib = left >> 20;
            let partition = live.target.label;
            info!(mib, partition, "writing the free space, as integrity needs it");
            announced = true;
        }
        rest(live, begun.elapsed()).await;
    }
}

/// Fills a device that is larger than its file system: one that has grown, or that began with a
/// part of it.
async fn grow(live: &Live, partition: &Partition) -> Result<(), Error> {
    let looked = live.room(partition).await;
    let device = live.device(partition);
    let failed = |source| Error::Wipe { device: device.clone(), source };
    let Some(Room { mut end, size }) = looked.map_err(failed)? else { return Ok(()) };
    info!(from_mib = end >> 20, to_mib = size >> 20, "the file system grows");
    if live.kind == Kind::Authenticated {
        let mut reported = end;
        loop {
            let next = wipe::next_end(end, size);
            write(live, &device, end, next).await?;
            end = next;
            // The last step is reported by what follows.
            if end >= wipe::next_end(end, size) {
                break;
            }
            live.grow_to(partition, end).await?;
            if end - reported >= REPORT_EVERY {
                reported = end;
                let (done_mib, of_mib) = (end >> 20, size >> 20);
                info!(done_mib, of_mib, "the file system is growing");
            }
        }
    }
    live.fill(partition).await
}

/// Writes the device from one place to another.
async fn write(live: &Live, device: &Path, mut from: u64, until: u64) -> Result<(), Error> {
    loop {
        let begun = Instant::now();
        let target = device.to_owned();
        let step = optional(move || {
            let failed = |source| Error::Wipe { device: target.clone(), source };
            wipe::extend(&target, from, until).map_err(failed)
        });
        let Some(next) = step.await? else { return Ok(()) };
        from = next;
        rest(live, begun.elapsed()).await;
    }
}

/// Leaves the machine to others: for as long as the step took, for a multiple of it while they
/// wait for a processor or a disk, and not at all if they wait for the space.
async fn rest(live: &Live, worked: Duration) {
    rest_while(worked, || need(live), || waited().ok()).await;
}

/// [`rest`], by what is needed and for how long others have waited.
async fn rest_while<F: Future<Output = Need>>(
    worked: Duration,
    need: impl Fn() -> F,
    waited: impl Fn() -> Option<[Duration; 2]>,
) {
    for _ in 0..RESTS_MAX {
        let needed = need().await;
        if needed == Need::Now {
            return;
        }
        let before = waited();
        sleep(worked).await;
        let others = before.zip(waited()).is_some_and(|(before, now)| {
            now.iter().zip(before).any(|(now, before)| now.saturating_sub(before) >= worked / BUSY)
        });
        if needed == Need::Soon || !others {
            return;
        }
    }
}

/// For how long others have waited, for a processor and for a disk.
fn waited() -> std::io::Result<[Duration; 2]> {
    Ok([pressure::waited(Resource::Cpu)?, pressure::waited(Resource::Io)?])
}

async fn need(live: &Live) -> Need {
    let mount = live.target.mount.clone();
    detached(move || wipe::need(&mount)).await.ok().and_then(Result::ok).unwrap_or(Need::Soon)
}

/// Takes a step without which everything else works: its panic is an error, too.
async fn optional<T: Send + 'static>(
    step: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    detached(step).await.unwrap_or(Err(Error::Lost))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;

    use super::*;

    const STEP: Duration = Duration::from_millis(400);

    /// How long the work rests after a step, if others wait for `share` hundredths of the time,
    /// and need the space as these say, one after the other.
    async fn rested(needs: &[Need], share: Option<u32>) -> Duration {
        const BEFORE: Duration = Duration::from_secs(1000);
        let begun = Instant::now();
        let asked = Cell::new(0);
        let need = || {
            let at = asked.replace(asked.get() + 1);
            ready(needs[at.min(needs.len() - 1)])
        };
        let waited = || share.map(|share| [BEFORE, begun.elapsed() * share / 100]);
        rest_while(STEP, need, waited).await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn the_work_rests_longer_while_others_wait_and_not_while_they_need_the_space() {
        assert_eq!(rested(&[Need::Now], Some(100)).await, Duration::ZERO);
        assert_eq!(rested(&[Need::Soon], Some(100)).await, STEP);
        assert_eq!(rested(&[Need::Later], Some(0)).await, STEP);
        assert_eq!(rested(&[Need::Later], Some(49)).await, STEP);
        assert_eq!(rested(&[Need::Later], Some(50)).await, STEP * RESTS_MAX);
        // Without the kernel's figures.
        assert_eq!(rested(&[Need::Later], None).await, STEP);
        let filling = [Need::Later, Need::Later, Need::Now];
        assert_eq!(rested(&filling, Some(100)).await, STEP * 2);
        let filling = [Need::Later, Need::Later, Need::Soon];
        assert_eq!(rested(&filling, Some(100)).await, STEP * 3);
    }
}
