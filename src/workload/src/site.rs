//! The site of the parts of Kubernetes on a node: the places, addresses and ranges from which its
//! command lines, files and certificates follow.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use polis_base::files::{self, Kubernetes, KubernetesRun};
use polis_wire::endpoint::KUBERNETES_PORT;
use polis_wire::identity::NodeId;
use polis_wire::pod_network::Networks;
use polis_wire::rpc::Listen;

/// Where API servers listen.
pub const API_PORT: u16 = 6443;
/// Where kubelet listens.
pub const KUBELET_PORT: u16 = 10250;
/// The ports that Services of the kind `NodePort` have, on every worker.
pub const NODE_PORTS: RangeInclusive<u16> = 30000..=32767;
/// Where the controller manager listens, on loopback.
const CONTROLLER_MANAGER_PORT: u16 = 10257;
/// Where the scheduler listens, on loopback.
const SCHEDULER_PORT: u16 = 10259;

/// Where a worker's clients find an API server, on loopback.
const API_BALANCER_PORT: u16 = 6445;

/// The domain of Services.
const DOMAIN: &str = "cluster.local";

/// The site of a node. Fixed while a role runs.
#[derive(Clone, Debug)]
pub struct Site {
    /// The directory of the programs; each is a link to one binary.
    pub programs: PathBuf,
    /// The socket of the member of etcd.
    pub etcd: PathBuf,
    /// The files that stay.
    pub data: Kubernetes,
    /// The files of this boot.
    pub run: KubernetesRun,
    /// The address on which the API server listens.
    pub listen: SocketAddr,
    /// Where users of Polis are let in.
    pub access: Listen,
    /// The address by which the parts on this machine reach each other.
    pub loopback: IpAddr,
    /// The networks of pods and Services.
    pub networks: Networks,
}

impl Site {
    /// The site of a running node, with the default networks.
    #[must_use]
    pub fn live(root: &files::Root) -> Self {
        Self {
            programs: PathBuf::from("/usr/bin"),
            etcd: root.ephemeral.consensus.client().to_owned(),
            data: root.data.kubernetes.clone(),
            run: root.ephemeral.kubernetes.clone(),
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, API_PORT)),
            access: Listen::Everywhere(KUBERNETES_PORT),
            loopback: Ipv4Addr::LOCALHOST.into(),
            networks: Networks::default(),
        }
    }

    /// Whether the image carries the programs: those of the variant `base` do not.
    #[must_use]
    pub fn carries_programs(&self) -> bool {
        self.programs.join("kube").exists()
    }

    /// The API server, from this machine.
    #[must_use]
    pub fn api(&self) -> SocketAddr {
        SocketAddr::new(self.loopback, self.listen.port())
    }

    /// The balancer of a worker, which leads to the API servers of all controllers.
    #[must_use]
    pub fn api_balancer(&self) -> SocketAddr {
        self.loopback_port(API_BALANCER_PORT)
    }

    /// A port of this machine alone.
    pub(super) fn loopback_port(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.loopback, port)
    }

    /// The controller manager, from this machine.
    #[must_use]
    pub fn controller_manager(&self) -> SocketAddr {
        SocketAddr::new(self.loopback, CONTROLLER_MANAGER_PORT)
    }

    /// The scheduler, from this machine.
    #[must_use]
    pub fn scheduler(&self) -> SocketAddr {
        SocketAddr::new(self.loopback, SCHEDULER_PORT)
    }

    /// The domain of Services.
    #[must_use]
    pub fn domain(&self) -> &'static str {
        DOMAIN
    }

    /// The name of this node's certificate for `purpose`.
    pub(super) fn certificate_name(purpose: &str, node: NodeId) -> String {
        format!("{purpose}-{node}")
    }
}

/// The site of a running node.
#[cfg(test)]
pub(super) fn live() -> Site {
    Site::live(&files::Root::live())
}

/// The same, in a cluster with networks of its own.
#[cfg(test)]
pub(super) fn with_networks() -> Site {
    let networks = Networks {
        pods: "172.16.0.0/13".parse().unwrap(),
        services: "172.24.0.0/16".parse().unwrap(),
    };
    Site { networks, ..live() }
}
