//! The start of the service: waits for the disks of the mirror, has it assembled, and makes one
//! at the first boot.
//!
//! ```text
//! the device is there --------------------------> it is tended: an earlier run has made it
//! disk without records --parameters ask for one-> records, and then as below
//! disk with records --wait for the other one----> assembled
//!                 +--an older disk or ESP-------> the machine starts again, from the other disk
//!                 +--it takes no writes---------> assembled without it
//!                 +--this one takes none--------> the machine starts again, from the other disk
//! ```
//!
//! Invariants:
//! - Each wait for a disk has a bound, and names a remedy; the stage does not name a wait that is
//!   over.
//! - A disk that answers reads and no writes does not end a boot from the other one, nor its own if
//!   the firmware can start the other one, which has all data.
//! - Nothing is done with an ESP that is older than the other one, where both are there.
//! - A disk that has no room for a data partition does not decide how large that is.

use std::io;
use std::time::Duration;

use polis_wire::parameters::Selector;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};
use uuid::Uuid;

use super::assemble::{self, Mirror};
use super::disks::Disk;
use super::esp::{self, Newer};
use super::firmware;
use super::plan::Used;
use super::reads::Reads;
use super::{Config, Error, Service};
use crate::install;
use crate::install::select;
use crate::storage::apart::{ANSWER_MAX, Pending, apart, name_of};
use crate::storage::apply;
use crate::storage::patience::{LARGEST, SMALL, SOON, within};
use crate::storage::plan::{Refusal, SIZE_MIN, TYPE_ID, last_of_both, limit, place};
use crate::storage::service::PROBE_MAX;
use crate::storage::table::Table;
use crate::storage::{self, Ground, Wanted, machine, stall};
use polis_base::cause;
use polis_base::stage::{Stage, State as Progress};
use polis_base::sys::command_line;
use polis_base::sys::reboot::Reason;
use polis_runtime::event::{self, Closed};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};
use polis_runtime::sys::process::Command;

/// Where the image has the loader of modules, and the module of mirrors.
const MODPROBE: &str = "/usr/sbin/modprobe";
const MODULE: &str = "dm_raid";
/// How long the start waits for a disk that was part of the last use: `init` loads the last
/// drivers five seconds after the start of the services, and a disk may spin up.
const LATE_MAX: Duration = Duration::from_secs(30);
/// How long a first boot waits for the other disk, before it decides the size without it.
const NEW_MAX: Duration = Duration::from_secs(15);
/// How often the list of disks is looked at.
const POLL: Duration = Duration::from_millis(500);

/// What is read of the disk that the machine was started from; storage says that it waits for it.
const READING: &str = "reading the partition table";
/// How long another disk may take for its ESP.
const OTHER_MAX: Duration = Duration::from_secs(10);

