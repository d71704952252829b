//! The Kubernetes objects that Polis applies in every cluster. Pure.
//!
//! | object | what it is for |
//! |---|---|
//! | binding `polis:apiserver-kubelet-client` | API servers may use kubelets |
//! | binding `polis:owners` | owners of the cluster may do everything |
//! | binding `polis:operators` | operators may do everything in namespaces, except for quotas and the namespaces themselves |
//! | binding `polis:viewers` | viewers may read everything in namespaces, except for Secrets |
//! | role `polis:cluster-viewer` and its binding | operators and viewers may read what belongs to no namespace |
//! | role `polis:dns` | the name servers of workers may watch Services and pods |
//! | role `polis:policy` | the programs that enforce NetworkPolicies may watch these, namespaces and pods |
//! | role `polis:worker` | marks the kubelets of workers for the policy below |
//! | policy `polis-workers` and its binding | a kubelet of a node without the role Kubernetes worker writes nothing, and none changes which taints of its Node count as those of Polis |
//! | policy `polis-system-namespace` and its binding | operators may change nothing in `kube-system`, whose service accounts and pods could change everything |
//! | policy `polis-critical-pods` and its binding | no pod outside of `kube-system` and privileged namespaces has a priority by which kubelet never evicts it |
//! | role `polis:csi` | the storage drivers of workers may keep volumes, and show their room |
//! | policies `polis-csi-volumes`, `polis-csi-claims`, `polis-csi-capacities` and their bindings | a storage driver makes and removes volumes of its own node and driver only, gives them no other claim, changes the status of claims of its node and takes that node off them, and shows the room of its node |
//! | driver `local.csi.polis.internal`, storage class `local` | volumes on the node of their pod; a claim without a class gets this one |
//! | runtime class `runc` | pods may name the runtime that they get anyway |
//! | runtime class `gvisor` | pods may ask for a kernel of their own, on nodes that have it |
//!
//! The objects of the workers follow the records of the nodes, and name each worker:
//!
//! | object | what it is for |
//! |---|---|
//! | binding `polis:workers` | the kubelets with the role `polis:worker` |
//! | binding `polis:kube-proxies` | the kube-proxies of the workers |
//! | binding `polis:dns` | the name servers of the workers |
//! | binding `polis:csi` | the storage drivers of the workers |
//! | binding `polis:policy` | the programs of the workers that enforce NetworkPolicies |
//! | labels of a Node, and the annotation that lists them | the roles of the node, its name, and the labels of its record |
//! | taints of a Node, and the annotation that lists them | the taints of the record of the node |
//!
//! The roles `admin`, `view` and `system:node-proxier` are the API server's own; see
//! `docs/workloads.md`.

use serde_json::{Value, json};

use super::credentials::KUBELET_CLIENT;
use super::csi::names::{CAPACITIES, CLASS, DRIVER, FINALIZER, NODE_LABEL, SELECTED_NODE};
use super::runtime::gvisor;
use polis_wire::identity::NodeId;
use polis_wire::pki::{CSI_GROUP, CSI_USER, WorkerPurpose};

/// The field manager of these objects.
pub(super) const FIELD_MANAGER: &str = "polis";

/// The label of an object of Polis.
const LABEL: &str = "polis.internal/builtin";

const GROUP: &str = "rbac.authorization.k8s.io";

/// The mark of the class for claims without a class.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

/// The annotation of a Node that lists keys and effects of the taints which Polis has set.
pub(super) const TAINTS: &str = "polis.internal/taints";

/// Where the API server lists the bindings of Polis.
pub(super) const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings\
                                   ?labelSelector=polis.internal%2Fbuiltin%3Dtrue";

/// The groups of users, by their role in the cluster.
pub(super) const OWNERS: &str = "polis:owners";
pub(super) const OPERATORS: &str = "polis:operators";
pub(super) const VIEWERS: &str = "polis:viewers";

/// The role for what belongs to no namespace.
const CLUSTER_VIEWER: &str = "polis:cluster-viewer";

/// The namespace of the system, and the policy that guards it.
const SYSTEM: &str = "kube-system";
const GUARD: &str = "polis-system-namespace";

/// The policy about pods that nothing evicts, their classes, and the label of a namespace whose
/// pods may take over their node anyway.
const CRITICAL: &str = "polis-critical-pods";
const CRITICAL_CLASSES: [&str; 2] = ["system-cluster-critical", "system-node-critical"];
const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";
const PRIVILEGED: &str = "privileged";

