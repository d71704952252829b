//! The Kubernetes objects that Polis applies in every cluster. Pure.
//!
//! | object | what it is for |
//! |---|---|
//! | binding `polis:apiserver-kubelet-client` | API servers may use kubelets |
//! | binding `polis:owners` | owners of the cluster may do everything |
//! | binding `polis:operators` | operators may do everything in namespaces, except for quotas and the namespaces themselves |
//! | binding `polis:viewers` | viewers may read everything in namespaces, except for Secrets |
//! | role `polis:cluster-viewer` and its binding | operators and viewers may read what belongs to no namespace |
//! | role `polis:dns` and its binding | the name servers of workers may watch Services and pods |
//! | policy `polis-system-namespace` and its binding | operators may change nothing in `kube-system`, whose service accounts and pods could change everything |
//! | runtime class `runc` | pods may name the runtime that they get anyway |
//! | runtime class `gvisor` | pods may ask for a kernel of their own |
//!
//! The roles `admin` and `view` are the API server's own; see `docs/workloads.md`.

use serde_json::{Value, json};

use super::credentials::KUBELET_CLIENT;
use super::runtime::gvisor;
use polis_wire::pki::DNS_GROUP;

/// The field manager of these objects.
pub(super) const FIELD_MANAGER: &str = "polis";

/// The label of an object of Polis.
const LABEL: &str = "polis.internal/builtin";

const GROUP: &str = "rbac.authorization.k8s.io";

/// The groups of users, by their role in the cluster.
pub(super) const OWNERS: &str = "polis:owners";
pub(super) const OPERATORS: &str = "polis:operators";
pub(super) const VIEWERS: &str = "polis:viewers";

/// The role for what belongs to no namespace.
const CLUSTER_VIEWER: &str = "polis:cluster-viewer";

/// The namespace of the system, and the policy that guards it.
const SYSTEM: &str = "kube-system";
const GUARD: &str = "polis-system-namespace";

/// The role of the name servers of workers.
const DNS: &str = "polis:dns";

/// What the processes of gVisor take in a pod with one idle container, rounded up
/// (`docs/worker.md` has the measurement).
const SENTRY_MEMORY: &str = "64Mi";

/// An object, and where the API server keeps it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Object {
    /// The path of the object.
    pub(super) path: String,
    /// The fields that Polis sets.
    pub(super) content: Value,
}

/// Every object.
pub(super) fn all() -> Vec<Object> {
    vec![
        cluster_viewer(),
        binding(
            KUBELET_CLIENT,
            "system:kubelet-api-admin",
            &[json!({"kind": "User", "apiGroup": GROUP, "name": KUBELET_CLIENT})],
        ),
        binding(OWNERS, "cluster-admin", &[group(OWNERS)]),
        binding(OPERATORS, "admin", &[group(OPERATORS)]),
        binding(VIEWERS, "view", &[group(VIEWERS)]),
        binding(CLUSTER_VIEWER, CLUSTER_VIEWER, &[group(OPERATORS), group(VIEWERS)]),
        dns(),
        binding(DNS, DNS, &[group(DNS_GROUP)]),
        runtime_class("runc", "runc"),
        gvisor(),
        guard(),
        guard_binding(),
    ]
}

/// The policy that keeps operators out of the system's namespace. `admin` would let them make
/// privileged pods there, and tokens of the service accounts of controllers.
fn guard() -> Object {
    let rule = json!({
        "apiGroups": ["*"],
        "apiVersions": ["*"],
        "resources": ["*/*"],
        "operations": ["CREATE", "UPDATE", "DELETE", "CONNECT"],
    });
    let spec = json!({
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}},
            "resourceRules": [rule],
        },
        "matchConditions": [{
            "name": "operators",
            "expression": format!("'{OPERATORS}' in request.userInfo.groups"),
        }],
        "validations": [{
            "expression": "false",
            "reason": "Forbidden",
            "message": format!("only owners may change objects in {SYSTEM}"),
        }],
    });
    admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies", &spec)
}

fn guard_binding() -> Object {
    let spec = json!({"policyName": GUARD, "validationActions": ["Deny"]});
    admission("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", &spec)
}

fn admission(kind: &str, resource: &str, spec: &Value) -> Object {
    const API: &str = "admissionregistration.k8s.io/v1";
    let content = json!({
        "apiVersion": API,
        "kind": kind,
        "metadata": {"name": GUARD, "labels": {LABEL: "true"}},
        "spec": spec,
    });
    Object { path: format!("/apis/{API}/{resource}/{GUARD}"), content }
}

