//! The sealer: protects the secrets of this machine with its TPM if the policy wants that
//! and the machine has one, and leaves them plain otherwise.
//!
//! ```text
//! tpm_mode     TPM there           no TPM
//! -----------------------------------------
//! REQUIRED     sealed              refused
//! BEST_EFFORT  sealed, else plain  plain
//! DISABLED     plain               plain
//! ```
//!
//! The policy covers two registers. 7 is the state of Secure Boot and the keys that it
//! accepts; 12 is what was added to the command line of the kernel from outside. Both are
//! the same for the next version of the system; those that measure the system itself (4, 9,
//! 11) are not, and an update would lock its own disk. While a firmware update is announced,
//! the policy covers no register (`firmware`): the TPM alone is the condition.
//!
//! Where the running system has signed measurements, the policy also demands a system of the
//! same policy key: every one that the key signed, and no other. A system on trial binds
//! nothing new to its signature, since the one before it, to which the machine may go back,
//! need not have one; its next start does.
//!
//! What this module does not do: choose the place of the result (`sealed`, `keeper`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use polis_proto::v1;
use prost::Message as _;
use tracing::warn;
use zeroize::Zeroizing;

use super::keys::{Half, Secrets};
use crate::cluster::Error;
use crate::cluster::record::Damage;
use polis_base::cause;
use polis_base::sys::efivar;
use polis_machine::parameters::TpmMode;
use polis_machine::tpm::{self, Blob, Device, SignedSystem, Unapproved};
use polis_wire::attestation::{Answer, Keys, Question, qualifier};

/// The condition under which the TPM opens what it sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The registers of the policy are as they were.
    Registers,
    /// It is the same TPM, whatever its registers have.
    TpmAlone,
}

impl Binding {
    /// The registers of the policy; see above.
    #[must_use]
    pub fn pcrs(self) -> &'static [u32] {
        match self {
            Self::Registers => &[7, 12],
            Self::TpmAlone => &[],
        }
    }
}

/// The purpose that the secrets of a node are sealed for.
const SECRETS: &[u8] = b"polis node secrets";
/// The purpose that a share of the cluster's half is sealed for.
const SHARE: &[u8] = b"polis cold start share";

/// A driver that is a module comes with the rest of the hardware.
const DEVICE_WAIT: Duration = Duration::from_secs(5);
/// The number of attempts at a TPM that does not answer.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// A secret in its stored form.
#[derive(Clone, PartialEq, Eq)]
pub enum Guarded<T> {
    /// Plain.
    Plain(T),
    /// Sealed by the TPM.
    Tpm(Blob),
}

impl<T> Guarded<T> {
    /// Whether a TPM is needed to open it.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        matches!(self, Self::Tpm(_))
    }

    /// The policy key whose systems alone open it, as TPMs name it; empty: every system does.
    #[must_use]
    pub fn signer(&self) -> &[u8] {
        match self {
            Self::Plain(_) => &[],
            Self::Tpm(blob) => &blob.signer,
        }
    }

    /// The condition under which the TPM opens it; `None` if it needs no TPM.
    #[must_use]
    pub fn binding(&self) -> Option<Binding> {
        match self {
            Self::Plain(_) => None,
            Self::Tpm(blob) if blob.pcrs.is_empty() => Some(Binding::TpmAlone),
            Self::Tpm(_) => Some(Binding::Registers),
        }
    }
}

impl<T> fmt::Debug for Guarded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_sealed() { "Tpm(…)" } else { "Plain(…)" })
    }
}

/// The interface of a TPM.
pub trait Tpm: fmt::Debug + Send + Sync {
    /// Whether the machine has one.
    fn is_there(&self) -> bool;

    /// The policy key that signed the running system, as the TPM names it; empty where there is
    /// none, or the TPM was not started with that system. Blocks.
    fn signer(&self) -> Vec<u8>;

    /// Seals `secret` for `purpose`, under a policy of the policy key `signer`, unless it is
    /// empty, and of the registers `pcrs`. Blocks.
    ///
    /// # Errors
    ///
    /// [`tpm::Error`].
    fn seal(
        &self,
        signer: &[u8],
        pcrs: &[u32],
        purpose: &[u8],
        secret: &[u8],
    ) -> Result<Blob, tpm::Error>;

