//! What the reconciler does with an API server that refuses objects, or is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::MutexGuard;

use polis_base::sys::clock;
use polis_wire::node_roles::Role;
use polis_wire::pki::memory::Memory;
use polis_wire::pki::{Namespace, kubernetes_authority};
use serde_json::json;

use super::*;
use crate::parts::Status;

const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 6443);
const CLASS: &str = "/apis/storage.k8s.io/v1/storageclasses/local";
const RIGHTS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/polis:workers";
const OWNERS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/polis:owners";

/// As long as a request may take.
const HANG: Duration = Duration::from_secs(20);

/// An API server without a network.
#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether nothing listens.
    down: bool,
    /// The statuses with which it refuses to apply these objects.
    refuses: BTreeMap<String, u16>,
    /// The objects at which it does not answer.
    hangs: BTreeSet<String>,
    /// The Node objects.
    nodes: Vec<Value>,
    /// The bindings of Polis, as far as it lists any.
    bound: Vec<Value>,
    /// How often it has listed Nodes.
    looks: usize,
    /// The list of whom servers of aggregated APIs trust, which is there again at once.
    trust: Option<Value>,
    /// The paths of the objects that it was asked to apply, in order.
    applied: Vec<String>,
    /// The paths of the objects that it has deleted.
    deleted: Vec<String>,
    /// The merge patches that it was asked for.
    merged: Vec<Value>,
    /// How many of the next ones find that another writer was faster.
    conflicts: usize,
}

impl Fake {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn reached(&self) -> Result<MutexGuard<'_, State>, api::Error> {
        let state = self.state();
        match state.down {
            true => {
                let source = io::ErrorKind::ConnectionRefused.into();
                Err(api::Error::Connect { address: ADDRESS, source })
            }
            false => Ok(state),
        }
    }

    /// How often it was asked to apply the object at `path`.
    fn attempts(&self, path: &str) -> usize {
        self.state().applied.iter().filter(|applied| *applied == path).count()
    }
}

impl Server for Fake {
    async fn apply(&self, object: &Object) -> Result<(), api::Error> {
        let (refused, hangs) = {
            let mut state = self.reached()?;
            state.applied.push(object.path.clone());
            (state.refuses.get(&object.path).copied(), state.hangs.contains(&object.path))
        };
        if hangs {
            sleep(HANG).await;
            return Err(api::Error::Silent { address: ADDRESS });
        }
        match refused {
            Some(status) => Err(api::Error::refused(ADDRESS, status, b"no")),
            None => Ok(()),
        }
    }

    async fn read(&self, path: &str) -> Result<Option<Value>, api::Error> {
        let state = self.reached()?;
        if path == TRUST {
            return Ok(state.trust.clone());
        }
        let is_meant = |node: &&Value| {
            let name = node["metadata"]["name"].as_str().unwrap();
            path == format!("/api/v1/nodes/{name}")
        };
        Ok(state.nodes.iter().find(is_meant).cloned())
    }

    /// Of one Node.
    async fn merge(&self, _path: &str, patch: &Value) -> Result<bool, api::Error> {
        let mut state = self.reached()?;
        state.merged.push(patch.clone());
        if state.conflicts > 0 {
            state.conflicts -= 1;
            return Ok(false);
        }
        let node = &mut state.nodes[0];
        node["spec"]["taints"] = patch["spec"]["taints"].clone();
        node["metadata"]["annotations"] = patch["metadata"]["annotations"].clone();
        Ok(true)
    }

    async fn list(&self, path: &str, accept: &str) -> Result<Vec<Value>, api::Error> {
        let mut state = self.reached()?;
        if path == objects::BINDINGS {
            assert_eq!(accept, JSON, "the metadata has neither the role nor the subjects");
            return Ok(state.bound.clone());
        }
        state.looks += 1;
        Ok(state.nodes.clone())
    }

    async fn delete(&self, path: &str, _uid: &str, _version: &str) -> Result<bool, api::Error> {
        let mut state = self.reached()?;
        state.deleted.push(path.to_owned());
        Ok(true)
    }

