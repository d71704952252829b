//! The users: the records of the people who may operate the cluster.
//!
//! ```text
//! (absent) --create, or the owner's key--> [valid] --revoke--> [revoked]
//!     a revoked name may be given again, to another key <----------+
//! ```
//!
//! Invariants:
//! - A revoked user is marked before its certificates are: the mark counts at the next
//!   call, on every server. The name is given again only once its certificates are revoked.
//! - There is always an owner who is not revoked, once there was one. The key of each such owner
//!   leads to a certificate, however long ago the last one ended.
//! - A user cannot have a name that a node could have: both are names under one authority.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use polis_proto::v1::{self, UserRole};
use tracing::info;

use super::configuration::seconds;
use super::error::Error;
use super::store::{self, OWNER, Outcome, Store, USERS, authority, decode};
use polis_wire::age::Recipient;
use polis_wire::pki::{self, Certificate, Guard, Issued, Issuer, Mode, Reason, Template};

/// The user whom the owner's key speaks for.
pub const OWNER_NAME: &str = "owner";

/// Users that are not revoked, at most: every node receives and keeps all of them, in one
/// message of some 450 KiB then.
const USERS_MAX: usize = 4096;

/// Owners that are not revoked, at most: secrets are encrypted to all of them, and each one adds
/// a hundred bytes to a record.
const OWNERS_MAX: usize = 16;

/// The longest name.
const NAME_MAX: usize = 64;

/// The beginning of the names of nodes.
const NODE_PREFIX: &str = "polis-";

impl<S: pki::Store + Clone> Store<S> {
    /// The certificate of an owner, for the holder of the owner's key: the one that the cluster
    /// was founded with makes the first owner, and every other one is in the record of its user.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwner`], [`Error::UserRevoked`].
    pub async fn escrow(&self, key: &[u8; 32], now: SystemTime) -> Result<Issued, Error> {
        if let Some(user) = self.owner_with(key).await? {
            return Ok(self.user_certificate(&user, now).await?.0);
        }
        if !self.founded_with(key).await? {
            return Err(Error::NotOwner);
        }
        let known = self.user(OWNER_NAME).await?;
        if known.is_some_and(|user| user.revoked) {
            return Err(Error::UserRevoked { name: OWNER_NAME.to_owned() });
        }
        let user = self.make_user(OWNER_NAME, UserRole::Owner, key).await?;
        Ok(self.user_certificate(&user, now).await?.0)
    }

    /// Whether the cluster was founded with this key of an owner.
    ///
    /// # Errors
    ///
    /// The error of a store that does not answer.
    pub async fn founded_with(&self, key: &[u8; 32]) -> Result<bool, store::Error> {
        let owner = self.read::<v1::InitialOwner>(OWNER).await?;
        Ok(owner.is_some_and(|owner| owner.public_key == key))
    }

    /// Makes a user, or finds it; returns its certificate.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], [`Error::UserTaken`], [`Error::KeyTaken`].
    pub async fn create_user(
        &self,
        name: &str,
        role: UserRole,
        key: &[u8; 32],
        now: SystemTime,
    ) -> Result<Issued, Error> {
        check_name(name)?;
        if role == UserRole::Unspecified {
            return Err(Error::Field("role is missing".to_owned()));
        }
        self.refuse(name, role, key).await?;
        // An interrupted revocation has left only the mark, which the new record removes.
        if self.user(name).await?.is_some_and(|user| user.revoked) {
            self.revoke(name, Reason::Left, now).await?;
        }
        let user = self.make_user(name, role, key).await?;
        Ok(self.user_certificate(&user, now).await?.0)
    }

    /// The certificate of a user, a new one where renewal is due, and whether it is new.
    ///
    /// # Errors
    ///
    /// [`Error::UserUnknown`], [`Error::UserRevoked`].
    pub async fn renew_user(&self, name: &str, now: SystemTime) -> Result<(Issued, bool), Error> {
        let user = self.user(name).await?;
        let user = user.ok_or_else(|| Error::UserUnknown { name: name.to_owned() })?;
        if user.revoked {
            return Err(Error::UserRevoked { name: name.to_owned() });
        }
        self.user_certificate(&user, now).await
    }

