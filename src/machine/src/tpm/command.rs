//! The TPM commands: sends them, and reads the answers. Those that sealing needs are here, those
//! of an attestation in `proof`.
//!
//! ```text
//! | tag | size | code | handles | size, session | parameters |      a command
//! | tag | size | rc   | handle  | size of parameters, parameters | session |
//! ```
//!
//! The frames are put together here and not by a library of all commands: the
//! parameters are encrypted and signed between their making and their framing.
//!
//! Invariants:
//! - An answer is believed only if its session proves it, where there is one.
//! - Every object that was made in the TPM is flushed, even after a failure in between.

use std::io;

use ring::rand::{SecureRandom as _, SystemRandom};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use super::session::{CONTINUE, DECRYPT, ENCRYPT, SIZE, Salt, Session, Unusable};
use super::signed::{SECTIONS, SignedSystem};
use super::{Error, Transport, Unapproved};
use polis_wire::attestation::format::{Reader, Short, Writer};
use polis_wire::attestation::{derive, name};

const NO_SESSIONS: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;

/// The hierarchy that belongs to the owner of the machine.
const OWNER: u32 = 0x4000_0001;
const NULL: u32 = 0x4000_0007;
const PASSWORD: u32 = 0x4000_0009;

const ALG_AES: u16 = 0x0006;
const ALG_KEYED_HASH: u16 = 0x0008;
const ALG_RSASSA: u16 = 0x0014;
pub(super) const ALG_SHA256: u16 = 0x000b;
pub(super) const ALG_NULL: u16 = 0x0010;
const ALG_ECC: u16 = 0x0023;
const ALG_CFB: u16 = 0x0043;
const CURVE_P256: u16 = 0x0003;

/// Restricted decryption key that the TPM made and never exports, usable with its
/// (empty) password, outside of the protection against guessing.
const ROOT_ATTRIBUTES: u32 = 0x0003_0472;
/// Never exported, usable by its policy only, outside of that protection.
const SEALED_ATTRIBUTES: u32 = 0x0000_0412;

/// How often a TPM that is busy is asked again: it tests itself for a second at most.
const BUSY_MAX: u32 = 50;
const BUSY_WAIT: std::time::Duration = std::time::Duration::from_millis(50);

/// How often a policy session is started again because a register was extended meanwhile. A
/// machine that starts loads some hundred drivers in bursts, and each is measured.
const MEASURED_MAX: u32 = 32;

/// A command that this module knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    CreatePrimary = 0x131,
    Create = 0x153,
    Load = 0x157,
    Unseal = 0x15e,
    FlushContext = 0x165,
    LoadExternal = 0x167,
    PolicyAuthorize = 0x16a,
    VerifySignature = 0x177,
    ActivateCredential = 0x147,
    NvRead = 0x14e,
    PolicySecret = 0x151,
    Quote = 0x158,
    NvReadPublic = 0x169,
    StartAuthSession = 0x176,
    PcrRead = 0x17e,
    PolicyPcr = 0x17f,
    PolicyGetDigest = 0x189,
}

impl Code {
    /// The name in the specification.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::CreatePrimary => "TPM2_CreatePrimary",
            Self::Create => "TPM2_Create",
            Self::Load => "TPM2_Load",
            Self::Unseal => "TPM2_Unseal",
            Self::FlushContext => "TPM2_FlushContext",
            Self::LoadExternal => "TPM2_LoadExternal",
            Self::PolicyAuthorize => "TPM2_PolicyAuthorize",
            Self::VerifySignature => "TPM2_VerifySignature",
            Self::ActivateCredential => "TPM2_ActivateCredential",
            Self::NvRead => "TPM2_NV_Read",
            Self::PolicySecret => "TPM2_PolicySecret",
            Self::Quote => "TPM2_Quote",
            Self::NvReadPublic => "TPM2_NV_ReadPublic",
            Self::StartAuthSession => "TPM2_StartAuthSession",
            Self::PcrRead => "TPM2_PCR_Read",
            Self::PolicyPcr => "TPM2_PolicyPCR",
            Self::PolicyGetDigest => "TPM2_PolicyGetDigest",
        }
    }

    fn returns_handle(self) -> bool {
        matches!(
            self,
            Self::CreatePrimary | Self::Load | Self::LoadExternal | Self::StartAuthSession
        )
    }
}

/// Something in the TPM, and what proves that it is that.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) handle: u32,
    pub(super) name: Vec<u8>,
}