    fn rest(&self) {}
}

fn id(key: u8) -> NodeId {
    NodeId::from_public_key(&[key; 32])
}

/// The record of a controller, whom a leader reports, and those of these workers.
fn records(workers: &[u8]) -> Option<Arc<Nodes>> {
    let record = |role| v1::NodeInfo {
        state: v1::NodeState::Up.into(),
        health: v1::NodeHealth::Healthy.into(),
        roles: Some(Role::record(&[role])),
        ..Default::default()
    };
    let mut records = Nodes::from([(id(1), record(Role::KubernetesController))]);
    records.extend(workers.iter().map(|key| (id(*key), record(Role::KubernetesWorker))));
    Some(Arc::new(records))
}

/// A reconciler whose API server is ready, and the test's ends of its event values.
struct World {
    service: Service<Fake>,
    records: watch::Sender<Option<Arc<Nodes>>>,
    tried: watch::Receiver<bool>,
    seen: watch::Receiver<Status>,
}

impl World {
    fn new(ctx: &Context) -> Self {
        let status = watch::Sender::new(Status::default());
        let seen = status.subscribe();
        let parts = Parts::new(status, ctx.lines().clone());
        parts.expect(&Part::CONTROLLER);
        parts.set(Part::ApiServer, PartState::Ready);
        let (records, nodes) = watch::channel(self::records(&[2]));
        let (tries, tried) = watch::channel(false);
        let service = Service {
            api: Fake::default(),
            ca: File::private("/nowhere/ca.crt".into()),
            front_proxy_ca: File::private("/nowhere/front-proxy-ca.crt".into()),
            node: id(1),
            nodes,
            tried: tries,
            parts,
        };
        Self { service, records, tried, seen }
    }

    async fn tried(&mut self) {
        drop(self.tried.wait_for(|tried| *tried).await.unwrap());
    }

    async fn ready(&mut self) {
        let ready = |status: &Status| status.is_ready(Part::Reconciler);
        drop(self.seen.wait_for(ready).await.unwrap());
    }

