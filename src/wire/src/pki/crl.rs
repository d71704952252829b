//! Certificate revocation lists: parsing and signing.
//!
//! The stored CRL is the only record of revocations: it is read back, extended or
//! shortened, and signed again with the next number.

use std::collections::BTreeSet;
use std::fmt;
use std::time::SystemTime;

use rcgen::{
    CertificateRevocationListParams, KeyIdMethod, RevocationReason, RevokedCertParams, SerialNumber,
};
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use x509_parser::prelude::FromDer as _;
use x509_parser::revocation_list::CertificateRevocationList;

use super::Error;
use super::parse::system_time;
use super::template::{CLOCK_TOLERANCE, Signer, crl_validity};

/// Why a certificate was revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its key may be in the wrong hands.
    KeyCompromise,
    /// Its owner left the cluster.
    Left,
    /// No reason was kept.
    Unspecified,
}

impl Reason {
    /// RFC 5280, section 5.3.1.
    fn code(self) -> RevocationReason {
        match self {
            Self::KeyCompromise => RevocationReason::KeyCompromise,
            Self::Left => RevocationReason::CessationOfOperation,
            Self::Unspecified => RevocationReason::Unspecified,
        }
    }

    fn from_code(code: Option<u8>) -> Self {
        match code {
            Some(1) => Self::KeyCompromise,
            Some(5) => Self::Left,
            _ => Self::Unspecified,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeyCompromise => "key compromised",
            Self::Left => "left the cluster",
            Self::Unspecified => "unspecified",
        })
    }
}

/// One entry of a CRL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// The serial number of the certificate, big-endian.
    pub serial: Vec<u8>,
    /// When it was revoked.
    pub at: SystemTime,
    /// Why.
    pub reason: Reason,
}

/// A certificate revocation list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crl {
    /// Grows by one with every change.
    pub number: u64,
    /// When it was made.
    pub issued: SystemTime,
    /// In the order in which they were added.
    pub revoked: Vec<Revoked>,
    /// The signed list.
    pub der: Vec<u8>,
}

impl Crl {
    /// Reads a list in DER; `None` if it is not one that Polis makes.
    #[must_use]
    pub fn read(der: &[u8]) -> Option<Self> {
        let (rest, list) = CertificateRevocationList::from_der(der).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let number = u64::try_from(list.crl_number()?).ok()?;
        // Dated back when it was signed: see `crl_validity`.
        let issued = system_time(list.last_update()).checked_add(CLOCK_TOLERANCE)?;
        let revoked = list
            .iter_revoked_certificates()
            .map(|entry| Revoked {
                serial: entry.raw_serial().to_vec(),
                at: system_time(entry.revocation_date),
                reason: Reason::from_code(entry.reason_code().map(|(_, code)| code.0)),
            })
            .collect();
        Some(Self { number, issued, revoked, der: der.to_vec() })
    }

    /// Whether the list names this serial number.
    #[must_use]
    pub fn revokes(&self, serial: &[u8]) -> bool {
        self.revoked.iter().any(|entry| entry.serial == serial)
    }

    /// The serial numbers of all entries.
    #[must_use]
    pub fn serials(self) -> BTreeSet<Vec<u8>> {
        self.revoked.into_iter().map(|entry| entry.serial).collect()
    }

    /// The SHA-256 of the list in DER. Its number does not identify it: a cluster that began again
    /// from a snapshot uses numbers twice.
    #[must_use]
    pub fn digest(&self) -> Vec<u8> {
        Self::digest_of(&self.der)
    }

    /// The same of a list in DER.
    #[must_use]
    pub fn digest_of(der: &[u8]) -> Vec<u8> {
        Sha256::digest(der).to_vec()
    }

    /// The list in PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        super::crl_pem(&self.der)
    }
}

/// Signs list number `number`.
pub(super) fn sign(
    signer: &Signer,
    name: &str,
    number: u64,
    revoked: &[Revoked],
    now: SystemTime,
) -> Result<Vec<u8>, Error> {
    let (this_update, next_update) = crl_validity(now);
    let entry = |entry: &Revoked| RevokedCertParams {
        serial_number: SerialNumber::from_slice(&entry.serial),
        revocation_time: OffsetDateTime::from(entry.at),
        reason_code: Some(entry.reason.code()),
        invalidity_date: None,
    };
    signer.sign_crl(
        name,
        CertificateRevocationListParams {
            this_update,
            next_update,
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        },
    )
}
