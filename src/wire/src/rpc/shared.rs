//! The shared state of a server's connections: its inputs, its limits, its counters.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::access::Table;
use super::access_list::AccessList;
use super::app::App;
use super::limits::{Bucket, Limits, Origin, Rates, Room};
use super::metrics::Metrics;
use super::peer::Caller;
use polis_base::sys::clock;

/// A call of a known caller that lacks the permission for it.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The caller.
    pub caller: Caller,
    /// The RPC.
    pub path: String,
    /// The permission that is missing.
    pub reason: String,
}

/// The state that all connections of a run share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) limits: Limits,
    pub(super) tls: ArcSwap<ServerConfig>,
    pub(super) access_list: watch::Receiver<Arc<AccessList>>,
    pub(super) table: Arc<Table>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) app: App,
    pub(super) refused: Option<mpsc::Sender<Refused>>,
    pub(super) reached: Option<watch::Sender<Option<Instant>>>,
    pub(super) untrusted: Mutex<Rates<Origin>>,
    pub(super) known: Mutex<Rates<String>>,
    pub(super) untrusted_room: Room<Origin>,
    pub(super) known_room: Room<String>,
    pub(super) stopping: CancellationToken,
    /// Which failed handshakes are logged.
    pub(super) logged: Mutex<Bucket>,
    /// Which closed connections of known callers are logged: others cannot use that up.
    pub(super) logged_known: Mutex<Bucket>,
}

impl Shared {
    /// Counts a handshake that failed, and logs it unless that would flood the log.
    pub(super) fn handshake_failed(&self, caller: SocketAddr, reason: &str) {
        self.metrics.handshakes_failed.up();
        if may_log(&self.logged) {
            info!(address = %caller, "a connection was refused: {reason}");
        }
    }

    /// Counts a connection without a place, and logs that of a known caller unless that would
    /// flood the log: such a caller may connect again at once.
    pub(super) fn crowded_out(&self, caller: &Caller, reason: &str) {
        self.metrics.crowded_out.up();
        let Caller { peer, address, .. } = caller;
        if peer.is_known() && may_log(&self.logged_known) {
            info!(%peer, %address, "a connection is closed: {reason}");
        }
    }
}

fn may_log(logged: &Mutex<Bucket>) -> bool {
    logged.lock().unwrap_or_else(PoisonError::into_inner).take(clock::uptime())
}
