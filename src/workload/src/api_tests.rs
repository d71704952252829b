//! Requests to a server in the place of an API server, and its errors.

use std::convert::Infallible;
use std::path::Path;

use polis_base::sys::clock;
use polis_wire::pki::memory::Memory;
use polis_wire::rpc::testing::node_id;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::credentials::{Purpose, authority};
use crate::site::Site;

#[test]
fn an_error_quotes_the_message_of_the_server() {
    let status = br#"{"kind":"Status","status":"Failure","message":"forbidden: no","code":403}"#;
    assert_eq!(said(status), "forbidden: no");
    assert_eq!(
        said(b"[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed\n"),
        "etcd failed: reason withheld"
    );
    assert_eq!(said(b"404 page not found\n"), "404 page not found");
    assert_eq!(said(&[0xff; 1000]).chars().count(), QUOTE_MAX);
}

#[tokio::test]
async fn a_server_that_has_lost_its_power_is_given_up_within_half_a_minute() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    let plain = TcpStream::connect(address).await.unwrap();
    assert_eq!(patience(&plain).unwrap(), [Duration::ZERO; 2]);
    let tcp = open(address).await.unwrap();
    assert_eq!(patience(&tcp).unwrap(), [Duration::from_secs(30); 2]);
}

#[tokio::test]
async fn the_kernel_holds_back_nothing_that_was_written() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tcp = open(server.local_addr().unwrap()).await.unwrap();
    assert!(tcp.nodelay().unwrap());
}

/// The files of a client, in this folder, and a server that it trusts.
pub(crate) async fn trusted(base: &Path) -> (Site, TlsAcceptor) {
    let site = Site::live(&polis_base::files::Root::at(base));
    site.run.create().unwrap();
    let namespace = pki::Namespace::new(Memory::default(), "");
    let (now, key) = (clock::now(), SigningKey::from_bytes(&[3; 32]));
    let ca = namespace.ensure(&authority(), now).await.unwrap();
    site.run.ca.write(pki::certificate_pem(&ca.der).as_bytes()).unwrap();
    let wish = Purpose::ApiServer.wish(&site, node_id(1), key.verifying_key().to_bytes());
    let chain = vec![CertificateDer::from(namespace.ensure(&wish, now).await.unwrap().der)];
    let key = PrivatePkcs8KeyDer::from(pki::key_der(&key).to_vec());
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::Pkcs8(key))
        .unwrap();
    (site, Arc::new(config).into())
}

/// Asks a server in the place of an API server, which has `answer` for each path.
async fn asked<T>(answer: impl Fn(&str) -> String, ask: impl AsyncFnOnce(&Api) -> T) -> T {
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let api = Api { address, ca: site.run.ca.clone(), client: None };
    tokio::select! {
        never = serve(listener, acceptor, answer) => match never {},
        answer = ask(&api) => answer,
    }
}

/// Serves one connection after the other.
async fn serve(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    answer: impl Fn(&str) -> String,
) -> Infallible {
    loop {
        let (tcp, _from) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(tcp).await.unwrap();
        let mut bytes = vec![0; 4096];
        // A client that has read enough closes the connection.
        while let Ok(length @ 1..) = tls.read(&mut bytes).await {
            let request = String::from_utf8_lossy(&bytes[..length]);
            let body = answer(request.split(' ').nth(1).unwrap());
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            let content = [head.as_bytes(), body.as_bytes()].concat();
            if tls.write_all(&content).await.is_err() || tls.flush().await.is_err() {
                break;
            }
        }
    }
}

#[tokio::test]
async fn checks_share_a_connection_until_it_ends_or_its_certificate_is_refused() {
    const EMPTY: &str = "Content-Length: 0\r\n\r\n";
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = std::cell::Cell::new(0);
    // The heads of the answers on each connection.
    let heads: [&[&str]; 3] = [
        &["503 No\r\n", "200 OK\r\n", "401 No\r\n"],
        &["200 OK\r\nConnection: close\r\n"],
        &["200 OK\r\n"],
    ];
    let serve = async {
        for heads in heads {
            let (tcp, _from) = listener.accept().await.unwrap();
            let mut tls = acceptor.accept(tcp).await.unwrap();
            connections.set(connections.get() + 1);
            for head in heads {
                let mut bytes = vec![0; 4096];
                let length = tls.read(&mut bytes).await.unwrap();
                assert!(bytes[..length].starts_with(b"GET /readyz "));
                let answer = format!("HTTP/1.1 {head}{EMPTY}");
                tls.write_all(answer.as_bytes()).await.unwrap();
            }
            let _lost = tls.shutdown().await;
        }
    };
    let checks = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let story = async {
        for (status, count) in [(503, 1), (200, 1), (401, 1), (200, 2), (200, 3)] {
            match checks.check("/readyz").await {
                Ok(()) => assert_eq!(status, 200),
                Err(Error::Refused { status: said, .. }) => assert_eq!(said, status),
                Err(other) => panic!("{other}"),
            }
            assert_eq!(connections.get(), count, "{status}");
        }
    };
    tokio::join!(serve, story);
}

