//! The records and programs that the ESP of the other disk has beyond the one of this disk: the
//! machine starts again with them.
//!
//! Invariants:
//! - Nothing is done with an ESP that is older than the other one, where both are there.
//! - What an ESP has that cannot be read is not overwritten: its disk is left out.

use std::io;
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::again::older;
use super::writes::{kernel_line, records_max};
use crate::mirror::assemble::{self, Mirror};
use crate::mirror::disks::Disk;
use crate::mirror::esp::{self, Newer};
use crate::mirror::plan::Used;
use crate::mirror::{Error, Service};
use crate::storage::deadline::within;
use crate::storage::detached::detached;
use crate::storage::service::PROBE_MAX;
use polis_runtime::supervisor::{Context, blocking};

/// How long another disk may take for its ESP.
const OTHER_MAX: Duration = Duration::from_secs(10);

impl Service {
    /// Makes up for what the ESP of the other disk, which the node wrote last, has beyond this
    /// one: the machine starts again, from that disk. Where the firmware starts this one alone, it
    /// takes the records of the other one, and starts again with them; a disk whose ESP cannot be
    /// read is lost then, since what it has must not be overwritten unread.
    pub(super) async fn catch_up(&self, ctx: &Context, mirror: &mut Mirror) -> Result<(), Error> {
        let newest = mirror.newest();
        let Some(disk) = mirror.disk(newest).cloned() else { return Ok(()) };
        let newer = self.newer(disk).await;
        if newer.as_ref().is_ok_and(Newer::is_nothing) {
            return Ok(());
        }
        let refused = self.start_again(ctx, mirror).await;
        let records = match newer {
            Ok(newer) => newer.records,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "the machine goes on without the disk whose ESP the node wrote last");
                mirror.go_on_without(newest);
                return Ok(());
            }
        };
        warn!(records = records.len(), "the firmware does not start the disk with the newer ESP");
        if records.is_empty() {
            return Ok(());
        }
        self.take(ctx, mirror, records, Used::Both).await;
        Err(refused)
    }

    /// Goes on without the other disk, which takes no writes. The machine is not started from it;
    /// what the ESP there has beyond this one is taken as far as it is read.
    pub(super) async fn leave(&self, ctx: &Context, mirror: Mirror) -> Result<Mirror, Error> {
        let newest = mirror.newest();
        let newer = match mirror.disk(newest).filter(|_| newest != mirror.started).cloned() {
            Some(disk) => self.newer(disk).await,
            None => Ok(Newer::default()),
        };
        let older = older(&mirror);
        let left = blocking(move || assemble::leave(mirror));
        let mirror = within(ctx, "marking the data partition", PROBE_MAX, left).await?;
        // The machine was started from the disk that counts, whichever the firmware was asked for.
        self.forget_start().await;
        match newer {
            Ok(Newer { records, .. }) if !records.is_empty() => {
                self.take(ctx, &mirror, records, mirror.used).await;
                Err(older)
            }
            Ok(_) => Ok(mirror),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "the ESP that the node wrote last is not read");
                Ok(mirror)
            }
        }
    }

    /// Takes these records of the other disk, and starts again with them. From then on this ESP
    /// counts, so that no later difference has it done again. Returns only where this disk does
    /// not take them.
    async fn take(&self, ctx: &Context, mirror: &Mirror, records: esp::Records, used: Used) {
        let (config, mut next) = (self.config.clone(), mirror.clone());
        let taken = blocking(move || {
            esp::put(&config.esp, &records)?;
            next.raise(&config, used)
        });
        let what = "taking the records of the other disk";
        match within(ctx, what, records_max(&kernel_line()), taken).await {
            Ok(()) => self.reboot(ctx, "with the records of the other disk").await,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "this disk does not take them");
            }
        }
    }

    /// What the ESP of `disk` has beyond the one of this disk, if it answers in time.
    async fn newer(&self, disk: Disk) -> Result<Newer, Error> {
        let (esp, name) = (self.config.esp.clone(), disk.name());
        let failed = |source| Error::Copy { operation: "read the ESP", disk: name.clone(), source };
        match timeout(OTHER_MAX, detached(move || esp::compare(&esp, &disk))).await {
            Ok(compared) => compared.map_err(failed)?,
            Err(_elapsed) => Err(failed(io::ErrorKind::TimedOut.into())),
        }
    }
}
