//! The reconciler: applies the cluster's own objects, once the API server answers, and then
//! every hour.
//!
//! Every controller does so. To apply the same object twice changes nothing, so they need no
//! leader among them.
//!
//! What this module does not do: remove objects that a former version has applied. There are
//! none yet.

use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, info};

use super::api::{Api, Error};
use super::certificates::chain;
use super::objects;
use super::parts::{Part, PartState, Parts};
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// The delay after which a foreign change of an object is undone at the latest.
const EVERY: Duration = Duration::from_secs(60 * 60);

/// After a failed pass: the API server may just be starting again.
const RETRY: Duration = Duration::from_secs(2);

/// Runs until cancelled.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The client for the API server, with the rights of `system:masters`.
    pub(super) api: Api,
    pub(super) parts: Parts,
}

impl Service {
    pub(super) async fn run(self, ctx: Context) -> Result<(), Closed> {
        let ready = self.parts.ready(Part::ApiServer);
        let Some(ready) = ctx.until_cancelled(ready).await else { return Ok(()) };
        ready?;
        loop {
            let Some(done) = ctx.until_cancelled(self.pass()).await else { return Ok(()) };
            let wait = match done {
                Ok(()) => {
                    ctx.healthy();
                    self.parts.set(Part::Reconciler, PartState::Ready);
                    EVERY
                }
                Err(error) => {
                    debug!(error = &error as &dyn std::error::Error, "cannot apply an object");
                    self.parts.fail(Part::Reconciler, chain(&error));
                    RETRY
                }
            };
            if ctx.until_cancelled(sleep(wait)).await.is_none() {
                return Ok(());
            }
        }
    }

    async fn pass(&self) -> Result<(), Error> {
        let objects = objects::all();
        for object in &objects {
            self.api.apply(object).await?;
        }
        info!(objects = objects.len(), "the cluster's own objects are in place");
        Ok(())
    }
}
