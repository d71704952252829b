//! Claims get volumes on the node of their pod, grow, and give them back; the driver of a node
//! may do that and nothing else. The quota is in memory: `store` has the kernel's own.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use polis_base::files::Dir;
use polis_base::sys::quota::{Limits, Project, Usage};
use polis_runtime::event::until;
use polis_tests::{Story, patiently, story};
use polis_wire::identity::NodeId;
use polis_wire::node_roles::Role;
use polis_wire::pki::WorkerPurpose;
use polis_workload::Api;
use polis_workload::csi::{DRIVER, Disk, Provisioner, Publisher, Status, Store};
use polis_workload::host::quota::Projects;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::harness::{Running, supervise};
use crate::world::{Controller, SOON, becomes, worker_record};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads a_claim_gets_a_volume_on_its_node_and_gives_it_back).takes(40)];

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const CAPACITIES: &str = "/apis/storage.k8s.io/v1/namespaces/kube-system/csistoragecapacities";
const NODE_LABEL: &str = "kubernetes.io/hostname";
const FINALIZER: &str = "local.csi.polis.internal/content";
/// The UID of a claim that does not exist.
const UID: &str = "3b0a5f0e-7b1d-4c55-9a0e-2f6d1b8e4a77";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const GIB: u64 = 1 << 30;

/// A disk of 16 GiB, whose projects are kept in memory.
#[derive(Debug, Default)]
struct Memory {
    projects: Mutex<BTreeMap<u64, Project>>,
    limits: Mutex<BTreeMap<Project, Limits>>,
}

impl Projects for Memory {
    fn size(&self) -> io::Result<u64> {
        Ok(16 * GIB)
    }

    fn project(&self, directory: &Path) -> io::Result<Option<Project>> {
        let inode = directory.metadata()?.ino();
        Ok(self.projects.lock().unwrap().get(&inode).copied())
    }

    fn set_project(&self, directory: &Path, project: Project) -> io::Result<()> {
        let inode = directory.metadata()?.ino();
        self.projects.lock().unwrap().insert(inode, project);
        Ok(())
    }

    fn usage(&self, project: Project) -> io::Result<Option<Usage>> {
        let limits = self.limits.lock().unwrap().get(&project).copied();
        Ok(limits.map(|limits| Usage { bytes: 0, inodes: 1, limits }))
    }

    fn set_limits(&self, project: Project, limits: Limits) -> io::Result<()> {
        self.limits.lock().unwrap().insert(project, limits);
        Ok(())
    }
}

impl Disk for Memory {}

/// A node whose provisioner runs, and which shows its room.
struct Worker {
    node: NodeId,
    store: Store,
    running: [Running; 2],
}

impl Worker {
    async fn start(controller: &Controller) -> Self {
        let node = controller.machine.key.id();
        let roles = [Role::ConsensusMember, Role::KubernetesController, Role::KubernetesWorker];
        controller.reports(node, Some(worker_record(&roles)));
        let folder = controller.machine.root().data.volumes.path().to_owned();
        let store = Store::new(Dir::private(folder), Arc::new(Memory::default()));
        let status = watch::Sender::default();
        let mut seen = status.subscribe();
        let api = controller.worker(WorkerPurpose::Csi, node).await;
        let publisher = Publisher { api: api.clone(), node, store: store.clone() };
        let provisioner = Provisioner { api, node, store: store.clone(), status };
        let provisions = supervise("csi", move |ctx| provisioner.clone().run(ctx));
        let watching = until(&mut seen, "the provisioner", |status| {
            (*status == Status::Watching).then_some(())
        });
        patiently(SOON, watching).await.unwrap().unwrap();
        // As kubelet does, once the records give it the right to it.
        let name = node.to_string();
        let own = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": &name, "labels": {NODE_LABEL: &name}},
        });
        assert_eq!(controller.create("/api/v1/nodes", &own).await.status, 201);
        let shows = supervise("capacity", move |ctx| publisher.clone().run(ctx));
        Self { node, store, running: [provisions, shows] }
    }
}

