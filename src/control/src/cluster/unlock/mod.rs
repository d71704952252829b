//! Unlock: opens the encrypted data partition of a member.
//!
//! ```text
//! sealed configuration --sealer--> node's half ----+
//! keeper -----------------------> cluster's half -+--> slot 0 --> open
//!     | none                                          | refused, or a half is missing
//!     v                                               v
//! automatic and alone: error                    was a key change under way? --> its halves
//! else wait: for a curator of another                 | no, or refused
//!   member, or for a recovery key                     v
//!                               recovery key, if one was given --> slot 1 --> open, new halves
//! ```
//!
//! A recovery key opens the disk, and the halves are generated again, because the old ones
//! may be lost or known to others:
//!
//! ```text
//! share in `Next` -> key change on the ESP -> storage: slot 1 opens, slot 0 changes
//!     -> sealed configuration -> share in `Current` -> `Next` removed -> key change removed
//! ```
//!
//! The new halves are stored before slot 0 takes them, so that a power cut does not lose them, and
//! so before the recovery key has opened the disk. But the halves of an earlier change that was
//! interrupted, and that this start cannot use since the TPM refuses, may be what opens slot 0:
//! they are replaced only once the recovery key has opened the disk. A power cut in that moment
//! needs the recovery key once more.
//!
//! ```text
//! keys     the halves of the disk's key                          pure
//! sealer   secrets, plain or sealed to the TPM
//! keeper   the share for a machine that is alone
//! disk     the requests to storage, and their results
//! request  where a recovery key is given over the network
//! firmware sealing again, for a firmware update that an owner announces
//! waiting  the end of both queues at the run that takes from them
//! ```
//!
//! Invariants:
//! - A key that could still open the disk is removed only after its replacement has opened
//!   the disk.
//! - A power cut between any two steps leaves halves that open slot 0, or the recovery key
//!   opens the disk again.
//! - A partition that cannot be opened is left unchanged.
//!
//! What this module does not do: ask a curator for the cluster's half (`remote_unlock`).

pub(super) mod disk;
pub mod firmware;
pub mod keeper;
pub mod keys;
pub mod request;
pub mod sealer;
mod waiting;

use uuid::Uuid;

use tracing::{info, warn};

use self::disk::Disk;
use self::keeper::{Shares, Slot};
use self::keys::{Half, Secrets};
use self::sealer::{Guarded, Sealer};
use super::Error;
use super::record::{self, Record};
use super::sealed::{Keeping, Sealed, change_from_record, change_to_record};
use polis_base::files::{Esp, Root};
use polis_machine::parameters::TpmMode;
use polis_machine::storage::Kind;
use polis_machine::storage::key::{Key, RecoveryKey};
use polis_runtime::supervisor::blocking;
use polis_wire::identity::NodeKey;
use polis_wire::pki::Authorities;

pub use self::firmware::Announcements;
pub use self::keeper::Keeper;
pub use self::request::Requests;

/// The keys that opened the data partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) secrets: Guarded<Secrets>,
    /// The public half of the node's join key.
    pub(super) join_key: [u8; 32],
    pub(super) cluster: Half,
    /// The keeper of the share; `None` if the half came from elsewhere.
    pub(super) keeper: Option<Keeper>,
}

/// The inputs of an unlock.
#[derive(Clone, Debug)]
pub(super) struct Unlocker {
    pub(super) root: Root,
    pub(super) sealer: Sealer,
    pub(super) shares: Shares,
    pub(super) disk: Disk,
}

