//! The service of the parameters: looks for them once a boot and publishes the result.
//!
//! ```text
//! [Looking] --fw_cfg's driver is not done--> [Waiting] --done, or FW_CFG_WAIT over--+
//!     |                                                                             v
//!     +------------------------------------------------------> read fw_cfg, ESP, SMBIOS
//!                                                                                   |
//!     +--nothing there, disk without a home, a disk may come---+                    v
//!     +------------------------------------------------------->+------> look at config disks
//!                                                             understood, or none | | not usable
//!                                                                     [Published]<+ +> trapdoor
//! ```
//!
//! Invariants:
//! - A published value never changes: a restarted run finds the same bytes.
//! - Parameters that cannot be used are never published.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use super::arrivals::Arrivals;
use super::config_disk::Disks;
use super::decide::{Place, decide, of_disks, of_machine};
use super::places::{FwCfg, Places};
use super::{Asking, Known, Platform};
use crate::storage;
use polis_base::files::File;
use polis_base::stage::{Stage, State};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// Between two looks at a driver that is not done. sysfs does not notify of changes, and the
/// driver is usually done within some hundredths of a second.
const POLL: Duration = Duration::from_millis(5);

/// The time after which the console shows what the boot waits for.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// The time after which the boot goes on without the driver of fw_cfg. Loading
/// it takes a tenth of a second on a slow machine.
const FW_CFG_WAIT: Duration = Duration::from_secs(10);

/// Between two looks at the disks. `init` still loads the drivers of some.
const DISK_POLL: Duration = Duration::from_millis(250);

/// The time for a disk with user data to appear on a machine that has nothing else, from the last
/// driver or disk that came: `init` loads the driver of a CD-ROM drive once this waits, and that
/// takes some seconds to find it.
const DISK_WAIT: Duration = Duration::from_secs(10);

/// The time after which a driver that still looks for its devices is not waited for: that of a
/// disk that never answers has no end.
const DRIVERS_WAIT: Duration = Duration::from_secs(60);

/// The time for disks that are read only to be compared.
const COMPARE_WAIT: Duration = Duration::from_secs(1);

