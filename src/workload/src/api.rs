//! The HTTPS client for the parts of Kubernetes on this machine: health checks, and changes
//! of the cluster's own objects.
//!
//! One connection for each request, by HTTP/1.1 over TLS 1.3, but for requests that follow each
//! other ([`Session`]). Credentials are read from their files for each connection, so a renewed
//! certificate is used at once. The few kinds of requests that the node makes need no client
//! library of Kubernetes.
//!
//! Invariants:
//! - A request ends within [`REQUEST_MAX`], and an answer is at most [`ANSWER_MAX`] long, or one
//!   object of a list at most [`OBJECT_MAX`].
//! - However long the objects of a list are, it is read: people with few rights make long ones.
//! - A connection ends within half a minute after its server has lost its power
//!   ([`set_options`]), also where it only waits for what the server sends next.

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use http::header::{ACCEPT, CONTENT_TYPE, HOST};
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use zeroize::Zeroizing;

use super::objects::{FIELD_MANAGER, Object};
use polis_base::files::{File, Pair};
use polis_runtime::supervisor::blocking;
use polis_wire::pki;
use polis_wire::rpc::{KeepAlive, provider};

/// A local server answers in milliseconds; one that waits for etcd needs up to ten seconds.
const REQUEST_MAX: Duration = Duration::from_secs(20);

/// A watch may be silent for minutes. Together these are less than the 40 s of kubelet's lease.
const KEEP_ALIVE: KeepAlive = KeepAlive {
    idle: Duration::from_secs(15),
    interval: Duration::from_secs(5),
    probes: 3,
    unacknowledged_ms: 30_000,
};

/// Bytes of an answer that are read.
const ANSWER_MAX: usize = 4 << 20;

/// The same of an answer with one object: etcd holds 1.5 MiB of it at most, and its text may be
/// several times as long.
const OBJECT_MAX: usize = 16 << 20;

/// The type of a JSON document.
pub(super) const JSON: &str = "application/json";

/// The same of a list of objects of which the server sends the metadata alone.
pub(super) const METADATA: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// Characters of an answer that an error quotes.
const QUOTE_MAX: usize = 300;

/// The answer to a certificate that is not valid any more.
const UNAUTHORIZED: u16 = 401;

/// A connection for HTTP/1.1. It moves bytes while it is polled.
pub(super) type Pipe = Connection<TokioIo<TlsStream<TcpStream>>, Full<Bytes>>;

/// Such a connection, and the way to send requests over it.
type Open = (SendRequest<Full<Bytes>>, Pin<Box<Pipe>>);

/// The way to one server on this machine.
#[derive(Clone, Debug)]
pub struct Api {
    /// Where it listens.
    pub address: SocketAddr,
    /// The authority that signed its certificate.
    pub ca: File,
    /// The certificate of the caller; `None` for an anonymous one.
    pub client: Option<Pair>,
}

/// An answer.
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    /// The status code of HTTP.
    pub status: u16,
    /// The content.
    pub body: Vec<u8>,
}

/// Bodies may hold Secrets: only their length is shown.
impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({}, {} bytes)", self.status, self.body.len())
    }
}

/// Why the answer is missing, or is not the wanted one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The own credentials are not there, or unreadable.
    #[error("cannot use {what}")]
    Credentials {
        /// The file, or what was made of it.
        what: String,
        /// Why.
        source: anyhow::Error,
    },
    /// The server does not listen, or closes the connection.
    #[error("cannot connect to {address}")]
    Connect {
        /// The server.
        address: SocketAddr,
        /// The error of the kernel, or of the other end.
        source: io::Error,
    },
    /// It does not speak HTTP.
    #[error("no answer from {address}")]
    Http {
        /// The server.
        address: SocketAddr,
        /// The error of the library.
        source: anyhow::Error,
    },
    /// The request timed out.
    #[error("{address} does not answer within {} seconds", REQUEST_MAX.as_secs())]
    Silent {
        /// The server.
        address: SocketAddr,
    },
    /// It answers with more than is read.
    #[error("the answer of {address} with status {status} is too long")]
    Long {
        /// The server.
        address: SocketAddr,
        /// The status code of HTTP.
        status: u16,
    },
    /// It answers with an error.
    #[error("{address} answers {status}: {said}")]
    Refused {
        /// The server.
        address: SocketAddr,
        /// The status code of HTTP.
        status: u16,
        /// The beginning of its message.
        said: String,
    },
}

impl Error {
    /// The error for an answer with this content.
    pub(super) fn refused(address: SocketAddr, status: u16, body: &[u8]) -> Self {
        Self::Refused { address, status, said: said(body) }
    }
}

