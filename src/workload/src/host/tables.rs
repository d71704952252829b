//! The end of the tables of nftables that translate addresses for pods: those of kube-proxy and of
//! the CNI plugin `portmap`.
//!
//! Neither program removes its table when it ends, and no pod is left whose end would remove a rule
//! of `portmap`. A table that stayed would go on sending connections to ClusterIPs, NodePorts and
//! HostPorts to the addresses of pods of that time, which may be those of other pods by now.
//!
//! Both programs make their tables by `nft`, and again when they run again.

use std::path::Path;
use std::time::Duration;

use tokio::time::timeout;

use polis_runtime::logtree::Sink;
use polis_runtime::sys::process::{self, Command};

/// The names of the tables (`pkg/proxy/nftables` of Kubernetes, `plugins/meta/portmap` of CNI).
/// Each may exist for both families.
const TABLES: [&str; 2] = ["kube-proxy", "cni_hostport"];
const FAMILIES: [&str; 2] = ["ip", "ip6"];

/// `nft` takes some milliseconds.
const NFT_MAX: Duration = Duration::from_secs(60);

/// Why a table may be left.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `nft` cannot be started, or rejects its input.
    #[error("cannot remove the tables of kube-proxy and portmap")]
    Nft(#[from] process::Error),
    /// `nft` hangs.
    #[error("nft has not answered within {} seconds", NFT_MAX.as_secs())]
    Slow,
}

/// The input of `nft`, which it carries out in one transaction.
fn text() -> String {
    // The first line makes the table if there is none, so that the second one can succeed.
    let gone = |table: &str| {
        FAMILIES.map(|family| format!("table {family} {table}\ndelete table {family} {table}\n"))
    };
    TABLES.into_iter().flat_map(gone).collect()
}

/// Removes them; without any, it changes nothing.
///
/// # Errors
///
/// [`Error`]; it may be repeated.
pub(super) async fn remove(nft: &Path, log: Sink) -> Result<(), Error> {
    // Without the program nothing has made such a table.
    if !nft.exists() {
        return Ok(());
    }
    let command = Command::new(nft).args(["-f", "-"]).input(text().into_bytes()).log(log);
    let ended = timeout(NFT_MAX, command.run()).await.map_err(|_elapsed| Error::Slow)?;
    ended.map(drop).map_err(Error::Nft)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_of_both_programs_goes_in_one_transaction() {
        insta::assert_snapshot!(text(), @r"
        table ip kube-proxy
        delete table ip kube-proxy
        table ip6 kube-proxy
        delete table ip6 kube-proxy
        table ip cni_hostport
        delete table ip cni_hostport
        table ip6 cni_hostport
        delete table ip6 cni_hostport
        ");
    }
}
