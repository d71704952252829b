//! The start of the service: waits for the disks of the mirror, has it assembled, and makes one
//! at the first boot.
//!
//! ```text
//! the device is there --------------------------> it is monitored: an earlier run has made it
//! disk without records --parameters ask for one-> records, and then as below
//! disk with records --wait for the other one----> assembled
//!                 +--an older disk or ESP-------> the machine starts again, from the other disk
//!                 +--it takes no writes---------> assembled without it
//!                 +--this one takes none--------> the machine starts again, from the other disk
//! ```
//!
//! ```text
//! fresh   a new one                        records, the size of the data partition
//! gather  the disks of the last use        waited for
//! writes  a disk that takes no write       left, or the machine starts again
//! newer   what the other ESP has beyond    taken
//! again   the disk that is started next
//! ```
//!
//! Invariants:
//! - Each wait for a disk has a bound, and names a remedy; the stage does not name a wait that is
//!   over.

mod again;
mod fresh;
mod gather;
mod newer;
mod writes;

use std::time::Duration;

use tokio::time::timeout;
use tracing::{info, warn};

use self::writes::{kernel_line, records_max, takes_writes, write_again};
use super::assemble::{self, Mirror};
use super::disks::Disk;
use super::plan::Used;
use super::reads::Reads;
use super::{Error, Service};
use crate::storage::deadline::within;
use crate::storage::service::PROBE_MAX;
use crate::storage::{self, Backing, apply};
use polis_runtime::event::Closed;
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::process::Command;

/// Where the image has the loader of modules, and the module of mirrors.
const MODPROBE: &str = "/usr/sbin/modprobe";
const MODULE: &str = "dm_raid";
/// How often the list of disks is looked at.
const POLL: Duration = Duration::from_millis(500);

/// What is read of the disk that the machine was started from; storage says that it waits for it.
const READING: &str = "reading the partition table";

/// Why there is no mirror to monitor.
pub(super) enum Stop {
    Trapdoor(Error),
    Closed(Closed),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Trapdoor(error)
    }
}

impl From<Closed> for Stop {
    fn from(closed: Closed) -> Self {
        Self::Closed(closed)
    }
}

impl Service {
    /// The mirror in use; `None` if this machine has none.
    pub(super) async fn start(&mut self, ctx: &Context) -> Result<Option<Mirror>, Stop> {
        if storage::backing::path().exists() {
            // An earlier run of the service has made it; the disk of the start may be lost.
            let found = Reads::default().find(&self.config, "").await;
            let config = self.config.clone();
            return Ok(Some(blocking(move || assemble::resume(&config, found)).await?));
        }
        let disk = match self.started().await? {
            Some(disk) => disk,
            None => match self.found(ctx).await? {
                Some(disk) => disk,
                None => {
                    self.backing.send_replace(Some(Backing::Partition));
                    return Ok(None);
                }
            },
        };
        load(ctx).await;
        let mut mirror = self.gather(ctx, &disk).await?;
        if !mirror.used.has(mirror.started) {
            return Err(self.start_again(ctx, &mirror).await.into());
        }
        if !takes_writes(ctx, &mirror).await {
            mirror = self.leave(ctx, mirror).await?;
        }
        if let (Used::Both, Some(own)) = (mirror.used, mirror.disk(mirror.started)) {
            self.await_own(ctx, &mirror, write_again(own.clone())).await?;
        }
        if mirror.newest() != mirror.started {
            self.catch_up(ctx, &mut mirror).await?;
        }
        self.forget_start().await;
        let config = self.config.clone();
        let taken = blocking(move || assemble::start(&config, mirror));
        let what = "writing the use of the mirror to its disks (pull the other one if it hangs)";
        let mirror = within(ctx, what, records_max(&kernel_line()), taken).await?;
        info!(used = ?mirror.used, "the mirror is in use");
        let fresh = mirror.disk(mirror.started).is_some_and(|disk| disk.data.is_none());
        let last = if fresh { Some(self.last(ctx).await?) } else { None };
        self.backing.send_replace(Some(mirror.backing(last)));
        if fresh {
            return self.made(mirror).await.map(Some);
        }
        Ok(Some(mirror))
    }

    /// The disk that the machine was started from, if it is one of a mirror.
    async fn started(&self) -> Result<Option<Disk>, Error> {
        let config = self.config.clone();
        in_time(blocking(move || assemble::started(&config))).await
    }
}

/// Reads the disk that the machine was started from, as long as storage may.
async fn in_time<T>(read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = apply::Error::Late { what: READING, seconds: PROBE_MAX.as_secs() };
    timeout(PROBE_MAX, read).await.unwrap_or_else(|_elapsed| Err(late.into()))
}

/// Loads the kernel's module of mirrors.
async fn load(ctx: &Context) {
    let loaded = Command::new(MODPROBE).arg(MODULE).log(ctx.sink("disk", Parser::Tool)).run().await;
    if let Err(error) = loaded {
        warn!(
            error = &error as &dyn std::error::Error,
            "the kernel's module of mirrors is missing"
        );
    }
}