#[tokio::test]
async fn a_session_that_was_closed_makes_another_connection() {
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let session = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let serve = async {
        for _connection in 0..2 {
            let (tcp, _from) = listener.accept().await.unwrap();
            let mut tls = acceptor.accept(tcp).await.unwrap();
            let mut bytes = vec![0; 4096];
            assert!(tls.read(&mut bytes).await.unwrap() > 0);
            tls.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            // No other request comes.
            assert!(matches!(tls.read(&mut bytes).await, Ok(0) | Err(_)));
        }
    };
    let story = async {
        for _pass in 0..2 {
            session.check("/readyz").await.unwrap();
            session.close();
        }
    };
    tokio::join!(serve, story);
}

#[tokio::test]
async fn a_request_that_a_kept_connection_ends_before_it_takes_fails_at_once() {
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let checks = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let serve = async {
        let (tcp, _from) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(tcp).await.unwrap();
        let mut bytes = vec![0; 4096];
        let _length = tls.read(&mut bytes).await.unwrap();
        tls.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        tls
    };
    let (mut server, checked) = tokio::join!(serve, checks.check("/readyz"));
    checked.unwrap();
    let open = checks.take().unwrap();
    // As when the server closes it right behind the look at whether it lives.
    server.shutdown().await.unwrap();
    // The runtime learns of it.
    tokio::task::yield_now().await;
    let request = checks.api.prepared(Method::GET, "/readyz", &[], Vec::new()).unwrap();
    let asked = checks.api.over_kept(open, request, ANSWER_MAX);
    let asked = timeout(Duration::from_secs(5), asked).await;
    assert!(matches!(asked, Ok(Err(Error::Http { .. }))));
}

#[tokio::test]
async fn long_objects_are_listed_a_few_at_a_time_and_one_alone_may_be_longer() {
    // Six objects of 1 MiB, and one that is longer than an answer of several.
    let lengths = [1, 1, 1, 1, 1, 1, 5].map(|mib: usize| mib << 20);
    let answer = |path: &str| {
        let number = |name: &str| {
            let value = path.split(['?', '&']).find_map(|part| part.strip_prefix(name));
            value.map_or(0, |value| value.parse::<usize>().unwrap())
        };
        let (from, limit) = (number("continue="), number("limit="));
        let to = lengths.len().min(from + limit);
        let objects = (from..to).map(|object| json!([object, "x".repeat(lengths[object])]));
        let rest = if to < lengths.len() { to.to_string() } else { String::new() };
        let items = objects.collect::<Vec<_>>();
        json!({"items": items, "metadata": {"continue": rest}}).to_string()
    };
    let found = asked(answer, async |api| {
        Session::new(api).list("/pods", JSON, 50, |one| one[0].as_u64()).await
    });
    assert_eq!(found.await.unwrap(), [0, 1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn a_success_that_is_too_long_to_read_is_one() {
    let long = |_path: &str| " ".repeat(ANSWER_MAX + 1);
    let (checked, read) =
        asked(long, async |api| (api.check("/list").await, api.get("/list").await)).await;
    checked.unwrap();
    assert!(matches!(read, Err(Error::Long { status: 200, .. })), "{read:?}");
}

#[test]
fn an_answer_shows_no_content() {
    let answer = Answer { status: 200, body: b"secret".to_vec() };
    assert_eq!(format!("{answer:?}"), "Answer(200, 6 bytes)");
}

#[tokio::test]
async fn credentials_that_are_not_there_are_named() {
    let base = tempfile::tempdir().unwrap();
    let root = polis_base::files::Root::at(base.path());
    let api =
        Api { address: ([127, 0, 0, 1], 1).into(), ca: root.ephemeral.kubernetes.ca, client: None };
    let error = api.check("/readyz").await.unwrap_err();
    assert!(error.to_string().ends_with("/ephemeral/kubernetes/ca.crt"), "{error}");
}
