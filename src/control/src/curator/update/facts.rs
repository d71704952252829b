//! The facts of a node that the leader knows when it plans an update or goes on with one.

use std::fmt;

use polis_bundle::{KubernetesProgram, KubernetesTarget};
use polis_proto::v1::{self, NodeHealth, NodeState};
use semver::Version;

use crate::curator::directory::Directory;
use crate::curator::health::Heartbeats;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::is_consensus_member;

/// A node that is up.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Its ID.
    pub id: NodeId,
    /// Whether it votes in etcd, or is to.
    pub voter: bool,
    /// Whether its curator leads.
    pub leads: bool,
    /// Whether it is on its way out of the cluster, or of etcd.
    pub leaving: bool,
    /// The program of Kubernetes that its roles give it, an API server before kubelet; `None`
    /// without a role of Kubernetes.
    pub kubernetes: Option<KubernetesProgram>,
    /// By its heartbeats.
    pub health: NodeHealth,
    /// Whether its member of etcd knows a leader.
    pub quorum: bool,
    /// What it says of its systems, in its last heartbeat to this leader.
    pub report: Option<v1::UpdateReport>,
}

/// What the leader knows.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Every node that is up.
    pub nodes: Vec<Fact>,
    /// How many voters etcd can spare now, by the members that answer.
    pub spare: u32,
}

/// Why a node cannot be counted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Heartbeats are missing.
    Late,
    /// This leader has not received a heartbeat of it yet.
    Unheard,
    /// It has not entered the cluster, or not returned to it with a new certificate.
    Absent,
    /// It leaves the cluster, or etcd.
    Leaving,
    /// Its heartbeats say nothing of its systems.
    Mute,
    /// It is not ready.
    NotReady,
    /// Its system is on trial.
    OnTrial,
    /// Its member of etcd knows no leader, or does not run yet.
    NoQuorum,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Late => "it sends no heartbeats",
            Self::Unheard => "the leader has received no heartbeat of it yet",
            Self::Absent => "it has not entered the cluster, or not returned to it, yet",
            Self::Leaving => "it is leaving the cluster, or etcd",
            Self::Mute => "its version cannot take part in an update of the cluster",
            Self::NotReady => "it is not ready",
            Self::OnTrial => "its system is on trial",
            Self::NoQuorum => "its member of etcd knows no leader",
        })
    }
}

impl Fact {
    /// Every node that is up.
    #[must_use]
    pub fn all(directory: &Directory, heartbeats: &Heartbeats, leader: NodeId) -> Vec<Self> {
        let up = directory.nodes().filter(|(_, known)| known.node.state() == NodeState::Up);
        up.map(|(id, known)| Self {
            id,
            voter: is_consensus_member(known.node.roles.as_ref()),
            leads: id == leader,
            leaving: known.node.leaving.is_some(),
            kubernetes: kubernetes(known.node.roles.as_ref()),
            health: known.health,
            quorum: heartbeats.consensus(id).is_some_and(|(figures, _age)| figures.leader != 0),
            report: heartbeats.update(id).map(|report| v1::UpdateReport::clone(&report)),
        })
        .collect()
    }

    /// Why it cannot be counted on; `None` where it is as it should be.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        match self.health {
            NodeHealth::Healthy => {}
            NodeHealth::Late => return Some(Fault::Late),
            NodeHealth::Unknown => return Some(Fault::Unheard),
            NodeHealth::Absent => return Some(Fault::Absent),
        }
        if self.leaving {
            return Some(Fault::Leaving);
        }
        let Some(report) = &self.report else { return Some(Fault::Mute) };
        match (report.ready, report.trial, self.voter && !self.quorum) {
            (false, _, _) => Some(Fault::NotReady),
            (true, true, _) => Some(Fault::OnTrial),
            (true, false, true) => Some(Fault::NoQuorum),
            (true, false, false) => None,
        }
    }

    /// The version that it runs.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        Version::parse(&self.report.as_ref()?.version).ok()
    }

    /// The image that it runs: the beginning of the hash of its content. `None` where a node of an
    /// earlier version does not report it.
    #[must_use]
    pub fn image(&self) -> Option<&str> {
        Some(self.report.as_ref()?.image.as_str()).filter(|image| !image.is_empty())
    }

    /// The boot that it is in; `None` before it has reported one.
    #[must_use]
    pub fn boot_id(&self) -> Option<&str> {
        Some(self.report.as_ref()?.boot_id.as_str()).filter(|boot_id| !boot_id.is_empty())
    }

    /// The Kubernetes that a bundle has to suit; `None` without a role of Kubernetes, and where the
    /// node does not say which version it has.
    #[must_use]
    pub fn kubernetes(&self) -> Option<KubernetesTarget> {
        let runs = Version::parse(&self.report.as_ref()?.kubernetes).ok()?;
        Some(KubernetesTarget { runs, program: self.kubernetes? })
    }
}

/// The program of Kubernetes that limits the step of a node with these roles.
fn kubernetes(roles: Option<&v1::NodeRoles>) -> Option<KubernetesProgram> {
    let v1::NodeRoles { kubernetes_controller, kubernetes_worker, .. } = roles?;
    match (kubernetes_controller, kubernetes_worker) {
        (Some(_), _) => Some(KubernetesProgram::ApiServer),
        (None, Some(_)) => Some(KubernetesProgram::Kubelet),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use polis_wire::node_roles::Role;

    use super::*;

    #[test]
    fn an_api_server_counts_before_the_kubelet_beside_it() {
        let of = |roles: &[Role]| kubernetes(Some(&Role::record(roles)));
        let [member, controller, worker] = Role::ALL;
        assert_eq!(of(&[member]), None);
        assert_eq!(of(&[member, worker]), Some(KubernetesProgram::Kubelet));
        for roles in [&[member, controller][..], &[member, controller, worker]] {
            assert_eq!(of(roles), Some(KubernetesProgram::ApiServer));
        }
        assert_eq!(kubernetes(None), None);
    }
}
