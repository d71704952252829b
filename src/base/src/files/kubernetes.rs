//! The files of Kubernetes' parts on this node.
//!
//! ```text
//! /data/kubernetes/pki         keys that stay on this node, and their certificates
//! /data/kubernetes/audit       the audit log, which the API server rotates itself
//! /ephemeral/kubernetes        everything that a start writes again: keys that all controllers
//!                              share lie here, in memory, and in etcd
//! ```

use std::path::PathBuf;

use super::error::Error;
use super::file::{Dir, File};

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
            pki: Dir::private(base.join("pki")),
            audit: Dir::private(base.join("audit")),
            dir: Dir::private(base),
        }
    }

    /// Makes the directories.
    ///
    /// # Errors
    ///
    /// The first that cannot be made.
    pub fn create(&self) -> Result<(), Error> {
        [&self.dir, &self.pki, &self.audit].into_iter().try_for_each(Dir::create)
    }

    /// A key with its certificate. `name` is a constant of the caller.
    #[must_use]
    pub fn pair(&self, name: &str) -> Pair {
        debug_assert!(!name.contains(['/', '.']), "{name:?} would leave its directory");
        let file = |suffix| File::private(self.pki.path().join(format!("{name}.{suffix}")));
        Pair { key: file("key"), certificate: file("crt") }
    }

    /// The audit log.
    #[must_use]
    pub fn audit_log(&self) -> PathBuf {
        self.audit.path().join(AUDIT_LOG)
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

/// `/ephemeral/kubernetes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesRun {
    /// The directory itself.
    pub dir: Dir,
    /// The certificate of Kubernetes' authority, PEM.
    pub ca: File,
    /// The certificate of the authority of front proxies, PEM.
    pub front_proxy_ca: File,
    /// The private key that signs the tokens of service accounts, PEM.
    pub service_account_key: File,
    /// The public keys that verify them, PEM.
    pub service_account_public: File,
    /// The callers that may be anonymous.
    pub authentication: File,
    /// The configuration of admission plugins.
    pub admission: File,
    /// How Secrets are encrypted in etcd, with the key.
    pub encryption: File,
    /// The audited requests.
    pub audit_policy: File,
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
        let file = |name: &str| File::private(base.join(name));
        Self {
            ca: file("ca.crt"),
            front_proxy_ca: file("front-proxy-ca.crt"),
            service_account_key: file("service-account.key"),
            service_account_public: file("service-account.pub"),
            authentication: file("authentication.json"),
            admission: file("admission.json"),
            encryption: file("encryption.json"),
            audit_policy: file("audit-policy.json"),
            controller_manager: file("controller-manager.kubeconfig"),
            scheduler: file("scheduler.kubeconfig"),
            kubelet_config: file("kubelet.json"),
            kubelet: file("kubelet.kubeconfig"),
            kube_proxy_config: file("kube-proxy.json"),
            kube_proxy: file("kube-proxy.kubeconfig"),
            corefile: file("Corefile"),
            dns: file("dns.kubeconfig"),
            policy: file("policy.kubeconfig"),
            dir: Dir::private(base),
        }
    }
}
