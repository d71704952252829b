//! The part of a run that follows the orders of the cluster: takes them up, has the record on
//! the ESP kept, and reports how it stands with them.
//!
//! What this module does not do: decide when an order is confirmed or reverted (`change`), or wait
//! for the ESP (`kept`).

use tokio::time::Instant;
use tracing::{info, warn};

use super::super::Change;
use super::super::advertised::Advertised;
use super::super::change::Changes;
use super::super::plan::{Layout, Observed, Wanted};
use super::super::primary::Primary;
use super::{Error, Run};
use crate::parameters;
use polis_base::cause;
use polis_base::files::File;
use polis_runtime::supervisor::{Context, blocking};

impl Run {
    /// The parameters are known. A network that differs from that over which they were asked for
    /// replaces it as an ordered one does: see [`Self::change`].
    pub(super) fn known(&mut self, network: parameters::Network, given: bool) {
        if let Some(why) = self.changes.known(network, given) {
            warn!("the network of the parameters is in force: {why}");
        }
        self.is_known = true;
        if self.network.is_none() {
            self.network = self.changes.network().cloned();
        }
    }

    /// The network that is to be in force. Once the parameters are asked for over the network, it
    /// is that of a machine without any, until they are known.
    fn due(&self) -> Option<parameters::Network> {
        if self.is_known {
            return self.changes.network().cloned();
        }
        self.network.clone().or_else(|| self.service.asks.borrow().then(Default::default))
    }

    /// Takes up an order, ends a trial, and puts the network in force that follows.
    pub(super) async fn change(&mut self) -> Result<(), Error> {
        let order = self.service.order.borrow_and_update().clone();
        if let Some(order) = order.filter(|order| self.changes.is_new(order)) {
            let observed = self.observe().await?;
            let network = order.network.clone().unwrap_or_default();
            let fault = Layout::of(&observed, &network).faults.into_iter().next();
            self.changes.take(&order, fault, Instant::now());
        }
        let proof = *self.service.proof.borrow_and_update();
        self.changes.review(proof, Instant::now());
        self.record().await;
        let network = self.due();
        if network != self.network {
            self.network = network;
            // The former leases and the former choice belong to other links.
            self.primary = Primary::default();
            self.advertised = Advertised::after(self.service.status.borrow().primary);
            self.started = Instant::now();
        }
        Ok(())
    }

    /// Has the record kept, and reports the change.
    async fn record(&mut self) {
        if self.changes.change() != Change::default()
            && let Err(error) = self.kept.keep(self.changes.record()).await
        {
            self.changes.unwritten(&error);
        }
        let change = self.changes.change();
        if change != self.said {
            report(&self.ctx, &change);
            self.said = change;
        }
    }

    /// Why the kernel has not all of the network in force.
    pub(super) fn missing(
        &self,
        observed: &Observed,
        wanted: &Wanted,
        layout: &Layout<'_>,
        waiting: Option<&String>,
    ) -> Option<String> {
        if let Some(fault) = layout.faults.first() {
            return Some(fault.clone());
        }
        if !layout.actions.is_empty() || !self.failed.is_empty() {
            return Some("the kernel refuses a part of it; the log says why".to_owned());
        }
        match wanted.primary.filter(|primary| observed.has(*primary)) {
            Some(_) => None,
            None => Some(waiting.cloned().unwrap_or_else(|| "an address".to_owned())),
        }
    }
}

fn report(ctx: &Context, change: &Change) {
    let (state, cause) = (change.word(), &change.cause);
    match cause.as_str() {
        "" => info!(order = change.number, "the ordered network: {state}"),
        cause => warn!(order = change.number, cause, "the ordered network: {state}"),
    }
    ctx.lines().event(change.line());
}

/// The orders on the ESP, parsed, and the bytes there. A record that cannot be read counts as none.
pub(super) async fn recorded(file: &File) -> (Changes, Option<Vec<u8>>) {
    let record = file.clone();
    let bytes = match blocking(move || record.read()).await {
        Ok(bytes) => bytes,
        Err(error) => {
            let error = cause::line(&error);
            warn!(error, "cannot read the record of the network; that of the parameters counts");
            None
        }
    };
    let read = bytes.as_ref().map(|bytes| Changes::read(bytes)).transpose();
    let changes = read.unwrap_or_else(|error| {
        warn!(error, "cannot use the record of the network; that of the parameters counts");
        None
    });
    (changes.unwrap_or_default(), bytes)
}

#[cfg(test)]
mod tests {
    use polis_base::serial::EventLine;
    use polis_proto::v1::NetworkState;

    use super::*;

    #[test]
    fn a_change_is_one_event_line_with_one_time() {
        let (ctx, mut handles) = Context::for_test();
        let cause = "no curator\nwas reached".to_owned();
        report(&ctx, &Change { number: 7, state: NetworkState::Reverted, cause });
        let lines = handles.take_lines();
        let line = EventLine::parse(&lines[0]).unwrap();
        assert_eq!((lines.len(), line.all("t").count()), (1, 1), "{lines:?}");
        let start = "POLIS network state=reverted order=7 cause=\"no curator\\nwas reached\" t=";
        assert!(lines[0].starts_with(start), "{lines:?}");
    }
}