impl Unlocker {
    /// Opens the partition without help. `sealed` is the sealed configuration, if it is whole.
    pub(super) async fn by_itself(
        &mut self,
        sealed: Option<&Sealed>,
        partition: Uuid,
    ) -> Result<Keys, Error> {
        let own = sealed.and_then(|sealed| sealed.secrets.clone());
        let changed = self.change().await?;
        let change = changed.is_some();
        let candidates = [(own, Slot::Current), (changed, Slot::Next)];
        let mut failure = None;
        for (secrets, slot) in candidates {
            let Some(secrets) = secrets else { continue };
            match self.with(&secrets, slot, partition).await {
                Ok((_secrets, keys)) => {
                    return match (slot, change) {
                        (Slot::Next, _) => {
                            info!("the disk opens with the keys of an interrupted change");
                            self.promote(sealed, keys).await
                        }
                        (Slot::Current, true) => self.abandon().await.map(|()| keys),
                        (Slot::Current, false) => Ok(keys),
                    };
                }
                Err(error) => drop(failure.get_or_insert(error)),
            }
        }
        Err(failure.unwrap_or(Error::NoShare))
    }

    /// Opens the partition with these secrets and the share in `slot`.
    pub(super) async fn with(
        &mut self,
        secrets: &Guarded<Secrets>,
        slot: Slot,
        partition: Uuid,
    ) -> Result<(Secrets, Keys), Error> {
        let (opened, keys) = self.read(secrets, slot).await?;
        let passphrase = keys::passphrase(&opened.node, &keys.cluster, partition)?;
        match self.disk.open(Key::Passphrase(passphrase), None).await? {
            Ok(_kind) => Ok((opened, keys)),
            Err(reason) => Err(Error::KeyWrong { reason }),
        }
    }

    /// Opens the partition with the cluster's half that a curator gave.
    pub(super) async fn with_half(
        &mut self,
        secrets: &Guarded<Secrets>,
        cluster: Half,
        partition: Uuid,
    ) -> Result<Keys, Error> {
        let (sealer, guarded) = (self.sealer.clone(), secrets.clone());
        let opened = blocking(move || sealer.open(&guarded)).await?;
        let passphrase = keys::passphrase(&opened.node, &cluster, partition)?;
        match self.disk.open(Key::Passphrase(passphrase), None).await? {
            Ok(_kind) => {
                let join_key = opened.join_key().verifying_key().to_bytes();
                Ok(Keys { secrets: secrets.clone(), join_key, cluster, keeper: None })
            }
            Err(reason) => Err(Error::KeyWrong { reason }),
        }
    }

    /// Fetches both halves.
    pub(super) async fn read(
        &self,
        secrets: &Guarded<Secrets>,
        slot: Slot,
    ) -> Result<(Secrets, Keys), Error> {
        let (sealer, shares, secrets) = (self.sealer.clone(), self.shares.clone(), secrets.clone());
        blocking(move || {
            let opened = sealer.open(&secrets)?;
            let (cluster, keeper) = shares.fetch(slot)?.ok_or(Error::NoShare)?;
            let join_key = opened.join_key().verifying_key().to_bytes();
            Ok((opened, Keys { secrets, join_key, cluster, keeper: Some(keeper) }))
        })
        .await
    }

    /// Opens the partition with its recovery key, and gives it new halves; returns no keys
    /// if the cluster demands a TPM and the machine has no TPM to seal to.
    pub(super) async fn recover(
        &mut self,
        key: RecoveryKey,
        sealed: Option<&Sealed>,
        partition: Uuid,
    ) -> Result<Option<Keys>, Error> {
        let keeping = sealed.map_or_else(Keeping::default, |sealed| sealed.keeping);
        let (secrets, cluster) = (Secrets::random()?, Half::random()?);
        let passphrase = keys::passphrase(&secrets.node, &cluster, partition)?;
        let sealer = self.sealer.clone();
        let join_key = secrets.join_key().verifying_key().to_bytes();
        let hidden = blocking(move || match sealer.hide(keeping.tpm, &secrets) {
            Err(Error::Tpm(error)) if keeping.tpm == TpmMode::Required => {
                let error = &error as &dyn std::error::Error;
                warn!(
                    error,
                    "THE DISK IS OPEN FOR THIS BOOT ONLY: the cluster requires a TPM, and nothing \
                     can be sealed"
                );
                Ok(None)
            }
            hidden => hidden.map(Some),
        })
        .await?;
        let new = hidden.map(|secrets| Keys { secrets, join_key, cluster, keeper: None });
        // The halves of an interrupted change may be what opens the disk at a later start.
        let interrupted = self.is_changing().await?;
        let new = match new {
            Some(new) if !interrupted => Some(self.prepare(new).await?),
            new => new,
        };
        let rekey = new.as_ref().map(|_new| passphrase);
        if let Err(reason) = self.disk.open(Key::Recovery(key), rekey).await? {
            if new.is_some() && !interrupted {
                self.abandon().await?;
            }
            return Err(Error::RecoveryKeyWrong { reason });
        }
        info!("the recovery key opened the disk");
        let Some(mut new) = new else { return Ok(None) };
        if interrupted {
            new = self.prepare(new).await?;
        }
        self.promote(sealed, new).await.map(Some)
    }

