//! A worker is drained, its Node has the labels of its record, and a node that has lost the role is
//! cut off.
//!
//! No kubelet runs: the story is one itself, with kubelet's certificate and nothing else. It
//! registers a Node, makes its pods ready, and confirms their end.

use std::time::Duration;

use http::Method;
use polis_proto::v1;
use polis_qemu::deadline::Deadline;
use polis_tests::{Story, patiently, story};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Role;
use polis_wire::pki::WorkerPurpose;
use polis_workload::drain::{Drains, Held, Progress, Service, State};
use polis_workload::{Api, Part, PartState, Status};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::harness::supervise;
use crate::world::{Controller, SOON, becomes, wait_until, worker_record};

/// The stories of this file.
pub(crate) const STORIES: &[Story] = &[
    story!(threads a_worker_is_drained_within_its_budgets_and_takes_pods_again).takes(60),
    story!(threads a_node_that_is_no_worker_any_more_is_cut_off).takes(40),
];

/// Between two looks.
const LOOK: Duration = Duration::from_millis(200);

/// The longest that a node without the role may write.
const CUT_MAX: Duration = Duration::from_secs(5);

const JSON: &str = "application/json";
const MERGE: &str = "application/strategic-merge-patch+json";

const PODS: &str = "/api/v1/namespaces/default/pods";
const POLICIES: &str = "/apis/networking.k8s.io/v1/networkpolicies";
const BUDGETS: &str = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";

/// The status and the content of an answer.
async fn asks(api: &Api, method: Method, path: &str, kind: &str, body: &Value) -> (u16, Value) {
    let content = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let answer = api.request(method, path, &[("content-type", kind)], content).await.unwrap();
    (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
}

async fn reads(api: &Api, path: &str) -> Value {
    let (status, value) = asks(api, Method::GET, path, JSON, &Value::Null).await;
    assert_eq!(status, 200, "{path}: {value}");
    value
}

/// A kubelet without containers.
struct Kubelet {
    api: Api,
    node: NodeId,
}

impl Kubelet {
    fn path(&self) -> String {
        format!("/api/v1/nodes/{}", self.node)
    }

    async fn registers(&self) -> (u16, Value) {
        self.posts("/api/v1/nodes").await
    }

    /// The answer of the API server to a registration.
    async fn would_register(&self) -> (u16, Value) {
        self.posts("/api/v1/nodes?dryRun=All").await
    }

    async fn posts(&self, path: &str) -> (u16, Value) {
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node.to_string()},
        });
        asks(&self.api, Method::POST, path, JSON, &object).await
    }

    /// Reports that the node is ready.
    async fn reports(&self) -> (u16, Value) {
        let seconds = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let now = time::OffsetDateTime::from_unix_timestamp(seconds.as_secs().cast_signed());
        let now = now.unwrap().format(&time::format_description::well_known::Rfc3339).unwrap();
        let room = json!({"cpu": "4", "memory": "4Gi", "pods": "110", "ephemeral-storage": "4Gi"});
        let status = json!({"status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Ready", "lastHeartbeatTime": now,
            }],
        }});
        let path = format!("{}/status", self.path());
        asks(&self.api, Method::PATCH, &path, MERGE, &status).await
    }

    async fn pods(&self) -> Vec<Value> {
        let path = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.node);
        let list = reads(&self.api, &path).await;
        list["items"].as_array().unwrap().clone()
    }

    /// Does what a kubelet does, for ever.
    async fn works(&self) {
        let mut reported: Option<Instant> = None;
        loop {
            if reported.is_none_or(|at| at.elapsed() > Duration::from_secs(5)) {
                let (status, said) = self.reports().await;
                assert_eq!(status, 200, "{said}");
                reported = Some(Instant::now());
            }
            for pod in self.pods().await {
                let name = pod["metadata"]["name"].as_str().unwrap();
                let path = format!("{PODS}/{name}");
                if pod["metadata"]["deletionTimestamp"].is_string() {
                    let now = json!({
                        "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
                    });
                    asks(&self.api, Method::DELETE, &path, JSON, &now).await;
                } else if pod["status"]["phase"] != "Running" {
                    let ready = json!({"status": {
                        "phase": "Running",
                        "conditions": [{"type": "Ready", "status": "True"}],
                    }});
                    asks(&self.api, Method::PATCH, &format!("{path}/status"), MERGE, &ready).await;
                }
            }
            sleep(LOOK).await;
        }
    }
}