impl Api {
    /// Reads `path`.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.request(Method::GET, path, &[], Vec::new()).await
    }

    /// Fails unless the server answers `path` with success.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub async fn check(&self, path: &str) -> Result<(), Error> {
        match self.get(path).await {
            // A success needs no content.
            Err(Error::Long { status: 200..=299, .. }) => Ok(()),
            answer => self.succeeded(&answer?),
        }
    }

    /// Sends a JSON document.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        content: &Value,
    ) -> Result<Answer, Error> {
        let kind = [(CONTENT_TYPE.as_str(), kind)];
        self.request(method, path, &kind, content.to_string().into_bytes()).await
    }

    /// Fails unless an answer is a success.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`].
    pub(super) fn succeeded(&self, answer: &Answer) -> Result<(), Error> {
        match (200..300).contains(&answer.status) {
            true => Ok(()),
            false => Err(Error::refused(self.address, answer.status, &answer.body)),
        }
    }

    /// Makes one request.
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Answer, Error> {
        let exchange = Box::pin(self.exchange(method, path, headers, body));
        let silent = |_elapsed| Error::Silent { address: self.address };
        timeout(REQUEST_MAX, exchange).await.map_err(silent)?
    }

    /// A new connection, for HTTP/1.1.
    ///
    /// # Errors
    ///
    /// [`Error::Credentials`] and [`Error::Connect`].
    pub(super) async fn connect(&self) -> Result<TlsStream<TcpStream>, Error> {
        let address = self.address;
        let config = {
            let (ca, client) = (self.ca.clone(), self.client.clone());
            blocking(move || tls(&ca, client.as_ref())).await?
        };
        let connect = |source| Error::Connect { address, source };
        let tcp = open(address).await.map_err(connect)?;
        let name = ServerName::IpAddress(address.ip().into());
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(connect)
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Answer, Error> {
        let (mut sender, connection) = self.dial().await?;
        let request = self.prepared(method, path, headers, body)?;
        let asked = async move { self.over(&mut sender, request, ANSWER_MAX).await };
        // The connection ends with its only sender; its errors are those of the request.
        let (_ended, answer) = tokio::join!(connection, asked);
        answer
    }

    /// A new connection, and the way to send requests over it.
    ///
    /// # Errors
    ///
    /// [`Error::Credentials`], [`Error::Connect`] and [`Error::Http`].
    pub(super) async fn dial(&self) -> Result<(SendRequest<Full<Bytes>>, Pipe), Error> {
        let tls = self.connect().await?;
        http1::handshake(TokioIo::new(tls)).await.map_err(|error| self.http(error))
    }

    /// A request with these headers and this content.
    fn prepared(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, Error> {
        let mut request = Request::builder().method(method).uri(path);
        request = request.header(HOST, self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::new(Bytes::from(body))).map_err(|error| self.http(error))
    }

    /// Sends a request, and reads its answer, which is at most `max` bytes long.
    async fn over(
        &self,
        sender: &mut SendRequest<Full<Bytes>>,
        request: Request<Full<Bytes>>,
        max: usize,
    ) -> Result<Answer, Error> {
        let answer = sender.send_request(request).await.map_err(|error| self.http(error))?;
        let (parts, body) = answer.into_parts();
        let status = parts.status.as_u16();
        match Limited::new(body, max).collect().await {
            Ok(body) => Ok(Answer { status, body: body.to_bytes().to_vec() }),
            Err(error) if error.is::<LengthLimitError>() => {
                Err(Error::Long { address: self.address, status })
            }
            Err(error) => Err(self.http(anyhow::anyhow!(error))),
        }
    }

    /// The same over a connection that later requests may use, too. Returns it with the answer,
    /// unless it has ended.
    async fn over_kept(
        &self,
        (mut sender, mut pipe): Open,
        request: Request<Full<Bytes>>,
        max: usize,
    ) -> Result<(Answer, Option<Open>), Error> {
        let (answer, pipe) = {
            let mut asked = pin!(self.over(&mut sender, request, max));
            tokio::select! {
                // Cancel-safe, both: a request that is cut off ends its connection.
                answer = asked.as_mut() => (answer?, Some(pipe)),
                _ended = pipe.as_mut() => {
                    // What has arrived is read all the same. A request that the connection had
                    // not taken when it ended fails with it: otherwise it would have no end.
                    drop(pipe);
                    (asked.await?, None)
                }
            }
        };
        Ok((answer, pipe.map(|pipe| (sender, pipe))))
    }

    /// The error for one of the library.
    fn http(&self, source: impl Into<anyhow::Error>) -> Error {
        Error::Http { address: self.address, source: source.into() }
    }
}

/// Requests that follow each other, each over the connection of the one before: a TLS handshake is
/// more work than most answers, and half of it is that of the server. Two requests at once have a
/// connection each.
pub(super) struct Session {
    api: Api,
    /// The connection, between two requests.
    open: Mutex<Option<Open>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({:?})", self.api)
    }
}

