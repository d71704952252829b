//! A disk that answers reads and stalls at the writes of a boot: each is asked for one before the
//! writes that the boot needs.
//!
//! Invariants:
//! - A disk that answers reads and no writes does not end a boot from the other one, nor its own if
//!   the firmware can start the other one, which has all data.

use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use crate::mirror::assemble::Mirror;
use crate::mirror::disks::Disk;
use crate::mirror::{Error, Service, firmware};
use crate::storage::deadline::{LARGEST, SMALL, SOON, within};
use crate::storage::detached::detached;
use crate::storage::stall;
use polis_base::stage::{Stage, State as Progress};
use polis_base::sys::command_line;
use polis_runtime::supervisor::{Context, blocking};

impl Service {
    /// Waits for `write` to the disk that the machine was started from, one of two with all data.
    /// If it does not end in time, the machine starts again from the other disk; where the
    /// firmware does not do that, it is waited for as long as the writes of a boot are.
    pub(super) async fn await_own(
        &self,
        ctx: &Context,
        mirror: &Mirror,
        write: impl Future,
    ) -> Result<(), Error> {
        let started = mirror.started;
        let Some((own, other)) = mirror.disk(started).zip(mirror.disk(started.other())) else {
            return Ok(());
        };
        let (own, other_name, other) = (own.name(), other.name(), other.clone());
        let what = format!(
            "the disk {own}, from which the machine was started, to take a write: check it and its \
             cable, or pull it; the machine starts again after {} s, from {other_name}, if its \
             firmware does that",
            SMALL.as_secs()
        );
        let mut write = std::pin::pin!(write);
        if ends(ctx, what, write.as_mut()).await {
            return Ok(());
        }
        let directory = self.config.efivars.clone();
        if blocking(move || firmware::start_from(&directory, &other)).await {
            return self.reboot(ctx, &format!("from {other_name}: {own} takes no writes")).await;
        }
        warn!(disk = own, "it takes no writes, and the firmware does not start the other one");
        let what = "writing to the disk that the machine was started from (pull it if it hangs)";
        let ended = async {
            write.await;
            Ok::<_, Error>(())
        };
        within(ctx, what, records_max(&kernel_line()), ended).await
    }
}

/// Whether the other disk, if the start writes to it, takes a write.
pub(super) async fn takes_writes(ctx: &Context, mirror: &Mirror) -> bool {
    let Some(disk) = mirror.written().cloned() else { return true };
    ends_in_time(ctx, &disk.name(), write_again(disk)).await
}

/// Writes the record of a disk as it is, which changes nothing, however late that ends. An error
/// is the business of the writes that follow.
pub(super) async fn write_again(mut disk: Disk) {
    let record = disk.seen.record;
    let _reported_later = detached(move || disk.put(&record)).await;
}

/// Waits for a write to the other disk; false if it does not end in time.
async fn ends_in_time(ctx: &Context, disk: &str, write: impl Future) -> bool {
    let what = format!(
        "the disk {disk}, the other one of the mirror, to take a write: check it and its cable, or \
         pull it; the boot goes on without it after {} s",
        SMALL.as_secs()
    );
    let ended = ends(ctx, what, write).await;
    if !ended {
        warn!(disk, "it takes no writes: the machine goes on without this disk of the mirror");
    }
    ended
}

/// Waits for a write, by the name `what` if it takes long; false if it does not end in time.
async fn ends(ctx: &Context, what: String, write: impl Future) -> bool {
    let mut write = std::pin::pin!(write);
    if timeout(SOON, &mut write).await.is_ok() {
        return true;
    }
    ctx.stage(Stage::Storage, Progress::Waiting(what));
    let ended = timeout(SMALL.saturating_sub(SOON), write).await.is_ok();
    ctx.stage(Stage::Storage, Progress::Started);
    ended
}

/// The command line of the kernel.
pub(super) fn kernel_line() -> String {
    command_line::read().unwrap_or_default()
}

