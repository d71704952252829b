//! The listener of a server; it gives each connection a task of its own.
//!
//! ```text
//! [waiting] --credentials--> [listening] --cancelled--> [stopping] --all ended, or too late--> end
//!                              ^     |
//!                              +-----+ new credentials: for the next connection
//! ```
//!
//! Invariants:
//! - The port is closed until there are credentials to serve with.
//! - Every task of the server ends with its run.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, error, info, warn};

use super::access::Table;
use super::access_list::AccessList;
use super::app::App;
use super::limits::{Bucket, Full, Limits, Origin, Rates, Room};
use super::metrics::Metrics;
use super::shared::{Refused, Shared};
use super::tls::Credentials;
use super::{connection, tls};
use polis_runtime::event::{Closed, until};
use polis_runtime::supervisor::Context;

/// Connections that wait to be accepted.
pub(super) const BACKLOG: u32 = 1024;
/// Wait after a connection could not be accepted for lack of a resource.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Failed handshakes that are logged, and connections that known callers lose: so many of each a
/// second, so many at once.
const LOGGED: (u32, u32) = (1, 10);

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Listen {
    /// On this port of every address that the machine has or will have.
    Everywhere(u16),
    /// On a socket that is bound already.
    Bound(Arc<StdListener>),
}

/// The configuration, fixed for the life of the server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name of the server in the log.
    pub name: &'static str,
    /// Where it listens.
    pub listen: Listen,
    /// The limits of callers.
    pub limits: Limits,
}

/// Configuration, inputs and outputs. Cloned into every run; holds no progress.
#[derive(Clone, Debug)]
pub struct Server {
    /// The configuration.
    pub config: Config,
    /// The credentials in use; the port is closed while they are absent.
    pub credentials: watch::Receiver<Option<Credentials>>,
    /// Those for clients that ask for another name than that of the node; callers are verified by
    /// the authorities of `credentials` all the same. `None`: the server has one certificate.
    pub named: Option<watch::Receiver<Option<Credentials>>>,
    /// The nodes and users that have access.
    pub access_list: watch::Receiver<Arc<AccessList>>,
    /// The rule of each RPC.
    pub table: Arc<Table>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The services.
    pub app: App,
    /// Receives the calls of known callers that lack a permission; `None`: they are counted
    /// only. Calls beyond its capacity are dropped.
    pub refused: Option<mpsc::Sender<Refused>>,
    /// Learns the latest time at which a connection of a known caller on another machine was
    /// accepted, at the first call of the connection that is admitted: both directions work then.
    /// `None`: nothing asks.
    pub reached: Option<watch::Sender<Option<Instant>>>,
    /// Where it listens, while it does.
    pub listening: watch::Sender<Option<SocketAddr>>,
}