/// The same server, and no connection to it yet.
impl Clone for Session {
    fn clone(&self) -> Self {
        Self::new(&self.api)
    }
}

impl Session {
    pub(super) fn new(api: &Api) -> Self {
        Self { api: api.clone(), open: Mutex::default() }
    }

    /// Closes the connection: no request follows for a while, and the next one reads the
    /// credentials anew.
    pub(super) fn close(&self) {
        drop(self.take());
    }

    /// As [`Api::check`].
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn check(&self, path: &str) -> Result<(), Error> {
        match self.get(path).await {
            // A success needs no content.
            Err(Error::Long { status: 200..=299, .. }) => Ok(()),
            answer => self.api.succeeded(&answer?),
        }
    }

    /// Reads an object; `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn read(&self, path: &str) -> Result<Option<Value>, Error> {
        let answer = self.get(path).await?;
        if answer.status == 404 {
            return Ok(None);
        }
        self.api.succeeded(&answer)?;
        serde_json::from_slice(&answer.body).map(Some).map_err(|error| self.api.http(error))
    }

    async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.bounded(Method::GET, path, &[], Vec::new(), ANSWER_MAX).await
    }

    /// Applies an object (server-side apply), and takes its fields over from other managers.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn apply(&self, object: &Object) -> Result<(), Error> {
        let path = format!("{}?fieldManager={FIELD_MANAGER}&force=true", object.path);
        let kind = "application/apply-patch+yaml";
        let answer = self.send(Method::PATCH, &path, kind, &object.content).await?;
        self.api.succeeded(&answer)
    }

    /// Reads the objects of a list in the form `accept`, `page` of them at a time or fewer where
    /// they are long, and keeps what `read` takes of each. `path` may have a query.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn list<T>(
        &self,
        path: &str,
        accept: &str,
        page: usize,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let and = if path.contains('?') { '&' } else { '?' };
        let (mut found, mut rest, mut page) = (Vec::new(), String::new(), page);
        loop {
            let asked = format!("{path}{and}limit={page}{rest}");
            let max = if page > 1 { ANSWER_MAX } else { OBJECT_MAX };
            let accept = [(ACCEPT.as_str(), accept)];
            let answer = match self.bounded(Method::GET, &asked, &accept, Vec::new(), max).await {
                Err(Error::Long { .. }) if page > 1 => {
                    page /= 2;
                    continue;
                }
                answer => answer?,
            };
            self.api.succeeded(&answer)?;
            let list: Value =
                serde_json::from_slice(&answer.body).map_err(|error| self.api.http(error))?;
            found.extend(list["items"].as_array().into_iter().flatten().filter_map(&read));
            match list["metadata"]["continue"].as_str() {
                Some(token) if !token.is_empty() => rest = format!("&continue={token}"),
                _ => return Ok(found),
            }
        }
    }

    /// Deletes an object, if it still has this UID and this version. Returns whether it was
    /// deleted: it may be gone already, or have changed.
    ///
    /// # Errors
    ///
    /// [`Error`].
    pub(super) async fn delete(&self, path: &str, uid: &str, version: &str) -> Result<bool, Error> {
        let options = json!({
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": version},
        });
        let answer = self.send(Method::DELETE, path, JSON, &options).await?;
        match answer.status {
            404 | 409 => Ok(false),
            _ => self.api.succeeded(&answer).map(|()| true),
        }
    }

    /// As [`Api::send`].
    ///
    /// # Errors
    ///
    /// Every [`Error`] but [`Error::Refused`]: an answer is an answer.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        content: &Value,
    ) -> Result<Answer, Error> {
        let kind = [(CONTENT_TYPE.as_str(), kind)];
        self.bounded(method, path, &kind, content.to_string().into_bytes(), ANSWER_MAX).await
    }

    /// Makes one request, whose answer is at most `max` bytes long.
    async fn bounded(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
        max: usize,
    ) -> Result<Answer, Error> {
        let request = self.api.prepared(method, path, headers, body)?;
        let silent = |_elapsed| Error::Silent { address: self.api.address };
        timeout(REQUEST_MAX, Box::pin(self.ask(request, max))).await.map_err(silent)?
    }

    async fn ask(&self, request: Request<Full<Bytes>>, max: usize) -> Result<Answer, Error> {
        let open = match self.kept().await {
            Some(kept) => kept,
            None => {
                let (sender, pipe) = self.api.dial().await?;
                (sender, Box::pin(pipe))
            }
        };
        let (answer, open) = self.api.over_kept(open, request, max).await?;
        // A certificate that is refused now is refused for as long as the connection lives.
        let open = open.filter(|_open| answer.status != UNAUTHORIZED);
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = open;
        Ok(answer)
    }

    /// The connection of the last request, unless the server has closed it.
    async fn kept(&self) -> Option<Open> {
        let (mut sender, mut pipe) = self.take()?;
        let lives = tokio::select! {
            biased;
            // Cancel-safe, both: the connection is given up.
            _ended = pipe.as_mut() => false,
            ready = sender.ready() => ready.is_ok(),
        };
        lives.then_some((sender, pipe))
    }

    fn take(&self) -> Option<Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A new connection, with its options ([`set_options`]).
