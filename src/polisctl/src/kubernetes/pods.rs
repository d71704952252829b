//! Which pods and nodes are not well, and why. Pure.

use serde_json::Value;

/// A pod that is not well.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Unwell {
    namespace: String,
    name: String,
    node: String,
    /// In one word, as Kubernetes says it.
    state: String,
    why: String,
}

impl Unwell {
    /// The heads of the columns of [`Self::row`].
    pub(super) const HEADS: [&str; 5] = ["NAMESPACE", "POD", "NODE", "STATE", "WHY"];

    /// A row of a table.
    pub(super) fn row(&self) -> Vec<String> {
        let dash = crate::output::or_dash;
        vec![
            self.namespace.clone(),
            self.name.clone(),
            dash(&self.node),
            self.state.clone(),
            dash(&self.why),
        ]
    }

    /// A pod as Kubernetes lists it; `None` if it is well.
    pub(super) fn of(pod: &Value) -> Option<Self> {
        let (state, why) = trouble(pod)?;
        Some(Self {
            namespace: text(&pod["metadata"]["namespace"]),
            name: text(&pod["metadata"]["name"]),
            node: text(&pod["spec"]["nodeName"]),
            state,
            why,
        })
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn trouble(pod: &Value) -> Option<(String, String)> {
    let status = &pod["status"];
    let phase = text(&status["phase"]);
    let named = |reason: String| if reason.is_empty() { phase.clone() } else { reason };
    if pod["metadata"]["deletionTimestamp"].is_string() {
        let since = text(&pod["metadata"]["deletionTimestamp"]);
        return Some(("Terminating".to_owned(), format!("is to end by {since}")));
    }
    match phase.as_str() {
        "Succeeded" => evicted(status).map(|why| ("Evicted".to_owned(), why)),
        "Failed" | "Unknown" => {
            let why = text(&status["message"]);
            let others = || evicted(status).or_else(|| ended(status)).unwrap_or_default();
            let why = if why.is_empty() { others() } else { why };
            Some((named(text(&status["reason"])), why))
        }
        "Running" => waiting(status).or_else(|| not_ready(status)),
        _ => waiting(status)
            .or_else(|| condition(status, "PodScheduled"))
            .or_else(|| Some((named(text(&status["reason"])), text(&status["message"])))),
    }
}

/// Why a node was rid of a pod that took too much. A container that ends with 0 when it is asked
/// to leaves the pod in the phase *Succeeded*, and kubelet's reason in this condition alone.
fn evicted(status: &Value) -> Option<String> {
    let all = status["conditions"].as_array()?;
    let is = |one: &&Value| {
        one["type"] == "DisruptionTarget"
            && one["status"] == "True"
            && one["reason"] == "TerminationByKubelet"
    };
    all.iter().find(is).map(|one| text(&one["message"]))
}

/// The containers of a pod, those that prepare it first.
fn containers(status: &Value) -> impl Iterator<Item = &Value> {
    ["initContainerStatuses", "containerStatuses"]
        .into_iter()
        .filter_map(|field| status[field].as_array())
        .flatten()
}

/// The reason why a container waits, and how it ended before.
fn waiting(status: &Value) -> Option<(String, String)> {
    let container = containers(status).find(|one| one["state"]["waiting"].is_object())?;
    let waiting = &container["state"]["waiting"];
    let name = text(&container["name"]);
    let last = exit(&container["lastState"]["terminated"]);
    let message = text(&waiting["message"]);
    let help = pull_help(&message).unwrap_or_default();
    let said = [last.unwrap_or_default(), message, help];
    let said: Vec<_> = said.into_iter().filter(|text| !text.is_empty()).collect();
    let why = match said.is_empty() {
        true => format!("container {name}"),
        false => format!("container {name}: {}", said.join("; ")),
    };
    Some((text(&waiting["reason"]), why))
}

/// The remedy where an image cannot be pulled, by the words of containerd.
fn pull_help(message: &str) -> Option<String> {
    let has = |words: &str| message.contains(words);
    if !has("failed to pull") {
        return None;
    }
    // The address of the request that failed, a mirror's where the registry has one; else the
    // registry in the name of the image.
    let behind = |words: &str| {
        let (_, rest) = message.split_once(words)?;
        rest.split('/').next()
    };
    let host = behind("\"https://").or_else(|| behind("image \"")).unwrap_or("HOST");
    let set = format!("`polisctl cluster registry set {host}");
    if has("x509: certificate signed by unknown authority") {
        return Some(format!("set the authority of the certificate of {host}: {set} --ca FILE`"));
    }
    if has("x509: ") {
        return Some(format!("give {host} a certificate that is valid for this name and now"));
    }
    if has("401 Unauthorized") || has("403 Forbidden") || has("authorization failed") {
        let user = "--username NAME --password-file FILE`";
        return Some(format!("set a user who may pull from {host}: {set} {user}"));
    }
    if has("no match for platform") {
        return Some(
            "the image has no variant for the processor of the node: use another one".into(),
        );
    }
    has("server gave HTTP response to HTTPS client")
        .then(|| format!("{host} is not encrypted: give it a certificate"))
}

/// How a container ended.
fn exit(terminated: &Value) -> Option<String> {
    let code = terminated["exitCode"].as_i64()?;
    let reason = text(&terminated["reason"]);
    Some(format!("ended with {code} ({reason})"))
}

fn ended(status: &Value) -> Option<String> {
    containers(status).find_map(|one| {
        let exit = exit(&one["state"]["terminated"])?;
        Some(format!("container {}: {exit}", text(&one["name"])))
    })
}

fn not_ready(status: &Value) -> Option<(String, String)> {
    let containers = status["containerStatuses"].as_array()?;
    let one = containers.iter().find(|one| one["ready"] == false)?;
    Some(("NotReady".to_owned(), format!("container {} is not ready", text(&one["name"]))))
}

/// A condition of a pod or a node that is not true.
fn condition(status: &Value, kind: &str) -> Option<(String, String)> {
    let all = status["conditions"].as_array()?;
    let one = all.iter().find(|one| one["type"] == kind && one["status"] != "True")?;
    Some((text(&one["reason"]), text(&one["message"])))
}

/// A node, as Kubernetes lists it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) ready: bool,
    /// Of the kubelet.
    version: String,
    /// Whether new pods stay away from it.
    cordoned: bool,
    /// Why it is not ready.
    why: String,
}

impl Node {
    /// The heads of the columns of [`Self::row`].
    pub(super) const HEADS: [&str; 4] = ["NODE", "READY", "VERSION", "WHY"];

