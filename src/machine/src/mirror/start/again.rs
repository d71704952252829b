//! The other disk of the mirror, as the one that the machine starts from next.
//!
//! What this module does not do: decide which disk is the newest (`plan`), or ask the firmware more
//! than once (`firmware`).

use tracing::warn;

use crate::mirror::assemble::Mirror;
use crate::mirror::disks::Disk;
use crate::mirror::{Error, Service, firmware};
use polis_base::stage::{Stage, State as Progress};
use polis_base::sys::reboot::Reason;
use polis_runtime::supervisor::{Context, blocking};

impl Service {
    /// Has the firmware start from the disk with the newest data. Returns only where it cannot.
    pub(super) async fn start_again(&self, ctx: &Context, mirror: &Mirror) -> Error {
        let (started, newest) = ages(mirror);
        let error = older(mirror);
        let Some(source) = mirror.disk(mirror.newest()).cloned() else { return error };
        let directory = self.config.efivars.clone();
        if !blocking(move || firmware::start_from(&directory, &source)).await {
            return error;
        }
        self.reboot(ctx, &format!("from {newest}: {started} is older")).await
    }

    /// The machine was started from a disk that counts.
    pub(super) async fn forget_start(&self) {
        let directory = self.config.efivars.clone();
        blocking(move || firmware::forget(&directory)).await;
    }

    /// Ends the run, with the node.
    pub(super) async fn reboot<T>(&self, ctx: &Context, how: &str) -> T {
        warn!("the machine starts again, {how}");
        let what = format!("the machine to start again, {how}");
        ctx.stage(Stage::Storage, Progress::Waiting(what));
        self.end.send_replace(Some(Reason::Reboot));
        // The run ends with the node.
        std::future::pending().await
    }
}

/// The names of the disk that the machine was started from, and of the one with the newest data.
fn ages(mirror: &Mirror) -> (String, String) {
    let name = |leg| mirror.disk(leg).map(Disk::name).unwrap_or_default();
    (name(mirror.started), name(mirror.newest()))
}

/// The machine was started from the older disk.
pub(super) fn older(mirror: &Mirror) -> Error {
    let (started, newest) = ages(mirror);
    Error::Started { started, newest }
}
