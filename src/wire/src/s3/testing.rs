//! A stand-in of an S3-compatible store, for tests of this crate and of others: one bucket, over
//! TLS, on loopback.
//!
//! It takes a request only with the signature that it computes itself, from the bytes that
//! arrived: by another way than `sign`, with HMAC written out (RFC 2104) over another library's
//! SHA-256. It also refuses a time that is more than 15 minutes from its own, and a content
//! whose SHA-256 is not the signed one, as Amazon S3 does.
#![expect(clippy::unwrap_used, reason = "a helper of tests panics as a test does")]

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64ct::{Base64, Encoding as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use time::macros::format_description;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{Bucket, Credentials};
use crate::endpoint::Endpoint;
use crate::outside::Server;
use crate::registry;
use crate::rpc;
use polis_base::hex;
use polis_base::sys::clock;

/// The bucket that it has.
pub const BUCKET: &str = "snapshots";
/// The region that it signs for.
pub const REGION: &str = "eu-test-1";
/// The key that it knows.
pub const KEY: &str = "AKIATEST";
/// Its secret.
pub const SECRET: &str = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
/// Keys on one page of a listing.
const PAGE: usize = 3;
/// How far a time may be from its own.
const SKEW_MAX: u64 = 15 * 60;

/// Its fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Refuses every request with this status, code and region.
    Refuses(u16, &'static str, &'static str),
    /// Ends the connection after so many bytes of a content.
    CutsPut(usize),
    /// Sends half of every object.
    CutsGet,
    /// Sends callers to this address.
    Redirects(String),
    /// Answers every request with this.
    Answers(Vec<u8>),
    /// Takes requests and does not answer.
    Hangs,
    /// Takes an object, and loses it.
    Forgets,
}

/// The state that a test may look at and change.
#[derive(Debug, Default)]
pub struct State {
    /// Every object by its key.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// Its fault from now on.
    pub fault: Option<Fault>,
    /// Each request: method, path without query, and the code of a refusal.
    pub requests: Vec<String>,
    /// Its clock is so far behind.
    pub behind: Duration,
}

/// A store that runs until it is dropped.
#[derive(Debug)]
pub struct Store {
    /// Where it listens.
    pub address: SocketAddr,
    /// The authority of its certificate, in PEM.
    pub ca: String,
    host: String,
    state: Arc<Mutex<State>>,
    _stop: oneshot::Sender<()>,
}

/// The refusal of a request.
struct Refused(u16, &'static str, &'static str);

/// A request as it arrived.
struct Request {
    method: String,
    /// Still encoded.
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Store {
    /// Starts one with a certificate for this host, on loopback.
    #[must_use]
    pub fn start(host: &str) -> Self {
        let (acceptor, ca) = certified(host);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<Mutex<State>>::default();
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&state);
        // A thread of its own: tests without a runtime use it, too.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async move {
                tokio::select! {
                    // Cancel-safe: the end of it all.
                    () = serve(listener, acceptor, shared) => {}
                    _stopped = stopped => {}
                }
            });
        });
        Self { address, ca, host: host.to_owned(), state, _stop: stop }
    }

    /// Its state.
    pub fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The URL of its bucket with this prefix, at this port.
    #[must_use]
    pub fn url(&self, port: u16, prefix: &str) -> String {
        let bucket = self.bucket(prefix);
        let endpoint = Endpoint { host: self.host.clone(), port };
        let server = Server { endpoint, authorities: Vec::new(), proxy: None };
        Bucket { server, ..bucket }.url()
    }

    /// Its bucket with this prefix.
    #[must_use]
    pub fn bucket(&self, prefix: &str) -> Bucket {
        let endpoint = Endpoint { host: self.host.clone(), port: self.address.port() };
        let authorities = registry::authorities(&self.ca).unwrap();
        Bucket {
            server: Server { endpoint, authorities, proxy: None },
            name: BUCKET.to_owned(),
            prefix: prefix.to_owned(),
            region: REGION.to_owned(),
        }
    }

    /// The credentials that it knows.
    #[must_use]
    pub fn credentials() -> Credentials {
        Credentials::new(KEY, SECRET).unwrap()
    }
}

fn certified(host: &str) -> (TlsAcceptor, String) {
    let issuer_key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&issuer_key).unwrap().pem();
    let issuer = rcgen::Issuer::new(params, issuer_key);
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let name = match host.parse::<IpAddr>() {
        Ok(address) => address.to_string(),
        Err(_name) => host.to_owned(),
    };
    let own = rcgen::CertificateParams::new(vec![name]).unwrap().signed_by(&key, &issuer).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = rustls::ServerConfig::builder_with_provider(rpc::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![CertificateDer::from(own.der().to_vec())], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), ca)
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, state: Arc<Mutex<State>>) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let mut connections = JoinSet::new();
    while let Ok((tcp, _from)) = listener.accept().await {
        let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
        connections.spawn(async move {
            if let Ok(tls) = acceptor.accept(tcp).await {
                // It ends with the caller.
                let _ended = connection(tls, state).await;
            }
        });
    }
}