impl Object {
    /// A hierarchy, a session or a register: its name is its handle.
    pub(super) fn of(handle: u32) -> Self {
        Self { handle, name: handle.to_be_bytes().to_vec() }
    }
}

/// The storage root key.
pub(super) struct Root {
    pub(super) object: Object,
    point: ([u8; SIZE], [u8; SIZE]),
}

/// A policy that the TPM knows to be signed.
pub(super) struct Approval {
    /// The digest of the policy.
    policy: [u8; 32],
    /// The name of the key that signed it.
    pub(super) signer: Vec<u8>,
    /// `TPMT_TK_VERIFIED`: by it the TPM knows that it verified the signature.
    ticket: Vec<u8>,
}

/// The condition under which a sealed object opens.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    /// The running system is one that this key signed.
    pub(super) approval: Option<&'a Approval>,
    /// These registers are as they were.
    pub(super) pcrs: &'a [u32],
}

/// Which first parameter is encrypted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hide {
    Command,
    Answer,
}

pub(super) enum Auth<'a> {
    None,
    /// Of a hierarchy, or of a key that has an empty one: empty.
    Password,
    /// The empty password for the first object, and a policy that holds for the second.
    PasswordThenPolicy(&'a Object),
    Session(&'a mut Session, Option<Hide>),
}

pub(super) struct Answer {
    handle: u32,
    pub(super) parameters: Zeroizing<Vec<u8>>,
}

impl From<Short> for Error {
    fn from(_short: Short) -> Self {
        Self::Malformed("it is truncated")
    }
}

impl From<Unusable> for Error {
    fn from(_unusable: Unusable) -> Self {
        Self::Session
    }
}

/// A TPM that is spoken to.
pub(super) struct Tpm<'a, T: ?Sized>(pub(super) &'a mut T);

