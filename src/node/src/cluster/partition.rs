//! The data partition that a cluster's policy asks for, and the keys of a new one.

use super::Error;
use super::decide::Refusal;
use super::record::Damage;
use super::sealed::BegunKeys;
use super::unlock::disk::Found;
use super::unlock::keeper::Slot;
use super::unlock::keys::{self, Half, Secrets};
use super::unlock::{Keys, Unlocker};
use crate::parameters::{StoragePolicy, TpmMode};
use crate::storage::key::RecoveryKey;
use crate::storage::{self, Kind, Make};
use crate::tpm;

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

/// Makes the keys of a new partition, and keeps the halves. Blocks.
pub(super) fn new_keys(
    unlocker: &Unlocker,
    tpm: TpmMode,
    secrets: Secrets,
    kind: Kind,
    partition: uuid::Uuid,
) -> Result<(Make, BegunKeys, Half), Error> {
    let cluster = Half::random()?;
    let recovery = keys::recovery_key()?;
    let hidden = unlocker.sealer.hide(tpm, &secrets)?;
    // A share is stored until the cluster has its half, even if the policy wants no share later.
    unlocker.shares.keep(Slot::Current, &hidden, &cluster)?;
    let nonce = keys::nonce()?;
    let cover = keys::journal_key(&secrets.node, &cluster)?;
    let covered =
        tpm::encrypt(&cover, nonce, RECOVERY, recovery.bytes()).map_err(|_error| Error::Random)?;
    let passphrase = keys::passphrase(&secrets.node, &cluster, partition)?;
    let both = storage::key::Keys { passphrase, recovery };
    let make = match kind {
        Kind::Insecure => Make::Insecure,
        Kind::Encrypted => Make::Encrypted(both),
        Kind::Authenticated => Make::Authenticated(both),
    };
    let begun = BegunKeys { secrets: hidden, recovery_nonce: nonce.to_vec(), recovery: covered };
    Ok((make, begun, cluster))
}

/// The recovery key in the journal.
pub(super) fn uncover(
    begun: &BegunKeys,
    secrets: &Secrets,
    keys: &Keys,
) -> Result<RecoveryKey, Error> {
    let cover = keys::journal_key(&secrets.node, &keys.cluster)?;
    let opened = tpm::decrypt(&cover, &begun.recovery_nonce, RECOVERY, &begun.recovery);
    let damaged = || Damage::Content("its recovery key does not open".to_owned());
    let damaged = || Error::Refused(Refusal::JournalDamaged(damaged()));
    let bytes = opened.map_err(|_mismatch| damaged())?;
    let half = Half::new(&bytes).ok_or_else(damaged)?;
    Ok(RecoveryKey::new(zeroize::Zeroizing::new(*half.bytes())))
}
