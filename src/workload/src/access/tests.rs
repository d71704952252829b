//! The proxy on loopback, with real certificates on both sides and a small server in the place
//! of the API server.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::body::Body;

use super::*;
use crate::credentials::{authority, front_proxy_authority};
use crate::parts::Status;
use polis_base::files;
use polis_base::sys::clock;
use polis_runtime::lines::Lines;
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{self, Namespace};
use polis_wire::rpc::Role;
use polis_wire::rpc::testing::{Authority, Running, SOON, key, node_id, self_signed};

/// The seeds of the node's key and of the other keys.
const NODE: u8 = 1;
const PERSON: u8 = 9;
/// How long a container writes no line.
const SILENT: Duration = Duration::from_millis(500);
/// The longest that a revoked user may go on.
const CUT_MAX: Duration = Duration::from_secs(2);

/// A proxy, and the server behind it.
struct World {
    _base: tempfile::TempDir,
    authority: Authority,
    proxy: Running,
    site: Site,
    server: Option<JoinSet<()>>,
    tls: Arc<ServerConfig>,
    /// Each connection that the server has lost.
    lost: mpsc::Receiver<()>,
    loses: mpsc::Sender<()>,
}

impl World {
    async fn new() -> Self {
        Self::with(limits()).await
    }

    async fn with(limits: Limits) -> Self {
        Self::patient(limits, ANSWER_MAX).await
    }

    /// A proxy that waits so long until an answer begins.
    async fn patient(limits: Limits, answer_max: Duration) -> Self {
        let base = tempfile::tempdir().unwrap();
        let mut site = Site::live(&files::Root::at(base.path()));
        site.data.create().unwrap();
        site.run.create().unwrap();
        let bound = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        site.listen = bound.local_addr().unwrap();
        drop(bound);
        let namespace = Namespace::new(Memory::default(), "");
        let now = clock::now();
        let node = node_id(NODE);
        let ca = namespace.ensure(&authority(), now).await.unwrap();
        let front_proxy_ca = namespace.ensure(&front_proxy_authority(), now).await.unwrap();
        site.run.ca.write(pki::certificate_pem(&ca.der).as_bytes()).unwrap();
        let public = |seed| key(seed).verifying_key().to_bytes();
        let own = Purpose::AuthProxy.wish(&site, node, &[], public(2));
        let own = namespace.ensure(&own, now).await.unwrap();
        let pair = Purpose::AuthProxy.pair(&site.data);
        pair.certificate.write(pki::certificate_pem(&own.der).as_bytes()).unwrap();
        pair.key.write(pki::key_pem(&key(2)).as_bytes()).unwrap();
        let server = Purpose::ApiServer.wish(&site, node, &[], public(3));
        let server = namespace.ensure(&server, now).await.unwrap();
        let tls = tls(&server.der, &front_proxy_ca.der);

        let cluster = Authority::new().await;
        let parts = Parts::new(watch::Sender::new(Status::default()), Lines::channel().0);
        parts.expect(&Part::CONTROLLER);
        let upstream =
            Api { address: site.api(), ca: site.run.ca.clone(), client: Some(pair.clone()) };
        let app = App::Gateway(Arc::new(Proxy { node, upstream, answer_max, parts }));
        let proxy = Running::start(&cluster, cluster.node(NODE).await, app, limits).await;
        let (loses, lost) = mpsc::channel(64);
        let authority = cluster;
        let mut world =
            Self { _base: base, authority, proxy, site, server: None, tls, lost, loses };
        world.server_starts().await;
        world
    }

    async fn server_starts(&mut self) {
        let listener = TcpListener::bind(self.site.listen).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, TlsAcceptor::from(self.tls.clone()), self.loses.clone()));
        self.server = Some(tasks);
    }

    async fn server_ends(&mut self) {
        self.server.take().unwrap().shutdown().await;
    }

    async fn user(&self, role: Role) -> Credentials {
        self.authority.user(role.as_str(), role, PERSON).await
    }

    /// A connection as kubectl makes it: the name of the node, and any protocol or none.
    async fn connect(&self, own: Option<&Credentials>, alpn: &[&[u8]]) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(self.authority.der.clone())).unwrap();
        let builder = ClientConfig::builder_with_provider(rpc::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let chain = vec![CertificateDer::from(own.certificate.clone())];
                let key = PrivatePkcs8KeyDer::from(own.key.to_vec());
                builder.with_client_auth_cert(chain, PrivateKeyDer::Pkcs8(key)).unwrap()
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let tcp = TcpStream::connect(self.proxy.address).await.unwrap();
        let name = ServerName::try_from(node_id(NODE).to_string()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap()
    }

    async fn connected(&self, role: Role) -> TlsStream<TcpStream> {
        self.connect(Some(&self.user(role).await), &[b"h2", b"http/1.1"]).await
    }

    /// The answer of the proxy to one request, as text.
    async fn asked(&self, own: Option<&Credentials>, request: &str) -> String {
        let mut connection = self.connect(own, &[]).await;
        ask(&mut connection, &format!("{request}connection: close\r\n\r\n")).await;
        let mut text = String::new();
        // The other end may not close in order.
        let _end = timeout(SOON, connection.read_to_string(&mut text)).await.unwrap();
        text
    }

    fn revoke(&self, name: &str) {
        self.proxy.access_list.send_modify(|list| {
            Arc::make_mut(list).users.as_mut().unwrap().remove(name);
        });
    }
}