/// A controller, and a worker whose Node is registered.
async fn cluster() -> (Controller, Kubelet) {
    let controller = Controller::ready().await;
    let node = NodeId::from_public_key(&[42; 32]);
    let api = controller.worker(WorkerPurpose::Kubelet, node).await;
    let kubelet = Kubelet { api, node };
    // The API server acts on a policy some moments after it has it.
    let refused = async {
        loop {
            let (status, said) = kubelet.would_register().await;
            if status == 403 {
                return said;
            }
            sleep(LOOK).await;
        }
    };
    let said = patiently(SOON, refused).await.expect("a certificate is not a role");
    let why = said["message"].as_str().unwrap();
    assert!(why.contains("no role Kubernetes worker"), "{why}");
    controller.reports(node, Some(worker_record(&[Role::KubernetesWorker])));
    let registers = async || kubelet.registers().await.0 == 201;
    wait_until(SOON, "a worker registers its Node", registers).await;
    let master = controller.master();
    let labels = |value: &Value| {
        let labels = &value["metadata"]["labels"];
        labels["node-role.kubernetes.io/worker"] == "" && labels["polis.internal/name"] == "web-1"
    };
    becomes(&master, &kubelet.path(), "its labels", labels).await;
    (controller, kubelet)
}

async fn a_worker_is_drained_within_its_budgets_and_takes_pods_again() {
    let (controller, kubelet) = cluster().await;
    let drains = Drains::default();
    let status = watch::Sender::new(Status::default());
    status.send_modify(|status| {
        status.parts.insert(Part::Node, PartState::Ready);
    });
    let (api, node, orders) = (kubelet.api.clone(), kubelet.node, drains.clone());
    let running = supervise("drain", move |ctx| {
        let (api, orders, status) = (api.clone(), orders.clone(), status.clone());
        Service::new(api, node, orders, status, ctx.lines().clone()).run(ctx)
    });
    tokio::select! {
        () = kubelet.works() => panic!("it ends"),
        () = Box::pin(drained(&controller, &kubelet, &drains)) => {}
    }
    running.supervisor.stop().await;
    controller.stop().await;
}

