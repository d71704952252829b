//! The exchange with the API server: forwards the requests of one connection of a user.
//!
//! ```text
//! first request --> connect --> [kept] --next request--> sent
//!                      ^           |
//!                      +-----------+ closed or refused by the API server, or older than an hour
//! ```
//!
//! A connection to the API server is never shared: an error in the framing of one user's
//! requests cannot reach those of another.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tonic::Status;
use tonic::body::Body;
use tracing::{Instrument as _, trace};

use super::answer::{failure, refusal};
use super::headers::{self, Who};
use crate::api::{self, Api};
use crate::parts::{Part, PartState, Parts};
use polis_base::cause;
use polis_wire::identity::NodeId;
use polis_wire::rpc::{Caller, Exchange, Gateway, Tunnel};

/// Longest that the API server of this machine may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Until an answer begins: one of the API server may take its own limit of a minute, and a program
/// behind it may take longer.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(120);

/// The same where the log of a container is followed. kubelet sends nothing, not even the head of
/// its answer, before the container writes a line.
pub(super) const FOLLOW_MAX: Duration = Duration::from_secs(60 * 60);

/// A connection serves no new request after that: its certificate is renewed in the meantime.
const AGE_MAX: Duration = Duration::from_secs(60 * 60);

/// The way to the API server of this node.
#[derive(Clone, Debug)]
pub(super) struct Proxy {
    pub(super) node: NodeId,
    pub(super) upstream: Api,
    /// Until an answer begins, other than that of a log that is followed.
    pub(super) answer_max: Duration,
    pub(super) parts: Parts,
}

impl Gateway for Proxy {
    fn open(&self, caller: &Caller) -> Arc<dyn Exchange> {
        let kept = Mutex::new(None);
        Arc::new(Requests { proxy: self.clone(), who: Who::of(caller), kept })
    }

    fn refusal(&self, status: &Status) -> Response<Body> {
        refusal(status)
    }
}

/// The requests of one connection.
#[derive(Debug)]
struct Requests {
    proxy: Proxy,
    who: Option<Who>,
    /// The connection to the API server between two requests.
    kept: Mutex<Option<Upstream>>,
}

/// A connection to the API server; it ends when it is dropped.
#[derive(Debug)]
struct Upstream {
    sender: SendRequest<Incoming>,
    since: Instant,
    refused: bool,
    _driver: JoinSet<()>,
}

/// Why the answer of the API server is missing.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Connect(#[from] api::Error),
    #[error("it does not accept a connection within {} seconds", CONNECT_MAX.as_secs())]
    Slow,
    #[error("it closed the connection")]
    Http(#[from] hyper::Error),
}

#[tonic::async_trait]
impl Exchange for Requests {
    async fn call(&self, mut request: Request<Incoming>) -> Response<Body> {
        let Some(who) = &self.who else {
            let text = "the name of the user cannot be passed on";
            return failure(StatusCode::FORBIDDEN, "Forbidden", text);
        };
        // The API server's role `admin` permits it to act as any service account of a
        // namespace, and those of the system may change roles.
        if !who.is_owner() && headers::impersonates(request.headers()) {
            let text = "only an owner may act as another user";
            return failure(StatusCode::FORBIDDEN, "Forbidden", text);
        }
        let Some(path) = headers::path(request.method(), request.uri()) else {
            let text = "this server has no such path";
            return failure(StatusCode::BAD_REQUEST, "BadRequest", text);
        };
        let host = self.proxy.upstream.address.to_string();
        let Ok(host) = HeaderValue::from_str(&host) else {
            return failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", &host);
        };
        let answer_max = match headers::follows_a_log(&path) {
            true => FOLLOW_MAX,
            false => self.proxy.answer_max,
        };
        let caller = headers::upgrades(request.headers()).then(|| hyper::upgrade::on(&mut request));
        *request.headers_mut() = headers::request(request.headers(), who, &host);
        *request.uri_mut() = path;
        *request.version_mut() = http::Version::HTTP_11;
        // On the heap: a connection in the making is large.
        let mut response = match timeout(answer_max, Box::pin(self.send(request))).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return self.proxy.unreachable(&error),
            Err(_elapsed) => {
                let text = format!("no answer began within {} s", answer_max.as_secs_f32());
                return refusal(&Status::deadline_exceeded(text));
            }
        };
        let tunnel = caller
            .filter(|_| response.status() == StatusCode::SWITCHING_PROTOCOLS)
            .map(|caller| Tunnel { caller, server: hyper::upgrade::on(&mut response) });
        *response.headers_mut() = headers::response(response.status(), response.headers());
        *response.extensions_mut() = http::Extensions::new();
        match tunnel {
            Some(tunnel) => {
                response.extensions_mut().insert(tunnel);
                response.map(|_body| Body::empty())
            }
            None => response.map(Body::new),
        }
    }
}

impl Requests {
    /// Sends a request on the kept connection, or on a new one.
    async fn send(&self, mut request: Request<Incoming>) -> Result<Response<Incoming>, Error> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut kept) = kept.filter(|kept| !kept.refused && kept.since.elapsed() < AGE_MAX)
            && kept.sender.ready().await.is_ok()
        {
            match kept.sender.try_send_request(request).await {
                Ok(response) => return Ok(self.keep(kept, response)),
                Err(mut failed) => match failed.take_message() {
                    // It was closed before a byte was sent.
                    Some(unsent) => request = unsent,
                    None => return Err(failed.into_error().into()),
                },
            }
        }
        let mut fresh = self.proxy.connect().await?;
        let response = fresh.sender.send_request(request).await?;
        Ok(self.keep(fresh, response))
    }

    /// Keeps the connection, of which the answer is still read. It serves no other request if the
    /// API server does not accept its certificate any more: a new connection has another one.
    fn keep(&self, mut upstream: Upstream, response: Response<Incoming>) -> Response<Incoming> {
        upstream.refused |= response.status() == StatusCode::UNAUTHORIZED;
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(upstream);
        response
    }
}

impl Proxy {
    async fn connect(&self) -> Result<Upstream, Error> {
        let connected = timeout(CONNECT_MAX, self.upstream.connect()).await;
        let tls = connected.map_err(|_elapsed| Error::Slow)??;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await?;
        let mut driver = JoinSet::new();
        let drive = async move {
            if let Err(error) = connection.with_upgrades().await {
                trace!("a connection to the API server broke: {error}");
            }
        };
        driver.spawn(drive.in_current_span());
        Ok(Upstream { sender, since: Instant::now(), refused: false, _driver: driver })
    }

    /// The answer while the API server does not answer.
    fn unreachable(&self, error: &Error) -> Response<Body> {
        let state = self.parts.state(Part::ApiServer);
        let state = match &state {
            Some(PartState::Failed { cause }) => format!("failed: {cause}"),
            Some(state) => state.name().to_owned(),
            None => "not running".to_owned(),
        };
        let message = format!(
            "the API server on {} does not answer: {}; its state is {state}; `polisctl kubernetes \
             status` shows what it waits for, and `polisctl kubernetes kubeconfig` picks another \
             controller",
            self.node,
            cause::line(error)
        );
        trace!("{message}");
        failure(StatusCode::BAD_GATEWAY, "BadGateway", &message)
    }
}
