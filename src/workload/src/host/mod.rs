//! The host of workloads: prepares the kernel of a node with a Kubernetes role.
//!
//! [`prepare`] makes the control groups, sets kernel parameters, gives the directories of
//! workloads their project and its limits, and mounts them at the fixed paths of
//! Kubernetes. Each part is a plan, which is pure, and a writer without decisions of its
//! own. All of it may run again: the second run changes only what differs.
//!
//! Invariants:
//! - A node without a Kubernetes role is as it was: [`prepare`] is not called there.
//! - The limits of workloads stand before the first file of a workload is written.
//!
//! [`release`] and [`end_forwarding`] undo what would have a consequence without the role of a
//! worker: the mounts, the way of packets from and to pods, and the parameter by which later
//! interfaces ignore routers.
//!
//! What this module does not do: undo groups and the other parameters. A node that loses its
//! roles keeps them until its next boot. They are limits, the behaviour at a panic, and the checks
//! of packets, on which nothing else of the node depends.

pub mod cgroup;
pub mod mounts;
pub mod pods;
pub mod quota;
pub mod sysctl;
pub mod tables;

use std::path::{Path, PathBuf};

use tracing::{info, warn};

use polis_base::files;
use polis_runtime::logtree::Sink;
use polis_runtime::supervisor::blocking;
use polis_wire::node_roles::Role;

/// Where the machine's interfaces are; a directory of its own in tests.
#[derive(Clone, Debug)]
pub struct Config {
    /// `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys/class/net`.
    pub interfaces: PathBuf,
    /// `/`, below which the fixed paths of Kubernetes are.
    pub root: PathBuf,
    /// The program `nft`.
    pub nft: PathBuf,
    /// The tree of the node; the data partition is mounted in it.
    pub tree: files::Root,
}

impl Config {
    /// The places of a running node.
    #[must_use]
    pub fn live(tree: &files::Root) -> Self {
        Self {
            cgroup: polis_runtime::sys::cgroup::ROOT.into(),
            proc: "/proc".into(),
            interfaces: "/sys/class/net".into(),
            root: "/".into(),
            nft: "/usr/sbin/nft".into(),
            tree: tree.clone(),
        }
    }
}

/// Why the machine cannot carry workloads, or why the end of that has failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A control group cannot be made.
    #[error(transparent)]
    Cgroup(#[from] cgroup::Error),
    /// The quota cannot be set.
    #[error(transparent)]
    Quota(#[from] quota::Error),
    /// A directory cannot be mounted where Kubernetes looks for it.
    #[error(transparent)]
    Mounts(#[from] mounts::Error),
    /// The kernel still forwards.
    #[error(transparent)]
    Forwarding(#[from] sysctl::Refused),
    /// Addresses are still translated for pods.
    #[error(transparent)]
    Tables(#[from] tables::Error),
}

/// Prepares the machine for `roles`, of which at least one is a role of Kubernetes. Blocks.
///
/// # Errors
///
/// The first part that the kernel refuses. A kernel parameter that it refuses is a warning:
/// each of them only improves a default, so the workloads of the node start all the same.
pub fn prepare(config: &Config, roles: &[Role]) -> Result<(), Error> {
    let memory = cgroup::memory(&config.proc);
    let lacking = cgroup::apply(&config.cgroup, &cgroup::plan(memory))?;
    if !lacking.is_empty() {
        warn!(controllers = lacking.join(" "), "the kernel lacks controllers of control groups");
    }
    let moved = cgroup::sort(&config.cgroup, &config.proc)?;
    let worker = roles.contains(&Role::KubernetesWorker);
    let uplinks = sysctl::uplinks(&config.interfaces);
    set(&config.proc, &sysctl::plan(worker, &uplinks));
    if worker {
        let limits = quota::apply(&config.tree.data)?;
        mounts::apply(&mounts::plan(&config.root, &config.tree.data))?;
        info!(mib = limits.bytes >> 20, inodes = limits.inodes, "workloads have their quota");
    }
    info!(processes = moved, worker, "the machine is prepared for workloads");
    Ok(())
}

/// Sets the parameters of the interfaces that lead out of the machine now: one that was plugged
/// in after [`prepare`] begins with those of an interface of a pod. Blocks.
pub fn prepare_uplinks(config: &Config) {
    set(&config.proc, &sysctl::of_uplinks(&sysctl::uplinks(&config.interfaces)));
}

/// Sets the bounds of the kernel's table of connections, by the memory of the machine; `proc` is
/// `/proc`. The kernel has the table once a rule of nftables looks at connections, so the mesh
/// calls this after it has made its rules, which is before the first pod has an address. Blocks.
pub fn allow_connections(proc: &Path) {
    set(proc, &sysctl::of_connections(cgroup::memory(proc)));
}

fn set(proc: &Path, parameters: &[sysctl::Parameter]) {
    for refused in sysctl::apply(proc, parameters) {
        warn!(error = &refused as &dyn std::error::Error, "goes on without a kernel parameter");
    }
}

/// Ends the way of packets from and to pods, when kube-proxy and the pods of a worker have ended:
/// the kernel forwards nothing any more, and then the tables go that translate addresses for pods.
/// In this order no packet of another machine is forwarded without the tables. Packets of the
/// node's own processes are translated until the tables are gone, whether the kernel forwards or
/// not. [`prepare`] switches forwarding on again.
///
/// # Errors
///
/// [`Error::Forwarding`], before the tables go, and [`Error::Tables`]; it may be repeated.
pub async fn end_forwarding(config: &Config, log: Sink) -> Result<(), Error> {
    let proc = config.proc.clone();
    let refused = blocking(move || sysctl::apply(&proc, &sysctl::without_forwarding())).await;
    // A kernel without IPv6 has no switch for it, and forwards none of it.
    match refused.into_iter().find(|refused| !refused.is_absent()) {
        Some(refused) => Err(refused.into()),
        None => Ok(tables::remove(&config.nft, log).await?),
    }
}

/// Unmounts what [`prepare`] mounted, and the roots of containers, so that the data partition
/// can be closed. The pods have ended before. Blocks.
pub fn release(config: &Config) {
    match mounts::release(&config.root, &mounts::plan(&config.root, &config.tree.data)) {
        Ok(stay) => {
            for (target, error) in stay {
                let error = &error as &dyn std::error::Error;
                warn!(error, target = %target.display(), "stays mounted");
            }
        }
        Err(error) => warn!(error = &error as &dyn std::error::Error, "cannot unmount"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_table_of_connections_is_sized_by_the_memory_of_the_machine() {
        let proc = tempfile::tempdir().unwrap();
        let table = proc.path().join("sys/net/netfilter");
        let files = ["nf_conntrack_buckets", "nf_conntrack_max"].map(|name| table.join(name));
        fs::create_dir_all(&table).unwrap();
        for file in &files {
            fs::write(file, "65536\n").unwrap();
        }
        allow_connections(proc.path());
        let texts = || files.each_ref().map(|file| fs::read_to_string(file).unwrap());
        assert_eq!(texts(), ["65536\n", "65536\n"], "the memory is not known");
        fs::write(proc.path().join("meminfo"), "MemTotal:        2097152 kB\n").unwrap();
        allow_connections(proc.path());
        assert_eq!(texts(), ["131072", "131072"]);
    }
}
