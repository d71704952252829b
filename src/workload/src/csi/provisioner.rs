//! The provisioner of this node: watches claims and volumes, passes each of them to `reconcile`,
//! and sweeps what is left of removed volumes.
//!
//! Each worker watches all claims and volumes and acts on its own, so no node has to ask
//! another one anything. A watch begins anew every five minutes with every object that
//! exists, so nothing is missed for longer.
//!
//! What this module does not do: decide what an object asks for (`reconcile`), or mount (`node`).

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, warn};

use super::cluster::{Cluster, VOLUMES};
use super::reconcile::{AGAIN_FOR, Error, Kind, Pass};
use super::store::Store;
use super::trash::Swept;
use crate::api::Api;
use crate::parts::API_STARTS;
use crate::watch::Watch;
use polis_base::cause;
use polis_runtime::supervisor::{Context, blocking};
use polis_wire::identity::NodeId;

const CLAIMS: &str = "/api/v1/persistentvolumeclaims";

/// Between two attempts at what has failed or does not fit.
const RETRY: Duration = Duration::from_secs(5);

/// Between two looks for something to remove.
const SWEEP: Duration = Duration::from_secs(5);

/// After a sweep that failed: the disk, or what stands on it, has to change first.
const SWEEP_FAILED: Duration = Duration::from_secs(60);

/// Whether the provisioner sees claims and volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// It has not asked yet.
    #[default]
    Starting,
    /// It sees them.
    Watching,
    /// It does not.
    Failed {
        /// The last error.
        cause: String,
    },
}

/// The provisioner of one node. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Provisioner {
    /// The API server, asked as this driver on this node.
    pub api: Api,
    /// This node.
    pub node: NodeId,
    /// Its volumes.
    pub store: Store,
    /// The state that the rest of the node reads.
    pub status: watch::Sender<Status>,
}

impl Provisioner {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// None: a failed step is tried again.
    pub async fn run(self, ctx: Context) -> Result<(), std::convert::Infallible> {
        self.status.send_replace(Status::Starting);
        let mut pass = Pass::new(Cluster(self.api.clone()), self.node, self.store.clone());
        let mut lost = cause::Last::default();
        let begun = Instant::now();
        ctx.healthy();
        loop {
            let started = Instant::now();
            let round = Box::pin(self.round(&mut pass, &mut lost));
            let Some(ended) = ctx.until_cancelled(round).await else { return Ok(()) };
            if let Err(error) = &ended {
                self.failed(error, begun, &mut lost);
            }
            let pause = pause(&ended, started.elapsed());
            if ctx.until_cancelled(sleep(pause)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Shows why it does not see them, unless the first API server may still be starting.
    fn failed(&self, error: &Error, begun: Instant, lost: &mut cause::Last) {
        let cause = cause::line(error);
        let error = error as &dyn std::error::Error;
        let starting = *self.status.borrow() == Status::Starting;
        if starting && begun.elapsed() < API_STARTS {
            debug!(error, "the API server does not show the volumes yet");
            return;
        }
        if lost.is_new(&cause) {
            warn!(error, "lost sight of the volumes");
        }
        self.status.send_replace(Status::Failed { cause });
    }

    /// One pair of watches, from their start to the end of one.
    async fn round(&self, pass: &mut Pass<Api>, lost: &mut cause::Last) -> Result<(), Error> {
        // Objects that are left over from before keep no volume waiting.
        match pass.tidy().await {
            Ok(()) => pass.untidy.clear(),
            Err(error) => {
                if pass.untidy.is_new(&cause::line(&error)) {
                    warn!(error = &error as &dyn std::error::Error, "cannot tidy up every volume");
                }
            }
        }
        let mut claims = Watch::open(&self.api, CLAIMS).await?;
        let mut volumes = Watch::open(&self.api, VOLUMES).await?;
        lost.clear();
        self.status.send_replace(Status::Watching);
        // Every object comes again.
        pass.forget_waiting();
        let mut again = Instant::now() + RETRY;
        loop {
            let (event, kind) = tokio::select! {
                // Cancel-safe, all of them.
                event = claims.next() => (event?, Kind::Claim),
                event = volumes.next() => (event?, Kind::Volume),
                () = sleep_until(again) => {
                    let rest = if pass.again().await { RETRY } else { AGAIN_FOR };
                    again = Instant::now() + rest;
                    continue;
                }
            };
            match event {
                None => return Ok(()),
                Some(event) => pass.event(kind, event).await,
            }
        }
    }
}

/// The pause after watches that `lasted` so long: a server may end each watch at once, without an
/// error.
pub(super) fn pause(ended: &Result<(), Error>, lasted: Duration) -> Duration {
    match ended {
        Ok(()) => RETRY.saturating_sub(lasted),
        Err(_) => RETRY,
    }
}

/// Removes what is left of volumes, until cancelled.
///
/// # Errors
///
/// None: a failed step is tried again.
pub(super) async fn sweeper(store: Store, ctx: Context) -> Result<(), std::convert::Infallible> {
    ctx.healthy();
    let mut refused = cause::Last::default();
    loop {
        let next = store.clone();
        let wait = match blocking(move || next.sweep()).await {
            Ok(Swept::Part) => Duration::ZERO,
            Ok(Swept::All) => {
                refused.clear();
                SWEEP
            }
            Ok(Swept::Nothing) => SWEEP,
            Err(error) => {
                if refused.is_new(&cause::line(&error)) {
                    warn!(error = &error as &dyn std::error::Error, "cannot remove volumes");
                }
                SWEEP_FAILED
            }
        };
        if ctx.until_cancelled(sleep(wait)).await.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
#[path = "provisioner_tests.rs"]
mod tests;
