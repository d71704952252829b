//! The connection to one node, with verification of its identity.
//!
//! ```text
//! TCP --> TLS 1.3, own certificate if there is one --> HTTP/2 --> Connection
//!              the other's certificate: of the cluster's CA, not on its CRL, under the name of
//!              its own key, and of the node that was meant, or of a curator; or taken as it is,
//!              returned
//! ```
//!
//! Invariants:
//! - A [`Connection`] never changes the node at its other end: when it breaks, its calls
//!   fail, and the caller selects a node again.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme,
};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;

use super::channel::{self, Channel};
use crate::endpoint::at;
use crate::identity::NodeId;
use crate::pki::{Authorities, CURATOR_NAME, Facts};
use crate::rpc::access_list::Serials;
use crate::rpc::tls::{
    Credentials, SCHEMES, judged_at, provider, refuse_tls12, roots, verify_tls13,
};

/// Longest that one address may take to answer.
const CONNECT: Duration = Duration::from_secs(4);
/// Between two questions whether the node is still there, and longest wait for the answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(5);

/// Which certificates of the other end are good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Those of nodes whose cluster has these CAs.
    Cluster {
        /// The CAs.
        authorities: Arc<Authorities>,
        /// The certificates on the CRL, as far as it is known.
        revoked: Serials,
    },
    /// Any: the caller must not rely on any answer before it has compared
    /// [`Connection::certificate`] with a value from another source.
    Unchecked,
}

impl Trust {
    /// Trust in one CA, in DER, of which neither a predecessor nor the CRL is known.
    #[must_use]
    pub fn in_one(authority: Vec<u8>) -> Self {
        Self::cluster(Authorities::sole(authority).into())
    }

    /// Trust in these CAs, where the CRL is not known.
    #[must_use]
    pub fn cluster(authorities: Arc<Authorities>) -> Self {
        Self::Cluster { authorities, revoked: Arc::default() }
    }
}

/// Which node is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// This one.
    Node(NodeId),
    /// Any of the cluster.
    AnyNode,
    /// A curator: the one of this node, or any. Other nodes have the CA's signature, too.
    Curator(Option<NodeId>),
}

impl Expect {
    /// Whether `node` is meant.
    fn means(self, node: NodeId) -> bool {
        match self {
            Self::Node(expected) | Self::Curator(Some(expected)) => expected == node,
            Self::AnyNode | Self::Curator(None) => true,
        }
    }
}

/// A node, and the way to it.
#[derive(Clone)]
pub struct Connection {
    /// Makes calls.
    pub channel: Channel,
    /// The node at the other end: proved, unless its certificate is unchecked.
    pub node: NodeId,
    /// DER of the certificate that it showed.
    pub certificate: Vec<u8>,
    /// Where it is.
    pub address: SocketAddr,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} at {})", self.node, self.address)
    }
}

/// Why the connection failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host has no address.
    #[error("cannot find the address of {host}")]
    Resolve {
        /// The host.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// The connection was not accepted.
    #[error("cannot connect to {}", at(host, *port))]
    Connect {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The kernel's error.
        source: io::Error,
    },
    /// The other end does not answer.
    #[error("{} does not answer within {} seconds", at(host, *port), CONNECT.as_secs())]
    Silent {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// The two ends do not accept each other's certificates.
    #[error("no secure connection to {}", at(host, *port))]
    Handshake {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The error of rustls.
        source: io::Error,
    },
    /// The node's own certificate, or the CA, is unusable.
    #[error("the own certificate or the cluster's cannot be used")]
    Credentials(#[source] rustls::Error),
    /// The other end speaks TLS, but not gRPC.
    #[error("{} does not speak gRPC", at(host, *port))]
    Protocol {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The library's error.
        source: tonic::transport::Error,
    },
}

impl Error {
    /// Whether the port was closed: a machine that is starting may open it a moment
    /// later.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Silent { .. } => true,
            // Behind a forwarded port, the forwarder accepts and hangs up.
            Self::Handshake { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                )
            }
            Self::Resolve { .. } | Self::Credentials(_) | Self::Protocol { .. } => false,
        }
    }

    /// The thing to check.
    #[must_use]
    pub fn help(&self) -> &'static str {
        match self {
            Self::Resolve { .. } => "check the name, or give an address",
            Self::Connect { .. } | Self::Silent { .. } => {
                "check that the machine is on and ready, and that the port is open"
            }
            Self::Handshake { source, .. } => handshake_help(source),
            Self::Credentials(_) => "get a new certificate",
            Self::Protocol { .. } => "check the port: curators listen on 7835, nodes on 7839",
        }
    }
}

