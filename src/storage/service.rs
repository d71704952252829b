//! Mounts the data partition, and makes it at the first boot.
//!
//! ```text
//!                 there is one
//! [Starting] --------------------------------> mount --> [Ready]
//!     |  \                                       ^
//!     |   +--none--> [Absent] --a kind is wanted-+ make
//!     +--anything else--> trapdoor
//! ```
//!
//! The cluster manager wants a kind when it has decided to begin a cluster; a
//! partition that is there is mounted without waiting for anybody.
//!
//! What this module does not do: decide what to do with the disk (`plan`), or
//! whether this machine may begin anew (`cluster`).

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::{info, warn};
use uuid::Uuid;

use super::apply::{self, apply};
use super::machine::{self, Live};
use super::plan::{self, Place, Plan};
use super::table::Table;
use super::{Error, Kind, Ready, Root, Status, Wanted};
use crate::event::{self, Closed};
use crate::logtree::Parser;
use crate::stage::{Stage, State};
use crate::supervisor::Context;
use crate::sys::mount;

/// What is fixed for the life of the process.
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
    /// What is fixed.
    pub config: Config,
    /// What the cluster manager asks for, as an answer to the status.
    pub wanted: watch::Receiver<Option<Wanted>>,
    /// What everyone else may know.
    pub status: watch::Sender<Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Nobody is left who could want a partition.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Why there is no data partition: for people, or for the supervisor.
enum Stop {
    Trapdoor(Error),
    Closed(Closed),
}

impl<E: Into<Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Trapdoor(error.into())
    }
}

impl Service {
    /// Runs until cancelled, and unmounts then.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart finds the partition mounted.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        ctx.stage(Stage::Storage, State::Started);
        let Some(prepared) = ctx.until_cancelled(self.prepare(&ctx)).await else { return Ok(()) };
        match prepared {
            Ok(ready) => {
                info!(device = %ready.device.display(), kind = %ready.kind, "storage is ready");
                self.status.send_replace(Status::Ready(Arc::new(ready)));
            }
            Err(Stop::Trapdoor(error)) => match ctx.trapdoor(error.report()).await {},
            Err(Stop::Closed(closed)) => return Err(closed.into()),
        }
        ctx.stage(Stage::Storage, State::Done);
        ctx.healthy();
        ctx.cancelled().await;
        self.unmount().await;
        Ok(())
    }

    async fn prepare(&mut self, ctx: &Context) -> Result<Ready, Stop> {
        let root = self.config.root.clone();
        blocking(move || {
            root.esp.create()?;
            root.ephemeral.create()?;
            Ok(())
        })
        .await?;

        let disk = self.config.disk.clone();
        let (table, plan) = blocking(move || look(disk)).await?;
        let kind = match plan {
            Plan::Create { .. } | Plan::Finish { .. } => {
                let partition = plan.partition().id;
                self.status.send_replace(Status::Absent { partition });
                let wanted =
                    event::until(&mut self.wanted, "the cluster manager", |wanted| match wanted {
                        Some(Wanted::Make(make)) => Some(make.kind()),
                        Some(Wanted::Open { .. }) | None => None,
                    });
                wanted.await.map_err(Stop::Closed)?
            }
            Plan::Mount { .. } => Kind::Insecure,
        };

        let block_size = table.block_size;
        let live = Live {
            disk: self.config.disk.clone(),
            mount_point: self.config.root.data.mount.path().to_owned(),
            mount_options: self.config.mount_options,
            block_size,
            kind,
            log: ctx.sink("xfs", Parser::Raw),
        };
        let partition = apply(&live, table, plan).await?;
        let root = self.config.root.clone();
        blocking(move || Ok(root.data.create()?)).await?;
        Ok(Ready {
            root: self.config.root.clone(),
            kind,
            partition: partition.id,
            device: live.device(&partition),
            size: partition.blocks() * block_size,
        })
    }

    /// Leaves the file system clean, if nobody uses it any more.
    async fn unmount(&self) {
        let target = self.config.root.data.mount.path().to_owned();
        let unmounted = tokio::task::spawn_blocking(move || {
            mount::unmount(&target).or_else(|_busy| mount::read_only(&target))
        });
        match unmounted.await {
            Ok(Ok(())) => drop(self.status.send_replace(Status::Starting)),
            // XFS has a journal: the next mount replays it.
            Ok(Err(error)) => {
                warn!(error = &error as &dyn std::error::Error, "the data partition stays mounted");
            }
            Err(_lost) => {}
        }
    }
}

/// Looks at the disk and decides. Blocks.
fn look(disk: PathBuf) -> Result<(Table, Plan), Error> {
    let opened = |source| Error::Disk { disk: disk.clone(), source };
    let table = machine::read_table(&disk).map_err(opened)?;
    let place = plan::place(&table, new_id())?;
    let content = machine::read_content(&disk, &table, place.partition());
    let content = content.map_err(|source| match &place {
        Place::Free(_) => Error::Content { what: "free space".to_owned(), source },
        Place::Made(partition) => {
            Error::Content { what: format!("partition {}", partition.number), source }
        }
    })?;
    let plan = plan::plan(&table, place, &content)?;
    if let Plan::Create { .. } = plan
        && let Some(backup) = machine::read_backup(&disk)
    {
        for partition in plan::former(&table, &backup) {
            let content = machine::read_content(&disk, &backup, partition);
            let what = "former data partition".to_owned();
            plan::spare(&content.map_err(|source| Error::Content { what, source })?)?;
        }
    }
    Ok((table, plan))
}

/// An identity for a new partition.
fn new_id() -> Uuid {
    uuid::Builder::from_random_bytes(rand::random()).into_uuid()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(Error::Apply(apply::Error::Lost)))
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
