//! The pruning of issued certificates: while this curator leads, it removes the ones that
//! have ended from the list of the cluster's authority, once an hour.
//!
//! Without it the list would grow with every renewal, for as long as the cluster lives.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, info};

use super::Handlers;
use crate::curator::error::Error;
use polis_base::sys::clock;
use polis_runtime::supervisor::Context;

/// Certificates live for days.
const EVERY: Duration = Duration::from_secs(60 * 60);

/// Runs until cancelled.
#[derive(Clone)]
pub(in crate::curator) struct Pruning {
    pub(in crate::curator) handlers: Handlers,
}

impl Pruning {
    pub(in crate::curator) async fn run(self, ctx: Context) -> Result<(), Infallible> {
        ctx.healthy();
        loop {
            let pass = async {
                match self.prune().await {
                    Ok(0) => {}
                    Ok(pruned) => info!(pruned, "removed ended certificates from the list"),
                    // The next pass removes them.
                    Err(error) => {
                        debug!(error = &error as &dyn std::error::Error, "cannot prune");
                    }
                }
                sleep(EVERY).await;
            };
            // Boxed: the read of a certificate is large, and made once an hour.
            if ctx.until_cancelled(Box::pin(pass)).await.is_none() {
                return Ok(());
            }
        }
    }

    async fn prune(&self) -> Result<usize, Error> {
        let Ok(lead) = self.handlers.lead() else { return Ok(0) };
        Ok(lead.store().prune(clock::now()).await?)
    }
}
