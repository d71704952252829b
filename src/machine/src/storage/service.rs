//! The service of storage: mounts the data partition, and makes it at the first boot.
//!
//! ```text
//!                 there is one, insecure
//! [Starting] --------------------------------> mount --> [Ready] --cancelled--> unmount,
//!     |  | \                                     ^ ^                            close
//!     |  |  +--none--> [Absent] --make-----------+ |
//!     |  +--encrypted--> [Locked] --open-----------+
//!     |                   ^    | no
//!     |            another|    v
//!     |                  [Refused]
//!     +--given up--> overwrite, then as with none
//!     +--anything else--> trapdoor
//!
//! [Locked], [Refused], [Ready] --give up--> mark it --> [GivenUp]
//! ```
//!
//! The cluster manager asks for a partition when it has decided to begin a
//! cluster, and has the keys of one that is locked. An insecure partition that is
//! there is mounted without waiting for anybody.
//!
//! Invariants:
//! - `Ready` means that the file system is mounted, and that every directory of the tree
//!   is on it.
//! - A key that does not fit changes nothing: another is waited for.
//! - A run that ends leaves the file system unmounted, or else read-only: it may still
//!   be in use, and the machine is about to stop.
//! - A condition that waiting cannot end opens the trapdoor; nothing is retried without
//!   end in silence.
//!
//! What this module does not do: decide what to do with the disk (`plan`), or whether this
//! machine may start over (`cluster`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};
use uuid::Uuid;

use super::apply::{self, apply, before_unlock, clear};
use super::backing;
use super::deadline::{Bounded, DATA, within};
use super::health::{self, Fault, Health, What};
use super::key::{Key, Keys, Make, Passphrase};
use super::luks::OpenError;
use super::machine::{self, Live, Target};
use super::maintenance::maintain;
use super::plan::{self, Place, Plan};
use super::stall;
use super::table::{Partition, Table, new_id};
use super::{Backing, Error, Kind, Ready, Status, Wanted};
use polis_base::files::Root;
use polis_base::stage::{Stage, State};
use polis_base::sys::command_line;
use polis_runtime::event::{self, Closed};
use polis_runtime::logtree::Parser;
use polis_runtime::supervisor::{Context, blocking};

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk that the machine runs from, for example `/dev/vda`.
    pub disk: PathBuf,
    /// The tree; its mount points exist.
    pub root: Root,
    /// Options of the mount: [`super::machine::MOUNT_OPTIONS`], unless the
    /// kernel is a test's and lacks them.
    pub mount_options: &'static str,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The requests of the cluster manager, as an answer to the status.
    pub wanted: watch::Receiver<Option<Wanted>>,
    /// The published status.
    pub status: watch::Sender<Status>,
    /// How the partition does while it is mounted.
    pub health: watch::Sender<Health>,
    /// On what the partition lies, once that is known.
    pub backing: watch::Receiver<Option<Backing>>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// All owners of the request channel are gone.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// The reason why the node has no data partition: for people, or for the supervisor.
enum Stop {
    Trapdoor(Error),
    Closed(Closed),
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Trapdoor(error.into())
    }
}

/// How long this service leaves the report to the mirror, which names the disk that does not
/// answer. It asks each disk every ten seconds, so it may notice later that one stalls.
fn mirror_first(fault: &Fault, backing: &Backing) -> Duration {
    match backing {
        Backing::Mirror { alone: None, .. } if fault.what == What::Hung => stall::SLOW,
        Backing::Mirror { .. } | Backing::Partition => Duration::ZERO,
    }
}

/// Longest that a look at the disk may take, and a key that is tried.
pub(crate) const PROBE_MAX: Duration = Duration::from_secs(120);

