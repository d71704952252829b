//! The admission of one call: it is accepted, or rejected before a byte of its body is read.
//!
//! ```text
//! path in the table? --> access_list? --> rule? --> untrusted: a token? --> service, until its
//!                          |                        known: a stream left?    deadline
//!                          | a user that is not listed yet: waits [`LISTED_MAX`] at most
//! ```
//!
//! Invariants:
//! - A rejected call costs its sender more than the server: its body is not read.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::Service as _;
use tracing::info;

use super::access::Rule;
use super::access_list::{AccessList, Fallen};
use super::app::App;
use super::body::{Activity, Bounded, End, Ending, Load, Open, Outgoing, Pieces, status_code};
use super::gateway::{Exchange, Gateway, Tunnel, Upgraded};
use super::limits::{Quota, STREAMS_MAX};
use super::peer::{Caller, Peer, Role};
use super::shared::{Refused, Shared};
use polis_base::sys::clock;

/// Bytes of a gRPC frame before its message.
const FRAME_HEAD: usize = 5;

/// How long a call of a user waits for a list: a node receives it soon after it has opened its
/// port.
const LIST_MAX: Duration = Duration::from_secs(10);
/// How long it waits for the list to name it: every node receives the record of a new user
/// milliseconds after the leader has written it.
const LISTED_MAX: Duration = Duration::from_secs(1);

/// One connection, as its calls see it.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) shared: Arc<Shared>,
    pub(super) caller: Caller,
    /// When the connection was accepted, if it is from another machine; taken by its first call.
    reached: Mutex<Option<Instant>>,
    pub(super) activity: Arc<Activity>,
    pub(super) end: Arc<End>,
    /// The requests that are being received.
    load: Load,
    /// What it shares with the other connections of its caller.
    quota: Quota,
    /// The way to the server behind a gateway, from the first request on.
    exchange: OnceLock<Arc<dyn Exchange>>,
    /// The upgrade that ended the requests of this connection.
    upgraded: Mutex<Option<Upgraded>>,
}

impl Line {
    pub(super) fn new(
        shared: Arc<Shared>,
        caller: Caller,
        reached: Option<Instant>,
        activity: Arc<Activity>,
        end: Arc<End>,
        quota: Quota,
    ) -> Self {
        let (exchange, upgraded) = (OnceLock::new(), Mutex::default());
        let reached = Mutex::new(reached.filter(|_at| caller.peer.is_known()));
        let load = Load::new(shared.limits.messages);
        Self { shared, caller, reached, activity, end, load, quota, exchange, upgraded }
    }

