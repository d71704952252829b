//! The contents of each kind of certificate, and the code that signs it.
//!
//! Pure except for the randomness of serial numbers: time comes in as a parameter.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem as armour;
use ed25519_dalek::pkcs8::{EncodePrivateKey as _, KeypairBytes};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, PKCS_ED25519, PublicKeyData, SanType, SerialNumber,
    SignatureAlgorithm,
};
use time::OffsetDateTime;
use zeroize::{Zeroize as _, Zeroizing};

use super::Error;

/// The DNS name that only certificates of etcd peers carry. etcd is configured to
/// reject peers without it, so no other certificate of the cluster speaks raft.
pub const ETCD_PEER_NAME: &str = "etcd-peer.polis.internal";

/// The DNS name that only certificates of curators carry. A client that looks for the leader
/// rejects every other node.
pub const CURATOR_NAME: &str = "curator.polis.internal";

/// How far the clocks of two machines may differ before a fresh certificate is
/// rejected as not valid yet.
pub(super) const CLOCK_TOLERANCE: Duration = Duration::from_secs(24 * 60 * 60);

/// How far the clock of an authority's maker may be ahead. etcd and Kubernetes check the dates of
/// an authority and of etcd's peers: a cluster whose voters all lost their clocks, or whose first
/// voter was ahead when it founded the cluster, must have a quorum all the same.
const AUTHORITY_TOLERANCE: Duration = AUTHORITY_LIFETIME;

/// Authorities outlive the machines that created them.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// As long as their authority: a cluster that was off for longer than this could not
/// elect a leader to renew it. The list of members and the CRL keep removed nodes out.
const PEER_LIFETIME: Duration = AUTHORITY_LIFETIME;

/// Long enough for a worker that was off over a season, short enough that a
/// forgotten one drops out. A voter renews its own where it has ended.
const NODE_LIFETIME: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// Short, because `polisctl` reads no CRL: it takes a node for a curator for this long at most
/// after that node lost the role. Long enough for a voter whose clock is some days off.
const CURATOR_LIFETIME: Duration = Duration::from_secs(10 * 24 * 60 * 60);

/// People come back more often than machines.
const USER_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Short, because the API server of Kubernetes reads no CRL: a controller or a worker that was
/// removed is its client for this long at most. A controller that was off for longer renews its
/// certificates by its own etcd, and a worker by the leader.
const KUBERNETES_LIFETIME: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// A host that a certificate speaks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// A DNS name.
    Name(String),
    /// An address.
    Address(IpAddr),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// The user and group that Kubernetes reads from a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSubject {
    /// The user: the common name. Colons are allowed, unlike in a certificate's name.
    pub user: String,
    /// The group of the user: the organization.
    pub group: Option<String>,
}

/// The purpose of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Template {
    /// Signs the certificates of etcd peers.
    EtcdAuthority,
    /// One member of etcd, server and client at once.
    EtcdPeer {
        /// The host in the member's peer URL.
        host: Host,
    },
    /// Signs the certificates of nodes and users.
    ClusterAuthority,
    /// A node: a server to everyone and a client of other nodes. Its DNS name is
    /// its ID, and no user's certificate serves or has a DNS name.
    Node,
    /// A node as a curator: server authentication only, under the ID of the node and
    /// [`CURATOR_NAME`].
    Curator {
        /// The ID of the node.
        node: String,
    },
    /// A user: client authentication only.
    User {
        /// The role of the user, stored as the organizational unit.
        role: &'static str,
    },
    /// Signs the certificates of Kubernetes' own components.
    KubernetesAuthority,
    /// Signs the certificates of the proxies that name a user to the API servers. It is
    /// another authority, so that no component of Kubernetes can act as such a proxy.
    FrontProxyAuthority,
    /// A server of Kubernetes.
    KubernetesServer {
        /// Its subject. Clients of a server read its hosts only.
        subject: KubernetesSubject,
        /// The hosts that it speaks for.
        hosts: Vec<Host>,
    },
    /// A client of Kubernetes.
    KubernetesClient {
        /// The user that the API server reads from it.
        subject: KubernetesSubject,
    },
}

impl Template {
    /// Whether certificates of this kind sign others.
    #[must_use]
    pub fn is_authority(&self) -> bool {
        matches!(
            self,
            Self::EtcdAuthority
                | Self::ClusterAuthority
                | Self::KubernetesAuthority
                | Self::FrontProxyAuthority
        )
    }

    /// From issue to expiry.
    #[must_use]
    pub fn lifetime(&self) -> Duration {
        match self {
            Self::EtcdAuthority
            | Self::ClusterAuthority
            | Self::KubernetesAuthority
            | Self::FrontProxyAuthority => AUTHORITY_LIFETIME,
            Self::EtcdPeer { .. } => PEER_LIFETIME,
            Self::Node => NODE_LIFETIME,
            Self::Curator { .. } => CURATOR_LIFETIME,
            Self::User { .. } => USER_LIFETIME,
            Self::KubernetesServer { .. } | Self::KubernetesClient { .. } => KUBERNETES_LIFETIME,
        }
    }

