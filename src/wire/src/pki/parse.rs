//! The fields of a certificate that Polis reads.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;
use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};
use x509_parser::time::ASN1Time;

use super::Host;

/// A moment, as people compare it with a clock.
const MOMENT: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute] UTC");

/// The contents of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The common name of its subject.
    pub subject: String,
    /// The organizational unit of its subject: the role of a user.
    pub unit: Option<String>,
    /// The common name of its issuer.
    pub issuer: String,
    /// The serial number, big-endian.
    pub serial: Vec<u8>,
    /// The raw Ed25519 public key.
    pub public_key: [u8; 32],
    /// Valid from then.
    pub not_before: SystemTime,
    /// Valid until then.
    pub not_after: SystemTime,
    /// SHA-256 of the DER encoding.
    pub fingerprint: [u8; 32],
}

impl Facts {
    /// Reads a certificate in DER; `None` if it is not one that Polis makes.
    #[must_use]
    pub fn read(der: &[u8]) -> Option<Self> {
        let (rest, certificate) = X509Certificate::from_der(der).ok()?;
        // Keys of other kinds have 32 bytes, too.
        let kind = &certificate.public_key().algorithm.algorithm;
        if !rest.is_empty() || *kind != OID_SIG_ED25519 {
            return None;
        }
        let common_name = |name: &x509_parser::x509::X509Name<'_>| {
            name.iter_common_name().next().and_then(|cn| cn.as_str().ok()).map(str::to_owned)
        };
        let mut units = certificate.subject().iter_organizational_unit();
        let unit = units.next().and_then(|unit| unit.as_str().ok()).map(str::to_owned);
        Some(Self {
            subject: common_name(certificate.subject())?,
            unit,
            issuer: common_name(certificate.issuer())?,
            serial: certificate.raw_serial().to_vec(),
            public_key: certificate
                .public_key()
                .subject_public_key
                .data
                .as_ref()
                .try_into()
                .ok()?,
            not_before: system_time(certificate.validity().not_before),
            not_after: system_time(certificate.validity().not_after),
            fingerprint: Sha256::digest(der).into(),
        })
    }

    /// When the certificate is renewed.
    #[must_use]
    pub fn renew_at(&self) -> SystemTime {
        super::template::renewal_due(self.not_before, self.not_after)
    }

    /// Whether it should be replaced: two thirds of its life are over, or its
    /// life has not begun because it was made by a clock that ran ahead.
    #[must_use]
    pub fn renewal_due(&self, now: SystemTime) -> bool {
        now < self.not_before || now >= self.renew_at()
    }
}

/// Whether `authority` has signed `certificate`, both in DER. It checks neither dates
/// nor the purposes of either certificate.
#[must_use]
pub fn signed_by(certificate: &[u8], authority: &[u8]) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return false };
    let Ok((_, authority)) = X509Certificate::from_der(authority) else { return false };
    certificate.verify_signature(Some(authority.public_key())).is_ok()
}

/// The hosts that a certificate in DER speaks for; none of one that cannot be read.
#[must_use]
pub fn hosts(certificate: &[u8]) -> Vec<Host> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let Ok(Some(named)) = certificate.subject_alternative_name() else { return Vec::new() };
    let named = named.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(Host::Name((*name).to_owned())),
        GeneralName::IPAddress(bytes) => address(bytes).map(Host::Address),
        // Polis makes no others.
        _other => None,
    });
    named.collect()
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    four.or_else(|_longer| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// The text of a moment in a message: `2026-11-30 20:17 UTC`.
#[must_use]
pub fn moment(at: SystemTime) -> String {
    let since_1970 = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
    // A stranger's certificate may name a time after the year 9999, by its time zone.
    let read = OffsetDateTime::from_unix_timestamp(seconds).ok();
    let text = read.and_then(|read| read.format(MOMENT).ok());
    text.unwrap_or_else(|| "a time after the year 9999".to_owned())
}

/// Dates before 1970 count as 1970: no certificate of Polis is that old.
pub(crate) fn system_time(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}
