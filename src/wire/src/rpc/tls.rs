//! The TLS configuration of a server, and the verification of callers' certificates.
//!
//! Invariants:
//! - TLS 1.3 only, no resumption and no early data: each connection proves the key of its
//!   caller again.
//! - A certificate that is neither the cluster's nor self-signed ends the handshake,
//!   and so does a user's that is on the CRL, expired or not for a caller. A node's
//!   certificate on the CRL is rejected at each call, with a status that the node acts
//!   on; so is a user that is not listed, which may have been made a moment ago.
//! - A certificate that has ended is rejected, and one that has not begun is not: see
//!   [`judged_at`].
//! - A client that asks for no name, or for that of the node, sees the node's own certificate.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, CipherSuite, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme, SupportedCipherSuite,
};
use tokio::sync::watch;
use zeroize::Zeroizing;

use super::access_list::AccessList;
use super::peer::{self, Peer};
use crate::pki::{Authorities, Facts};

/// The cryptography provider of every TLS connection.
///
/// A processor that lacks the instructions of AES-GCM computes ChaCha20-Poly1305 ten times as
/// fast, so that comes first there.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| {
        let mut provider = rustls::crypto::ring::default_provider();
        prefer_fast(&mut provider, has_aes_gcm());
        Arc::new(provider)
    }))
}

/// Whether this processor has instructions for both halves of AES-GCM.
fn has_aes_gcm() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// Orders the cipher suites by their speed.
fn prefer_fast(provider: &mut CryptoProvider, aes_gcm: bool) {
    let slow = |suite: &SupportedCipherSuite| {
        !aes_gcm && suite.suite() != CipherSuite::TLS13_CHACHA20_POLY1305_SHA256
    };
    provider.cipher_suites.sort_by_key(slow);
}

/// How a key of ours signs.
pub(super) const SCHEMES: [SignatureScheme; 1] = [SignatureScheme::ED25519];

/// The answer of either end to an older TLS, which Polis never offers.
pub(super) fn refuse_tls12() -> rustls::Error {
    rustls::Error::General("TLS 1.2 is not supported".to_owned())
}

/// Whether the other end holds the key of its certificate.
pub(super) fn verify_tls13(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signature: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, rustls::Error> {
    let algorithms = provider().signature_verification_algorithms;
    rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
}

/// The identity of a server or client, and the authorities that it trusts.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// DER of its own certificate.
    pub certificate: Vec<u8>,
    /// Its key, PKCS#8 in DER.
    pub key: Arc<Zeroizing<Vec<u8>>>,
    /// The cluster's CA and those before it; `None` until the cluster is known.
    pub authorities: Option<Arc<Authorities>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("certificate", &format_args!("{} bytes", self.certificate.len()))
            .field("authorities", &self.authorities)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// The certificate as rustls wants it, with the bridges for an end that knows only a former
    /// CA.
    pub(super) fn chain(&self) -> Vec<CertificateDer<'static>> {
        let bridges = self.authorities.iter().flat_map(|authorities| &authorities.bridges);
        std::iter::once(&self.certificate).chain(bridges).cloned().map(Into::into).collect()
    }

    /// The certificate and the key of a server that has several.
    fn certified(&self) -> Result<Arc<CertifiedKey>, rustls::Error> {
        CertifiedKey::from_der(self.chain(), self.private_key(), &provider()).map(Arc::new)
    }

    /// The key as rustls wants it.
    pub(super) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.to_vec()))
    }
}

/// The store of these authorities.
pub(super) fn roots<'a>(
    authorities: impl Iterator<Item = &'a [u8]>,
) -> Result<RootCertStore, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from(authority.to_vec()))?;
    }
    Ok(roots)
}

/// The moment at which a certificate is verified: `now`, or its beginning if that is later.
///
/// The cluster's CA dates nothing ahead by intent, so a certificate that has not begun only shows
/// that the clock of its maker was ahead, or that this one is behind. To reject it would lock a
/// node out until its clock reaches that date; the clock may never be set without it.
pub(super) fn judged_at(certificate: &CertificateDer<'_>, now: UnixTime) -> UnixTime {
    let begins = Facts::read(certificate).map(|facts| facts.not_before);
    let begins = begins.and_then(|begins| begins.duration_since(UNIX_EPOCH).ok());
    begins.map_or(now, |begins| now.max(UnixTime::since_unix_epoch(begins)))
}

/// The configuration of a server with these credentials; clients that ask for another name than
/// that of the node see the certificate of `named`, if there is one.
pub(super) fn server(
    credentials: &Credentials,
    named: Option<&Credentials>,
    access_list: watch::Receiver<Arc<AccessList>>,
    alpn: &'static [u8],
) -> Result<ServerConfig, rustls::Error> {
    let verifier = Verifier::new(credentials.authorities.as_deref(), access_list)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier));
    let mut config = match named {
        None => builder.with_single_cert(credentials.chain(), credentials.private_key())?,
        Some(named) => builder.with_cert_resolver(Arc::new(ByName::new(credentials, named)?)),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    // The slower end chooses: a fast client does not know that this one is slow.
    config.ignore_client_order = !has_aes_gcm();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Chooses between two certificates by the name that a client asks for.
#[derive(Debug)]
struct ByName {
    /// The name of the node.
    node: String,
    own: Arc<CertifiedKey>,
    named: Arc<CertifiedKey>,
}

impl ByName {
    fn new(own: &Credentials, named: &Credentials) -> Result<Self, rustls::Error> {
        let node = Facts::read(&own.certificate).map(|facts| facts.subject).unwrap_or_default();
        Ok(Self { node, own: own.certified()?, named: named.certified()? })
    }
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let other = |name: &str| !name.eq_ignore_ascii_case(&self.node);
        let shown = if hello.server_name().is_some_and(other) { &self.named } else { &self.own };
        Some(Arc::clone(shown))
    }
}