fn tls(certificate: &[u8], clients: &[u8]) -> Arc<ServerConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(clients.to_vec())).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), rpc::provider());
    let chain = vec![CertificateDer::from(certificate.to_vec())];
    let key = PrivatePkcs8KeyDer::from(pki::key_der(&key(3)).to_vec());
    let config = ServerConfig::builder_with_provider(rpc::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(chain, PrivateKeyDer::Pkcs8(key))
        .unwrap();
    Arc::new(config)
}

/// The server in the place of the API server.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor, loses: mpsc::Sender<()>) {
    let mut connections = JoinSet::new();
    loop {
        let (tcp, _from) = listener.accept().await.unwrap();
        let (acceptor, loses) = (acceptor.clone(), loses.clone());
        connections.spawn(async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            let (tunnels, mut opened) = mpsc::channel(1);
            let service = service_fn(move |request| answer(request, tunnels.clone()));
            let connection =
                http1::Builder::new().serve_connection(TokioIo::new(tls), service).with_upgrades();
            let _ended = connection.await;
            if let Ok(tunnel) = opened.try_recv() {
                echo(tunnel).await;
            }
            let _told = loses.send(()).await;
        });
    }
}

type Tunnels = mpsc::Sender<hyper::upgrade::OnUpgrade>;

async fn answer(
    mut request: Request<Incoming>,
    tunnels: Tunnels,
) -> Result<Response<Body>, Infallible> {
    let mut lines: Vec<_> = request
        .headers()
        .iter()
        .map(|(name, value)| format!("{name}={}\n", value.to_str().unwrap()))
        .collect();
    lines.sort();
    Ok(match request.uri().path() {
        "/watch" => {
            let first =
                futures::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("one\n")))]);
            Response::new(Body::new(StreamBody::new(first.chain(futures::stream::pending()))))
        }
        "/exec" => {
            tunnels.send(hyper::upgrade::on(&mut request)).await.unwrap();
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            for name in ["connection", "upgrade"] {
                let value = request.headers().get(name).unwrap().clone();
                response.headers_mut().insert(http::HeaderName::from_static(name), value);
            }
            response
        }
        "/last" => {
            let mut response = Response::new(Body::new("bye".to_owned()));
            let close = http::HeaderValue::from_static("close");
            response.headers_mut().insert(http::header::CONNECTION, close);
            response
        }
        path if path.ends_with("/log") => {
            sleep(SILENT).await;
            Response::new(Body::new("a line".to_owned()))
        }
        "/length" => {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            Response::new(Body::new(format!("{} bytes", body.len())))
        }
        _ => Response::new(Body::new(lines.concat())),
    })
}

/// Sends everything back in capitals.
async fn echo(tunnel: hyper::upgrade::OnUpgrade) {
    let mut io = TokioIo::new(tunnel.await.unwrap());
    let mut buffer = [0; 64];
    while let Ok(count @ 1..) = io.read(&mut buffer).await {
        let capitals = buffer[..count].to_ascii_uppercase();
        io.write_all(&capitals).await.unwrap();
        io.flush().await.unwrap();
    }
}

async fn ask(connection: &mut TlsStream<TcpStream>, request: &str) {
    connection.write_all(request.as_bytes()).await.unwrap();
    connection.flush().await.unwrap();
}

/// Reads until the text ends so.
async fn read_to(connection: &mut TlsStream<TcpStream>, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        let byte = timeout(SOON, connection.read_u8()).await.unwrap();
        text.push(char::from(byte.unwrap_or_else(|error| panic!("{error} after {text}"))));
    }
    text
}

/// Reads to the end of a connection that has to end soon.
async fn read_to_cut(connection: &mut TlsStream<TcpStream>) -> String {
    let mut rest = Vec::new();
    let ended = timeout(CUT_MAX, connection.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "it goes on: {rest:?}");
    String::from_utf8_lossy(&rest).into_owned()
}

