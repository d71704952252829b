//! The service of the network: reads, plans, applies, publishes, waits, and again.
//!
//! ```text
//! [Started] --links up--> [Waiting for parameters] --known--> [Asking, or configured]
//!                                                                |            ^
//!                                      the kernel has the address|            |lease given up
//!                                                                v            |
//!                                                             [Addressed] ----+
//! ```
//!
//! While the parameters are asked of a metadata service, the network is that of a machine without
//! any; theirs takes its place once they are known.
//!
//! Links come up while the parameters are still unknown, so that the carrier is
//! there by the time they are. Interfaces that appear later, when `init` has
//! loaded their drivers, wake the service like every other change.
//!
//! Invariants:
//! - Only the kernel knows the state: after each wake-up, a run reads all of it again, and
//!   plans again. A run itself keeps only the leases of DHCP.
//! - The result of an earlier run stays until this one has an address.
//! - An order is in the record on the ESP before it is in force (`change`).
//! - A refused action ends nothing: it is logged once, and tried again.
//!
//! What this module does not do: decide (`plan`, `change`), or speak DHCP (`dhcp`, `dhcpv6`).

mod ordered;
mod six;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use futures::FutureExt as _;
use futures::channel::mpsc::UnboundedReceiver;
use futures::stream::{Stream, StreamExt as _};
use rtnetlink::{Handle, MulticastGroup};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_stream::StreamMap;
use tracing::{info, warn};

use super::advertised::{Advertised, Dhcp};
use super::change::Changes;
use super::dhcpv6;
use super::holding::{Holding, Spare};
use super::observe::Interfaces;
use super::plan::{self, Action, Former, Layout, Observed, Wanted};
use super::primary::Primary;
use super::view::{self, name};
use super::{Change, Order, Status, apply, dhcp, observe};
use crate::parameters::{self, Asking, Known};
use polis_base::files::File;
use polis_base::stage::{Stage, State};
use polis_base::sys::arp;
use polis_runtime::event;
use polis_runtime::save::Save as _;
use polis_runtime::supervisor::Context;

/// How long an address may take before the console shows what it waits for. A DHCP server
/// answers within half a second.
const PATIENCE: Duration = Duration::from_secs(2);

/// The kernel announces every change; a full socket may lose one, so all is read
/// again now and then.
const REVIEW: Duration = Duration::from_secs(60);

/// Wait before actions that failed are tried again.
const RETRY: Duration = Duration::from_secs(2);

/// Rounds of actions that make links: bonds before what is on them.
const ROUNDS_MAX: usize = 8;

/// Name servers in `resolv.conf`: the resolver reads no more.
const NAMESERVERS_MAX: usize = 3;

/// The values that do not change while the node runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which interfaces are configured.
    pub interfaces: Interfaces,
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// The file that the resolver reads.
    pub resolv_conf: File,
    /// The network that was confirmed, and the last order, on the ESP.
    pub record: File,
}

