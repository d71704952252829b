//! The scheduler sees the room that there is, by few requests.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::csi::claims::tests::{UID, class_object, node};
use crate::csi::cluster::fake_server::Objects;
use crate::csi::store::tests::{Fake, store};
use crate::csi::{DRIVER, Swept, VolumeId};

const GIB: u64 = 1 << 30;

struct World {
    _folder: tempfile::TempDir,
    disk: Arc<Fake>,
    server: Objects,
    store: Store,
    room: Room<Objects>,
}

impl World {
    /// A node with the class `local`, whose Node kubelet has not registered yet.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let disk = Fake::new();
        let server = Objects::new(&disk);
        let store = store(folder.path(), &disk);
        let mut room = Room::new(Cluster(server.clone()), node(), store.clone());
        assert!(room.event(&Event::Is(class_object())));
        Self { _folder: folder, disk, server, store, room }
    }

    /// The same, and the Node is there.
    fn registered() -> Self {
        let world = Self::new();
        let owner = json!({"metadata": {"uid": "uid-of-the-node"}});
        world.server.put(&format!("/api/v1/nodes/{}", node()), owner);
        world
    }

    /// Looks at the disk; returns the methods of the requests.
    async fn look(&mut self) -> Vec<String> {
        self.room.look().await.unwrap();
        let asked = self.server.asked();
        asked.iter().map(|one| one.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    /// Makes a volume of 1 GiB.
    fn make(&self) -> VolumeId {
        let id = format!("pvc-{UID}").parse().unwrap();
        self.store.make(&id, "default/data", GIB).unwrap();
        id
    }

    fn path(class: &str) -> String {
        let namespace = "/apis/storage.k8s.io/v1/namespaces/kube-system";
        format!("{namespace}/csistoragecapacities/{}.{class}", node())
    }

    /// The room that the object of a class shows.
    fn shown(&self, class: &str) -> Option<u64> {
        self.server.get(&Self::path(class)).map(|object| claims::shown(&object))
    }

    /// In whole steps, as it is shown at first.
    fn steps(&self) -> u64 {
        let room = self.store.room().unwrap();
        room - room % STEP
    }
}

fn class(name: &str, provisioner: &str) -> Value {
    let mut object = class_object();
    object["metadata"]["name"] = json!(name);
    object["provisioner"] = json!(provisioner);
    object
}

#[tokio::test]
async fn the_scheduler_sees_the_room_as_volumes_come_grow_and_go() {
    let mut world = World::registered();
    assert_eq!(world.look().await, ["GET", "GET", "POST"]);
    let first = world.shown("local").unwrap();
    assert_eq!(first, world.steps());
    let id = world.make();
    assert_eq!(world.look().await, ["PATCH"]);
    assert_eq!(world.shown("local"), Some(world.steps()));
    world.store.enlarge(&id, 2 * GIB).unwrap();
    assert_eq!(world.look().await, ["PATCH"]);
    let two = world.shown("local").unwrap();
    assert_eq!(two, world.steps());
    assert!(two < first - GIB, "{two} of {first}");
    assert_eq!(world.look().await, [""; 0], "nothing has changed");
    world.store.trash(&id).unwrap();
    while world.store.sweep().unwrap() == Swept::Part {}
    assert_eq!(world.look().await, ["PATCH"]);
    assert_eq!(world.shown("local"), Some(first));
    // Images take it, too.
    world.disk.workloads_use(8 * GIB, 0);
    assert_eq!(world.look().await, ["PATCH"]);
    assert!(world.shown("local").unwrap() < first - 4 * GIB);
}

#[test]
fn less_room_is_shown_at_once_and_little_more_is_not() {
    assert_eq!(differs(None, 0), Some(0));
    assert_eq!(differs(None, 3 * STEP + 1), Some(3 * STEP));
    assert_eq!(differs(Some(3 * STEP), 3 * STEP - 1), Some(2 * STEP));
    for room in [3 * STEP, 4 * STEP, 5 * STEP - 1] {
        assert_eq!(differs(Some(3 * STEP), room), None, "{room}");
    }
    assert_eq!(differs(Some(3 * STEP), 5 * STEP), Some(5 * STEP));
    assert_eq!(differs(Some(0), STEP - 1), None);
}

#[tokio::test]
async fn the_room_waits_for_the_node_and_is_shown_again_if_its_object_goes() {
    let mut world = World::new();
    assert_eq!(world.look().await, ["GET", "GET"]);
    assert_eq!(world.shown("local"), None);
    let owner = json!({"metadata": {"uid": "uid-of-the-node"}});
    world.server.put(&format!("/api/v1/nodes/{}", node()), owner);
    assert_eq!(world.look().await, ["GET", "GET", "POST"]);
    let path = World::path("local");
    let made = world.server.get(&path).unwrap();
    assert_eq!(made["metadata"]["ownerReferences"][0]["uid"], "uid-of-the-node");
    // The next look after a change finds that it is gone, and the one after that makes it.
    world.server.all().remove(&path);
    world.make();
    assert_eq!(world.look().await, ["PATCH"]);
    assert_eq!(world.look().await, ["GET", "GET", "POST"]);
    assert_eq!(world.shown("local"), Some(world.steps()));
    // A driver that starts again reads what it has shown.
    world.room = Room::new(Cluster(world.server.clone()), node(), world.store.clone());
    assert!(world.room.event(&Event::Is(class_object())));
    assert_eq!(world.look().await, ["GET"]);
}

/// The scheduler asks for the room by class: pods with a class without an object would wait.
#[tokio::test]
async fn each_class_of_the_driver_has_an_object_and_no_other() {
    let mut world = World::registered();
    assert!(world.room.event(&Event::Is(class("kept", DRIVER))));
    assert!(!world.room.event(&Event::Is(class("kept", DRIVER))), "it is known");
    assert!(!world.room.event(&Event::Is(class("foreign", "other.example"))));
    assert!(!world.room.event(&Event::Is(class(&"a".repeat(253), DRIVER))), "the name is too long");
    assert!(!world.room.event(&Event::Is(json!({}))));
    world.look().await;
    assert_eq!(world.shown("kept"), Some(world.steps()));
    assert_eq!(world.shown("kept"), world.shown("local"));
    assert_eq!(world.shown("foreign"), None);
    // One that is gone is not followed any more.
    assert!(!world.room.event(&Event::Gone(class("kept", DRIVER))));
    world.make();
    assert_eq!(world.look().await, ["PATCH"]);
}