    /// A row of a table.
    pub(super) fn row(&self) -> Vec<String> {
        let dash = crate::output::or_dash;
        let ready = match (self.ready, self.cordoned) {
            (true, false) => "yes",
            (true, true) => "yes, cordoned",
            (false, _) => "no",
        };
        vec![self.name.clone(), ready.to_owned(), dash(&self.version), dash(&self.why)]
    }

    /// A node as Kubernetes lists it.
    pub(super) fn of(node: &Value) -> Self {
        let status = &node["status"];
        let ready = status["conditions"].as_array().is_some_and(|all| {
            all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
        });
        let (reason, said) = condition(status, "Ready").unwrap_or_default();
        let why = match (ready, reason.is_empty()) {
            (true, _) => String::new(),
            (false, true) => "its kubelet has not reported yet".to_owned(),
            (false, false) => format!("{reason}: {said}"),
        };
        Self {
            name: text(&node["metadata"]["name"]),
            ready,
            version: text(&status["nodeInfo"]["kubeletVersion"]),
            cordoned: node["spec"]["unschedulable"] == true,
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(status: &Value) -> Option<(String, String)> {
        let pod = json!({"metadata": {"namespace": "n", "name": "p"}, "status": status});
        Unwell::of(&pod).map(|unwell| (unwell.state, unwell.why))
    }

    fn said(state: &str, why: &str) -> Option<(String, String)> {
        Some((state.to_owned(), why.to_owned()))
    }

    #[test]
    fn pods_that_do_their_work_or_have_done_it_are_well() {
        assert_eq!(pod(&json!({"phase": "Succeeded"})), None);
        let ready = json!([{"name": "c", "ready": true, "state": {"running": {}}}]);
        assert_eq!(pod(&json!({"phase": "Running", "containerStatuses": ready})), None);
    }

    #[test]
    fn a_pod_that_is_not_well_says_why() {
        let unscheduled = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1"},
        ]});
        assert_eq!(pod(&unscheduled), said("Unschedulable", "0/1"));
        let waits = |reason: &str, message: &str| {
            json!([{"name": "c", "ready": false,
                "state": {"waiting": {"reason": reason, "message": message}}}])
        };
        let pulls =
            json!({"phase": "Pending", "containerStatuses": waits("ErrImagePull", "no host")});
        assert_eq!(pod(&pulls), said("ErrImagePull", "container c: no host"));
        let mut crashes =
            json!({"phase": "Running", "containerStatuses": waits("CrashLoopBackOff", "")});
        crashes["containerStatuses"][0]["lastState"] =
            json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}});
        assert_eq!(
            pod(&crashes),
            said("CrashLoopBackOff", "container c: ended with 137 (OOMKilled)")
        );
        let unready = json!({"phase": "Running", "containerStatuses": [
            {"name": "c", "ready": false, "state": {"running": {}}},
        ]});
        assert_eq!(pod(&unready), said("NotReady", "container c is not ready"));
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "disk"});
        assert_eq!(pod(&evicted), said("Evicted", "disk"));
        let silent = json!({"phase": "Failed", "reason": "Evicted", "conditions": [{"type":
            "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "full"}]});
        assert_eq!(pod(&silent), said("Evicted", "full"));
        let mut ended = json!({"phase": "Succeeded", "conditions": [{"type": "DisruptionTarget",
            "status": "True", "reason": "TerminationByKubelet", "message": "full"}]});
        assert_eq!(pod(&ended), said("Evicted", "full"));
        ended["conditions"][0]["reason"] = json!("EvictionByEvictionAPI");
        assert_eq!(pod(&ended), None);
        let failed = json!({"phase": "Failed", "containerStatuses": [
            {"name": "c", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}},
        ]});
        assert_eq!(pod(&failed), said("Failed", "container c: ended with 1 (Error)"));
        assert_eq!(pod(&json!({"phase": "Pending"})), said("Pending", ""));
    }

    #[test]
    fn a_pull_that_fails_says_what_helps() {
        let help = |cause: &str| {
            let message = format!(
                "failed to pull and unpack image \"a.example/x:1\": failed to resolve reference \
                 \"a.example/x:1\": failed to do request: Head \
                 \"https://m.example:5000/v2/x/manifests/1?ns=a.example\": {cause}"
            );
            pull_help(&message).unwrap_or_default()
        };
        let unknown = "tls: failed to verify certificate: x509: certificate signed by unknown \
                       authority";
        let set = "`polisctl cluster registry set m.example:5000 --ca FILE`";
        assert!(help(unknown).contains(set), "{}", help(unknown));
        let ended = help("tls: failed to verify certificate: x509: certificate has expired");
        assert!(ended.contains("m.example:5000 a certificate that is valid"), "{ended}");
        let user = help("unexpected status from HEAD request: 401 Unauthorized");
        assert!(user.contains("--username NAME --password-file FILE`"), "{user}");
        let wrong = "failed to pull and unpack image \"a.example/x:1\": failed to resolve image: \
                     pull access denied, repository does not exist or may require authorization: \
                     authorization failed: no basic auth credentials";
        let user = pull_help(wrong).unwrap();
        assert!(user.contains("`polisctl cluster registry set a.example --username"), "{user}");
        let platform = help("no match for platform in manifest sha256:1: not found");
        assert!(platform.contains("processor of the node"), "{platform}");
        assert!(help("http: server gave HTTP response to HTTPS client").contains("encrypted"));
        assert_eq!(help("dial tcp: i/o timeout"), "");
        assert_eq!(pull_help("x509: of something else"), None);
    }

    #[test]
    fn a_pod_that_ends_is_shown_until_it_has() {
        let pod = json!({
            "metadata": {"name": "p", "deletionTimestamp": "2030-01-01T00:00:00Z"},
            "status": {"phase": "Running"},
        });
        assert_eq!(Unwell::of(&pod).unwrap().state, "Terminating");
    }

    #[test]
    fn a_node_is_ready_or_says_why_not() {
        let node = |conditions: Value| {
            Node::of(&json!({"metadata": {"name": "n"}, "status": {"conditions": conditions}}))
        };
        assert!(node(json!([{"type": "Ready", "status": "True"}])).ready);
        let late = json!([{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status."}]);
        let why = node(late).why;
        assert_eq!(why, "NodeStatusUnknown: Kubelet stopped posting node status.");
        assert_eq!(node(Value::Null).why, "its kubelet has not reported yet");
    }

    #[test]
    fn nonsense_is_no_reason_to_stop() {
        for value in [json!(null), json!([]), json!({"status": 3}), json!("x")] {
            let _unwell = Unwell::of(&value);
            assert!(!Node::of(&value).ready);
        }
    }
}
