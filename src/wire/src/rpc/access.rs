//! The access table: the callers that each RPC serves, read from the descriptors at the start.
//!
//! The option `polis.v1.access` of each RPC is decoded with a handful of
//! messages that know only the fields on the way to it. A reflection library
//! would do the same through a pool of every descriptor, which costs more at
//! each boot than everything else here together.
//!
//! Invariants:
//! - An RPC without the option is missing from the table, and so rejects every call.

use std::collections::BTreeMap;

use polis_proto::v1::{Access, Permission};
use prost::Message as _;
use tonic::Status;

use super::peer::{Peer, Role};

/// gRPC's own introspection services, and whether each is open: a caller that may read
/// the cluster may also read these.
const STANDARD: [(&str, bool); 4] = [
    ("/grpc.health.v1.Health/Check", false),
    ("/grpc.health.v1.Health/Watch", true),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", true),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", true),
];

/// Where metrics are read.
pub const METRICS: &str = "/metrics";

/// The callers of one RPC.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The callers that it serves.
    pub access: Access,
    /// Whether it may stream without end.
    pub streams: bool,
    /// Whether the request is a stream, too: each message of it is bounded, not their sum.
    pub uploads: bool,
}

/// The rule of each RPC, by its path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    rules: BTreeMap<String, Rule>,
    /// The rule of every path without one of its own.
    others: Option<Rule>,
}

