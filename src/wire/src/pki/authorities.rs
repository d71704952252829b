//! The authorities that the holders of certificates know: the one that signs, and those before
//! it.
//!
//! ```text
//!            rotate                       conclude
//! [A signs] -------> [B signs, A leaves] ---------> [B signs, A is a former one]
//! ```
//!
//! Each authority signs a *bridge* before it stops: a certificate for the key of its successor.
//! The holder of a certificate shows the bridges beside it, so a machine that was off during the
//! whole rotation, and trusts only A, still accepts what B signed (RFC 4210, section 4.4).
//!
//! Invariants:
//! - Only what follows the authorities that are known takes their place ([`Authorities::follow`]).
//! - A client accepts servers of the authority that signs and of the one that leaves. A client that
//!   received the rotation rejects a server with a certificate of a former one.
//! - A server accepts callers of a former one, too, so that they can ask for a new certificate. The
//!   certificate proves no more than their key does: a server knows nodes and users by their keys,
//!   and the key of an authority cannot add one.

use std::fmt;
use std::time::SystemTime;

use polis_proto::v1;
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use super::{Facts, certificates_pem, signed_by};

/// The former authorities that are kept. A person has to give the new CA to a node that was away
/// during more rotations. The bridge of the rotation that goes on is the sixth, and rustls follows
/// six.
const FORMER_MAX: usize = 5;

/// An authority and those before it, in DER.
#[derive(Clone, PartialEq, Eq)]
pub struct Authorities {
    /// It signs.
    pub signing: Vec<u8>,
    /// The one before it, trusted until the rotation is over.
    pub leaving: Option<Vec<u8>>,
    /// Those before, newest first.
    pub former: Vec<Vec<u8>>,
    /// For each of the others, newest first: its certificate for the key of its successor.
    pub bridges: Vec<Vec<u8>>,
    /// Certificates of former authorities that are good by themselves: of holders that may have no
    /// other one on their disks since the last rotation. Only where their peers have no other way
    /// to know them.
    pub pinned: Vec<Vec<u8>>,
    /// How many rotations were begun.
    pub rotations: u64,
}

impl fmt::Debug for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorities")
            .field("signing", &format_args!("{} bytes", self.signing.len()))
            .field("leaving", &self.leaving.as_ref().map(Vec::len))
            .field("former", &self.former.len())
            .field("pinned", &self.pinned.len())
            .field("rotations", &self.rotations)
            .finish_non_exhaustive()
    }
}

impl Authorities {
    /// An authority without predecessors.
    #[must_use]
    pub fn sole(signing: Vec<u8>) -> Self {
        let (former, bridges, pinned) = (Vec::new(), Vec::new(), Vec::new());
        Self { signing, leaving: None, former, bridges, pinned, rotations: 0 }
    }