/// Why there is no mirror to tend.
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
        if storage::ground::path().exists() {
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
                    self.ground.send_replace(Some(Ground::Partition));
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
        self.ground.send_replace(Some(mirror.ground(last)));
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

    /// Makes up for what the ESP of the other disk, which the node wrote last, has beyond this
    /// one: the machine starts again, from that disk. Where the firmware starts this one alone, it
    /// takes the records of the other one, and starts again with them; a disk whose ESP cannot be
    /// read is lost then, since what it has must not be overwritten unread.
    async fn catch_up(&self, ctx: &Context, mirror: &mut Mirror) -> Result<(), Error> {
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
    async fn leave(&self, ctx: &Context, mirror: Mirror) -> Result<Mirror, Error> {
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
        match timeout(OTHER_MAX, apart(move || esp::compare(&esp, &disk))).await {
            Ok(compared) => compared.map_err(failed)?,
            Err(_elapsed) => Err(failed(io::ErrorKind::TimedOut.into())),
        }
    }

    /// Makes a mirror of the disk, if the parameters ask for one and it has no data yet.
    async fn found(&mut self, ctx: &Context) -> Result<Option<Disk>, Stop> {
        let config = self.config.clone();
        let read = blocking(move || assemble::look(&config));
        let has_data = |table: &Table| table.partitions.iter().any(|it| it.type_id == TYPE_ID);
        if has_data(&in_time(read).await?) {
            // Whatever the parameters say: the data is where it is.
            return Ok(None);
        }
        event::until(&mut self.wanted, "the cluster manager", |wanted| {
            matches!(wanted, Some(Wanted::Make(_))).then_some(())
        })
        .await?;
        if self.selector().is_none() {
            return Ok(None);
        }
        let config = self.config.clone();
        let begun = blocking(move || assemble::begin(&config));
        within(ctx, "writing the records of the mirror", PROBE_MAX, begun).await?;
        ctx.stage(Stage::Storage, Progress::Started);
        Ok(self.started().await?)
    }

    /// The selector of the other disk.
    pub(super) fn selector(&self) -> Option<Selector> {
        let known = self.known.borrow();
        known.as_ref()?.parameters()?.mirror.clone()
    }

    /// Waits for the disks of the last use, and decides which are used.
    async fn gather(&self, ctx: &Context, disk: &Disk) -> Result<Mirror, Error> {
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
            // The wait is over.
            ctx.stage(Stage::Storage, Progress::Started);
            return Ok(Mirror { disks, used: used?, started: disk.leg(), dropped: None });
        }
    }

    /// Has the firmware start from the disk with the newest data. Returns only where it cannot.
    async fn start_again(&self, ctx: &Context, mirror: &Mirror) -> Error {
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
    async fn forget_start(&self) {
        let directory = self.config.efivars.clone();
        blocking(move || firmware::forget(&directory)).await;
    }

    /// Waits for `write` to the disk that the machine was started from, one of two with all data.
    /// If it does not end in time, the machine starts again from the other disk; where the
    /// firmware does not do that, it is waited for as long as the writes of a boot are.
    async fn await_own(
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

    /// Ends the run, with the node.
    async fn reboot<T>(&self, ctx: &Context, how: &str) -> T {
        warn!("the machine starts again, {how}");
        let what = format!("the machine to start again, {how}");
        ctx.stage(Stage::Storage, Progress::Waiting(what));
        self.end.send_replace(Some(Reason::Reboot));
        // The run ends with the node.
        std::future::pending().await
    }

    /// The last block of a data partition that has room on both disks.
    async fn last(&self, ctx: &Context) -> Result<u64, Error> {
        let disk = self.config.disk.clone();
        let read = blocking(move || {
            let failed = |source| Error::Table { disk: name_of(&disk), source };
            machine::read_table(&disk).map_err(failed)
        });
        let table = in_time(read).await?;
        let (others, looks) = (install::disks::Disks::default(), Pending::default());
        let since = Instant::now();
        let room = loop {
            let all = others.list(&self.config.sys, &name_of(&self.config.disk)).await;
            let (config, selector, own) = (self.config.clone(), self.selector(), table.clone());
            let look = || apart(move || other_room(&config, selector.as_ref(), &all, &own));
            let silent =
                || Err(format!("a disk did not answer within {} seconds", ANSWER_MAX.as_secs()));
            match looks.answer((), look).await.unwrap_or_else(silent) {
                Ok(room) => break Some(room),
                Err(_) if since.elapsed() < NEW_MAX => {
                    let what = format!(
                        "an empty disk that fits the parameter `mirror`: connect it, or the data \
                         partition is made without it after {} s",
                        NEW_MAX.as_secs()
                    );
                    ctx.stage(Stage::Storage, Progress::Waiting(what));
                    sleep(POLL).await;
                }
                Err(cause) => {
                    warn!(cause, "no empty disk fits the mirror: it begins with one disk");
                    break None;
                }
            }
        };
        // The wait is over.
        ctx.stage(Stage::Storage, Progress::Started);
        Ok(last_of_both(&table, room))
    }

    /// The mirror with the data partition that storage has made meanwhile.
    async fn made(&mut self, mirror: Mirror) -> Result<Mirror, Stop> {
        event::until(&mut self.storage, "storage", |status| status.ready().map(|_| ())).await?;
        let mut mirror = mirror;
        mirror.disks[mirror.started.index()] = self.started().await?;
        self.ground.send_replace(Some(mirror.ground(None)));
        Ok(mirror)
    }
}

/// The names of the disk that the machine was started from, and of the one with the newest data.
fn ages(mirror: &Mirror) -> (String, String) {
    let name = |leg| mirror.disk(leg).map(Disk::name).unwrap_or_default();
    (name(mirror.started), name(mirror.newest()))
}

/// The machine was started from the older disk.
fn older(mirror: &Mirror) -> Error {
    let (started, newest) = ages(mirror);
    Error::Started { started, newest }
}

/// Whether the other disk, if the start writes to it, takes a write.
async fn takes_writes(ctx: &Context, mirror: &Mirror) -> bool {
    let Some(disk) = mirror.written().cloned() else { return true };
    ends_in_time(ctx, &disk.name(), write_again(disk)).await
}

/// Writes the record of a disk as it is, which changes nothing, however late that ends. An error
/// is the business of the writes that follow.
async fn write_again(mut disk: Disk) {
    let record = disk.seen.record;
    let _reported_later = apart(move || disk.put(&record)).await;
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
fn kernel_line() -> String {
    command_line::read().unwrap_or_default()
}

/// How long the disks may take for the records of a use, by the kernel command line: as long as a
/// mirror that runs waits for an answer. The driver of most disks gives up before, and the start
/// goes on without the other one; the next start finds one that stalls at its first write.
fn records_max(line: &str) -> Duration {
    stall::deadline(line).min(LARGEST)
}

/// Reads the disk that the machine was started from, as long as storage may.
async fn in_time<T>(read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = apply::Error::Late { what: READING, seconds: PROBE_MAX.as_secs() };
    timeout(PROBE_MAX, read).await.unwrap_or_else(|_elapsed| Err(late.into()))
}

/// The usable blocks of the disk, of all, that would be taken beside the one with this table, or
/// why none is. Blocks.
fn other_room(
    config: &Config,
    selector: Option<&Selector>,
    all: &[install::disks::Disk],
    table: &Table,
) -> Result<u64, String> {
    let selector = selector.ok_or("the node parameters select none")?;
    let disk = select::choose(all, selector).map_err(|refusal| refusal.to_string())?;
    let name = &disk.name;
    let failed = |error: io::Error| format!("cannot read the disk {name}: {}", cause::line(&error));
    let file = install::content::open(&config.dev.join(name)).map_err(failed)?;
    if let Some(found) = install::content::found(&file).map_err(failed)? {
        return Err(format!("the disk {name} has {found}"));
    }
    let block_size = polis_base::sys::block::logical_block_size(&file).map_err(failed)?;
    room(disk.size, block_size.into(), table)
        .map_err(|why| format!("the disk {name} is not taken: {why}"))
}

/// The usable blocks of an empty disk with so many bytes, or why the data partition that follows
/// on the disk with this table cannot be on it, too.
fn room(size: u64, block_size: u64, table: &Table) -> Result<u64, String> {
    let text = |refusal: Refusal| refusal.to_string();
    if block_size != table.block_size {
        return Err(format!("it has blocks of {block_size} bytes, the other disk has not"));
    }
    // A disk of a few blocks has none that is usable.
    if size < SIZE_MIN {
        return Err(text(Refusal::OtherTooSmall { free: size }));
    }
    let (disk, blocks) = (Uuid::nil(), size / block_size);
    let usable = Table { disk, block_size, blocks, partitions: Vec::new() }.last_usable();
    let mut data = place(table, Uuid::nil()).map_err(text)?.partition().clone();
    limit(&mut data, last_of_both(table, Some(usable)), block_size).map_err(text)?;
    Ok(usable)
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

#[cfg(test)]
mod tests {
    use super::super::disks::tests::{BLOCKS, source};
    use super::super::plan::Leg;
    use super::super::tend::tests::service;
    use super::*;

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

    #[test]
    fn a_disk_without_room_for_a_data_partition_does_not_decide_its_size() {
        let mut table = source().table;
        // The first boot: the records are there, and the data partition will follow them.
        let records = table.partitions[3].last;
        table.partitions.truncate(4);
        let needed = (records + 1) * 512 + SIZE_MIN;
        // The backup of the table takes the last 33 blocks.
        let smallest = needed + 33 * 512;
        for size in [0, 512, 4096, 64 << 20, SIZE_MIN, needed, smallest - 512] {
            let why = room(size, 512, &table).unwrap_err();
            assert!(why.contains("512 MiB are needed"), "{size}: {why}");
        }
        for size in [smallest, BLOCKS * 512] {
            let usable = room(size, 512, &table).unwrap();
            assert!(last_of_both(&table, Some(usable)) * 512 >= records * 512 + SIZE_MIN, "{size}");
        }
        let why = room(BLOCKS * 512, 4096, &table).unwrap_err();
        assert_eq!(why, "it has blocks of 4096 bytes, the other disk has not");
    }
}
