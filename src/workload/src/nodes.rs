//! The Node objects of Kubernetes, as the records of the nodes want them. Pure.
//!
//! kubelet registers its Node, and may give it neither a role nor take it back. So the
//! reconciler labels it with roles, name and the labels of the record, and deletes it once the
//! node has no role Kubernetes worker any more, was decommissioned, or has no record.
//!
//! Invariants:
//! - A Node whose name is not that of a node of Polis is left alone.
//! - A Node is deleted only by its UID and its version: a kubelet that has written since
//!   keeps it, and the next look decides again.
//! - A label that has left the record leaves the Node: an annotation lists those that were set.
//!   Labels of others stay.
//!
//! What this module does not do: keep the taints of a Node (`taints`).

use std::collections::{BTreeMap, BTreeSet};

use polis_proto::v1;
use serde_json::{Value, json};

use super::objects::Object;
use super::parts::PartState;
use polis_wire::identity::NodeId;
use polis_wire::node_labels::{CONTROL_PLANE, WORKER, is_reserved};
use polis_wire::node_roles::Nodes;

/// The label with the name of the node.
const NAME: &str = "polis.internal/name";

/// The annotation of a Node that lists the keys of the labels which Polis has set.
const LABELS: &str = "polis.internal/labels";

/// The labels of a Node.
pub(super) type Labels = BTreeMap<String, String>;

/// Labels and taints of each worker.
pub(super) type Wanted = BTreeMap<NodeId, (Labels, Vec<v1::NodeTaint>)>;

/// A change of one Node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// Its labels are set.
    Label(Object),
    /// It is deleted, if it is still this one.
    Delete {
        /// The node that has lost its role.
        node: NodeId,
        /// The object.
        uid: String,
        /// Its last change.
        version: String,
    },
}

/// The records, if a leader reports them at present: a list of the past may lack a node that
/// has registered since.
pub(super) fn reported(nodes: &Nodes, own: NodeId) -> bool {
    nodes.get(&own).is_some_and(|node| node.health() != v1::NodeHealth::Unknown)
}

/// The nodes that have the role Kubernetes worker, in the order of their IDs.
pub(super) fn workers(nodes: &Nodes) -> Vec<NodeId> {
    nodes.iter().filter(|(_, node)| is_worker(node)).map(|(id, _)| *id).collect()
}

/// The part of the records that rights and Node objects follow, labels and taints of each worker;
/// `None` while no leader reports them.
pub(super) fn wanted(nodes: &Nodes, own: NodeId) -> Option<Wanted> {
    let workers = nodes.iter().filter(|(_, node)| is_worker(node));
    let wanted = |(id, node): (&NodeId, &v1::NodeInfo)| (*id, (labels(node), node.taints.clone()));
    reported(nodes, own).then(|| workers.map(wanted).collect())
}

/// The workers all parts of which serve, by their reports: each of them has a Node.
pub(super) fn serving(nodes: &Nodes) -> BTreeSet<NodeId> {
    let serves = |node: &v1::NodeInfo| {
        let report = node.status.as_ref().map(|status| status.workload.as_str());
        is_worker(node) && report == Some(PartState::Ready.name())
    };
    nodes.iter().filter(|(_, node)| serves(node)).map(|(id, _)| *id).collect()
}

/// Whether a node is a member with the role Kubernetes worker.
pub(super) fn is_worker(node: &v1::NodeInfo) -> bool {
    node.state() == v1::NodeState::Up
        && node.roles.is_some_and(|roles| roles.kubernetes_worker.is_some())
}

/// The changes that lead from these Nodes to what the records say.
pub(super) fn plan(nodes: &Nodes, objects: &[Value]) -> Vec<Action> {
    objects.iter().filter_map(|object| action(nodes, &object["metadata"])).collect()
}

fn action(nodes: &Nodes, metadata: &Value) -> Option<Action> {
    let text = |field: &str| metadata[field].as_str().map(str::to_owned);
    let node: NodeId = metadata["name"].as_str()?.parse().ok()?;
    let uid = text("uid")?;
    let Some(record) = nodes.get(&node).filter(|record| is_worker(record)) else {
        return Some(Action::Delete { node, uid, version: text("resourceVersion")? });
    };
    let wanted = labels(record);
    (!is_labelled(metadata, &wanted)).then(|| Action::Label(node_labels(node, &uid, &wanted)))
}

/// Whether a Node has these labels, and none that Polis has set before.
fn is_labelled(metadata: &Value, wanted: &Labels) -> bool {
    let has = |(key, value): (&String, &String)| metadata["labels"][key] == value.as_str();
    wanted.iter().all(has) && metadata["annotations"][LABELS] == listed(wanted)
}

