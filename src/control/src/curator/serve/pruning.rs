//! The pruning of issued certificates: while this curator leads, it removes the ones that
//! have ended from the lists and the CRLs of the authorities, once an hour.
//!
//! Without it these would grow with every renewal, for as long as the cluster lives.
//!
//! Invariant: a clock that no other confirms removes nothing. By one that is ahead, certificates
//! have ended that are valid: one that is not on the list any more cannot be revoked, and one that
//! is not on the CRL any more is accepted again.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{debug, info};

use super::Handlers;
use crate::consensus::client::User;
use crate::curator::error::Error;
use crate::curator::skew;
use polis_base::sys::clock;
use polis_machine::time::Ahead;
use polis_runtime::supervisor::Context;
use polis_wire::pki::{Namespace, front_proxy_authority, kubernetes_authority};

/// Certificates live for days.
const EVERY: Duration = Duration::from_secs(60 * 60);

/// Runs until cancelled.
#[derive(Clone)]
pub(in crate::curator) struct Pruning {
    pub(in crate::curator) handlers: Handlers,
    /// The measurements of this node.
    pub(in crate::curator) ahead: watch::Receiver<Ahead>,
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
        // A copy that is behind: the next pass has a better one.
        let Ok(voters) = lead.current().await else { return Ok(0) };
        if !skew::is_confirmed(&voters.borrow(), self.handlers.0.node, &self.ahead.borrow()) {
            debug!("no other clock confirms that of this node: no certificate is removed");
            return Ok(0);
        }
        let now = clock::now();
        let kubernetes = Namespace::new(lead.fenced(User::KubernetesPki)?, "");
        Ok(lead.store().prune(now).await?
            + kubernetes.prune(&kubernetes_authority(), now).await?
            + kubernetes.prune(&front_proxy_authority(), now).await?)
    }
}