/// The bytes of a quantity of whole MiB, as the API server writes it.
fn bytes(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap();
    let (number, unit) = match (text.strip_suffix("Gi"), text.strip_suffix("Mi")) {
        (Some(number), _) => (number, GIB),
        (None, Some(number)) => (number, 1 << 20),
        (None, None) => (text, 1),
    };
    number.parse::<u64>().unwrap() * unit
}

fn claim(name: &str, node: NodeId, size: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "annotations": {SELECTED_NODE: node.to_string()}},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        },
    })
}

async fn get(api: &Api, path: &str) -> Option<Value> {
    let answer = api.get(path).await.unwrap();
    (answer.status == 200).then(|| serde_json::from_slice(&answer.body).unwrap())
}

async fn a_claim_gets_a_volume_on_its_node_and_gives_it_back() {
    let controller = Controller::ready().await;
    let worker = Worker::start(&controller).await;
    let (node, master) = (worker.node, controller.master());
    let other = NodeId::from_public_key(&[5; 32]);
    let room = the_scheduler_sees_the_room(&controller, node).await;

    // The class is the one that claims without a class get.
    for (name, node, size) in
        [("data", node, "1Gi"), ("elsewhere", other, "1Gi"), ("huge", node, "1Ti")]
    {
        let made = controller.create(CLAIMS, &claim(name, node, size)).await;
        assert_eq!(made.status, 201, "{}", String::from_utf8_lossy(&made.body));
    }
    let path = format!("{CLAIMS}/data");
    let bound = |object: &Value| object["status"]["phase"] == "Bound";
    let data = becomes(&master, &path, "it to be bound", bound).await;
    assert_eq!(data["spec"]["storageClassName"], "local");
    assert_eq!(data["status"]["capacity"]["storage"], "1Gi");
    let name = data["spec"]["volumeName"].as_str().unwrap().to_owned();
    let volume_path = format!("{VOLUMES}/{name}");
    let volume = becomes(&master, &volume_path, "it to be bound", bound).await;
    assert_eq!(volume["spec"]["csi"]["driver"], DRIVER);
    let id = name.parse().unwrap();
    assert_eq!(worker.store.ids().unwrap(), [id]);
    let capacity = format!("{CAPACITIES}/{node}.local");
    let smaller = |object: &Value| bytes(&object["capacity"]) <= room - GIB;
    becomes(&master, &capacity, "the room without the volume", smaller).await;

    // It grows.
    let more = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
    let merge = [("content-type", "application/merge-patch+json")];
    let patch = more.to_string().into_bytes();
    let asked = master.request(Method::PATCH, &path, &merge, patch).await.unwrap();
    assert_eq!(asked.status, 200, "{}", String::from_utf8_lossy(&asked.body));
    let larger = |claim: &Value| claim["status"]["capacity"]["storage"] == "2Gi";
    becomes(&master, &path, "it to be larger", larger).await;
    let id = name.parse().unwrap();
    assert_eq!(worker.store.usage(&id).unwrap().unwrap().limits.bytes, 2 * GIB);

    the_owner_reads_why(&controller).await;
    // The scheduler may select another node for it.
    let released = |claim: &Value| claim["metadata"]["annotations"][SELECTED_NODE].is_null();
    let huge = becomes(&master, &format!("{CLAIMS}/huge"), "no node", released).await;
    assert_eq!(huge["metadata"]["name"], "huge");
    assert_eq!(huge["spec"]["resources"]["requests"]["storage"], "1Ti");
    it_may_do_nothing_else(&controller, node, other).await;
    it_shows_and_releases_its_own_alone(&controller, node, other).await;

    // Nothing was made for another node, or for what does not fit.
    assert_eq!(worker.store.ids().unwrap(), [name.parse().unwrap()]);

    // It goes with its claim, content and all.
    let content = controller.machine.root().data.volumes.path().join(&name);
    std::fs::write(content.join("content/file"), "words").unwrap();
    let gone = master.request(Method::DELETE, &path, &[], Vec::new()).await.unwrap();
    assert_eq!(gone.status, 200, "{}", String::from_utf8_lossy(&gone.body));
    becomes(&master, &volume_path, "its end", |object| object["code"] == 404).await;
    assert_eq!(worker.store.ids().unwrap(), []);
    for running in worker.running {
        running.supervisor.stop().await;
    }
    controller.stop().await;
}