    fn cause(&self) -> String {
        match self.service.parts.state(Part::Reconciler) {
            Some(PartState::Failed { cause }) => cause,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_object_holds_up_neither_the_others_nor_the_rights_of_workers() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let node = |key| format!("/api/v1/nodes/{}", id(key));
    // A worker that has no labels yet, and a node that is no worker any more.
    let object = |key| {
        let name = id(key).to_string();
        json!({"metadata": {"name": name, "uid": "u", "resourceVersion": "7"}})
    };
    server.state().nodes = vec![object(2), object(3)];
    server.state().refuses = BTreeMap::from([(CLASS.to_owned(), 422), (node(2), 500)]);
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        assert_eq!(
            world.cause(),
            format!(
                "cannot apply {CLASS}; delete it, and it is made again: {ADDRESS} answers 422: no"
            )
        );
        // The rights of workers follow.
        sleep(SPACING / 4).await;
        for object in objects::all().iter().chain(&objects::workers(&[])) {
            assert_eq!(server.attempts(&object.path), 1, "{}", object.path);
        }
        assert_eq!(server.attempts(&node(2)), 1);
        assert_eq!(server.state().deleted, [node(3)]);
        assert!(handles.is_healthy());
        // A new worker has its rights at once, and nothing else is repeated for it.
        server.state().applied.clear();
        world.records.send_replace(records(&[2, 4]));
        sleep(SPACING + SPACING / 2).await;
        assert_eq!((server.attempts(RIGHTS), server.attempts(CLASS)), (1, 0));
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_pauses_after_refusals_grow_and_the_next_success_is_found() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    server.state().refuses = BTreeMap::from([(CLASS.to_owned(), 500)]);
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        let cause = world.cause();
        assert!(cause.contains("an admission webhook") && cause.ends_with("500: no"), "{cause}");
        sleep(Duration::from_secs(10 * 60)).await;
        // After 0, 2, 6, 14, 30, 62, 126, 254 and 510 seconds.
        assert_eq!(server.attempts(CLASS), 9);
        assert!(server.attempts(RIGHTS) >= 20, "the rights of workers are looked after");
        server.state().refuses.clear();
        timeout(REFUSED_MAX + SPACING, world.ready()).await.unwrap();
        let attempts = server.attempts(CLASS);
        sleep(Duration::from_secs(10 * 60)).await;
        assert_eq!(server.attempts(CLASS), attempts, "every object is in place");
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_not_reached_is_asked_again_soon_and_has_refused_nothing() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    server.state().down = true;
    let service = world.service.clone();
    let story = async {
        sleep(Duration::from_secs(10 * 60)).await;
        assert!(!*world.tried.borrow() && !handles.is_healthy());
        let cause = world.cause();
        assert!(cause.contains("cannot connect to 127.0.0.1:6443"), "{cause}");
        server.state().down = false;
        timeout(RETRY + SPACING, world.ready()).await.unwrap();
        timeout(RETRY, world.tried()).await.unwrap();
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_policies_are_applied_before_the_rights_of_workers() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let service = world.service.clone();
    let story = async {
        world.ready().await;
        assert!(*world.tried.borrow(), "the programs start");
        sleep(SPACING / 4).await;
        let applied = server.state().applied.clone();
        let policies = applied.iter().rposition(|path| path.contains("/validatingadmission"));
        let rights = applied.iter().position(|path| path == RIGHTS);
        assert!(policies.unwrap() < rights.unwrap(), "{applied:?}");
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_webhook_that_hangs_at_each_object_delays_programs_and_rights_for_half_a_minute() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let objects = objects::all();
    server.state().hangs = objects.iter().map(|object| object.path.clone()).collect();
    let service = world.service.clone();
    let story = async {
        timeout(TRIED_MAX + SPACING, world.tried()).await.unwrap();
        assert!(handles.is_healthy());
        sleep(SPACING / 4).await;
        assert_eq!(server.attempts(RIGHTS), 1);
        // A new worker has its rights at once.
        world.records.send_replace(records(&[2, 4]));
        sleep(SPACING + SPACING / 2).await;
        assert_eq!(server.attempts(RIGHTS), 2);
        let last = objects.last().unwrap();
        assert_eq!(server.attempts(&last.path), 0, "the first attempt has not ended");
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn failures_that_end_without_a_person_are_repeated_within_half_a_minute() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    // One that a person has to end makes the pauses no longer.
    server.state().refuses = BTreeMap::from([(OWNERS.to_owned(), 422), (CLASS.to_owned(), 503)]);
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        sleep(Duration::from_secs(590)).await;
        // After 0, 2, 6, 14 and 30 seconds, then every 30 seconds.
        assert_eq!(server.attempts(CLASS), 23);
        server.state().refuses.clear();
        timeout(PASSING_MAX + SPACING, world.ready()).await.unwrap();
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_ready_again_is_asked_at_once_and_the_pauses_begin_anew() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    server.state().refuses = BTreeMap::from([(CLASS.to_owned(), 500)]);
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        // The last attempt was after 510 seconds, and the next one is due after 810.
        sleep(Duration::from_secs(10 * 60)).await;
        world.service.parts.fail(Part::ApiServer, "no quorum");
        sleep(SPACING).await;
        assert_eq!(server.attempts(CLASS), 9);
        world.service.parts.set(Part::ApiServer, PartState::Ready);
        sleep(SPACING).await;
        assert_eq!(server.attempts(CLASS), 10);
        sleep(RETRY).await;
        assert_eq!(server.attempts(CLASS), 11);
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[test]
fn only_refusals_that_a_person_ends_lead_to_pauses_of_minutes() {
    let pause_max = |source| Error::Apply { path: CLASS.to_owned(), source }.pause_max();
    for status in [408, 429, 502, 503, 504] {
        let max = pause_max(api::Error::refused(ADDRESS, status, b""));
        assert_eq!(max, PASSING_MAX, "{status}");
    }
    for status in [400, 403, 404, 409, 422, 500] {
        let max = pause_max(api::Error::refused(ADDRESS, status, b""));
        assert_eq!(max, REFUSED_MAX, "{status}");
    }
    assert_eq!(pause_max(api::Error::Silent { address: ADDRESS }), PASSING_MAX);
    let source = io::ErrorKind::ConnectionRefused.into();
    assert_eq!(pause_max(api::Error::Connect { address: ADDRESS, source }), RETRY);
}

#[test]
fn a_server_that_waits_for_a_webhook_for_too_long_has_refused_one_object() {
    let error = |source| Error::Apply { path: CLASS.to_owned(), source };
    assert!(error(api::Error::Silent { address: ADDRESS }).is_refusal());
    assert!(error(api::Error::refused(ADDRESS, 503, b"")).is_refusal());
    let source = io::ErrorKind::ConnectionRefused.into();
    assert!(!error(api::Error::Connect { address: ADDRESS, source }).is_refusal());
}

#[tokio::test(start_paused = true)]
async fn records_that_change_without_another_worker_make_no_pause_after_a_failure_shorter() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    server.state().refuses = BTreeMap::from([(RIGHTS.to_owned(), 500)]);
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        let end = Instant::now() + Duration::from_secs(59);
        while Instant::now() < end {
            world.records.send_modify(|records| {
                let records = Arc::make_mut(records.as_mut().unwrap());
                records.get_mut(&id(2)).unwrap().heartbeat_age_ms += 1;
            });
            sleep(SPACING / 2).await;
        }
        // After 0, 2, 6, 14 and 30 seconds.
        assert_eq!(server.attempts(RIGHTS), 5);
        // Another worker has its rights at once.
        world.records.send_replace(records(&[2, 4]));
        sleep(SPACING + SPACING / 2).await;
        assert_eq!(server.attempts(RIGHTS), 6);
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rights_that_are_in_place_are_not_applied_again_until_somebody_changes_them() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let given = objects::workers(&[id(2)]).into_iter().map(|object| object.content);
    server.state().bound = given.collect();
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        // Between two passes.
        sleep(20 * NODES_EVERY + 5 * SPACING).await;
        let rights = objects::workers(&[]);
        for object in &rights {
            assert_eq!(server.attempts(&object.path), 0, "{}", object.path);
        }
        server.state().bound[0]["subjects"] = json!([]);
        sleep(NODES_EVERY + SPACING).await;
        let attempts: Vec<_> = rights.iter().map(|object| server.attempts(&object.path)).collect();
        assert_eq!(attempts, [1, 0, 0, 0, 0]);
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn only_a_record_that_concerns_an_object_leads_to_a_pass() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let service = world.service.clone();
    let change = |records: &watch::Sender<Option<Arc<Nodes>>>, report: &str| {
        records.send_modify(|records| {
            let worker = Arc::make_mut(records.as_mut().unwrap()).get_mut(&id(2)).unwrap();
            worker.heartbeat_age_ms += 1;
            worker.status =
                Some(v1::NodeStatus { workload: report.to_owned(), ..Default::default() });
        });
    };
    let story = async {
        world.tried().await;
        sleep(SPACING / 4).await;
        for part in ["failed: kubelet", "failed: dns", "starting"].repeat(4) {
            change(&world.records, part);
            sleep(SPACING).await;
        }
        assert_eq!(server.state().looks, 1);
        // It has a Node now.
        change(&world.records, "ready");
        sleep(SPACING / 4).await;
        assert_eq!(server.state().looks, 2);
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_node_has_the_taints_of_its_record_at_once_although_others_write_it_too() {
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let server = world.service.api.clone();
    let foreign = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    server.state().nodes = vec![json!({
        "metadata": {"name": id(2).to_string(), "uid": "u", "resourceVersion": "7"},
        "spec": {"taints": [foreign]},
    })];
    let service = world.service.clone();
    let change = |records: &watch::Sender<Option<Arc<Nodes>>>, taints: Vec<v1::NodeTaint>| {
        records.send_modify(|records| {
            let records = Arc::make_mut(records.as_mut().unwrap());
            records.get_mut(&id(2)).unwrap().taints = taints;
        });
    };
    let gpu = v1::NodeTaint {
        key: "gpu".to_owned(),
        value: String::new(),
        effect: v1::node_taint::Effect::NoSchedule.into(),
    };
    let set = json!({"key": "gpu", "value": "", "effect": "NoSchedule"});
    let story = async {
        world.tried().await;
        sleep(2 * NODES_EVERY).await;
        assert!(server.state().merged.is_empty(), "it has no taints");
        server.state().conflicts = TAINT_ATTEMPTS - 1;
        change(&world.records, vec![gpu]);
        sleep(SPACING + SPACING / 2).await;
        assert_eq!(server.state().nodes[0]["spec"]["taints"], json!([foreign, set]));
        assert_eq!(server.state().merged.len(), TAINT_ATTEMPTS);
        // It is right: it is not written again.
        sleep(2 * NODES_EVERY).await;
        assert_eq!(server.state().merged.len(), TAINT_ATTEMPTS);
        // A pass ends although others are faster each time, and the next one tries again.
        server.state().conflicts = TAINT_ATTEMPTS;
        change(&world.records, Vec::new());
        sleep(SPACING + SPACING / 2).await;
        assert_eq!(server.state().merged.len(), 2 * TAINT_ATTEMPTS);
        sleep(NODES_EVERY + SPACING).await;
        assert_eq!(server.state().nodes[0]["spec"]["taints"], json!([foreign]));
        assert_eq!(server.state().merged.len(), 2 * TAINT_ATTEMPTS + 1);
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}

/// An authority of components or proxies, in DER.
async fn authority() -> Vec<u8> {
    let pki = Namespace::new(Memory::default(), "");
    pki.ensure(&kubernetes_authority(), clock::now()).await.unwrap().der
}

/// What servers of aggregated APIs trust: these authorities of components, and these of proxies.
fn trusted([components, proxies]: [&[&[u8]]; 2]) -> Value {
    let pem =
        |ders: &[&[u8]]| String::from_utf8(pki::certificates_pem(ders.iter().copied())).unwrap();
    json!({"data": {
        "client-ca-file": pem(components),
        "requestheader-client-ca-file": pem(proxies),
        "requestheader-allowed-names": "[]",
    }})
}

#[tokio::test]
async fn a_former_authority_in_what_aggregated_apis_trust_is_found() {
    let [one, two, former] = [authority().await, authority().await, authority().await];
    let known = [&one, &two].map(|der| vec![CertificateDer::from(der.clone())]);
    let former_in = |authorities: [&[&[u8]]; 2]| has_others(&trusted(authorities), &known);
    assert!(!former_in([&[&one], &[&two]]));
    assert!(former_in([&[&former, &one], &[&two]]));
    assert!(former_in([&[&one], &[&two, &former]]));
    assert!(!has_others(&json!({}), &known));
}

#[tokio::test(start_paused = true)]
async fn a_former_authority_is_removed_after_a_minute_and_again_where_it_comes_back() {
    let base = tempfile::tempdir().unwrap();
    let (ctx, handles) = Context::for_test();
    let mut world = World::new(&ctx);
    let (known, former) = (authority().await, authority().await);
    for (file, name) in
        [(&mut world.service.ca, "ca.crt"), (&mut world.service.front_proxy_ca, "proxies.crt")]
    {
        *file = File::private(base.path().join(name));
        file.write(&pki::certificates_pem([&known[..]])).unwrap();
    }
    let server = world.service.api.clone();
    server.state().trust = Some(trusted([&[&known, &former], &[&known]]));
    let service = world.service.clone();
    let story = async {
        world.tried().await;
        // Another controller may have followed a rotation first.
        sleep(Duration::from_secs(55)).await;
        assert!(server.state().deleted.is_empty());
        sleep(Duration::from_secs(195)).await;
        let deleted = server.state().deleted.clone();
        assert!((3..=4).contains(&deleted.len()), "{deleted:?}");
        assert!(deleted.iter().all(|path| path == TRUST), "{deleted:?}");
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), story);
    ended.unwrap();
}
