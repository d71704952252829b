//! The certificates of one folder of a store: creation and renewal, revocation (`revocation`), and
//! the rotation of an authority (`rotation`).
//!
//! ```text
//! authorities/<name>/certificate          DER
//! authorities/<name>/key                  PKCS#8 DER
//! authorities/<name>/crl                  DER
//! authorities/<name>/rotated              v1.Authorities, from the first rotation on
//! authorities/<name>/issued/<serial>      DER of everything it signed
//! certificates/<issuer>/<name>/certificate    DER
//! certificates/<issuer>/<name>/key            PKCS#8 DER, managed ones only
//! service-accounts/signing                    PKCS#8 DER, ECDSA (`service_account`)
//! service-accounts/next                       the same, of the next key
//! service-accounts/verifying/<digest>         SPKI DER of these and of the one before
//! service-accounts/rotation                   of which rotation the newest is, and since when
//! ```

mod revocation;
mod rotation;

use std::time::SystemTime;

use ed25519_dalek::SigningKey;
use rand::TryRng as _;
use rand::rngs::SysRng;
use zeroize::Zeroizing;

pub use self::rotation::{Kept, Pin};
use super::store::{Entry, Guard, Store, Write};
use super::stored::{self, Found, damaged};
use super::template::{Signer, pkcs8, random_serial};
use super::{Certificate, Error, Facts, Issued, Issuer, Mode, crl, signed_by};
use polis_base::hex;

pub(super) const AUTHORITIES: &str = "authorities/";
pub(super) const CERTIFICATES: &str = "certificates/";

/// The longest name; etcd accepts more, but screens do not.
const NAME_LENGTH_MAX: usize = 128;

/// The certificates below one folder of a store.
#[derive(Clone, Debug)]
pub struct Namespace<S> {
    store: S,
    folder: String,
}

/// An authority and a certificate of it, of one moment.
struct Stored {
    /// `None`: it does not exist yet.
    authority: Option<(Signer, SigningKey)>,
    found: Option<Found>,
}

impl<S: Store> Namespace<S> {
    /// The certificates of `store` below `folder`: empty, or ending with a slash.
    pub fn new(store: S, folder: impl Into<String>) -> Self {
        Self { store, folder: folder.into() }
    }

    /// Reads the certificate, or makes it if it is not there, or if the authority was rotated
    /// since.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if another node makes it at the same moment; see [`Error::retriable`].
    pub async fn ensure(&self, desired: &Certificate, now: SystemTime) -> Result<Issued, Error> {
        match &desired.issuer {
            Issuer::Itself => {
                let (signer, key) = self.ensure_authority(desired, now).await?;
                Ok(Issued { der: signer.der.clone(), issuer_der: signer.der, key: Some(key) })
            }
            Issuer::Authority(authority) => {
                check_name(&desired.name)?;
                let stored = self.find(desired, authority).await?;
                let signer = self.existing_or_new(stored.authority, authority, now).await?;
                match stored.found {
                    Some(found) if signed_by(&found.der, &signer.der) => {
                        let issuer_der = signer.der;
                        Ok(Issued { der: found.der, issuer_der, key: found.key })
                    }
                    found => self.issue(desired, authority, &signer, found, now).await,
                }
            }
        }
    }

