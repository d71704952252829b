//! The identity of the peer at the other end of a connection, from its certificate.
//!
//! ```text
//! none ------------------------------------------> Peer::None
//! signed by itself ------------------------------> Peer::Key: proves a key, nothing more
//! signed by the cluster's CA
//!   server and client, named as its key says ----> Peer::Node
//!   client only, its unit a role ----------------> Peer::User
//! anything else ---------------------------------> refused
//! ```
//!
//! Pure: `tls` checks signatures, and `access_list` checks whether the peer still has
//! access.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::SystemTime;

use polis_proto::v1::{Permission, UserRole};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::identity::NodeId;
use crate::pki::Facts;

/// The peer at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Showed no certificate.
    None,
    /// Holds this raw Ed25519 key; nothing else is known about it.
    Key([u8; 32]),
    /// A node of the cluster.
    Node(NodeId),
    /// A person, or a program on a person's behalf.
    User {
        /// Unique in the cluster.
        name: String,
        /// Its permissions.
        role: Role,
    },
}

impl Peer {
    /// The sender of this request. The server layer adds it; a request that did not
    /// come through that layer has no sender.
    #[must_use]
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get::<Self>().cloned().unwrap_or(Self::None)
    }

    /// Whether the cluster's CA signed its certificate.
    #[must_use]
    pub fn is_known(&self) -> bool {
        matches!(self, Self::Node(_) | Self::User { .. })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("a caller without a certificate"),
            Self::Key(key) => write!(f, "the key of {}", NodeId::from_public_key(key)),
            Self::Node(id) => write!(f, "node {id}"),
            Self::User { name, role } => write!(f, "{role} {name}"),
        }
    }
}

/// The roles of users; each includes the permissions of the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads.
    Viewer,
    /// Operates nodes and approves registrations.
    Operator,
    /// Does everything.
    Owner,
}

impl Role {
    /// As it is written in a certificate.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Owner => "owner",
        }
    }

    /// Whether the role grants `permission`.
    #[must_use]
    pub fn grants(self, permission: Permission) -> bool {
        match permission {
            Permission::Unspecified => false,
            Permission::ReadCluster | Permission::ReadNodes => self >= Self::Viewer,
            Permission::OperateNodes | Permission::ManageMembership | Permission::ReadAudit => {
                self >= Self::Operator
            }
            Permission::ManageCluster | Permission::ReadSecrets => self >= Self::Owner,
        }
    }

    /// The least role that grants `permission`; `None` if no role grants it.
    #[must_use]
    pub fn least_for(permission: Permission) -> Option<Self> {
        [Self::Viewer, Self::Operator, Self::Owner].into_iter().find(|role| role.grants(permission))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text does not name a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a role is \"owner\", \"operator\" or \"viewer\"")]
pub struct InvalidRole;

impl FromStr for Role {
    type Err = InvalidRole;

    fn from_str(text: &str) -> Result<Self, InvalidRole> {
        let roles = [Self::Viewer, Self::Operator, Self::Owner];
        roles.into_iter().find(|role| role.as_str() == text).ok_or(InvalidRole)
    }
}

impl TryFrom<UserRole> for Role {
    type Error = InvalidRole;

    fn try_from(role: UserRole) -> Result<Self, InvalidRole> {
        match role {
            UserRole::Unspecified => Err(InvalidRole),
            UserRole::Viewer => Ok(Self::Viewer),
            UserRole::Operator => Ok(Self::Operator),
            UserRole::Owner => Ok(Self::Owner),
        }
    }
}

impl From<Role> for UserRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Viewer => Self::Viewer,
            Role::Operator => Self::Operator,
            Role::Owner => Self::Owner,
        }
    }
}

/// A peer, with the fields that decide whether it still has access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The identity.
    pub peer: Peer,
    /// Where it calls from.
    pub address: SocketAddr,
    /// Of its certificate, where the cluster's CA signed one.
    pub certificate: Option<Certified>,
}

impl Caller {
    /// Whether its certificate has expired.
    #[must_use]
    pub fn has_ended(&self, now: SystemTime) -> bool {
        self.certificate.as_ref().is_some_and(|certificate| now > certificate.not_after)
    }
}