    /// Opens a secret that it sealed for `purpose`. Blocks.
    ///
    /// # Errors
    ///
    /// [`tpm::Error`].
    fn unseal(&self, purpose: &[u8], blob: &Blob) -> Result<Zeroizing<Vec<u8>>, tpm::Error>;

    /// The keys that prove which TPM it is. Blocks.
    ///
    /// # Errors
    ///
    /// [`tpm::Error`].
    fn keys(&self) -> Result<Keys, tpm::Error>;

    /// The answer to a question, as that of the node `node`. Blocks.
    ///
    /// # Errors
    ///
    /// [`tpm::Error`].
    fn prove(&self, node: &str, question: &Question) -> Result<Answer, tpm::Error>;
}

/// The machine's own TPM.
#[derive(Debug)]
pub struct Machine {
    /// The directory of devices.
    pub dev: PathBuf,
    /// The directory of the signed measurements of the running system.
    pub extra: PathBuf,
}

impl Machine {
    /// The signed measurements of the running system.
    fn system(&self) -> Option<SignedSystem> {
        SignedSystem::load(&self.extra).unwrap_or_else(|error| {
            let error = cause::line(&error);
            warn!(error, "the signed measurements of this system cannot be used");
            None
        })
    }
}

impl Tpm for Machine {
    fn is_there(&self) -> bool {
        Device::open(&self.dev).is_ok()
    }

    fn signer(&self) -> Vec<u8> {
        let Some(system) = self.system() else { return Vec::new() };
        match patiently(|| tpm::confirm(&mut Device::open(&self.dev)?, &system)) {
            Ok(()) => system.signer(),
            Err(error) => {
                let error = cause::line(&error);
                warn!(error, "the key of the disk is not sealed to the signature of this system");
                Vec::new()
            }
        }
    }

    fn seal(
        &self,
        signer: &[u8],
        pcrs: &[u32],
        purpose: &[u8],
        secret: &[u8],
    ) -> Result<Blob, tpm::Error> {
        let system = match signer {
            [] => None,
            signer => Some(
                self.system()
                    .filter(|system| system.signer() == signer)
                    .ok_or(tpm::Error::Unapproved(Unapproved::OtherKey))?,
            ),
        };
        let seal = |mut device| tpm::seal(&mut device, system.as_ref(), pcrs, purpose, secret);
        patiently(|| seal(Device::open(&self.dev)?))
    }

    fn unseal(&self, purpose: &[u8], blob: &Blob) -> Result<Zeroizing<Vec<u8>>, tpm::Error> {
        let system = self.system();
        let unseal = |mut device| tpm::unseal(&mut device, system.as_ref(), purpose, blob);
        patiently(|| unseal(Device::open(&self.dev)?))
    }

    fn keys(&self) -> Result<Keys, tpm::Error> {
        patiently(|| tpm::keys(&mut Device::open(&self.dev)?))
    }

    fn prove(&self, node: &str, question: &Question) -> Result<Answer, tpm::Error> {
        let Question { credential, nonce, registers } = question;
        let asked = qualifier(nonce, node);
        patiently(|| tpm::prove(&mut Device::open(&self.dev)?, credential, &asked, registers))
    }
}

/// Gives the driver time to come, and the TPM time to answer.
#[expect(
    clippy::disallowed_methods,
    reason = "on a thread that may block; a new device is not announced"
)]
fn patiently<T>(call: impl Fn() -> Result<T, tpm::Error>) -> Result<T, tpm::Error> {
    let (mut absent, mut failed) = (Duration::ZERO, 0);
    loop {
        match call() {
            Err(tpm::Error::Absent) if absent < DEVICE_WAIT => absent += PAUSE,
            Err(error) if error.retriable() && failed < ATTEMPTS => failed += 1,
            result => return result,
        }
        std::thread::sleep(PAUSE);
    }
}

