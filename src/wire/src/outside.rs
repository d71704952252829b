//! Connections to servers outside of the cluster: TLS 1.2 or 1.3, the certificate checked
//! against the authorities that the owner named for the server, or the public ones of the
//! system. If the cluster has a proxy, the connection goes through a tunnel.
//!
//! Invariants:
//! - No byte of a caller leaves before the certificate of the server was verified.
//! - A connection is there within [`CONNECT_MAX`], or is given up.
//!
//! What this module does not do: speak a protocol above TLS, or show a certificate of its own.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::endpoint::Endpoint;
use crate::registry::Authority;
use crate::rpc;
use crate::tunnel;
use polis_runtime::supervisor::blocking;

/// Name, connection and handshake together.
const CONNECT_MAX: Duration = Duration::from_secs(15);

/// A server outside of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where it listens; its certificate names this host.
    pub endpoint: Endpoint,
    /// The authorities for its certificate; none: the public ones.
    pub authorities: Vec<Authority>,
    /// The HTTP proxy on the way to it; none: it is reached directly.
    pub proxy: Option<Endpoint>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file of the public authorities.
    #[error("cannot read the public authorities in {}", path.display())]
    Bundle {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::pki_types::pem::Error,
    },
    /// The authorities that the owner named.
    #[error("cannot use the authorities for {endpoint}")]
    Authorities {
        /// The server.
        endpoint: Endpoint,
        /// The cause.
        source: rustls::Error,
    },
    /// The name has no address.
    #[error("cannot find the address of {}", endpoint.host)]
    Resolve {
        /// The server.
        endpoint: Endpoint,
        /// The cause.
        source: io::Error,
    },
    /// No address of the server accepts a connection.
    #[error("cannot connect to {endpoint}")]
    Connect {
        /// The server.
        endpoint: Endpoint,
        /// The cause.
        source: io::Error,
    },
    /// No address of the proxy accepts a connection, or its name has none.
    #[error("cannot connect to the proxy {proxy}")]
    Proxy {
        /// The proxy.
        proxy: Endpoint,
        /// The cause.
        source: io::Error,
    },
    /// The proxy does not connect to the server.
    #[error("the proxy {proxy} does not connect to {endpoint}")]
    Tunnel {
        /// The proxy.
        proxy: Endpoint,
        /// The server.
        endpoint: Endpoint,
        /// The cause.
        source: tunnel::Error,
    },
    /// The handshake failed; its certificate may be of another authority.
    #[error("no TLS with {endpoint}")]
    Handshake {
        /// The server.
        endpoint: Endpoint,
        /// The cause.
        source: io::Error,
    },
    /// It took too long.
    #[error("{endpoint} does not answer within {} seconds", CONNECT_MAX.as_secs())]
    Silent {
        /// The server.
        endpoint: Endpoint,
    },
}

/// Connects to a server, which is offered these protocols; `bundle` has the public authorities
/// in PEM.
///
/// # Errors
///
/// [`Error`].
pub async fn connect(
    server: &Server,
    bundle: &Path,
    alpn: &[&[u8]],
) -> Result<TlsStream<TcpStream>, Error> {
    let silent = |_elapsed| Error::Silent { endpoint: server.endpoint.clone() };
    timeout(CONNECT_MAX, attempt(server, bundle, alpn)).await.map_err(silent)?
}

async fn attempt(
    server: &Server,
    bundle: &Path,
    alpn: &[&[u8]],
) -> Result<TlsStream<TcpStream>, Error> {
    let endpoint = || server.endpoint.clone();
    let mut config = {
        let (server, bundle) = (server.clone(), bundle.to_owned());
        blocking(move || config(&server, &bundle)).await?
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let tcp = match &server.proxy {
        None => direct(&server.endpoint).await?,
        Some(proxy) => through(proxy, &server.endpoint).await?,
    };
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
    let handshake = |source| Error::Handshake { endpoint: endpoint(), source };
    let name = ServerName::try_from(server.endpoint.host.clone())
        .map_err(|invalid| handshake(io::Error::other(invalid)))?;
    TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(handshake)
}

/// A connection to the server itself.
async fn direct(server: &Endpoint) -> Result<TcpStream, Error> {
    let resolve = |source| Error::Resolve { endpoint: server.clone(), source };
    let addresses = addresses(server).await.map_err(resolve)?;
    let connect = |source| Error::Connect { endpoint: server.clone(), source };
    reach(&addresses).await.map_err(connect)
}

/// A connection to the server through the proxy, which finds the address of the server itself.
async fn through(proxy: &Endpoint, server: &Endpoint) -> Result<TcpStream, Error> {
    let unreachable = |source| Error::Proxy { proxy: proxy.clone(), source };
    let addresses = addresses(proxy).await.map_err(unreachable)?;
    let tcp = reach(&addresses).await.map_err(unreachable)?;
    let refused = |source| {
        let (proxy, endpoint) = (proxy.clone(), server.clone());
        Error::Tunnel { proxy, endpoint, source }
    };
    tunnel::open(tcp, server).await.map_err(refused)
}

async fn addresses(Endpoint { host, port }: &Endpoint) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((host.as_str(), *port)).await?.collect())
}

/// Connects to the first address that accepts. An address that does not answer leaves time for the
/// others: one of the two families of a host may have no route.
async fn reach(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match timeout(CONNECT_MAX / (count + 1), TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_elapsed) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// Blocks.
fn config(server: &Server, bundle: &Path) -> Result<ClientConfig, Error> {
    let unusable = |source| Error::Authorities { endpoint: server.endpoint.clone(), source };
    let mut roots = RootCertStore::empty();
    if server.authorities.is_empty() {
        let unreadable = |source| Error::Bundle { path: bundle.to_owned(), source };
        let all = CertificateDer::pem_file_iter(bundle).map_err(unreadable)?;
        // One that this library does not understand takes nothing from the others.
        roots.add_parsable_certificates(all.flatten());
    } else {
        let own = server.authorities.iter().map(Authority::der);
        for der in own {
            roots.add(CertificateDer::from(der.to_vec())).map_err(unusable)?;
        }
    }
    let builder = ClientConfig::builder_with_provider(rpc::provider())
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(unusable)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_that_does_not_answer_leaves_time_for_the_next_one() {
        let silent = TcpSocket::new_v4().unwrap();
        silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let silent = silent.listen(0).unwrap();
        // Its queue is full then, so that it lets further requests pass without an answer.
        let silent = silent.local_addr().unwrap();
        let _waiting = TcpStream::connect(silent).await.unwrap();

        // No address here accepts: the paused clock may pass over a connection in the making.
        let began = Instant::now();
        let error = reach(&[silent; 2]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let both = CONNECT_MAX / 2..CONNECT_MAX;
        assert!(both.contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn an_address_that_refuses_is_passed_over() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let good = good.local_addr().unwrap();
        let stream = reach(&[closed, good]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good);
    }
}
