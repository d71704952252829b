//! The service of one connection, from its first byte to its end.
//!
//! ```text
//! [handshake] --in time--> [serving] --+-- the caller hangs up
//!      |                               +-- its access_list is lost: cut
//!      +-- too slow, refused,          +-- an answer is left lying: cut
//!          or crowded out              +-- idle, or the server stops: no new calls, then the end
//! ```
//!
//! Invariants:
//! - Everything that a connection started ends with it.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, Interval, interval, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, trace};

use super::access_list::AccessList;
use super::app::App;
use super::body::{Activity, End};
use super::call::Line;
use super::limits::{Origin, Place, Quota};
use super::peer::{self, Caller, Peer};
use super::shared::Shared;
use polis_base::sys::clock;

/// Bytes of an answer that wait for room at the caller, on each stream.
const SEND_BUFFER: usize = 64 << 10;
/// Bytes of requests that a caller may send ahead, on each stream and in all.
const WINDOW: u32 = 64 << 10;
const WINDOW_ALL: u32 = 256 << 10;
/// Bytes of the headers of one call: ours have some hundred.
const HEADERS_MAX: u32 = 16 << 10;
/// The same of one request to a gateway; a server of Kubernetes accepts a megabyte.
const GATEWAY_HEADERS_MAX: usize = 64 << 10;
/// A tunnel or a watch may be silent for hours.
const KEEP_ALIVE: KeepAlive = KeepAlive {
    idle: Duration::from_secs(30),
    interval: Duration::from_secs(10),
    probes: 3,
    unacknowledged_ms: 60_000,
};
/// How long a peer that has lost its access may take to receive the reason.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Longest pause between two looks at a connection.
const LOOK: Duration = Duration::from_secs(5);

/// The place of a connection while it is served.
#[derive(Debug)]
enum Held {
    Untrusted(Place<Origin>),
    Known(Place<String>),
}

impl Held {
    fn lost(&self) -> &CancellationToken {
        match self {
            Self::Untrusted(place) => &place.lost,
            Self::Known(place) => &place.lost,
        }
    }

    fn quota(&self) -> &Quota {
        match self {
            Self::Untrusted(place) => &place.quota,
            Self::Known(place) => &place.quota,
        }
    }
}

/// Runs the streams of one connection, and ends them with it.
#[derive(Clone, Debug, Default)]
struct Streams(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while streams.try_join_next().is_some() {}
        streams.spawn(stream.in_current_span());
    }
}

/// Serves the peer at the other end of `tcp`.
pub(super) async fn serve(
    shared: Arc<Shared>,
    tcp: TcpStream,
    caller: std::net::SocketAddr,
    place: Place<Origin>,
) {
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
    let reached = from_afar(&tcp, caller).then(Instant::now);
    let acceptor = TlsAcceptor::from(shared.tls.load_full());
    // What is large is in a box of its own, and ends with it: a task has room for all that it ever
    // moves, and ten thousand nodes each have a connection that rests.
    let handshake = timeout(shared.limits.handshake, Box::pin(acceptor.accept(tcp)));
    let accepted = tokio::select! {
        // Cancel-safe, all three: the connection ends with the attempt.
        accepted = handshake => accepted,
        () = place.lost.cancelled() => {
            shared.metrics.crowded_out.up();
            return;
        }
        () = shared.stopping.cancelled() => return,
    };
    let tls = match accepted {
        Ok(Ok(tls)) => Box::new(tls),
        Ok(Err(error)) => return shared.handshake_failed(caller, &error.to_string()),
        Err(_elapsed) => return shared.handshake_failed(caller, "it took too long"),
    };
    if matches!(shared.app, App::Gateway(_)) {
        KEEP_ALIVE.set(tls.get_ref().0);
    }
    let session = tls.get_ref().1;
    if !shared.app.speaks(session.alpn_protocol()) {
        return shared.handshake_failed(caller, "it did not ask for the protocol of this port");
    }
    let shown = session.peer_certificates().and_then(|shown| shown.first());
    let caller = match identify(shown.map(|der| &**der), caller) {
        Ok(caller) => caller,
        Err(unfit) => return shared.handshake_failed(caller, &unfit.to_string()),
    };
    let held = match &caller.peer {
        Peer::None | Peer::Key(_) => {
            shared.untrusted_room.enter(caller.address.ip().into()).map(Held::Untrusted)
        }
        Peer::Node(_) | Peer::User { .. } => {
            shared.known_room.enter(caller.peer.to_string()).map(Held::Known)
        }
    };
    drop(place);
    let Some(held) = held else {
        return shared.crowded_out(&caller, "its peer has as many as it may have now");
    };
    trace!(peer = %caller.peer, address = %caller.address, "connected");
    let (activity, end) = (Activity::new(), End::new(&shared.stopping));
    let quota = held.quota().clone();
    let line = Arc::new(Line::new(shared, caller, reached, activity, end, quota));
    http(&line, &held, TokioIo::new(tls)).await;
}

