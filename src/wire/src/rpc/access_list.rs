//! The access list: the callers that still have access, checked again at each call.
//!
//! An event value, filled from the records of the curator: by the curator itself on a
//! machine that runs one, on all other nodes by a watch on a curator, and until then, for
//! users, with what the node kept on its disk.
//!
//! Invariants:
//! - A user is served only while its record is in the list, with its key and its role: the
//!   signature of the cluster's CA alone admits no caller. While the list is unknown, the
//!   only call of a user is the one that needs none (`polis.v1.Access.unlisted`).
//! - A caller whose certificate is on the CRL or has expired, and a node that is not UP are
//!   rejected, however long their connection has been open.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use polis_proto::v1;
use tonic::Status;
use tonic::metadata::MetadataValue;

use super::peer::{Caller, Peer, Role};
use crate::identity::NodeId;
use crate::pki::Facts;

/// Metadata of every rejection by this list: the keyword of the cause.
const ACCESS: &str = "polis-access";
/// The keyword for a revoked certificate.
const REVOKED: &str = "revoked";
/// The keyword for a decommissioned node.
const DECOMMISSIONED: &str = "decommissioned";

/// Whether a rejection means that the caller, a node, was removed from the cluster
/// permanently: its certificate was revoked, or its record is decommissioned.
#[must_use]
pub fn is_removal(status: &Status) -> bool {
    let word = status.metadata().get(ACCESS).and_then(|word| word.to_str().ok());
    matches!(word, Some(REVOKED | DECOMMISSIONED))
}

/// The nodes and users that have access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessList {
    /// The nodes in state UP; `None` where that is not known yet.
    pub nodes: Option<BTreeSet<NodeId>>,
    /// The nodes that were members and never will be again.
    pub removed: BTreeSet<NodeId>,
    /// The serial numbers on the CRL of the cluster's CA, big-endian.
    pub serials: Serials,
    /// The users, by name; `None` where they are not known yet.
    pub users: Option<Users>,
}

/// Serial numbers of certificates, big-endian.
pub type Serials = Arc<BTreeSet<Vec<u8>>>;

/// Every user that has access, by name.
pub type Users = BTreeMap<String, Listed>;

/// The part of a user's record that its certificate has to match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Raw Ed25519 public key.
    pub key: [u8; 32],
    /// The role.
    pub role: Role,
}

/// Reads the records of users. Revoked users are left out, and so is a record that no
/// certificate could match.
#[must_use]
pub fn users<'a>(records: impl IntoIterator<Item = &'a v1::User>) -> Users {
    let admitted = records.into_iter().filter(|user| !user.revoked).filter_map(|user| {
        let key = user.public_key.as_slice().try_into().ok()?;
        Some((user.name.clone(), Listed { key, role: Role::try_from(user.role()).ok()? }))
    });
    admitted.collect()
}

/// Why a peer has no access.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fallen {
    /// Its certificate is on the CRL.
    #[error("the certificate of {0} was revoked")]
    Revoked(String),
    /// Its certificate ended.
    #[error("the certificate of {0} has ended; get a new one")]
    Ended(String),
    /// The node was taken out of the cluster.
    #[error("node {0} was decommissioned")]
    Removed(NodeId),
    /// The node is not in state UP.
    #[error("node {0} is not in state UP")]
    NotUp(NodeId),
    /// The user is not in the list, or with another key or role.
    #[error(
        "the certificate of {0} is not that of a user in the list of this node: an owner \
         revoked it, or made the user while this node was cut off"
    )]
    NotListed(String),
    /// This server has not received the list of members yet.
    #[error("this server does not know yet which nodes are members; try again")]
    Unknown,
    /// This server has not received the list of users yet, and has kept none.
    #[error("this node does not know yet which users there are; try again once it is home")]
    UsersUnknown,
}

impl From<Fallen> for Status {
    fn from(fallen: Fallen) -> Self {
        let text = fallen.to_string();
        let (mut status, word) = match fallen {
            Fallen::Revoked(_) => (Self::unauthenticated(text), REVOKED),
            Fallen::Ended(_) => (Self::unauthenticated(text), "ended"),
            Fallen::Removed(_) => (Self::permission_denied(text), DECOMMISSIONED),
            Fallen::NotUp(_) => (Self::permission_denied(text), "not-up"),
            Fallen::NotListed(_) => (Self::unauthenticated(text), "not-listed"),
            Fallen::Unknown | Fallen::UsersUnknown => (Self::unavailable(text), "unknown"),
        };
        status.metadata_mut().insert(ACCESS, MetadataValue::from_static(word));
        status
    }
}

impl AccessList {
    /// Whether `node`, which shows `certificate`, was taken out of the cluster.
    pub(super) fn is_gone(&self, node: NodeId, certificate: &[u8]) -> bool {
        let serial = Facts::read(certificate).map(|facts| facts.serial);
        self.removed.contains(&node) || serial.is_some_and(|serial| self.serials.contains(&serial))
    }

