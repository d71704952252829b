//! Connections to targets outside of the cluster: TLS 1.2 or 1.3, the certificate checked
//! against the target's authorities or the public ones of the image.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use polis_runtime::supervisor::blocking;
use polis_wire::endpoint::Endpoint;
use polis_wire::parameters::LogTarget;
use polis_wire::registry::Authority;
use polis_wire::rpc;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Name, connection and handshake together.
const CONNECT_MAX: Duration = Duration::from_secs(15);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot read the public authorities in {}", path.display())]
    Bundle { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("cannot use the authorities for {endpoint}")]
    Authorities { endpoint: Endpoint, source: rustls::Error },
    #[error("cannot find the address of {}", endpoint.host)]
    Resolve { endpoint: Endpoint, source: io::Error },
    #[error("cannot connect to {endpoint}")]
    Connect { endpoint: Endpoint, source: io::Error },
    #[error("no TLS with {endpoint}")]
    Handshake { endpoint: Endpoint, source: io::Error },
    #[error("{endpoint} does not answer within {} seconds", CONNECT_MAX.as_secs())]
    Silent { endpoint: Endpoint },
}

/// Connects to a target; `bundle` has the public authorities.
pub(super) async fn connect(
    target: &LogTarget,
    bundle: &Path,
    alpn: &[&[u8]],
) -> Result<TlsStream<TcpStream>, Error> {
    let silent = |_elapsed| Error::Silent { endpoint: target.endpoint.clone() };
    timeout(CONNECT_MAX, attempt(target, bundle, alpn)).await.map_err(silent)?
}

async fn attempt(
    target: &LogTarget,
    bundle: &Path,
    alpn: &[&[u8]],
) -> Result<TlsStream<TcpStream>, Error> {
    let endpoint = || target.endpoint.clone();
    let mut config = {
        let (target, bundle) = (target.clone(), bundle.to_owned());
        blocking(move || config(&target, &bundle)).await?
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let Endpoint { host, port } = &target.endpoint;
    let resolve = |source| Error::Resolve { endpoint: endpoint(), source };
    let found = tokio::net::lookup_host((host.as_str(), *port)).await.map_err(resolve)?;
    let addresses: Vec<_> = found.collect();
    let connect = |source| Error::Connect { endpoint: endpoint(), source };
    let tcp = TcpStream::connect(addresses.as_slice()).await.map_err(connect)?;
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
    let handshake = |source| Error::Handshake { endpoint: endpoint(), source };
    let name = ServerName::try_from(host.clone())
        .map_err(|invalid| handshake(io::Error::other(invalid)))?;
    TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(handshake)
}

/// Blocks.
fn config(target: &LogTarget, bundle: &Path) -> Result<ClientConfig, Error> {
    let unusable = |source| Error::Authorities { endpoint: target.endpoint.clone(), source };
    let mut roots = RootCertStore::empty();
    if target.authorities.is_empty() {
        let unreadable = |source| Error::Bundle { path: bundle.to_owned(), source };
        let all = CertificateDer::pem_file_iter(bundle).map_err(unreadable)?;
        // One that this library does not understand takes nothing from the others.
        roots.add_parsable_certificates(all.flatten());
    } else {
        let own = target.authorities.iter().map(Authority::der);
        for der in own {
            roots.add(CertificateDer::from(der.to_vec())).map_err(unusable)?;
        }
    }
    let builder = ClientConfig::builder_with_provider(rpc::provider())
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(unusable)?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