/// Returns the room that the node shows for new volumes.
async fn the_scheduler_sees_the_room(controller: &Controller, node: NodeId) -> u64 {
    let (master, name) = (controller.master(), node.to_string());
    let driver = get(&master, &format!("/apis/storage.k8s.io/v1/csidrivers/{DRIVER}")).await;
    assert_eq!(driver.unwrap()["spec"]["storageCapacity"], true);
    let there = |object: &Value| object["kind"] == "CSIStorageCapacity";
    let path = format!("{CAPACITIES}/{name}.local");
    let shown = becomes(&master, &path, "the room of the node", there).await;
    assert_eq!(shown["storageClassName"], "local");
    assert_eq!(shown["nodeTopology"], json!({"matchLabels": {NODE_LABEL: &name}}));
    assert_eq!(shown["capacity"], shown["maximumVolumeSize"]);
    let owner = get(&master, &format!("/api/v1/nodes/{name}")).await.unwrap();
    assert_eq!(shown["metadata"]["ownerReferences"][0]["uid"], owner["metadata"]["uid"]);
    let room = bytes(&shown["capacity"]);
    assert!(room > 8 * GIB && room < 16 * GIB, "{room}");
    room
}

/// The driver of a node shows the room of no other one, and changes nothing of a claim but its
/// status and, where that is its own, the selected node.
async fn it_shows_and_releases_its_own_alone(controller: &Controller, node: NodeId, other: NodeId) {
    let driver = controller.api(WorkerPurpose::Csi.name());
    let capacity = |name: String, namespace: &str, of: NodeId| {
        json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIStorageCapacity",
            "metadata": {"name": name, "namespace": namespace},
            "nodeTopology": {"matchLabels": {NODE_LABEL: of.to_string()}},
            "storageClassName": "another",
            "capacity": "1Ti",
        })
    };
    let elsewhere = "/apis/storage.k8s.io/v1/namespaces/default/csistoragecapacities";
    let own = format!("{node}.another");
    let mut all_nodes = capacity(own.clone(), "kube-system", node);
    all_nodes["nodeTopology"] = json!({});
    let foreign = capacity(format!("{other}.another"), "kube-system", other);
    assert_eq!(controller.create(CAPACITIES, &foreign).await.status, 201);
    let json = [("content-type", "application/json")];
    let make = async |path: &str, object: &Value| {
        let body = object.to_string().into_bytes();
        driver.request(Method::POST, path, &json, body).await.unwrap().status
    };
    for (what, path, object) in [
        ("of another node", CAPACITIES, capacity(format!("{other}.b"), "kube-system", other)),
        ("by another name", CAPACITIES, capacity(format!("{node}.b"), "kube-system", node)),
        ("about another node", CAPACITIES, capacity(own.clone(), "kube-system", other)),
        ("about all nodes", CAPACITIES, all_nodes),
        ("in another namespace", elsewhere, capacity(own.clone(), "default", node)),
    ] {
        assert_eq!(make(path, &object).await, 403, "{what}");
    }
    assert_eq!(make(CAPACITIES, &capacity(own, "kube-system", node)).await, 201);

    let merge = [("content-type", "application/merge-patch+json")];
    let change = async |path: String, change: Value| {
        let body = change.to_string().into_bytes();
        driver.request(Method::PATCH, &path, &merge, body).await.unwrap().status
    };
    let less = json!({"capacity": "1Gi"});
    assert_eq!(change(format!("{CAPACITIES}/{other}.another"), less.clone()).await, 403);
    assert_eq!(change(format!("{CAPACITIES}/{node}.another"), less).await, 200);
    let none = json!({"metadata": {"annotations": {SELECTED_NODE: null}}});
    let status = |name: &str| format!("{CLAIMS}/{name}/status");
    assert_eq!(change(status("elsewhere"), none.clone()).await, 403);
    for (what, changed) in [
        ("a label", json!({"metadata": {"labels": {"taken": "yes"}}})),
        ("the finalizers", json!({"metadata": {"finalizers": null}})),
        ("another annotation", json!({"metadata": {"annotations": {"taken": "yes"}}})),
        ("all annotations", json!({"metadata": {"annotations": null}})),
        ("the node", json!({"metadata": {"annotations": {SELECTED_NODE: other.to_string()}}})),
    ] {
        assert_eq!(change(status("data"), changed).await, 403, "{what}");
    }
    // Both ways it may: the same status again, and no selected node.
    let same = json!({"status": {"capacity": {"storage": "2Gi"}}});
    assert_eq!(change(status("data"), same).await, 200);
    assert_eq!(change(status("data"), none).await, 200);
}