async fn connection(
    mut tls: TlsStream<TcpStream>,
    state: Arc<Mutex<State>>,
) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(tls.read_u8().await?);
        }
        let mut request = parsed(&String::from_utf8(head).unwrap());
        let fault = locked(&state).fault.clone();
        let length = request.headers.get("content-length").map_or(0, |it| it.parse().unwrap());
        let cut = match fault {
            Some(Fault::CutsPut(after)) if length > 0 => Some(after.min(length)),
            _ => None,
        };
        request.body = vec![0; cut.unwrap_or(length)];
        tls.read_exact(&mut request.body).await?;
        if cut.is_some() {
            note(&state, &request, "cut");
            return Ok(());
        }
        if fault == Some(Fault::Hangs) {
            note(&state, &request, "hangs");
            std::future::pending::<()>().await;
        }
        let answer = answer(&request, &state);
        tls.write_all(&answer).await?;
        tls.flush().await?;
        if matches!(fault, Some(Fault::CutsGet)) {
            return tls.shutdown().await;
        }
    }
}

fn locked(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note(state: &Mutex<State>, request: &Request, code: &str) {
    let line = format!("{} {} {code}", request.method, request.path);
    locked(state).requests.push(line.trim_end().to_owned());
}

fn parsed(head: &str) -> Request {
    let mut lines = head.lines();
    let first: Vec<_> = lines.next().unwrap().split(' ').collect();
    let (path, query) = first[1].split_once('?').unwrap_or((first[1], ""));
    let headers = lines.filter_map(|line| line.split_once(':'));
    let headers =
        headers.map(|(name, value)| (name.to_lowercase(), value.trim().to_owned())).collect();
    let [path, query] = [path, query].map(str::to_owned);
    Request { method: first[0].to_owned(), path, query, headers, body: Vec::new() }
}

/// The whole answer to a request.
fn answer(request: &Request, state: &Mutex<State>) -> Vec<u8> {
    let (fault, behind) = {
        let state = locked(state);
        (state.fault.clone(), state.behind)
    };
    let done = match fault {
        Some(Fault::Refuses(status, code, region)) => Err(Refused(status, code, region)),
        Some(Fault::Answers(answer)) => {
            note(state, request, "");
            return answer;
        }
        Some(Fault::Redirects(ref place)) => {
            note(state, request, "redirected");
            return format!("HTTP/1.1 307 Go\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n")
                .into();
        }
        _ => verified(request, behind).and_then(|()| done(request, state)),
    };
    note(state, request, done.as_ref().map_or_else(|Refused(_, code, _)| *code, |_done| ""));
    let (status, body) = match done {
        Ok(body) => (200, body),
        Err(Refused(status, code, region)) => {
            let text = format!(
                "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>said so</Message>\
                 <Region>{region}</Region></Error>"
            );
            (status, text.into_bytes())
        }
    };
    let head = format!("HTTP/1.1 {status} -\r\nContent-Length: {}\r\n\r\n", body.len());
    let sent = if fault == Some(Fault::CutsGet) { body.len() / 2 } else { body.len() };
    [head.as_bytes(), &body[..sent]].concat()
}

fn done(request: &Request, state: &Mutex<State>) -> Result<Vec<u8>, Refused> {
    let missing = Refused(404, "NoSuchBucket", "");
    let rest = request.path.strip_prefix(&format!("/{BUCKET}")).ok_or(missing)?;
    let mut state = locked(state);
    match (request.method.as_str(), rest.strip_prefix('/')) {
        ("GET", None) => Ok(listing(request, &state)),
        ("GET", Some(key)) => {
            let found = state.objects.get(&decoded(key)).cloned();
            found.ok_or(Refused(404, "NoSuchKey", ""))
        }
        ("PUT", Some(key)) => {
            if state.fault != Some(Fault::Forgets) {
                state.objects.insert(decoded(key), request.body.clone());
            }
            Ok(Vec::new())
        }
        _ => Err(Refused(405, "MethodNotAllowed", "")),
    }
}

fn listing(request: &Request, state: &State) -> Vec<u8> {
    let value = |name: &str| {
        let mut pairs = request.query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| decoded(value)).unwrap_or_default()
    };
    assert_eq!(value("list-type"), "2");
    let (prefix, after) = (value("prefix"), value("start-after"));
    let mut found =
        state.objects.iter().filter(|(key, _)| key.starts_with(&prefix) && **key > after);
    let objects: String = found
        .by_ref()
        .take(PAGE)
        .map(|(key, body)| {
            format!("<Contents><Key>{key}</Key><Size>{}</Size></Contents>\n", body.len())
        })
        .collect();
    let more = found.next().is_some();
    format!(
        "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
         <IsTruncated>{more}</IsTruncated>{objects}</ListBucketResult>"
    )
    .into_bytes()
}