/// The service. A run holds all progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// The fixed part.
    pub config: Config,
    /// The parameters of this machine.
    pub known: watch::Receiver<Known>,
    /// The network that the cluster orders; `None` before the first message, and without one.
    pub order: watch::Receiver<Option<Order>>,
    /// Since when this machine is known to reach the cluster over its network.
    pub proof: watch::Receiver<Option<Instant>>,
    /// Whether they are asked for over the network, which is then that of a machine without any.
    pub asks: watch::Receiver<Asking>,
    /// The published status.
    pub status: watch::Sender<Status>,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No socket to the kernel.
    #[error("cannot open the kernel's network socket")]
    Connect(#[source] std::io::Error),
    /// The socket to the kernel closed.
    #[error("the kernel closed the network socket")]
    Closed,
    /// The kernel does not say what there is.
    #[error("cannot read links, addresses and routes")]
    Observe(#[source] rtnetlink::Error),
    /// No socket for router advertisements, or it failed.
    #[error("cannot receive router advertisements")]
    Routers(#[source] std::io::Error),
    /// The owner of the parameters ended.
    #[error(transparent)]
    Lost(#[from] event::Closed),
}

impl Service {
    /// Gives the node an address and keeps it, until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`]; a restart finds what this run left and goes on from there.
    pub async fn run(self, ctx: Context) -> Result<(), Error> {
        ctx.stage(Stage::Network, State::Started);
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv6Ifinfo,
        ];
        let (connection, handle, notices) =
            rtnetlink::new_multicast_connection(&groups).map_err(Error::Connect)?;
        let (changes, recorded) = ordered::recorded(&self.config.record).await;
        let known = configured(&self.known.borrow());
        let former = self.status.borrow().primary;
        let mut run = Run {
            service: self,
            ctx: ctx.clone(),
            handle,
            network: None,
            is_known: false,
            changes,
            recorded,
            said: Change::default(),
            mtus: BTreeMap::new(),
            faults: Vec::new(),
            holding: Holding::default(),
            primary: Primary::default(),
            advertised: Advertised::after(former),
            clients: StreamMap::new(),
            v6: six::V6::listen().map_err(Error::Routers)?,
            former: Former::Keep,
            renewed: None,
            failed: BTreeSet::new(),
            started: Instant::now(),
            resolv_conf: None,
        };
        if let Some((network, given)) = known {
            run.known(network, given);
        }
        tokio::select! {
            // Cancel-safe: only waits.
            () = ctx.cancelled() => Ok(()),
            // Ends with the run: the next run reads again what this cuts off.
            () = connection => Err(Error::Closed),
            ended = Box::pin(run.drive(notices)) => ended.map(|never| match never {}),
        }
    }
}

type Client = Pin<Box<dyn Stream<Item = dhcp::Event> + Send>>;

/// The knowledge of one run.
struct Run {
    service: Service,
    ctx: Context,
    handle: Handle,
    /// The one in force; `None` until the parameters are known, or asked for over the network.
    network: Option<parameters::Network>,
    is_known: bool,
    changes: Changes,
    /// The orders on the disk.
    recorded: Option<Vec<u8>>,
    /// The last change that was reported.
    said: Change,
    /// The MTU of cards before this run set another.
    mtus: BTreeMap<u32, u32>,
    /// Faults of the configuration that were logged.
    faults: Vec<String>,
    holding: Holding,
    primary: Primary,
    advertised: Advertised,
    clients: StreamMap<u32, Client>,
    v6: six::V6,
    former: Former,
    /// An address whose lease was just renewed.
    renewed: Option<(u32, parameters::Cidr)>,
    /// Actions whose last attempt failed: each failure is logged once.
    failed: BTreeSet<Action>,
    started: Instant,
    /// The last written content.
    resolv_conf: Option<String>,
}

/// The reason why a run woke.
enum Event {
    /// The kernel changed something, or time passed: everything is read again anyway.
    Look,
    Known(parameters::Network, bool),
    Dhcp(u32, dhcp::Event),
    Dhcpv6(u32, dhcpv6::Event),
}

impl Run {
    async fn drive(
        mut self,
        mut notices: UnboundedReceiver<Notice>,
    ) -> Result<std::convert::Infallible, Error> {
        loop {
            self.change().await?;
            let observed = self.reconcile().await?;
            let published = Instant::now();
            let waiting = self.publish(&observed).await;
            match self.next_event(&mut notices, waiting.then_some(published)).await? {
                Event::Look => {}
                Event::Known(network, given) => self.known(network, given),
                Event::Dhcp(link, event) => self.answered(&observed, link, event),
                Event::Dhcpv6(link, event) => self.answered_v6(&observed, link, event),
            }
        }
    }

    /// Brings the kernel to the wanted state; returns its state then.
    async fn reconcile(&mut self) -> Result<Observed, Error> {
        let (mut observed, mut failed) = self.make_links().await?;
        let candidates = match &self.network {
            Some(network) => plan::candidates(&observed, network),
            None => Vec::new(),
        };
        if self.network.is_some() {
            self.holding.keep(&candidates);
        }
        let spare = if self.chooses() { Spare::Any } else { Spare::Free };
        let given_up = self.holding.review(&observed, &candidates, spare, Instant::now());
        for (link, reason) in given_up {
            warn!("gives up the address of {}: {reason}", name(&observed, link));
        }
        if self.chooses() {
            let leases = self.holding.leases();
            let chosen = self.primary.review(&observed, &candidates, &leases, Instant::now());
            if let Some(link) = chosen.filter(|_link| candidates.len() > 1) {
                info!("the address of {} is the node's", name(&observed, link));
            }
            if let Some(link) = self.primary.link().filter(|_link| self.primary.is_final()) {
                self.holding.keep_only(link);
            }
        }
        self.hold_routers(&observed);
        self.hold_v6(&observed);
        self.look_at_routers(&observed, candidates.is_empty());
        let wanted = self.wanted(&observed);
        let actions = plan::actions(&observed, &wanted, self.former, self.renewed.take());
        let nothing_to_do = actions.is_empty();
        self.apply(&observed, actions, &mut failed).await;
        self.failed = failed;
        if wanted.primary.is_some() {
            self.former = Former::Remove;
        }
        if !nothing_to_do {
            observed = self.observe().await?;
        }
        self.ask(&observed, &wanted);
        Ok(observed)
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
            match apply::apply(&self.handle, &action).await {
                Ok(()) => self.applied(observed, &action),
                Err(error) => {
                    if !self.failed.contains(&action) {
                        warn!("the kernel refuses {action:?}: {error}");
                    }
                    failed.insert(action);
                }
            }
        }
    }

    async fn observe(&mut self) -> Result<Observed, Error> {
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

    fn wanted(&self, observed: &Observed) -> Wanted {
        let mut leases = self.holding.leases();
        let mut wanted = match self.network.as_ref().filter(|_network| self.chooses()) {
            None => plan::wanted(observed, self.network.as_ref(), &leases),
            Some(network) => {
                leases.retain(|link, _lease| self.primary.link() == Some(*link));
                let mut wanted = plan::wanted(observed, Some(network), &leases);
                if !self.primary.is_final() {
                    wanted.dhcp = plan::all_ask(observed, network);
                }
                wanted
            }
        };
        if let Some(network) = &self.network {
            wanted.six(observed, network, &self.v6.known());
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
        let leases = self.holding.leases();
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
                if let (Some(link), std::net::IpAddr::V4(v4)) = (link, cidr.address()) {
                    // Neighbours may remember another machine for this address. That is a
                    // courtesy: they find out by themselves, later.
                    if let Err(error) = arp::announce(*index, link.mac.0, v4) {
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

    /// Starts and ends DHCP clients.
    fn ask(&mut self, observed: &Observed, wanted: &Wanted) {
        let asking: Vec<u32> = self.clients.keys().copied().collect();
        for link in asking.iter().filter(|link| !wanted.dhcp.contains(link)) {
            self.clients.remove(link);
        }
        for index in wanted.dhcp.iter().filter(|link| !asking.contains(link)) {
            if let Some(link) = observed.links.get(index) {
                let client = dhcp::ask(*index, link.name.clone(), link.mac);
                self.clients.insert(*index, Box::pin(client));
            }
        }
        self.v6.ask(observed, &wanted.dhcpv6);
    }

    fn answered(&mut self, observed: &Observed, link: u32, event: dhcp::Event) {
        let name = name(observed, link);
        match event {
            dhcp::Event::Leased(lease) => {
                let (address, server) = (lease.address, lease.server);
                let seconds = lease.lifetime.as_secs();
                info!("DHCP server {server} leases {address} to {name} for {seconds} s");
                self.holding.answered(link, lease, Instant::now());
                self.renewed = Some((link, address));
            }
            dhcp::Event::Refused(refused) => {
                warn!("a DHCP server's answer on {name} cannot be used: {refused}");
            }
            dhcp::Event::Ended => {
                if let Some(lease) = self.holding.ended(link) {
                    warn!("the lease of {} on {name} ended", lease.address);
                }
            }
            dhcp::Event::Failed(error) => warn!("cannot ask DHCP on {name}: {error}"),
        }
    }

    /// Publishes the status; returns whether it still waits for an address or a card.
    async fn publish(&mut self, observed: &Observed) -> bool {
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
                [&self.holding, &self.v6.holding],
            ),
            faults: layout.faults,
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

    /// The awaited event of a node that has a lease already.
    fn settling(&self, observed: &Observed, settled: Instant) -> String {
        let leases = self.holding.leases();
        let have: Vec<_> = leases.keys().map(|link| name(observed, *link)).collect();
        format!(
            "an answer from a DHCP server on a card that comes before {}, which has one; for \
             {} s at most: configure the interface in the node parameters to wait for none",
            have.join(", "),
            left(settled)
        )
    }

    /// Waits for something to do. `waiting` is the time of the last report, where the node waits
    /// for an address or a card by it.
    async fn next_event(
        &mut self,
        notices: &mut UnboundedReceiver<Notice>,
        waiting: Option<Instant>,
    ) -> Result<Event, Error> {
        let latest = Instant::now() + if self.failed.is_empty() { REVIEW } else { RETRY };
        let patience = self.started + PATIENCE;
        let deadlines = [
            self.holding.deadline(),
            self.primary.deadline(),
            self.advertised.deadline(),
            self.v6.holding.deadline(),
            self.v6.routers.servers.deadline(),
            self.v6.routers.solicitations.deadline(),
            waiting.filter(|reported| patience > *reported).map(|_reported| patience),
        ];
        let deadline = next_look(&self.changes, &deadlines, latest);
        let (is_known, trying) = (self.is_known, self.changes.is_trying());
        tokio::select! {
            // Cancel-safe: a notice is taken or stays.
            notice = notices.next() => {
                let (notice, _from) = notice.ok_or(Error::Closed)?;
                self.v6.noticed(&notice);
                // One look is enough for all that has piled up.
                while let Some(Some((notice, _from))) = notices.next().now_or_never() {
                    self.v6.noticed(&notice);
                }
                Ok(Event::Look)
            }
            // Cancel-safe: the value stays where it is.
            network = event::until(&mut self.service.known, "parameters", configured),
                if !is_known => {
                let (network, given) = network?;
                Ok(Event::Known(network, given))
            }
            // Cancel-safe, both: they wait for event values.
            order = self.service.order.changed(), if is_known => {
                order.map_err(|_closed| event::Closed("the order of the network"))?;
                Ok(Event::Look)
            }
            proof = self.service.proof.changed(), if trying => {
                proof.map_err(|_closed| event::Closed("the proof of contact"))?;
                Ok(Event::Look)
            }
            // Cancel-safe, too.
            asks = event::until(&mut self.service.asks, "parameters", |asks| asks.then_some(())),
                if !is_known && self.network.is_none() => asks.map(|()| Event::Look).map_err(Into::into),
            // Cancel-safe, both: the clients keep their progress.
            Some((link, event)) = self.clients.next() => Ok(Event::Dhcp(link, event)),
            Some((link, event)) = self.v6.clients.next() => Ok(Event::Dhcpv6(link, event)),
            // Cancel-safe, too.
            changed = self.v6.routers.changed() => {
                changed.map(|()| Event::Look).map_err(Error::Routers)
            }
            // Cancel-safe: only waits.
            () = tokio::time::sleep_until(deadline) => Ok(Event::Look),
        }
    }
}

type Notice = (
    rtnetlink::packet_core::NetlinkMessage<netlink_packet_route::RouteNetlinkMessage>,
    rtnetlink::sys::SocketAddr,
);

/// The network of the parameters, once it is known whether there are any, and whether there are.
fn configured(known: &Known) -> Option<(parameters::Network, bool)> {
    let parameters = known.as_ref()?.parameters();
    let network = parameters.map(|parameters| parameters.network.clone());
    Some((network.unwrap_or_default(), parameters.is_some()))
}

/// When all is read again without an event: at the first deadline, `latest` otherwise. A deadline
/// that has passed since the last look is due at once, since only another look acts on it; after
/// that, it is none any more.
fn next_look(changes: &Changes, others: &[Option<Instant>], latest: Instant) -> Instant {
    let deadlines = others.iter().copied().chain([changes.deadline()]);
    deadlines.flatten().fold(latest, Instant::min)
}

/// The seconds until then, as a person reads them.
fn left(until: Instant) -> u64 {
    until.saturating_duration_since(Instant::now()).as_secs() + 1
}

fn resolv_conf(servers: &[std::net::IpAddr]) -> String {
    if servers.is_empty() {
        return "# No name server is known.\n".to_owned();
    }
    let lines = servers.iter().take(NAMESERVERS_MAX);
    lines.map(|server| format!("nameserver {server}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::change::TRIAL;
    use super::*;

    #[test]
    fn a_trial_that_ended_during_a_look_has_another_look_at_once() {
        let (mut changes, now) = (Changes::default(), Instant::now());
        changes.known(parameters::Network::default(), true);
        let nameservers = vec![std::net::IpAddr::from([192, 0, 2, 2])];
        let network = parameters::Network { nameservers, ..Default::default() };
        changes.take(&Order { number: 7, network: Some(network) }, None, now);
        // The look began before the end of the trial, and lasted until after it.
        let after = now + TRIAL + Duration::from_secs(1);
        let latest = after + REVIEW;
        assert_eq!(next_look(&changes, &[None], latest), now + TRIAL);
        changes.review(None, after);
        assert_eq!(next_look(&changes, &[None], latest), latest);
        let sooner = after + Duration::from_secs(1);
        assert_eq!(next_look(&changes, &[None, Some(sooner)], latest), sooner);
    }
}