async fn the_owner_reads_why(controller: &Controller) {
    let path = "/api/v1/namespaces/default/events?fieldSelector=reason=NoRoom";
    let told = |list: &Value| list["items"].as_array().is_some_and(|items| !items.is_empty());
    let list = becomes(&controller.master(), path, "an event", told).await;
    let event = &list["items"][0];
    assert_eq!(event["involvedObject"]["name"], "huge");
    let message = event["message"].as_str().unwrap();
    println!("{message}");
    assert!(message.contains("does not fit") && message.contains("remove volumes"), "{message}");
}

/// The driver of a node, on the objects of others.
async fn it_may_do_nothing_else(controller: &Controller, node: NodeId, other: NodeId) {
    let driver = controller.api(WorkerPurpose::Csi.name());
    let master = controller.master();
    let volume = |name: &str, node: NodeId, source: Value| {
        let here = json!({
            "key": "kubernetes.io/hostname", "operator": "In", "values": [node.to_string()],
        });
        let mut volume = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "storageClassName": "none",
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        });
        for (field, value) in source.as_object().unwrap() {
            volume["spec"][field.as_str()] = value.clone();
        }
        volume
    };
    let csi = |name: &str, driver: &str| json!({"csi": {"driver": driver, "volumeHandle": name}});
    let foreign = volume("foreign", other, csi("foreign", DRIVER));
    assert_eq!(controller.create(VOLUMES, &foreign).await.status, 201);
    // For a claim that others have, and one that is taken from it.
    let claimed = |name: &str, uid: &str| {
        let mut source = csi(name, DRIVER);
        let claim = json!({"namespace": "default", "name": "elsewhere", "uid": uid});
        source["claimRef"] = claim;
        volume(name, node, source)
    };
    let bound = claimed(&format!("pvc-{UID}"), UID);
    policy_is_effective(&driver, &bound).await;

    let json = [("content-type", "application/json")];
    let merge = [("content-type", "application/merge-patch+json")];
    let taken = json!({"metadata": {"labels": {"taken": "yes"}}});
    let larger = json!({"status": {"capacity": {"storage": "9Gi"}}});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    let (post, patch) = (Method::POST, Method::PATCH);
    let nothing = Value::Null;
    let path_of_host = volume("host", node, json!({"hostPath": {"path": "/"}}));
    let other_driver = volume("driver", node, csi("driver", "other.example"));
    let other_handle = volume("handle", node, csi("pvc-of-another", DRIVER));
    let other_claim = claimed("pvc-other", UID);
    let no_claim = volume("unclaimed", node, csi("unclaimed", DRIVER));
    for (method, path, body) in [
        (Method::GET, "/api/v1/secrets", &nothing),
        (Method::GET, "/api/v1/nodes", &nothing),
        (Method::GET, "/api/v1/pods", &nothing),
        (Method::DELETE, "/api/v1/namespaces/default/persistentvolumeclaims/data", &nothing),
        (patch.clone(), "/api/v1/namespaces/default/persistentvolumeclaims/data", &larger),
        (
            patch.clone(),
            "/api/v1/namespaces/default/persistentvolumeclaims/elsewhere/status",
            &larger,
        ),
        (post.clone(), "/api/v1/namespaces/default/pods", &pod),
        (post.clone(), VOLUMES, &path_of_host),
        (post.clone(), VOLUMES, &other_driver),
        (post.clone(), VOLUMES, &other_handle),
        (post.clone(), VOLUMES, &other_claim),
        (post.clone(), VOLUMES, &no_claim),
        (post.clone(), VOLUMES, &volume("second", other, csi("second", DRIVER))),
        (patch.clone(), "/api/v1/persistentvolumes/foreign", &taken),
        (Method::DELETE, "/api/v1/persistentvolumes/foreign", &nothing),
        (Method::DELETE, "/api/v1/persistentvolumes", &nothing),
        (Method::GET, "/apis/rbac.authorization.k8s.io/v1/clusterroles", &nothing),
    ] {
        let kind = if method == patch { &merge } else { &json };
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let answer = driver.request(method.clone(), path, kind, body).await.unwrap();
        let said = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, 403, "{method} {path}: {said}");
    }
    assert!(get(&master, "/api/v1/persistentvolumes/foreign").await.is_some());
    // Its own, it may make and remove.
    let mut own = bound;
    own["metadata"]["finalizers"] = json!(["example.com/of-others", FINALIZER]);
    let body = own.to_string().into_bytes();
    let made = driver.request(post, VOLUMES, &json, body).await.unwrap();
    assert_eq!(made.status, 201, "{}", String::from_utf8_lossy(&made.body));
    let path = format!("{VOLUMES}/pvc-{UID}");
    let change = async |change: Value| {
        let body = change.to_string().into_bytes();
        driver.request(Method::PATCH, &path, &merge, body).await.unwrap().status
    };
    // Of one that exists, it changes the size, and its own finalizer.
    for (refused, change_of) in [
        ("the claim", json!({"spec": {"claimRef": {"uid": "another"}}})),
        ("no claim", json!({"spec": {"claimRef": null}})),
        ("the policy", json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}})),
        ("the class", json!({"spec": {"storageClassName": "local"}})),
        ("the options", json!({"spec": {"mountOptions": ["noexec"]}})),
        ("a finalizer", json!({"metadata": {"finalizers": [FINALIZER]}})),
        ("all finalizers", json!({"metadata": {"finalizers": null}})),
    ] {
        assert_eq!(change(change_of).await, 403, "{refused}");
    }
    assert_eq!(change(json!({"spec": {"capacity": {"storage": "2Gi"}}})).await, 200);
    // The API server may have added one of its own to those of others.
    let present = get(&master, &path).await.unwrap()["metadata"]["finalizers"].clone();
    let others: Vec<_> =
        present.as_array().unwrap().iter().filter(|one| **one != FINALIZER).cloned().collect();
    assert_eq!(change(json!({"metadata": {"finalizers": others}})).await, 200);
    let gone = driver.request(Method::DELETE, &path, &[], Vec::new()).await.unwrap();
    assert_eq!(gone.status, 200, "{}", String::from_utf8_lossy(&gone.body));
}

/// Waits until the API server holds the driver to its node: it reads a new policy within some
/// seconds. The volume is one that the driver may make, with another name.
async fn policy_is_effective(driver: &Api, volume: &Value) {
    let mut other = volume.clone();
    other["metadata"]["name"] = json!("pvc-without-claim");
    let body = other.to_string().into_bytes();
    let path = format!("{VOLUMES}?dryRun=All");
    let json = [("content-type", "application/json")];
    let refused = async {
        loop {
            let answer = driver.request(Method::POST, &path, &json, body.clone()).await.unwrap();
            match answer.status {
                403 => return,
                201 => tokio::time::sleep(Duration::from_millis(100)).await,
                other => panic!("{other}: {}", String::from_utf8_lossy(&answer.body)),
            }
        }
    };
    let refused = patiently(SOON, refused).await;
    refused.expect("the policy polis-csi-volumes refuses nothing");
}
