//! A connection to a server: TCP with its options, and TLS 1.3 with the credentials in the files
//! of an [`Api`].

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use zeroize::Zeroizing;

use super::{Api, Error};
use polis_base::files::{File, Pair};
use polis_runtime::supervisor::blocking;
use polis_wire::pki;
use polis_wire::rpc::{KeepAlive, provider};

/// A watch may be silent for minutes. Together these are less than the 40 s of kubelet's lease.
const KEEP_ALIVE: KeepAlive = KeepAlive {
    idle: Duration::from_secs(15),
    interval: Duration::from_secs(5),
    probes: 3,
    unacknowledged_ms: 30_000,
};

/// A connection for HTTP/1.1. It moves bytes while it is polled.
pub(crate) type Pipe = Connection<TokioIo<TlsStream<TcpStream>>, Full<Bytes>>;

impl Api {
    /// A new connection, and the way to send requests over it.
    ///
    /// # Errors
    ///
    /// [`Error::Credentials`], [`Error::Connect`] and [`Error::Http`].
    pub(crate) async fn dial(&self) -> Result<(SendRequest<Full<Bytes>>, Pipe), Error> {
        let tls = self.connect().await?;
        http1::handshake(TokioIo::new(tls)).await.map_err(|error| self.http(error))
    }

    /// A new connection, for HTTP/1.1.
    ///
    /// # Errors
    ///
    /// [`Error::Credentials`] and [`Error::Connect`].
    pub(crate) async fn connect(&self) -> Result<TlsStream<TcpStream>, Error> {
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
}

/// A new connection, with its options ([`set_options`]).
pub(crate) async fn open(address: SocketAddr) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(address).await?;
    set_options(&tcp);
    Ok(tcp)
}

/// Lets the kernel detect and close a connection whose other end has vanished, and send at once
/// what is written. It would hold back the second of two short writes, as of the head of a request
/// and its content, until the other end has acknowledged the first, which may take 40 ms.
pub(crate) fn set_options(tcp: &TcpStream) {
    KEEP_ALIVE.set(tcp);
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
}

/// How long the kernel keeps a connection whose other end has vanished: one that is silent, and
/// one with unacknowledged bytes. Zero: for longer than any test.
#[cfg(test)]
pub(crate) fn timeouts(socket: impl std::os::fd::AsFd) -> rustix::io::Result<[Duration; 2]> {
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_server_that_has_lost_its_power_is_given_up_within_half_a_minute() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        let plain = TcpStream::connect(address).await.unwrap();
        assert_eq!(timeouts(&plain).unwrap(), [Duration::ZERO; 2]);
        let tcp = open(address).await.unwrap();
        assert_eq!(timeouts(&tcp).unwrap(), [Duration::from_secs(30); 2]);
    }

    #[tokio::test]
    async fn the_kernel_holds_back_nothing_that_was_written() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = open(server.local_addr().unwrap()).await.unwrap();
        assert!(tcp.nodelay().unwrap());
    }
}