fn labels(record: &v1::NodeInfo) -> Labels {
    let controls = record.roles.is_some_and(|roles| roles.kubernetes_controller.is_some());
    let own = [
        (WORKER, Some(String::new())),
        (CONTROL_PLANE, controls.then(String::new)),
        (NAME, Some(record.name.clone()).filter(|name| !name.is_empty())),
    ];
    let own = own.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    let set = record.labels.iter().filter(|(key, _value)| !is_reserved(key));
    set.map(|(key, value)| (key.clone(), value.clone())).chain(own).collect()
}

/// These labels of a Node that exists: without this `uid`, the API server refuses them, and
/// does not make a Node that no kubelet has registered. It removes those that an earlier object
/// had and this one has not.
fn node_labels(node: NodeId, uid: &str, labels: &Labels) -> Object {
    let content = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.to_string(),
            "uid": uid,
            "labels": labels,
            "annotations": {LABELS: listed(labels)},
        },
    });
    Object { path: format!("/api/v1/nodes/{node}"), content }
}

/// The keys of these labels, as the annotation lists them.
fn listed(labels: &Labels) -> String {
    labels.keys().map(String::as_str).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use polis_wire::node_roles::Role;

    use super::*;

    fn id(key: u8) -> NodeId {
        NodeId::from_public_key(&[key; 32])
    }

    fn record(roles: &[Role], name: &str) -> v1::NodeInfo {
        v1::NodeInfo {
            state: v1::NodeState::Up.into(),
            roles: Some(Role::record(roles)),
            name: name.to_owned(),
            ..Default::default()
        }
    }

    fn object(name: &str, labels: &Value) -> Value {
        json!({"metadata": {"name": name, "uid": "u", "resourceVersion": "7", "labels": labels}})
    }

    /// The object of the first node after these labels were applied, with those of others.
    fn applied(applied: &Object, others: &Value) -> Value {
        let mut object = object(&id(1).to_string(), others);
        let (set, metadata) = (&applied.content["metadata"], &mut object["metadata"]);
        for (key, value) in set["labels"].as_object().unwrap() {
            metadata["labels"][key] = value.clone();
        }
        metadata["annotations"] = set["annotations"].clone();
        object
    }

    /// The only action, which sets labels.
    fn relabelled(nodes: &Nodes, found: Value) -> Object {
        let planned = plan(nodes, &[found]);
        let [Action::Label(object)] = &planned[..] else { panic!("{planned:?}") };
        object.clone()
    }

    #[test]
    fn a_node_without_the_role_of_a_worker_loses_its_object() {
        let mut gone = record(&[Role::KubernetesWorker], "");
        gone.set_state(v1::NodeState::Decommissioned);
        let nodes = Nodes::from([
            (id(1), record(&[Role::KubernetesController, Role::ConsensusMember], "")),
            (id(2), gone),
            (id(3), record(&[Role::KubernetesWorker], "")),
        ]);
        let delete = |node| Action::Delete { node, uid: "u".to_owned(), version: "7".to_owned() };
        let worker = json!({ WORKER: "" });
        let set = json!({ LABELS: listed(&labels(&nodes[&id(3)])) });
        let objects: Vec<_> = [1, 2, 3, 4]
            .map(|key| {
                let mut object = object(&id(key).to_string(), &worker);
                object["metadata"]["annotations"] = set.clone();
                object
            })
            .into();
        assert_eq!(plan(&nodes, &objects), [delete(id(1)), delete(id(2)), delete(id(4))]);
        assert_eq!(workers(&nodes), [id(3)]);
    }

    #[test]
    fn a_node_that_polis_does_not_know_by_its_name_is_left_alone() {
        let noise = [json!({}), json!({"metadata": {"name": 7}}), object("virtual-1", &json!({}))];
        assert_eq!(plan(&Nodes::new(), &noise), []);
    }

    #[test]
    fn labels_follow_roles_and_name_and_those_of_others_stay() {
        let both = [Role::KubernetesWorker, Role::KubernetesController, Role::ConsensusMember];
        let nodes = Nodes::from([(id(1), record(&both, "web-1"))]);
        let found = object(&id(1).to_string(), &json!({ NAME: "former", "mine": "x" }));
        let set = relabelled(&nodes, found);
        let wanted = json!({ WORKER: "", CONTROL_PLANE: "", NAME: "web-1" });
        assert_eq!(set.content["metadata"]["labels"], wanted);
        assert_eq!(set.content["metadata"]["uid"], "u");
        let there = applied(&set, &json!({"mine": "x"}));
        assert_eq!(plan(&nodes, std::slice::from_ref(&there)), []);
        // The role of a controller and the name have gone.
        let nodes = Nodes::from([(id(1), record(&both[..1], ""))]);
        let set = relabelled(&nodes, there);
        assert_eq!(set.content["metadata"]["labels"], json!({ WORKER: "" }));
    }

    #[test]
    fn labels_of_the_record_are_set_and_leave_with_it() {
        let mut worker = record(&[Role::KubernetesWorker], "");
        let labels = [("topology.kubernetes.io/zone", "z1"), ("rack", "7")];
        worker.labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let mut nodes = Nodes::from([(id(1), worker)]);
        let bare = object(&id(1).to_string(), &json!({}));
        let set = relabelled(&nodes, bare.clone());
        let wanted = json!({ WORKER: "", "topology.kubernetes.io/zone": "z1", "rack": "7" });
        assert_eq!(set.content["metadata"]["labels"], wanted);
        let there = applied(&set, &json!({"mine": "x"}));
        assert_eq!(plan(&nodes, std::slice::from_ref(&there)), []);
        // Somebody has changed one.
        let mut other = there.clone();
        other["metadata"]["labels"]["rack"] = json!("8");
        assert_eq!(relabelled(&nodes, other), set);
        // A reserved one of the record is not set, and holds up no other.
        let record = nodes.get_mut(&id(1)).unwrap();
        for key in [CONTROL_PLANE, NAME, "kubernetes.io/hostname"] {
            record.labels.insert(key.to_owned(), "x".to_owned());
        }
        assert_eq!(plan(&nodes, std::slice::from_ref(&there)), []);
        assert_eq!(relabelled(&nodes, bare), set);
        // One leaves the record: the API server removes what the next object has not.
        nodes.get_mut(&id(1)).unwrap().labels.remove("rack");
        let set = relabelled(&nodes, there);
        let wanted = json!({ WORKER: "", "topology.kubernetes.io/zone": "z1" });
        assert_eq!(set.content["metadata"]["labels"], wanted);
    }

    #[test]
    fn records_count_only_while_a_leader_reports_them() {
        let mut nodes = Nodes::from([(id(1), record(&[Role::KubernetesController], ""))]);
        assert!(!reported(&nodes, id(1)));
        assert!(!reported(&nodes, id(2)));
        nodes.get_mut(&id(1)).unwrap().set_health(v1::NodeHealth::Healthy);
        assert!(reported(&nodes, id(1)));
    }

    #[test]
    fn a_worker_serves_once_it_reports_that_all_its_parts_do() {
        let both = [Role::KubernetesController, Role::ConsensusMember];
        let mut nodes = Nodes::from([
            (id(1), record(&both, "")),
            (id(2), record(&[Role::KubernetesWorker], "")),
        ]);
        for (report, serves) in [("starting", false), ("ready", true), ("failed: dns", false)] {
            for node in nodes.values_mut() {
                node.status =
                    Some(v1::NodeStatus { workload: report.to_owned(), ..Default::default() });
            }
            let expected: BTreeSet<_> = serves.then_some(id(2)).into_iter().collect();
            assert_eq!(serving(&nodes), expected, "{report}");
        }
    }

    #[test]
    fn only_what_rights_and_node_objects_follow_is_wanted() {
        let worker = record(&[Role::KubernetesWorker], "web-1");
        let mut nodes = Nodes::from([(id(1), record(&[], "")), (id(2), worker)]);
        assert_eq!(wanted(&nodes, id(1)), None);
        nodes.get_mut(&id(1)).unwrap().set_health(v1::NodeHealth::Healthy);
        let before = wanted(&nodes, id(1));
        let labels = [(WORKER, ""), (NAME, "web-1")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(before, Some(BTreeMap::from([(id(2), (labels.into(), Vec::new()))])));
        nodes.get_mut(&id(2)).unwrap().heartbeat_age_ms = 7;
        assert_eq!(wanted(&nodes, id(1)), before);
        nodes.get_mut(&id(2)).unwrap().name = "web-2".to_owned();
        assert_ne!(wanted(&nodes, id(1)), before);
        nodes.get_mut(&id(2)).unwrap().name = "web-1".to_owned();
        nodes.get_mut(&id(2)).unwrap().labels.insert("rack".to_owned(), "7".to_owned());
        assert_ne!(wanted(&nodes, id(1)), before);
        nodes.get_mut(&id(2)).unwrap().labels.clear();
        nodes.get_mut(&id(2)).unwrap().taints.push(v1::NodeTaint::default());
        assert_ne!(wanted(&nodes, id(1)), before);
    }
}