/// The role of the name servers of workers, and its binding.
const DNS: &str = "polis:dns";

/// The role of the programs that enforce NetworkPolicies, and its binding.
const POLICY: &str = "polis:policy";

/// The role that a kubelet needs to write, its binding, and the policy that demands it. Its
/// permission exists for that policy alone.
const WORKER: &str = "polis:worker";
const WORKERS: &str = "polis:workers";
const WORKERS_GUARD: &str = "polis-workers";
const WORKER_API: &str = "polis.internal";
const WORKER_RESOURCE: &str = "workers";
const WORKER_VERB: &str = "act";

/// The group of kubelets.
const KUBELETS: &str = "system:nodes";

/// The binding of the kube-proxies, and the API server's own role for it.
const PROXIES: &str = "polis:kube-proxies";
const PROXIER: &str = "system:node-proxier";

/// The role of the storage drivers of workers, and the policies that hold each to its node.
const CSI: &str = "polis:csi";
const CSI_VOLUMES: &str = "polis-csi-volumes";
const CSI_CLAIMS: &str = "polis-csi-claims";
const CSI_CAPACITIES: &str = "polis-csi-capacities";

/// The memory of gVisor's processes in a pod with one idle container, rounded up
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
        // Each policy is before the role that it restricts.
        guard(),
        policy_binding(GUARD),
        critical(),
        policy_binding(CRITICAL),
        csi_volumes(),
        policy_binding(CSI_VOLUMES),
        csi_claims(),
        policy_binding(CSI_CLAIMS),
        csi_capacities(),
        policy_binding(CSI_CAPACITIES),
        // This one refuses kubelets without the role, so the role is first.
        worker(),
        workers_guard(),
        policy_binding(WORKERS_GUARD),
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
        policy(),
        csi_role(),
        storage("CSIDriver", "csidrivers", DRIVER, csi_driver()),
        storage("StorageClass", "storageclasses", CLASS, storage_class()),
        runtime_class("runc", "runc"),
        gvisor(),
    ]
}

/// The rights of these workers, and of no other node. Those for policies are first: kubelet, and
/// with it every pod, waits until the program that enforces them has read them.
pub(super) fn workers(nodes: &[NodeId]) -> Vec<Object> {
    let users = |purpose: WorkerPurpose| {
        let user =
            |node: &NodeId| json!({"kind": "User", "apiGroup": GROUP, "name": purpose.user(*node)});
        nodes.iter().map(user).collect::<Vec<_>>()
    };
    vec![
        binding(POLICY, POLICY, &users(WorkerPurpose::Policy)),
        binding(WORKERS, WORKER, &users(WorkerPurpose::Kubelet)),
        binding(PROXIES, PROXIER, &users(WorkerPurpose::KubeProxy)),
        binding(DNS, DNS, &users(WorkerPurpose::Dns)),
        binding(CSI, CSI, &users(WorkerPurpose::Csi)),
    ]
}

/// Whether a binding is among `found`, as it is applied. The API server leaves an empty list of
/// subjects out.
pub(super) fn is_bound(binding: &Object, found: &[Value]) -> bool {
    let wanted = &binding.content;
    let subjects = |of: &Value| of["subjects"].as_array().cloned().unwrap_or_default();
    found.iter().any(|one| {
        one["metadata"]["name"] == wanted["metadata"]["name"]
            && one["roleRef"] == wanted["roleRef"]
            && subjects(one) == subjects(wanted)
    })
}

fn worker() -> Object {
    let rules = json!([{
        "apiGroups": [WORKER_API], "resources": [WORKER_RESOURCE], "verbs": [WORKER_VERB],
    }]);
    object("ClusterRole", "clusterroles", WORKER, &[("rules", rules)])
}