/// Whether the caller is on another machine.
fn from_afar(tcp: &TcpStream, caller: std::net::SocketAddr) -> bool {
    tcp.local_addr().is_ok_and(|own| is_afar(own.ip(), caller.ip()))
}

/// A caller on this machine has the address that it calls: the kernel chooses it for a connection
/// to itself.
fn is_afar(own: IpAddr, caller: IpAddr) -> bool {
    let (own, caller) = (own.to_canonical(), caller.to_canonical());
    !caller.is_loopback() && own != caller
}

/// How long the kernel keeps a connection whose other end has vanished: a machine that loses its
/// power closes none.
#[derive(Clone, Copy, Debug)]
pub struct KeepAlive {
    /// The silence after which the kernel probes the other end.
    pub idle: Duration,
    /// Between two probes.
    pub interval: Duration,
    /// The probes without an answer that end the connection.
    pub probes: u32,
    /// How long the other end may leave bytes unacknowledged, in milliseconds. Without a bound the
    /// kernel sends them again for a quarter of an hour, and does not probe meanwhile.
    pub unacknowledged_ms: u32,
}

impl KeepAlive {
    /// Lets the kernel detect and close such a connection.
    pub fn set(self, tcp: &TcpStream) {
        use rustix::net::sockopt::{
            set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
            set_tcp_user_timeout,
        };
        let set = set_socket_keepalive(tcp, true)
            .and_then(|()| set_tcp_keepidle(tcp, self.idle))
            .and_then(|()| set_tcp_keepintvl(tcp, self.interval))
            .and_then(|()| set_tcp_keepcnt(tcp, self.probes))
            .and_then(|()| set_tcp_user_timeout(tcp, self.unacknowledged_ms));
        if let Err(error) = set {
            debug!("cannot set the options of a socket: {error}");
        }
    }
}

/// The peer that showed this certificate. `tls` has checked its signature.
fn identify(shown: Option<&[u8]>, address: std::net::SocketAddr) -> Result<Caller, peer::Unfit> {
    let caller = |peer, certificate| Caller { peer, address, certificate };
    let Some(der) = shown else { return Ok(caller(Peer::None, None)) };
    match peer::self_signed_key(der).ok_or(peer::Unfit::Unreadable)? {
        Some(key) => Ok(caller(Peer::Key(key), None)),
        None => {
            let (peer, certificate) = peer::certified(der)?;
            Ok(caller(peer, Some(certificate)))
        }
    }
}

async fn http<I>(line: &Arc<Line>, held: &Held, io: TokioIo<I>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = &line.shared.limits;
    let access_list = &mut line.shared.access_list.clone();
    // A peer without access at the start receives the reason at its first call.
    access_list.mark_unchanged();
    let service = service_fn({
        let line = Arc::clone(line);
        move |request| {
            let line = Arc::clone(&line);
            async move { line.call(request).await }
        }
    });
    match &line.shared.app {
        App::Grpc(_) => {
            let streams = match held {
                Held::Untrusted(_) => limits.untrusted_streams,
                Held::Known(_) => limits.streams,
            };
            let connection = http2::Builder::new(Streams::default())
                .timer(TokioTimer::new())
                .max_concurrent_streams(streams)
                .initial_stream_window_size(WINDOW)
                .initial_connection_window_size(WINDOW_ALL)
                .max_send_buf_size(SEND_BUFFER)
                .max_header_list_size(HEADERS_MAX)
                .keep_alive_interval(limits.keep_alive)
                .keep_alive_timeout(limits.keep_alive_answer)
                .serve_connection(io, service);
            let connection = Box::pin(connection);
            drive(line, held, access_list, connection, |connection| connection.graceful_shutdown())
                .await;
        }
        App::Page(_) => {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.handshake)
                .max_buf_size(HEADERS_MAX as usize)
                .serve_connection(io, service);
            let connection = Box::pin(connection);
            drive(line, held, access_list, connection, |connection| connection.graceful_shutdown())
                .await;
        }
        App::Gateway(_) => {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                // It runs between two requests, too.
                .header_read_timeout(limits.idle)
                .max_buf_size(GATEWAY_HEADERS_MAX)
                .serve_connection(io, service)
                .with_upgrades();
            let connection = Box::pin(connection);
            drive(line, held, access_list, connection, |connection| connection.graceful_shutdown())
                .await;
            let Some(upgraded) = line.upgraded() else { return };
            // A caller that lost its access in the meantime gets no tunnel.
            if access_list.borrow_and_update().check(&line.caller, clock::now()).is_ok() {
                let tunnel = Box::pin(upgraded.run(&line.end));
                drive(line, held, access_list, tunnel, |_tunnel| ()).await;
            }
        }
    }
}

