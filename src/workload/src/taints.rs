//! The taints of Node objects, by the records of the nodes. Pure.
//!
//! kubelet registers its Node with the taints of the record (`registerWithTaints`), so no pod runs
//! there before. Later the reconciler keeps them: the taints of a Node are one list to the API
//! server, in which controllers and people have theirs, too, so it reads the Node and writes the
//! list back with the version that it has read.
//!
//! Invariants:
//! - A taint that neither the record has nor Polis has set stays as it is, and so does the order
//!   of the others.
//! - A taint that has left the record leaves the Node: an annotation lists those that were set. No
//!   kubelet may change it (policy `polis-workers`).

use std::collections::{BTreeMap, BTreeSet};

use polis_proto::v1;
use serde_json::{Value, json};

use super::nodes::is_worker;
use super::objects::TAINTS;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Nodes;
use polis_wire::parameters::taint_effect_name;

/// The taints of a record in the form of Kubernetes, by key and effect.
fn wanted(record: &v1::NodeInfo) -> BTreeMap<String, Value> {
    let taints = record.taints.iter().filter_map(|taint| {
        let effect = taint_effect_name(taint.effect());
        // A newer leader may know more effects.
        let value = json!({"key": taint.key, "value": taint.value, "effect": effect});
        (!effect.is_empty()).then(|| (name(&value), value))
    });
    taints.collect()
}

/// Key and effect of a taint, which no other taint of the Node has.
fn name(taint: &Value) -> String {
    format!("{}:{}", text(&taint["key"]), text(&taint["effect"]))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The taints with which kubelet registers its Node.
pub(super) fn registered(record: Option<&v1::NodeInfo>) -> Vec<Value> {
    record.map(wanted).unwrap_or_default().into_values().collect()
}

/// The workers among these Nodes, by their metadata, that have taints in their records, or had.
pub(super) fn of_interest<'a>(
    nodes: &'a Nodes,
    objects: &[Value],
) -> Vec<(NodeId, &'a v1::NodeInfo)> {
    let tainted = |object: &Value| {
        let metadata = &object["metadata"];
        let node: NodeId = metadata["name"].as_str()?.parse().ok()?;
        let record = nodes.get(&node).filter(|record| is_worker(record))?;
        let had = metadata["annotations"][TAINTS].is_string();
        (had || !record.taints.is_empty()).then_some((node, record))
    };
    objects.iter().filter_map(tainted).collect()
}

/// The merge patch that gives a Node the taints of its record, if it is still this one with this
/// version; `None` where they are right.
pub(super) fn patch(record: &v1::NodeInfo, object: &Value) -> Option<Value> {
    let metadata = &object["metadata"];
    let wanted = wanted(record);
    let listed = text(&metadata["annotations"][TAINTS]);
    let former: BTreeSet<&str> = listed.split(',').collect();
    let found = object["spec"]["taints"].as_array().map(Vec::as_slice).unwrap_or_default();
    let stays = |taint: &&Value| match wanted.get(&name(taint)) {
        Some(wanted) => text(&wanted["value"]) == text(&taint["value"]),
        None => !former.contains(&*name(taint)),
    };
    let mut taints: Vec<Value> = found.iter().filter(stays).cloned().collect();
    let there: BTreeSet<String> = taints.iter().map(name).collect();
    let missing = wanted.iter().filter(|(name, _)| !there.contains(*name));
    taints.extend(missing.map(|(_, taint)| taint.clone()));
    let names = wanted.keys().map(String::as_str).collect::<Vec<_>>().join(",");
    if taints == found && names == listed {
        return None;
    }
    // Without an own taint, the Node needs no annotation.
    let names = Some(names).filter(|names| !names.is_empty());
    Some(json!({
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {TAINTS: names},
        },
        "spec": {"taints": taints},
    }))
}

#[cfg(test)]
mod tests {
    use polis_proto::v1::node_taint::Effect::{NoExecute, NoSchedule};
    use polis_wire::node_roles::Role;
    use proptest::prelude::*;

    use super::*;

    const GPU: &str = r#"{"key": "gpu", "value": "a100", "effect": "NoSchedule"}"#;

    fn id() -> NodeId {
        NodeId::from_public_key(&[1; 32])
    }

    fn taint(key: &str, value: &str, effect: v1::node_taint::Effect) -> v1::NodeTaint {
        v1::NodeTaint { key: key.to_owned(), value: value.to_owned(), effect: effect.into() }
    }

    fn record(taints: &[v1::NodeTaint]) -> v1::NodeInfo {
        v1::NodeInfo {
            state: v1::NodeState::Up.into(),
            roles: Some(Role::record(&[Role::KubernetesWorker])),
            taints: taints.to_vec(),
            ..Default::default()
        }
    }

    /// A Node with these taints, none of which Polis has set.
    fn node(taints: &[Value]) -> Value {
        let metadata = json!({"name": id().to_string(), "uid": "u", "resourceVersion": "7"});
        json!({"metadata": metadata, "spec": {"taints": taints}})
    }

    /// The Node after a patch, as the API server merges it.
    fn patched(mut node: Value, patch: &Value) -> Value {
        for field in ["uid", "resourceVersion"] {
            assert_eq!(patch["metadata"][field], node["metadata"][field]);
        }
        node["spec"] = patch["spec"].clone();
        node["metadata"]["annotations"] = match &patch["metadata"]["annotations"][TAINTS] {
            Value::Null => json!({}),
            names => json!({TAINTS: names}),
        };
        node
    }

