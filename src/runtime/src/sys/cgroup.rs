//! The control groups of the node: their names and places.
//!
//! ```text
//! /sys/fs/cgroup
//! ├ polis                  init, node
//! ├ etcd                   the etcd member
//! ├ kube                   the API server and its controllers, proxies, DNS
//! ├ podruntime
//! │ ├ containerd
//! │ ├ kubelet
//! │ └ shim                 one process a pod
//! └ kubepods               made and filled by kubelet
//! ```
//!
//! The groups exist only on a node with a workload role: `workload::host` of the node
//! makes them. A service that starts a program asks for [`Group::existing`] and passes the
//! path to [`Command::cgroup`](super::process::Command::cgroup) where there is one.

use std::path::{Path, PathBuf};

/// Where `init` mounts the hierarchy.
pub const ROOT: &str = "/sys/fs/cgroup";

/// A control group that the node makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// `init` and `node`.
    Polis,
    /// The etcd member.
    Etcd,
    /// The control plane of Kubernetes, and its other programs outside of pods.
    Kube,
    /// The parent of the three after it. Has no process itself.
    PodRuntime,
    /// containerd.
    Containerd,
    /// kubelet.
    Kubelet,
    /// The shims of containerd.
    Shim,
}

impl Group {
    /// All of them, each after its parent.
    pub const ALL: [Self; 7] = [
        Self::Polis,
        Self::Etcd,
        Self::Kube,
        Self::PodRuntime,
        Self::Containerd,
        Self::Kubelet,
        Self::Shim,
    ];

    /// Its path in the hierarchy, without a slash in front.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Polis => "polis",
            Self::Etcd => "etcd",
            Self::Kube => "kube",
            Self::PodRuntime => "podruntime",
            Self::Containerd => "podruntime/containerd",
            Self::Kubelet => "podruntime/kubelet",
            Self::Shim => "podruntime/shim",
        }
    }

    /// Its directory on a running node.
    #[must_use]
    pub fn path(self) -> PathBuf {
        Path::new(ROOT).join(self.name())
    }

    /// Its directory, if this node has made it.
    #[must_use]
    pub fn existing(self) -> Option<PathBuf> {
        Some(self.path()).filter(|path| path.is_dir())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_comes_after_its_parent() {
        for (at, group) in Group::ALL.iter().enumerate() {
            if let Some((parent, _)) = group.name().rsplit_once('/') {
                assert!(Group::ALL[..at].iter().any(|earlier| earlier.name() == parent));
            }
        }
    }
}