#[tokio::test]
async fn a_request_is_made_in_the_name_of_its_user_alone() {
    let world = World::new().await;
    for role in [Role::Owner, Role::Operator, Role::Viewer] {
        let own = world.user(role).await;
        let text = world
            .asked(
                Some(&own),
                "GET /echo HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\nx-remote-user: \
                 polis:eve\r\nx-remote-group: system:masters\r\naccept: a/b\r\n",
            )
            .await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let host = world.site.listen;
        assert_eq!(
            body,
            format!(
                "accept=a/b\nhost={host}\nx-forwarded-for=127.0.0.1\nx-remote-group=polis:{role}s\n\
                 x-remote-user=polis:{role}\n"
            )
        );
    }
    world.proxy.stop().await;
}

#[tokio::test]
async fn callers_that_are_no_users_are_rejected_with_a_status_object() {
    let world = World::new().await;
    world.proxy.up(&[NODE]);
    let node = world.authority.node(NODE).await;
    let stranger = self_signed(7, None);
    for (own, code) in [(None, 401), (Some(&stranger), 401), (Some(&node), 403)] {
        let text = world.asked(own, "GET /api HTTP/1.1\r\nhost: a\r\n").await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {code}")), "{head}");
        let status: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &code.into()));
        let message = status["message"].as_str().unwrap();
        assert!(message.contains("this call needs the certificate of a user"), "{message}");
    }
    let mut revoked = world.connected(Role::Viewer).await;
    world.revoke("viewer");
    ask(&mut revoked, "GET /api HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let text = read_to_cut(&mut revoked).await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 401"), "{text}");
    world.proxy.stop().await;
}