fn cluster_viewer() -> Object {
    let rule = |group: &str, resources: &[&str]| json!({"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch"]});
    let rules = json!([
        rule("", &["nodes", "persistentvolumes", "namespaces"]),
        rule("storage.k8s.io", &["storageclasses", "csidrivers", "csinodes", "volumeattachments"]),
        rule("node.k8s.io", &["runtimeclasses"]),
        rule("scheduling.k8s.io", &["priorityclasses"]),
        rule("apiextensions.k8s.io", &["customresourcedefinitions"]),
    ]);
    object("ClusterRole", "clusterroles", CLUSTER_VIEWER, &[("rules", rules)])
}

/// What a name server answers from.
fn dns() -> Object {
    let rule = |group: &str, resources: &[&str]| json!({"apiGroups": [group], "resources": resources, "verbs": ["list", "watch"]});
    let rules = json!([
        rule("", &["services", "namespaces", "pods"]),
        rule("discovery.k8s.io", &["endpointslices"]),
    ]);
    object("ClusterRole", "clusterroles", DNS, &[("rules", rules)])
}

/// A handler of containerd, under the name that pods use.
fn runtime_class(name: &str, handler: &str) -> Object {
    let content = json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name, "labels": {LABEL: "true"}},
        "handler": handler,
    });
    Object { path: format!("/apis/node.k8s.io/v1/runtimeclasses/{name}"), content }
}

/// gVisor. Its kernel is a process in the pod's control group, so the pod gets memory for it
/// on top of that of its containers.
fn gvisor() -> Object {
    let mut class = runtime_class("gvisor", gvisor::HANDLER);
    class.content["overhead"] = json!({"podFixed": {"memory": SENTRY_MEMORY}});
    class
}

fn group(name: &str) -> Value {
    json!({"kind": "Group", "apiGroup": GROUP, "name": name})
}

fn binding(name: &str, role: &str, subjects: &[Value]) -> Object {
    let role = json!({"apiGroup": GROUP, "kind": "ClusterRole", "name": role});
    let fields = [("roleRef", role), ("subjects", json!(subjects))];
    object("ClusterRoleBinding", "clusterrolebindings", name, &fields)
}

fn object(kind: &str, resource: &str, name: &str, fields: &[(&str, Value)]) -> Object {
    let mut content = json!({
        "apiVersion": format!("{GROUP}/v1"),
        "kind": kind,
        "metadata": {"name": name, "labels": {LABEL: "true"}},
    });
    for (field, value) in fields {
        content[*field] = value.clone();
    }
    Object { path: format!("/apis/{GROUP}/v1/{resource}/{name}"), content }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::runtime::config;

    #[test]
    fn each_role_of_the_cluster_has_its_binding() {
        let lines: Vec<_> = all()
            .into_iter()
            .filter(|object| object.content["kind"] == "ClusterRoleBinding")
            .map(|object| {
                let role = object.content["roleRef"]["name"].as_str().unwrap().to_owned();
                let subjects = object.content["subjects"].as_array().unwrap().clone();
                let names: Vec<_> =
                    subjects.iter().map(|one| one["name"].as_str().unwrap()).collect();
                format!("{role}: {}", names.join(" "))
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        system:kubelet-api-admin: polis:apiserver-kubelet-client
        cluster-admin: polis:owners
        admin: polis:operators
        view: polis:viewers
        polis:cluster-viewer: polis:operators polis:viewers
        polis:dns: polis:dns
        ");
    }

    #[test]
    fn every_object_has_the_label_and_its_own_path() {
        let mut paths: Vec<_> = all().into_iter().map(|object| object.path).collect();
        let count = paths.len();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), count);
        for object in all() {
            assert_eq!(object.content["metadata"]["labels"][LABEL], "true", "{object:?}");
        }
    }

    #[test]
    fn the_runtime_classes_are_handlers_of_containerd() {
        let classes = all().into_iter().filter(|object| object.content["kind"] == "RuntimeClass");
        let named: Vec<_> = classes
            .map(|object| {
                let name = object.content["metadata"]["name"].as_str().unwrap().to_owned();
                (name, object.content["handler"].as_str().unwrap().to_owned())
            })
            .collect();
        let shim = std::path::Path::new(gvisor::CONFIGURATION);
        let root = polis_base::files::Root::live();
        let text = config::containerd(&root, shim, config::Gvisor::Here);
        assert_eq!(named.len(), 2);
        for (name, handler) in named {
            assert!(text.contains(&format!(".runtimes.{handler}]")), "{name}: {handler}");
        }
    }

    #[test]
    fn the_role_for_the_whole_cluster_reads_no_secrets_and_writes_nothing() {
        let viewer = cluster_viewer().content.to_string();
        assert!(!viewer.contains("secrets") && !viewer.contains('*'), "{viewer}");
        assert!(!viewer.contains("create") && !viewer.contains("delete"), "{viewer}");
    }
}
