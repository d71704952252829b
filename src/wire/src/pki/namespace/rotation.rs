//! The rotation of an authority, and the certificates that their holders keep in it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use super::{CERTIFICATES, Namespace, random_key};
use crate::pki::store::{Entry, Guard, Store, Write};
use crate::pki::stored::damaged;
use crate::pki::template::{CLOCK_TOLERANCE, Signer, pkcs8, random_serial};
use crate::pki::{Authorities, Certificate, Crl, Error, Facts, crl};

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

impl<S: Store> Namespace<S> {
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
        let kept = self.all_kept(authority).await?.into_iter();
        let others = kept.filter_map(|(name, entry)| {
            Facts::read(&entry.value).filter(|_| !followed.contains(&name))
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
        let kept = self.all_kept(authority).await?.into_iter();
        let kept = kept.filter_map(|(name, entry)| {
            let facts = Facts::read(&entry.value).filter(|facts| now <= facts.not_after)?;
            let signed = authorities.signed(&entry.value);
            Some(Kept { name, issued: signed.then_some(facts.not_before + CLOCK_TOLERANCE) })
        });
        Ok(kept.collect())
    }

    /// When the certificate that each holder keeps ends, also one that has ended.
    ///
    /// # Errors
    ///
    /// [`Error::Store`].
    pub async fn ends(
        &self,
        authority: &Certificate,
    ) -> Result<BTreeMap<String, SystemTime>, Error> {
        let kept = self.all_kept(authority).await?.into_iter();
        let ends =
            kept.filter_map(|(name, entry)| Some((name, Facts::read(&entry.value)?.not_after)));
        Ok(ends.collect())
    }

    /// Every certificate that a holder keeps, with its name.
    async fn all_kept(&self, authority: &Certificate) -> Result<Vec<(String, Entry)>, Error> {
        let folder = format!("{}{CERTIFICATES}{}/", self.folder, authority.name);
        let kept = self.store.list(&folder).await;
        let kept = kept.map_err(|source| Error::Store { name: authority.name.clone(), source })?;
        let named = kept.into_iter().filter_map(|(key, entry)| {
            let name = key.strip_prefix(&folder)?.strip_suffix("/certificate")?.to_owned();
            Some((name, entry))
        });
        Ok(named.collect())
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
}