    /// Replaces a certificate for the same key if [`Facts::renewal_due`] returns true, if a
    /// former authority has signed it, or if it [lacks a host](Self::lacks_host). Returns the new
    /// one, or `None` if the old one stays.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if another node renews it at the same moment.
    pub async fn renew(
        &self,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<Option<Issued>, Error> {
        let kept = self.kept(desired, now).await?;
        Ok(kept.and_then(|(issued, is_new)| is_new.then_some(issued)))
    }

    /// The existing certificate, renewed if that is due. A missing certificate stays
    /// missing: it was revoked, or never issued.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if another node renews it at the same moment.
    pub async fn current(
        &self,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<Option<Issued>, Error> {
        Ok(self.kept(desired, now).await?.map(|(issued, _is_new)| issued))
    }

    /// The existing certificate, renewed if that is due, and whether it was renewed now. `None` if
    /// there is none, and for an authority, which only an owner rotates.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if another node renews it at the same moment.
    pub async fn kept(
        &self,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<Option<(Issued, bool)>, Error> {
        let Issuer::Authority(authority) = &desired.issuer else { return Ok(None) };
        let stored = self.find(desired, authority).await?;
        let Some(found) = stored.found else { return Ok(None) };
        let facts = Facts::read(&found.der).ok_or_else(|| damaged(&desired.name, "certificate"))?;
        let signer = self.existing_or_new(stored.authority, authority, now).await?;
        let due = facts.renewal_due(now) || !signed_by(&found.der, &signer.der);
        if due || stored::lacks_host(desired, &found.der) {
            let issued = self.issue(desired, authority, &signer, Some(found), now).await?;
            return Ok(Some((issued, true)));
        }
        let issued = Issued { der: found.der, issuer_der: signer.der, key: found.key };
        Ok(Some((issued, false)))
    }

    /// Whether the existing certificate of a server of Kubernetes does not name one of the hosts of
    /// `desired`, so that it is renewed. The hosts of other certificates stay.
    ///
    /// # Errors
    ///
    /// [`Error::OtherKey`], and those of the store.
    pub async fn lacks_host(&self, desired: &Certificate) -> Result<bool, Error> {
        let Issuer::Authority(authority) = &desired.issuer else { return Ok(false) };
        let found = self.find(desired, authority).await?.found;
        Ok(found.is_some_and(|found| stored::lacks_host(desired, &found.der)))
    }

    /// Whether the existing certificate of a server of Kubernetes names a host that `desired` does
    /// not. [`Self::renew`] keeps it nevertheless, until it is due.
    ///
    /// # Errors
    ///
    /// [`Error::OtherKey`], and those of the store.
    pub async fn has_former_host(&self, desired: &Certificate) -> Result<bool, Error> {
        let Issuer::Authority(authority) = &desired.issuer else { return Ok(false) };
        let found = self.find(desired, authority).await?.found;
        Ok(found.is_some_and(|found| stored::has_former_host(desired, &found.der)))
    }

    async fn ensure_authority(
        &self,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<(Signer, SigningKey), Error> {
        check_authority(desired)?;
        let at = ["certificate", "key"].map(|leaf| self.authority_key(desired, leaf));
        let [certificate, key] =
            self.read(&desired.name, at.each_ref().map(String::as_str)).await?;
        match stored::authority(&desired.name, certificate, key)? {
            Some(found) => Ok(found),
            None => self.create_authority(desired, now).await,
        }
    }

    /// The authority as it was read, or a new one.
    async fn existing_or_new(
        &self,
        found: Option<(Signer, SigningKey)>,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<Signer, Error> {
        Ok(match found {
            Some((signer, _key)) => signer,
            None => self.create_authority(desired, now).await?.0,
        })
    }

    async fn create_authority(
        &self,
        desired: &Certificate,
        now: SystemTime,
    ) -> Result<(Signer, SigningKey), Error> {
        let [certificate_at, key_at, crl_at] =
            ["certificate", "key", "crl"].map(|leaf| self.authority_key(desired, leaf));
        let key = random_key(&desired.name)?;
        let signer = Signer::create(&desired.name, &desired.template, &key, now)?;
        let crl = crl::sign(&signer, &desired.name, 1, &[], now)?;
        let keys = [certificate_at.clone(), key_at.clone(), crl_at.clone()];
        let guards = keys.into_iter().map(Guard::Absent).collect();
        let writes = vec![
            Write::Put(certificate_at, signer.der.clone()),
            Write::Put(key_at, pkcs8(&key).to_vec()),
            Write::Put(crl_at, crl),
        ];
        self.commit(&desired.name, guards, writes).await?;
        Ok((signer, key))
    }

    /// Reads the authority and the certificate, and makes sure that this matches the
    /// specification.
    async fn find(&self, desired: &Certificate, issuer: &Certificate) -> Result<Stored, Error> {
        check_authority(issuer)?;
        let [signer_at, signer_key_at] =
            ["certificate", "key"].map(|leaf| self.authority_key(issuer, leaf));
        let [at, key_at] =
            ["certificate", "key"].map(|leaf| self.certificate_key(issuer, &desired.name, leaf));
        let keys = [&*signer_at, &*signer_key_at, &*at, &*key_at];
        let [signer, signer_key, certificate, key] = self.read(&desired.name, keys).await?;
        let authority = stored::authority(&issuer.name, signer, signer_key)?;
        Ok(Stored { authority, found: stored::certificate(desired, certificate, key)? })
    }

    /// Signs a certificate and stores it, in place of `old` if there is one.
    async fn issue(
        &self,
        desired: &Certificate,
        authority: &Certificate,
        signer: &Signer,
        old: Option<Found>,
        now: SystemTime,
    ) -> Result<Issued, Error> {
        let at = |leaf| self.certificate_key(authority, &desired.name, leaf);
        let mut guards = Vec::new();
        let mut writes = Vec::new();
        let (public, key) = match &desired.mode {
            Mode::External(public) => (*public, None),
            Mode::Managed | Mode::Ephemeral => {
                let kept = old.as_ref().and_then(|old| old.key.clone());
                let key = kept.map_or_else(|| random_key(&desired.name), Ok)?;
                (key.verifying_key().to_bytes(), Some(key))
            }
        };
        let serial = random_serial();
        let der = signer.sign(&desired.name, &desired.template, &public, &serial, now)?;
        let issued_at = self.authority_key(authority, &format!("issued/{}", hex::encode(&serial)));
        guards.push(Guard::Absent(issued_at.clone()));
        writes.push(Write::Put(issued_at, der.clone()));
        match (&desired.mode, &old) {
            (Mode::Ephemeral, _) => {}
            (Mode::Managed | Mode::External(_), Some(old)) => {
                guards.push(Guard::Unchanged(at("certificate"), old.revision));
                writes.push(Write::Put(at("certificate"), der.clone()));
            }
            (Mode::Managed | Mode::External(_), None) => {
                guards.push(Guard::Absent(at("certificate")));
                guards.push(Guard::Absent(at("key")));
                writes.push(Write::Put(at("certificate"), der.clone()));
                if let Some(key) = &key {
                    writes.push(Write::Put(at("key"), pkcs8(key).to_vec()));
                }
            }
        }
        self.commit(&desired.name, guards, writes).await?;
        Ok(Issued { der, issuer_der: signer.der.clone(), key })
    }

    async fn read<const N: usize>(
        &self,
        name: &str,
        keys: [&str; N],
    ) -> Result<[Option<Entry>; N], Error> {
        let read = self.store.read(keys).await;
        read.map_err(|source| Error::Store { name: name.to_owned(), source })
    }

    async fn commit(
        &self,
        name: &str,
        guards: Vec<Guard>,
        writes: Vec<Write>,
    ) -> Result<(), Error> {
        let committed = self.store.commit(guards, writes).await;
        match committed.map_err(|source| Error::Store { name: name.to_owned(), source })? {
            true => Ok(()),
            false => Err(Error::Lost { name: name.to_owned() }),
        }
    }

    fn authority_key(&self, authority: &Certificate, leaf: &str) -> String {
        format!("{}{AUTHORITIES}{}/{leaf}", self.folder, authority.name)
    }

    fn certificate_key(&self, authority: &Certificate, name: &str, leaf: &str) -> String {
        format!("{}{CERTIFICATES}{}/{name}/{leaf}", self.folder, authority.name)
    }
}

fn check_authority(desired: &Certificate) -> Result<(), Error> {
    check_name(&desired.name)?;
    if !desired.template.is_authority() || !matches!(desired.issuer, Issuer::Itself) {
        return Err(Error::NoAuthority { name: desired.name.clone() });
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), Error> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > NAME_LENGTH_MAX || !name.chars().all(fits) {
        return Err(Error::Name { name: name.to_owned() });
    }
    Ok(())
}

fn random_key(name: &str) -> Result<SigningKey, Error> {
    let mut seed = Zeroizing::new([0; 32]);
    SysRng
        .try_fill_bytes(seed.as_mut())
        .map_err(|source| Error::Random { name: name.to_owned(), source })?;
    Ok(SigningKey::from_bytes(&seed))
}