/// How long the disks may take for the records of a use, by the kernel command line: as long as a
/// mirror that runs waits for an answer. The driver of most disks gives up before, and the start
/// goes on without the other one; the next start finds one that stalls at its first write.
pub(super) fn records_max(line: &str) -> Duration {
    stall::deadline(line).min(LARGEST)
}

#[cfg(test)]
mod tests {
    use polis_base::sys::reboot::Reason;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::mirror::disks::tests::source;
    use crate::mirror::monitor::tests::service;
    use crate::mirror::plan::{Leg, Used};

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_reads_and_takes_no_write_is_named_and_the_boot_goes_on_without_it() {
        let (ctx, handles) = Context::for_test();
        let begun = Instant::now();
        let hung = ends_in_time(&ctx, "vdb", std::future::pending::<()>());
        let reported = async {
            sleep(SOON + Duration::from_secs(1)).await;
            let entry = handles.stages.borrow().get(&Stage::Storage).cloned();
            let Some(Progress::Waiting(what)) = entry.map(|entry| entry.state) else {
                panic!("nothing is reported")
            };
            what
        };
        let (ended, what) = tokio::join!(hung, reported);
        assert!(!ended && (SMALL..SMALL * 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        assert!(what.contains("vdb") && what.contains("pull it"), "{what}");
        assert!(ends_in_time(&ctx, "vdb", sleep(SMALL / 2)).await);
        // One that writes alone does not wait for the other one.
        let disks = [Some(source()), None];
        let (used, started) = (Used::Only(Leg::First), Leg::First);
        assert!(takes_writes(&ctx, &Mirror { disks, used, started, dropped: None }).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_whose_own_disk_takes_no_write_starts_again_from_the_other_one_once() {
        let folder = tempfile::tempdir().unwrap();
        let (ctx, handles) = Context::for_test();
        let service = service(folder.path());
        let other = Disk { path: "/dev/vdb".into(), ..source() };
        let (disks, used, started) = ([Some(source()), Some(other)], Used::Both, Leg::First);
        let mirror = Mirror { disks, used, started, dropped: None };
        let await_own =
            async |write: tokio::time::Sleep| service.await_own(&ctx, &mirror, write).await;
        await_own(sleep(SMALL / 2)).await.unwrap();
        assert_eq!(*service.end.borrow(), None);

        let never = || sleep(LARGEST * 2);
        let state = || handles.stages.borrow().get(&Stage::Storage).unwrap().state.clone();
        let reported = async {
            sleep(SOON + Duration::from_secs(1)).await;
            let Progress::Waiting(what) = state() else { panic!("nothing is reported") };
            assert!(what.contains("vda") && what.contains("from vdb"), "{what}");
        };
        // The run ends with the node, so the call does not return.
        let (ended, ()) = tokio::join!(timeout(SMALL * 2, await_own(never())), reported);
        assert!(ended.is_err());
        assert_eq!(*service.end.borrow(), Some(Reason::Reboot));
        let mut variables = std::fs::read_dir(folder.path()).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let is_next = |entry| name(entry).to_str().unwrap().starts_with("BootNext-");
        assert!(variables.any(is_next), "the firmware was not asked");

        // The firmware has started the same disk.
        service.end.send_replace(None);
        let refused = await_own(never()).await;
        assert!(matches!(refused, Err(Error::Late(_))), "{refused:?}");
        assert_eq!(*service.end.borrow(), None);
        service.forget_start().await;
        assert!(timeout(SMALL * 2, await_own(never())).await.is_err());
        assert_eq!(*service.end.borrow(), Some(Reason::Reboot), "the firmware is not asked again");
    }

    #[test]
    fn a_start_waits_for_its_records_no_longer_than_a_mirror_that_runs_for_an_answer() {
        for (line, seconds) in
            [("", 600), ("polis.disk-deadline=30", 30), ("polis.disk-deadline=3600", 1800)]
        {
            assert_eq!(records_max(line), Duration::from_secs(seconds), "{line}");
        }
    }
}