/// The events of a connection.
enum Event {
    Ended,
    PlaceLost,
    Stopping,
    StandingChanged,
    CertificateEnded,
    Look,
}

/// Drives a connection until it ends, or has to.
async fn drive<C>(
    line: &Line,
    held: &Held,
    access_list: &mut watch::Receiver<Arc<AccessList>>,
    mut connection: Pin<Box<C>>,
    finish: impl Fn(Pin<&mut C>),
) where
    C: Future<Output = Result<(), hyper::Error>>,
{
    let Line { shared, caller, activity, end, .. } = line;
    let limits = &shared.limits;
    let idle = match held {
        Held::Untrusted(_) => limits.untrusted_idle,
        Held::Known(_) => limits.idle,
    };
    let mut look = interval(LOOK.min(limits.stall / 4).min(idle / 4).max(Duration::from_millis(1)));
    let mut finishing = false;
    let mut cut_at = None;
    loop {
        let stopping = (!finishing).then_some(&shared.stopping);
        let next = next_event(connection.as_mut(), held, access_list, stopping, &mut look);
        let next = match cut_at {
            Some(at) => timeout_at(at, next).await.unwrap_or(Event::Ended),
            None => next.await,
        };
        let next = match next {
            Event::Look if caller.has_ended(clock::now()) => Event::CertificateEnded,
            next => next,
        };
        match next {
            Event::Ended => return,
            Event::PlaceLost => {
                return shared.crowded_out(caller, "it makes way for one of a peer that has fewer");
            }
            Event::Stopping => {
                finishing = true;
                finish(connection.as_mut());
            }
            Event::StandingChanged | Event::CertificateEnded => {
                let checked = access_list.borrow_and_update().check(caller, clock::now());
                if let (Err(fallen), None) = (checked, cut_at) {
                    shared.metrics.cut.up();
                    info!(address = %caller.address, "a connection is cut: {fallen}");
                    end.cut(fallen);
                    finishing = true;
                    finish(connection.as_mut());
                    cut_at = Some(Instant::now() + LAST_WORDS);
                }
            }
            Event::Look if activity.stalled() > limits.stall => {
                shared.metrics.stalled.up();
                info!(peer = %caller.peer, address = %caller.address, "an answer is not read; \
                                                                       the connection is cut");
                return;
            }
            Event::Look => {
                if !finishing && activity.idle() > idle {
                    finishing = true;
                    finish(connection.as_mut());
                } else if finishing && activity.idle() > idle + limits.stop {
                    return;
                }
            }
        }
    }
}

async fn next_event<C: Future>(
    connection: Pin<&mut C>,
    held: &Held,
    access_list: &mut watch::Receiver<Arc<AccessList>>,
    stopping: Option<&CancellationToken>,
    look: &mut Interval,
) -> Event {
    let stopped = async {
        match stopping {
            Some(stopping) => stopping.cancelled().await,
            None => std::future::pending().await,
        }
    };
    let changed = async {
        if access_list.changed().await.is_err() {
            // The value will never change again.
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        // Cancel-safe: the connection is only borrowed, and keeps its state.
        _ended = connection => Event::Ended,
        // Cancel-safe, all four: they only wait.
        () = held.lost().cancelled() => Event::PlaceLost,
        () = stopped => Event::Stopping,
        () = changed => Event::StandingChanged,
        _at = look.tick() => Event::Look,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_caller_with_another_address_is_on_another_machine() {
        for (own, caller, afar) in [
            ("10.0.2.15", "10.0.2.2", true),
            ("::ffff:10.0.2.15", "10.0.2.2", true),
            ("10.0.2.15", "10.0.2.15", false),
            ("::ffff:10.0.2.15", "10.0.2.15", false),
            ("127.0.0.1", "127.0.0.2", false),
            ("::1", "::1", false),
            ("fd00::1", "fd00::2", true),
        ] {
            assert_eq!(is_afar(own.parse().unwrap(), caller.parse().unwrap()), afar, "{caller}");
        }
    }
}