async fn drained(controller: &Controller, kubelet: &Kubelet, drains: &Drains) {
    let master = controller.master();
    deploys(controller, kubelet, &master).await;
    let node = kubelet.path();
    let cordoned = |node: &Value| node["spec"]["unschedulable"] == true;

    // Nothing would replace this pod.
    let held = drains.begin(Duration::from_secs(60), false);
    let end = ends(&held).await;
    assert_eq!(end.state.name(), "failed");
    assert_eq!(end.cause, "no controller would replace default/alone");
    assert!(!cordoned(&reads(&master, &node).await));
    drop(held);
    asks(&master, Method::DELETE, &format!("{PODS}/alone"), JSON, &Value::Null).await;
    becomes(&master, &format!("{PODS}/alone"), "its end", |pod| pod["code"] == 404).await;

    // A budget holds both pods of the set, until a deadline.
    let held = drains.begin(Duration::from_secs(20), false);
    let end = ends(&held).await;
    assert_eq!((end.state.name(), end.pods), ("failed", 2), "{end:?}");
    assert!(end.cause.contains("disruption budget web needs 2 healthy pods"), "{end:?}");
    let object = reads(&master, &node).await;
    assert!(cordoned(&object), "{object}");
    assert_eq!(object["metadata"]["annotations"]["polis.internal/cordoned"], "true");
    // A drain that is not held any more is undone, and so is one by the next order.
    drop(held);
    becomes(&master, &node, "the end of the cordon", |node| !cordoned(node)).await;

    // With force, the deadline is an end.
    let held = drains.begin(Duration::from_secs(20), true);
    let end = ends(&held).await;
    assert_eq!((end.state, end.pods), (State::GivenUp, 2), "{end:?}");

    // Without the budget the pods go, and only that of the daemon stays.
    asks(&master, Method::DELETE, &format!("{BUDGETS}/web"), JSON, &Value::Null).await;
    let next = drains.begin(Duration::from_secs(100), false);
    assert!(held.next(Some(&end)).await.is_err(), "another one has taken it over");
    drop(held);
    let end = ends(&next).await;
    assert_eq!((end.state, end.pods), (State::Drained, 0), "{end:?}");
    let left = kubelet.pods().await;
    let kinds: Vec<_> =
        left.iter().map(|pod| &pod["metadata"]["ownerReferences"][0]["kind"]).collect();
    assert_eq!(kinds, ["DaemonSet"]);
    assert!(cordoned(&reads(&master, &node).await));

    // The machine is back: pods come again.
    drop(next);
    becomes(&master, &node, "the end of the cordon", |node| !cordoned(node)).await;
    let back = async || kubelet.pods().await.len() >= 3;
    wait_until(SOON, "the set has its pods on the node again", back).await;

    // The cordon of a person stays.
    let cordon = json!({"spec": {"unschedulable": true}});
    asks(&master, Method::PATCH, &node, MERGE, &cordon).await;
    let held = drains.begin(Duration::from_secs(100), false);
    assert_eq!(ends(&held).await.state, State::Drained);
    drop(held);
    wait_until(SOON, "the drain ends", async || drains.state() == State::None).await;
    assert!(cordoned(&reads(&master, &node).await));
}

/// A set of two pods with a budget for both, a daemon, and a pod without a controller, all ready.
async fn deploys(controller: &Controller, kubelet: &Kubelet, master: &Api) {
    becomes(master, "/api/v1/namespaces/default/serviceaccounts/default", "the account", |found| {
        found["kind"] == "ServiceAccount"
    })
    .await;
    let selector = |app: &str| json!({"matchLabels": {"app": app}});
    let template = |app: &str| {
        json!({
            "metadata": {"labels": {"app": app}},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        })
    };
    let metadata = |name: &str| json!({"name": name, "namespace": "default"});
    let apps = "/apis/apps/v1/namespaces/default";
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": metadata("web"),
        "spec": {"replicas": 2, "selector": selector("web"), "template": template("web")},
    });
    let daemon = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata("agent"),
        "spec": {"selector": selector("agent"), "template": template("agent")},
    });
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata("web"),
        "spec": {"minAvailable": 2, "selector": selector("web")},
    });
    let mut alone = template("alone");
    alone["apiVersion"] = json!("v1");
    alone["kind"] = json!("Pod");
    alone["metadata"] = metadata("alone");
    alone["spec"]["nodeName"] = json!(kubelet.node.to_string());
    let objects = [
        (format!("{apps}/replicasets"), set),
        (format!("{apps}/daemonsets"), daemon),
        (BUDGETS.to_owned(), budget),
        (PODS.to_owned(), alone),
    ];
    for (path, object) in objects {
        let made = controller.create(&path, &object).await;
        assert_eq!(made.status, 201, "{path}: {}", String::from_utf8_lossy(&made.body));
    }
    becomes(master, &format!("{BUDGETS}/web"), "two healthy pods", |budget| {
        budget["status"]["currentHealthy"] == 2 && budget["status"]["disruptionsAllowed"] == 0
    })
    .await;
    let all = async || kubelet.pods().await.len() >= 4;
    wait_until(SOON, "four pods are on the node", all).await;
}

/// The end of a drain.
async fn ends(held: &Held) -> Progress {
    let mut seen = None;
    let end = async {
        loop {
            let next = held.next(seen.as_ref()).await.expect("it holds");
            if next.state != State::Draining {
                return next;
            }
            seen = Some(next);
        }
    };
    patiently(SOON, end).await.expect("every drain ends")
}

