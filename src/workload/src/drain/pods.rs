//! Which pods of a node have to go before it is drained, and what the API server answers to
//! an eviction. Pure.
//!
//! | pod | drain |
//! |---|---|
//! | mirror of a static pod | stays: it belongs to the node |
//! | of a DaemonSet | stays: its controller ignores the cordon and would make it anew |
//! | finished | is evicted, which deletes it |
//! | of another controller | is evicted, and made anew on another node |
//! | of none | refused; evicted with `force`, and nothing makes it anew |
//!
//! A pod that ends already is waited for.

use std::fmt;

use serde_json::Value;

/// The annotation of a mirror pod.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A pod that has to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// Whether nothing makes it anew.
    pub(super) unmanaged: bool,
    /// Whether it ends already.
    pub(super) ends: bool,
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod that the API server lists for the node, if it has to go.
pub(super) fn leaving(object: &Value) -> Option<Pod> {
    let metadata = &object["metadata"];
    let text = |field: &str| Some(metadata[field].as_str()?.to_owned());
    let owners = metadata["ownerReferences"].as_array();
    let owner = owners.into_iter().flatten().find(|owner| owner["controller"] == true);
    if metadata["annotations"][MIRROR].is_string()
        || owner.is_some_and(|owner| owner["kind"] == "DaemonSet")
    {
        return None;
    }
    let finished = ["Succeeded", "Failed"].iter().any(|phase| object["status"]["phase"] == *phase);
    let ends = metadata["deletionTimestamp"].is_string();
    Some(Pod {
        namespace: text("namespace")?,
        name: text("name")?,
        uid: text("uid")?,
        unmanaged: owner.is_none() && !finished && !ends,
        ends,
    })
}

/// The outcome of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Evicted {
    /// The pod ends, or is gone.
    Yes,
    /// It stays for now, for this reason.
    NotYet(String),
}

/// Reads the answer to an eviction.
pub(super) fn evicted(status: u16, body: &[u8]) -> Evicted {
    // 409: the name belongs to another pod by now.
    if matches!(status, 200..=299 | 404 | 409) {
        return Evicted::Yes;
    }
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let cause = answer["details"]["causes"][0]["message"].as_str();
    let said = cause.or(answer["message"].as_str()).unwrap_or("no reason was given");
    Evicted::NotYet(match status {
        429 => said.to_owned(),
        _ => format!("the API server answers {status}: {said}"),
    })
}

/// Pods as a sentence lists them: the first few, and how many more.
pub(super) fn names<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> String {
    const SHOWN: usize = 3;
    let all: Vec<_> = pods.into_iter().map(ToString::to_string).collect();
    match all.len().checked_sub(SHOWN) {
        None | Some(0) => all.join(", "),
        Some(more) => format!("{} and {more} more", all[..SHOWN].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(name: &str, owner: &str) -> Value {
        let mut object = json!({
            "metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}")},
            "status": {"phase": "Running"},
        });
        if !owner.is_empty() {
            object["metadata"]["ownerReferences"] = json!([
                {"kind": "Other", "controller": false},
                {"kind": owner, "controller": true},
            ]);
        }
        object
    }

    #[test]
    fn pods_of_the_node_stay_and_the_others_go() {
        let mut mirror = object("static", "Node");
        mirror["metadata"]["annotations"][MIRROR] = json!("hash");
        let mut finished = object("done", "");
        finished["status"]["phase"] = json!("Succeeded");
        let mut ends = object("ends", "");
        ends["metadata"]["deletionTimestamp"] = json!("2026-11-22T00:00:00Z");
        let objects = [
            mirror,
            object("agent", "DaemonSet"),
            object("web", "ReplicaSet"),
            object("alone", ""),
            finished,
            ends,
            json!({"metadata": {"name": "without a namespace"}}),
        ];
        let found: Vec<_> = objects.iter().filter_map(leaving).collect();
        let said: Vec<_> =
            found.iter().map(|pod| (pod.name.as_str(), pod.unmanaged, pod.ends)).collect();
        assert_eq!(
            said,
            [
                ("web", false, false),
                ("alone", true, false),
                ("done", false, false),
                ("ends", false, true),
            ]
        );
    }

    #[test]
    fn an_eviction_that_a_budget_forbids_says_which() {
        let body = json!({
            "message": "Cannot evict pod as it would violate the pod's disruption budget.",
            "details": {"causes": [{
                "reason": "DisruptionBudget",
                "message": "The disruption budget web needs 2 healthy pods and has 2 currently",
            }]},
        });
        let said = evicted(429, body.to_string().as_bytes());
        let text = "The disruption budget web needs 2 healthy pods and has 2 currently";
        assert_eq!(said, Evicted::NotYet(text.to_owned()));
        let two = br#"{"message": "This pod has more than one PodDisruptionBudget"}"#;
        let text = "the API server answers 500: This pod has more than one PodDisruptionBudget";
        assert_eq!(evicted(500, two), Evicted::NotYet(text.to_owned()));
        let text = "the API server answers 403: no reason was given";
        assert_eq!(evicted(403, b"noise"), Evicted::NotYet(text.to_owned()));
        for gone in [200, 201, 404, 409] {
            assert_eq!(evicted(gone, b""), Evicted::Yes);
        }
    }

    #[test]
    fn a_long_list_is_cut() {
        let objects = ["a", "b", "c", "d", "e"].map(|name| object(name, "Job"));
        let pods: Vec<_> = objects.iter().filter_map(leaving).collect();
        assert_eq!(names(&pods), "shop/a, shop/b, shop/c and 2 more");
        assert_eq!(names(&pods[..3]), "shop/a, shop/b, shop/c");
    }
}
