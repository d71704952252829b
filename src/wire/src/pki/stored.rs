//! Authorities and certificates as a store has them, and the checks of what was read.

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::DecodePrivateKey as _;
use zeroize::Zeroizing;

use super::store::Entry;
use super::template::Signer;
use super::{Certificate, Error, Facts, Mode, Template, parse};

/// A certificate in the store.
pub(super) struct Found {
    pub(super) der: Vec<u8>,
    pub(super) revision: i64,
    pub(super) key: Option<SigningKey>,
}

/// The authority `name`; `None` if it does not exist.
pub(super) fn authority(
    name: &str,
    certificate: Option<Entry>,
    key: Option<Entry>,
) -> Result<Option<(Signer, SigningKey)>, Error> {
    let Some(certificate) = certificate else { return Ok(None) };
    let key = key.ok_or_else(|| damaged(name, "key"))?;
    let key = read_key(name, key.value)?;
    Ok(Some((Signer::load(name, certificate.value, &key)?, key)))
}

/// The certificate, which must match the specification; `None` if it does not exist.
pub(super) fn certificate(
    desired: &Certificate,
    certificate: Option<Entry>,
    key: Option<Entry>,
) -> Result<Option<Found>, Error> {
    let Some(entry) = certificate.filter(|_entry| !matches!(desired.mode, Mode::Ephemeral)) else {
        return Ok(None);
    };
    let facts = Facts::read(&entry.value).ok_or_else(|| damaged(&desired.name, "certificate"))?;
    let (public, key) = match &desired.mode {
        Mode::External(public) => (*public, None),
        Mode::Managed | Mode::Ephemeral => {
            let stored = key.ok_or_else(|| damaged(&desired.name, "key"))?;
            let key = read_key(&desired.name, stored.value)?;
            (key.verifying_key().to_bytes(), Some(key))
        }
    };
    if public != facts.public_key {
        return Err(Error::OtherKey { name: desired.name.clone() });
    }
    Ok(Some(Found { der: entry.value, revision: entry.revision, key }))
}

/// Whether `existing` does not speak for one of the hosts of a server of Kubernetes. A host too
/// many is no reason for another certificate: its holder has this one until it ends.
pub(super) fn lacks_host(desired: &Certificate, existing: &[u8]) -> bool {
    let Template::KubernetesServer { hosts, .. } = &desired.template else { return false };
    let spoken_for = parse::hosts(existing);
    hosts.iter().any(|host| !spoken_for.contains(host))
}

/// Whether `existing` speaks for a host that is not one of a server of Kubernetes any more.
pub(super) fn has_former_host(desired: &Certificate, existing: &[u8]) -> bool {
    let Template::KubernetesServer { hosts, .. } = &desired.template else { return false };
    parse::hosts(existing).iter().any(|host| !hosts.contains(host))
}

fn read_key(name: &str, der: Vec<u8>) -> Result<SigningKey, Error> {
    let der = Zeroizing::new(der);
    SigningKey::from_pkcs8_der(&der).map_err(|_parse| damaged(name, "key"))
}

pub(super) fn damaged(name: &str, what: &'static str) -> Error {
    Error::Damaged { what, name: name.to_owned() }
}