/// The help after a failed handshake, by the error of rustls.
fn handshake_help(source: &io::Error) -> &'static str {
    let tls = source.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(why)) => match why {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the machine at this address belongs to another cluster: check the address, and \
                 which context is in use"
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "compare the clock of this machine with that of the node"
            }
            CertificateError::Other(other) if other.0.is::<NoCurator>() => {
                "name the address of a node with the role consensus-member; a voter that has just \
                 started is a curator once its etcd has a quorum"
            }
            CertificateError::Other(other) if other.0.is::<Revoked>() => {
                "the node left the cluster, or is no curator any more: `polisctl node list` names \
                 the nodes; if it should be one, its key may be in the wrong hands"
            }
            CertificateError::Other(_) => "this address leads to another node: check it",
            _ => "the machine at this address has no certificate of a node: check the port",
        },
        Some(rustls::Error::AlertReceived(AlertDescription::CertificateExpired)) => {
            "compare the clock of this machine with that of the node; where both are right, get a \
             new certificate"
        }
        Some(rustls::Error::AlertReceived(_)) => {
            "the node rejects the certificate of this caller: get a new one, or ask an owner \
             whether it was revoked"
        }
        Some(_) => "check the port: curators listen on 7835, nodes on 7839",
        None => {
            "the server at this address accepts connections and closes them: check the address \
             and any forwarded port"
        }
    }
}

/// Connects to `host`, a name or an address.
///
/// # Errors
///
/// [`Error`].
pub async fn dial(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: Option<&Credentials>,
) -> Result<Connection, Error> {
    let silent = || Error::Silent { host: host.to_owned(), port };
    let attempt = attempt(host, port, expect, trust, credentials);
    timeout(CONNECT, attempt).await.unwrap_or_else(|_elapsed| Err(silent()))
}

/// A connection that is secure, and the node at its other end.
pub(super) struct Secure {
    pub(super) tls: TlsStream<TcpStream>,
    pub(super) node: NodeId,
    /// DER of its certificate.
    pub(super) certificate: Vec<u8>,
    pub(super) address: SocketAddr,
}

/// The same as [`dial`], up to the protocol `alpn`.
pub(super) async fn secured(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: Option<&Credentials>,
    alpn: &[u8],
) -> Result<Secure, Error> {
    let silent = || Error::Silent { host: host.to_owned(), port };
    let attempt = secure(host, port, expect, trust, credentials, alpn);
    timeout(CONNECT, attempt).await.unwrap_or_else(|_elapsed| Err(silent()))
}

async fn secure(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: Option<&Credentials>,
    alpn: &[u8],
) -> Result<Secure, Error> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let named = || (host.to_owned(), port);
    let resolved = tokio::net::lookup_host((bare, port)).await;
    let resolve = |source| Error::Resolve { host: host.to_owned(), source };
    let addresses: Vec<_> = resolved.map_err(resolve)?.collect();
    let connect = |source| {
        let (host, port) = named();
        Error::Connect { host, port, source }
    };
    let tcp = TcpStream::connect(addresses.as_slice()).await.map_err(connect)?;
    // A socket without this option is only slower.
    let _set = tcp.set_nodelay(true);
    let address = tcp.peer_addr().map_err(connect)?;

    let verifier = Arc::new(Verifier::new(trust, expect).map_err(Error::Credentials)?);
    let config = client(credentials, Arc::clone(&verifier), alpn).map_err(Error::Credentials)?;
    // The verifier checks the name itself; the handshake does not send one.
    let name = ServerName::IpAddress(address.ip().into());
    let handshake = |source| {
        let (host, port) = named();
        Error::Handshake { host, port, source }
    };
    let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(handshake)?;
    let shown = tls.get_ref().1.peer_certificates().and_then(|shown| shown.first());
    let certificate = shown.map(|der| der.to_vec()).unwrap_or_default();
    let node = node_of(&certificate).ok_or_else(|| {
        handshake(io::Error::other(rustls::Error::from(CertificateError::BadEncoding)))
    })?;
    Ok(Secure { tls, node, certificate, address })
}