async fn a_node_that_is_no_worker_any_more_is_cut_off() {
    let (controller, kubelet) = cluster().await;
    let proxy = controller.worker(WorkerPurpose::KubeProxy, kubelet.node).await;
    let dns = controller.worker(WorkerPurpose::Dns, kubelet.node).await;
    let policy = controller.worker(WorkerPurpose::Policy, kubelet.node).await;
    let services = "/api/v1/services";
    let programs = [(&proxy, services), (&dns, services), (&policy, POLICIES)];
    for (api, path) in programs {
        becomes(api, path, "its rights", |list| list["kind"] != "Status").await;
    }
    reads_what_a_policy_needs_and_no_more(&policy).await;
    assert_eq!(kubelet.reports().await.0, 200);
    let master = controller.master();
    has_the_labels_of_its_record(&controller, &kubelet, &master).await;
    has_the_taints_of_its_record(&controller, &kubelet, &master).await;

    // Another role takes the place of the worker's.
    let (begun, mut late) = (Instant::now(), Deadline::within(SOON));
    controller.reports(kubelet.node, Some(worker_record(&[Role::ConsensusMember])));
    becomes(&master, &kubelet.path(), "its end", |node| node["code"] == 404).await;
    println!("the Node was deleted after {:.1} s", begun.elapsed().as_secs_f64());
    let cut = async || kubelet.registers().await.0 == 403;
    wait_until(CUT_MAX, "it cannot register again", cut).await;
    for (api, path) in programs {
        becomes(api, path, "the end of its rights", |list| list["code"] == 403).await;
    }
    println!("nothing of it has rights after {:.1} s", begun.elapsed().as_secs_f64());
    assert!(!late.is_over(), "all of that took longer than {SOON:?}");
    let token = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let wish =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    assert_eq!(asks(&kubelet.api, Method::POST, token, JSON, &wish).await.0, 403);
    let secrets = "/api/v1/namespaces/default/secrets/s";
    assert_eq!(asks(&kubelet.api, Method::GET, secrets, JSON, &Value::Null).await.0, 403);
    // It reads until its certificate ends, as far as the Node authorizer lets every kubelet.
    assert_eq!(asks(&kubelet.api, Method::GET, services, JSON, &Value::Null).await.0, 200);

    // With the role it is a worker again; without a record it is gone again.
    controller.reports(kubelet.node, Some(worker_record(&[Role::KubernetesWorker])));
    let again = async || kubelet.registers().await.0 == 201;
    wait_until(SOON, "it registers again", again).await;
    controller.reports(kubelet.node, None);
    becomes(&master, &kubelet.path(), "its end", |node| node["code"] == 404).await;
    controller.stop().await;
}

/// The labels of the record are on the Node and leave it with the record; that of a person and that
/// of a kubelet stay as they are.
async fn has_the_labels_of_its_record(controller: &Controller, kubelet: &Kubelet, master: &Api) {
    const ZONE: &str = "topology.kubernetes.io/zone";
    const OS: &str = "kubernetes.io/os";

    let path = kubelet.path();
    let others = json!({"metadata": {"labels": {"mine": "x", OS: "linux"}}});
    assert_eq!(asks(master, Method::PATCH, &path, MERGE, &others).await.0, 200);
    let mut record = worker_record(&[Role::KubernetesWorker]);
    let labels = [(ZONE, "z1"), ("rack", "7"), (OS, "other")];
    record.labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    controller.reports(kubelet.node, Some(record.clone()));
    let set = |node: &Value| node["metadata"]["labels"]["rack"] == "7";
    let node = becomes(master, &path, "the labels of its record", set).await;
    let of = |node: &Value| [ZONE, "mine", OS].map(|key| node["metadata"]["labels"][key].clone());
    assert_eq!(of(&node), ["z1", "x", "linux"], "{node}");

    record.labels.remove("rack");
    controller.reports(kubelet.node, Some(record));
    let gone = |node: &Value| node["metadata"]["labels"]["rack"].is_null();
    let node = becomes(master, &path, "the end of a label", gone).await;
    assert_eq!(of(&node), ["z1", "x", "linux"], "{node}");
}