impl<T: Transport + ?Sized> Tpm<'_, T> {
    pub(super) fn run(
        &mut self,
        code: Code,
        objects: &[&Object],
        auth: Auth<'_>,
        parameters: Vec<u8>,
    ) -> Result<Answer, Error> {
        let mut parameters = Zeroizing::new(parameters);
        let (area, mut session) = match auth {
            Auth::None => (None, None),
            Auth::Password => (Some(authorization(PASSWORD, &[], CONTINUE, &[])), None),
            Auth::PasswordThenPolicy(policy) => {
                let password = authorization(PASSWORD, &[], CONTINUE, &[]);
                // A session without a key proves nothing more than that its policy holds.
                let policy = authorization(policy.handle, &[], CONTINUE, &[]);
                (Some([password, policy].concat()), None)
            }
            Auth::Session(session, hide) => {
                let nonce = session.turn(random()?);
                if hide == Some(Hide::Command) {
                    session.encrypt(first(&mut parameters)?);
                }
                let attributes = match hide {
                    None => CONTINUE,
                    Some(Hide::Command) => CONTINUE | DECRYPT,
                    Some(Hide::Answer) => CONTINUE | ENCRYPT,
                };
                let mut hash = Sha256::new_with_prefix((code as u32).to_be_bytes());
                objects.iter().for_each(|object| hash.update(&object.name));
                hash.update(&*parameters);
                let proof = session.prove(&hash.finalize(), attributes);
                let area = authorization(session.handle, &nonce, attributes, &proof);
                (Some(area), Some((session, hide)))
            }
        };

        let mut body = Writer::default();
        for object in objects {
            body = body.u32(object.handle);
        }
        if let Some(area) = &area {
            body = body.u32(size(area)).bytes(area);
        }
        let body = Zeroizing::new(body.bytes(&parameters).done());
        let tag = if area.is_some() { SESSIONS } else { NO_SESSIONS };
        let head = Writer::default().u16(tag).u32(size(&body) + 10).u32(code as u32);
        let command = Zeroizing::new(head.bytes(&body).done());
        let answer = self.transmit(code, &command)?;

        let mut reader = Reader(&answer);
        let _head = reader.take(10)?;
        let handle = if code.returns_handle() { reader.u32()? } else { 0 };
        if area.is_none() {
            return Ok(Answer { handle, parameters: Zeroizing::new(reader.0.to_vec()) });
        }
        let length = reader.u32()? as usize;
        let mut parameters = Zeroizing::new(reader.take(length)?.to_vec());
        if let Some((session, hide)) = &mut session {
            let (nonce, attributes, proof) = (reader.sized()?, reader.u8()?, reader.sized()?);
            let hash = Sha256::new_with_prefix(0_u32.to_be_bytes())
                .chain_update((code as u32).to_be_bytes())
                .chain_update(&*parameters)
                .finalize();
            if !session.check(nonce, &hash, attributes, proof) {
                return Err(Error::Forged(code.name()));
            }
            if *hide == Some(Hide::Answer) {
                if attributes & ENCRYPT == 0 {
                    return Err(Error::Forged(code.name()));
                }
                session.decrypt(first(&mut parameters)?);
            }
        }
        Ok(Answer { handle, parameters })
    }

    /// Sends a whole command until the TPM is not busy; the answer is a success.
    fn transmit(&mut self, code: Code, command: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
        /// Try again; yielded; testing.
        const BUSY: [u32; 3] = [0x922, 0x908, 0x90a];
        /// A register was extended, whichever, since the session named registers.
        const PCR_CHANGED: u32 = 0x128;
        for _attempt in 0..BUSY_MAX {
            let answer = self.0.transmit(command).map_err(Error::Transport)?;
            let answer = Zeroizing::new(answer);
            let mut reader = Reader(&answer);
            let _tag = reader.u16()?;
            if reader.u32()? as usize != answer.len() {
                return Err(Error::Malformed("its length differs from its header"));
            }
            match reader.u32()? {
                0 => return Ok(answer),
                busy if BUSY.contains(&busy) => self.0.wait(BUSY_WAIT),
                PCR_CHANGED => return Err(Error::Measured),
                rc => return Err(Error::Refused { command: code.name(), rc }),
            }
        }
        Err(Error::Transport(io::ErrorKind::TimedOut.into()))
    }

    /// The storage root key, made from the TPM's seed: the same each time, until
    /// somebody clears the TPM.
    pub(super) fn root(&mut self) -> Result<Root, Error> {
        let public = Writer::default()
            .u16(ALG_ECC)
            .u16(ALG_SHA256)
            .u32(ROOT_ATTRIBUTES)
            .sized(&[])
            .u16(ALG_AES)
            .u16(128)
            .u16(ALG_CFB)
            .u16(ALG_NULL)
            .u16(CURVE_P256)
            .u16(ALG_NULL)
            .sized(&[])
            .sized(&[])
            .done();
        let (object, made) = self.primary(OWNER, &public)?;
        let mut reader = Reader(&made);
        let fixed = 2 + 2 + 4 + 2 + 6 + 6;
        let _template = reader.take(fixed)?;
        let point = (coordinate(reader.sized()?)?, coordinate(reader.sized()?)?);
        Ok(Root { object, point })
    }

    /// Makes a primary key of this template; returns its public area, too.
    pub(super) fn primary(
        &mut self,
        hierarchy: u32,
        template: &[u8],
    ) -> Result<(Object, Vec<u8>), Error> {
        let parameters = Writer::default()
            .sized(&Writer::default().sized(&[]).sized(&[]).done())
            .sized(template)
            .sized(&[])
            .u32(0)
            .done();
        let hierarchy = Object::of(hierarchy);
        let answer = self.run(Code::CreatePrimary, &[&hierarchy], Auth::Password, parameters)?;
        let public = Reader(&answer.parameters).sized()?.to_vec();
        Ok((Object { handle: answer.handle, name: name(&public) }, public))
    }

    /// A session that `root` is the salt's keeper of.
    pub(super) fn session(
        &mut self,
        kind: SessionKind,
        root: Option<&Root>,
    ) -> Result<Session, Error> {
        let salt = root.map(|root| Salt::for_root(&root.point)).transpose()?;
        let ours = random()?;
        let secret = salt
            .as_ref()
            .map(|salt| Writer::default().sized(&salt.point.0).sized(&salt.point.1).done());
        let null = Object { handle: NULL, name: Vec::new() };
        let key = root.map_or(&null, |root| &root.object);
        let parameters = Writer::default()
            .sized(&ours)
            .sized(&secret.unwrap_or_default())
            .u8(kind as u8)
            .u16(ALG_AES)
            .u16(128)
            .u16(ALG_CFB)
            .u16(ALG_SHA256)
            .done();
        let answer = self.run(Code::StartAuthSession, &[key, &null], Auth::None, parameters)?;
        let theirs = Reader(&answer.parameters).sized()?.to_vec();
        Ok(Session::new(answer.handle, salt.as_ref(), ours, theirs))
    }

    /// Has the TPM verify who signed a system.
    pub(super) fn approve(&mut self, system: &SignedSystem) -> Result<Approval, Error> {
        // Without a private part. The owner's hierarchy, since a ticket of none proves nothing.
        let parameters = Writer::default().sized(&[]).sized(&system.key).u32(OWNER).done();
        let handle = self.run(Code::LoadExternal, &[], Auth::None, parameters)?.handle;
        let signer = name(&system.key);
        let key = Object { handle, name: signer.clone() };
        let parameters = Writer::default()
            .sized(&Sha256::digest(system.policy))
            .u16(ALG_RSASSA)
            .u16(ALG_SHA256)
            .sized(&system.signature)
            .done();
        let verified = self.run(Code::VerifySignature, &[&key], Auth::None, parameters);
        self.flush(handle);
        let answer = verified.map_err(approving)?;
        let mut reader = Reader(&answer.parameters);
        let (tag, hierarchy, digest) = (reader.u16()?, reader.u32()?, reader.sized()?);
        let ticket = Writer::default().u16(tag).u32(hierarchy).sized(digest).done();
        Ok(Approval { policy: system.policy, signer, ticket })
    }

    /// Binds a policy session to `terms`: to the registers as they are now, and to nothing where
    /// there are no terms.
    fn bind(&mut self, session: u32, terms: Terms<'_>) -> Result<(), Error> {
        let object = Object::of(session);
        if let Some(Approval { policy, signer, ticket }) = terms.approval {
            self.bind_to_registers(&object, &[SECTIONS])?;
            let parameters =
                Writer::default().sized(policy).sized(&[]).sized(signer).bytes(ticket).done();
            // From here on the session's digest names the key alone, whatever it signed.
            self.run(Code::PolicyAuthorize, &[&object], Auth::None, parameters)
                .map_err(approving)?;
        }
        self.bind_to_registers(&object, terms.pcrs)
    }

    fn bind_to_registers(&mut self, session: &Object, pcrs: &[u32]) -> Result<(), Error> {
        if pcrs.is_empty() {
            return Ok(());
        }
        let parameters = Writer::default().sized(&[]).bytes(&selection(pcrs)?).done();
        self.run(Code::PolicyPcr, &[session], Auth::None, parameters).map(drop)
    }

    /// Fails unless the TPM has these registers in its SHA-256 bank. A policy over registers that
    /// do not exist covers no register, and the TPM does not report that.
    fn has(&mut self, pcrs: &[u32]) -> Result<(), Error> {
        if pcrs.is_empty() {
            return Ok(());
        }
        let wanted = selection(pcrs)?;
        let answer = self.run(Code::PcrRead, &[], Auth::None, wanted.clone())?;
        let mut reader = Reader(&answer.parameters);
        let _updates = reader.u32()?;
        match reader.0.starts_with(&wanted) {
            true => Ok(()),
            false => Err(Error::NoBank),
        }
    }

    /// The digest of a policy of these terms, with the registers as they are now. Without terms,
    /// it is the one that each new session has: the TPM that made the object is the only
    /// condition. The session is no trial: an approval that does not hold fails here, and not
    /// when the object is to open.
    pub(super) fn policy(&mut self, terms: Terms<'_>) -> Result<Vec<u8>, Error> {
        self.has(terms.pcrs)?;
        self.undisturbed(|tpm| {
            let handle = tpm.session(SessionKind::Policy, None)?.handle;
            let session = Object::of(handle);
            let digest = tpm.bind(handle, terms).and_then(|()| {
                let answer = tpm.run(Code::PolicyGetDigest, &[&session], Auth::None, Vec::new())?;
                Ok(Reader(&answer.parameters).sized()?.to_vec())
            });
            tpm.flush(handle);
            digest
        })
    }

    /// Repeats `work`, which has a policy session of its own, while the TPM ends it because some
    /// register was extended meanwhile. The kernel does that for each module that it loads while
    /// Secure Boot is on (register 10), so a machine that starts would often find its disk shut.
    fn undisturbed<R>(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        for _attempt in 1..MEASURED_MAX {
            match work(self) {
                Err(Error::Measured) => self.0.wait(BUSY_WAIT),
                done => return done,
            }
        }
        work(self)
    }

    /// Puts `secret` under `policy`; returns public and private part.
    pub(super) fn create(
        &mut self,
        root: &Root,
        policy: &[u8],
        secret: &[u8],
    ) -> Result<(Vec<u8>, Vec<u8>), Error> {
        let sensitive = Zeroizing::new(Writer::default().sized(&[]).sized(secret).done());
        let public = Writer::default()
            .u16(ALG_KEYED_HASH)
            .u16(ALG_SHA256)
            .u32(SEALED_ATTRIBUTES)
            .sized(policy)
            .u16(ALG_NULL)
            .sized(&[])
            .done();
        let parameters =
            Writer::default().sized(&sensitive).sized(&public).sized(&[]).u32(0).done();
        let mut session = self.session(SessionKind::Hmac, Some(root))?;
        let auth = Auth::Session(&mut session, Some(Hide::Command));
        let made = self.run(Code::Create, &[&root.object], auth, parameters);
        self.flush(session.handle);
        let made = made?;
        let mut reader = Reader(&made.parameters);
        let private = reader.sized()?.to_vec();
        Ok((reader.sized()?.to_vec(), private))
    }

    /// Brings a sealed object back into the TPM that made it.
    pub(super) fn load(
        &mut self,
        root: &Root,
        public: &[u8],
        private: &[u8],
    ) -> Result<Object, Error> {
        let parameters = Writer::default().sized(private).sized(public).done();
        let mut session = self.session(SessionKind::Hmac, Some(root))?;
        let auth = Auth::Session(&mut session, None);
        let loaded = self.run(Code::Load, &[&root.object], auth, parameters);
        self.flush(session.handle);
        Ok(Object { handle: loaded?.handle, name: name(public) })
    }

    /// Opens a sealed object, if its terms hold.
    pub(super) fn unseal(
        &mut self,
        root: &Root,
        object: &Object,
        terms: Terms<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, Error> {
        self.undisturbed(|tpm| {
            let mut session = tpm.session(SessionKind::Policy, Some(root))?;
            let opened = tpm.bind(session.handle, terms).and_then(|()| {
                let auth = Auth::Session(&mut session, Some(Hide::Answer));
                tpm.run(Code::Unseal, &[object], auth, Vec::new())
            });
            tpm.flush(session.handle);
            Ok(Zeroizing::new(Reader(&opened?.parameters).sized()?.to_vec()))
        })
    }

    /// Flushes the object with this handle. A failure does no harm: the kernel flushes
    /// it when the device is closed.
    pub(super) fn flush(&mut self, handle: u32) {
        let handle = Writer::default().u32(handle).done();
        let _lost = self.run(Code::FlushContext, &[], Auth::None, handle);
    }
}