    /// The tunnel that an upgrade has opened, if one has.
    pub(super) fn upgraded(&self) -> Option<Upgraded> {
        self.upgraded.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Answers one call.
    pub(super) async fn call(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let Shared { metrics, app, .. } = &*self.shared;
        let mut open = Open::new(metrics, request.uri().path(), &self.activity);
        self.listed(request.uri().path()).await;
        let admitted = self.admit(request.uri().path());
        let (rule, stream) = match admitted.and_then(|rule| Ok((rule, self.begin_stream(rule)?))) {
            Ok(admitted) => admitted,
            Err(status) => {
                metrics.refused.up();
                self.report(request.uri().path(), &status);
                open.answered(Some(status.code()));
                let mut response = refusal(app, status);
                if !matches!(app, App::Grpc(_)) && self.is_barred() {
                    // No request of this connection will be served.
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                return Ok(response);
            }
        };
        open.keep(stream);
        self.record(request.uri().path(), rule);
        self.proves();
        let mut response = match app {
            App::Grpc(routes) => self.serve(routes.clone(), rule, request).await,
            App::Page(page) => Response::new(Body::new(page())),
            App::Gateway(gateway) => self.forward(gateway, request).await,
        };
        let (ending, pieces) = match app {
            App::Grpc(_) => {
                open.answered(status_code(response.headers()));
                let places = rule.streams.then(|| Arc::clone(&self.quota.answers));
                (Ending::Trailers, Some(Pieces::new(places)))
            }
            App::Page(_) | App::Gateway(_) => {
                open.answered(Some(code_of(response.status())));
                (Ending::Abort, None)
            }
        };
        if let Some(tunnel) = response.extensions_mut().remove::<Tunnel>() {
            let upgraded = Upgraded { tunnel, open };
            *self.upgraded.lock().unwrap_or_else(PoisonError::into_inner) = Some(upgraded);
            return Ok(response);
        }
        let end = rule.streams.then(|| (Arc::clone(&self.end), ending));
        Ok(response.map(|body| Body::new(Outgoing::new(body, open, end, pieces))))
    }

    /// Notes once for each connection that another machine reaches this one.
    fn proves(&self) {
        let Some(reached) = &self.shared.reached else { return };
        let at = self.reached.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(at) = at {
            reached.send_if_modified(|known| {
                let later = known.is_none_or(|known| known < at);
                if later {
                    *known = Some(at);
                }
                later
            });
        }
    }

    /// Waits where the caller is a user that is not in the list: the list may be late.
    async fn listed(&self, path: &str) {
        let Shared { table, access_list, .. } = &*self.shared;
        let unlisted = table.rule(path).is_ok_and(|rule| rule.access.unlisted);
        let mut lists = access_list.clone();
        let check = |list: &AccessList| list.check(&self.caller, clock::now());
        let named = async {
            let listed = |list: &Arc<AccessList>| {
                unlisted || !matches!(check(list), Err(Fallen::UsersUnknown))
            };
            let _there = timeout(LIST_MAX, lists.wait_for(listed)).await.is_ok();
            let named = |list: &Arc<AccessList>| !matches!(check(list), Err(Fallen::NotListed(_)));
            let _there = timeout(LISTED_MAX, lists.wait_for(named)).await.is_ok();
        };
        tokio::select! {
            // Cancel-safe, both: they wait for values. Without the user by then, the call is
            // rejected with the reason.
            () = named => {}
            () = self.end.cancelled() => {}
        }
    }

    /// Whether the call may be made.
    fn admit(&self, path: &str) -> Result<&Rule, Status> {
        let Shared { table, access_list, .. } = &*self.shared;
        let rule = table.rule(path);
        self.take_turn()?;
        let standing = access_list.borrow().check(&self.caller, clock::now());
        match (standing, &rule) {
            (Err(Fallen::UsersUnknown), Ok(rule)) if rule.access.unlisted => {}
            (standing, _) => standing?,
        }
        let rule = rule?;
        rule.check(&self.caller.peer)?;
        Ok(rule)
    }

    /// Takes one of the streams of a known caller, where the call is one. A stream over HTTP/1 has
    /// a connection of its own. Callers without a certificate are bounded by their connections
    /// alone: their streams have short messages, and of machines that share an address, one could
    /// take the streams of all.
    fn begin_stream(&self, rule: &Rule) -> Result<Option<OwnedSemaphorePermit>, Status> {
        let peer = &self.caller.peer;
        if !rule.streams || !peer.is_known() || !matches!(self.shared.app, App::Grpc(_)) {
            return Ok(None);
        }
        let stream = Arc::clone(&self.quota.streams).try_acquire_owned();
        stream.map(Some).map_err(|_none| {
            let text =
                format!("{peer} has {STREAMS_MAX} streams open here; end some of them first");
            Status::resource_exhausted(text)
        })
    }

    /// Whether the caller has no access at all.
    fn is_barred(&self) -> bool {
        self.shared.access_list.borrow().check(&self.caller, clock::now()).is_err()
    }

    /// Whether the caller has not called too often.
    fn take_turn(&self) -> Result<(), Status> {
        let Shared { untrusted, known, app, .. } = &*self.shared;
        let (now, peer) = (clock::uptime(), &self.caller.peer);
        let (may, who) = if !peer.is_known() {
            let origin = self.caller.address.ip().into();
            let mut untrusted = untrusted.lock().unwrap_or_else(PoisonError::into_inner);
            (untrusted.take(origin, now), "without a certificate of the cluster".to_owned())
        } else if let App::Gateway(_) = app {
            // The server behind it has limits of its own.
            return Ok(());
        } else {
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            (known.take(peer.to_string(), now), format!("of {peer}"))
        };
        if may {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!("too many calls {who}; wait a second")))
    }

    /// Leaves in the log which user makes a call that changes something or reads a secret.
    fn record(&self, path: &str, rule: &Rule) {
        let Caller { peer, address, .. } = &self.caller;
        if matches!(peer, Peer::User { .. }) && rule.least_role() > Some(Role::Viewer) {
            let call = path.rsplit('/').next().unwrap_or(path);
            info!(by = %peer, from = %address.ip(), "a user calls {call}");
        }
    }

    /// Hands on that a known caller lacks a permission.
    fn report(&self, path: &str, status: &Status) {
        let Some(refused) = &self.shared.refused else { return };
        if status.code() != Code::PermissionDenied || !self.caller.peer.is_known() {
            return;
        }
        let (caller, path) = (self.caller.clone(), path.to_owned());
        let reason = status.message().to_owned();
        // A full queue means more such calls than its reader can write down.
        let _full = refused.try_send(Refused { caller, path, reason });
    }

    /// Answers by the server behind a gateway.
    async fn forward(
        &self,
        gateway: &Arc<dyn Gateway>,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let exchange = self.exchange.get_or_init(|| gateway.open(&self.caller));
        let deadline = self.shared.limits.deadline;
        match timeout_at(Instant::now() + deadline, exchange.call(request)).await {
            Ok(response) => response,
            Err(_elapsed) => {
                let text = format!("no answer began within {} s", deadline.as_secs_f32());
                gateway.refusal(&Status::deadline_exceeded(text))
            }
        }
    }

    async fn serve(
        &self,
        mut routes: Routes,
        rule: &Rule,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let limits = &self.shared.limits;
        let asked = asked_deadline(request.headers()).filter(|_| !rule.streams);
        let deadline = asked.map_or(limits.deadline, |asked| asked.min(limits.deadline));
        let known = self.caller.peer.is_known();
        let max = if known { limits.message } else { limits.untrusted_message } + FRAME_HEAD;
        // tonic bounds each message of a stream, and reads one when the handler asks for it.
        let (max, load) = match known && rule.uploads {
            true => (usize::MAX, None),
            false => (max, Some(self.load.clone())),
        };
        let mut request = request.map(|body| Body::new(Bounded::new(body, max, load)));
        request.extensions_mut().insert(self.caller.peer.clone());
        request.extensions_mut().insert(self.caller.clone());
        request.extensions_mut().insert(self.shared.stopping.clone());
        let call = routes.call(request);
        match timeout_at(Instant::now() + deadline, call).await {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(_elapsed) => {
                let text = format!("the call did not end within {} s", deadline.as_secs_f32());
                Status::deadline_exceeded(text).into_http()
            }
        }
    }
}

/// A rejecting answer.
fn refusal(app: &App, status: Status) -> Response<Body> {
    match app {
        App::Grpc(_) => status.into_http(),
        App::Gateway(gateway) => gateway.refusal(&status),
        App::Page(_) => {
            let mut response = Response::new(Body::new(format!("{}\n", status.message())));
            *response.status_mut() = match status.code() {
                Code::Unauthenticated => StatusCode::UNAUTHORIZED,
                Code::PermissionDenied => StatusCode::FORBIDDEN,
                Code::Unimplemented => StatusCode::NOT_FOUND,
                Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
                _ => StatusCode::SERVICE_UNAVAILABLE,
            };
            response
        }
    }
}

/// The code under which an answer of HTTP is counted.
fn code_of(status: StatusCode) -> Code {
    match status {
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::NotFound,
        StatusCode::CONFLICT => Code::Aborted,
        StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        StatusCode::GATEWAY_TIMEOUT => Code::DeadlineExceeded,
        status if status.is_client_error() => Code::InvalidArgument,
        status if status.is_server_error() => Code::Internal,
        _ => Code::Ok,
    }
}

/// How long the caller will wait, if it sends a valid deadline.
fn asked_deadline(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit())
    {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn deadline(text: &[u8]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_bytes(text).ok()?);
        asked_deadline(&headers)
    }

    #[test]
    fn a_deadline_is_read_as_grpc_writes_it() {
        assert_eq!(deadline(b"5S"), Some(Duration::from_secs(5)));
        assert_eq!(deadline(b"250m"), Some(Duration::from_millis(250)));
        assert_eq!(deadline(b"99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in [&b"S"[..], b"", b"5", b"-5S", b"5s", b"999999999S", b"5 S"] {
            assert_eq!(deadline(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_deadline_or_a_deadline(input in prop::collection::vec(any::<u8>(), 0..12)) {
            let _read = deadline(&input);
        }
    }
}
