//! Revocation: the CRL of an authority, and the list of what it issued.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::{Namespace, check_authority, check_name};
use crate::pki::store::{Guard, Store, Write};
use crate::pki::stored::{self, damaged};
use crate::pki::template::CLOCK_TOLERANCE;
use crate::pki::{Certificate, Crl, Error, Facts, Reason, Revoked, crl};

/// Attempts at a revocation. Each failed attempt lost a race, so this many in a row
/// indicate a fault.
const REVOCATIONS_MAX: u32 = 32;

/// Removals in one transaction: etcd takes 128 operations.
const PRUNED_AT_ONCE: usize = 100;

impl<S: Store> Namespace<S> {
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

    /// Removes the certificates that have ended from the authority's list of what it issued.
    /// A revoked one leaves the CRL first: the first call after its end signs a CRL that still
    /// names it, and the next call removes it from both. Returns how many certificates left the
    /// list.
    ///
    /// A certificate leaves the list together with a write of the CRL, even of the same one: a
    /// revocation that has read the list before, and would add the certificate to the CRL, loses
    /// and reads again. Nothing on the CRL is without an entry in the list, and so without an end.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the CRL changes at the same moment; [`Error::Store`] and
    /// [`Error::Damaged`].
    pub async fn prune(&self, authority: &Certificate, now: SystemTime) -> Result<usize, Error> {
        let store = |source| Error::Store { name: authority.name.clone(), source };
        let issued = self.store.list(&self.authority_key(authority, "issued/")).await;
        let ended = issued.map_err(store)?.into_iter().filter_map(|(key, entry)| {
            let Facts { serial, not_after, .. } = Facts::read(&entry.value)?;
            // By a clock that runs behind it may still be valid.
            let gone_at = not_after + CLOCK_TOLERANCE;
            (now > gone_at).then_some((serial, (key, gone_at)))
        });
        let mut ended: BTreeMap<_, _> = ended.collect();
        // Only now: what was revoked meanwhile is on it.
        if !self.shorten(authority, &ended, now).await? {
            return Ok(0);
        }
        let mut pruned = 0;
        while !ended.is_empty() {
            let crl_at = self.authority_key(authority, "crl");
            let stored = self.store.get(&crl_at).await.map_err(store)?;
            let stored = stored.ok_or_else(|| damaged(&authority.name, "CRL"))?;
            let crl = Crl::read(&stored.value).ok_or_else(|| damaged(&authority.name, "CRL"))?;
            for serial in crl.serials() {
                ended.remove(&serial);
            }
            let part: Vec<_> =
                std::iter::from_fn(|| ended.pop_first()).take(PRUNED_AT_ONCE).collect();
            if part.is_empty() {
                break;
            }
            pruned += part.len();
            let mut writes: Vec<_> =
                part.into_iter().map(|(_serial, (key, _gone_at))| Write::Delete(key)).collect();
            writes.push(Write::Put(crl_at.clone(), stored.value));
            let guards = vec![Guard::Unchanged(crl_at, stored.revision)];
            self.commit(&authority.name, guards, writes).await?;
        }
        Ok(pruned)
    }

    /// Signs the authority's CRL anew without the entries of certificates in `ended` that may
    /// leave it, if there are any; returns whether the authority exists. `ended` has, by serial
    /// number, the key of a certificate in the list, and the time after which no clock takes it as
    /// valid.
    ///
    /// An entry stays until a CRL from after the end of its certificate has named it (RFC 5280,
    /// section 3.3). One whose certificate is not in the list has no known end, and stays.
    async fn shorten(
        &self,
        authority: &Certificate,
        ended: &BTreeMap<Vec<u8>, (String, SystemTime)>,
        now: SystemTime,
    ) -> Result<bool, Error> {
        let [signer_at, signer_key_at, key] =
            ["certificate", "key", "crl"].map(|leaf| self.authority_key(authority, leaf));
        // As of one moment: a rotation replaces the CRL together with the key that signs it.
        let keys = [&*signer_at, &*signer_key_at, &*key];
        let [signer, signer_key, stored] = self.read(&authority.name, keys).await?;
        let signer = stored::authority(&authority.name, signer, signer_key)?;
        let Some((signer, _key)) = signer else { return Ok(false) };
        let stored = stored.ok_or_else(|| damaged(&authority.name, "CRL"))?;
        let old = Crl::read(&stored.value).ok_or_else(|| damaged(&authority.name, "CRL"))?;
        if !old.revoked.iter().any(|entry| ended.contains_key(&entry.serial)) {
            return Ok(true);
        }
        let stays = |entry: &&Revoked| {
            ended.get(&entry.serial).is_none_or(|(_key, gone_at)| old.issued <= *gone_at)
        };
        let revoked: Vec<Revoked> = old.revoked.iter().filter(stays).cloned().collect();
        let der = crl::sign(&signer, &authority.name, old.number + 1, &revoked, now)?;
        let guards = vec![Guard::Unchanged(key.clone(), stored.revision)];
        self.commit(&authority.name, guards, vec![Write::Put(key, der)]).await?;
        Ok(true)
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
}
