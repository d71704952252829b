//! Certificates, made once for a whole cluster and kept where every member reads them.
//!
//! The library has one concept, the [`Certificate`]: its issuer, its name, its purpose
//! and the place of its key. A [`Namespace`] is a folder
//! of a [`Store`] (etcd, for a node) and turns that description into the real
//! thing. `consensus` uses it for the peers of etcd, `curator` for nodes and users.
//!
//! ```text
//!              ensure                 renew, after two thirds
//! [described] --------> [issued] <---------------------------+
//!     ^   |                | |                               |
//!     |   +- Lost: again   | +-------------------------------+
//!     +--------------------+ revoke: on the authority's CRL
//! ```
//!
//! A rotation replaces an authority ([`Authorities`]): the next one signs, and the holder of a
//! certificate of a former one gets a new certificate for the same key.
//!
//! Invariants:
//! - A certificate is created in one transaction that requires all of its keys to be
//!   absent: when two nodes try at once, one commits, and the other receives an error
//!   that asks for a retry.
//! - A certificate is on its authority's list before any other node can see it, so
//!   every certificate that was ever issued can be revoked.
//! - The number of a CRL only grows, and an entry never leaves it.
//!
//! What this module does not do: choose keys for nodes (`identity`), write files,
//! or look at the wall clock by itself.

mod authorities;
#[cfg(test)]
mod authorities_tests;
mod crl;
#[cfg(test)]
mod fuzz_tests;
mod namespace;
mod overview;
mod parse;
mod service_account;
mod store;
mod stored;
mod template;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;
use std::time::SystemTime;

use ed25519_dalek::SigningKey;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

pub use self::authorities::Authorities;
pub use self::crl::{Crl, Reason, Revoked};
pub use self::namespace::{Kept, Namespace, Pin};
pub use self::overview::{AuthorityView, CertificateView, Overview, Renewal, RevokedView};
pub(crate) use self::parse::system_time;
pub use self::parse::{Facts, hosts, moment, signed_by};
pub use self::service_account::{KeySet, ServiceAccounts, Signed, Turn, VerifyingKey};
#[cfg(any(test, feature = "testing"))]
pub use self::store::memory;
pub use self::store::{Entry, Guard, Store, Write};
pub use self::template::{CURATOR_NAME, ETCD_PEER_NAME, Host, KubernetesSubject, Template};
pub use self::worker::{
    CSI_GROUP, CSI_USER, DNS_GROUP, POLICY_GROUP, PROXY_GROUP, WorkerPurpose,
    front_proxy_authority, kubernetes_authority,
};

/// The specification of a certificate: [`Namespace::ensure`] makes it exist.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// Its issuer.
    pub issuer: Issuer,
    /// Unique under its issuer. Letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Its purpose.
    pub template: Template,
    /// Where its key is.
    pub mode: Mode,
}

/// The issuer of a certificate.
#[derive(Clone, Debug)]
pub enum Issuer {
    /// The certificate is an authority and signs itself.
    Itself,
    /// An authority of the same namespace.
    Authority(Arc<Certificate>),
}

/// Where the key of a certificate is.
#[derive(Clone, Debug)]
pub enum Mode {
    /// In the namespace, beside the certificate.
    Managed,
    /// With its owner; only the raw public half is known here.
    External([u8; 32]),
    /// In memory, issued again at every `ensure`; the authority still lists it.
    Ephemeral,
}

/// A certificate that exists.
#[derive(Clone)]
pub struct Issued {
    /// The certificate in DER.
    pub der: Vec<u8>,
    /// The certificate of its issuer in DER; its own for an authority.
    pub issuer_der: Vec<u8>,
    /// Its key, unless that is with its owner.
    pub key: Option<SigningKey>,
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued")
            .field("der", &format_args!("{} bytes", self.der.len()))
            .field("key", &self.key.as_ref().map(|_secret| "…"))
            .finish_non_exhaustive()
    }
}

/// Why a certificate could not be made, read or revoked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store did not answer, or refused.
    #[error("cannot use the store of certificates for {name}")]
    Store {
        /// The certificate in question.
        name: String,
        /// The store's error.
        source: anyhow::Error,
    },
    /// Another node changed the same object at the same moment.
    #[error("another node changed {name} at the same moment")]
    Lost {
        /// The changed entry.
        name: String,
    },
    /// The name cannot be part of a key in the store.
    #[error(
        "{name:?} cannot name a certificate: use 1 to 128 letters, digits, dots, underscores and hyphens"
    )]
    Name {
        /// The requested name.
        name: String,
    },
    /// The certificate exists for a key that is not the one asked for.
    #[error("the certificate {name} belongs to another key")]
    OtherKey {
        /// The certificate in question.
        name: String,
    },
    /// Only a self-signed authority can sign.
    #[error("{name} is not an authority and cannot sign certificates")]
    NoAuthority {
        /// The certificate that was to sign.
        name: String,
    },
    /// A stored value cannot be read.
    #[error("the stored {what} of {name} is damaged")]
    Damaged {
        /// Certificate, key or CRL.
        what: &'static str,
        /// Its holder.
        name: String,
    },
    /// The kernel gave no random bytes for a key.
    #[error("cannot make a key for {name}: no random bytes")]
    Random {
        /// The holder that the key was to have.
        name: String,
        /// The kernel's error.
        source: rand::rngs::SysError,
    },
    /// The signature could not be made.
    #[error("cannot sign {name}")]
    Sign {
        /// The certificate to sign.
        name: String,
        /// The library's error.
        source: rcgen::Error,
    },
}

impl Error {
    /// Whether the same call may succeed if it is made again.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            Self::Store { .. } | Self::Lost { .. } => true,
            Self::Name { .. }
            | Self::OtherKey { .. }
            | Self::NoAuthority { .. }
            | Self::Damaged { .. }
            | Self::Random { .. }
            | Self::Sign { .. } => false,
        }
    }
}

/// A certificate of `name` that its own key has signed: it proves the key, and
/// nothing more.
///
/// # Errors
///
/// [`Error::Sign`].
pub fn self_signed(name: &str, key: &SigningKey, now: SystemTime) -> Result<Vec<u8>, Error> {
    template::Signer::create(name, &Template::Node, key, now).map(|signer| signer.der)
}

/// Certificates in PEM, one after the other.
#[must_use]
pub fn certificates_pem<'a>(ders: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    ders.into_iter().map(certificate_pem).collect::<String>().into_bytes()
}

/// A certificate in PEM.
#[must_use]
pub fn certificate_pem(der: &[u8]) -> String {
    template::pem("CERTIFICATE", der)
}

/// The DER of a certificate in PEM; `None` for anything else.
#[must_use]
pub fn certificate_der(pem: &[u8]) -> Option<Vec<u8>> {
    template::from_pem("CERTIFICATE", pem)
}

/// All certificates in a PEM text, in DER; `None` if there is none, or one that cannot be read.
#[must_use]
pub fn certificates_der(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    read.ok().filter(|ders| !ders.is_empty())
}

/// A CRL in PEM.
#[must_use]
pub fn crl_pem(der: &[u8]) -> String {
    template::pem("X509 CRL", der)
}

/// A private key in PEM (PKCS#8, version 1: the one that every reader accepts).
#[must_use]
pub fn key_pem(key: &SigningKey) -> zeroize::Zeroizing<String> {
    zeroize::Zeroizing::new(template::pem("PRIVATE KEY", &template::pkcs8(key)))
}

/// A private key in DER (PKCS#8, version 1).
#[must_use]
pub fn key_der(key: &SigningKey) -> zeroize::Zeroizing<Vec<u8>> {
    template::pkcs8(key)
}