pub(super) async fn open(address: SocketAddr) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(address).await?;
    set_options(&tcp);
    Ok(tcp)
}

/// Lets the kernel detect and close a connection whose other end has vanished, and send at once
/// what is written. It would hold back the second of two short writes, as of the head of a request
/// and its content, until the other end has acknowledged the first, which may take 40 ms.
pub(super) fn set_options(tcp: &TcpStream) {
    KEEP_ALIVE.set(tcp);
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
}

/// How long the kernel keeps a connection whose other end has vanished: one that is silent, and
/// one with unacknowledged bytes. Zero: for longer than any test.
#[cfg(test)]
pub(super) fn patience(socket: impl std::os::fd::AsFd) -> rustix::io::Result<[Duration; 2]> {
    use rustix::net::sockopt::{
        socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl, tcp_user_timeout,
    };
    let socket = socket.as_fd();
    let silent = if socket_keepalive(socket)? {
        tcp_keepidle(socket)? + tcp_keepintvl(socket)? * tcp_keepcnt(socket)?
    } else {
        Duration::ZERO
    };
    Ok([silent, Duration::from_millis(tcp_user_timeout(socket)?.into())])
}

/// The configuration for these files. Blocks.
fn tls(ca: &File, client: Option<&Pair>) -> Result<ClientConfig, Error> {
    let unusable = |what: &File, source: anyhow::Error| {
        let what = what.path().display().to_string();
        Error::Credentials { what, source }
    };
    let mut roots = RootCertStore::empty();
    for root in certificates(ca).map_err(|source| unusable(ca, source))? {
        roots.add(root).map_err(|source| unusable(ca, source.into()))?;
    }
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|source| unusable(ca, source.into()))?
        .with_root_certificates(roots);
    let Some(pair) = client else { return Ok(builder.with_no_client_auth()) };
    let own = certificates(&pair.certificate);
    let own = own.map_err(|source| unusable(&pair.certificate, source))?;
    let key = key(&pair.key).map_err(|source| unusable(&pair.key, source))?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pki::key_der(&key).to_vec()));
    let config = builder.with_client_auth_cert(own, key);
    config.map_err(|source| unusable(&pair.certificate, source.into()))
}

/// The certificates in a file: authorities, or one with the bridges to it.
fn certificates(file: &File) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let text = file.read()?.ok_or_else(missing)?;
    pki::certificates_der(&text).ok_or_else(|| anyhow::anyhow!("it is not a certificate"))
}

/// The key in a file.
fn key(file: &File) -> anyhow::Result<SigningKey> {
    let text = Zeroizing::new(file.read()?.ok_or_else(missing)?);
    let text = std::str::from_utf8(&text)?;
    SigningKey::from_pkcs8_pem(text).map_err(|_damaged| anyhow::anyhow!("it is not an Ed25519 key"))
}

fn missing() -> anyhow::Error {
    anyhow::anyhow!("it does not exist yet")
}

/// The message in an answer: that of a Kubernetes `Status`, or the beginning of the text.
fn said(body: &[u8]) -> String {
    let status: Option<Value> = serde_json::from_slice(body).ok();
    let message = status.as_ref().and_then(|status| status["message"].as_str().map(str::to_owned));
    let text = message.unwrap_or_else(|| failed_checks(&String::from_utf8_lossy(body)));
    text.chars().take(QUOTE_MAX).collect()
}

/// The checks that failed, where the answer lists checks (`[-]etcd failed: ...`).
fn failed_checks(text: &str) -> String {
    let failed: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("[-]")).collect();
    if failed.is_empty() { text.trim().to_owned() } else { failed.join(", ") }
}

#[cfg(test)]
#[path = "api_tests.rs"]
pub(super) mod tests;