    /// Whether `caller` may call anything at all at `now`.
    ///
    /// # Errors
    ///
    /// The reason for the rejection.
    pub fn check(&self, caller: &Caller, now: SystemTime) -> Result<(), Fallen> {
        let Some(certificate) = &caller.certificate else { return Ok(()) };
        let whose = || caller.peer.to_string();
        if self.serials.contains(&certificate.serial) {
            return Err(Fallen::Revoked(whose()));
        }
        if caller.has_ended(now) {
            return Err(Fallen::Ended(whose()));
        }
        match &caller.peer {
            Peer::None | Peer::Key(_) => Ok(()),
            Peer::User { name, role } => {
                let users = self.users.as_ref().ok_or(Fallen::UsersUnknown)?;
                match users.get(name) {
                    Some(listed) if *listed == (Listed { key: certificate.key, role: *role }) => {
                        Ok(())
                    }
                    Some(_) | None => Err(Fallen::NotListed(whose())),
                }
            }
            Peer::Node(id) => match &self.nodes {
                None => Err(Fallen::Unknown),
                Some(nodes) if nodes.contains(id) => Ok(()),
                Some(_) if self.removed.contains(id) => Err(Fallen::Removed(*id)),
                Some(_) => Err(Fallen::NotUp(*id)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rpc::peer::{Certified, Role};

    const KEY: [u8; 32] = [3; 32];

    fn caller(peer: Peer) -> Caller {
        let certificate = peer.is_known().then(|| Certified {
            serial: vec![7],
            key: KEY,
            not_after: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
        });
        Caller { peer, address: ([127, 0, 0, 1], 1).into(), certificate }
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_user_has_access_while_its_record_is_listed_and_its_certificate_has_not_ended() {
        let user = caller(Peer::User { name: "ann".to_owned(), role: Role::Owner });
        let listed = |name: &str, key, role| {
            let users = Users::from([(name.to_owned(), Listed { key, role })]);
            AccessList { users: Some(users), ..AccessList::default() }
        };
        assert_eq!(AccessList::default().check(&user, at(1)), Err(Fallen::UsersUnknown));
        // A certificate that was made with a stolen key of the CA has no record.
        for other in [
            listed("bob", KEY, Role::Owner),
            listed("ann", [4; 32], Role::Owner),
            listed("ann", KEY, Role::Viewer),
        ] {
            let refused = Err(Fallen::NotListed("owner ann".to_owned()));
            assert_eq!(other.check(&user, at(1)), refused);
        }
        let access_list = listed("ann", KEY, Role::Owner);
        assert_eq!(access_list.check(&user, at(100)), Ok(()));
        assert_eq!(access_list.check(&user, at(101)), Err(Fallen::Ended("owner ann".to_owned())));
        let access_list = AccessList { serials: Arc::new([vec![7]].into()), ..access_list };
        assert_eq!(access_list.check(&user, at(1)), Err(Fallen::Revoked("owner ann".to_owned())));
    }

    #[test]
    fn only_whole_records_that_are_not_revoked_are_listed() {
        let record = |name: &str, key: &[u8], role: v1::UserRole, revoked| v1::User {
            name: name.to_owned(),
            role: role.into(),
            public_key: key.to_vec(),
            revoked,
        };
        let records = [
            record("ann", &KEY, v1::UserRole::Operator, false),
            record("eve", &KEY, v1::UserRole::Owner, true),
            record("short", &[1; 31], v1::UserRole::Owner, false),
            record("none", &KEY, v1::UserRole::Unspecified, false),
        ];
        let listed = Listed { key: KEY, role: Role::Operator };
        assert_eq!(users(&records), Users::from([("ann".to_owned(), listed)]));
    }

    #[test]
    fn a_node_has_access_while_it_is_up() {
        let id = NodeId::from_public_key(&[1; 32]);
        let node = caller(Peer::Node(id));
        let mut access_list = AccessList::default();
        assert_eq!(access_list.check(&node, at(1)), Err(Fallen::Unknown));
        access_list.nodes = Some([id].into());
        assert_eq!(access_list.check(&node, at(1)), Ok(()));
        access_list.nodes = Some(BTreeSet::new());
        assert_eq!(access_list.check(&node, at(1)), Err(Fallen::NotUp(id)));
        access_list.removed.insert(id);
        assert_eq!(access_list.check(&node, at(1)), Err(Fallen::Removed(id)));
    }

    #[test]
    fn only_what_is_for_ever_is_a_removal() {
        let id = NodeId::from_public_key(&[1; 32]);
        let removal = |fallen: Fallen| is_removal(&Status::from(fallen));
        assert!(removal(Fallen::Removed(id)));
        assert!(removal(Fallen::Revoked("node".to_owned())));
        assert!(!removal(Fallen::NotUp(id)));
        assert!(!removal(Fallen::Ended("node".to_owned())));
        assert!(!removal(Fallen::Unknown));
        assert!(!removal(Fallen::NotListed("owner ann".to_owned())));
        assert!(!is_removal(&Status::permission_denied("revoked")));
    }

    #[test]
    fn who_has_no_certificate_of_the_cluster_has_no_standing_to_lose() {
        let access_list =
            AccessList { serials: Arc::new([vec![7]].into()), ..AccessList::default() };
        assert_eq!(access_list.check(&caller(Peer::None), at(1000)), Ok(()));
        assert_eq!(access_list.check(&caller(Peer::Key([1; 32])), at(1000)), Ok(()));
    }
}
