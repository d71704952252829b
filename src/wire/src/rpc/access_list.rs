//! The access list: the callers that still have access, checked again at each call.
//!
//! An event value, filled from the records of the curator: by the curator itself on a
//! machine that runs one, on all other nodes by a watch on a curator.
//!
//! Invariants:
//! - A caller whose certificate is on the CRL or has expired, a revoked user, and a
//!   node that is not UP are rejected, however long their connection has been open.

use std::collections::BTreeSet;
use std::time::SystemTime;

use tonic::Status;
use tonic::metadata::MetadataValue;

use super::peer::{Caller, Peer};
use crate::identity::NodeId;
use crate::pki::Facts;

/// Metadata of every rejection by this list: the keyword of the cause.
const STANDING: &str = "polis-access_list";
/// The keyword for a revoked certificate.
const REVOKED: &str = "revoked";
/// The keyword for a decommissioned node.
const DECOMMISSIONED: &str = "decommissioned";

/// Whether a rejection means that the caller, a node, was removed from the cluster
/// permanently: its certificate was revoked, or its record is decommissioned.
#[must_use]
pub fn is_removal(status: &Status) -> bool {
    let word = status.metadata().get(STANDING).and_then(|word| word.to_str().ok());
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
    pub serials: BTreeSet<Vec<u8>>,
    /// The users whose access was revoked.
    pub users: BTreeSet<String>,
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
    /// This server has not received the list of members yet.
    #[error("this server does not know yet which nodes are members; try again")]
    Unknown,
}

impl From<Fallen> for Status {
    fn from(fallen: Fallen) -> Self {
        let text = fallen.to_string();
        let (mut status, word) = match fallen {
            Fallen::Revoked(_) => (Self::unauthenticated(text), REVOKED),
            Fallen::Ended(_) => (Self::unauthenticated(text), "ended"),
            Fallen::Removed(_) => (Self::permission_denied(text), DECOMMISSIONED),
            Fallen::NotUp(_) => (Self::permission_denied(text), "not-up"),
            Fallen::Unknown => (Self::unavailable(text), "access_list"),
        };
        status.metadata_mut().insert(STANDING, MetadataValue::from_static(word));
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
            Peer::User { name, .. } if self.users.contains(name) => Err(Fallen::Revoked(whose())),
            Peer::User { .. } => Ok(()),
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

    fn caller(peer: Peer) -> Caller {
        let certificate = peer.is_known().then(|| Certified {
            serial: vec![7],
            not_after: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
        });
        Caller { peer, address: ([127, 0, 0, 1], 1).into(), certificate }
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_user_has_access_until_it_is_revoked_or_its_certificate_ends() {
        let user = caller(Peer::User { name: "ann".to_owned(), role: Role::Owner });
        let mut access_list = AccessList::default();
        assert_eq!(access_list.check(&user, at(100)), Ok(()));
        assert_eq!(access_list.check(&user, at(101)), Err(Fallen::Ended("owner ann".to_owned())));
        access_list.users.insert("ann".to_owned());
        assert_eq!(access_list.check(&user, at(1)), Err(Fallen::Revoked("owner ann".to_owned())));
        let access_list = AccessList { serials: [vec![7]].into(), ..AccessList::default() };
        assert_eq!(access_list.check(&user, at(1)), Err(Fallen::Revoked("owner ann".to_owned())));
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
        assert!(!is_removal(&Status::permission_denied("revoked")));
    }

    #[test]
    fn who_has_no_certificate_of_the_cluster_has_no_standing_to_lose() {
        let access_list = AccessList { serials: [vec![7]].into(), ..AccessList::default() };
        assert_eq!(access_list.check(&caller(Peer::None), at(1000)), Ok(()));
        assert_eq!(access_list.check(&caller(Peer::Key([1; 32])), at(1000)), Ok(()));
    }
}
