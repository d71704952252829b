//! The table `inet polis` of nftables: packets of pods that leave the cluster get the address
//! of the node.
//!
//! kube-proxy and the CNI plugins have tables of their own: no program changes a table of
//! another.
//!
//! What this module does not do: filter packets.

use std::path::Path;

use polis_runtime::logtree::Sink;
use polis_runtime::sys::process::{Command, Error};
use polis_wire::pod_network::PODS;

use super::DEVICE;

/// The name of the table.
const TABLE: &str = "inet polis";

/// The input of `nft` that makes the table, or that removes it. `nft` carries out one input
/// in one transaction: no packet passes between the old table and the new one.
#[must_use]
pub fn text(wanted: bool) -> String {
    // The first line makes the table if there is none, so that the second one can succeed.
    let gone = format!("table {TABLE}\ndelete table {TABLE}\n");
    if !wanted {
        return gone;
    }
    // Packets that a pod sends to a pod keep their addresses, on every way: policies look at
    // them. `fully-random`: two connections never race for the lowest free port.
    format!(
        "{gone}table {TABLE} {{\n\
         \tchain postrouting {{\n\
         \t\ttype nat hook postrouting priority srcnat; policy accept;\n\
         \t\tip saddr {PODS} ip daddr != {PODS} oifname != \"{DEVICE}\" masquerade fully-random\n\
         \t}}\n\
         }}\n"
    )
}

/// Makes the table, or removes it.
///
/// # Errors
///
/// [`Error`] when `nft` cannot be started, or rejects its input.
pub async fn apply(nft: &Path, wanted: bool, log: Sink) -> Result<(), Error> {
    let command = Command::new(nft).args(["-f", "-"]).input(text(wanted).into_bytes());
    command.log(log).run().await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_leave_the_cluster_with_the_address_of_their_node() {
        insta::assert_snapshot!(text(true), @r#"
        table inet polis
        delete table inet polis
        table inet polis {
        	chain postrouting {
        		type nat hook postrouting priority srcnat; policy accept;
        		ip saddr 10.192.0.0/11 ip daddr != 10.192.0.0/11 oifname != "polis0" masquerade fully-random
        	}
        }
        "#);
        insta::assert_snapshot!(text(false), @r"
        table inet polis
        delete table inet polis
        ");
    }
}
