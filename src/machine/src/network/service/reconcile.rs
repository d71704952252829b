//! The part of a run that brings the kernel to the wanted state: reads, plans, and applies the
//! difference.
//!
//! Invariants:
//! - Every look reads all of the state again, after each round of actions that make links, too.
//! - A refused action ends nothing: it is logged once, and tried again.
//!
//! What this module does not do: decide (`plan`, `primary`, `advertised`), or speak netlink
//! (`observe`, `apply`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use tokio::time::Instant;
use tracing::{info, warn};

use super::super::advertised::Dhcp;
use super::super::plan::{self, Action, Former, Layout, Observed, Wanted};
use super::super::view::name;
use super::super::{apply, observe, probe};
use super::{Config, Error, Run};
use crate::parameters::{self, Cidr};

/// Rounds of actions that make links: bonds before what is on them.
const ROUNDS_MAX: usize = 8;

impl Run {
    /// Brings the kernel to the wanted state; returns its state then.
    pub(super) async fn reconcile(&mut self) -> Result<Observed, Error> {
        let (mut observed, mut failed) = self.make_links().await?;
        let candidates = match &self.network {
            Some(network) => plan::candidates(&observed, network),
            None => Vec::new(),
        };
        if self.network.is_some() {
            self.leases.keep(&candidates);
        }
        self.hold(&observed, &candidates);
        self.hold_routers(&observed);
        self.hold_v6(&observed);
        self.look_at_routers(&observed, candidates.is_empty());
        let wanted = self.wanted(&observed);
        let renewed: Vec<_> = std::mem::take(&mut self.renewed).into_iter().collect();
        let actions = plan::actions(&observed, &wanted, self.former, &renewed);
        let nothing_to_do = actions.is_empty();
        self.apply(&observed, actions, &mut failed).await;
        // A renewal that the kernel has refused is tried again, too.
        let refused = |of: &(u32, Cidr)| failed.contains(&Action::AddAddress(of.0, of.1, None));
        self.renewed = renewed.into_iter().filter(refused).collect();
        self.failed = failed;
        if wanted.primary.is_some() {
            self.former = Former::Remove;
        }
        if !nothing_to_do {
            observed = self.observe().await?;
        }
        self.ask(&observed, &wanted);
        for (address, error) in self.conflicts.review(&observed) {
            info!("cannot ask which other machine has {address}: {error}");
        }
        Ok(observed)
    }

    /// Gives up leases that cannot be held any longer, and chooses among the others where the
    /// parameters do not say which link has the node's address. `candidates` may ask for one.
    fn hold(&mut self, observed: &Observed, candidates: &[u32]) {
        let mut given_up = self.leases.review(observed, Instant::now());
        if self.chooses() {
            let (leases, unplugged) = (self.leases.by_link(), self.leases.unplugged());
            let chosen =
                self.primary.review(observed, candidates, &leases, &unplugged, Instant::now());
            if let Some(link) = chosen.filter(|_link| candidates.len() > 1) {
                info!("the address of {} is the node's", name(observed, link));
            }
            if let Some(link) = self.primary.link() {
                given_up.extend(self.leases.give_way(link));
                if self.primary.is_final() {
                    self.leases.keep_only(link);
                }
            }
        }
        for (link, reason) in given_up {
            warn!("gives up the address of {}: {reason}", name(observed, link));
        }
    }

    /// Makes and removes bonds and VLANs; returns what the kernel has then, and what failed.
    async fn make_links(&mut self) -> Result<(Observed, BTreeSet<Action>), Error> {
        let mut failed = BTreeSet::new();
        let mut observed = self.observe().await?;
        for _round in 0..ROUNDS_MAX {
            let Some(network) = &self.network else { break };
            let mut actions = Layout::of(&observed, network).actions;
            actions.retain(|action| !failed.contains(action));
            if actions.is_empty() {
                break;
            }
            self.apply(&observed, actions, &mut failed).await;
            observed = self.observe().await?;
        }
        Ok((observed, failed))
    }

    async fn apply(
        &mut self,
        observed: &Observed,
        actions: Vec<Action>,
        failed: &mut BTreeSet<Action>,
    ) {
        for action in actions {
            if let Action::Up(link) | Action::Join { link, .. } = &action
                && let Some(card) = observed.links.get(link)
            {
                probe::ended(&self.service.config.sys, &card.name).await;
            }
            match apply::apply(&self.handle, &action).await {
                Ok(()) => self.applied(observed, &action),
                Err(error) => {
                    let action = action.timeless();
                    if !self.failed.contains(&action) {
                        warn!("the kernel refuses {action:?}: {error}");
                    }
                    failed.insert(action);
                }
            }
        }
    }