async fn attempt(
    host: &str,
    port: u16,
    expect: Expect,
    trust: &Trust,
    credentials: Option<&Credentials>,
) -> Result<Connection, Error> {
    let Secure { tls, node, certificate, address } =
        secure(host, port, expect, trust, credentials, b"h2").await?;
    let gone = CancellationToken::new();
    let once = Mutex::new(Some(TokioIo::new(channel::watched(tls, &gone))));
    let connector = tower::service_fn(move |_uri: http::Uri| {
        let io = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        let gone = || io::Error::new(io::ErrorKind::NotConnected, "the connection was closed");
        std::future::ready(io.ok_or_else(gone))
    });
    let protocol = |source| Error::Protocol { host: host.to_owned(), port, source };
    let endpoint = Endpoint::from_shared(format!("http://{node}:{port}")).map_err(protocol)?;
    let inner = endpoint
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_ANSWER)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(protocol)?;
    Ok(Connection { channel: Channel::new(inner, gone), node, certificate, address })
}

/// The node that a certificate names: by its key.
fn node_of(der: &[u8]) -> Option<NodeId> {
    Some(NodeId::from_public_key(&Facts::read(der)?.public_key))
}

fn client(
    credentials: Option<&Credentials>,
    verifier: Arc<Verifier>,
    alpn: &[u8],
) -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match credentials {
        Some(own) => builder.with_client_auth_cert(own.chain(), own.private_key())?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// Verifies the certificates of nodes.
#[derive(Debug)]
struct Verifier {
    /// `None`: every certificate is accepted unchecked.
    cluster: Option<Arc<WebPkiServerVerifier>>,
    revoked: Serials,
    expect: Expect,
}

/// The certificate is on the CRL.
#[derive(Debug, thiserror::Error)]
#[error("the certificate of {found} was revoked")]
struct Revoked {
    found: String,
}

/// The certificate belongs to a node other than the intended one.
#[derive(Debug, thiserror::Error)]
#[error("the certificate belongs to {found}")]
struct OtherNode {
    found: String,
}

/// The node proves that it is in the cluster, and not that it is a curator.
#[derive(Debug, thiserror::Error)]
#[error("{found} is not a curator: its certificate is that of any node")]
struct NoCurator {
    found: String,
}

impl Verifier {
    fn new(trust: &Trust, expect: Expect) -> Result<Self, rustls::Error> {
        let (cluster, revoked) = match trust {
            Trust::Unchecked => (None, Arc::default()),
            Trust::Cluster { authorities, revoked } => {
                let roots = roots(authorities.trusted())?;
                let built =
                    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
                        .build()
                        .map_err(|error| rustls::Error::General(error.to_string()))?;
                (Some(built), Arc::clone(revoked))
            }
        };
        Ok(Self { cluster, revoked, expect })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let facts = Facts::read(end_entity).ok_or(CertificateError::BadEncoding)?;
        let node = NodeId::from_public_key(&facts.public_key);
        if !self.expect.means(node) {
            let found = OtherNode { found: node.to_string() };
            return Err(CertificateError::Other(rustls::OtherError(Arc::new(found))).into());
        }
        let Some(cluster) = &self.cluster else { return Ok(ServerCertVerified::assertion()) };
        // Under the name derived from its key: a node has no other name.
        let name = ServerName::try_from(node.to_string())
            .map_err(|_invalid| CertificateError::BadEncoding)?;
        let at = judged_at(end_entity, now);
        let verified = cluster.verify_server_cert(end_entity, intermediates, &name, &[], at)?;
        if self.revoked.contains(&facts.serial) {
            let found = Revoked { found: node.to_string() };
            return Err(CertificateError::Other(rustls::OtherError(Arc::new(found))).into());
        }
        if let Expect::Curator(_) = self.expect {
            let name = ServerName::try_from(CURATOR_NAME)
                .map_err(|_invalid| CertificateError::BadEncoding)?;
            let shown = ParsedCertificate::try_from(end_entity)?;
            verify_server_name(&shown, &name).map_err(|_other| {
                let found = NoCurator { found: node.to_string() };
                CertificateError::Other(rustls::OtherError(Arc::new(found)))
            })?;
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(refuse_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}
