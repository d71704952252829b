//! The choice of the certificate that this node shows: the cluster's, or a temporary one
//! until then.
//!
//! ```text
//! [nothing] --waits for the key of its disk--> [its join key's] --home--> [the cluster's]
//!     |                                                                        ^
//!     +--------------------------------home------------------------------------+
//! ```

use tokio::sync::watch;

use polis_control::cluster::unlock::request::Open;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::rpc::Credentials;

/// Inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub(super) struct Service {
    /// The cluster's certificate, once this node is home.
    pub(super) home: watch::Receiver<Option<Credentials>>,
    /// Whether it waits for a key, and its certificate meanwhile.
    pub(super) waiting: watch::Receiver<Open>,
    /// The certificate in use.
    pub(super) shown: watch::Sender<Option<Credentials>>,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        loop {
            let home = self.home.borrow_and_update().clone();
            let waiting = self.waiting.borrow_and_update().credentials().cloned();
            self.shown.send_if_modified(|shown| {
                let best = home.or(waiting);
                // The certificate in use stays until a better one exists: closing the port
                // for a moment would not help.
                let better = best.is_some() && *shown != best;
                if better {
                    *shown = best;
                }
                better
            });
            let changed = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.home.changed() => {
                        changed.map_err(|_closed| Closed("the credentials"))
                    }
                    changed = self.waiting.changed() => {
                        changed.map_err(|_closed| Closed("the cluster"))
                    }
                }
            };
            match ctx.until_cancelled(changed).await {
                Some(changed) => changed?,
                None => return Ok(()),
            }
        }
    }
}
