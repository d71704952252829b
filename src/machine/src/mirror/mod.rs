//! The mirror of the disk that the machine runs from: its data on two disks, by the kernel, and
//! what starts it, copied, so that either disk alone starts the machine.
//!
//! `root` starts [`Service`] before `storage`, which waits for [`Backing`].
//!
//! ```text
//! plan      which disk has the newest data?     records -> disks in use
//! record    what a disk says of itself          disk <-> record, firmware's variable
//! disks     a disk of a mirror                  its table, record, ESP
//! firmware  which disk starts next              asked once
//! reads     which disks are there               bounded in time
//! start     the start of the service            waits for disks
//! assemble  the start of the mirror             disks -> device
//! device    over the disks                      made, changed
//! kernel    what the kernel says of the device  text -> state
//! monitor   while the node runs                 a disk that is lost
//! monitor/work beside that                      a disk is searched, filled; copies
//! monitor/answers whether each disk answers     requests, flushes -> a disk that stalls
//! take      a disk that comes                   an empty one, or one from before
//! copy      the systems
//! esp       what starts them, and the records of the node
//! system    the running system, read from both disks
//! report    what is shown of it
//! ```
//!
//! ```text
//!              a disk is lost                  a disk comes
//! [Whole] ---------------------> [Degraded] ------------------> [Filling]
//!    ^                               ^  \--lost----------------/   |
//!    +-------- all data, systems and ESP copied -------------------+
//! ```
//!
//! A new mirror is one of a single disk, which is filled like one that was replaced.
//!
//! Invariants:
//! - Those of `plan`: no old data is read, and no new data is overwritten.
//! - A disk is taken only if it fits the selector and is empty, or was part of this mirror.
//! - A disk is whole only if the machine starts from it alone.
//!
//! What this module does not do: read or write the data (`storage`).

mod assemble;
mod copy;
mod device;
mod disks;
mod error;
mod esp;
mod firmware;
mod kernel;
mod monitor;
mod plan;
mod reads;
mod record;
mod report;
mod start;
mod system;
mod take;

use std::path::PathBuf;

use tokio::sync::watch;
use tracing::info;

pub use self::error::Error;
pub use self::plan::Refusal;
use self::record::VARIABLE;
pub use self::report::{Report, State, Status, warnings};
use self::start::Stop;
use crate::parameters::Known;
use crate::storage::{self, Backing, Wanted};
use polis_base::environment::Environment;
use polis_base::files::Root;
use polis_base::sys::efivar::{self, Variable};
use polis_base::sys::reboot::Reason;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::{Context, blocking};

/// Fixed for the life of the process.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk that the machine was started from.
    pub disk: PathBuf,
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where the devices are.
    pub dev: PathBuf,
    /// The slot that the machine runs from: `A` or `B`.
    pub slot: String,
    /// Where the ESP of that disk is mounted.
    pub esp: PathBuf,
    /// Where that of the other one is mounted while it is written.
    pub other_esp: PathBuf,
    /// The variables of the firmware.
    pub efivars: PathBuf,
    /// The one with the last use.
    pub variable: Variable,
}

impl Config {
    /// The machine that this process runs on.
    #[must_use]
    pub fn live(environment: &Environment, tree: &Root) -> Self {
        Self {
            disk: environment.disk.clone(),
            sys: "/sys".into(),
            dev: "/dev".into(),
            slot: environment.slot.clone(),
            esp: tree.esp.mount.path().to_owned(),
            other_esp: tree.ephemeral.mirror.path().to_owned(),
            efivars: efivar::DIRECTORY.into(),
            variable: Variable::new(efivar::DIRECTORY.as_ref(), VARIABLE),
        }
    }
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The parameters of this machine.
    pub known: watch::Receiver<Known>,
    /// What the cluster manager wants of storage.
    pub wanted: watch::Receiver<Option<Wanted>>,
    /// Whether the data partition is there.
    pub storage: watch::Receiver<storage::Status>,
    /// Whether the node is ready: a disk is filled and written only then.
    pub ready: watch::Receiver<bool>,
    /// The requests to end the machine.
    pub end: watch::Sender<Option<Reason>>,
    /// On what the data partition lies.
    pub backing: watch::Sender<Option<Backing>>,
    /// The published status.
    pub status: watch::Sender<Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An owner of an input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl Service {
    /// Takes the mirror into use, if there is one, and monitors it until cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart finds the device there.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        let started = Box::pin(self.start(&ctx));
        let Some(started) = ctx.until_cancelled(started).await else { return Ok(()) };
        let mirror = match started {
            Ok(mirror) => mirror,
            Err(Stop::Trapdoor(error)) => match ctx.trapdoor(error.report()).await {},
            Err(Stop::Closed(closed)) => return Err(closed.into()),
        };
        ctx.healthy();
        let Some(mirror) = mirror else {
            ctx.cancelled().await;
            return Ok(());
        };
        let monitor = Box::pin(monitor::monitor(&mut self, &ctx, mirror));
        if let Some(ended) = ctx.until_cancelled(monitor).await {
            return Ok(ended?);
        }
        // Storage has ended before, or still uses it.
        if blocking(storage::backing::remove).await.is_ok() {
            info!("the device of the mirror is closed");
        }
        Ok(())
    }
}