/// Why a run ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port cannot be bound.
    #[error("cannot listen on port {port}")]
    Listen {
        /// The port.
        port: u16,
        /// The kernel's error.
        source: io::Error,
    },
    /// The credentials are unusable.
    #[error("cannot serve with the certificate that was given")]
    Credentials(#[source] rustls::Error),
    /// An input ended.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl Server {
    /// Serves until cancelled.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn run(mut self, ctx: Context) -> Result<(), Error> {
        let first = until(&mut self.credentials, "the credentials", Clone::clone);
        let Some(first) = ctx.until_cancelled(first).await else { return Ok(()) };
        let config = self.configuration(&first?).map_err(Error::Credentials)?;
        let listener = self.listen()?;
        let address = listener.local_addr().map_err(|source| self.cannot_listen(source))?;
        let limits = self.config.limits.clone();
        let shared = Arc::new(Shared {
            tls: ArcSwap::from_pointee(config),
            access_list: self.access_list.clone(),
            table: Arc::clone(&self.table),
            metrics: Arc::clone(&self.metrics),
            app: self.app.clone(),
            refused: self.refused.clone(),
            reached: self.reached.clone(),
            untrusted: Mutex::new(Rates::untrusted(&limits)),
            known: Mutex::new(Rates::known(&limits)),
            untrusted_room: Room::new(
                limits.untrusted,
                limits.untrusted_per_address,
                Full::Replace,
            ),
            known_room: Room::new(limits.known, limits.known_per_name, Full::Share),
            stopping: CancellationToken::new(),
            logged: Mutex::new(Bucket::new(LOGGED)),
            logged_known: Mutex::new(Bucket::new(LOGGED)),
            limits,
        });
        info!(port = address.port(), "{} serves", self.config.name);
        self.listening.send_replace(Some(address));
        ctx.healthy();
        let mut connections = JoinSet::new();
        let _cancelled =
            ctx.until_cancelled(self.accept(&shared, &listener, &mut connections)).await;
        drop(listener);
        self.listening.send_replace(None);
        shared.stopping.cancel();
        let ended = async { while connections.join_next().await.is_some() {} };
        if timeout(shared.limits.stop, ended).await.is_err() {
            debug!(left = connections.len(), "connections are cut because they did not end");
        }
        Ok(())
    }

    /// Accepts connections without end.
    async fn accept(
        &mut self,
        shared: &Arc<Shared>,
        listener: &TcpListener,
        connections: &mut JoinSet<()>,
    ) {
        let limits = &shared.limits;
        let handshakes = Room::new(limits.handshakes, limits.handshakes_per_address, Full::Replace);
        loop {
            tokio::select! {
                // Cancel-safe per its documentation.
                accepted = listener.accept() => match accepted {
                    Ok((tcp, address)) => {
                        start(shared, &handshakes, tcp, address, connections);
                    }
                    Err(error) => {
                        warn!("cannot accept a connection: {error}");
                        sleep(ACCEPT_RETRY).await;
                    }
                },
                // Cancel-safe: waits for an event value.
                Ok(()) = changed(&mut self.credentials, self.named.as_mut()) => {
                    self.renew(shared);
                }
                // Cancel-safe per its documentation.
                Some(_ended) = connections.join_next() => {}
            }
        }
    }

    /// Uses new credentials for new connections.
    fn renew(&mut self, shared: &Shared) {
        // Also without own credentials: an unseen value would be new again at once.
        if let Some(named) = &mut self.named {
            named.mark_unchanged();
        }
        let Some(credentials) = self.credentials.borrow_and_update().clone() else { return };
        match self.configuration(&credentials) {
            Ok(config) => {
                shared.tls.store(Arc::new(config));
                info!("{} has new credentials", self.config.name);
            }
            Err(error) => error!("the new credentials are unusable, the old ones stay: {error}"),
        }
    }

    /// With these credentials, and those of now for other names.
    fn configuration(&mut self, own: &Credentials) -> Result<ServerConfig, rustls::Error> {
        let named = self.named.as_mut().and_then(|named| named.borrow_and_update().clone());
        tls::server(own, named.as_ref(), self.access_list.clone(), self.app.alpn())
    }

    fn listen(&self) -> Result<TcpListener, Error> {
        match &self.config.listen {
            Listen::Everywhere(port) => everywhere(*port),
            Listen::Bound(bound) => bound.try_clone().and_then(|bound| {
                bound.set_nonblocking(true)?;
                TcpListener::from_std(bound)
            }),
        }
        .map_err(|source| self.cannot_listen(source))
    }

    fn cannot_listen(&self, source: io::Error) -> Error {
        let port = match &self.config.listen {
            Listen::Everywhere(port) => *port,
            Listen::Bound(bound) => bound.local_addr().map_or(0, |address| address.port()),
        };
        Error::Listen { port, source }
    }
}

/// Waits until one of the two changes. The owner of the second one may end before.
async fn changed(
    own: &mut watch::Receiver<Option<Credentials>>,
    named: Option<&mut watch::Receiver<Option<Credentials>>>,
) -> Result<(), RecvError> {
    let Some(named) = named else { return own.changed().await };
    tokio::select! {
        // Cancel-safe, both: each waits for an event value.
        changed = own.changed() => changed,
        Ok(()) = named.changed() => Ok(()),
    }
}

fn start(
    shared: &Arc<Shared>,
    handshakes: &Room<Origin>,
    tcp: TcpStream,
    address: SocketAddr,
    connections: &mut JoinSet<()>,
) {
    // A caller over IPv4 has one address, through either kind of socket.
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    shared.metrics.accepted.up();
    let Some(place) = handshakes.enter(address.ip().into()) else { return };
    let shared = Arc::clone(shared);
    let serve = async move {
        let metrics = Arc::clone(&shared.metrics);
        metrics.open.up();
        let _open = Leaving(&metrics);
        connection::serve(shared, tcp, address, place).await;
    };
    connections.spawn(serve.in_current_span());
}

/// Counts a connection out, however it ends.
struct Leaving<'a>(&'a Metrics);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.open.down();
    }
}

/// A socket for both address families where both exist.
fn everywhere(port: u16) -> io::Result<TcpListener> {
    let bind = |socket: TcpSocket, address: SocketAddr| {
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    match TcpSocket::new_v6() {
        Ok(socket) => bind(socket, (Ipv6Addr::UNSPECIFIED, port).into()),
        Err(_no_ipv6) => bind(TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, port).into()),
    }
}