    fn parsed(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn taints_of_the_record_are_set_and_leave_with_it() {
        let gpu = taint("gpu", "a100", NoSchedule);
        let foreign = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute",
                             "timeAdded": "2026-01-01T00:00:00Z"});
        let bare = node(std::slice::from_ref(&foreign));
        let set = patch(&record(std::slice::from_ref(&gpu)), &bare).unwrap();
        assert_eq!(set["spec"]["taints"], json!([foreign, parsed(GPU)]));
        let there = patched(bare, &set);
        assert_eq!(there["metadata"]["annotations"][TAINTS], "gpu:NoSchedule");
        assert_eq!(patch(&record(std::slice::from_ref(&gpu)), &there), None);
        // Another writer has changed its value, or removed it: the record decides.
        for others in [json!([{"key": "gpu", "value": "x", "effect": "NoSchedule"}]), json!([])] {
            let mut other = there.clone();
            other["spec"]["taints"] = others;
            let again = patch(&record(std::slice::from_ref(&gpu)), &other).unwrap();
            assert_eq!(again["spec"]["taints"], json!([parsed(GPU)]));
        }
        // It leaves the record, and the annotation with it.
        let gone = patched(there.clone(), &patch(&record(&[]), &there).unwrap());
        assert_eq!(gone["spec"]["taints"], json!([foreign]));
        assert_eq!(gone["metadata"]["annotations"], json!({}));
        assert_eq!(patch(&record(&[]), &gone), None);
    }

    #[test]
    fn a_taint_that_kubelet_has_registered_is_taken_over() {
        let gpu = record(&[taint("gpu", "a100", NoSchedule)]);
        assert_eq!(registered(Some(&gpu)), [parsed(GPU)]);
        assert!(registered(None).is_empty());
        let node = node(&registered(Some(&gpu)));
        let set = patch(&gpu, &node).unwrap();
        assert_eq!(set["spec"]["taints"], json!([parsed(GPU)]));
        let there = patched(node, &set);
        let gone = patch(&record(&[]), &there).unwrap();
        assert_eq!(gone["spec"]["taints"], json!([]));
    }

    #[test]
    fn an_effect_of_a_newer_leader_delays_no_other_taint() {
        let newer = v1::NodeTaint { effect: 9, ..taint("a", "", NoExecute) };
        let both = record(&[newer, taint("gpu", "a100", NoSchedule)]);
        assert_eq!(registered(Some(&both)), [parsed(GPU)]);
    }

    #[test]
    fn only_workers_that_have_or_had_taints_are_read_whole() {
        let read = |record: v1::NodeInfo, object: &Value| {
            let nodes = Nodes::from([(id(), record)]);
            of_interest(&nodes, std::slice::from_ref(object)).len()
        };
        let bare = node(&[]);
        let tainted = record(&[taint("gpu", "", NoExecute)]);
        assert_eq!(read(tainted.clone(), &bare), 1);
        assert_eq!(read(record(&[]), &bare), 0);
        let had = patched(bare.clone(), &patch(&tainted, &bare).unwrap());
        assert_eq!(read(record(&[]), &had), 1);
        assert_eq!(read(v1::NodeInfo { roles: None, ..tainted.clone() }, &had), 0);
        let noise = [json!({}), json!({"metadata": {"name": "virtual-1"}})];
        assert!(of_interest(&Nodes::from([(id(), tainted)]), &noise).is_empty());
    }

    /// Keys and values of which many are the same.
    fn any_taint() -> impl Strategy<Value = v1::NodeTaint> {
        ("[a-d]", "[xy]?", 1..4_i32).prop_map(|(key, value, effect)| v1::NodeTaint {
            key,
            value,
            effect,
        })
    }

    /// At most one of each key and effect, as a record and a Node have them.
    fn any_taints() -> impl Strategy<Value = Vec<v1::NodeTaint>> {
        prop::collection::vec(any_taint(), 0..8).prop_map(|mut taints| {
            taints.sort_by(|a, b| (&a.key, a.effect).cmp(&(&b.key, b.effect)));
            taints.dedup_by(|a, b| (&a.key, a.effect) == (&b.key, b.effect));
            taints
        })
    }

    proptest! {
        #[test]
        fn foreign_taints_stay_whatever_the_record_has(
            foreign in any_taints(), first in any_taints(), second in any_taints(),
        ) {
            let foreign = registered(Some(&record(&foreign)));
            let (first, second) = (record(&first), record(&second));
            let mut now = node(&foreign);
            for record in [&first, &second] {
                if let Some(patch) = patch(record, &now) {
                    now = patched(now, &patch);
                }
                // A second look changes nothing.
                prop_assert_eq!(patch(record, &now), None);
            }
            let found = now["spec"]["taints"].as_array().unwrap();
            let (first, second) = (wanted(&first), wanted(&second));
            for taint in second.values() {
                prop_assert!(found.contains(taint), "{} is missing", taint);
            }
            // What the records never had is there, unchanged and in its order.
            let stays = |taint: &&Value| {
                !first.contains_key(&name(taint)) && !second.contains_key(&name(taint))
            };
            let left: Vec<_> = found.iter().filter(stays).collect();
            let expected: Vec<_> = foreign.iter().filter(stays).collect();
            prop_assert_eq!(left, expected);
        }
    }
}
