//! The election: chooses the one curator that serves, with a lock in etcd.
//!
//! Runs beside every voter, below the curator's service. [`Leadership`] is its published
//! state; handlers take their write access from it and nowhere else.
//!
//! ```text
//!            own old locks ended, lease taken              the lock is the first
//! [starting] ---------------------------> [candidate] ---------------------------> [leading]
//!     ^                                     |   |                                   |  |  |
//!     +----- lease lost, or may be lost ----+   |        address changed: proclaim -+  |  |
//!     +----- lease lost, or may be lost --------|--------------------------------------+  |
//!     +----- asked to step down: behind the others in the queue --------------------------+
//!                                               |                                         |
//!                                    cancelled: changes end, lease given back, the next one
//!                                    leads at once
//! ```
//!
//! Two parties end a term: the leader's own clock, which knows when the lease may have run
//! out, and etcd, which refuses writes once it did. The first keeps a leader that is cut
//! off from answering questions; only the second is needed for safety. A leader that dies
//! together with etcd's leader does not keep its lock until the lease has run out:
//! [`succession`] ends it.
//!
//! Invariants:
//! - This curator calls itself leader only between winning the lock and the
//!   moment when its lease may have ended by its own clock.
//! - A candidate never waits behind a lock of its own.
//! - When a leader stops in order, the next candidate follows without waiting for a lease
//!   to run out.
//! - A change that ends within [`CHANGES_MAX`] is not cut off by an orderly stop.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::directory::{Directory, Leader};
use super::fenced::Fenced;
use super::store::{LEADERS, Store};
use super::succession;
use crate::consensus;
use crate::consensus::client::{self, Client, Lease};
use polis_base::cause;
use polis_base::sys::clock;
use polis_machine::network;
use polis_runtime::event::Closed;
use polis_runtime::supervisor::Context;
use polis_wire::identity::NodeId;

/// How long a leader may be silent. An election of etcd takes a second; a leader that needs
/// longer than this to answer is of no use.
pub const LEASE: Duration = Duration::from_secs(5);

/// The name of the election: [`LEADERS`] without its slash.
const ELECTION: &str = "leader";

/// The delay before another attempt: etcd may be electing.
const RETRY: Duration = Duration::from_millis(200);

/// How long a leader that stops waits for the changes under way. New ones begin meanwhile, so the
/// wait is bounded: it is shorter than a lease, so an orderly stop is not slower than a crash.
const CHANGES_MAX: Duration = Duration::from_secs(3);
const _: () = assert!(CHANGES_MAX.as_millis() < LEASE.as_millis());

/// The deadline of giving the lease back, which takes milliseconds; without a quorum it
/// never ends, and a stop does not wait for that.
const FAREWELL: Duration = Duration::from_secs(1);

/// The leader, as this curator knows it; an event value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Leadership {
    /// The leader; `None` without one, or if this member is cut off from etcd.
    pub leader: Option<Leader>,
    /// The term of this curator, if it leads itself.
    pub term: Option<Term>,
}

/// One term of leadership.
#[derive(Clone, Debug)]
pub struct Term {
    /// The write access of this term.
    pub store: Store<Fenced>,
    /// The start of the term.
    pub since: Instant,
    lock: client::Leadership,
    down: Arc<Notify>,
}

impl Term {
    /// The revision at which its lock was created: the candidacy began then, and the term perhaps
    /// days later.
    pub(super) fn revision(&self) -> i64 {
        self.lock.revision()
    }

    /// The write access of this term to another namespace.
    pub(super) fn fenced(&self, client: client::Client) -> Fenced {
        Fenced::new(client, self.lock.clone())
    }

    /// Ends the term in favour of the next candidate.
    pub fn step_down(&self) {
        self.down.notify_one();
    }
}

