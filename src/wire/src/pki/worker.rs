//! The certificates of a Kubernetes worker: their names, subjects and hosts. Pure.
//!
//! The leader signs them for the node that asks, and the worker writes them: both read the
//! same table here. The request has a purpose and a public key and nothing else, so a node
//! chooses neither a subject nor a host.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Certificate, Host, Issuer, KubernetesSubject, Mode, Template};
use crate::identity::NodeId;

/// The group whose members the Node authorizer of the API server restricts to their node.
const NODES: &str = "system:nodes";

/// The group of the kube-proxies, by which the audit log leaves their reads out. It has no
/// rights.
pub const PROXY_GROUP: &str = "polis:kube-proxies";

/// The group of the name servers, for the same. It has no rights either.
pub const DNS_GROUP: &str = "polis:dns";

/// The group of the programs that enforce NetworkPolicies, for the same. It has no rights either.
pub const POLICY_GROUP: &str = "polis:policy";

/// The group of the storage drivers.
pub const CSI_GROUP: &str = "polis:csi";

/// The beginning of the user name of a storage driver; its node follows.
pub const CSI_USER: &str = "polis:csi:";

/// The purpose of one certificate of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerPurpose {
    /// kubelet calls the API server with it, and so does the node for its own Node object.
    Kubelet,
    /// kubelet serves API servers with it.
    KubeletServer,
    /// kube-proxy calls the API server with it.
    KubeProxy,
    /// The name server of the node's pods calls the API server with it.
    Dns,
    /// The storage driver of the node calls the API server with it.
    Csi,
    /// The program that enforces NetworkPolicies calls the API server with it.
    Policy,
}

impl WorkerPurpose {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Kubelet, Self::KubeletServer, Self::KubeProxy, Self::Dns, Self::Csi, Self::Policy];

    /// The name of its files, and the beginning of its name in etcd.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kubelet => "kubelet",
            Self::KubeletServer => "kubelet-server",
            Self::KubeProxy => "kube-proxy",
            Self::Dns => "dns",
            Self::Csi => "csi",
            Self::Policy => "policy",
        }
    }

    /// The user of Kubernetes in the certificate of `node`. Each node has users of its own:
    /// the cluster's own objects give them their rights, and take them with the role.
    #[must_use]
    pub fn user(self, node: NodeId) -> String {
        match self {
            Self::Kubelet | Self::KubeletServer => format!("system:node:{node}"),
            Self::KubeProxy => format!("polis:kube-proxy:{node}"),
            Self::Dns => format!("polis:dns:{node}"),
            Self::Csi => format!("{CSI_USER}{node}"),
            Self::Policy => format!("polis:policy:{node}"),
        }
    }

    /// The certificate of `node` for the key with this public half. `address` is that of the node,
    /// which the signer must have checked: the certificate of a server names it.
    #[must_use]
    pub fn certificate(
        self,
        node: NodeId,
        address: Option<IpAddr>,
        public: [u8; 32],
    ) -> Certificate {
        Certificate {
            issuer: Issuer::Authority(kubernetes_authority()),
            name: format!("{}-{node}", self.name()),
            template: self.template(node, address),
            mode: Mode::External(public),
        }
    }

    fn template(self, node: NodeId, address: Option<IpAddr>) -> Template {
        let subject = |group| subject(self.user(node), group);
        match self {
            Self::Kubelet => Template::KubernetesClient { subject: subject(Some(NODES)) },
            Self::KubeletServer => Template::KubernetesServer {
                subject: subject(Some(NODES)),
                // API servers look the name up, and pods know the address alone.
                hosts: std::iter::once(Host::Name(node.to_string()))
                    .chain(address.map(Host::Address))
                    .collect(),
            },
            Self::KubeProxy => Template::KubernetesClient { subject: subject(Some(PROXY_GROUP)) },
            Self::Dns => Template::KubernetesClient { subject: subject(Some(DNS_GROUP)) },
            Self::Csi => Template::KubernetesClient { subject: subject(Some(CSI_GROUP)) },
            Self::Policy => Template::KubernetesClient { subject: subject(Some(POLICY_GROUP)) },
        }
    }
}

fn subject(user: String, group: Option<&str>) -> KubernetesSubject {
    let group = group.map(str::to_owned);
    KubernetesSubject { user, group }
}

/// The authority of Kubernetes' own components.
#[must_use]
pub fn kubernetes_authority() -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: "kubernetes".to_owned(),
        template: Template::KubernetesAuthority,
        mode: Mode::Managed,
    })
}

/// The authority of the proxies that name a user to the API server.
#[must_use]
pub fn front_proxy_authority() -> Arc<Certificate> {
    Arc::new(Certificate {
        issuer: Issuer::Itself,
        name: "front-proxy".to_owned(),
        template: Template::FrontProxyAuthority,
        mode: Mode::Managed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_certificate_of_a_worker_has_its_subject_and_hosts() {
        let node = NodeId::from_public_key(&[7; 32]);
        let address = Some([192, 0, 2, 7].into());
        let lines: Vec<_> = WorkerPurpose::ALL
            .into_iter()
            .map(|purpose| {
                let wish = purpose.certificate(node, address, [1; 32]);
                let (kind, subject, hosts) = match &wish.template {
                    Template::KubernetesServer { subject, hosts } => {
                        ("serves", subject, &hosts[..])
                    }
                    Template::KubernetesClient { subject } => ("calls", subject, &[][..]),
                    other => panic!("{other:?}"),
                };
                let group = subject.group.as_deref().unwrap_or("-");
                let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
                format!("{} {kind} {} {group} {}", wish.name, subject.user, hosts.join(","))
            })
            .map(|line| line.trim_end().replace(&node.to_string(), "NODE"))
            .collect();
        assert_eq!(
            lines,
            [
                "kubelet-NODE calls system:node:NODE system:nodes",
                "kubelet-server-NODE serves system:node:NODE system:nodes NODE,192.0.2.7",
                "kube-proxy-NODE calls polis:kube-proxy:NODE polis:kube-proxies",
                "dns-NODE calls polis:dns:NODE polis:dns",
                "csi-NODE calls polis:csi:NODE polis:csi",
                "policy-NODE calls polis:policy:NODE polis:policy",
            ]
        );
    }
}
