//! The option `--kubernetes-name` of `cluster configure`: under which names clients reach
//! Kubernetes.

use polis_proto::v1;
use polis_wire::parameters;

use crate::error::{Error, Explain as _};

/// The options of the names of Kubernetes.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Names {
    /// A DNS name or an IP address under which clients reach the Kubernetes controllers, such as
    /// that of a load balancer; the certificates of the controllers have it. Repeatable, at most
    /// eight: the names replace those that there were, and a kubeconfig has the first one. A
    /// client that uses an address on port 6444 needs the TLS server name kubernetes.default.svc.
    #[arg(long = "kubernetes-name", value_name = "HOST")]
    kubernetes_names: Vec<String>,
    /// Take the names of Kubernetes away.
    #[arg(long, conflicts_with = "kubernetes_names")]
    no_kubernetes_names: bool,
}

impl Names {
    pub(super) fn is_empty(&self) -> bool {
        self.kubernetes_names.is_empty() && !self.no_kubernetes_names
    }

    /// The given options.
    pub(super) fn options(&self) -> Vec<String> {
        let names = self.kubernetes_names.iter().map(|name| format!("--kubernetes-name {name}"));
        let none = self.no_kubernetes_names.then(|| "--no-kubernetes-names".to_owned());
        names.chain(none).collect()
    }

    /// The names, if there are any options; checked as the leader does.
    pub(super) fn named(&self) -> Result<Option<v1::KubernetesConfiguration>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let named = v1::KubernetesConfiguration { names: self.kubernetes_names.clone() };
        let checked = parameters::kubernetes_names(&named, "--kubernetes-name");
        checked.doing(|| "these names of Kubernetes cannot be set".to_owned())?;
        Ok(Some(named))
    }
}

/// The names of a cluster.
pub(super) fn shown(configuration: &v1::ClusterConfiguration) -> Vec<String> {
    let message = configuration.kubernetes.clone().unwrap_or_default();
    parameters::kubernetes_names(&message, "kubernetes").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn names_of_kubernetes_are_checked_before_the_cluster_is_asked_and_shown() {
        let world = World::new();
        let cluster = Cluster::new(&world);
        let configure = ["cluster", "configure", "--kubernetes-name"];
        for bad in ["api.example:6444", "*.example", "127.0.0.1"] {
            let printed = world.refuses(&[&configure[..], &[bad]].concat());
            assert!(printed.contains("these names of Kubernetes cannot be set"), "{printed}");
            assert!(printed.contains(bad), "{printed}");
        }
        assert_eq!(cluster.asked(), [""; 0]);
        let names = ["API.example", "--kubernetes-name", "192.0.2.10"];
        let printed = world.runs(&[&configure[..], &names].concat());
        assert!(printed.contains("Kubernetes  api.example\n"), "{printed}");
        assert!(printed.contains("192.0.2.10"), "{printed}");
        let printed = world.runs(&["cluster", "configure", "--no-kubernetes-names"]);
        assert!(!printed.contains("192.0.2.10"), "{printed}");
    }
}
