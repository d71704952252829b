//! Authorities, certificates, and revocations.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::time;

/// Authorities and certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pki {
    /// The certificate authorities that this node trusts.
    pub authorities: Vec<Authority>,
    /// The certificates that it knows of.
    pub certificates: Vec<Certificate>,
}

/// A certificate authority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Authority {
    /// Its purpose.
    pub name: String,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
    /// The fingerprint in words that can be read aloud.
    pub words: Option<String>,
    /// The day on which it ends, ready to print.
    pub ends: String,
    /// Full days before that; negative afterwards.
    pub days_left: i64,
    /// Share of its life that is over, in percent.
    pub used: u8,
    /// How many certificates it signed that are known.
    pub issued: u64,
    /// The list of the revoked certificates, if it has one.
    pub crl: Option<Crl>,
}

/// A certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// Its purpose.
    pub name: String,
    /// The name of the authority that signed it.
    pub issuer: String,
    /// The day on which it ends, ready to print.
    pub ends: String,
    /// Full days before that; negative afterwards.
    pub days_left: i64,
    /// The day on which it renews itself, ready to print; `None` if it never does.
    pub renews: Option<String>,
    /// Whether it renews itself only when a person uses it.
    pub when_used: bool,
    /// Share of its life after which it renews itself, in percent.
    pub renew_at: u8,
    /// Share of its life that is over, in percent.
    pub used: u8,
    /// Whether it was revoked.
    pub revoked: bool,
}

/// A list of revoked certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Crl {
    /// Counts up with each new list.
    pub number: u64,
    /// How many certificates are on it.
    pub entries: u64,
    /// Time since it was made.
    #[serde(with = "time")]
    pub age: Duration,
}