/// The taints of the record are on the Node and leave it with the record; that of a person stays.
async fn has_the_taints_of_its_record(controller: &Controller, kubelet: &Kubelet, master: &Api) {
    let path = kubelet.path();
    let mine = json!({"key": "mine", "value": "x", "effect": "PreferNoSchedule"});
    let gpu = json!({"key": "gpu", "value": "a100", "effect": "NoSchedule"});
    let has = |node: &Value, taint: &Value| {
        node["spec"]["taints"].as_array().is_some_and(|taints| taints.contains(taint))
    };
    let others = json!({"spec": {"taints": [mine]}});
    assert_eq!(asks(master, Method::PATCH, &path, MERGE, &others).await.0, 200);
    let mut record = worker_record(&[Role::KubernetesWorker]);
    record.taints.push(v1::NodeTaint {
        key: "gpu".to_owned(),
        value: "a100".to_owned(),
        effect: v1::node_taint::Effect::NoSchedule.into(),
    });
    controller.reports(kubelet.node, Some(record.clone()));
    let set = |node: &Value| has(node, &gpu);
    let node = becomes(master, &path, "the taints of its record", set).await;
    assert!(has(&node, &mine), "{node}");
    // A kubelet that named the taint of the person there would have it removed.
    let names = json!({"metadata": {"annotations": {
        "polis.internal/taints": "gpu:NoSchedule,mine:PreferNoSchedule",
    }}});
    let none = json!({"metadata": {"annotations": {"polis.internal/taints": null}}});
    // A report on the status may change annotations, too.
    for at in [path.clone(), format!("{path}/status")] {
        for change in [&names, &none] {
            let (status, said) = asks(&kubelet.api, Method::PATCH, &at, MERGE, change).await;
            let why = said["message"].as_str().unwrap_or_default();
            assert!(status == 403 && why.contains("does not change the annotation"), "{said}");
        }
    }
    let own = json!({"metadata": {"annotations": {"mine": "x"}}});
    assert_eq!(asks(&kubelet.api, Method::PATCH, &path, MERGE, &own).await.0, 200);
    assert_eq!(kubelet.reports().await.0, 200);

    record.taints.clear();
    controller.reports(kubelet.node, Some(record));
    let gone = |node: &Value| !has(node, &gpu);
    let node = becomes(master, &path, "the end of a taint", gone).await;
    assert!(has(&node, &mine), "{node}");
}

/// The program that enforces NetworkPolicies lists and watches three resources. The API server
/// checks the right before it looks for the object, so each of the others is forbidden.
async fn reads_what_a_policy_needs_and_no_more(policy: &Api) {
    for path in ["/api/v1/pods", "/api/v1/namespaces", POLICIES] {
        reads(policy, path).await;
        let watch = format!("{path}?watch=true&timeoutSeconds=1");
        assert_eq!(asks(policy, Method::GET, &watch, JSON, &Value::Null).await.0, 200, "{watch}");
    }
    let forbidden = [
        (Method::GET, "/api/v1/secrets"),
        (Method::GET, "/api/v1/secrets?watch=true&timeoutSeconds=1"),
        (Method::GET, "/api/v1/namespaces/default/secrets/s"),
        (Method::GET, "/api/v1/configmaps"),
        (Method::GET, "/api/v1/nodes"),
        (Method::GET, "/api/v1/services"),
        (Method::GET, "/api/v1/serviceaccounts"),
        (Method::GET, "/api/v1/namespaces/default/pods/p"),
        (Method::GET, "/api/v1/namespaces/default/pods/p/log"),
        (Method::POST, "/api/v1/namespaces/default/pods/p/exec?command=x"),
        (Method::DELETE, "/api/v1/namespaces/default/pods/p"),
        (Method::POST, "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"),
        (Method::DELETE, "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/p"),
    ];
    for (method, path) in forbidden {
        let answer = asks(policy, method.clone(), path, JSON, &Value::Null).await;
        assert_eq!(answer.0, 403, "{method} {path}: {}", answer.1);
    }
}