/// Verifies the certificates of callers.
#[derive(Debug)]
struct Verifier {
    /// `None` until the node knows a cluster, whose certificates it could verify.
    cluster: Option<Arc<dyn ClientCertVerifier>>,
    access_list: watch::Receiver<Arc<AccessList>>,
}

impl Verifier {
    fn new(
        authorities: Option<&Authorities>,
        access_list: watch::Receiver<Arc<AccessList>>,
    ) -> Result<Self, rustls::Error> {
        let Some(authorities) = authorities else { return Ok(Self { cluster: None, access_list }) };
        let roots = roots(authorities.all())?;
        let built = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        Ok(Self { cluster: Some(built), access_list })
    }
}

impl ClientCertVerifier for Verifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Empty: a caller with only a self-signed certificate would not send it if the
    /// server asked for the cluster's CA.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        // rustls itself checks signatures of the handshake with it: it must be
        // readable.
        ParsedCertificate::try_from(end_entity)?;
        match peer::self_signed_key(end_entity) {
            None => return Err(CertificateError::BadEncoding.into()),
            Some(Some(_key)) => return Ok(ClientCertVerified::assertion()),
            Some(None) => {}
        }
        let cluster = self.cluster.as_ref().ok_or(CertificateError::UnknownIssuer)?;
        let at = judged_at(end_entity, now);
        let verified = cluster.verify_client_cert(end_entity, intermediates, at).map_err(
            |error| match error {
                // Another cluster's CA has the same name, and another key.
                rustls::Error::InvalidCertificate(CertificateError::BadSignature) => {
                    CertificateError::UnknownIssuer.into()
                }
                error => error,
            },
        )?;
        let (peer, certificate) = peer::certified(end_entity)
            .map_err(|unfit| CertificateError::Other(rustls::OtherError(Arc::new(unfit))))?;
        let access_list = self.access_list.borrow();
        // A caller may lose an alert: it has sent its first call by then, and sees a
        // connection that breaks. A removed node would treat that as an outage and
        // wait, so its handshake succeeds and its first call returns the reason.
        let revoked =
            matches!(peer, Peer::User { .. }) && access_list.serials.contains(&certificate.serial);
        if revoked {
            return Err(CertificateError::Revoked.into());
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

#[cfg(test)]
mod tests {
    use rustls::ClientConfig;
    use rustls::pki_types::ServerName;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;
    use crate::rpc::testing::{Authority, node_id};

    #[tokio::test]
    async fn the_name_that_a_client_asks_for_chooses_the_certificate() {
        let authority = Authority::new().await;
        let (own, named) = (authority.node(1).await, authority.node(2).await);
        let (_lists, list) = watch::channel(Arc::new(AccessList::default()));
        let both = server(&own, Some(&named), list.clone(), b"h2").unwrap();
        let alone = server(&own, None, list, b"h2").unwrap();
        let shown = async |config: &ServerConfig, seed, sends_name| {
            let roots = roots(std::iter::once(authority.der.as_slice())).unwrap();
            let mut client = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            client.enable_sni = sends_name;
            let (near, far) = tokio::io::duplex(64 * 1024);
            let name = ServerName::try_from(node_id(seed).to_string()).unwrap();
            let connector = TlsConnector::from(Arc::new(client));
            let acceptor = TlsAcceptor::from(Arc::new(config.clone()));
            let (near, _far) = tokio::join!(connector.connect(name, near), acceptor.accept(far));
            let near = near.ok()?;
            Some(near.get_ref().1.peer_certificates()?[0].to_vec())
        };
        assert_eq!(shown(&both, 1, true).await.as_ref(), Some(&own.certificate));
        assert_eq!(shown(&both, 1, false).await.as_ref(), Some(&own.certificate));
        assert_eq!(shown(&both, 2, true).await.as_ref(), Some(&named.certificate));
        assert_eq!(shown(&both, 2, false).await, None, "the node's own has another name");
        assert_eq!(shown(&alone, 2, true).await, None, "there is one certificate");
    }

    #[test]
    fn chacha20_comes_first_without_instructions_for_aes_gcm_and_nothing_goes() {
        let default = rustls::crypto::ring::default_provider();
        for (aes_gcm, first) in [
            (true, default.cipher_suites[0].suite()),
            (false, CipherSuite::TLS13_CHACHA20_POLY1305_SHA256),
        ] {
            let mut provider = default.clone();
            prefer_fast(&mut provider, aes_gcm);
            assert_eq!(provider.cipher_suites[0].suite(), first);
            assert_eq!(provider.cipher_suites.len(), default.cipher_suites.len());
        }
    }
}