/// The policy that ends the rights of a worker with its role. No API server reads a list of
/// revoked certificates, and the Node authorizer lets every kubelet register its Node again.
///
/// The API server lets no kubelet change the taints of its Node. One that could name them in the
/// annotation would have the reconciler remove those that an owner has given the Node.
fn workers_guard() -> Object {
    let may = format!(
        "authorizer.group('{WORKER_API}').resource('{WORKER_RESOURCE}').check('{WORKER_VERB}')\
         .allowed()"
    );
    let annotation = |of: &str| {
        format!(
            "({of} != null && has({of}.metadata.annotations) \
             && '{TAINTS}' in {of}.metadata.annotations \
             ? {of}.metadata.annotations['{TAINTS}'] : '')"
        )
    };
    let same = format!(
        "request.resource.resource != 'nodes' || object == null || {} == {}",
        annotation("object"),
        annotation("oldObject"),
    );
    let spec = json!({
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [everything()]},
        "matchConditions": [{
            "name": "kubelets",
            "expression": format!("'{KUBELETS}' in request.userInfo.groups"),
        }],
        "validations": [{
            "expression": may,
            "reason": "Forbidden",
            "message": "this node has no role Kubernetes worker in its cluster",
        }, {
            "expression": same,
            "reason": "Forbidden",
            "message": format!("a kubelet does not change the annotation {TAINTS} of its Node"),
        }],
    });
    admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies", WORKERS_GUARD, &spec)
}

/// Every change of every object.
fn everything() -> Value {
    json!({
        "apiGroups": ["*"],
        "apiVersions": ["*"],
        "resources": ["*/*"],
        "operations": ["CREATE", "UPDATE", "DELETE", "CONNECT"],
    })
}

/// The rights of a worker's storage driver: no more than it uses, and of whole kinds, since
/// a role knows no nodes; see the policies.
fn csi_role() -> Object {
    let rule = |group: &str, resource: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    let volumes = ["get", "list", "watch", "create", "patch", "delete"];
    let rules = json!([
        rule("", "persistentvolumes", &volumes),
        rule("", "persistentvolumeclaims", &["get", "list", "watch"]),
        rule("", "persistentvolumeclaims/status", &["patch"]),
        rule("", "events", &["create"]),
        rule("storage.k8s.io", "storageclasses", &["get", "watch"]),
        rule("storage.k8s.io", "csistoragecapacities", &["get", "create", "patch"]),
        // The object that shows the room belongs to the Node, by its UID.
        rule("", "nodes", &["get"]),
    ]);
    object("ClusterRole", "clusterroles", CSI, &[("rules", rules)])
}

/// The policy that holds a storage driver to volumes of its driver and its node: a node that
/// an intruder has taken neither removes volumes of others, nor makes one of a path of a host.
///
/// A volume is for the claim in its name, from first to last. Of a volume that exists, the
/// driver changes the size and its own finalizer: neither claim, nor policy, nor the finalizer
/// that protects a bound volume.
fn csi_volumes() -> Object {
    let own = |volume: &str| {
        format!(
            "has({volume}.spec.csi) && {volume}.spec.csi.driver == '{DRIVER}' \
             && {volume}.spec.csi.volumeHandle == {volume}.metadata.name \
             && has({volume}.spec.nodeAffinity) && has({volume}.spec.nodeAffinity.required) \
             && {volume}.spec.nodeAffinity.required.nodeSelectorTerms.size() == 1 \
             && {volume}.spec.nodeAffinity.required.nodeSelectorTerms.all(term, \
             has(term.matchExpressions) && term.matchExpressions.size() == 1 \
             && term.matchExpressions.all(one, one.key == '{NODE_LABEL}' && one.operator == 'In' \
             && one.values.size() == 1 && '{CSI_USER}' + one.values[0] == \
             request.userInfo.username))",
        )
    };
    let claimed = "has(object.spec.claimRef) && has(object.spec.claimRef.uid) \
                   && object.metadata.name == 'pvc-' + object.spec.claimRef.uid";
    let same = "object.spec.all(field, field == 'capacity' \
                || (field in oldObject.spec && object.spec[field] == oldObject.spec[field])) \
                && oldObject.spec.all(field, field in object.spec)";
    let kept = format!(
        "!has(oldObject.metadata.finalizers) || oldObject.metadata.finalizers.all(one, \
         one == '{FINALIZER}' \
         || (has(object.metadata.finalizers) && one in object.metadata.finalizers))"
    );
    let expressions = [
        format!("request.operation == 'DELETE' || ({})", own("object")),
        format!("request.operation == 'CREATE' || ({})", own("oldObject")),
        format!("request.operation != 'CREATE' || ({claimed})"),
        format!("request.operation != 'UPDATE' || ({same})"),
        format!("request.operation != 'UPDATE' || {kept}"),
    ];
    let operations = ["CREATE", "UPDATE", "DELETE"];
    csi_policy(CSI_VOLUMES, &operations, ("", "persistentvolumes"), &expressions)
}

