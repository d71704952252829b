//! The command lines of kubelet, kube-proxy, CoreDNS and the enforcement of NetworkPolicies. Pure.
//!
//! Each names one file of configuration; the rest is what such a file cannot say.

use std::net::IpAddr;

use super::configuration::{DNS_ADDRESS, POLICY_HEALTH};
use crate::mesh::{Prefix, rules};
use crate::site::Site;
use polis_wire::identity::NodeId;

/// The arguments of kubelet; `address` is that of the node.
pub(super) fn kubelet(site: &Site, node: NodeId, address: IpAddr) -> Vec<String> {
    let run = &site.run;
    vec![
        format!("--config={}", run.kubelet_config.path().display()),
        format!("--kubeconfig={}", run.kubelet.path().display()),
        format!("--hostname-override={node}"),
        format!("--node-ip={address}"),
        // A bind mount of a directory of the data partition: agents in pods look there.
        "--root-dir=/var/lib/kubelet".to_owned(),
        "--cert-dir=/var/lib/kubelet/pki".to_owned(),
    ]
}

/// The arguments of kube-proxy.
pub(super) fn kube_proxy(site: &Site) -> Vec<String> {
    vec![format!("--config={}", site.run.kube_proxy_config.path().display())]
}

/// The arguments of CoreDNS.
pub(super) fn dns(site: &Site) -> Vec<String> {
    vec!["-conf".to_owned(), site.run.corefile.path().display().to_string()]
}

/// The number of the queue of packets that wait for a decision; no other program has one.
const QUEUE: u16 = 100;

/// The arguments of the program that enforces NetworkPolicies; `pods` are the addresses of the
/// node's pods.
pub(super) fn policy(site: &Site, node: NodeId, pods: Prefix) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", site.run.policy.path().display()),
        format!("--node={node}"),
        format!("--pods={pods}"),
        format!("--name-server={DNS_ADDRESS}"),
        format!("--table={}", rules::POLICY_TABLE),
        format!("--queue={QUEUE}"),
        format!("--health-bind-address={}", site.loopback_port(POLICY_HEALTH)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::live;

    #[test]
    fn a_worker_s_programs_read_their_files() {
        let node = NodeId::from_public_key(&[7; 32]);
        let lines = [
            kubelet(&live(), node, [192, 0, 2, 7].into()),
            kube_proxy(&live()),
            dns(&live()),
            policy(&live(), node, "10.192.3.0/24".parse().unwrap()),
        ];
        let lines = lines.concat().join("\n").replace(&node.to_string(), "NODE");
        insta::assert_snapshot!(lines, @r"
        --config=/ephemeral/kubernetes/kubelet.json
        --kubeconfig=/ephemeral/kubernetes/kubelet.kubeconfig
        --hostname-override=NODE
        --node-ip=192.0.2.7
        --root-dir=/var/lib/kubelet
        --cert-dir=/var/lib/kubelet/pki
        --config=/ephemeral/kubernetes/kube-proxy.json
        -conf
        /ephemeral/kubernetes/Corefile
        --kubeconfig=/ephemeral/kubernetes/policy.kubeconfig
        --node=NODE
        --pods=10.192.3.0/24
        --name-server=169.254.77.53
        --table=polis-policy
        --queue=100
        --health-bind-address=127.0.0.1:7843
        ");
    }
}
