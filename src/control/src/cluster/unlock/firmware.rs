//! Sealing again: an announced firmware update does not lock the disk, and a system with signed
//! measurements binds it to them.
//!
//! ```text
//!           an owner announces              the next start, or an owner cancels
//! [bound] ---------------------> [unbound] ------------------------------------> [bound]
//!   registers 7 and 12             this TPM alone                  the present registers
//! ```
//!
//! Either state names the policy key of the running system, if it has one: an announcement is
//! about the firmware, and lets no other owner's system in that is
//! measured by its boot stub.
//!
//! The empty list of registers in the sealed configuration is the only mark of an announcement.
//!
//! Invariants:
//! - The share changes first, then the sealed configuration; the TPM opens either before it is
//!   written, and each opens with or without the other's change, so a power cut between them
//!   locks nothing.
//! - An owner receives the answer after both are on the ESP.
//! - Secrets without a TPM stay as they are: their disk opens after every firmware update.
//!
//! What this module does not do: check the caller's permission (`rpc`), or decide when a start
//! seals again (`join`).

use tokio::sync::{mpsc, oneshot, watch};

use super::keeper::{Keeper, Shares, Slot};
use super::keys::Secrets;
use super::sealer::{Binding, Guarded, Sealer};
use super::waiting;
use crate::cluster::Error;
use crate::cluster::error::Refusal;
use crate::cluster::record::{self, Record};
use crate::cluster::sealed::Sealed;
use polis_base::files::Esp;
use polis_runtime::supervisor::blocking;

/// The result for the secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The TPM does not keep them.
    NotSealed,
    /// They were sealed so before.
    Unchanged,
    /// The ESP has these now.
    Sealed(Guarded<Secrets>),
}

/// Has the TPM seal the share and the secrets on the ESP under `binding`, and to the policy key of
/// the running system, where they are not.
pub(in crate::cluster) async fn seal_again(
    esp: &Esp,
    sealer: &Sealer,
    shares: &Shares,
    binding: Binding,
) -> Result<Outcome, Error> {
    let file = esp.sealed_configuration.clone();
    let sealed = match record::read_from(&file, Sealed::from_record).await? {
        Record::Whole(sealed) => sealed,
        Record::Absent => return Err(Refusal::SealedLost.into()),
        Record::Damaged(damage) => return Err(Refusal::SealedDamaged(damage).into()),
    };
    let (sealer, shares) = (sealer.clone(), shares.clone());
    blocking(move || {
        let Some(Guarded::Tpm(blob)) = &sealed.secrets else { return Ok(Outcome::NotSealed) };
        let own = Guarded::Tpm(blob.clone());
        let signer = sealer.signer(Some(blob));
        let is_other = own.binding() != Some(binding) || own.signer() != signer;
        let share = shares.find(Slot::Current)?.filter(|(share, keeper)| {
            let is_other = share.binding() != Some(binding) || share.signer() != signer;
            *keeper == Keeper::Tpm && is_other
        });
        if !is_other && share.is_none() {
            return Ok(Outcome::Unchanged);
        }
        let secrets = if is_other { sealer.hide_again(blob, &signer, binding)? } else { own };
        if let Some((share, _)) = share {
            shares.keep(Slot::Current, &secrets, &sealer.open_share(&share)?)?;
        }
        if is_other {
            let sealed = Sealed { secrets: Some(secrets.clone()), ..sealed };
            file.write(&sealed.to_record())?;
        }
        Ok(Outcome::Sealed(secrets))
    })
    .await
}

/// The reason why nothing was announced or cancelled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The disk may not be open yet, or the cluster is removing the node.
    #[error("this node is not home: nothing was sealed again")]
    NotHome,
    /// The run that took the request ended.
    #[error("it is not known whether the key was sealed again: look at the status of the node")]
    Unknown,
    /// The TPM or the ESP failed. The former seal still opens the disk.
    #[error("cannot seal the key of the disk again: {0}")]
    Failed(String),
}

/// Whether the TPM keeps the secrets, or why they stay as they were.
type Answer = Result<bool, Refused>;

/// A wish of an owner.
#[derive(Debug)]
pub(in crate::cluster) struct Request {
    /// How to seal.
    pub(in crate::cluster) binding: Binding,
    /// Where to say that it is done.
    pub(in crate::cluster) answer: oneshot::Sender<Answer>,
}

/// A handle to the run that is home.
#[derive(Clone, Debug, Default)]
pub struct Open(Option<mpsc::Sender<Request>>);

/// Where owners announce a firmware update.
#[derive(Clone, Debug)]
pub struct Announcements(watch::Receiver<Open>);

impl Announcements {
    /// Announcements to the service that publishes on the other end of `open`.
    #[must_use]
    pub fn new(open: watch::Receiver<Open>) -> Self {
        Self(open)
    }

    /// Seals what opens the disk so that it opens under `binding`. Returns `false` where the TPM
    /// does not keep it. Not cancel-safe: it may be sealed after the caller has gone.
    ///
    /// # Errors
    ///
    /// [`Refused`].
    pub async fn bind(&self, binding: Binding) -> Result<bool, Refused> {
        let open = self.0.borrow().0.clone().ok_or(Refused::NotHome)?;
        let (answer, answered) = oneshot::channel();
        open.send(Request { binding, answer }).await.map_err(|_gone| Refused::NotHome)?;
        answered.await.unwrap_or(Err(Refused::Unknown))
    }
}

/// The run that takes announcements.
pub(in crate::cluster) type Waiting<'a> = waiting::Waiting<'a, Open, Request>;

/// Publishes on `open` that announcements are taken.
pub(in crate::cluster) fn wait(open: &watch::Sender<Open>) -> Waiting<'_> {
    Waiting::new(open, |requests| Open(Some(requests)))
}
