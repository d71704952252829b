//! The service of the network: reads, plans, applies, publishes, waits, and again.
//!
//! ```text
//! ordered    what the cluster orders        order --> the network in force
//! kept       the record of it on the ESP    written with a deadline
//! reconcile  what the kernel has            read, plan, apply the difference
//! publish    what others know               status, resolv.conf
//! wake       when there is something to do  announcements, event values, answers, deadlines
//! sockets    the way to the kernel          requests and announcements apart
//! ipv4       clients of DHCP
//! ipv6       clients of DHCPv6, and name servers of routers
//! ```
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
//!
//! What this module does not do: decide (`plan`, `change`), or speak DHCP (`dhcp`, `dhcpv6`).

mod ipv4;
mod ipv6;
mod kept;
mod ordered;
mod publish;
mod reconcile;
pub(super) mod sockets;
mod wake;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use rtnetlink::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use self::ipv4::Clients;
use self::ipv6::V6;
use self::kept::Kept;
use self::sockets::Sockets;
use self::wake::{Event, Notice, Noticed};
use super::advertised::Advertised;
use super::change::Changes;
use super::conflicts::Conflicts;
use super::leases::Leases;
use super::observe::Interfaces;
use super::plan::{Action, Former, Observed};
use super::primary::Primary;
use super::{Change, Order, Status};
use crate::parameters::{self, Asking, Known};
use polis_base::files::File;
use polis_base::stage::{Stage, State};
use polis_runtime::event;
use polis_runtime::supervisor::Context;

/// How long an address may take before the console shows what it waits for. A DHCP server
/// answers within half a second.
const PATIENCE: Duration = Duration::from_secs(2);

/// A look takes some milliseconds. A request waits without end for an answer that is lost: the next
/// run asks over another socket.
const LOOK_MAX: Duration = Duration::from_secs(60);

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
    /// An answer of the kernel is missing.
    #[error("the kernel has not answered within {} seconds", LOOK_MAX.as_secs())]
    Slow,
    /// The kernel does not say what there is.
    #[error("cannot read links, addresses and routes")]
    Observe(#[source] rtnetlink::Error),
    /// No socket for router advertisements, or it failed.
    #[error("cannot receive router advertisements")]
    Routers(#[source] std::io::Error),
    /// No socket for ARP, or it failed.
    #[error("cannot receive ARP messages")]
    Arp(#[source] std::io::Error),
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
        let Sockets { requests, handle, announcements, notices } =
            Sockets::open().map_err(Error::Connect)?;
        let (changes, recorded) = ordered::recorded(&self.config.record).await;
        let kept = Kept::new(self.config.record.clone(), recorded);
        let known = configured(&self.known.borrow());
        let former = self.status.borrow().primary;
        let mut run = Run {
            service: self,
            ctx: ctx.clone(),
            handle,
            network: None,
            is_known: false,
            changes,
            kept,
            said: Change::default(),
            mtus: BTreeMap::new(),
            faults: Vec::new(),
            conflicts: Conflicts::listen().map_err(Error::Arp)?,
            shared: Vec::new(),
            leases: Leases::default(),
            primary: Primary::default(),
            advertised: Advertised::after(former),
            clients: Clients::new(),
            v6: V6::listen().map_err(Error::Routers)?,
            former: Former::Keep,
            renewed: BTreeSet::new(),
            failed: BTreeSet::new(),
            noticed: Noticed::default(),
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
            () = requests => Err(Error::Closed),
            // The same.
            () = announcements => Err(Error::Closed),
            ended = Box::pin(run.drive(notices)) => ended.map(|never| match never {}),
        }
    }
}

/// The knowledge of one run.
struct Run {
    service: Service,
    ctx: Context,
    handle: Handle,
    /// The one in force; `None` until the parameters are known, or asked for over the network.
    network: Option<parameters::Network>,
    is_known: bool,
    changes: Changes,
    kept: Kept,
    /// The last change that was reported.
    said: Change,
    /// The MTU of cards before this run set another.
    mtus: BTreeMap<u32, u32>,
    /// Faults of the configuration that were logged.
    faults: Vec<String>,
    conflicts: Conflicts,
    /// Conflicts that were logged.
    shared: Vec<String>,
    leases: Leases,
    primary: Primary,
    advertised: Advertised,
    clients: Clients,
    v6: V6,
    former: Former,
    /// Addresses whose leases were renewed, until the kernel has their new ends.
    renewed: BTreeSet<(u32, parameters::Cidr)>,
    /// Actions whose last attempt failed: each failure is logged once.
    failed: BTreeSet<Action>,
    noticed: Noticed,
    started: Instant,
    /// The last written content.
    resolv_conf: Option<String>,
}

impl Run {
    async fn drive(
        mut self,
        mut notices: UnboundedReceiver<Notice>,
    ) -> Result<std::convert::Infallible, Error> {
        loop {
            let observed = in_time(Box::pin(self.look())).await?;
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

    /// Puts the network in force that is due, and returns what the kernel has then.
    async fn look(&mut self) -> Result<Observed, Error> {
        self.change().await?;
        self.reconcile().await
    }
}

/// The result of a look, or [`Error::Slow`].
async fn in_time<T>(look: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    timeout(LOOK_MAX, look).await.unwrap_or(Err(Error::Slow))
}

/// The network of the parameters, once it is known whether there are any, and whether there are.
fn configured(known: &Known) -> Option<(parameters::Network, bool)> {
    let parameters = known.as_ref()?.parameters();
    let network = parameters.map(|parameters| parameters.network.clone());
    Some((network.unwrap_or_default(), parameters.is_some()))
}

#[cfg(test)]
mod tests {
    use super::super::observe::observe;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_whose_answer_is_lost_ends_with_the_reason() {
        // Nothing reads this socket.
        let (_connection, handle, _messages) = rtnetlink::new_connection().unwrap();
        let look = async { observe(&handle, Interfaces::Hardware).await.map_err(Error::Observe) };
        let error = in_time(Box::pin(look)).await.unwrap_err();
        assert_eq!(error.to_string(), "the kernel has not answered within 60 seconds");
    }
}
