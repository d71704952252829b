//! The files of Kubernetes' parts on this node.
//!
//! ```text
//! /data/kubernetes/pki         keys that stay on this node, and their certificates
//! /data/kubernetes/audit       the audit log, which the API server rotates itself
//! /ephemeral/kubernetes        everything that a start writes again: keys that all controllers
//!                              share lie here, in memory, and in etcd
//! ```
//!
//! Invariants:
//! - A file that a program reads is root's, with the group of this program's user: it can neither
//!   change the file nor read that of another program. What two of them read is there twice,
//!   unless it is public.
//! - The programs watch the directories of their files, and learn no more there than names.

use std::path::PathBuf;

use super::error::Error;
use super::file::{Dir, File};
use super::owner::Group;
use super::regular;
use super::sockets::Sockets;
use crate::users;

/// Audit logs are rotated by their writer.
const AUDIT_LOG: &str = "audit.log";

/// `/data/kubernetes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// The directory itself.
    pub dir: Dir,
    /// Keys and certificates.
    pub pki: Dir,
    /// The directory of the audit log.
    pub audit: Dir,
}

impl Kubernetes {
    pub(super) fn at(base: PathBuf) -> Self {
        Self {
            pki: Dir::private(base.join("pki")).watched_by(Group::Kubernetes),
            audit: Dir::private(base.join("audit")),
            dir: Dir::private(base).passed_by(Group::Kubernetes),
        }
    }

    /// Makes the directories, and lets the programs pass through those that an earlier system
    /// made for root alone.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        make([&self.dir, &self.pki, &self.audit])
    }

    /// Lets the user of the API server own the audit log. Call it before each start of the API
    /// server, and never while it runs. Safe to repeat, after an end anywhere. Blocks.
    ///
    /// # Errors
    ///
    /// The first file that the kernel refuses.
    pub fn admit_audit(&self) -> Result<(), Error> {
        self.audit.give(users::API_SERVER)
    }

    /// A key with its certificate, for root and this group. `name` is a constant of the caller.
    #[must_use]
    pub fn pair(&self, name: &str, group: Group) -> Pair {
        debug_assert!(!name.contains(['/', '.']), "{name:?} would leave its directory");
        let file = |suffix| shared(self.pki.path().join(format!("{name}.{suffix}")), group);
        Pair { key: file("key"), certificate: file("crt") }
    }

    /// The authorities of Kubernetes that a worker knew last, PEM: for a boot without a leader.
    #[must_use]
    pub fn last_ca(&self) -> File {
        File::private(self.pki.path().join("ca.crt"))
    }

    /// The audit log.
    #[must_use]
    pub fn audit_log(&self) -> PathBuf {
        self.audit.path().join(AUDIT_LOG)
    }

    /// Opens the audit log for reading; `None` before the API server has written one. The API
    /// server owns the directory, so neither a link nor a pipe at this place is followed. Blocks.
    ///
    /// # Errors
    ///
    /// [`Error`] if it is no file, or the kernel refuses.
    pub fn open_audit_log(&self) -> Result<Option<std::fs::File>, Error> {
        regular::open(&self.audit_log())
    }
}

/// A private key and its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The private key, PKCS#8 in PEM.
    pub key: File,
    /// The certificate, PEM.
    pub certificate: File,
}

impl Pair {
    /// Gives files that an earlier system wrote the mode and the group of their place.
    ///
    /// # Errors
    ///
    /// [`Error`] if the kernel refuses.
    pub fn settle(&self) -> Result<(), Error> {
        self.key.settle()?;
        self.certificate.settle()
    }
}

/// Makes the directories, and gives those that are there the mode and the group of their place.
fn make<const COUNT: usize>(directories: [&Dir; COUNT]) -> Result<(), Error> {
    directories.into_iter().try_for_each(|directory| {
        directory.create()?;
        directory.settle()
    })
}

/// A file for root, and for this group if it is another one.
fn shared(path: PathBuf, group: Group) -> File {
    let file = File::private(path);
    if group == Group::Root { file } else { file.shared_with(group) }
}

/// `/ephemeral/kubernetes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesRun {
    /// The directory itself.
    pub dir: Dir,
    /// The authorities of Kubernetes that a controller reads in etcd, PEM.
    pub ca: File,
    /// Those that the leader sends to a worker, PEM. A node with both roles has both files, since
    /// either role may learn of a rotation first.
    pub worker_ca: File,
    /// The certificate of the authority of front proxies, PEM.
    pub front_proxy_ca: File,
    /// Where the API server has tokens signed.
    pub tokens: Sockets,
    /// The private key that signs the tokens of service accounts, PEM, for the controller manager.
    pub service_account_key: File,
    /// The callers that may be anonymous.
    pub authentication: File,
    /// The configuration of admission plugins.
    pub admission: File,
    /// How Secrets are encrypted in etcd, with the key.
    pub encryption: File,
    /// The audited requests.
    pub audit_policy: File,
    /// Plugins of the controller manager for volumes: always empty.
    pub flexvolume: Dir,
    /// The way of the controller manager to the API server.
    pub controller_manager: File,
    /// The way of the scheduler to the API server.
    pub scheduler: File,
    /// The configuration of kubelet.
    pub kubelet_config: File,
    /// The way of kubelet to the API server.
    pub kubelet: File,
    /// The configuration of kube-proxy.
    pub kube_proxy_config: File,
    /// The way of kube-proxy to the API server.
    pub kube_proxy: File,
    /// The configuration of the name server of pods.
    pub corefile: File,
    /// The way of the name server to the API server.
    pub dns: File,
    /// The way of the program that enforces NetworkPolicies to the API server.
    pub policy: File,
}

impl KubernetesRun {
    pub(super) fn at(base: PathBuf) -> Self {
        let file = |name: &str, group| shared(base.join(name), group);
        Self {
            ca: file("ca.crt", Group::Kubernetes),
            worker_ca: file("worker-ca.crt", Group::Kubernetes),
            front_proxy_ca: file("front-proxy-ca.crt", Group::Kubernetes),
            tokens: Sockets::at(base.join("tokens"), "signer.sock").reached_by(Group::ApiServer),
            service_account_key: file("service-account.key", Group::ControllerManager),
            authentication: file("authentication.json", Group::ApiServer),
            admission: file("admission.json", Group::ApiServer),
            encryption: file("encryption.json", Group::ApiServer),
            audit_policy: file("audit-policy.json", Group::ApiServer),
            flexvolume: Dir::private(base.join("flexvolume")).watched_by(Group::ControllerManager),
            controller_manager: file("controller-manager.kubeconfig", Group::ControllerManager),
            scheduler: file("scheduler.kubeconfig", Group::Scheduler),
            kubelet_config: file("kubelet.json", Group::Root),
            kubelet: file("kubelet.kubeconfig", Group::Root),
            kube_proxy_config: file("kube-proxy.json", Group::KubeProxy),
            kube_proxy: file("kube-proxy.kubeconfig", Group::KubeProxy),
            corefile: file("Corefile", Group::CoreDns),
            dns: file("dns.kubeconfig", Group::CoreDns),
            policy: file("policy.kubeconfig", Group::Policy),
            dir: Dir::private(base).watched_by(Group::Kubernetes),
        }
    }

    /// Makes the directories.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        make([&self.dir, &self.flexvolume, &self.tokens.dir])
    }
}
