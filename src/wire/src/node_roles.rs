//! Roles and states of the other nodes: the vocabulary that leader and member share.
//!
//! The leader classifies nodes by these types, and members receive and display them.
//! The services that publish them (`curator`, `agent`) and the services that only
//! receive them depend on this module, not on each other.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::node_roles::{ConsensusMember, KubernetesController, KubernetesWorker};

use crate::identity::NodeId;

/// Nodes of a cluster that a node remembers: far more than any cluster has.
pub const NODES_MAX: usize = 16_384;

/// Every node that this one knows.
pub type Nodes = BTreeMap<NodeId, v1::NodeInfo>;

/// Between two heartbeats of a node, unless the leader says otherwise.
pub const HEARTBEAT: Duration = Duration::from_secs(5);

/// The age of the last heartbeat at which a node is late: two are missing, and the third is
/// due.
pub const LATE: Duration = HEARTBEAT.saturating_mul(3);

/// Memory in MiB that is reserved for the programs of a worker, for those of a controller (API
/// server, controller manager and scheduler have 540 MiB at rest), and for the system beside
/// them.
pub const RESERVED_WORKER: u32 = 400;
/// See [`RESERVED_WORKER`].
pub const RESERVED_CONTROLLER: u32 = 700;
/// See [`RESERVED_WORKER`].
pub const RESERVED_SYSTEM: u32 = 200;

/// Whether a node with these roles is to run a member of etcd, and a curator beside it.
#[must_use]
pub fn is_consensus_member(roles: Option<&v1::NodeRoles>) -> bool {
    roles.is_some_and(|roles| roles.consensus_member.is_some())
}

/// Whether a node with these roles has a place in the network of pods: a worker has pods,
/// and the API server of a controller calls webhooks in pods.
#[must_use]
pub fn has_kubernetes(roles: Option<&v1::NodeRoles>) -> bool {
    roles.is_some_and(|roles| {
        roles.kubernetes_controller.is_some() || roles.kubernetes_worker.is_some()
    })
}

/// Every address from which packets of a node may come, as it reports them: that by which others
/// reach it, and its other ones.
pub fn addresses(node: &v1::NodeInfo) -> impl Iterator<Item = IpAddr> {
    let status = node.status.iter();
    let all =
        status.flat_map(|it| std::iter::once(&it.external_address).chain(&it.other_addresses));
    all.filter_map(|address| address.parse().ok())
}

/// The roles of a node in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Runs an etcd member and, with it, the control plane.
    ConsensusMember,
    /// Runs the controllers of Kubernetes, beside its etcd member.
    KubernetesController,
    /// Is to run workload.
    KubernetesWorker,
}

impl Role {
    /// All roles, in the order in which they are shown.
    pub const ALL: [Self; 3] =
        [Self::ConsensusMember, Self::KubernetesController, Self::KubernetesWorker];

    /// Its name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ConsensusMember => "consensus member",
            Self::KubernetesController => "Kubernetes controller",
            Self::KubernetesWorker => "Kubernetes worker",
        }
    }

    /// The one word for it: what `polisctl` takes and prints, and event lines say.
    #[must_use]
    pub fn slug(self) -> &'static str {
        match self {
            Self::ConsensusMember => "consensus-member",
            Self::KubernetesController => "kubernetes-controller",
            Self::KubernetesWorker => "kubernetes-worker",
        }
    }

    /// The roles that a record gives.
    pub fn given(record: &v1::NodeRoles) -> impl Iterator<Item = Self> {
        let v1::NodeRoles { consensus_member, kubernetes_controller, kubernetes_worker } = record;
        [
            consensus_member.is_some().then_some(Self::ConsensusMember),
            kubernetes_controller.is_some().then_some(Self::KubernetesController),
            kubernetes_worker.is_some().then_some(Self::KubernetesWorker),
        ]
        .into_iter()
        .flatten()
    }

    /// The record that gives `roles`.
    #[must_use]
    pub fn record(roles: &[Self]) -> v1::NodeRoles {
        let mut record = v1::NodeRoles::default();
        for role in roles {
            match role {
                Self::ConsensusMember => record.consensus_member = Some(ConsensusMember {}),
                Self::KubernetesController => {
                    record.kubernetes_controller = Some(KubernetesController {});
                }
                Self::KubernetesWorker => record.kubernetes_worker = Some(KubernetesWorker {}),
            }
        }
        record
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_each_address_that_it_reports() {
        let status = v1::NodeStatus {
            external_address: "192.0.2.1".to_owned(),
            other_addresses: vec!["2001:db8::1".to_owned(), "198.51.100.1".to_owned()],
            ..v1::NodeStatus::default()
        };
        let node = v1::NodeInfo { status: Some(status), ..v1::NodeInfo::default() };
        let all: Vec<String> = addresses(&node).map(|address| address.to_string()).collect();
        assert_eq!(all, ["192.0.2.1", "2001:db8::1", "198.51.100.1"]);
        assert_eq!(addresses(&v1::NodeInfo::default()).count(), 0);
    }

    #[test]
    fn what_a_record_gives_reads_back() {
        for role in Role::ALL {
            assert_eq!(Role::given(&Role::record(&[role])).collect::<Vec<_>>(), [role]);
        }
        assert_eq!(Role::given(&Role::record(&Role::ALL)).collect::<Vec<_>>(), Role::ALL);
        assert_eq!(Role::given(&v1::NodeRoles::default()).count(), 0);
    }

    #[test]
    fn a_word_is_the_name_in_one_piece() {
        for role in Role::ALL {
            assert_eq!(role.slug(), role.name().to_lowercase().replace(' ', "-"));
        }
    }
}
