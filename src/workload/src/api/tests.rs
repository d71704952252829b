//! A server in the place of an API server, and requests to it.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use ed25519_dalek::SigningKey;
use polis_base::sys::clock;
use polis_wire::pki::{self, memory::Memory};
use polis_wire::rpc::{provider, testing::node_id};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::credentials::{Purpose, authority};
use crate::site::Site;

/// The files of a client, in this folder, and a server that it trusts.
pub(crate) async fn trusted(base: &Path) -> (Site, TlsAcceptor) {
    let site = Site::live(&polis_base::files::Root::at(base));
    site.run.create().unwrap();
    let namespace = pki::Namespace::new(Memory::default(), "");
    let (now, key) = (clock::now(), SigningKey::from_bytes(&[3; 32]));
    let ca = namespace.ensure(&authority(), now).await.unwrap();
    site.run.ca.write(pki::certificate_pem(&ca.der).as_bytes()).unwrap();
    let wish = Purpose::ApiServer.wish(&site, node_id(1), &[], key.verifying_key().to_bytes());
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
pub(crate) async fn asked<T>(
    answer: impl Fn(&str) -> String,
    ask: impl AsyncFnOnce(&Api) -> T,
) -> T {
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
