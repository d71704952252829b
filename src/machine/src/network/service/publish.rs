//! The part of a run that publishes the status, and writes the file of the resolver.
//!
//! Invariants:
//! - `Status::primary` is an address that the kernel has.
//! - The file of the resolver is written before the address is published.

use std::net::IpAddr;

use tokio::time::Instant;
use tracing::{info, warn};

use super::super::Status;
use super::super::plan::{self, Layout, Observed};
use super::super::view::{self, name};
use super::{PATIENCE, Run};
use polis_base::stage::{Stage, State};
use polis_runtime::save::Save as _;

/// Name servers in `resolv.conf`: the resolver reads no more.
const NAMESERVERS_MAX: usize = 3;

impl Run {
    /// Publishes the status; returns whether it still waits for an address or a card.
    pub(super) async fn publish(&mut self, observed: &Observed) -> bool {
        let wanted = self.wanted(observed);
        let waiting = match (self.primary.deadline(), self.advertised.settled()) {
            (Some(settled), _) => Some(self.settling(observed, settled)),
            (None, Some(((link, cidr), settled))) => Some(format!(
                "an answer from a DHCP server, for {} s at most: without one, {cidr} on {}, {}, \
                 becomes the address of this node",
                left(settled),
                name(observed, link),
                self.v6.origin(link, cidr)
            )),
            (None, None) => plan::waiting(observed, self.network.as_ref(), &wanted),
        };
        let network = self.network.clone().unwrap_or_default();
        let layout = Layout::of(observed, &network);
        let missing = self.missing(observed, &wanted, &layout, waiting.as_ref());
        let is_waiting = waiting.is_some() || !layout.faults.is_empty();
        if self.started.elapsed() >= PATIENCE && self.faults != layout.faults {
            for fault in layout.faults.iter().filter(|fault| !self.faults.contains(fault)) {
                warn!("a part of the network configuration has no link: {fault}");
            }
            self.faults.clone_from(&layout.faults);
        }
        let shared = self.conflicts.sentences(observed);
        self.log_conflicts(&shared);
        let text = resolv_conf(&wanted.nameservers);
        if self.resolv_conf.as_ref() != Some(&text) {
            // Before the address is published: a service that waits for it may resolve names
            // at once.
            match self.service.config.resolv_conf.save(text.clone().into_bytes()).await {
                Ok(()) => self.resolv_conf = Some(text),
                Err(error) => warn!("cannot write the servers of the resolver: {error}"),
            }
        }
        match &waiting {
            Some(what) if self.started.elapsed() >= PATIENCE => {
                self.ctx.stage(Stage::Network, State::Waiting(what.clone()));
            }
            Some(_) => {}
            None => {
                self.ctx.stage(Stage::Network, State::Done);
                self.ctx.healthy();
            }
        }
        let there = wanted.primary.filter(|primary| observed.has(*primary));
        let status = Status {
            primary: there.map(|(_, cidr)| cidr.address()),
            gateway: wanted.gateway,
            nameservers: wanted.nameservers.clone(),
            ntp_servers: wanted.ntp_servers.clone(),
            interfaces: view::interfaces(
                observed,
                &wanted,
                &layout,
                [&self.leases, &self.v6.leases],
            ),
            faults: layout.faults.into_iter().chain(shared).collect(),
            change: self.changes.change(),
            waiting,
        };
        self.changes.applied(missing, Instant::now());
        self.service.status.send_if_modified(|published| {
            let changed = *published != status;
            *published = status;
            changed
        });
        is_waiting
    }

    /// Logs which addresses another machine has, too, once each.
    fn log_conflicts(&mut self, shared: &[String]) {
        for conflict in shared.iter().filter(|conflict| !self.shared.contains(conflict)) {
            warn!("{conflict}");
        }
        for conflict in self.shared.iter().filter(|conflict| !shared.contains(conflict)) {
            info!("no longer seen: {conflict}");
        }
        self.shared = shared.to_vec();
    }

    /// The awaited event of a node that has a lease already. The card that has the node's address
    /// is not named: its lease waits for nothing.
    fn settling(&self, observed: &Observed, settled: Instant) -> String {
        let leases = self.leases.by_link();
        let others = leases.keys().filter(|link| self.primary.link() != Some(**link));
        let have: Vec<_> = others.map(|link| name(observed, *link)).collect();
        format!(
            "an answer from a DHCP server on a card that comes before {}, which has one; for \
             {} s at most: configure the interface in the node parameters to wait for none",
            have.join(", "),
            left(settled)
        )
    }
}

/// The seconds until then, as a person reads them.
fn left(until: Instant) -> u64 {
    until.saturating_duration_since(Instant::now()).as_secs() + 1
}

fn resolv_conf(servers: &[IpAddr]) -> String {
    if servers.is_empty() {
        return "# No name server is known.\n".to_owned();
    }
    let lines = servers.iter().take(NAMESERVERS_MAX);
    lines.map(|server| format!("nameserver {server}\n")).collect()
}