/// The policy that holds a storage driver to claims of its node. A request that changes the status
/// may change the metadata, too: of that, the driver only takes its node off.
fn csi_claims() -> Object {
    let selected = format!(
        "has(oldObject.metadata.annotations) \
         && '{SELECTED_NODE}' in oldObject.metadata.annotations \
         && '{CSI_USER}' + oldObject.metadata.annotations['{SELECTED_NODE}'] == request.userInfo.username",
    );
    // The API server itself sets the last two.
    let changed = "['annotations', 'managedFields', 'resourceVersion']";
    let same = format!(
        "object.metadata.all(field, field in {changed} || (field in oldObject.metadata \
         && object.metadata[field] == oldObject.metadata[field])) \
         && oldObject.metadata.all(field, field in {changed} || field in object.metadata)"
    );
    let no_other = "!has(object.metadata.annotations) || object.metadata.annotations.all(one, \
                    one in oldObject.metadata.annotations && object.metadata.annotations[one] \
                    == oldObject.metadata.annotations[one])";
    let kept = format!(
        "oldObject.metadata.annotations.all(one, one == '{SELECTED_NODE}' \
         || (has(object.metadata.annotations) && one in object.metadata.annotations))"
    );
    let expressions = [selected, same, no_other.to_owned(), kept];
    csi_policy(CSI_CLAIMS, &["UPDATE"], ("", "persistentvolumeclaims/status"), &expressions)
}

/// The policy that holds a storage driver to the room of its node: the scheduler would give pods to
/// a node for the word of another one.
fn csi_capacities() -> Object {
    let own = format!(
        "request.namespace == '{CAPACITIES}' && '{CSI_USER}' + object.metadata.name \
         == request.userInfo.username + '.' + object.storageClassName \
         && has(object.nodeTopology) && has(object.nodeTopology.matchLabels) \
         && !has(object.nodeTopology.matchExpressions) \
         && object.nodeTopology.matchLabels.size() == 1 \
         && object.nodeTopology.matchLabels.all(label, label == '{NODE_LABEL}' \
         && '{CSI_USER}' + object.nodeTopology.matchLabels[label] == request.userInfo.username)"
    );
    let resource = ("storage.k8s.io", "csistoragecapacities");
    csi_policy(CSI_CAPACITIES, &["CREATE", "UPDATE"], resource, &[own])
}

/// A policy about the requests of storage drivers to these objects of an API group.
fn csi_policy(
    name: &str,
    operations: &[&str],
    (group, resource): (&str, &str),
    expressions: &[String],
) -> Object {
    let validations: Vec<_> = expressions
        .iter()
        .map(|expression| {
            json!({
                "expression": expression,
                "reason": "Forbidden",
                "message": "a storage driver changes only what belongs to its own node",
            })
        })
        .collect();
    let spec = json!({
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{
            "apiGroups": [group],
            "apiVersions": ["v1"],
            "resources": [resource],
            "operations": operations,
        }]},
        "matchConditions": [{
            "name": "storage-drivers",
            "expression": format!("'{CSI_GROUP}' in request.userInfo.groups"),
        }],
        "validations": validations,
    });
    admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies", name, &spec)
}

fn csi_driver() -> Value {
    json!({"spec": {
        // Volumes are where their pods are: nothing has to be attached.
        "attachRequired": false,
        "podInfoOnMount": false,
        // The scheduler selects a node that shows enough room (`csi::capacity`).
        "storageCapacity": true,
        "volumeLifecycleModes": ["Persistent"],
        // kubelet gives the files to the group that a pod asks for.
        "fsGroupPolicy": "File",
    }})
}

fn storage_class() -> Value {
    json!({
        "provisioner": DRIVER,
        "reclaimPolicy": "Delete",
        // The scheduler chooses the node for the pod, and so for its volumes.
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": true,
    })
}

/// An object of storage with these fields.
fn storage(kind: &str, resource: &str, name: &str, mut content: Value) -> Object {
    const API: &str = "storage.k8s.io/v1";
    content["apiVersion"] = json!(API);
    content["kind"] = json!(kind);
    content["metadata"] = json!({"name": name, "labels": {LABEL: "true"}});
    if kind == "StorageClass" {
        content["metadata"]["annotations"] = json!({DEFAULT_CLASS: "true"});
    }
    Object { path: format!("/apis/{API}/{resource}/{name}"), content }
}

