//! Maintenance of the mounted data partition: work that can wait until others have the
//! partition.
//!
//! The service runs [`tend`] while the partition is mounted: the free space of an
//! authenticated device is written and given away, and a file system that is
//! smaller than its device grows.
//!
//! Invariants:
//! - This work only gains room: a failure is logged, and the next boot tries again.

use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::apply::Error;
use super::machine::{Live, Room};
use super::table::Partition;
use super::{Kind, wipe};
use polis_runtime::supervisor::attempt;

/// The work of the boot comes first.
const START: Duration = Duration::from_secs(20);
/// How often the service checks whether somebody needs the room before that.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

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
    while started.elapsed() < START && !urgent(live).await {
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
        let left = attempt(move || {
            let failed = |source| Error::Wipe { device: device.clone(), source };
            wipe::release(&hidden).map_err(failed)
        });
        let Some(left) = left.await?? else {
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
        let step = attempt(move || {
            let failed = |source| Error::Wipe { device: target.clone(), source };
            wipe::extend(&target, from, until).map_err(failed)
        });
        let Some(next) = step.await?? else { return Ok(()) };
        from = next;
        rest(live, begun.elapsed()).await;
    }
}

/// Leaves the disk to others for as long as this work used it, unless they wait for it to
/// finish.
async fn rest(live: &Live, worked: Duration) {
    if !urgent(live).await {
        sleep(worked).await;
    }
}

async fn urgent(live: &Live) -> bool {
    let mount = live.target.mount.clone();
    attempt(move || wipe::is_urgent(&mount)).await.unwrap_or(false)
}