impl Service {
    /// Runs until cancelled, and unmounts then.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart finds the partition mounted.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        ctx.stage(Stage::Storage, State::Started);
        let ended = given_up(self.wanted.clone());
        let prepared = async {
            tokio::select! {
                // Cancel-safe: it is given up only while this waits for a key.
                prepared = Box::pin(self.prepare(&ctx)) => Some(prepared),
                // Cancel-safe: it only waits.
                () = ended => None,
            }
        };
        let Some(prepared) = ctx.until_cancelled(prepared).await else { return Ok(()) };
        let (live, partition) = match prepared {
            Some(Ok(prepared)) => prepared,
            Some(Err(Stop::Trapdoor(error))) => match ctx.trapdoor(error.report()).await {},
            Some(Err(Stop::Closed(closed))) => return Err(closed.into()),
            None => {
                self.give_up(&ctx).await;
                return Ok(());
            }
        };
        let ready = Ready {
            root: self.config.root.clone(),
            kind: live.kind,
            partition: partition.id,
            device: live.device(&partition),
            size: partition.blocks() * live.block_size,
        };
        info!(device = %ready.device.display(), kind = %ready.kind, "storage is ready");
        self.status.send_replace(Status::Ready(Arc::new(ready)));
        ctx.stage(Stage::Storage, State::Done);
        ctx.healthy();
        let kept = async {
            tokio::select! {
                // Cancel-safe: the maintenance may stop at any moment.
                error = self.keep(&ctx, &live, &partition) => Some(error),
                // Cancel-safe: it only waits.
                () = given_up(self.wanted.clone()) => None,
            }
        };
        match ctx.until_cancelled(kept).await {
            Some(Some(error)) => match ctx.trapdoor(error.report()).await {},
            Some(None) => self.give_up(&ctx).await,
            None => {}
        }
        if live.leave().await {
            self.status.send_replace(Status::Starting);
        }
        Ok(())
    }

    /// Marks the partition, and waits for the end of the machine.
    async fn give_up(&self, ctx: &Context) {
        let disks = match &*self.backing.borrow() {
            Some(Backing::Mirror { disks, .. }) => disks.clone(),
            Some(Backing::Partition) | None => vec![self.config.disk.clone()],
        };
        let marked = blocking(move || {
            // The mark on one disk of a mirror counts for both.
            let marked = disks
                .into_iter()
                .map(|disk| machine::give_up(&disk).map_err(|source| Error::Disk { disk, source }));
            let (marked, failed): (Vec<_>, Vec<_>) = marked.partition(Result::is_ok);
            let mut failed = failed.into_iter().filter_map(Result::err);
            match failed.next() {
                Some(error) if marked.is_empty() => Err(error),
                Some(error) => {
                    let error = &error as &dyn std::error::Error;
                    warn!(error, "a disk of the mirror is not marked");
                    Ok(())
                }
                None => Ok(()),
            }
        });
        if let Err(error) = within(ctx, "marking the data partition", PROBE_MAX, marked).await {
            match ctx.trapdoor(error.report()).await {}
        }
        warn!("the data partition is given up: the next boot wipes it");
        self.status.send_replace(Status::GivenUp);
        ctx.cancelled().await;
    }

    /// Watches and maintains the partition; returns when it cannot be used any more.
    async fn keep(&self, ctx: &Context, live: &Live, partition: &Partition) -> Error {
        let watched = self.watch(ctx, live, partition);
        let maintained = async {
            maintain(live, partition).await;
            std::future::pending::<()>().await;
        };
        let found = tokio::select! {
            // Cancel-safe per its docs.
            found = watched => found,
            // Never ends.
            () = maintained => std::future::pending().await,
        };
        match found {
            Ok(fault) => Error::Failing(fault),
            // Without the kernel's log these errors go unnoticed, and everything else
            // works.
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "errors of the disk are not detected"
                );
                std::future::pending().await
            }
        }
    }

    /// Watches the partition and what it lies on, which changes where it is mirrored.
    async fn watch(
        &self,
        ctx: &Context,
        live: &Live,
        partition: &Partition,
    ) -> std::io::Result<Fault> {
        let mount = self.config.root.data.mount.path();
        let hung = stall::deadline(&command_line::read().unwrap_or_default());
        let mut backing = self.backing.clone();
        loop {
            let now =
                backing.borrow_and_update().clone().filter(|_| live.backing != Backing::Partition);
            let on = Live { backing: now.unwrap_or_else(|| live.backing.clone()), ..live.clone() };
            let devices = on.devices(partition);
            let fault = tokio::select! {
                // Cancel-safe per its docs.
                found = health::watch(ctx, &self.health, &devices, mount, hung) => found?,
                // Cancel-safe: only waits. Without an owner, nothing changes any more.
                Ok(()) = backing.changed(), if live.backing != Backing::Partition => continue,
            };
            sleep(mirror_first(&fault, &on.backing)).await;
            return Ok(fault);
        }
    }

    async fn prepare(&mut self, ctx: &Context) -> Result<(Live, Partition), Stop> {
        let root = self.config.root.clone();
        blocking(move || {
            root.esp.create()?;
            root.ephemeral.create()
        })
        .await?;

        let (mut table, mut plan) = self.look(ctx).await?;
        let (kind, keys) = match &plan {
            Plan::Create { partition, .. } | Plan::Finish { partition } => {
                self.status.send_replace(Status::Absent { partition: partition.id });
                let make = self.wanted(|wanted| match wanted {
                    Wanted::Make(make) => Some(make.clone()),
                    Wanted::Open { .. } | Wanted::GiveUp => None,
                });
                let make: Make = make.await.map_err(Stop::Closed)?;
                if let Plan::Create { partition, .. } = &plan {
                    (table, plan) = self.place(ctx, partition.id).await?;
                }
                (make.kind(), make.keys().cloned())
            }
            Plan::Mount { .. } | Plan::Clear { .. } => (Kind::Insecure, None),
            Plan::Unlock { kind, .. } => (*kind, None),
        };
        let backing = self.backing(&table).await?;
        let live = self.live(ctx, &table, backing, kind, keys);
        let subject = plan.partition().clone();
        let machine = Bounded { machine: &live, watch: ctx, words: DATA };
        let applied = async {
            let plan = match plan {
                Plan::Unlock { partition, kind, grow } => {
                    let grown =
                        Box::pin(before_unlock(&machine, table.clone(), partition, grow)).await?;
                    self.unlock(ctx, &live, &grown).await?;
                    Plan::Unlock { partition: grown, kind, grow: None }
                }
                plan => plan,
            };
            Box::pin(apply(&machine, table, plan)).await.map_err(Stop::from)
        };
        let partition = match Box::pin(applied).await {
            Err(Stop::Trapdoor(Error::Apply(error))) => {
                return Err(Stop::Trapdoor(explain(error, &live, &subject).await));
            }
            other => other?,
        };
        let root = self.config.root.clone();
        blocking(move || root.data.create()).await?;
        Ok((live, partition))
    }

    /// On what the partition of a disk with this table lies.
    async fn backing(&mut self, table: &Table) -> Result<Backing, Stop> {
        if !backing::is_mirrored(table) {
            return Ok(Backing::Partition);
        }
        let known = event::until(&mut self.backing, "the mirror", Option::clone);
        match known.await.map_err(Stop::Closed)? {
            // What is written to one of the disks alone would not be on the other.
            Backing::Partition => Err(Error::Unmirrored { disk: self.config.disk.clone() }.into()),
            mirror @ Backing::Mirror { .. } => Ok(mirror),
        }
    }

    /// Looks again, once it is decided whether the new partition is mirrored.
    async fn place(&mut self, ctx: &Context, id: Uuid) -> Result<(Table, Plan), Stop> {
        let decided = event::until(&mut self.backing, "the mirror", Option::clone);
        let backing = decided.await.map_err(Stop::Closed)?;
        let disk = self.config.disk.clone();
        let looked = blocking(move || look(disk, &backing, id));
        Ok(within(ctx, "reading the disk", PROBE_MAX, looked).await?)
    }

    fn live(
        &self,
        ctx: &Context,
        table: &Table,
        backing: Backing,
        kind: Kind,
        keys: Option<Keys>,
    ) -> Live {
        Live {
            backing,
            disk: self.config.disk.clone(),
            target: Target::data(&self.config.root),
            mount_options: self.config.mount_options,
            block_size: table.block_size,
            kind,
            keys,
            log: ctx.sink("disk", Parser::Tool),
        }
    }

    /// Looks at the disk until nothing of what was given up is left on it.
    async fn look(&mut self, ctx: &Context) -> Result<(Table, Plan), Stop> {
        let disk = self.config.disk.clone();
        let read = blocking(move || {
            machine::read_table(&disk).map_err(|source| Error::Disk { disk, source })
        });
        let table = within(ctx, "reading the partition table", PROBE_MAX, read).await?;
        let backing = self.backing(&table).await?;
        loop {
            let (disk, on) = (self.config.disk.clone(), backing.clone());
            let looked = blocking(move || look(disk, &on, new_id()));
            let (table, plan) = within(ctx, "reading the disk", PROBE_MAX, looked).await?;
            let Plan::Clear { partition } = plan else { return Ok((table, plan)) };
            let live = self.live(ctx, &table, backing.clone(), Kind::Insecure, None);
            if live.is_in_use(&partition) {
                // It was marked in this boot, and only the next one may wipe it.
                self.status.send_replace(Status::GivenUp);
                std::future::pending::<()>().await;
            }
            let machine = Bounded { machine: &live, watch: ctx, words: DATA };
            Box::pin(clear(&machine, table, partition, new_id())).await?;
        }
    }

    /// Waits for the requests of the cluster manager.
    async fn wanted<T>(&mut self, pick: impl Fn(&Wanted) -> Option<T>) -> Result<T, Closed> {
        let found = event::until(&mut self.wanted, "the cluster manager", |wanted| {
            wanted.as_ref().and_then(&pick)
        });
        found.await
    }

    /// Waits for a key that opens the partition, and opens it.
    async fn unlock(
        &mut self,
        ctx: &Context,
        live: &Live,
        partition: &Partition,
    ) -> Result<(), Stop> {
        if live.is_open() {
            // An earlier run of the service did it.
            return Ok(());
        }
        let (kind, id) = (live.kind, partition.id);
        self.status.send_replace(Status::Locked { kind, partition: id });
        loop {
            let asked: (Key, Option<Passphrase>) = self
                .wanted(|wanted| match wanted {
                    Wanted::Open { key, rekey } => Some((key.clone(), rekey.clone())),
                    Wanted::Make(_) | Wanted::GiveUp => None,
                })
                .await
                .map_err(Stop::Closed)?;
            let (key, rekey) = asked;
            let opening = async {
                let opened = live.open_with(partition, &key, rekey.as_ref()).await;
                match opened {
                    Ok(()) => Ok(None),
                    Err(OpenError::Unfit { slot }) => Ok(Some(slot)),
                    Err(OpenError::Failed(source)) => {
                        Err(apply::Error::Open { device: live.raw(partition), source })
                    }
                }
            };
            match within(ctx, "opening the data partition", PROBE_MAX, opening).await? {
                None => {
                    info!(slot = key.slot(), "the data partition is open");
                    return Ok(());
                }
                Some(slot) => {
                    let reason = OpenError::Unfit { slot }.to_string();
                    warn!(reason, "the data partition stays locked");
                    self.status.send_replace(Status::Refused { kind, partition: id, reason });
                }
            }
            // The same key would not fit any better.
            let changed = self.wanted.changed().await;
            changed.map_err(|_closed| Stop::Closed(Closed("the cluster manager")))?;
        }
    }
}