/// The policy that keeps operators out of the system's namespace. `admin` would let them make
/// privileged pods there, and tokens of the service accounts of controllers.
fn guard() -> Object {
    let spec = json!({
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}},
            "resourceRules": [everything()],
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
    admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies", GUARD, &spec)
}

/// The policy that keeps pods evictable. A pod of one of these classes takes the place of any other
/// one, and kubelet does not evict it: where it fills the disk or the memory, kubelet evicts all
/// others, and the node stays full. No class that a person makes has such a priority.
fn critical() -> Object {
    let [cluster, node] = CRITICAL_CLASSES;
    let spec = json!({
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [SYSTEM]},
                {"key": POD_SECURITY, "operator": "NotIn", "values": [PRIVILEGED]},
            ]},
            "resourceRules": [{
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                // Its class never changes.
                "operations": ["CREATE"],
            }],
        },
        "validations": [{
            "expression": format!(
                "!has(object.spec.priorityClassName) \
                 || !(object.spec.priorityClassName in ['{cluster}', '{node}'])"
            ),
            "reason": "Forbidden",
            "message": format!(
                "a pod of the priority class {cluster} or {node} is never evicted: only {SYSTEM} \
                 has some, and namespaces with the label {POD_SECURITY}={PRIVILEGED}"
            ),
        }],
    });
    admission("ValidatingAdmissionPolicy", "validatingadmissionpolicies", CRITICAL, &spec)
}

fn policy_binding(policy: &str) -> Object {
    const RESOURCE: &str = "validatingadmissionpolicybindings";
    let spec = json!({"policyName": policy, "validationActions": ["Deny"]});
    admission("ValidatingAdmissionPolicyBinding", RESOURCE, policy, &spec)
}

fn admission(kind: &str, resource: &str, name: &str, spec: &Value) -> Object {
    const API: &str = "admissionregistration.k8s.io/v1";
    let content = json!({
        "apiVersion": API,
        "kind": kind,
        "metadata": {"name": name, "labels": {LABEL: "true"}},
        "spec": spec,
    });
    Object { path: format!("/apis/{API}/{resource}/{name}"), content }
}

fn cluster_viewer() -> Object {
    let rule = |group: &str, resources: &[&str]| json!({"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch"]});
    let rules = json!([
        rule("", &["nodes", "persistentvolumes", "namespaces"]),
        rule("storage.k8s.io", &["storageclasses", "volumeattributesclasses"]),
        rule("storage.k8s.io", &["csidrivers", "csinodes", "volumeattachments"]),
        rule("networking.k8s.io", &["ingressclasses"]),
        rule("node.k8s.io", &["runtimeclasses"]),
        rule("scheduling.k8s.io", &["priorityclasses"]),
        rule("apiextensions.k8s.io", &["customresourcedefinitions"]),
    ]);
    object("ClusterRole", "clusterroles", CLUSTER_VIEWER, &[("rules", rules)])
}

/// The sources of a name server's answers.
fn dns() -> Object {
    let rules = [
        watched("", &["services", "namespaces", "pods"]),
        watched("discovery.k8s.io", &["endpointslices"]),
    ];
    object("ClusterRole", "clusterroles", DNS, &[("rules", json!(rules))])
}

/// The input of a decision about a connection.
fn policy() -> Object {
    let rules =
        [watched("", &["namespaces", "pods"]), watched("networking.k8s.io", &["networkpolicies"])];
    object("ClusterRole", "clusterroles", POLICY, &[("rules", json!(rules))])
}

/// The rule for resources that a program lists once and then watches.
fn watched(group: &str, resources: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": ["list", "watch"]})
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
/// on top of that of its containers. A node whose machine lacks something for it gets no such
/// pod (`worker::node_object` has the label).
fn gvisor() -> Object {
    let mut class = runtime_class("gvisor", gvisor::HANDLER);
    class.content["overhead"] = json!({"podFixed": {"memory": SENTRY_MEMORY}});
    class.content["scheduling"] = json!({"nodeSelector": {gvisor::LABEL: gvisor::HERE}});
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
#[path = "objects_tests.rs"]
mod tests;