/// Where to look.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where the devices are.
    pub dev: PathBuf,
    /// The file on the ESP.
    pub esp: File,
    /// The file on the ESP with what a caller in maintenance gave.
    pub given: File,
    /// The copy on the ESP of what a metadata service gave.
    pub kept: File,
    /// Where metadata services answer.
    pub metadata: SocketAddr,
    /// Where that of a platform answers a machine without IPv4.
    pub metadata_v6: fn(Platform) -> Option<SocketAddr>,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where to look.
    pub config: Config,
    /// Whether the disk has a home: a machine that has one waits for no disk with user data.
    pub storage: watch::Receiver<storage::Status>,
    /// Whether a metadata service is asked.
    pub asks: watch::Sender<Asking>,
    /// The result.
    pub known: watch::Sender<Known>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The thread that reads is gone.
    #[error("the thread that reads the parameters panicked")]
    Thread(#[source] tokio::task::JoinError),
    /// The owner of the disk ended.
    #[error(transparent)]
    Lost(#[from] Closed),
}

impl Service {
    /// Publishes the parameters of this machine, then waits to be cancelled.
    ///
    /// # Errors
    ///
    /// [`RunError`]; a restart is always right.
    pub async fn run(mut self, ctx: Context) -> Result<(), RunError> {
        ctx.stage(Stage::Parameters, State::Started);
        let places = Places::new(&self.config.sys, &self.config.esp, &self.config.given);
        let Some(fw_cfg) = ctx.until_cancelled(settle(&places, &ctx)).await else { return Ok(()) };
        let reading = tokio::task::spawn_blocking(move || of_machine(&places, fw_cfg));
        let Some(read) = ctx.until_cancelled(reading).await else { return Ok(()) };
        let mut looked = read.map_err(RunError::Thread)?;
        let other = looked.iter().any(Place::has_any);
        let Some(disks) = ctx.until_cancelled(self.disks(other, &ctx)).await else {
            return Ok(());
        };
        looked.extend(disks?);
        let own = looked.iter().any(Place::has_any);
        let cloud = Box::pin(self.of_cloud(own, &ctx));
        let Some(cloud) = ctx.until_cancelled(cloud).await else { return Ok(()) };
        looked.extend(cloud?);
        match decide(looked) {
            Ok(loaded) => {
                if let Some(warning) = &loaded.warning {
                    warn!("{warning}");
                }
                match &loaded.found {
                    Some((_, source)) => info!("node parameters from {source}"),
                    None => info!("no node parameters: {}", loaded.tried.join("; ")),
                }
                self.known.send_replace(Some(Arc::new(loaded)));
                // After the value, so that the network goes from one configuration to the other.
                self.asks.send_replace(false);
                ctx.stage(Stage::Parameters, State::Done);
                ctx.healthy();
                ctx.cancelled().await;
                Ok(())
            }
            Err(failed) => {
                let report = failed.error.report(failed.source, failed.tried);
                match ctx.trapdoor(report).await {}
            }
        }
    }
}

impl Service {
    /// Looks at disks with user data, and waits for one where it matters: a machine without a
    /// home, and without parameters in an `other` place. Cancel-safe.
    async fn disks(&self, other: bool, ctx: &Context) -> Result<Vec<Place>, RunError> {
        let disks = Disks::new(&self.config.sys, &self.config.dev);
        let start = Instant::now();
        let wait = if other { COMPARE_WAIT } else { DISK_WAIT };
        let (mut arrived, mut last) = (Arrivals::default(), start);
        loop {
            let sys = self.config.sys.clone();
            // In this order: what is there already is looked at.
            let now = tokio::task::spawn_blocking(move || Arrivals::of(&sys)).await;
            let now = now.map_err(RunError::Thread)?;
            // A disk that takes longer is waited for in the next look, and named until then.
            let seen = disks.look(PATIENCE).await;
            if now != arrived || now.is_loading() {
                (arrived, last) = (now, Instant::now());
            }
            // What is there is enough, once all of it has answered.
            let enough = other || !seen.found.is_empty() || is_home(&self.storage.borrow());
            let since = if enough { start } else { last };
            let over = since.elapsed() >= wait || start.elapsed() >= DRIVERS_WAIT;
            if over || enough && seen.silent.is_empty() {
                return Ok(of_disks(seen));
            }
            if start.elapsed() >= PATIENCE {
                ctx.stage(Stage::Parameters, State::Waiting(awaited(&seen.silent)));
            }
            tokio::time::sleep(DISK_POLL).await;
        }
    }
}

/// What the boot waits for while these disks do not answer, in words.
fn awaited(silent: &[String]) -> String {
    if silent.is_empty() {
        "a disk labelled cidata or config-2, since no other place has node parameters; attach one, \
         or the boot continues without it"
            .to_owned()
    } else {
        let silent = silent.join(" and ");
        format!(
            "{silent} to answer, which may carry node parameters; check the disk and its cable, or \
             pull it; the boot continues without it"
        )
    }
}

/// Whether the disk has a home, as far as it is known.
pub(super) fn is_home(status: &storage::Status) -> bool {
    !matches!(status, storage::Status::Starting | storage::Status::Absent { .. })
}

/// Waits until it is known whether fw_cfg has items. Cancel-safe.
async fn settle(places: &Places, ctx: &Context) -> FwCfg {
    let start = Instant::now();
    loop {
        let fw_cfg = places.fw_cfg();
        let waited = start.elapsed();
        if fw_cfg != FwCfg::Starting || waited >= FW_CFG_WAIT {
            return fw_cfg;
        }
        if waited >= PATIENCE {
            let what = "the driver of fw_cfg (module qemu_fw_cfg); without it the boot continues \
                        with the other places";
            ctx.stage(Stage::Parameters, State::Waiting(what.to_owned()));
        }
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