#[tokio::test]
async fn a_watch_ends_in_the_middle_when_its_user_is_revoked() {
    let mut world = World::new().await;
    let mut watch = world.connected(Role::Viewer).await;
    let mut other = world.connected(Role::Owner).await;
    for connection in [&mut watch, &mut other] {
        ask(connection, "GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
        read_to(connection, "one\n\r\n").await;
    }
    world.revoke("viewer");
    let rest = read_to_cut(&mut watch).await;
    assert!(!rest.contains("0\r\n"), "it looks complete: {rest:?}");
    // The server behind it has lost its reader, and the other user has not.
    timeout(SOON, world.lost.recv()).await.unwrap().unwrap();
    assert!(timeout(Duration::from_millis(50), other.read_u8()).await.is_err());
    assert_eq!(world.proxy.metrics.cut.get(), 1);
    world.proxy.stop().await;
}

#[tokio::test]
async fn the_log_of_a_silent_container_is_followed_and_no_other_answer_may_begin_as_late() {
    let world = World::patient(limits(), SILENT / 5).await;
    let own = world.user(Role::Viewer).await;
    let log = "/api/v1/namespaces/shop/pods/web-1/log";
    for (query, head, body) in [
        ("", "HTTP/1.1 504", "no answer began within 0.1 s"),
        ("?follow=true", "HTTP/1.1 200", "a line"),
    ] {
        let request = format!("GET {log}{query} HTTP/1.1\r\nhost: a\r\n");
        let text = world.asked(Some(&own), &request).await;
        assert!(text.starts_with(head) && text.contains(body), "{query}: {text}");
    }
    world.proxy.stop().await;
}

#[tokio::test]
async fn an_upgrade_is_a_tunnel_until_its_user_is_revoked() {
    let mut world = World::new().await;
    let mut exec = world.connected(Role::Operator).await;
    ask(
        &mut exec,
        "POST /exec?command=sh HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\
         content-length: 0\r\n\r\n",
    )
    .await;
    let head = read_to(&mut exec, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101") && head.contains("SPDY/3.1"), "{head}");
    for word in ["ls", "exit"] {
        ask(&mut exec, word).await;
        assert_eq!(read_to(&mut exec, &word.to_uppercase()).await, word.to_uppercase());
    }
    world.revoke("operator");
    assert_eq!(read_to_cut(&mut exec).await, "");
    timeout(SOON, world.lost.recv()).await.unwrap().unwrap();
    world.proxy.stop().await;
}

#[tokio::test]
async fn a_tunnel_ends_with_either_end() {
    let mut world = World::new().await;
    let request =
        "GET /exec HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let mut left = world.connected(Role::Owner).await;
    ask(&mut left, request).await;
    read_to(&mut left, "\r\n\r\n").await;
    drop(left);
    timeout(SOON, world.lost.recv()).await.unwrap().unwrap();
    let mut stays = world.connected(Role::Owner).await;
    ask(&mut stays, request).await;
    read_to(&mut stays, "\r\n\r\n").await;
    world.server_ends().await;
    let mut rest = Vec::new();
    let _end = timeout(SOON, stays.read_to_end(&mut rest)).await.unwrap();
    world.proxy.stop().await;
}

#[tokio::test]
async fn while_the_api_server_is_down_the_answer_names_the_next_step() {
    let mut world = World::new().await;
    world.server_ends().await;
    let mut connection = world.connected(Role::Viewer).await;
    ask(&mut connection, "GET /api HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let text = read_to(&mut connection, "}").await;
    let body = text.split_once("\r\n\r\n").unwrap().1.to_owned() + "";
    assert!(text.starts_with("HTTP/1.1 502"), "{text}");
    assert!(body.contains("`polisctl kubernetes status`"), "{body}");
    assert!(body.contains("Connection refused"), "{body}");
    world.server_starts().await;
    // The rest of the first answer ends with its last brace.
    let mut connection = world.connected(Role::Viewer).await;
    ask(&mut connection, "GET /last HTTP/1.1\r\nhost: a\r\n\r\n").await;
    read_to(&mut connection, "bye").await;
    // The API server has closed its side; the user's stays open.
    timeout(SOON, world.lost.recv()).await.unwrap().unwrap();
    ask(&mut connection, "GET /last HTTP/1.1\r\nhost: a\r\n\r\n").await;
    read_to(&mut connection, "bye").await;
    world.proxy.stop().await;
}

#[tokio::test]
async fn bodies_pass_whole_and_heads_that_are_too_long_do_not() {
    let world = World::new().await;
    let own = world.user(Role::Owner).await;
    let body = "x".repeat(300_000);
    let mut connection = world.connect(Some(&own), &[b"http/1.1"]).await;
    let head = format!("PUT /length HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    ask(&mut connection, &format!("{head}{body}")).await;
    read_to(&mut connection, "300000 bytes").await;
    let chunked = "PUT /length HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n\
                   5\r\nhello\r\n0\r\n\r\n";
    ask(&mut connection, chunked).await;
    read_to(&mut connection, "5 bytes").await;
    let long = format!("GET /echo HTTP/1.1\r\nhost: a\r\na: {}\r\n", "y".repeat(70_000));
    let text = world.asked(Some(&own), &long).await;
    assert!(text.starts_with("HTTP/1.1 431"), "{text}");
    world.proxy.stop().await;
}

#[tokio::test]
async fn a_user_has_so_many_connections_and_one_that_says_nothing_ends() {
    let limits = Limits { known_per_name: 2, idle: Duration::from_millis(300), ..super::limits() };
    let world = World::with(limits).await;
    let mut watches = Vec::new();
    for _ in 0..2 {
        let mut watch = world.connected(Role::Viewer).await;
        ask(&mut watch, "GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
        read_to(&mut watch, "one\n\r\n").await;
        watches.push(watch);
    }
    let mut third = world.connected(Role::Viewer).await;
    assert_eq!(read_to_cut(&mut third).await, "", "the third is turned away");
    drop(watches);
    let mut silent = world.connected(Role::Owner).await;
    ask(&mut silent, "GET /slow HTT").await;
    let text = read_to_cut(&mut silent).await;
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 408"), "{text}");
    world.proxy.stop().await;
}

#[tokio::test]
async fn users_that_have_every_connection_do_not_keep_an_owner_out() {
    let limits = Limits { known: 4, known_per_name: 3, ..super::limits() };
    let world = World::with(limits).await;
    let mut watches = Vec::new();
    for role in [Role::Viewer, Role::Viewer, Role::Operator, Role::Viewer] {
        let mut watch = world.connected(role).await;
        ask(&mut watch, "GET /watch HTTP/1.1\r\nhost: a\r\n\r\n").await;
        read_to(&mut watch, "one\n\r\n").await;
        watches.push(watch);
    }
    let owner = world.user(Role::Owner).await;
    let text = world.asked(Some(&owner), "GET /echo HTTP/1.1\r\nhost: a\r\n").await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // The newest of the user with the most has made way, and looks cut off.
    let rest = read_to_cut(&mut watches[3]).await;
    assert!(!rest.contains("0\r\n"), "it looks complete: {rest:?}");
    assert_eq!(world.proxy.metrics.crowded_out.get(), 1);
    for watch in &mut watches[..3] {
        assert!(timeout(Duration::from_millis(50), watch.read_u8()).await.is_err());
    }
    world.proxy.stop().await;
}
