//! The disks of the last use of the mirror: waits for them, and decides which are used.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::warn;

use super::POLL;
use crate::mirror::assemble::{self, Mirror};
use crate::mirror::disks::Disk;
use crate::mirror::plan::Used;
use crate::mirror::reads::Reads;
use crate::mirror::{Error, Service};
use polis_base::stage::{Stage, State as Progress};
use polis_runtime::supervisor::Context;

/// How long the start waits for a disk that was part of the last use: `init` loads the last
/// drivers five seconds after the start of the services, and a disk may spin up.
const LATE_MAX: Duration = Duration::from_secs(30);

impl Service {
    /// Waits for the disks of the last use, and decides which are used.
    pub(super) async fn gather(&self, ctx: &Context, disk: &Disk) -> Result<Mirror, Error> {
        let since = Instant::now();
        let expected = disk.seen.record.used != Used::Only(disk.leg());
        let mut reads = Reads::default();
        loop {
            let found = reads.find(&self.config, &disk.name()).await;
            let disks = assemble::pair(&self.config, disk, found)?;
            let used = assemble::decide(&self.config, &disks);
            let missing = disks.iter().any(Option::is_none);
            if missing && (expected || used.is_err()) && since.elapsed() < LATE_MAX {
                let ends = if used.is_ok() { "goes on without it" } else { "stops" };
                let what = format!(
                    "the other disk of the mirror to appear: check its cable, or put it in; the \
                     boot {ends} after {} s",
                    LATE_MAX.as_secs()
                );
                ctx.stage(Stage::Storage, Progress::Waiting(what));
                sleep(POLL).await;
                continue;
            }
            if missing && let Some(fault) = reads.fault() {
                let error = &fault as &dyn std::error::Error;
                warn!(error, "the other disk of the mirror is missing");
            }
            // The wait is over.
            ctx.stage(Stage::Storage, Progress::Started);
            return Ok(Mirror { disks, used: used?, started: disk.leg(), dropped: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirror::disks::tests::source;
    use crate::mirror::monitor::tests::service;
    use crate::mirror::plan::Leg;

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_the_other_disk_is_named_while_it_lasts_and_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, handles) = Context::for_test();
        let service = service(folder.path());
        let mut disk = source();
        // It was one of both.
        disk.seen.record.used = Used::Both;
        let state = || handles.stages.borrow().get(&Stage::Storage).unwrap().state.clone();
        let during = async {
            sleep(LATE_MAX / 2).await;
            let Progress::Waiting(what) = state() else { panic!("nothing is reported") };
            assert!(what.starts_with("the other disk of the mirror to appear"), "{what}");
        };
        let (gathered, ()) = tokio::join!(service.gather(&ctx, &disk), during);
        assert_eq!(gathered.unwrap().used, Used::Only(Leg::First));
        assert_eq!(state(), Progress::Started);
    }
}
