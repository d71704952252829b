//! The identity of this node: its key, and the names that follow from it.
//!
//! The cluster manager makes or reads the [`NodeKey`] once the data partition is
//! open, and publishes the [`Identity`] as an event value. PKI and consensus use
//! the key; all other parts need only the [`NodeId`].
//!
//! ```text
//! 32 random bytes --> NodeKey --> public key --> NodeId      polis-<32 hex digits>
//!                                       +------> machine-id  <32 hex digits>
//! ```
//! A [`NodeName`] is a person's name for a node, beside its ID; nothing is derived from it.
//!
//! Invariants:
//! - A node ID is derived from the key, never assigned, so it cannot collide
//!   with another node's and cannot be claimed without the key.
//! - The secret half is never printed and is wiped from memory when dropped.
//!
//! What this module does not do: store the key (`storage`) or certify it (`pki`).

mod fingerprint;
mod key;
mod name;

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

pub use self::fingerprint::{Fingerprint, InvalidFingerprint, Nonce, Spoken};
pub use self::key::{Error, NodeKey, Store, ensure};
pub use self::name::{InvalidNodeName, NodeName};
use polis_base::hex;

/// The prefix of every node ID.
const PREFIX: &str = "polis-";

/// How many bytes of the public key are in the ID: enough that finding a second key
/// with the same ID is infeasible.
const ID_BYTES: usize = 16;

/// Keeps the machine-id apart from every other hash of the same key.
const MACHINE_ID_DOMAIN: &[u8] = b"polis machine-id 1\0";

/// The name of a node: `polis-` and 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId([u8; ID_BYTES]);

impl NodeId {
    /// The ID that belongs to a public key.
    #[must_use]
    pub fn from_public_key(key: &[u8; 32]) -> Self {
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&key[..ID_BYTES]);
        Self(id)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a node ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a node ID is {PREFIX:?} and 32 lower-case hexadecimal digits")]
pub struct InvalidNodeId;

impl FromStr for NodeId {
    type Err = InvalidNodeId;

    fn from_str(text: &str) -> Result<Self, InvalidNodeId> {
        let digits = text.strip_prefix(PREFIX).ok_or(InvalidNodeId)?;
        hex::decode_name(digits).map(Self).ok_or(InvalidNodeId)
    }
}

/// The public half of the node's identity; an event value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The node's name.
    pub id: NodeId,
    /// The node's raw Ed25519 public key.
    pub public_key: [u8; 32],
}

impl Identity {
    /// The identity that belongs to a public key.
    #[must_use]
    pub fn new(public_key: [u8; 32]) -> Self {
        Self { id: NodeId::from_public_key(&public_key), public_key }
    }

    /// The content of `/etc/machine-id`, without a line feed.
    #[must_use]
    pub fn machine_id(&self) -> String {
        let hash =
            Sha256::new().chain_update(MACHINE_ID_DOMAIN).chain_update(self.public_key).finalize();
        hex::encode(&hash[..16])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_id_is_the_prefix_and_the_first_half_of_the_key() {
        let mut key = [0xab; 32];
        key[0] = 0x01;
        key[15] = 0xff;
        key[16] = 0x77;
        let id = NodeId::from_public_key(&key);
        assert_eq!(id.to_string(), "polis-01ababababababababababababababff");
        assert_eq!(Identity::new(key).id, id);
    }

    #[test]
    fn what_is_not_an_id_is_refused() {
        let good = NodeId::from_public_key(&[0xab; 32]).to_string();
        assert!(good.parse::<NodeId>().is_ok());
        let short = &good[..good.len() - 1];
        let upper = good.to_uppercase().replace("POLIS", "polis");
        for bad in ["", "polis-", short, &upper, &format!("{good}0"), &good.replace("ab", "äx")] {
            assert_eq!(bad.parse::<NodeId>(), Err(InvalidNodeId), "{bad}");
        }
    }

    #[test]
    fn the_machine_id_is_stable_and_not_the_node_id() {
        let identity = Identity::new([7; 32]);
        assert_eq!(identity.machine_id(), "51a1f303ddb6e03dfcf11777db3184c9");
        assert!(!identity.id.to_string().contains(&identity.machine_id()));
    }

    proptest! {
        #[test]
        fn an_id_reads_back(key in any::<[u8; 32]>()) {
            let id = NodeId::from_public_key(&key);
            prop_assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
        }

        #[test]
        fn arbitrary_bytes_never_panic(text in any::<String>()) {
            let _parsed = text.parse::<NodeId>();
            let _parsed = format!("polis-{text}").parse::<NodeId>();
        }
    }
}