/// Checks the signature, the time and the content.
fn verified(request: &Request, behind: Duration) -> Result<(), Refused> {
    let header = |name: &str| request.headers.get(name).cloned().unwrap_or_default();
    let (time, content) = (header("x-amz-date"), header("x-amz-content-sha256"));
    let authorization = header("authorization");
    let part = |name: &str| {
        let rest = authorization.split_once(&format!("{name}="))?.1;
        Some(rest.split(',').next()?.trim().to_owned())
    };
    let malformed = || Refused(400, "AuthorizationHeaderMalformed", REGION);
    let credential = part("Credential").ok_or_else(malformed)?;
    let signed = part("SignedHeaders").ok_or_else(malformed)?;
    let signature = part("Signature").ok_or_else(malformed)?;
    let (id, scope) = credential.split_once('/').ok_or_else(malformed)?;
    let date = time.get(..8).unwrap_or_default();
    if scope != format!("{date}/{REGION}/s3/aws4_request") {
        return Err(malformed());
    }
    for needed in ["host", "x-amz-content-sha256", "x-amz-date"] {
        if !signed.split(';').any(|name| name == needed) {
            return Err(Refused(403, "AccessDenied", ""));
        }
    }
    if id != KEY {
        return Err(Refused(403, "InvalidAccessKeyId", ""));
    }
    let now = clock::now() - behind;
    if seconds(now).abs_diff(seconds_of(&time)) > SKEW_MAX {
        return Err(Refused(403, "RequestTimeTooSkewed", ""));
    }
    let mut pairs: Vec<_> = request.query.split('&').filter(|pair| !pair.is_empty()).collect();
    pairs.sort_unstable();
    let lines: String =
        signed.split(';').map(|name| format!("{name}:{}\n", header(name))).collect();
    let canonical =
        [request.method.as_str(), &request.path, &pairs.join("&"), &lines, &signed, &content]
            .join("\n");
    let digest = hex::encode(&Sha256::digest(canonical));
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{digest}");
    let mut key = format!("AWS4{SECRET}").into_bytes();
    for part in [date, REGION, "s3", "aws4_request"] {
        key = hmac(&key, part);
    }
    if hex::encode(&hmac(&key, &text)) != signature {
        return Err(Refused(403, "SignatureDoesNotMatch", ""));
    }
    let digest = Sha256::digest(&request.body);
    if hex::encode(&digest) != content {
        return Err(Refused(400, "XAmzContentSHA256Mismatch", ""));
    }
    // The demand of an object lock; every header of this kind must be signed.
    if request.method == "PUT" {
        let checksum = "x-amz-checksum-sha256";
        if header(checksum) != Base64::encode_string(&digest) {
            return Err(Refused(400, "BadDigest", ""));
        }
        if !signed.split(';').any(|name| name == checksum) {
            return Err(Refused(403, "AccessDenied", ""));
        }
    }
    Ok(())
}

/// HMAC with SHA-256, as RFC 2104 writes it.
fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let mut block = match key.len() {
        0..=64 => key.to_vec(),
        _ => Sha256::digest(key).to_vec(),
    };
    block.resize(64, 0);
    let with = |mask: u8| block.iter().map(|byte| byte ^ mask).collect::<Vec<_>>();
    let inner = Sha256::digest([with(0x36).as_slice(), text.as_bytes()].concat());
    Sha256::digest([with(0x5c).as_slice(), &inner].concat()).to_vec()
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The seconds of the newest moment that is written so, or zero.
fn seconds_of(text: &str) -> u64 {
    let format = format_description!("[year][month][day]T[hour][minute][second]Z");
    // Written by a search: this build does not have the parser of the library.
    let (mut low, mut high) = (0, 1 << 36);
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        let moment = OffsetDateTime::from_unix_timestamp(i64::try_from(middle).unwrap()).unwrap();
        match moment.format(format).unwrap().as_str() <= text {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('%') {
        bytes.extend_from_slice(before.as_bytes());
        bytes.extend(hex::decode(&after[..2].to_lowercase()).unwrap());
        rest = &after[2..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8(bytes).unwrap()
}
