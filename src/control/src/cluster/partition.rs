//! The data partition of a machine that enters a cluster: the kind that the policy asks for,
//! the keys of a new one, and opening the one that an earlier step made.

use super::error::Refusal;
use super::record::Damage;
use super::sealed::{BegunKeys, Keeping};
use super::unlock::disk::Found;
use super::unlock::keeper::Slot;
use super::unlock::keys::{self, Half, Secrets};
use super::unlock::{Keys, Unlocker};
use super::{Error, KeyStatus};
use polis_machine::parameters::{ColdStart, StoragePolicy, TpmMode};
use polis_machine::storage::key::RecoveryKey;
use polis_machine::storage::{self, Kind, Make};
use polis_machine::tpm;

/// The context of the encryption of the recovery key in a journal.
const RECOVERY: &[u8] = b"polis recovery key";

/// The data partition that a policy asks for.
pub(super) fn kind_for(policy: StoragePolicy) -> Kind {
    match policy {
        StoragePolicy::NeedsInsecure => Kind::Insecure,
        StoragePolicy::NeedsEncryption => Kind::Encrypted,
        StoragePolicy::Unspecified
        | StoragePolicy::Permissive
        | StoragePolicy::NeedsEncryptionAndAuthentication => Kind::Authenticated,
    }
}

/// Refuses a partition with less protection than it had.
pub(super) fn check_kind(expected: Kind, found: Found) -> Result<Kind, Error> {
    match found {
        Found::Locked(found, _) | Found::Mounted(found) if found != expected => {
            Err(Error::KindDiffers { expected, found })
        }
        Found::Absent(_) | Found::Locked(..) | Found::Mounted(_) => Ok(expected),
    }
}

/// Plans a new partition: makes its keys, and keeps the halves; no keys without encryption.
/// Blocks.
pub(super) fn plan(
    unlocker: &Unlocker,
    tpm: TpmMode,
    secrets: &Secrets,
    kind: Kind,
    partition: uuid::Uuid,
) -> Result<(Make, Option<BegunKeys>), Error> {
    let make = match kind {
        Kind::Insecure => return Ok((Make::Insecure, None)),
        Kind::Encrypted => Make::Encrypted,
        Kind::Authenticated => Make::Authenticated,
    };
    let cluster = Half::random()?;
    let recovery = keys::recovery_key()?;
    let hidden = unlocker.sealer.hide(tpm, secrets)?;
    // A share is stored until the cluster has its half, even if the policy wants no share later.
    unlocker.shares.keep(Slot::Current, &hidden, &cluster)?;
    let nonce = keys::nonce()?;
    let cover = keys::journal_key(&secrets.node, &cluster)?;
    let covered =
        tpm::encrypt(&cover, nonce, RECOVERY, recovery.bytes()).map_err(|_error| Error::Random)?;
    let passphrase = keys::passphrase(&secrets.node, &cluster, partition)?;
    let begun = BegunKeys { secrets: hidden, recovery_nonce: nonce.to_vec(), recovery: covered };
    Ok((make(storage::key::Keys { passphrase, recovery: Some(recovery) }), Some(begun)))
}

/// The secrets and keys that open an encrypted partition.
pub(super) struct Opened {
    pub(super) secrets: Secrets,
    pub(super) keys: Keys,
    pub(super) recovery: RecoveryKey,
}

/// Makes sure that the partition of an earlier step is open and of its kind, by the keys in
/// the journal; `None` without encryption.
pub(super) async fn ensure_open(
    unlocker: &mut Unlocker,
    found: Found,
    kind: Kind,
    begun: Option<&BegunKeys>,
) -> Result<Option<Opened>, Error> {
    check_kind(kind, found)?;
    let (secrets, keys) = match (found, begun) {
        (Found::Absent(_), _) => return Err(Error::Changed),
        (Found::Mounted(_), None) => return Ok(None),
        (Found::Locked(found, _), None) => {
            return Err(Error::KindDiffers { expected: kind, found });
        }
        (Found::Locked(_, partition), Some(begun)) => {
            unlocker.with(&begun.secrets, Slot::Current, partition).await?
        }
        (Found::Mounted(_), Some(begun)) => unlocker.read(&begun.secrets, Slot::Current).await?,
    };
    let recovery = begun.map(|begun| uncover(begun, &secrets, &keys)).transpose()?;
    Ok(recovery.map(|recovery| Opened { secrets, keys, recovery }))
}

/// The state of the keys of a disk whose recovery key is not confirmed as saved.
pub(super) fn unsaved(keys: &Keys, keeping: Keeping) -> KeyStatus {
    KeyStatus {
        sealed: keys.secrets.is_sealed(),
        keeper: keys.keeper.filter(|_| keeping.cold_start == ColdStart::Automatic),
        recovery_key_unsaved: true,
        firmware_update_announced: false,
    }
}

/// The recovery key in the journal.
fn uncover(begun: &BegunKeys, secrets: &Secrets, keys: &Keys) -> Result<RecoveryKey, Error> {
    let cover = keys::journal_key(&secrets.node, &keys.cluster)?;
    let opened = tpm::decrypt(&cover, &begun.recovery_nonce, RECOVERY, &begun.recovery);
    let damaged = || Damage::Content("its recovery key does not open".to_owned());
    let damaged = || Error::Refused(Refusal::JournalDamaged(damaged()));
    let bytes = opened.map_err(|_mismatch| damaged())?;
    let half = Half::new(&bytes).ok_or_else(damaged)?;
    Ok(RecoveryKey::new(zeroize::Zeroizing::new(*half.bytes())))
}
