//! Claims get their volumes, and lose them, whatever step the power fails after.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::csi::claims::tests::{UID, claim_object, class_object, node};
use crate::csi::cluster::VOLUMES;
use crate::csi::cluster::fake_server::Objects;
use crate::csi::names::SELECTED_NODE;
use crate::csi::store::tests::{Fake, store};
use crate::csi::{DRIVER, Swept};

const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";
const CLASS: &str = "/apis/storage.k8s.io/v1/storageclasses/local";

struct World {
    folder: tempfile::TempDir,
    disk: Arc<Fake>,
    server: Objects,
    store: Store,
    pass: Pass<Objects>,
    volume: String,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let disk = Fake::new();
        let server = Objects::new(&disk);
        server.put(CLASS, class_object());
        let store = store(folder.path(), &disk);
        let pass = Pass::new(Cluster(server.clone()), node(), store.clone());
        let volume = format!("{VOLUMES}/pvc-{UID}");
        Self { folder, disk, server, store, pass, volume }
    }

    /// Shows the object to a provisioner that has just started, and whose power fails after
    /// so many steps; returns whether it came to its end.
    async fn shown(&self, path: &str, steps: Option<u32>) -> bool {
        self.disk.cut_after(steps);
        let mut pass = Pass::new(Cluster(self.server.clone()), node(), self.store.clone());
        let object = self.server.get(path).unwrap_or_default();
        let done = match pass.claim(&object).or_else(|| pass.volume(&object)) {
            Some(Item::Claim(claim)) => pass.serve(&claim).await.is_ok(),
            Some(Item::Volume(volume)) => pass.keep(&volume).await.is_ok(),
            None => true,
        };
        self.disk.cut_after(None);
        done
    }

    /// The object at `path` of the world that `prepare` makes is shown with a power cut after
    /// each number of steps in turn, and after the last one. The cut takes each number of
    /// changes back that the disk had not flushed, and the node starts again. Returns the
    /// steps without a cut.
    async fn with_cuts(prepare: impl AsyncFn() -> Self, path: &str, check: impl Fn(&Self)) -> u32 {
        let (mut steps, mut lost) = (0, 0);
        while steps < 100 {
            let world = prepare().await;
            let before = world.disk.unflushed();
            let done = world.shown(path, Some(steps)).await;
            let unflushed = world.disk.unflushed();
            let at = format!("cut off after {steps} steps, {lost} of {unflushed} changes lost");
            world.disk.lose(lost);
            world.started().await;
            check(&world);
            assert!(before == 0, "the world is on the disk: {at}");
            if lost < unflushed {
                lost += 1;
            } else if done {
                return steps;
            } else {
                (steps, lost) = (steps + 1, 0);
            }
        }
        panic!("it never ends");
    }

    /// A node that has started looks at every object, until nothing waits.
    async fn started(&self) {
        let mut pass = Pass::new(Cluster(self.server.clone()), node(), self.store.clone());
        pass.tidy().await.unwrap();
        for (kind, path) in [(Kind::Claim, CLAIM), (Kind::Volume, self.volume.as_str())] {
            let object = self.server.get(path).unwrap_or_default();
            if let Some(item) = pass.read(kind, &object) {
                pass.item(item).await;
            }
        }
        assert!(pass.waiting.is_empty(), "{:?}", pass.waiting);
    }

    /// A world with a claim.
    fn asked() -> Self {
        let world = Self::new();
        world.server.put(CLAIM, claim_object("1Gi"));
        world
    }

    /// The same, and the claim has its volume.
    async fn bound() -> Self {
        let mut world = Self::asked();
        world.claim().await.unwrap();
        world.bind();
        world
    }

    async fn claim(&mut self) -> Result<Served, Error> {
        let object = self.server.get(CLAIM).unwrap();
        let Some(Item::Claim(claim)) = self.pass.claim(&object) else { panic!("{object}") };
        self.pass.serve(&claim).await
    }

    /// The scheduler selects this node for a claim of this size, which does not fit.
    async fn refused(&mut self, size: &str) {
        self.server.put(CLAIM, claim_object(size));
        assert_eq!(self.claim().await.unwrap(), Served::Done);
        assert_eq!(self.selected(), Value::Null);
    }

    /// The node that the scheduler selected for the claim.
    fn selected(&self) -> Value {
        self.server.get(CLAIM).unwrap()["metadata"]["annotations"][SELECTED_NODE].clone()
    }

    /// The steps of Kubernetes with a volume and its claim.
    fn bind(&self) {
        let mut claim = self.server.get(CLAIM).unwrap();
        let mut volume = self.server.get(&self.volume).unwrap();
        claim["spec"]["volumeName"] = volume["metadata"]["name"].clone();
        claim["status"] = json!({"phase": "Bound", "capacity": volume["spec"]["capacity"]});
        volume["status"] = json!({"phase": "Bound"});
        self.server.put(CLAIM, claim);
        self.server.put(&self.volume, volume);
    }

    fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        change(self.server.all().get_mut(path).unwrap());
    }

    fn reported(&self) -> Vec<String> {
        let events = self.server.events.lock().unwrap();
        events.iter().map(|one| one["message"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test]
async fn a_claim_gets_one_volume_whatever_step_the_power_fails_after() {
    let steps = World::with_cuts(
        async || World::asked(),
        CLAIM,
        |world| {
            let object = world.server.get(&world.volume).unwrap();
            assert_eq!(object["spec"]["capacity"]["storage"], "1024Mi");
            assert_eq!(object["spec"]["claimRef"]["uid"], UID);
            assert_eq!(world.store.ids().unwrap().len(), 1);
            assert_eq!(world.reported(), [""; 0]);
        },
    );
    assert_eq!(steps.await, 13);
}

#[tokio::test]
async fn an_object_is_made_only_when_its_volume_survives_a_power_cut() {
    let mut made = 0;
    for steps in 0..13 {
        let world = World::asked();
        assert!(!world.shown(CLAIM, Some(steps)).await);
        if world.server.get(&world.volume).is_some() {
            made += 1;
            assert_eq!(world.disk.unflushed(), 0, "after {steps} steps");
            assert!(world.store.usage(&format!("pvc-{UID}").parse().unwrap()).unwrap().is_some());
        }
    }
    assert_eq!(made, 1, "its answer is the last step");
}

#[tokio::test]
async fn a_released_volume_goes_whatever_step_the_power_fails_after() {
    let id: VolumeId = format!("pvc-{UID}").parse().unwrap();
    let path = format!("{VOLUMES}/pvc-{UID}");
    let released = async || {
        let world = World::bound().await;
        std::fs::write(world.store.content(&id).join("file"), "words").unwrap();
        // Bound, it stays, also when somebody deletes its object.
        world.change(&path, |object| object["metadata"]["deletionTimestamp"] = json!("now"));
        assert!(world.shown(&path, None).await);
        assert!(world.store.content(&id).join("file").is_file());
        world.change(&path, |object| {
            object["metadata"]["deletionTimestamp"] = json!(null);
            object["status"]["phase"] = json!("Released");
        });
        world.server.all().remove(CLAIM);
        world
    };
    let steps = World::with_cuts(released, &path, |world| {
        assert_eq!(world.server.get(&path), None);
        assert_eq!(world.store.ids().unwrap(), []);
    });
    assert_eq!(steps.await, 8);
}

#[tokio::test]
async fn an_event_of_the_past_removes_nothing() {
    let mut world = World::new();
    world.server.put(CLAIM, claim_object("1Gi"));
    world.claim().await.unwrap();
    let mut released = world.server.get(&world.volume).unwrap();
    released["status"] = json!({"phase": "Released"});
    let volume = Volume::read(&released, node()).unwrap();
    // Meanwhile the policy has changed to Retain, or another object has the name.
    for (field, value) in [
        ("/spec/persistentVolumeReclaimPolicy", json!("Retain")),
        ("/metadata/uid", json!("another")),
    ] {
        let mut now = released.clone();
        *now.pointer_mut(field).unwrap() = value;
        world.server.put(&world.volume, now);
        world.pass.keep(&volume).await.unwrap();
        assert_eq!(world.store.ids().unwrap().len(), 1, "{field}");
        assert!(world.server.get(&world.volume).is_some());
    }
}

#[tokio::test]
async fn a_retained_volume_keeps_its_content_without_its_object() {
    let mut world = World::new();
    world.server.put(CLAIM, claim_object("1Gi"));
    world.claim().await.unwrap();
    world.change(&world.volume.clone(), |object| {
        object["status"] = json!({"phase": "Released"});
        object["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
    });
    assert!(world.shown(&world.volume, None).await);
    assert!(world.server.get(&world.volume).is_some());
    world.change(&world.volume.clone(), |object| {
        object["metadata"]["deletionTimestamp"] = json!("now");
    });
    assert!(world.shown(&world.volume, None).await);
    assert_eq!(world.server.get(&world.volume), None);
    assert_eq!(world.store.ids().unwrap().len(), 1);
}

#[tokio::test]
async fn a_claim_that_asks_for_more_gets_it_whatever_step_the_power_fails_after() {
    let id: VolumeId = format!("pvc-{UID}").parse().unwrap();
    let path = format!("{VOLUMES}/pvc-{UID}");
    let asks = async || {
        let mut world = World::bound().await;
        assert_eq!(world.claim().await.unwrap(), Served::Done);
        world.change(CLAIM, |object| {
            object["spec"]["resources"]["requests"]["storage"] = json!("2Gi");
        });
        world
    };
    let steps = World::with_cuts(&asks, CLAIM, |world| {
        assert_eq!(world.store.usage(&id).unwrap().unwrap().limits.bytes, 2 << 30);
        let object = world.server.get(&path).unwrap();
        assert_eq!(object["spec"]["capacity"]["storage"], "2048Mi");
        assert_eq!(world.server.get(CLAIM).unwrap()["status"]["capacity"]["storage"], "2048Mi");
    });
    assert_eq!(steps.await, 8);
    // The disk has lost the new size: the object says what it has to be.
    let world = asks().await;
    world.change(&path, |object| object["spec"]["capacity"]["storage"] = json!("3Gi"));
    assert!(world.shown(&path, None).await);
    assert_eq!(world.store.usage(&id).unwrap().unwrap().limits.bytes, 3 << 30);
}

#[tokio::test(start_paused = true)]
async fn the_owner_of_a_claim_reads_why_it_waits_and_what_would_help() {
    let mut world = World::new();
    world.refused("100Gi").await;
    world.refused("100Gi").await;
    let reported = world.reported();
    assert_eq!(reported.len(), 1, "it is reported once");
    assert!(reported[0].contains("102400Mi does not fit on node polis-"), "{reported:?}");
    assert!(reported[0].contains("the data partition has 0 MiB left"), "{reported:?}");
    assert!(reported[0].contains("remove volumes or images from that node"), "{reported:?}");
    tokio::time::advance(REPORT_AGAIN).await;
    world.refused("100Gi").await;
    assert_eq!(world.reported().len(), 2, "events end");
    world.server.put(CLAIM, claim_object("1Zi"));
    assert_eq!(world.claim().await.unwrap(), Served::Done);
    assert!(world.reported()[2].contains("\"1Zi\" cannot be used"), "{:?}", world.reported());
    assert_eq!(world.store.ids().unwrap(), []);
    let event = world.server.events.lock().unwrap()[0].clone();
    assert_eq!(event["involvedObject"]["uid"], UID);
    assert_eq!(
        (&event["type"], &event["source"]["component"]),
        (&json!("Warning"), &json!(DRIVER))
    );
}

#[tokio::test(start_paused = true)]
async fn figures_that_change_while_a_claim_waits_make_no_other_event() {
    let mut world = World::asked();
    let other: VolumeId = "pvc-11111111-7b1d-4c55-9a0e-2f6d1b8e4a77".parse().unwrap();
    world.store.make(&other, "default/other", 1 << 30).unwrap();
    for mib in 0..3 {
        world.disk.workloads_use((10 << 30) + (mib << 20), 0);
        world.refused("1Gi").await;
    }
    let reported = world.reported();
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(reported[0].contains("images and containers use 10240 MiB already"), "{reported:?}");
    // Another size is another question.
    world.refused("2Gi").await;
    assert_eq!(world.reported().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_does_not_fit_is_selected_for_another_node_unless_it_has_changed() {
    let mut world = World::new();
    world.refused("100Gi").await;
    assert!(world.reported()[0].contains("the scheduler selects a node again"));
    let object = world.server.get(CLAIM).unwrap();
    assert_eq!(object["spec"], claim_object("100Gi")["spec"]);
    assert_eq!(world.pass.waiting.len(), 0);
    assert!(world.pass.claim(&object).is_none(), "it is no matter of this node any more");
    // A newer state of the claim is an event of its own.
    let before = claim_object("100Gi");
    let Some(Item::Claim(claim)) = world.pass.claim(&before) else { panic!("{before}") };
    let mut now = before;
    now["metadata"]["resourceVersion"] = json!("2");
    world.server.put(CLAIM, now);
    assert_eq!(world.pass.serve(&claim).await.unwrap(), Served::Done);
    assert_eq!(world.selected(), json!(node().to_string()));
    // One with a volume stays on its node, and waits for room.
    let mut world = World::bound().await;
    world.change(CLAIM, |object| {
        object["spec"]["resources"]["requests"]["storage"] = json!("100Gi");
    });
    assert_eq!(world.claim().await.unwrap(), Served::Later);
    assert_eq!(world.selected(), json!(node().to_string()));
    assert!(world.reported()[0].contains("the volume grows as soon as there is room"));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_gone_is_forgotten_although_it_asks_for_nothing() {
    // One that the server refuses, and one that has to change.
    for (size, waiting) in [("1Gi", 1), ("1Zi", 0)] {
        let mut world = World::new();
        *world.server.refusal.lock().unwrap() = Some(422);
        let mut object = claim_object(size);
        world.pass.event(Kind::Claim, Event::Is(object.clone())).await;
        assert_eq!((world.pass.waiting.len(), world.pass.reported.len()), (waiting, 1), "{size}");
        object["metadata"]["deletionTimestamp"] = json!("now");
        world.pass.event(Kind::Claim, Event::Is(object.clone())).await;
        world.pass.event(Kind::Claim, Event::Gone(object)).await;
        assert_eq!((world.pass.waiting.len(), world.pass.reported.len()), (0, 0), "{size}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_that_cannot_be_remembered_is_made_once_there_is_room() {
    let mut world = World::new();
    for number in 0..REPORTED_MAX {
        let id = format!("pvc-{number:08x}-7b1d-4c55-9a0e-2f6d1b8e4a77").parse().unwrap();
        world.pass.reported.insert(id, ("no room".to_owned(), Instant::now()));
    }
    for _attempt in 0..3 {
        world.refused("100Gi").await;
    }
    assert_eq!(world.reported(), [""; 0]);
    assert_eq!(world.pass.reported.len(), REPORTED_MAX);
    // The earlier events have ended.
    tokio::time::advance(REPORT_AGAIN).await;
    for _attempt in 0..3 {
        world.refused("100Gi").await;
    }
    assert_eq!(world.reported().len(), 1, "{:?}", world.reported());
    assert_eq!(world.pass.reported.len(), 1);
}

#[tokio::test]
async fn a_claim_of_another_class_is_left_to_its_driver() {
    let mut world = World::new();
    world.server.put(CLAIM, claim_object("1Gi"));
    world.change(CLASS, |class| class["provisioner"] = json!("other.example"));
    assert_eq!(world.claim().await.unwrap(), Served::Done);
    world.server.all().remove(CLASS);
    assert_eq!(world.claim().await.unwrap(), Served::Done);
    assert_eq!(world.store.ids().unwrap(), []);
    assert_eq!(world.reported(), [""; 0]);
}

#[tokio::test]
async fn an_empty_volume_that_nothing_asks_for_is_removed_and_no_other() {
    let mut world = World::new();
    world.server.put(CLAIM, claim_object("1Gi"));
    world.claim().await.unwrap();
    // With its object, and with its claim, it stays.
    world.pass.tidy().await.unwrap();
    world.server.all().remove(&world.volume);
    world.pass.tidy().await.unwrap();
    assert_eq!(world.store.ids().unwrap().len(), 1);
    // Another claim of the same name is not its claim.
    world.change(CLAIM, |claim| {
        claim["metadata"]["uid"] = json!("11111111-7b1d-4c55-9a0e-2f6d1b8e4a77");
    });
    let id: VolumeId = format!("pvc-{UID}").parse().unwrap();
    std::fs::write(world.store.content(&id).join("file"), "").unwrap();
    world.pass.tidy().await.unwrap();
    assert_eq!(world.store.ids().unwrap().len(), 1, "it has content");
    std::fs::remove_file(world.store.content(&id).join("file")).unwrap();
    world.pass.tidy().await.unwrap();
    assert_eq!(world.store.ids().unwrap(), []);
}

/// A claim that gets its volume, loses its power at each moment, and is deleted then, leaves
/// nothing: neither a directory, nor a project with files, nor less room for others.
#[tokio::test]
async fn a_claim_that_is_deleted_after_a_power_cut_leaves_nothing() {
    let (mut steps, mut lost) = (0, 0);
    let mut moments = 0;
    loop {
        let world = World::asked();
        let done = world.shown(CLAIM, Some(steps)).await;
        let unflushed = world.disk.unflushed();
        world.disk.lose(lost);
        // Kubernetes removes a claim without a volume at once, and releases a volume.
        world.server.all().remove(CLAIM);
        if world.server.get(&world.volume).is_some() {
            world.change(&world.volume, |object| object["status"] = json!({"phase": "Released"}));
        }
        world.started().await;
        let mut sweeps = 0;
        while world.store.sweep().unwrap() == Swept::Part {
            sweeps += 1;
            assert!(sweeps < 100);
        }
        let at = format!("{steps} steps, {lost} of {unflushed} changes lost");
        assert_eq!(world.server.get(&world.volume), None, "{at}");
        let left = std::fs::read_dir(world.folder.path().join("volumes"));
        assert_eq!(left.map_or(0, Iterator::count), 0, "{at}");
        // Another claim gets all the room there is.
        let whole = World::new();
        let id: VolumeId = format!("pvc-{UID}").parse().unwrap();
        let most = 10 << 30;
        whole.store.make(&id, "default/data", most).unwrap();
        world.store.make(&id, "default/data", most).unwrap();
        moments += 1;
        if lost < unflushed {
            lost += 1;
        } else if done {
            break;
        } else {
            (steps, lost) = (steps + 1, 0);
        }
    }
    assert!(moments > 13, "{moments}");
}

#[tokio::test(start_paused = true)]
async fn the_owner_of_a_claim_reads_once_that_the_server_refuses_its_volume() {
    let mut world = World::asked();
    let object = world.server.get(CLAIM).unwrap();
    *world.server.refusal.lock().unwrap() = Some(422);
    for _attempt in 0..3 {
        let item = world.pass.claim(&object).unwrap();
        world.pass.item(item).await;
        world.pass.again().await;
        // The cause of the last attempt is known, so it is not logged again.
        let waiting = world.pass.waiting.values_mut().next().unwrap();
        assert!(!waiting.cause.is_new("127.0.0.1:1 answers 422: no"), "{waiting:?}");
    }
    let reported = world.reported();
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(
        reported[0].contains("answers 422: no") && reported[0].contains("tries again"),
        "{reported:?}"
    );
    // It serves again.
    *world.server.refusal.lock().unwrap() = None;
    world.pass.again().await;
    assert!(world.pass.waiting.is_empty());
    assert!(world.server.get(&world.volume).is_some());
    // A busy server does not concern the owner.
    let mut world = World::asked();
    *world.server.refusal.lock().unwrap() = Some(503);
    let item = world.pass.claim(&object).unwrap();
    world.pass.item(item).await;
    assert_eq!(world.reported(), [""; 0]);
    assert_eq!(world.pass.waiting.len(), 1);
}

/// As docs/volumes.md has it: by the policy of its object, or, once that is gone, by another
/// object of its name.
#[tokio::test]
async fn a_retained_volume_is_removed_once_an_operator_says_so() {
    for gone in [false, true] {
        let mut world = World::asked();
        world.claim().await.unwrap();
        let path = world.volume.clone();
        world.change(&path, |object| {
            object["status"] = json!({"phase": "Released"});
            object["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
        });
        let mut object = world.server.get(&path).unwrap();
        if gone {
            world.change(&path, |object| object["metadata"]["deletionTimestamp"] = json!("now"));
            assert!(world.shown(&path, None).await);
            assert_eq!(world.server.get(&path), None);
            object["metadata"]["uid"] = json!("another");
            object["metadata"]["deletionTimestamp"] = json!("now");
            object["spec"]["claimRef"] = Value::Null;
            object["status"]["phase"] = json!("Available");
        }
        assert_eq!(world.store.ids().unwrap().len(), 1);
        object["spec"]["persistentVolumeReclaimPolicy"] = json!("Delete");
        world.server.put(&path, object);
        assert!(world.shown(&path, None).await);
        assert_eq!(world.server.get(&path), None);
        assert_eq!(world.store.ids().unwrap(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn claims_that_wait_leave_time_for_the_events_of_others() {
    const COUNT: usize = 25;
    let mut world = World::new();
    *world.server.refusal.lock().unwrap() = Some(503);
    for number in 0..COUNT {
        let mut claim = claim_object("1Mi");
        claim["metadata"]["uid"] = json!(format!("{number:08x}{}", &UID[8..]));
        let item = world.pass.claim(&claim).unwrap();
        world.pass.item(item).await;
    }
    assert_eq!(world.pass.waiting.len(), COUNT, "the server is too busy for their objects");
    // Each asks for its class again, and for its object.
    *world.server.takes.lock().unwrap() = AGAIN_FOR / 20;
    let mut turns = Vec::new();
    loop {
        let begun = Instant::now();
        let all = world.pass.again().await;
        turns.push(begun.elapsed());
        if all {
            break;
        }
    }
    assert_eq!(turns.len(), 3, "{turns:?}");
    assert!(turns.iter().all(|turn| *turn < AGAIN_FOR + AGAIN_FOR / 5), "{turns:?}");
}
