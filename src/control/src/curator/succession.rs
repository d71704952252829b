//! The succession: ends the lock of a leader that died together with etcd's leader.
//!
//! A new leader of etcd grants every lease its whole time anew, so that a holder which was cut
//! off for a moment keeps its lock. The lock of a holder that is dead lasts as long, from the
//! end of the election on. Where the machine of the holder was etcd's leader, the election
//! itself says that a majority does not receive its messages:
//!
//! ```text
//! etcd's leader moves away from the holder's machine
//!        |
//!        +--the holder takes a connection--> its lease decides, as always
//!        +--it takes none------------------> its lease is ended; the next in line leads
//! ```
//!
//! Safety does not depend on it: etcd refuses the writes of a leader that lost its lock.
//!
//! Invariants:
//! - Each election of etcd ends one lock at most, that of the machine that led etcd before it.
//!   An election takes a majority: a candidate that alone cannot reach the leader ends nothing.

use std::convert::Infallible;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::directory::{Directory, Leader};
use super::store::LEADERS;
use crate::consensus;
use crate::consensus::client::{self, Client};
use polis_runtime::event::Closed;
use polis_wire::identity::NodeId;

/// A machine in the same network takes a connection in milliseconds; a busy one, in some
/// hundred.
const DIAL_MAX: Duration = Duration::from_secs(1);

/// The delay before another attempt: etcd may be electing.
const RETRY: Duration = Duration::from_millis(200);

/// Watches the elections of etcd, on each node with a candidate.
#[derive(Debug)]
pub(super) struct Service {
    /// This node.
    pub(super) node: NodeId,
    /// How long the lease of a lock is.
    pub(super) lease: Duration,
    /// The curator's part of etcd.
    pub(super) client: Client,
    /// The node whose member leads etcd.
    pub(super) consensus: watch::Receiver<consensus::Status>,
    /// The holder of the lock.
    pub(super) directory: watch::Receiver<Directory>,
}

impl Service {
    /// Runs until it is dropped, which may happen at any moment.
    ///
    /// # Errors
    ///
    /// [`Closed`] when the member's status ended.
    pub(super) async fn run(mut self) -> Result<Infallible, Closed> {
        let mut led = None;
        loop {
            let leads = leading_node(&self.consensus.borrow_and_update());
            // Without a leader, an election is going on.
            if let Some(leads) = leads
                && let Some(before) = led.replace(leads)
                && before != leads
            {
                self.elected_after(before).await;
            }
            self.consensus.changed().await.map_err(|_closed| Closed("the etcd member"))?;
        }
    }

    /// etcd has another leader than the member of `before`.
    async fn elected_after(&self, before: NodeId) {
        let holder = self.directory.borrow().leader().cloned();
        let Some(holder) = holder.filter(|holder| holder.node == before) else { return };
        if before == self.node || answers(&holder).await {
            return;
        }
        // By then the lease has ended by itself.
        let end = Instant::now() + self.lease;
        while let Err(error) = self.end_lock_of(before).await {
            debug!(
                error = &error as &dyn std::error::Error,
                "cannot end the lock of a leader that does not answer yet"
            );
            if Instant::now() >= end {
                return;
            }
            sleep(RETRY).await;
        }
    }

    /// Ends the lock of `node`, if it is still the first.
    async fn end_lock_of(&self, node: NodeId) -> Result<(), client::Error> {
        let locks = self.client.list(LEADERS).await?.entries;
        let Some(first) = locks.into_iter().min_by_key(|lock| lock.created) else { return Ok(()) };
        let holds = Leader::read(&first.value).is_some_and(|leader| leader.node == node);
        if !holds || first.lease == 0 {
            return Ok(());
        }
        self.client.release_by_id(first.lease).await?;
        info!(%node, "the leader does not answer, and etcd has elected another: its lock is ended");
        Ok(())
    }
}

/// The node whose member leads etcd.
fn leading_node(status: &consensus::Status) -> Option<NodeId> {
    let leader = status.leader?;
    status.members.iter().find(|member| member.id == leader)?.node()
}

/// Whether the leader takes a connection. One without a known address counts as alive.
async fn answers(leader: &Leader) -> bool {
    let Some(address) = leader.address else { return true };
    let dialled = TcpStream::connect((address, leader.port));
    timeout(DIAL_MAX, dialled).await.is_ok_and(|connected| connected.is_ok())
}