#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum SessionKind {
    Hmac = 0,
    Policy = 1,
}

/// A system that the key did not sign, or a signature that is not of the key.
pub(super) fn approving(error: Error) -> Error {
    /// `TPM_RC_VALUE` for the first parameter: the policy that the session has is another one.
    const OTHER_POLICY: u32 = 0x1c4;
    /// `TPM_RC_SIGNATURE`, for any parameter.
    const SIGNATURE: u32 = 0x0db;
    match error {
        Error::Refused { command, rc: OTHER_POLICY } if command == Code::PolicyAuthorize.name() => {
            Error::Unapproved(Unapproved::Changed)
        }
        Error::Refused { command, rc }
            if command == Code::VerifySignature.name() && rc & 0x0ff == SIGNATURE =>
        {
            Error::Unapproved(Unapproved::Damaged)
        }
        other => other,
    }
}

fn authorization(session: u32, nonce: &[u8], attributes: u8, proof: &[u8]) -> Vec<u8> {
    Writer::default().u32(session).sized(nonce).u8(attributes).sized(proof).done()
}

/// The content of the first parameter, a `TPM2B`.
fn first(parameters: &mut [u8]) -> Result<&mut [u8], Error> {
    let length = usize::from(Reader(parameters).u16()?);
    parameters.get_mut(2..2 + length).ok_or(Error::Malformed("it is truncated"))
}

fn coordinate(bytes: &[u8]) -> Result<[u8; SIZE], Error> {
    derive::coordinate(bytes).ok_or(Error::Malformed("a key is too long"))
}

/// The registers in the SHA-256 bank, as a bit each.
pub(super) fn selection(pcrs: &[u32]) -> Result<Vec<u8>, Error> {
    let mut bits = [0_u8; 3];
    for pcr in pcrs {
        let byte = bits.get_mut((pcr / 8) as usize).ok_or(Error::Register(*pcr))?;
        *byte |= 1 << (pcr % 8);
    }
    Ok(Writer::default().u32(1).u16(ALG_SHA256).u8(3).bytes(&bits).done())
}

fn size(bytes: &[u8]) -> u32 {
    // Blobs are checked for their size before they come here.
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

fn random() -> Result<[u8; SIZE], Error> {
    let mut bytes = [0; SIZE];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| Error::Session)?;
    Ok(bytes)
}
