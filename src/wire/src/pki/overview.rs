//! A summary of a namespace for display, without secrets.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::namespace::{AUTHORITIES, CERTIFICATES};
use super::{Crl, Facts, Reason};
use polis_base::hex;

/// Everything in the namespaces of a cluster, without a secret; an event value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// The authorities, in order of namespace and name.
    pub authorities: Vec<AuthorityView>,
    /// The certificates that they signed and keep under a name.
    pub certificates: Vec<CertificateView>,
}

/// One authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityView {
    /// Where it is kept, for example `polis:etcd-pki`.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// SHA-256 of its certificate in lower-case hexadecimal.
    pub fingerprint: String,
    /// Valid from then.
    pub not_before: SystemTime,
    /// When it stops being valid.
    pub not_after: SystemTime,
    /// How many certificates it issued.
    pub issued: usize,
    /// The number of its CRL; zero if that cannot be read.
    pub crl_number: u64,
    /// When its CRL was made, if it can be read.
    pub crl_issued: Option<SystemTime>,
    /// The revoked certificates.
    pub revoked: Vec<RevokedView>,
}

/// One entry of a CRL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevokedView {
    /// The serial number in lower-case hexadecimal.
    pub serial: String,
    /// The holder of the certificate, if the authority's list still contains it.
    pub subject: Option<String>,
    /// When it was revoked.
    pub at: SystemTime,
    /// Why.
    pub reason: Reason,
}

/// Whether the certificates of a namespace are renewed without a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The service that uses them renews them after two thirds of their life.
    ByUser,
    /// A person's: `polisctl` renews it when that person uses it after two thirds of its
    /// life. A certificate that is not used ends without harm.
    WhenUsed,
}

/// One certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateView {
    /// Where it is kept.
    pub namespace: String,
    /// Its issuer.
    pub issuer: String,
    /// Its holder.
    pub name: String,
    /// The serial number in lower-case hexadecimal.
    pub serial: String,
    /// SHA-256 of the certificate in lower-case hexadecimal.
    pub fingerprint: String,
    /// Valid from then.
    pub not_before: SystemTime,
    /// When it is renewed.
    pub renew_at: SystemTime,
    /// Valid until then.
    pub not_after: SystemTime,
    /// Whether its key is kept beside it.
    pub managed: bool,
    /// How it is renewed when the time has come.
    pub renewal: Renewal,
    /// Whether it is on its issuer's CRL.
    pub revoked: bool,
}

impl Overview {
    /// Adds the contents of a namespace: its keys without the namespace's own folder.
    /// Unreadable values are left out, because the service that uses them reports them.
    /// `renewal` maps a certificate's name to its kind of renewal.
    pub fn add(
        &mut self,
        namespace: &str,
        entries: &BTreeMap<String, Vec<u8>>,
        renewal: impl Fn(&str) -> Renewal,
    ) {
        let authorities = children(entries, AUTHORITIES);
        let mut crls = BTreeMap::new();
        for name in authorities {
            let value = |leaf: &str| entries.get(&format!("{AUTHORITIES}{name}/{leaf}"));
            let Some(facts) = value("certificate").and_then(|der| Facts::read(der)) else {
                continue;
            };
            let issued_at = format!("{AUTHORITIES}{name}/issued/");
            let crl = value("crl").and_then(|der| Crl::read(der));
            let revoked = crl.iter().flat_map(|crl| &crl.revoked).map(|entry| {
                let serial = hex::encode(&entry.serial);
                let issued = entries.get(&format!("{issued_at}{serial}"));
                RevokedView {
                    subject: issued.and_then(|der| Facts::read(der)).map(|facts| facts.subject),
                    serial,
                    at: entry.at,
                    reason: entry.reason,
                }
            });
            self.authorities.push(AuthorityView {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                fingerprint: hex::encode(&facts.fingerprint),
                not_before: facts.not_before,
                not_after: facts.not_after,
                issued: entries.keys().filter(|key| key.starts_with(&issued_at)).count(),
                crl_number: crl.as_ref().map_or(0, |crl| crl.number),
                crl_issued: crl.as_ref().map(|crl| crl.issued),
                revoked: revoked.collect(),
            });
            if let Some(crl) = crl {
                crls.insert(name, crl);
            }
        }
        for (key, der) in entries {
            let Some(path) = key.strip_prefix(CERTIFICATES) else { continue };
            let mut parts = path.split('/');
            let (Some(issuer), Some(name), Some("certificate"), None) =
                (parts.next(), parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let Some(facts) = Facts::read(der) else { continue };
            self.certificates.push(CertificateView {
                namespace: namespace.to_owned(),
                issuer: issuer.to_owned(),
                name: name.to_owned(),
                serial: hex::encode(&facts.serial),
                fingerprint: hex::encode(&facts.fingerprint),
                not_before: facts.not_before,
                renew_at: facts.renew_at(),
                not_after: facts.not_after,
                renewal: renewal(name),
                managed: entries.contains_key(&format!("{CERTIFICATES}{issuer}/{name}/key")),
                revoked: crls.get(issuer).is_some_and(|crl| crl.revokes(&facts.serial)),
            });
        }
    }
}

/// The distinct first parts of the keys below `folder`.
fn children<'a>(entries: &'a BTreeMap<String, Vec<u8>>, folder: &str) -> Vec<&'a str> {
    let mut found: Vec<&str> =
        entries.keys().filter_map(|key| key.strip_prefix(folder)?.split('/').next()).collect();
    found.dedup();
    found
}