/// Seals and opens the two kinds of secrets. Its calls block.
#[derive(Clone, Debug)]
pub(in crate::cluster) struct Sealer {
    tpm: std::sync::Arc<dyn Tpm>,
    /// Where the kernel shows the variables of the firmware.
    efivars: PathBuf,
}

impl Sealer {
    pub(in crate::cluster) fn new(tpm: std::sync::Arc<dyn Tpm>, efivars: &Path) -> Self {
        Self { tpm, efivars: efivars.to_owned() }
    }

    /// The policy key to seal to, where `before` is what this seal replaces. A secret that
    /// is bound to a key stays bound to it: only a recovery, which makes new halves, forgets the
    /// key. A system that the machine may go back from binds nothing.
    pub(in crate::cluster) fn signer(&self, before: Option<&Blob>) -> Vec<u8> {
        match before {
            Some(blob) if !blob.signer.is_empty() => blob.signer.clone(),
            _ if efivar::may_be_left(&self.efivars) => Vec::new(),
            _ => self.tpm.signer(),
        }
    }

    /// The keys of the TPM, as a message; `None` if it does not name them, which the log says.
    pub(in crate::cluster) fn keys(&self) -> Option<v1::TpmKeys> {
        match self.tpm.keys() {
            Ok(keys) => Some(keys.into_message()),
            Err(error) => {
                let error = cause::line(&error);
                warn!(error, "the TPM does not name its keys: this node proves nothing");
                None
            }
        }
    }

    /// The answer of the TPM to a leader, as that of the node `node`; `None` if there is none,
    /// which the log says.
    pub(in crate::cluster) fn prove(
        &self,
        node: &str,
        question: v1::TpmQuestion,
    ) -> Option<v1::TpmAnswer> {
        let asked = Question::from_message(question).map_err(|invalid| invalid.to_string());
        let proved = asked.and_then(|question| {
            self.tpm.prove(node, &question).map_err(|error| cause::line(&error))
        });
        match proved {
            Ok(answer) => Some(answer.into_message()),
            Err(error) => {
                warn!(error, "the TPM does not answer the leader: this node proves nothing");
                None
            }
        }
    }

    /// Seals the secrets of this node as `mode` demands.
    pub(in crate::cluster) fn hide(
        &self,
        mode: TpmMode,
        secrets: &Secrets,
    ) -> Result<Guarded<Secrets>, Error> {
        let message = Zeroizing::new(secrets_message(secrets).encode_to_vec());
        match self.seal(mode, SECRETS, &message)? {
            Some(blob) => Ok(Guarded::Tpm(blob)),
            None => Ok(Guarded::Plain(secrets.clone())),
        }
    }

    /// Seals the secrets of this node in `sealed` again, to `signer`, and checks that they open.
    pub(in crate::cluster) fn hide_again(
        &self,
        sealed: &Blob,
        signer: &[u8],
        binding: Binding,
    ) -> Result<Guarded<Secrets>, Error> {
        let bytes = self.unseal(SECRETS, sealed)?;
        let again = self.tpm.seal(signer, binding.pcrs(), SECRETS, &bytes).map_err(Error::Tpm)?;
        match self.unseal(SECRETS, &again)? == bytes {
            true => Ok(Guarded::Tpm(again)),
            false => Err(Error::Tpm(tpm::Error::Mismatch)),
        }
    }

    /// Seals a share like the secrets in `like`.
    pub(in crate::cluster) fn hide_share(
        &self,
        like: &Guarded<Secrets>,
        share: &Half,
    ) -> Result<Guarded<Half>, Error> {
        let seal = |binding: Binding| {
            let sealed = self.tpm.seal(like.signer(), binding.pcrs(), SHARE, share.bytes());
            sealed.map_err(Error::Tpm)
        };
        match like.binding().map(seal).transpose()? {
            Some(blob) => Ok(Guarded::Tpm(blob)),
            None => Ok(Guarded::Plain(share.clone())),
        }
    }

    pub(in crate::cluster) fn open(&self, secrets: &Guarded<Secrets>) -> Result<Secrets, Error> {
        match secrets {
            Guarded::Plain(secrets) => Ok(secrets.clone()),
            Guarded::Tpm(blob) => {
                let bytes = self.unseal(SECRETS, blob)?;
                let message = v1::SealedSecrets::decode(bytes.as_slice());
                let secrets = message.ok().and_then(|message| secrets_value(&message).ok());
                secrets.ok_or(Error::Tpm(tpm::Error::Mismatch))
            }
        }
    }

