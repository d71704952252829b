//! The certificates of one folder of a store: creation, renewal and revocation.
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

use std::collections::BTreeSet;
use std::time::SystemTime;

use ed25519_dalek::SigningKey;
use rand::TryRng as _;
use rand::rngs::SysRng;
use zeroize::Zeroizing;

use super::store::{Entry, Guard, Store, Write};
use super::stored::{self, Found, damaged};
use super::template::{CLOCK_TOLERANCE, Signer, pkcs8, random_serial};
use super::{
    Authorities, Certificate, Crl, Error, Facts, Issued, Issuer, Mode, Reason, Revoked, crl,
    signed_by,
};
use polis_base::hex;

pub(super) const AUTHORITIES: &str = "authorities/";
pub(super) const CERTIFICATES: &str = "certificates/";

/// The longest name; etcd accepts more, but screens do not.
const NAME_LENGTH_MAX: usize = 128;

/// Attempts at a revocation. Each failed attempt lost a race, so this many in a row
/// indicate a fault.
const REVOCATIONS_MAX: u32 = 32;

/// Removals in one transaction: etcd takes 128 operations.
const PRUNED_AT_ONCE: usize = 100;

/// The certificates below one folder of a store.
#[derive(Clone, Debug)]
pub struct Namespace<S> {
    store: S,
    folder: String,
}

/// Which certificates of a former authority stay good at the end of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin<'a> {
    /// None: their holders are known by their keys.
    None,
    /// Those of all holders but these, which have one of the next authority on their disks.
    AllBut(&'a BTreeSet<String>),
}