    /// Ends the access of a user.
    ///
    /// # Errors
    ///
    /// [`Error::UserUnknown`], [`Error::LastOwner`].
    pub async fn revoke_user(&self, name: &str, now: SystemTime) -> Result<(), Error> {
        // The guards detect a revocation of another owner at the same moment.
        let owners = self.other_owners(name).await?;
        let key = user_key(name);
        self.update(&key, |old: Option<v1::User>| {
            let user = old.ok_or_else(|| Error::UserUnknown { name: name.to_owned() })?;
            if user.revoked {
                return Ok(Outcome::Keep(user));
            }
            if user.role() == UserRole::Owner && owners.is_empty() {
                return Err(Error::LastOwner { name: name.to_owned() });
            }
            Ok(Outcome::Put(v1::User { revoked: true, ..user }, owners.clone(), Vec::new()))
        })
        .await?;
        self.revoke(name, Reason::Left, now).await?;
        info!(user = name, "revoked a user");
        Ok(())
    }

    /// When the newest certificate of each of these users ends, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// The error of a store that does not answer.
    pub async fn certificate_ends(
        &self,
        users: &[v1::User],
    ) -> Result<BTreeMap<String, i64>, Error> {
        // Nodes have theirs of the same authority.
        let ends = self.certificates().ends(&authority()).await?;
        let of = |user: &v1::User| Some((user.name.clone(), seconds(*ends.get(&user.name)?)));
        Ok(users.iter().filter_map(of).collect())
    }

    /// The owner with this key who is not revoked.
    async fn owner_with(&self, key: &[u8; 32]) -> Result<Option<v1::User>, Error> {
        for (path, entry) in self.kv.list(USERS).await.map_err(store::Error::Store)? {
            let user = decode::<v1::User>(&path, &entry.value)?;
            if user.role() == UserRole::Owner && !user.revoked && user.public_key == key {
                return Ok(Some(user));
            }
        }
        Ok(None)
    }

    /// Guards that hold while the other owners stay unchanged.
    async fn other_owners(&self, name: &str) -> Result<Vec<Guard>, Error> {
        let listed = self.kv.list(USERS).await.map_err(store::Error::Store)?;
        let mut guards = Vec::new();
        for (key, entry) in listed {
            let user = decode::<v1::User>(&key, &entry.value)?;
            if user.name != name && user.role() == UserRole::Owner && !user.revoked {
                guards.push(Guard::Unchanged(key, entry.revision));
            }
        }
        Ok(guards)
    }

    /// The recipients of the secrets of owners: the owners in the order of their names, the
    /// holder of the key that the cluster was founded with before the others. That key counts
    /// until it has taken ownership; then the record of its user does, as for every user.
    ///
    /// # Errors
    ///
    /// The error of a store that does not answer; [`store::Error::Damaged`] for a key that is
    /// none; [`store::Error::Missing`] without an owner.
    pub async fn owner_recipients(&self) -> Result<Vec<Recipient>, store::Error> {
        let (mut keys, mut taken) = (Vec::new(), false);
        for (path, entry) in self.kv.list(USERS).await.map_err(store::Error::Store)? {
            let user = decode::<v1::User>(&path, &entry.value)?;
            let first = user.name == OWNER_NAME;
            taken |= first;
            if user.role() == UserRole::Owner && !user.revoked {
                let place = if first { 0 } else { keys.len() };
                keys.insert(place, (path, user.public_key));
            }
        }
        let missing = || store::Error::Missing { key: OWNER.to_owned() };
        if !taken {
            let owner = self.read::<v1::InitialOwner>(OWNER).await?.ok_or_else(missing)?;
            keys.insert(0, (OWNER.to_owned(), owner.public_key));
        }
        if keys.is_empty() {
            return Err(missing());
        }
        keys.into_iter().map(|(path, key)| recipient(&path, &key)).collect()
    }