    /// The rotation that made the one that signs, counted from one; zero for the first one.
    ///
    /// An authority that is younger than the cluster has seen fewer rotations than the cluster, so
    /// how many it has seen does not tell.
    #[must_use]
    pub fn made_in(&self) -> u64 {
        let subject = Facts::read(&self.signing).map(|facts| facts.subject).unwrap_or_default();
        subject.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).unwrap_or(0)
    }

    /// Those that servers may have their certificates from.
    pub fn trusted(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.signing.as_slice()).chain(self.leaving.as_deref())
    }

    /// The trusted ones in PEM, the one that signs first.
    #[must_use]
    pub fn trusted_pem(&self) -> Vec<u8> {
        certificates_pem(self.trusted())
    }

    /// A certificate in PEM, and behind it the bridges for an end that knows only a former
    /// authority.
    #[must_use]
    pub fn chain_pem(&self, certificate: &[u8]) -> Vec<u8> {
        let bridges = self.bridges.iter().map(Vec::as_slice);
        certificates_pem(std::iter::once(certificate).chain(bridges))
    }

    /// All of them, newest first.
    pub fn all(&self) -> impl Iterator<Item = &[u8]> {
        self.trusted().chain(self.former.iter().map(Vec::as_slice))
    }

    /// Whether this is the certificate of one of them.
    #[must_use]
    pub fn contains(&self, authority: &[u8]) -> bool {
        self.all().any(|known| known == authority)
    }

    /// Whether the one that signs has signed this certificate.
    #[must_use]
    pub fn signed(&self, certificate: &[u8]) -> bool {
        signed_by(certificate, &self.signing)
    }

    /// Checks that the certificate `new` may take the place of `old`, both in DER: it is of the
    /// same key and name, the one that signs has signed it, and it is not due for renewal.
    ///
    /// # Errors
    ///
    /// The reason why it may not.
    pub fn check_renewed(
        &self,
        old: &[u8],
        new: &[u8],
        now: SystemTime,
    ) -> Result<(), &'static str> {
        let old = Facts::read(old).ok_or("the old one cannot be read")?;
        let facts = Facts::read(new).ok_or("it cannot be read")?;
        if facts.public_key != old.public_key || facts.subject != old.subject {
            return Err("it belongs to another node");
        }
        if facts.renewal_due(now) {
            return Err("it is already due for renewal");
        }
        match self.signed(new) {
            true => Ok(()),
            false => Err("the cluster's CA has not signed it"),
        }
    }

    /// Whether `authority` is the one that signs, or leads to it from bridge to bridge.
    #[must_use]
    pub fn succeed(&self, authority: &[u8]) -> bool {
        self.bridges_from(authority).is_some()
    }

    /// How many bridges lead from `authority` to the one that signs; `None` if they do not.
    fn bridges_from(&self, authority: &[u8]) -> Option<u64> {
        let key = |der: &[u8]| Facts::read(der).map(|facts| facts.public_key);
        let (mut trusted, mut count) = (authority, 0);
        // Oldest first: each bridge leads to the next one.
        for bridge in self.bridges.iter().rev() {
            if signed_by(bridge, trusted) {
                (trusted, count) = (bridge, count + 1);
            }
        }
        (key(trusted)? == key(&self.signing)?).then_some(count)
    }

    /// Whether these may take the place of `known`: they are the same, or those at the end of the
    /// same rotation, or the bridges lead to them over as many rotations as there were since. The
    /// one that leaves is trusted, so it must have signed the last bridge.
    #[must_use]
    pub fn follow(&self, known: &Self) -> bool {
        if self.signing == known.signing {
            let mut concluded = known.clone();
            let ended = concluded.conclude();
            let pinned = Self { pinned: self.pinned.clone(), ..concluded };
            return self == known || ended && *self == pinned;
        }
        let walked = self.bridges_from(&known.signing);
        let since = self.rotations.checked_sub(known.rotations);
        let leads = |leaving: &Vec<u8>| {
            self.bridges.first().is_some_and(|bridge| signed_by(bridge, leaving))
        };
        walked.is_some() && walked == since && self.leaving.as_ref().is_none_or(leads)
    }

    /// SHA-256 of all that is known.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.to_record()).into()
    }

    /// Begins a rotation to `next`; `bridge` is its certificate by the one that signs now.
    pub(super) fn rotate(&mut self, next: Vec<u8>, bridge: Vec<u8>) {
        // The last rotation may not have been concluded.
        self.conclude();
        self.leaving = Some(std::mem::replace(&mut self.signing, next));
        self.bridges.insert(0, bridge);
        self.bridges.truncate(FORMER_MAX + 1);
        self.rotations += 1;
    }

    /// Ends a rotation; returns whether there was one.
    pub(super) fn conclude(&mut self) -> bool {
        let Some(left) = self.leaving.take() else { return false };
        self.former.insert(0, left);
        self.former.truncate(FORMER_MAX);
        true
    }

    /// The record.
    #[must_use]
    pub fn to_record(&self) -> Vec<u8> {
        self.to_message().encode_to_vec()
    }

    /// Reads a record; `None` unless each part is a certificate that Polis makes.
    #[must_use]
    pub fn from_record(record: &[u8]) -> Option<Self> {
        Self::from_message(v1::Authorities::decode(record).ok()?)
    }

    /// The message.
    #[must_use]
    pub fn to_message(&self) -> v1::Authorities {
        v1::Authorities {
            signing: self.signing.clone(),
            leaving: self.leaving.clone().unwrap_or_default(),
            former: self.former.clone(),
            bridges: self.bridges.clone(),
            pinned: self.pinned.clone(),
            rotations: self.rotations,
        }
    }

    /// Reads a message; `None` unless each part is a certificate that Polis makes.
    #[must_use]
    pub fn from_message(message: v1::Authorities) -> Option<Self> {
        let v1::Authorities { signing, leaving, former, bridges, pinned, rotations } = message;
        let leaving = (!leaving.is_empty()).then_some(leaving);
        let read = Self { signing, leaving, former, bridges, pinned, rotations };
        read.is_whole().then_some(read)
    }

    fn is_whole(&self) -> bool {
        let fits = self.former.len() <= FORMER_MAX && self.bridges.len() <= FORMER_MAX + 1;
        let others = self.bridges.iter().chain(&self.pinned).map(Vec::as_slice);
        let mut parts = self.all().chain(others);
        fits && parts.all(|der| Facts::read(der).is_some())
    }
}
