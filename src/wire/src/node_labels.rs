//! The labels of a node's record that its Node object in Kubernetes has, too. Pure.
//!
//! `docs/worker.md` has the table of the domains of keys, and who sets labels in each (*Labels of
//! the record*).
//!
//! The leader refuses to set a reserved label, and so does `polisctl` in node parameters. A record
//! may have one from a registration: it stays in the record, and the Node object does not get it.

/// The label of a Node with the role Kubernetes worker.
pub const WORKER: &str = "node-role.kubernetes.io/worker";

/// The label of a Node whose node also has the role Kubernetes controller.
pub const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

/// The domains of Kubernetes and Polis.
const RESERVED: [&str; 3] = ["kubernetes.io", "k8s.io", "polis.internal"];

/// Those among them that operators may use.
const OPEN: [&str; 4] = [
    "node-restriction.kubernetes.io",
    "node-role.kubernetes.io",
    "node.kubernetes.io",
    "topology.kubernetes.io",
];

/// A label that Kubernetes or Polis sets itself, by its key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?}, which Kubernetes or Polis sets itself; allowed is a key outside of kubernetes.io, \
     k8s.io and polis.internal, or one in topology.kubernetes.io, node.kubernetes.io, \
     node-restriction.kubernetes.io or, except for worker and control-plane, \
     node-role.kubernetes.io"
)]
pub struct Reserved(String);

/// Refuses labels that Kubernetes or Polis sets itself.
///
/// # Errors
///
/// [`Reserved`], with the first of them.
pub fn check<'a>(keys: impl IntoIterator<Item = &'a String>) -> Result<(), Reserved> {
    let reserved = keys.into_iter().find(|key| is_reserved(key));
    reserved.map_or(Ok(()), |key| Err(Reserved(key.clone())))
}

/// Whether Kubernetes or Polis sets the label with this key itself.
#[must_use]
pub fn is_reserved(key: &str) -> bool {
    [WORKER, CONTROL_PLANE].contains(&key) || (is_in(key, &RESERVED) && !is_in(key, &OPEN))
}

/// Whether the domain of a key is one of these, or below one.
fn is_in(key: &str, domains: &[&str]) -> bool {
    let Some((domain, _name)) = key.split_once('/') else { return false };
    let within = |parent: &&str| {
        domain.strip_suffix(*parent).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    domains.iter().any(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_and_polis_set_themselves_is_reserved() {
        for key in [
            WORKER,
            CONTROL_PLANE,
            "kubernetes.io/hostname",
            "beta.kubernetes.io/arch",
            "k8s.io/x",
            "cluster.x-k8s.io.k8s.io/x",
            "polis.internal/name",
            "below.polis.internal/x",
        ] {
            assert!(is_reserved(key), "{key}");
        }
    }

    #[test]
    fn operators_set_the_rest() {
        for key in [
            "zone",
            "kubernetes.io",
            "example.com/role",
            "mykubernetes.io/x",
            "x-k8s.io/x",
            "kubernetes.io.example.com/x",
            "topology.kubernetes.io/zone",
            "topology.kubernetes.io/region",
            "node.kubernetes.io/instance-type",
            "node-role.kubernetes.io/storage",
            "example.com.node-restriction.kubernetes.io/fips",
        ] {
            assert!(!is_reserved(key), "{key}");
        }
    }

    #[test]
    fn the_first_reserved_key_is_named() {
        let keys = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        assert_eq!(check(&keys(&["zone", "topology.kubernetes.io/zone"])), Ok(()));
        let refused = check(&keys(&["zone", "kubernetes.io/os", "k8s.io/x"])).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("\"kubernetes.io/os\", which Kubernetes or Polis"), "{text}");
    }
}