    pub(in crate::cluster) fn open_share(&self, share: &Guarded<Half>) -> Result<Half, Error> {
        match share {
            Guarded::Plain(share) => Ok(share.clone()),
            Guarded::Tpm(blob) => {
                Half::new(&self.unseal(SHARE, blob)?).ok_or(Error::Tpm(tpm::Error::Mismatch))
            }
        }
    }

    fn seal(&self, mode: TpmMode, purpose: &[u8], secret: &[u8]) -> Result<Option<Blob>, Error> {
        if mode == TpmMode::Disabled || (mode == TpmMode::BestEffort && !self.tpm.is_there()) {
            return Ok(None);
        }
        match self.tpm.seal(&self.signer(None), Binding::Registers.pcrs(), purpose, secret) {
            Ok(blob) => Ok(Some(blob)),
            Err(error) if mode == TpmMode::BestEffort => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "continuing without the TPM, which does not seal");
                Ok(None)
            }
            Err(error) => Err(Error::Tpm(error)),
        }
    }

    fn unseal(&self, purpose: &[u8], blob: &Blob) -> Result<Zeroizing<Vec<u8>>, Error> {
        self.tpm.unseal(purpose, blob).map_err(Error::Tpm)
    }
}

pub(in crate::cluster) fn secrets_message(secrets: &Secrets) -> v1::SealedSecrets {
    v1::SealedSecrets {
        node_unlock_key: secrets.node.bytes().to_vec(),
        join_private_key: secrets.join.bytes().to_vec(),
        node_private_key: secrets.key.iter().flat_map(|key| *key.bytes()).collect(),
    }
}

fn secrets_value(message: &v1::SealedSecrets) -> Result<Secrets, Damage> {
    let half = |bytes: &[u8], what| {
        Half::new(bytes).ok_or_else(|| Damage::Content(format!("the {what} is not 32 bytes long")))
    };
    Ok(Secrets {
        node: half(&message.node_unlock_key, "node unlock key")?,
        join: half(&message.join_private_key, "join key")?,
        key: match message.node_private_key.is_empty() {
            true => None,
            false => Some(half(&message.node_private_key, "key of the node")?),
        },
    })
}

/// The two fields that guarded secrets take in a message.
pub(in crate::cluster) fn to_fields(
    guarded: Option<&Guarded<Secrets>>,
) -> (Option<v1::SealedSecrets>, Option<v1::TpmSealed>) {
    match guarded {
        None => (None, None),
        Some(Guarded::Plain(secrets)) => (Some(secrets_message(secrets)), None),
        Some(Guarded::Tpm(blob)) => (None, Some(blob_message(blob))),
    }
}

/// Reads the two fields that [`to_fields`] made.
pub(in crate::cluster) fn from_fields(
    plain: Option<&v1::SealedSecrets>,
    sealed: Option<v1::TpmSealed>,
) -> Result<Option<Guarded<Secrets>>, Damage> {
    match (plain, sealed) {
        (None, None) => Ok(None),
        (Some(plain), None) => Ok(Some(Guarded::Plain(secrets_value(plain)?))),
        (None, Some(sealed)) => Ok(Some(Guarded::Tpm(blob_value(sealed)))),
        (Some(_), Some(_)) => Err(Damage::Content("secrets both plain and sealed".to_owned())),
    }
}

pub(in crate::cluster) fn blob_message(blob: &Blob) -> v1::TpmSealed {
    let Blob { public, private, root, pcrs, signer, nonce, ciphertext } = blob.clone();
    v1::TpmSealed { public, private, pcrs, nonce, ciphertext, root, signer }
}

pub(in crate::cluster) fn blob_value(message: v1::TpmSealed) -> Blob {
    let v1::TpmSealed { public, private, pcrs, nonce, ciphertext, root, signer } = message;
    Blob { public, private, root, pcrs, signer, nonce, ciphertext }
}