/// Equal if they come from the same election win.
impl PartialEq for Term {
    fn eq(&self, other: &Self) -> bool {
        self.lock == other.lock
    }
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Service {
    /// This node.
    pub node: NodeId,
    /// The port of its curator.
    pub port: u16,
    /// The curator's part of etcd.
    pub client: Client,
    /// The address that other nodes receive.
    pub network: watch::Receiver<network::Status>,
    /// Whether etcd has a leader.
    pub consensus: watch::Receiver<consensus::Status>,
    /// The copy of the records, the locks among them.
    pub directory: watch::Receiver<Directory>,
    /// Each change that runs holds a receiver of it.
    pub under_way: watch::Sender<()>,
    /// The published leadership.
    pub leadership: watch::Sender<Leadership>,
}

/// The reason why a candidacy ended.
enum Ended {
    Cancelled,
    SteppedDown,
    Lost(client::Error),
}

impl Service {
    /// Runs until cancelled.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the owner of an input ended.
    pub async fn run(self, ctx: Context) -> Result<(), Closed> {
        // A run that ended while it led does not lead any more.
        self.publish_term(None);
        let observed = self.clone().observe();
        let succession = succession::Service {
            node: self.node,
            lease: LEASE,
            client: self.client.clone(),
            consensus: self.consensus.clone(),
            directory: self.directory.clone(),
        };
        tokio::select! {
            // Cancel-safe: only waits and publishes.
            closed = observed => closed,
            // Cancel-safe: the services that it ends are ended as a whole.
            closed = succession.run() => closed.map(|never| match never {}),
            // Not cancel-safe, and never dropped except by a bug: it ends when cancelled.
            () = self.stand(&ctx) => Ok(()),
        }
    }

    /// Publishes the leader from the records, while etcd has a leader at all.
    async fn observe(mut self) -> Result<(), Closed> {
        loop {
            let connected = self.consensus.borrow_and_update().leader.is_some();
            let leader = self.directory.borrow_and_update().leader().cloned();
            let leader = leader.filter(|_| connected);
            self.leadership.send_if_modified(|known| {
                let changed = known.leader != leader;
                if changed {
                    known.leader.clone_from(&leader);
                }
                changed
            });
            tokio::select! {
                // Cancel-safe, both: they wait for event values.
                changed = self.consensus.changed() => {
                    changed.map_err(|_closed| Closed("the etcd member"))?;
                }
                changed = self.directory.changed() => {
                    changed.map_err(|_closed| Closed("the directory"))?;
                }
            }
        }
    }

    /// Stands as a candidate, again and again.
    async fn stand(&self, ctx: &Context) {
        let mut last = cause::Last::default();
        loop {
            let lease = match ctx.until_cancelled(Box::pin(self.enter())).await {
                None => return,
                Some(Ok(lease)) => lease,
                Some(Err(error)) => {
                    let error = cause::line(&error);
                    if last.is_new(&error) {
                        debug!(error, "cannot join the election yet");
                    }
                    if ctx.until_cancelled(tokio::time::sleep(RETRY)).await.is_none() {
                        return;
                    }
                    continue;
                }
            };
            let ended = tokio::select! {
                // Cancel-safe: only waits.
                () = may_stop(ctx, &self.under_way) => Ended::Cancelled,
                // Cancel-safe: ends by itself when it is not polled.
                error = self.client.keep(&lease) => Ended::Lost(error),
                // Cancel-safe: a win in there ends with the lease, below.
                ended = self.lead(ctx, &lease) => ended,
            };
            // First of all: this term must not count as valid any more.
            let led = self.publish_term(None);
            let back = tokio::time::timeout(FAREWELL, self.client.release(&lease));
            match (&ended, back.await) {
                (Ended::Cancelled | Ended::SteppedDown, Ok(Ok(()))) if led => {
                    info!(event = "led", "gave up the leadership");
                }
                (Ended::Lost(error), _) => {
                    let is_new = last.is_new(&cause::line(error));
                    let error = error as &dyn std::error::Error;
                    if led {
                        warn!(event = "led", error, "lost the leadership");
                    } else if is_new {
                        debug!(error, "lost the place in the queue for the leadership");
                    }
                }
                // No lease was lost, or the lease runs out by itself.
                (Ended::Cancelled | Ended::SteppedDown, _) => {}
            }
            if matches!(ended, Ended::Cancelled) {
                return;
            }
        }
    }

