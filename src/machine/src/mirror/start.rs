//! The start of the service: waits for the disks of the mirror, has it assembled, and makes one
//! at the first boot.
//!
//! ```text
//! the device is there --------------------------> it is tended: an earlier run has made it
//! disk without records --parameters ask for one-> records, and then as below
//! disk with records --wait for the other one----> assembled
//!                 \--an older disk or ESP--------> the machine starts again, from the other disk
//! ```
//!
//! Invariants:
//! - No disk but the one that the machine was started from is waited for without a bound.
//! - Nothing is done with an ESP that is older than the other one, where both are there.

use std::time::Duration;

use polis_wire::parameters::Selector;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::assemble::{self, Mirror};
use super::disks::{self, Disk};
use super::esp::{self, Newer};
use super::firmware;
use super::plan::Used;
use super::reads::Reads;
use super::{Config, Error, Service};
use crate::install;
use crate::install::select;
use crate::storage::apply;
use crate::storage::plan::{TYPE_ID, last_of_both};
use crate::storage::service::PROBE_MAX;
use crate::storage::{self, Ground, Wanted, machine, table};
use polis_base::stage::{Stage, State as Progress};
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
/// How long another disk may take for its ESP, or to say what it has.
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
        if mirror.newest() != mirror.started {
            self.catch_up(ctx, &mut mirror).await?;
        }
        let directory = self.config.efivars.clone();
        blocking(move || firmware::forget(&directory)).await;
        let config = self.config.clone();
        let mirror = blocking(move || assemble::start(&config, mirror)).await?;
        info!(used = ?mirror.used, "the mirror is in use");
        let fresh = mirror.disk(mirror.started).is_some_and(|disk| disk.data.is_none());
        let last = if fresh { Some(self.last(ctx).await) } else { None };
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
        let (config, mut next) = (self.config.clone(), mirror.clone());
        let taken = blocking(move || {
            esp::put(&config.esp, &records)?;
            // From now on this ESP counts, so that no later difference has it done again.
            next.raise(&config, Used::Both)
        });
        match taken.await {
            Ok(()) => self.reboot(ctx, "with the records of the other disk").await,
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "this disk does not take them");
                Err(refused)
            }
        }
    }

    /// What the ESP of `disk` has beyond the one of this disk, if it answers in time.
    async fn newer(&self, disk: Disk) -> Result<Newer, Error> {
        let Config { esp, other_esp: place, .. } = self.config.clone();
        let name = disk.name();
        let compared = timeout(OTHER_MAX, blocking(move || esp::compare(&esp, &disk, &place)));
        compared.await.unwrap_or_else(|_elapsed| {
            let source = std::io::ErrorKind::TimedOut.into();
            Err(Error::Copy { operation: "read the ESP", disk: name, source })
        })
    }

    /// Makes a mirror of the disk, if the parameters ask for one and it has no data yet.
    async fn found(&mut self, ctx: &Context) -> Result<Option<Disk>, Stop> {
        let config = self.config.clone();
        let read = blocking(move || assemble::look(&config));
        let has_data =
            |table: &table::Table| table.partitions.iter().any(|it| it.type_id == TYPE_ID);
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
        blocking(move || assemble::begin(&config)).await?;
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
                let what = "the other disk of the mirror to appear".to_owned();
                ctx.stage(Stage::Storage, Progress::Waiting(what));
                sleep(POLL).await;
                continue;
            }
            return Ok(Mirror { disks, used: used?, started: disk.leg(), dropped: None });
        }
    }

    /// Has the firmware start from the disk with the newest data. Returns only where it cannot.
    async fn start_again(&self, ctx: &Context, mirror: &Mirror) -> Error {
        let name = |leg| mirror.disk(leg).map(Disk::name).unwrap_or_default();
        let (started, newest) = (name(mirror.started), name(mirror.newest()));
        let error = Error::Started { started: started.clone(), newest: newest.clone() };
        let Some(source) = mirror.disk(mirror.newest()).cloned() else { return error };
        let directory = self.config.efivars.clone();
        if !blocking(move || firmware::start_from(&directory, &source)).await {
            return error;
        }
        self.reboot(ctx, &format!("from {newest}: {started} is older")).await
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
    async fn last(&self, ctx: &Context) -> u64 {
        let since = Instant::now();
        loop {
            let (config, selector) = (self.config.clone(), self.selector());
            let other = blocking(move || other_room(&config, selector.as_ref()));
            let other = timeout(OTHER_MAX, other).await.ok().flatten();
            if other.is_none() && since.elapsed() < NEW_MAX {
                let what = "the other disk of the mirror to appear".to_owned();
                ctx.stage(Stage::Storage, Progress::Waiting(what));
                sleep(POLL).await;
                continue;
            }
            if other.is_none() {
                warn!("no empty disk fits the mirror: it begins with one disk");
            }
            let disk = self.config.disk.clone();
            let table = blocking(move || machine::read_table(&disk)).await;
            return table.map_or(0, |table| last_of_both(&table, other));
        }
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

/// Reads the disk that the machine was started from, as long as storage may.
async fn in_time<T>(read: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = apply::Error::Late { what: READING, seconds: PROBE_MAX.as_secs() };
    timeout(PROBE_MAX, read).await.unwrap_or_else(|_elapsed| Err(late.into()))
}

/// The usable blocks of the disk that would be taken. Blocks.
fn other_room(config: &Config, selector: Option<&Selector>) -> Option<u64> {
    let all = install::disks::list(&config.sys, &disks::name_of(&config.disk));
    let disk = select::choose(&all, selector?).ok()?;
    let file = install::content::open(&config.dev.join(&disk.name)).ok()?;
    if install::content::found(&file).ok()?.is_some() {
        return None;
    }
    let block_size = u64::from(polis_base::sys::block::logical_block_size(&file).ok()?);
    let blocks = disk.size / block_size;
    let id = uuid::Uuid::nil();
    Some(table::Table { disk: id, block_size, blocks, partitions: Vec::new() }.last_usable())
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
