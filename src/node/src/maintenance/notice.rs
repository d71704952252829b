//! The text by which a person reaches this machine: for `init`, which shows it.

use std::net::SocketAddr;

use tokio::sync::watch;
use zeroize::Zeroizing;

use super::Shown;
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;

/// Inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone)]
pub(super) struct Service {
    /// The option with the code or the fingerprint.
    pub(super) gate: Zeroizing<String>,
    /// The addresses of this machine.
    pub(super) network: watch::Receiver<network::Status>,
    /// Where the server listens.
    pub(super) listening: watch::Receiver<Option<SocketAddr>>,
    /// The text.
    pub(super) shown: watch::Sender<Shown>,
}

impl Service {
    /// Runs until cancelled.
    pub(super) async fn run(mut self, ctx: Context) -> Result<(), Closed> {
        ctx.healthy();
        loop {
            let address = self.network.borrow_and_update().primary;
            let address = address.filter(|_| self.listening.borrow_and_update().is_some());
            let text = address.map(|address| {
                format!("polisctl maintenance describe {address} {}", self.gate.as_str())
            });
            let text = text.unwrap_or_default();
            self.shown.send_if_modified(|shown| {
                let changed = shown.text != text;
                shown.text = text;
                changed
            });
            let changed = async {
                tokio::select! {
                    // Cancel-safe, both: they wait for event values.
                    changed = self.network.changed() => changed.map_err(|_closed| Closed("the network")),
                    changed = self.listening.changed() => {
                        changed.map_err(|_closed| Closed("the server"))
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