    async fn user(&self, name: &str) -> Result<Option<v1::User>, Error> {
        Ok(self.read::<v1::User>(&user_key(name)).await?)
    }

    async fn make_user(
        &self,
        name: &str,
        role: UserRole,
        key: &[u8; 32],
    ) -> Result<v1::User, Error> {
        let desired = v1::User {
            name: name.to_owned(),
            role: role.into(),
            public_key: key.to_vec(),
            revoked: false,
        };
        let taken = |what| Error::UserTaken { name: name.to_owned(), what };
        self.update(&user_key(name), |old: Option<v1::User>| match old {
            Some(old) if !old.revoked && old.public_key != key => Err(taken("key")),
            Some(old) if !old.revoked && old.role() != role => Err(taken("role")),
            Some(old) if !old.revoked => Ok(Outcome::Keep(old)),
            Some(_) | None => {
                info!(user = name, role = ?role, "made a user");
                Ok(Outcome::Put(desired.clone(), Vec::new(), Vec::new()))
            }
        })
        .await
    }

    /// Rejects a user or an owner beyond the limit, and a key that another user has: a log could
    /// not distinguish the two, and to revoke one would leave the key its access. Two calls at the
    /// same moment may pass both, which a person would have to try.
    async fn refuse(&self, name: &str, role: UserRole, key: &[u8; 32]) -> Result<(), Error> {
        let listed = self.kv.list(USERS).await.map_err(store::Error::Store)?;
        let (mut others, mut owners) = (0, 0);
        for (path, entry) in listed {
            let user = decode::<v1::User>(&path, &entry.value)?;
            if user.name == name || user.revoked {
                continue;
            }
            if user.public_key == key {
                return Err(Error::KeyTaken { name: name.to_owned(), by: user.name });
            }
            others += 1;
            owners += usize::from(user.role() == UserRole::Owner);
        }
        if role == UserRole::Owner && owners >= OWNERS_MAX {
            return Err(Error::Field(format!(
                "role is owner, and there are {OWNERS_MAX} owners already; revoke one first"
            )));
        }
        if others >= USERS_MAX {
            return Err(Error::Field(format!(
                "name is {name:?}, and there are {USERS_MAX} users already; revoke one first"
            )));
        }
        Ok(())
    }

    /// The certificate of a user, a new one where renewal is due, and whether it is new.
    async fn user_certificate(
        &self,
        user: &v1::User,
        now: SystemTime,
    ) -> Result<(Issued, bool), Error> {
        let damaged = || store::Error::Damaged { key: user_key(&user.name) };
        let key = user.public_key.as_slice().try_into().map_err(|_length| damaged())?;
        let role = role_name(user.role()).ok_or_else(damaged)?;
        let desired = Certificate {
            issuer: Issuer::Authority(Arc::new(authority())),
            name: user.name.clone(),
            template: Template::User { role },
            mode: Mode::External(key),
        };
        let certificates = self.certificates();
        match certificates.kept(&desired, now).await? {
            Some(kept) => Ok(kept),
            None => Ok((certificates.ensure(&desired, now).await?, true)),
        }
    }
}

/// The owner with this key, which the record at `path` has.
pub(super) fn recipient(path: &str, key: &[u8]) -> Result<Recipient, store::Error> {
    let recipient = <&[u8; 32]>::try_from(key).ok().and_then(Recipient::of_key);
    recipient.ok_or_else(|| store::Error::Damaged { key: path.to_owned() })
}

/// The role in the form of certificates; `None` without one.
fn role_name(role: UserRole) -> Option<&'static str> {
    match role {
        UserRole::Unspecified => None,
        UserRole::Viewer => Some("viewer"),
        UserRole::Operator => Some("operator"),
        UserRole::Owner => Some("owner"),
    }
}

fn user_key(name: &str) -> String {
    format!("{USERS}{name}")
}