    pub(super) async fn observe(&mut self) -> Result<Observed, Error> {
        let Config { interfaces, sys, .. } = &self.service.config;
        let observed = observe::observe(&self.handle, *interfaces).await;
        let mut observed = observed.map_err(Error::Observe)?;
        observe::place(&mut observed, sys);
        Ok(observed)
    }

    /// Whether one of several links gives the node its address: the parameters do not say which.
    fn chooses(&self) -> bool {
        self.network.as_ref().is_some_and(parameters::Network::is_automatic)
    }

    pub(super) fn wanted(&self, observed: &Observed) -> Wanted {
        let leases = self.leases.by_link();
        let mut wanted = match self.network.as_ref().filter(|_network| self.chooses()) {
            None => plan::wanted(observed, self.network.as_ref(), &leases),
            Some(network) => {
                let leases = self.primary.in_use(leases, self.advertised.chosen());
                let mut wanted = plan::wanted(observed, Some(network), &leases);
                if !self.primary.is_final() {
                    wanted.dhcp = plan::all_ask(observed, network);
                }
                wanted
            }
        };
        if let Some(network) = &self.network {
            wanted.ipv6(observed, network, &self.v6.known());
        }
        if let Some(chosen) = self.advertised.chosen() {
            wanted.advertised(observed, chosen);
        }
        if let Some(network) = &self.network {
            let links = plan::listening(observed, Some(network));
            wanted.name_servers(&links, &self.v6.routers.servers);
        }
        wanted.restore(observed, &self.mtus);
        wanted
    }

    /// Chooses an address of the kernel where neither DHCP nor the parameters give one.
    fn look_at_routers(&mut self, observed: &Observed, nothing_asks: bool) {
        let mut leases = self.leases.by_link();
        if self.chooses() {
            // An unplugged link gives way to an address of another one.
            let unplugged = self.leases.unplugged();
            leases.retain(|link, _lease| !unplugged.contains(link));
        }
        let Some(network) = &self.network else { return };
        if plan::wanted(observed, Some(network), &leases).primary.is_some() {
            return self.advertised.rest();
        }
        let links = plan::routed(observed, network);
        let dhcp = if nothing_asks { Dhcp::Off } else { Dhcp::Asked };
        let chosen = self.advertised.review(observed, &links, dhcp, Instant::now());
        if let Some((link, cidr)) = chosen {
            let (name, from) = (name(observed, link), self.v6.origin(link, cidr));
            info!("no DHCP server answered: {cidr} on {name}, {from}, is the node's");
        }
    }

    fn applied(&mut self, observed: &Observed, action: &Action) {
        match action {
            Action::RemoveLink(link) => info!("{} is removed", name(observed, *link)),
            Action::AddBond(name, mode, _) => info!("made {name}: {mode}"),
            Action::AddVlan { name, .. } => info!("made {name}"),
            Action::Leave(link) => info!("{} leaves its bond", name(observed, *link)),
            Action::Join { link, bond } => {
                info!("{} joins {}", name(observed, *link), name(observed, *bond));
            }
            Action::Up(link) => info!("{} up", name(observed, *link)),
            Action::AddAddress(index, cidr, _) => {
                if !observed.addresses.contains(&(*index, *cidr)) {
                    info!("{} has the address {cidr}", name(observed, *index));
                }
                let link = observed.links.get(index);
                if let (Some(link), IpAddr::V4(v4)) = (link, cidr.address()) {
                    // Neighbours may remember another machine for this address. That is a
                    // courtesy: they find out by themselves, later.
                    let announced = self.conflicts.socket.announce(*index, link.mac.0, v4);
                    if let Err(error) = announced {
                        info!("cannot announce {v4} on {}: {error}", link.name);
                    }
                }
            }
            Action::RemoveAddress(link, cidr) => {
                info!("{} no longer has the address {cidr}", name(observed, *link));
            }
            Action::Mtu(link, mtu) => {
                info!("{} has an MTU of {mtu}", name(observed, *link));
                if let Some(before) = observed.links.get(link) {
                    self.mtus.entry(*link).or_insert(before.mtu);
                }
            }
            Action::Switch(link, ..) => {
                info!("the switches of {} for IPv6 are set", name(observed, *link));
            }
            Action::AddRoute(_) | Action::RemoveRoute(_) => {}
        }
    }
}