/// A certificate that a holder keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its name.
    pub name: String,
    /// When the authority that signs now issued it; `None` if another one has signed it.
    pub issued: Option<SystemTime>,
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

    /// Revokes everything that the authority ever issued to `name` and forgets
    /// the certificate kept under that name. Returns how many entries the CRL gained; a
    /// second revocation adds no entries.
    ///
    /// The subject of a certificate of Kubernetes is not its name: there it revokes everything
    /// that was issued to the holder of the kept certificate, by the subject and the key.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the CRL or the kept certificate changes at the same moment.
    pub async fn revoke(
        &self,
        authority: &Certificate,
        name: &str,
        reason: Reason,
        now: SystemTime,
    ) -> Result<usize, Error> {
        check_name(name)?;
        check_authority(authority)?;
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let [signer_at, signer_key_at, key] =
            ["certificate", "key", "crl"].map(|leaf| self.authority_key(authority, leaf));
        let kept_at = self.certificate_key(authority, name, "certificate");
        // As of one moment: a rotation replaces the CRL together with the key that signs it.
        let keys = [&*signer_at, &*signer_key_at, &*key, &*kept_at];
        let [signer, signer_key, stored, kept] = self.read(&authority.name, keys).await?;
        let signer = stored::authority(&authority.name, signer, signer_key)?;
        // An authority that does not exist has issued nothing.
        let Some((signer, _key)) = signer else { return Ok(0) };
        let stored = stored.ok_or_else(|| damaged(&authority.name, "CRL"))?;
        let old = Crl::read(&stored.value).ok_or_else(|| damaged(&authority.name, "CRL"))?;
        // A certificate that is renewed meanwhile may not be in the list below.
        let unchanged = match &kept {
            Some(entry) => Guard::Unchanged(kept_at, entry.revision),
            None => Guard::Absent(kept_at),
        };
        let kept = kept.and_then(|entry| Facts::read(&entry.value));
        let is_its = |facts: &Facts| {
            let same = |kept: &Facts| {
                (&kept.subject, kept.public_key) == (&facts.subject, facts.public_key)
            };
            facts.subject == name || kept.as_ref().is_some_and(same)
        };
        let issued = self.store.list(&self.authority_key(authority, "issued/")).await;
        let added: Vec<Revoked> = issued
            .map_err(store)?
            .iter()
            .filter_map(|(_, entry)| Facts::read(&entry.value))
            .filter(|facts| is_its(facts) && !old.revokes(&facts.serial))
            .map(|facts| Revoked { serial: facts.serial, at: now, reason })
            .collect();
        let count = added.len();
        let forget = |leaf| Write::Delete(self.certificate_key(authority, name, leaf));
        let mut writes = vec![forget("certificate"), forget("key")];
        if count > 0 {
            let revoked = [old.revoked, added].concat();
            let der = crl::sign(&signer, &authority.name, old.number + 1, &revoked, now)?;
            writes.push(Write::Put(key.clone(), der));
        }
        let guards = vec![Guard::Unchanged(key, stored.revision), unchanged];
        self.commit(&authority.name, guards, writes).await?;
        Ok(count)
    }

    /// Revokes like [`Self::revoke`], again where another writer was faster.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if it changes each time, which indicates a fault.
    pub async fn revoke_surely(
        &self,
        authority: &Certificate,
        name: &str,
        reason: Reason,
        now: SystemTime,
    ) -> Result<usize, Error> {
        let mut attempts = 1..REVOCATIONS_MAX;
        loop {
            match self.revoke(authority, name, reason, now).await {
                Err(Error::Lost { .. }) if attempts.next().is_some() => {}
                revoked => return revoked,
            }
        }
    }

    /// Removes the certificates that have ended from the authority's list of what it issued,
    /// except for revoked ones, which the CRL still names. Returns how many it removed.
    ///
    /// It needs no guard: a certificate that has ended stays ended, and its serial number is
    /// not used again.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Damaged`].
    pub async fn prune(&self, authority: &Certificate, now: SystemTime) -> Result<usize, Error> {
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let Some(crl) = self.crl(authority).await? else { return Ok(0) };
        let issued = self.store.list(&self.authority_key(authority, "issued/")).await;
        let ended = |der: &[u8]| {
            Facts::read(der).is_some_and(|facts| {
                // By a clock that runs behind it may still be valid.
                now > facts.not_after + CLOCK_TOLERANCE && !crl.revokes(&facts.serial)
            })
        };
        let ended: Vec<_> =
            issued.map_err(store)?.into_iter().filter(|(_, entry)| ended(&entry.value)).collect();
        for part in ended.chunks(PRUNED_AT_ONCE) {
            let writes = part.iter().map(|(key, _)| Write::Delete(key.clone())).collect();
            self.commit(&authority.name, Vec::new(), writes).await?;
        }
        Ok(ended.len())
    }

    /// The authority and those before it; `None` if the authority does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Damaged`].
    pub async fn authorities(&self, authority: &Certificate) -> Result<Option<Authorities>, Error> {
        Ok(self.rotated(authority).await?.map(|(authorities, _guard)| authorities))
    }

    /// Lets a new authority sign from now on, with the CRL of the one before.
    /// That one stays trusted until [`Self::conclude`], and its key is deleted. Does nothing if
    /// this rotation, counted from one, was begun before; returns whether it did.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the authority or its CRL changes at the same moment.
    pub async fn rotate(
        &self,
        authority: &Certificate,
        rotation: u64,
        now: SystemTime,
    ) -> Result<bool, Error> {
        let (old, _key) = self.ensure_authority(authority, now).await?;
        let absent = || damaged(&authority.name, "certificate");
        let (mut authorities, guard) = self.rotated(authority).await?.ok_or_else(absent)?;
        if authorities.made_in() >= rotation {
            return Ok(false);
        }
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let crl_at = self.authority_key(authority, "crl");
        let crl = self.store.get(&crl_at).await.map_err(store)?;
        let crl = crl.ok_or_else(|| damaged(&authority.name, "CRL"))?;
        let revoked = Crl::read(&crl.value).ok_or_else(|| damaged(&authority.name, "CRL"))?;

        let key = random_key(&authority.name)?;
        // A subject of its own: among equal ones, a verifier would try each of them.
        let subject = format!("{}-{rotation}", authority.name);
        let next = Signer::create(&subject, &authority.template, &key, now)?;
        let public = key.verifying_key().to_bytes();
        let bridge = old.sign(&subject, &authority.template, &public, &random_serial(), now)?;
        let signed = crl::sign(&next, &authority.name, revoked.number + 1, &revoked.revoked, now)?;
        authorities.rotate(next.der.clone(), bridge);
        let at = |leaf| self.authority_key(authority, leaf);
        let guards = vec![guard, Guard::Unchanged(crl_at.clone(), crl.revision)];
        let writes = vec![
            Write::Put(at("certificate"), next.der),
            Write::Put(at("key"), pkcs8(&key).to_vec()),
            Write::Put(crl_at, signed),
            Write::Put(at("rotated"), authorities.to_record()),
        ];
        self.commit(&authority.name, guards, writes).await?;
        Ok(true)
    }

    /// Ends the trust in the authority before this one. Does nothing if that was done before;
    /// returns whether it did. `pin` says which of its certificates stay good.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the authority changes at the same moment.
    pub async fn conclude(&self, authority: &Certificate, pin: Pin<'_>) -> Result<bool, Error> {
        let Some((mut authorities, guard)) = self.rotated(authority).await? else {
            return Ok(false);
        };
        if !authorities.conclude() {
            return Ok(false);
        }
        authorities.pinned = match pin {
            Pin::AllBut(followed) => self.unfollowed(authority, &authorities, followed).await?,
            Pin::None => Vec::new(),
        };
        let at = self.authority_key(authority, "rotated");
        let writes = vec![Write::Put(at, authorities.to_record())];
        self.commit(&authority.name, vec![guard], writes).await?;
        Ok(true)
    }

    /// Every certificate of former authorities of the holders that are not among `followed`: the
    /// disk of such a holder may have an older one than this namespace, whichever that has.
    async fn unfollowed(
        &self,
        authority: &Certificate,
        authorities: &Authorities,
        followed: &BTreeSet<String>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let folder = format!("{}{CERTIFICATES}{}/", self.folder, authority.name);
        let kept = self.store.list(&folder).await.map_err(store)?.into_iter();
        let others = kept.filter_map(|(key, entry)| {
            let name = key.strip_prefix(&folder)?.strip_suffix("/certificate")?;
            Facts::read(&entry.value).filter(|_| !followed.contains(name))
        });
        let others: Vec<_> = others.collect();
        let crl = self.crl(authority).await?;
        let stays = |der: &[u8]| {
            Facts::read(der).is_some_and(|facts| {
                let same =
                    |of: &Facts| (&of.subject, of.public_key) == (&facts.subject, facts.public_key);
                let revoked = crl.as_ref().is_some_and(|crl| crl.revokes(&facts.serial));
                others.iter().any(same) && !revoked && !authorities.signed(der)
            })
        };
        let issued = self.store.list(&self.authority_key(authority, "issued/")).await;
        let issued = issued.map_err(store)?.into_iter().map(|(_, entry)| entry.value);
        Ok(issued.filter(|der| stays(der)).collect())
    }

    /// Every certificate that a holder keeps and that has not ended.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Damaged`].
    pub async fn kept_by_holders(
        &self,
        authority: &Certificate,
        now: SystemTime,
    ) -> Result<Vec<Kept>, Error> {
        let Some(authorities) = self.authorities(authority).await? else { return Ok(Vec::new()) };
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let folder = format!("{}{CERTIFICATES}{}/", self.folder, authority.name);
        let kept = self.store.list(&folder).await.map_err(store)?;
        let kept = kept.into_iter().filter_map(|(key, entry)| {
            let name = key.strip_prefix(&folder)?.strip_suffix("/certificate")?.to_owned();
            let facts = Facts::read(&entry.value).filter(|facts| now <= facts.not_after)?;
            let signed = authorities.signed(&entry.value);
            Some(Kept { name, issued: signed.then_some(facts.not_before + CLOCK_TOLERANCE) })
        });
        Ok(kept.collect())
    }

    /// The authority and those before it, and the guard that finds another rotation.
    async fn rotated(
        &self,
        authority: &Certificate,
    ) -> Result<Option<(Authorities, Guard)>, Error> {
        let [at, certificate_at] =
            ["rotated", "certificate"].map(|leaf| self.authority_key(authority, leaf));
        let [rotated, certificate] = self.read(&authority.name, [&at, &certificate_at]).await?;
        if let Some(entry) = rotated {
            let authorities = Authorities::from_record(&entry.value);
            let authorities = authorities.ok_or_else(|| damaged(&authority.name, "rotation"))?;
            return Ok(Some((authorities, Guard::Unchanged(at, entry.revision))));
        }
        let sole = certificate.map(|entry| Authorities::sole(entry.value));
        Ok(sole.map(|authorities| (authorities, Guard::Absent(at))))
    }

    /// The key under which the rotations of an authority are kept, for watchers.
    #[must_use]
    pub fn rotated_key(&self, authority: &Certificate) -> String {
        self.authority_key(authority, "rotated")
    }

    /// The authority's CRL as it is stored; `None` if the authority does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] and [`Error::Damaged`].
    pub async fn crl(&self, authority: &Certificate) -> Result<Option<Crl>, Error> {
        let stored = self.store.get(&self.authority_key(authority, "crl")).await;
        let stored =
            stored.map_err(|source| Error::Store { name: authority.name.clone(), source })?;
        stored
            .map(|entry| Crl::read(&entry.value).ok_or_else(|| damaged(&authority.name, "CRL")))
            .transpose()
    }

    /// The key under which an authority's CRL is kept, for watchers.
    #[must_use]
    pub fn crl_key(&self, authority: &Certificate) -> String {
        self.authority_key(authority, "crl")
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
