//! The rights of the programs of Kubernetes: each has a user of its own, and no file, capability
//! or system call that it does not need. Pure.
//!
//! ```text
//! program             capability         files beside the system
//! API server          none               reads its own, writes the audit log
//! controller manager  none               reads its own
//! scheduler           none               reads its own
//! kube-proxy          NET_ADMIN          reads its own, writes the timeouts of connections
//! CoreDNS             NET_BIND_SERVICE   reads its own
//! policy              NET_ADMIN          reads its own
//! ```
//!
//! All of them may look into the two directories of such files, since a renewed certificate is
//! another file; the groups of the files say which of them a program may open
//! (`polis_base::files`).
//!
//! What this module does not do: confine kubelet, which mounts the volumes of pods and starts
//! what it likes, or containerd (`runtime`): no new privileges and a filter would pass on to
//! every container.

use polis_base::users::{self, User};
use polis_runtime::sys::confine::{CapabilitySet, Confinement};

use super::site::Site;

/// kube-proxy sets how long the kernel keeps connections there. The kernel lets a process with
/// the capability for networks do that, also where another user owns the files.
const CONNECTIONS: &str = "/proc/sys/net/netfilter";

pub(super) fn api_server(site: &Site) -> Confinement {
    program(site, users::API_SERVER).writes(site.data.audit.path())
}

pub(super) fn controller_manager(site: &Site) -> Confinement {
    program(site, users::CONTROLLER_MANAGER)
}

pub(super) fn scheduler(site: &Site) -> Confinement {
    program(site, users::SCHEDULER)
}

/// The `nft` that it starts has its capability, too.
pub(super) fn kube_proxy(site: &Site) -> Confinement {
    program(site, users::KUBE_PROXY).keeps(CapabilitySet::NET_ADMIN).writes(CONNECTIONS)
}

pub(super) fn dns(site: &Site) -> Confinement {
    program(site, users::COREDNS).keeps(CapabilitySet::NET_BIND_SERVICE)
}

pub(super) fn policy(site: &Site) -> Confinement {
    program(site, users::POLICY).keeps(CapabilitySet::NET_ADMIN)
}

fn program(site: &Site, user: User) -> Confinement {
    Confinement::new().user(user).reads(site.run.dir.path()).reads(site.data.pki.path())
}

#[cfg(test)]
#[path = "confinement_tests.rs"]
mod tests;