    /// Stores the keys of a change beside those in force.
    async fn prepare(&self, keys: Keys) -> Result<Keys, Error> {
        let (change, shares) = (self.root.esp.key_change.clone(), self.shares.clone());
        blocking(move || {
            let keeper = shares.keep(Slot::Next, &keys.secrets, &keys.cluster)?;
            change.write(&change_to_record(&keys.secrets))?;
            Ok(Keys { keeper: Some(keeper), ..keys })
        })
        .await
    }

    /// Puts the keys of a change in force. The disk is open.
    async fn promote(&mut self, sealed: Option<&Sealed>, keys: Keys) -> Result<Keys, Error> {
        let (root, sealed, shares) = (self.root.clone(), sealed.cloned(), self.shares.clone());
        let kind = self.disk.status.borrow().ready().map_or(Kind::Insecure, |ready| ready.kind);
        blocking(move || {
            let sealed = match sealed {
                Some(sealed) => sealed,
                None => from_data(&root, kind)?,
            };
            let sealed = Sealed { secrets: Some(keys.secrets.clone()), storage: kind, ..sealed };
            root.esp.sealed_configuration.write(&sealed.to_record())?;
            let keeper = shares.keep(Slot::Current, &keys.secrets, &keys.cluster)?;
            end_change(&root.esp, &shares)?;
            Ok(Keys { keeper: Some(keeper), ..keys })
        })
        .await
    }

    /// Removes a change that never came into force.
    async fn abandon(&self) -> Result<(), Error> {
        let (esp, shares) = (self.root.esp.clone(), self.shares.clone());
        blocking(move || end_change(&esp, &shares)).await
    }

    async fn change(&self) -> Result<Option<Guarded<Secrets>>, Error> {
        let change = self.root.esp.key_change.clone();
        match record::read_from(&change, change_from_record).await? {
            Record::Absent => Ok(None),
            Record::Whole(secrets) => Ok(Some(secrets)),
            Record::Damaged(damage) => {
                warn!("an interrupted change of the disk's key cannot be read: {damage}");
                Ok(None)
            }
        }
    }

    /// Whether an earlier boot began to change the keys.
    pub(super) async fn is_changing(&self) -> Result<bool, Error> {
        Ok(self.change().await?.is_some())
    }
}

/// Removes a change, and its share before: while the change is there, the next start that opens
/// the disk removes both. A share that is left alone would stay, also where none may be stored.
/// Blocks.
fn end_change(esp: &Esp, shares: &Shares) -> Result<(), Error> {
    shares.forget(Slot::Next)?;
    Ok(esp.key_change.erase()?)
}

/// The public part of a lost sealed configuration, from the open disk.
fn from_data(root: &Root, kind: Kind) -> Result<Sealed, Error> {
    let credentials = &root.data.node.credentials;
    let der = zeroize::Zeroizing::new(credentials.key.read()?.ok_or(Error::KeyLost)?);
    let key = NodeKey::from_pkcs8_der(&der).map_err(Error::Key)?;
    let record = credentials.authorities.read()?.unwrap_or_default();
    let cluster_ca = Authorities::from_record(&record).ok_or(Error::CaLost)?.signing;
    Ok(Sealed {
        node_public_key: key.identity().public_key,
        cluster_ca,
        rotated_ca: None,
        storage: kind,
        secrets: None,
        keeping: Keeping::default(),
        disowned: false,
        wiped: false,
    })
}