    /// How long before its making it is valid from.
    fn tolerance(&self) -> Duration {
        match self {
            Self::EtcdAuthority
            | Self::ClusterAuthority
            | Self::KubernetesAuthority
            | Self::FrontProxyAuthority
            | Self::EtcdPeer { .. } => AUTHORITY_TOLERANCE,
            Self::Node
            | Self::Curator { .. }
            | Self::User { .. }
            | Self::KubernetesServer { .. }
            | Self::KubernetesClient { .. } => CLOCK_TOLERANCE,
        }
    }

    fn usages(&self) -> Vec<KeyUsagePurpose> {
        match self {
            Self::EtcdAuthority
            | Self::ClusterAuthority
            | Self::KubernetesAuthority
            | Self::FrontProxyAuthority => vec![
                KeyUsagePurpose::KeyCertSign,
                KeyUsagePurpose::CrlSign,
                KeyUsagePurpose::DigitalSignature,
            ],
            Self::EtcdPeer { .. } => {
                vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment]
            }
            Self::Node
            | Self::Curator { .. }
            | Self::User { .. }
            | Self::KubernetesServer { .. }
            | Self::KubernetesClient { .. } => vec![KeyUsagePurpose::DigitalSignature],
        }
    }

    /// Never empty: a certificate without any is accepted for every use.
    fn extended_usages(&self) -> Vec<ExtendedKeyUsagePurpose> {
        use ExtendedKeyUsagePurpose::{ClientAuth, OcspSigning, ServerAuth};
        match self {
            Self::EtcdAuthority
            | Self::ClusterAuthority
            | Self::KubernetesAuthority
            | Self::FrontProxyAuthority => {
                vec![ClientAuth, ServerAuth, OcspSigning]
            }
            Self::EtcdPeer { .. } | Self::Node => vec![ClientAuth, ServerAuth],
            Self::User { .. } | Self::KubernetesClient { .. } => vec![ClientAuth],
            Self::Curator { .. } | Self::KubernetesServer { .. } => vec![ServerAuth],
        }
    }

    fn hosts(&self, name: &str) -> Vec<Host> {
        let named = Host::Name(name.to_owned());
        match self {
            Self::EtcdAuthority
            | Self::ClusterAuthority
            | Self::KubernetesAuthority
            | Self::FrontProxyAuthority
            | Self::User { .. }
            | Self::KubernetesClient { .. } => Vec::new(),
            Self::KubernetesServer { hosts, .. } => hosts.clone(),
            Self::EtcdPeer { host } => {
                let mut hosts = vec![named, Host::Name(ETCD_PEER_NAME.to_owned())];
                if !hosts.contains(host) {
                    hosts.push(host.clone());
                }
                hosts
            }
            Self::Node => vec![named],
            Self::Curator { node } => {
                vec![Host::Name(node.clone()), Host::Name(CURATOR_NAME.to_owned())]
            }
        }
    }

    /// The subject: the certificate's name, except where another program gives the subject
    /// a meaning of its own.
    fn subject(&self, name: &str) -> DistinguishedName {
        let mut shown = DistinguishedName::new();
        match self {
            Self::EtcdAuthority
            | Self::EtcdPeer { .. }
            | Self::ClusterAuthority
            | Self::Node
            | Self::Curator { .. } => {
                shown.push(DnType::CommonName, name);
            }
            Self::User { role } => {
                shown.push(DnType::CommonName, name);
                shown.push(DnType::OrganizationalUnitName, *role);
            }
            // Screens of other programs show it without its namespace.
            Self::KubernetesAuthority | Self::FrontProxyAuthority => {
                shown.push(DnType::CommonName, format!("polis-{name}"));
            }
            Self::KubernetesServer { subject, .. } | Self::KubernetesClient { subject } => {
                if let Some(group) = &subject.group {
                    shown.push(DnType::OrganizationName, group.as_str());
                }
                shown.push(DnType::CommonName, subject.user.as_str());
            }
        }
        shown
    }

    /// The certificate without key and signature.
    fn params(
        &self,
        name: &str,
        serial: &[u8],
        now: SystemTime,
    ) -> Result<CertificateParams, Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = self.subject(name);
        for host in self.hosts(name) {
            params.subject_alt_names.push(match host {
                Host::Name(dns) => SanType::DnsName(
                    dns.try_into()
                        .map_err(|source| Error::Sign { name: name.to_owned(), source })?,
                ),
                Host::Address(address) => SanType::IpAddress(address),
            });
        }
        params.serial_number = Some(SerialNumber::from_slice(serial));
        // An authority signs a bridge to its successor, that one to the next, and so on.
        params.is_ca = match self.is_authority() {
            true => IsCa::Ca(BasicConstraints::Unconstrained),
            false => IsCa::ExplicitNoCa,
        };
        params.key_usages = self.usages();
        params.extended_key_usages = self.extended_usages();
        params.not_before = OffsetDateTime::from(now - self.tolerance());
        params.not_after = OffsetDateTime::from(now + self.lifetime());
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

