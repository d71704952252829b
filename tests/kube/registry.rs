//! A registry of container images, by HTTPS, with what a story gives it.
//!
//! It answers the requests of a pull ([distribution specification], *Pull*): manifests by
//! tag and by digest, and blobs. Not ranges: a client takes the whole blob then.
//!
//! [distribution specification]: https://github.com/opencontainers/distribution-spec

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// The longest head of a request.
const HEAD_MAX: usize = 64 << 10;

/// The content of a registry: the media type and the bytes of each path. Images may share a
/// layer.
pub(crate) type Content = BTreeMap<String, (String, Arc<[u8]>)>;

/// A running registry. It ends with the runtime of the story.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    /// The authority of its certificate, in PEM.
    pub(crate) authority: String,
    /// The first line of each request that was let in.
    pub(crate) requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts it on the loopback interface, with a certificate for `name`. With an
    /// `authorization`, it answers only requests with that value.
    #[expect(clippy::disallowed_methods, reason = "a story is not a service of a node")]
    pub(crate) async fn start(
        name: &str,
        authorization: Option<&'static str>,
        content: Content,
    ) -> Result<Self> {
        let (authority, issuer) = authority();
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let params = rcgen::CertificateParams::new(vec![name.to_owned()])?;
        let certificate = params.signed_by(&key, &issuer)?;
        let chain = vec![CertificateDer::from(certificate.der().to_vec())];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let requests = Arc::new(Mutex::new(Vec::new()));
        let content = Arc::new(content);
        let served = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, content) = (acceptor.clone(), Arc::clone(&content));
                let served = Arc::clone(&served);
                tokio::spawn(async move {
                    // A client that does not trust the certificate goes away here.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let Ok(head) = head(&mut stream).await else { return };
                    let (head, body) = answer(&head, authorization, &content, &served);
                    let _gone = stream.write_all(&head).await;
                    let _gone = stream.write_all(&body).await;
                    let _gone = stream.shutdown().await;
                });
            }
        });
        Ok(Self { address, authority, requests })
    }

    pub(crate) fn served(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// Reads the head of a request.
pub(crate) async fn head(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < HEAD_MAX {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8(head)?)
}

/// The head and the body of the answer.
fn answer(
    head: &str,
    authorization: Option<&str>,
    content: &Content,
    served: &Mutex<Vec<String>>,
) -> (Vec<u8>, Arc<[u8]>) {
    let line = head.lines().next().unwrap_or_default();
    let user = authorization.map(|value| format!("authorization: {value}").to_lowercase());
    if user.is_some_and(|user| !head.to_lowercase().lines().any(|line| line == user)) {
        let head = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"story\"\r\n\
                    Content-Length: 0\r\nConnection: close\r\n\r\n";
        return (head.into(), Arc::default());
    }
    served.lock().unwrap().push(line.to_owned());
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split('?').next().unwrap_or_default();
    let Some((kind, bytes)) = content.get(path) else {
        let head = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        return (head.into(), Arc::default());
    };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
         Docker-Content-Digest: {}\r\nConnection: close\r\n\r\n",
        bytes.len(),
        digest(bytes),
    );
    let body = if method == "HEAD" { Arc::default() } else { Arc::clone(bytes) };
    (head.into_bytes(), body)
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", polis_base::hex::encode(&Sha256::digest(bytes)))
}

/// An authority in PEM, and what signs with it.
pub(crate) fn authority() -> (String, rcgen::Issuer<'static, rcgen::KeyPair>) {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.not_after = rcgen::date_time_ymd(2100, 1, 1);
    let certificate = params.self_signed(&key).unwrap();
    (certificate.pem(), rcgen::Issuer::new(params, key))
}