fn check_name(name: &str) -> Result<(), Error> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-');
    let length = (1..=NAME_MAX).contains(&name.len());
    if !length || !name.chars().all(fits) || name.starts_with(NODE_PREFIX) {
        return Err(Error::Field(format!(
            "name is {name:?}; allowed are 1 to {NAME_MAX} of a-z, 0-9, dot and dash, not \
             beginning with {NODE_PREFIX:?}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use polis_wire::pki::memory::Memory;
    use polis_wire::pki::{Facts, Store as _, Write};
    use prost::Message as _;

    use super::*;
    use polis_base::sys::clock;

    /// A store whose owner has this key.
    async fn owned(key: u8) -> Store<Memory> {
        let store = Store::new(Memory::default());
        let owner = v1::InitialOwner { public_key: vec![key; 32] };
        let write = Write::Put(OWNER.to_owned(), owner.encode_to_vec());
        assert!(store.kv.commit(Vec::new(), vec![write]).await.unwrap());
        store
    }

    #[tokio::test]
    async fn the_newest_certificate_end_is_listed_unless_the_user_was_revoked() {
        let store = owned(1).await;
        let now = clock::now();
        let ann = store.create_user("ann", UserRole::Viewer, &[2; 32], now).await.unwrap();
        store.create_user("otto", UserRole::Operator, &[3; 32], now).await.unwrap();
        store.revoke_user("otto", now).await.unwrap();
        let named = |name: &str| v1::User { name: name.to_owned(), ..Default::default() };
        let ends = |names: &[&str]| names.iter().map(|name| named(name)).collect::<Vec<_>>();
        let ends = store.certificate_ends(&ends(&["ann", "otto", "zoe"])).await.unwrap();
        let first = seconds(Facts::read(&ann.der).unwrap().not_after);
        assert_eq!(ends, BTreeMap::from([("ann".to_owned(), first)]));

        // That of a user whose last certificate has ended is shown, too.
        let later = now + Duration::from_secs(100 * 24 * 60 * 60);
        assert!(seconds(later) > first);
        let ends = store.certificate_ends(&[named("ann")]).await.unwrap();
        assert_eq!(ends["ann"], first);
        store.renew_user("ann", later).await.unwrap();
        let ends = store.certificate_ends(&[named("ann")]).await.unwrap();
        assert!(ends["ann"] > seconds(later), "the newest one");
    }

    #[tokio::test]
    async fn an_owner_whose_certificate_has_ended_gets_another_one_by_its_key() {
        let store = owned(1).await;
        let now = clock::now();
        store.escrow(&[1; 32], now).await.unwrap();
        store.create_user("ann", UserRole::Owner, &[2; 32], now).await.unwrap();
        store.create_user("otto", UserRole::Operator, &[3; 32], now).await.unwrap();
        store.revoke_user("owner", now).await.unwrap();

        // The last usable one has ended.
        let later = now + Duration::from_secs(100 * 24 * 60 * 60);
        let issued = store.escrow(&[2; 32], later).await.unwrap();
        let facts = Facts::read(&issued.der).unwrap();
        assert_eq!((facts.subject.as_str(), facts.unit.as_deref()), ("ann", Some("owner")));
        assert!(facts.public_key == [2; 32] && facts.not_after > later);
        assert_eq!(store.escrow(&[2; 32], later).await.unwrap().der, issued.der, "the same again");

        // No other key does: of a user with less, of a stranger, of a revoked owner.
        for key in [3, 4] {
            let refused = store.escrow(&[key; 32], later).await;
            assert!(matches!(refused, Err(Error::NotOwner)), "{key}: {refused:?}");
        }
        let refused = store.escrow(&[1; 32], later).await;
        assert!(matches!(refused, Err(Error::UserRevoked { .. })), "{refused:?}");
        store.create_user("zoe", UserRole::Owner, &[5; 32], later).await.unwrap();
        store.revoke_user("ann", later).await.unwrap();
        let refused = store.escrow(&[2; 32], later).await;
        assert!(matches!(refused, Err(Error::NotOwner)), "{refused:?}");
        assert!(refused.unwrap_err().to_string().contains("that of another owner"));
    }
}
