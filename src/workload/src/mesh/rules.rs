//! The table `inet polis` of nftables: keeps packets of others away from pods, and gives packets
//! of pods that leave the cluster the address of the node.
//!
//! ```text
//! uplink --> prerouting: to or from an address of pods or Services? --> dropped
//!               | to the node itself, NodePorts and HostPorts among it
//!               v
//!            kube-proxy, portmap (DNAT) --> forwarded --> postrouting: source of the node
//! ```
//!
//! A worker forwards packets, so a machine beside it could send a packet for a pod, or for a
//! Service, to the node's hardware address. The rule looks at a packet before any translation:
//! packets to a NodePort or a HostPort are still addressed to the node, as are answers to
//! translated connections. Packets of pods come from an interface of a pod or out of the mesh,
//! which knows the sender of each; a source address of a pod on another interface is forged.
//!
//! A pod with `NET_RAW`, which *baseline* permits, writes its own headers. The chain `pod` drops:
//! - IPv6: pods have no such addresses, and no NetworkPolicy would see these packets;
//! - packets for the loopback addresses of the node, which accept them on the interface of a pod
//!   with a HostPort (`route_localnet`);
//! - packets whose source is not the address behind that interface: a pod that could pass for
//!   another one would have its rights.
//!
//! A packet that belongs to no connection that the kernel can follow is not translated either, and
//! would leave with the address of its pod: it is dropped where packets are forwarded.
//!
//! kube-proxy and the CNI plugins have tables of their own: no program changes a table of
//! another. The node removes theirs with the role of a worker (`host::tables`), before it removes
//! this one with the last role of Kubernetes.
//!
//! What this module does not do: filter packets to the node itself.

use std::path::Path;

use polis_runtime::logtree::Sink;
use polis_runtime::sys::process::{Command, Error};
use polis_wire::pod_network::Networks;

use super::DEVICE;

/// The name of the table.
const TABLE: &str = "inet polis";

/// The table of the family `inet` that the enforcement of NetworkPolicies makes, and leaves when it
/// ends. It is removed with the mesh: no pod is left by then.
pub const POLICY_TABLE: &str = "polis-policy";

/// The interfaces of pods on their node: the program of the pod network names them so.
const POD_INTERFACES: &str = "veth*";

/// The input of `nft` that makes the table for these networks, or that removes it. `nft` carries
/// out one input in one transaction: no packet passes between the old table and the new one.
#[must_use]
pub fn text(wanted: Option<Networks>) -> String {
    // The first line makes the table if there is none, so that the second one can succeed.
    let gone = format!("table {TABLE}\ndelete table {TABLE}\n");
    let Some(Networks { pods, services }) = wanted else {
        let policy = format!("inet {POLICY_TABLE}");
        return format!("{gone}table {policy}\ndelete table {policy}\n");
    };
    // Packets that a pod sends to a pod keep their addresses, on every way: policies look at
    // them. `fully-random`: two connections never race for the lowest free port.
    format!(
        "{gone}table {TABLE} {{\n\
         \tchain prerouting {{\n\
         \t\ttype filter hook prerouting priority raw; policy accept;\n\
         \t\tiifname {{ \"lo\", \"{DEVICE}\" }} accept\n\
         \t\tiifname \"{POD_INTERFACES}\" jump pod\n\
         \t\tip daddr {{ {pods}, {services} }} counter drop\n\
         \t\tip saddr {{ {pods}, {services} }} counter drop\n\
         \t}}\n\
         \tchain pod {{\n\
         \t\tmeta nfproto ipv6 counter drop\n\
         \t\tip daddr 127.0.0.0/8 counter drop\n\
         \t\tfib saddr . iif oif missing counter drop\n\
         \t\taccept\n\
         \t}}\n\
         \tchain forward {{\n\
         \t\ttype filter hook forward priority filter; policy accept;\n\
         \t\tct state invalid counter drop\n\
         \t}}\n\
         \tchain postrouting {{\n\
         \t\ttype nat hook postrouting priority srcnat; policy accept;\n\
         \t\tip saddr {pods} ip daddr != {pods} oifname != \"{DEVICE}\" masquerade fully-random\n\
         \t}}\n\
         }}\n"
    )
}

/// Makes the table, or removes it.
///
/// # Errors
///
/// [`Error`] when `nft` cannot be started, or rejects its input.
pub async fn apply(nft: &Path, wanted: Option<Networks>, log: Sink) -> Result<(), Error> {
    let command = Command::new(nft).args(["-f", "-"]).input(text(wanted).into_bytes());
    command.log(log).run().await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_do_not_reach_pods_and_pods_leave_with_the_address_of_their_node() {
        insta::assert_snapshot!(text(Some(Networks::default())), @r#"
        table inet polis
        delete table inet polis
        table inet polis {
        	chain prerouting {
        		type filter hook prerouting priority raw; policy accept;
        		iifname { "lo", "polis0" } accept
        		iifname "veth*" jump pod
        		ip daddr { 10.192.0.0/11, 10.224.0.0/16 } counter drop
        		ip saddr { 10.192.0.0/11, 10.224.0.0/16 } counter drop
        	}
        	chain pod {
        		meta nfproto ipv6 counter drop
        		ip daddr 127.0.0.0/8 counter drop
        		fib saddr . iif oif missing counter drop
        		accept
        	}
        	chain forward {
        		type filter hook forward priority filter; policy accept;
        		ct state invalid counter drop
        	}
        	chain postrouting {
        		type nat hook postrouting priority srcnat; policy accept;
        		ip saddr 10.192.0.0/11 ip daddr != 10.192.0.0/11 oifname != "polis0" masquerade fully-random
        	}
        }
        "#);
        let own = Networks {
            pods: "172.16.0.0/13".parse().unwrap(),
            services: "172.24.0.0/16".parse().unwrap(),
        };
        let default = text(Some(Networks::default()));
        let renamed = default.replace("10.192.0.0/11", "172.16.0.0/13");
        let renamed = renamed.replace("10.224.0.0/16", "172.24.0.0/16");
        assert_eq!(text(Some(own)), renamed);
        insta::assert_snapshot!(text(None), @r"
        table inet polis
        delete table inet polis
        table inet polis-policy
        delete table inet polis-policy
        ");
    }
}