/// When a certificate of that validity is renewed: after two thirds of its life.
pub(super) fn renewal_due(not_before: SystemTime, not_after: SystemTime) -> SystemTime {
    let life = not_after.duration_since(not_before).unwrap_or_default();
    not_before + life / 3 * 2
}

/// The one serial number of every authority: it signs itself first.
pub(super) const AUTHORITY_SERIAL: [u8; 1] = [1];

/// A random serial number, positive and always of the same length.
pub(super) fn random_serial() -> [u8; 16] {
    let mut serial: [u8; 16] = rand::random();
    serial[0] = (serial[0] & 0x3f) | 0x40;
    serial
}

/// A key whose private half another node holds.
struct Public<'a>(&'a [u8; 32]);

impl PublicKeyData for Public<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ED25519
    }
}

/// An authority that can sign.
pub(super) struct Signer {
    pub(super) der: Vec<u8>,
    issuer: rcgen::Issuer<'static, KeyPair>,
}

impl Signer {
    /// Puts a stored certificate and its key together.
    pub(super) fn load(name: &str, der: Vec<u8>, key: &SigningKey) -> Result<Self, Error> {
        let sign = |source| Error::Sign { name: name.to_owned(), source };
        let pair = key_pair(key).map_err(sign)?;
        let issuer = rcgen::Issuer::from_ca_cert_der(&der.as_slice().into(), pair).map_err(sign)?;
        Ok(Self { der, issuer })
    }

    /// Makes an authority that signs itself.
    pub(super) fn create(
        name: &str,
        template: &Template,
        key: &SigningKey,
        now: SystemTime,
    ) -> Result<Self, Error> {
        let sign = |source| Error::Sign { name: name.to_owned(), source };
        let pair = key_pair(key).map_err(sign)?;
        let params = template.params(name, &AUTHORITY_SERIAL, now)?;
        let der = params.self_signed(&pair).map_err(sign)?.der().to_vec();
        Ok(Self { der, issuer: rcgen::Issuer::new(params, pair) })
    }

    /// Signs a certificate for `key`.
    pub(super) fn sign(
        &self,
        name: &str,
        template: &Template,
        key: &[u8; 32],
        serial: &[u8],
        now: SystemTime,
    ) -> Result<Vec<u8>, Error> {
        let params = template.params(name, serial, now)?;
        let signed = params
            .signed_by(&Public(key), &self.issuer)
            .map_err(|source| Error::Sign { name: name.to_owned(), source })?;
        Ok(signed.der().to_vec())
    }

    /// Signs a CRL.
    pub(super) fn sign_crl(
        &self,
        name: &str,
        params: rcgen::CertificateRevocationListParams,
    ) -> Result<Vec<u8>, Error> {
        let signed = params
            .signed_by(&self.issuer)
            .map_err(|source| Error::Sign { name: name.to_owned(), source })?;
        Ok(signed.der().to_vec())
    }
}

/// The start and end of validity of a CRL made now. Readers learn of a newer one by
/// watching, not by its end.
pub(super) fn crl_validity(now: SystemTime) -> (OffsetDateTime, OffsetDateTime) {
    (OffsetDateTime::from(now - CLOCK_TOLERANCE), OffsetDateTime::from(now + AUTHORITY_LIFETIME))
}

fn key_pair(key: &SigningKey) -> Result<KeyPair, rcgen::Error> {
    let der = pkcs8(key);
    KeyPair::from_pkcs8_der_and_sign_algo(&der.as_slice().into(), &PKCS_ED25519)
}

/// PKCS#8, version 1: without the public half, which some readers reject.
pub(super) fn pkcs8(key: &SigningKey) -> Zeroizing<Vec<u8>> {
    let mut bytes = KeypairBytes { secret_key: key.to_bytes(), public_key: None };
    let der = bytes.to_pkcs8_der().expect("a key of fixed length always has an encoding");
    bytes.secret_key.zeroize();
    Zeroizing::new(der.as_bytes().to_vec())
}

/// The content that [`pem`] armoured, if it has this label.
pub(super) fn from_pem(label: &'static str, text: &[u8]) -> Option<Vec<u8>> {
    armour::decode_vec(text).ok().filter(|(found, _)| *found == label).map(|(_, der)| der)
}

/// DER in PEM armour.
pub(super) fn pem(label: &'static str, der: &[u8]) -> String {
    armour::encode_string(label, armour::LineEnding::LF, der)
        .expect("a fixed label and any bytes always have an encoding")
}