/// The fields of a certificate that are checked again at each call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certified {
    /// The serial number, big-endian.
    pub serial: Vec<u8>,
    /// The raw Ed25519 public key.
    pub key: [u8; 32],
    /// The certificate is invalid after that.
    pub not_after: SystemTime,
}

/// Why a certificate does not identify its holder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// Not a certificate that Polis makes.
    #[error("the certificate cannot be read, or its key is not Ed25519")]
    Unreadable,
    /// The certificate was not issued for a caller.
    #[error("the certificate is not for client authentication")]
    NotAClient,
    /// A node under a name that does not match its key.
    #[error("the certificate names {name:?}, which is not the node of its key")]
    NotItsName {
        /// The name.
        name: String,
    },
    /// A user with an unknown role.
    #[error("the certificate gives the user {name:?} an unknown role")]
    NoRole {
        /// The user.
        name: String,
    },
}

/// Whether a certificate is signed by the key that is in it. `None` if it cannot be read.
pub(super) fn self_signed_key(der: &[u8]) -> Option<Option<[u8; 32]>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    if !rest.is_empty() {
        return None;
    }
    if certificate.issuer().as_raw() != certificate.subject().as_raw() {
        return Some(None);
    }
    let key = certificate.public_key();
    if key.algorithm.algorithm != x509_parser::oid_registry::OID_SIG_ED25519
        || certificate.verify_signature(None).is_err()
    {
        return Some(None);
    }
    Some(key.subject_public_key.data.as_ref().try_into().ok())
}

/// Reads a certificate that the cluster's CA signed.
pub(super) fn certified(der: &[u8]) -> Result<(Peer, Certified), Unfit> {
    let facts = Facts::read(der).ok_or(Unfit::Unreadable)?;
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_parse| Unfit::Unreadable)?;
    let usage = certificate.extended_key_usage().map_err(|_parse| Unfit::Unreadable)?;
    let usage = usage.filter(|usage| usage.value.client_auth).ok_or(Unfit::NotAClient)?;
    let name = facts.subject;
    let peer = if usage.value.server_auth {
        match name.parse::<NodeId>() {
            Ok(id) if id == NodeId::from_public_key(&facts.public_key) => Peer::Node(id),
            Ok(_) | Err(_) => return Err(Unfit::NotItsName { name }),
        }
    } else {
        match facts.unit.as_deref().unwrap_or_default().parse::<Role>() {
            Ok(role) => Peer::User { name, role },
            Err(InvalidRole) => return Err(Unfit::NoRole { name }),
        }
    };
    let Facts { serial, public_key: key, not_after, .. } = facts;
    Ok((peer, Certified { serial, key, not_after }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_role_grants_what_lesser_roles_grant_and_more() {
        let permissions = [
            (Permission::ReadCluster, Role::Viewer),
            (Permission::ReadNodes, Role::Viewer),
            (Permission::OperateNodes, Role::Operator),
            (Permission::ManageMembership, Role::Operator),
            (Permission::ReadAudit, Role::Operator),
            (Permission::ManageCluster, Role::Owner),
            (Permission::ReadSecrets, Role::Owner),
        ];
        for (permission, least) in permissions {
            assert_eq!(Role::least_for(permission), Some(least));
            for role in [Role::Viewer, Role::Operator, Role::Owner] {
                assert_eq!(role.grants(permission), role >= least, "{role} {permission:?}");
            }
        }
        assert_eq!(Role::least_for(Permission::Unspecified), None);
    }

    #[test]
    fn a_role_reads_back() {
        for role in [Role::Viewer, Role::Operator, Role::Owner] {
            assert_eq!(role.to_string().parse(), Ok(role));
            assert_eq!(Role::try_from(UserRole::from(role)), Ok(role));
        }
        assert_eq!("Owner".parse::<Role>(), Err(InvalidRole));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_certificate(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(self_signed_key(&bytes), None);
            prop_assert_eq!(certified(&bytes), Err(Unfit::Unreadable));
        }
    }
}