    /// Ends locks that an earlier run of this node left, and takes a lease.
    async fn enter(&self) -> Result<Lease, client::Error> {
        for lock in self.client.list(LEADERS).await?.entries {
            let own = Leader::read(&lock.value).is_some_and(|leader| leader.node == self.node);
            if own && lock.lease != 0 {
                debug!(lock = lock.key, "ending a lock of an earlier run");
                self.client.release_by_id(lock.lease).await?;
            } else if own {
                self.client.delete(&lock.key).await?;
            }
        }
        self.client.lease(LEASE).await
    }

    /// Waits for the lock, and keeps its public value right.
    async fn lead(&self, ctx: &Context, lease: &Lease) -> Ended {
        let mut network = self.network.clone();
        let mut address = network.borrow_and_update().primary;
        let mut since = clock::now();
        let value = self.value(address, since);
        // A candidate does its work by waiting.
        ctx.healthy();
        let lock = match self.client.campaign(ELECTION, value, lease).await {
            Ok(lock) => lock,
            Err(error) => {
                tokio::time::sleep(RETRY).await;
                return Ended::Lost(error);
            }
        };
        let down = Arc::<Notify>::default();
        let store = Store::new(Fenced::new(self.client.clone(), lock.clone()));
        let term =
            Term { store, since: Instant::now(), lock: lock.clone(), down: Arc::clone(&down) };
        info!(event = "leads", "this curator leads");
        self.publish_term(Some(term));
        // It may have waited for long.
        since = clock::now();
        let mut last = cause::Last::default();
        loop {
            while let Err(error) = self.client.proclaim(&lock, self.value(address, since)).await {
                let error = cause::line(&error);
                if last.is_new(&error) {
                    debug!(error, "cannot publish the address yet");
                }
                tokio::time::sleep(RETRY).await;
            }
            let moved = polis_runtime::event::until(&mut network, "the network", |status| {
                (status.primary != address).then_some(status.primary)
            });
            tokio::select! {
                // Cancel-safe: a permit that is not taken stays.
                () = down.notified() => return Ended::SteppedDown,
                // Cancel-safe: waits for an event value.
                moved = moved => match moved {
                    Ok(now) => address = now,
                    // The address stays what it was, for the rest of the term.
                    Err(Closed(_)) => {
                        down.notified().await;
                        return Ended::SteppedDown;
                    }
                }
            }
        }
    }

    fn value(&self, address: Option<IpAddr>, since: std::time::SystemTime) -> Vec<u8> {
        Leader { node: self.node, address, port: self.port, since }.to_message().encode_to_vec()
    }

    /// Publishes whether this curator leads; returns whether it did so far.
    fn publish_term(&self, term: Option<Term>) -> bool {
        let mut led = false;
        self.leadership.send_if_modified(|known| {
            led = known.term.is_some();
            let changed = known.term != term;
            known.term.clone_from(&term);
            changed
        });
        led
    }
}

/// Completes when the curator is to stop, and the changes under way have ended or had their time.
async fn may_stop(ctx: &Context, under_way: &watch::Sender<()>) {
    ctx.cancelled().await;
    if tokio::time::timeout(CHANGES_MAX, under_way.closed()).await.is_err() {
        let changes = under_way.receiver_count();
        warn!(changes, "gives up the leadership although changes are under way");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_stops_waits_for_the_changes_under_way_for_some_seconds() {
        for (change_takes, waits) in [(0, 0), (2, 2), (60, 3)] {
            let (ctx, handles) = Context::for_test();
            let under_way = watch::Sender::new(());
            let change = under_way.subscribe();
            let minute = Duration::from_secs(60);
            let early = tokio::time::timeout(minute, may_stop(&ctx, &under_way)).await;
            assert!(early.is_err(), "it is not to stop");
            handles.cancel().await;
            let begin = Instant::now();
            let change = async move {
                tokio::time::sleep(Duration::from_secs(change_takes)).await;
                drop(change);
            };
            let stop = async {
                may_stop(&ctx, &under_way).await;
                begin.elapsed().as_secs()
            };
            assert_eq!(tokio::join!(change, stop).1, waits, "{change_takes} s");
        }
    }
}