/// Waits until the cluster manager gives the partition up.
async fn given_up(mut wanted: watch::Receiver<Option<Wanted>>) {
    let given_up = event::until(&mut wanted, "the cluster manager", |wanted| {
        matches!(wanted, Some(Wanted::GiveUp)).then_some(())
    });
    if given_up.await.is_err() {
        // Any other wait for that value ends the run.
        std::future::pending::<()>().await;
    }
}

/// Adds the kernel's messages about the device to a failure.
async fn explain(error: apply::Error, live: &Live, partition: &Partition) -> Error {
    if !matches!(error, apply::Error::Mount(_) | apply::Error::Wipe { .. }) {
        return error.into();
    }
    let devices = live.devices(partition);
    let found = tokio::task::spawn_blocking(move || health::newest(&devices)).await;
    match found {
        Ok(Some(fault)) => Error::Failed { fault, source: Box::new(error) },
        Ok(None) | Err(_) => error.into(),
    }
}

/// Looks at the disk and decides; a new partition gets the identity `id`. Blocks.
///
/// # Errors
///
/// [`Error`] where the disk cannot be read, or where going on would destroy something.
pub(crate) fn look(disk: PathBuf, backing: &Backing, id: Uuid) -> Result<(Table, Plan), Error> {
    let opened = |source| Error::Disk { disk: disk.clone(), source };
    let table = machine::read_table(&disk).map_err(opened)?;
    let mut place = plan::place(&table, id)?;
    let content = match (&place, backing) {
        // Of two disks, one may have old data.
        (Place::Made(_), Backing::Mirror { last: None, .. }) => {
            machine::read_device(&backing::path())
        }
        _ => machine::read_content(&disk, &table, place.partition()),
    };
    let content = content.map_err(|source| match &place {
        Place::Free(_) => Error::Content { what: "free space".to_owned(), source },
        Place::Made(partition) => {
            Error::Content { what: format!("partition {}", partition.number), source }
        }
    })?;
    if let (Place::Free(partition), Backing::Mirror { last: Some(last), .. }) =
        (&mut place, backing)
    {
        plan::limit(partition, *last, table.block_size)?;
    }
    let plan = plan::plan(&table, place, &content, new_id)?;
    if let Plan::Create { .. } = plan
        && let Some(backup) = machine::read_backup(&disk).map_err(opened)?
    {
        for partition in plan::former(&table, &backup) {
            let content = machine::read_content(&disk, &backup, partition);
            let what = "former data partition".to_owned();
            plan::spare(&content.map_err(|source| Error::Content { what, source })?)?;
        }
    }
    Ok((table, plan))
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
