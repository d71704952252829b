//! The log tree on the data partition: kept there once the partition is mounted.
//!
//! ```text
//! [waiting for storage] --ready--> [logtree::ring, in `logs` of the data partition]
//! ```
//!
//! Started right after `storage`, so that it is stopped right before it: the disk
//! gets all lines that the other services log while they stop.

use std::time::UNIX_EPOCH;

use tokio::sync::watch;

use polis_base::boot;
use polis_base::sys::clock;
use polis_machine::storage;
use polis_runtime::event::{self, Closed};
use polis_runtime::logtree::ring;
use polis_runtime::supervisor::Context;

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    /// The image that runs.
    pub image: String,
    /// The data partition.
    pub storage: watch::Receiver<storage::Status>,
    /// The published status of the logs.
    pub status: watch::Sender<ring::Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The owner of the storage status is gone.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The ring.
    #[error(transparent)]
    Ring(#[from] ring::RunError),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart goes on behind the entries on the disk.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        let ready = event::until(&mut self.storage, "storage", |status| match status {
            storage::Status::Ready(ready) => Some(ready.clone()),
            _ => None,
        });
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        let ready = ready?;
        // Without a name every run is a boot of its own: better than no boot.
        let boot_id = boot::id();
        let since = clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let config = ring::Config {
            dir: ready.root.data.logs.path().to_owned(),
            bytes_max: ring::bytes_max(ready.size),
            boot_id,
            started: since.saturating_sub(clock::uptime()).as_secs(),
            image: self.image,
        };
        Ok(ring::Service { status: self.status }.run(config, ctx).await?)
    }
}