/// The descriptors cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the descriptors of the API cannot be read")]
pub struct Unreadable(#[from] prost::DecodeError);

impl Table {
    /// The table of everything that Polis serves.
    ///
    /// # Errors
    ///
    /// [`Unreadable`]: the build is broken.
    pub fn polis() -> Result<Self, Unreadable> {
        let mut table = Self::read(polis_proto::DESCRIPTORS)?;
        let readers =
            Access { node: true, user: Permission::ReadCluster.into(), ..Access::default() };
        for (path, streams) in STANDARD.into_iter().chain([(METRICS, false)]) {
            table.rules.insert(path.to_owned(), Rule { access: readers, streams, uploads: false });
        }
        Ok(table)
    }

    /// The table of a [`Gateway`](super::Gateway): every path serves every user and no other
    /// caller. The server behind the gateway authorizes each request of a user.
    #[must_use]
    pub fn users() -> Self {
        let access = Access { user: Permission::ReadCluster.into(), ..Access::default() };
        Self {
            rules: BTreeMap::new(),
            others: Some(Rule { access, streams: true, uploads: false }),
        }
    }

    /// Reads the options out of an encoded `FileDescriptorSet`.
    fn read(descriptors: &[u8]) -> Result<Self, Unreadable> {
        let mut rules = BTreeMap::new();
        for file in wire::Set::decode(descriptors)?.files {
            for service in file.services {
                for method in service.methods {
                    let Some(access) = method.options.and_then(|options| options.access) else {
                        continue;
                    };
                    let path = format!("/{}.{}/{}", file.package, service.name, method.name);
                    let streams = method.client_streams || method.server_streams;
                    let uploads = method.client_streams;
                    rules.insert(path, Rule { access, streams, uploads });
                }
            }
        }
        Ok(Self { rules, others: None })
    }

    /// The rule of the RPC at `path`.
    ///
    /// # Errors
    ///
    /// The RPC does not exist, or does not serve any caller.
    pub fn rule(&self, path: &str) -> Result<&Rule, Status> {
        let rule = self.rules.get(path).or(self.others.as_ref());
        rule.ok_or_else(|| Status::unimplemented("this server has no such call"))
    }

    /// Every path with its rule.
    pub fn rules(&self) -> impl Iterator<Item = (&str, &Rule)> {
        self.rules.iter().map(|(path, rule)| (path.as_str(), rule))
    }
}

impl Rule {
    /// Whether the RPC serves `peer`.
    ///
    /// # Errors
    ///
    /// The permission that the caller lacks.
    pub fn check(&self, peer: &Peer) -> Result<(), Status> {
        let Access { anyone, key_holder, node, .. } = self.access;
        let permission = self.access.user();
        let served = anyone
            || match peer {
                Peer::None => false,
                Peer::Key(_) => key_holder,
                Peer::Node(_) => node,
                Peer::User { role, .. } => role.grants(permission),
            };
        if served {
            return Ok(());
        }
        let needed = self.needed();
        match peer {
            Peer::None | Peer::Key(_) => Err(Status::unauthenticated(format!(
                "this call needs {needed}; it came from {peer}"
            ))),
            Peer::Node(_) | Peer::User { .. } => Err(Status::permission_denied(format!(
                "this call needs {needed}; it came from {peer}"
            ))),
        }
    }

    /// The least role of a user that it serves; `None` if it asks no user for a role.
    #[must_use]
    pub fn least_role(&self) -> Option<Role> {
        Role::least_for(self.access.user())
    }

    /// The callers that are served, for messages.
    fn needed(&self) -> String {
        let mut needed = Vec::new();
        if self.access.key_holder {
            needed.push("a self-signed certificate that proves a key".to_owned());
        }
        if self.access.node {
            needed.push("a node's certificate".to_owned());
        }
        match self.least_role() {
            Some(Role::Owner) => needed.push("the certificate of an owner".to_owned()),
            Some(role) => needed.push(format!("the certificate of a user who is {role} or more")),
            None => {}
        }
        if needed.is_empty() {
            return "a permission that no caller has".to_owned();
        }
        needed.join(" or ")
    }
}

/// The parts of `google/protobuf/descriptor.proto` that lead to the option.
mod wire {
    use polis_proto::v1::Access;

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Set {
        #[prost(message, repeated, tag = "1")]
        pub(super) files: Vec<File>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct File {
        #[prost(string, tag = "2")]
        pub(super) package: String,
        #[prost(message, repeated, tag = "6")]
        pub(super) services: Vec<Service>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Service {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(message, repeated, tag = "2")]
        pub(super) methods: Vec<Method>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Method {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(message, optional, tag = "4")]
        pub(super) options: Option<Options>,
        #[prost(bool, tag = "5")]
        pub(super) client_streams: bool,
        #[prost(bool, tag = "6")]
        pub(super) server_streams: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Options {
        #[prost(message, optional, tag = "50701")]
        pub(super) access: Option<Access>,
    }
}

#[cfg(test)]
mod tests {
    use prost_reflect::{DescriptorPool, Kind};

    use super::*;
    use crate::identity::NodeId;

    #[test]
    fn the_table_says_what_the_descriptors_say_of_every_rpc() {
        let pool = DescriptorPool::decode(polis_proto::DESCRIPTORS).unwrap();
        let extension = pool.get_extension_by_name("polis.v1.access").unwrap();
        assert!(matches!(extension.kind(), Kind::Message(_)));
        let table = Table::polis().unwrap();
        let mut seen = 0;
        for service in pool.services() {
            for method in service.methods() {
                let path = format!("/{}/{}", service.full_name(), method.name());
                let options = method.options();
                assert!(
                    options.has_extension(&extension),
                    "{path} has no rule: it serves no caller"
                );
                let value = options.get_extension(&extension);
                let access: Access = value.as_message().unwrap().transcode_to().unwrap();
                let rule = table.rule(&path).unwrap();
                assert_eq!(rule.access, access, "{path}");
                let streams = method.is_client_streaming() || method.is_server_streaming();
                assert_eq!(rule.streams, streams, "{path}");
                seen += 1;
            }
        }
        assert_eq!(table.rules().count(), seen + STANDARD.len() + 1);
        assert!(seen >= 30, "{seen}");
    }

    #[test]
    fn a_gateway_serves_users_at_every_path_and_rejects_other_callers() {
        let table = Table::users();
        let rule = table.rule("/any").unwrap();
        let user = |role| Peer::User { name: "ann".to_owned(), role };
        for role in [Role::Viewer, Role::Operator, Role::Owner] {
            assert!(rule.check(&user(role)).is_ok(), "{role}");
        }
        let node = Peer::Node(NodeId::from_public_key(&[1; 32]));
        assert_eq!(rule.check(&node).unwrap_err().code(), tonic::Code::PermissionDenied);
        for stranger in [Peer::None, Peer::Key([1; 32])] {
            let refused = rule.check(&stranger).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::Unauthenticated);
        }
    }

    #[test]
    fn a_call_without_a_rule_serves_no_caller() {
        let table = Table::polis().unwrap();
        let refused = table.rule("/polis.v1.Aaa/NoSuch").unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unimplemented);
    }

    #[test]
    fn a_refusal_says_what_is_needed() {
        let table = Table::polis().unwrap();
        let escrow = table.rule("/polis.v1.Aaa/Escrow").unwrap();
        let refused = escrow.check(&Peer::None).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated);
        assert_eq!(
            refused.message(),
            "this call needs a self-signed certificate that proves a key; it came from a caller \
             without a certificate"
        );
        let reboot = table.rule("/polis.v1.NodeManagement/Reboot").unwrap();
        let viewer = Peer::User { name: "ann".to_owned(), role: Role::Viewer };
        let refused = reboot.check(&viewer).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied);
        assert_eq!(
            refused.message(),
            "this call needs the certificate of a user who is operator or more; it came from \
             viewer ann"
        );
    }

    #[test]
    fn each_kind_of_caller_is_served_where_the_rule_names_it_and_nowhere_else() {
        let peers = [
            Peer::None,
            Peer::Key([1; 32]),
            Peer::Node(NodeId::from_public_key(&[1; 32])),
            Peer::User { name: "a".to_owned(), role: Role::Viewer },
        ];
        let rules = [
            Access { anyone: true, ..Access::default() },
            Access { key_holder: true, ..Access::default() },
            Access { node: true, ..Access::default() },
            Access { user: Permission::ReadCluster.into(), ..Access::default() },
        ];
        for (i, access) in rules.into_iter().enumerate() {
            for (j, peer) in peers.iter().enumerate() {
                let served = Rule { access, streams: false, uploads: false }.check(peer).is_ok();
                assert_eq!(served, i == j || i == 0, "{access:?} {peer}");
            }
        }
        let closed = Rule { access: Access::default(), streams: false, uploads: false };
        assert!(peers.iter().all(|peer| closed.check(peer).is_err()));
    }
}
