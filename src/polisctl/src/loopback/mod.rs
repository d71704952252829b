//! A one-node cluster on loopback, for tests of complete command lines.
//!
//! The certificates, TLS and the rules of access are those of a node. The services return
//! fixed answers and record every call, so that a test can assert which calls a command did
//! not make.

mod crowd;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ed25519_dalek::pkcs8::EncodePrivateKey as _;
use futures::{Stream, StreamExt as _, stream};
use polis_proto::v1;
use polis_proto::v1::aaa_server::{Aaa, AaaServer};
use polis_proto::v1::curator_local_server::{CuratorLocal, CuratorLocalServer};
use polis_proto::v1::maintenance_server::{Maintenance, MaintenanceServer};
use polis_proto::v1::management_server::{Management, ManagementServer};
use polis_proto::v1::node_management_server::{NodeManagement, NodeManagementServer};
use polis_proto::v1::update_progress::Phase;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status, Streaming};

use super::contexts::{self, Context, Contexts, Settings};
use super::testing::World;
use polis_wire::age::{self, Recipient};
use polis_wire::attestation::software::Software;
use polis_wire::attestation::{Answer, Challenge, Keys, Question, Registers, qualifier};
use polis_wire::pki::Crl;
use polis_wire::rpc::testing::{Authority, Running, key, node_id};
use polis_wire::rpc::{
    App, Caller, Credentials, Exchange, Gateway, Limits, REASON, Role, resume_at,
};
use polis_wire::s3;
use polis_wire::s3::testing::Store;
use polis_wire::snapshot::object::{self, Name};

/// The seed of the node's key.
pub(super) const NODE: u8 = 1;
/// The name of the node.
pub(super) const NAME: &str = "web-1";
/// The seed of the user's key.
const PERSON: u8 = 9;
/// The recovery key of the node's disk.
pub(super) const RECOVERY_KEY: [u8; 32] = [7; 32];

/// The content of its etcd.
pub(super) const SNAPSHOT: &[u8] = b"records";

/// How long the node has been up, in seconds. It wrote the one line of its log a minute ago.
const UPTIME: f64 = 3600.0;

/// The wait of a node whose cluster has no leader.
pub(super) const LEADERLESS: &str = "consensus waits for a disk that is fast enough";

/// A node that leads a cluster, and the calls that it received.
pub(super) struct Cluster {
    /// The runtime of the server; a command line has its own.
    runtime: tokio::runtime::Runtime,
    authority: Authority,
    running: Running,
    /// The proxy to Kubernetes, once the node has the role.
    gateway: Option<Running>,
    kubernetes: Kubernetes,
    /// The CRL of the curator; empty: it has none.
    crl: Arc<Mutex<Vec<u8>>>,
    asked: Arc<Mutex<Vec<String>>>,
    leads: Arc<AtomicBool>,
    /// Whether the member of etcd answers.
    answers: Arc<AtomicBool>,
    /// Somebody has read the state of etcd.
    etcd_read: Arc<tokio::sync::Notify>,
    /// The one line of its log.
    says: Arc<Mutex<String>>,
    /// Whether there are other nodes and users.
    crowd: Arc<AtomicBool>,
    audit: Arc<Mutex<(v1::AuditHead, Vec<v1::AuditEntry>)>>,
    shown: Arc<Mutex<Vec<Shown>>>,
    tpm: Arc<Mutex<Tpm>>,
    /// What it has of a bundle whose transfer broke.
    pub(super) part: Arc<Mutex<Vec<u8>>>,
    /// The cluster version of its etcd; empty: not known.
    pub(super) etcd_cluster: Arc<Mutex<String>>,
    /// A bucket with a snapshot, and how the command line names it.
    bucket: Option<(Store, String)>,
}

/// The kernel that the node has started.
pub(super) const KERNEL: &[u8] = b"the kernel of the node";

/// The TPM of the node's machine.
struct Tpm {
    /// `None`: it has none.
    software: Option<Software>,
    /// The attestation key that the node names; `None`: that of its TPM.
    pretended: Option<Vec<u8>>,
    registers: Registers,
}

impl Default for Tpm {
    fn default() -> Self {
        let kernel = super::kernel::tests::kernel(KERNEL);
        let mut registers: Registers = (0..24).map(|number| (number, [7; 32])).collect();
        registers.extend(polis_bundle::registers(&kernel).unwrap());
        Self { software: Some(Software::default()), pretended: None, registers }
    }
}

/// The refusal of a machine without a TPM.
fn no_tpm() -> Status {
    let mut status = Status::failed_precondition("this machine has no TPM 2.0");
    status.metadata_mut().insert(REASON, "no-tpm".parse().unwrap());
    status
}

/// A source that does not have the operator.
pub(super) const KEPT_OUT: &str = "203.0.113.0/24";

/// A name server: the node gives up a network with it.
pub(super) const REVERTS: &str = "192.0.2.66";

/// The certificate that a server shows.
type Shown = watch::Sender<Option<Credentials>>;

/// Answers every call of a node.
#[derive(Clone)]
struct Served {
    ca: Vec<u8>,
    crl: Arc<Mutex<Vec<u8>>>,
    authority: Authority,
    asked: Arc<Mutex<Vec<String>>>,
    leads: Arc<AtomicBool>,
    /// Whether the member of etcd answers.
    answers: Arc<AtomicBool>,
    kubernetes: Kubernetes,
    etcd_read: Arc<tokio::sync::Notify>,
    says: Arc<Mutex<String>>,
    crowd: Arc<AtomicBool>,
    /// The audit log.
    audit: Arc<Mutex<(v1::AuditHead, Vec<v1::AuditEntry>)>>,
    /// The update of the cluster.
    update: Arc<Mutex<Option<v1::ClusterUpdate>>>,
    /// How often the rotation of its CA was read.
    rotation: Arc<AtomicUsize>,
    /// The firewall that was set last.
    firewall: Arc<Mutex<v1::FirewallConfiguration>>,
    /// The network that was ordered last for the node.
    network: Arc<Mutex<Option<v1::NetworkOrder>>>,
    /// The certificates that its servers show.
    shown: Arc<Mutex<Vec<Shown>>>,
    tpm: Arc<Mutex<Tpm>>,
    /// What the node has of a bundle whose transfer broke.
    part: Arc<Mutex<Vec<u8>>>,
    etcd_cluster: Arc<Mutex<String>>,
}

/// The secrets that only the owner of the cluster can read.
pub(super) fn encrypted(plain: &[u8]) -> Vec<u8> {
    let owner = Recipient::of_key(key(PERSON).verifying_key().as_bytes()).unwrap();
    age::encrypt(&[owner], plain).unwrap()
}

impl Cluster {
    /// A cluster whose owner has a context for it in `world`.
    pub(super) fn new(world: &World) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let asked = Arc::default();
        let crl: Arc<Mutex<Vec<u8>>> = Arc::default();
        let leads = Arc::new(AtomicBool::new(true));
        let answers = Arc::new(AtomicBool::new(true));
        let kubernetes = Kubernetes::default();
        let etcd_read: Arc<tokio::sync::Notify> = Arc::default();
        let says = Arc::new(Mutex::new("hello".to_owned()));
        let crowd: Arc<AtomicBool> = Arc::default();
        let audit = Arc::new(Mutex::new(super::audit::tests::log()));
        let shown: Arc<Mutex<Vec<Shown>>> = Arc::default();
        let tpm: Arc<Mutex<Tpm>> = Arc::default();
        let part: Arc<Mutex<Vec<u8>>> = Arc::default();
        let etcd_cluster: Arc<Mutex<String>> = Arc::default();
        let (authority, running) = runtime.block_on(async {
            let authority = Authority::new().await;
            let served = Served {
                ca: authority.der.clone(),
                crl: Arc::clone(&crl),
                authority: authority.clone(),
                asked: Arc::clone(&asked),
                leads: Arc::clone(&leads),
                answers: Arc::clone(&answers),
                kubernetes: kubernetes.clone(),
                etcd_read: Arc::clone(&etcd_read),
                says: Arc::clone(&says),
                crowd: Arc::clone(&crowd),
                audit: Arc::clone(&audit),
                update: Arc::default(),
                rotation: Arc::default(),
                firewall: Arc::default(),
                network: Arc::default(),
                shown: Arc::clone(&shown),
                tpm: Arc::clone(&tpm),
                part: Arc::clone(&part),
                etcd_cluster: Arc::clone(&etcd_cluster),
            };
            let mut routes = RoutesBuilder::default();
            routes
                .add_service(NodeManagementServer::new(served.clone()))
                .add_service(ManagementServer::new(served.clone()))
                .add_service(AaaServer::new(served.clone()))
                .add_service(MaintenanceServer::new(served.clone()))
                .add_service(CuratorLocalServer::new(served));
            let app = App::Grpc(routes.routes().prepare());
            let own = authority.curator(NODE).await;
            let running = Running::start(&authority, own, app, Limits::default()).await;
            shown.lock().unwrap().push(running.credentials.clone());
            (authority, running)
        });
        let gateway = None;
        let cluster = Self {
            runtime,
            authority,
            running,
            gateway,
            kubernetes,
            crl,
            asked,
            leads,
            answers,
            etcd_read,
            says,
            crowd,
            audit,
            shown,
            tpm,
            part,
            etcd_cluster,
            bucket: None,
        };
        cluster.equip(world);
        cluster
    }

    fn equip(&self, world: &World) {
        let key_file = world.path("owner.key");
        let pem = key(PERSON).to_pkcs8_pem(ed25519_dalek::pkcs8::spki::der::pem::LineEnding::LF);
        contexts::write(&key_file, pem.unwrap().as_bytes()).unwrap();
        let owner = self.authority.user("owner", Role::Owner, PERSON);
        let owner = self.runtime.block_on(owner);
        let address = self.address();
        let settings = Settings {
            endpoints: vec![address.clone()],
            user: "owner".to_owned(),
            key: key_file,
            via: BTreeMap::from([("192.0.2.1:7839".to_owned(), address)]),
            ..Settings::default()
        };
        let context = Context {
            settings,
            ca: Some(self.authority.der.clone()),
            certificate: Some(owner.certificate),
            ..Context::new("home")
        };
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        contexts.save(&context).unwrap();
        contexts.set_current("home").unwrap();
    }

    /// From now on the context is that of a user with this role.
    pub(super) fn lets_in_as(&self, world: &World, role: Role) {
        let user = self.authority.user(role.as_str(), role, PERSON);
        let user = self.runtime.block_on(user);
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        role.as_str().clone_into(&mut context.settings.user);
        context.certificate = Some(user.certificate);
        contexts.save(&context).unwrap();
    }

    /// The CA in the context.
    pub(super) fn ca(world: &World) -> Option<Vec<u8>> {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        contexts.load("home").unwrap().ca
    }

    /// Another CA signs from now on, and the former one is not trusted.
    pub(super) fn rotates(&self) {
        self.runtime.block_on(async {
            self.authority.rotate(1).await;
            self.authority.conclude().await;
        });
    }

    /// The node shows a certificate of the CA of now.
    pub(super) fn shows_the_next_ca(&self) {
        let own = self.runtime.block_on(self.authority.curator(NODE));
        self.running.credentials.send_replace(Some(own));
    }

    /// Revokes the certificate that the curator shows. It goes on to show it.
    pub(super) fn revokes_its_curator(&self) {
        let crl = self.runtime.block_on(self.authority.revoked_curator(NODE));
        *self.crl.lock().unwrap() = crl;
    }

    /// The address of the node, as a curator and as a node.
    pub(super) fn address(&self) -> String {
        self.running.address.to_string()
    }

    /// The fingerprint of the key of its only node, as the screen of a machine shows it.
    pub(super) fn fingerprint(&self) -> String {
        let facts = polis_wire::pki::Facts::read(
            &self.running.credentials.borrow().as_ref().unwrap().certificate,
        );
        polis_wire::identity::Fingerprint::of_key(&facts.unwrap().public_key).to_string()
    }

    /// DER of the CA.
    pub(super) fn authority(&self) -> Vec<u8> {
        self.authority.der.clone()
    }

    /// From now on something was added to the command line of its kernel.
    pub(super) fn has_additions(&self) {
        self.tpm.lock().unwrap().registers.insert(12, [1; 32]);
    }

    /// From now on its machine has no TPM.
    pub(super) fn has_no_tpm(&self) {
        self.tpm.lock().unwrap().software = None;
    }

    /// From now on it names the attestation key of another TPM as its own.
    pub(super) fn pretends(&self) {
        let other = Software::default().keys().attestation;
        self.tpm.lock().unwrap().pretended = Some(other);
    }

    /// From now on there are nodes beside it, none of which answers, and users with the
    /// longest texts that a cluster accepts.
    pub(super) fn has_a_crowd(&self, world: &World, closed: &str) {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let ports = crowd::ports().into_iter().map(|port| (port, closed.to_owned()));
        context.settings.via.extend(ports);
        contexts.save(&context).unwrap();
        self.crowd.store(true, Ordering::Relaxed);
    }

    /// From now on the node is a Kubernetes controller, and the context knows the way.
    pub(super) fn has_controller(&mut self, world: &World) {
        let app = App::Gateway(Arc::new(self.kubernetes.clone()));
        let node = self.authority.node(NODE);
        let running = self.runtime.block_on(async {
            Running::start(&self.authority, node.await, app, Limits::default()).await
        });
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let via = ("192.0.2.1:6444".to_owned(), running.address.to_string());
        context.settings.via.extend([via]);
        contexts.save(&context).unwrap();
        self.shown.lock().unwrap().push(running.credentials.clone());
        self.gateway = Some(running);
        self.kubernetes.there.store(true, Ordering::Relaxed);
    }

    /// From now on there is a bucket with a snapshot, and its key in the file `bucket.key`.
    pub(super) fn has_bucket(&mut self, world: &World) {
        let store = Store::start("127.0.0.1");
        let sha256 = Sha256::digest(SNAPSHOT).into();
        let name = Name { at: 1_795_694_400, revision: 1234, sha256 };
        let key = format!("polis/{}{name}", object::folder("cluster.internal", 0x0d2f));
        store.with(|state| state.objects.insert(key, SNAPSHOT.to_vec()));
        let ca = world.path("bucket.pem");
        std::fs::write(&ca, &store.ca).unwrap();
        let text = format!("{}\n{}\n", s3::testing::KEY, s3::testing::SECRET);
        super::contexts::write(&world.path("bucket.key"), text.as_bytes()).unwrap();
        let url = store.url(store.address.port(), "polis");
        let target = format!("{url},region={},ca={}", s3::testing::REGION, ca.display());
        self.bucket = Some((store, target));
    }

    /// How the command line names that bucket.
    pub(super) fn bucket(&self) -> String {
        self.bucket.as_ref().map(|(_, target)| target.clone()).unwrap_or_default()
    }

    /// From now on the node is a Kubernetes worker.
    pub(super) fn has_worker(&self) {
        self.kubernetes.works.store(true, Ordering::Relaxed);
    }

    /// From now on a drain of the worker answers this.
    pub(super) fn drains(&self, messages: Vec<Result<v1::DrainProgress, Status>>) {
        *self.kubernetes.drain.lock().unwrap() = messages;
    }

    /// Where it lets users in.
    pub(super) fn gateway(&self) -> String {
        self.gateway.as_ref().unwrap().address.to_string()
    }

    /// The node is a worker too, whose kubelet ends again and again.
    pub(super) fn has_worker_with_a_crash_loop(&self) {
        self.kubernetes.loops.store(true, Ordering::Relaxed);
    }

    /// From now on its API server waits for etcd.
    pub(super) fn api_server_starts(&self) {
        self.kubernetes.starts.store(true, Ordering::Relaxed);
    }

    /// From now on the node reports a cluster without a leader.
    pub(super) fn lose_the_leader(&self) {
        self.leads.store(false, Ordering::Relaxed);
    }

    /// After this time the node reports that it leads.
    pub(super) fn leads_after(&self, wait: std::time::Duration) {
        let leads = Arc::clone(&self.leads);
        self.runtime.spawn(async move {
            tokio::time::sleep(wait).await;
            leads.store(true, Ordering::Relaxed);
        });
    }

    /// From now on its member of etcd does not answer.
    pub(super) fn etcd_is_silent(&self) {
        self.answers.store(false, Ordering::Relaxed);
    }

    /// From now on this is the one line of its log.
    pub(super) fn logs(&self, line: &str) {
        line.clone_into(&mut self.says.lock().unwrap());
    }

    /// From now on this is its audit log.
    pub(super) fn has_audit(&self, head: v1::AuditHead, entries: Vec<v1::AuditEntry>) {
        *self.audit.lock().unwrap() = (head, entries);
    }

    /// Blocks until somebody has read the state of etcd.
    pub(super) fn until_etcd_is_read(&self) {
        self.runtime.block_on(self.etcd_read.notified());
    }

    /// The context knows these nodes, as a leader has reported them.
    pub(super) fn knows(&self, world: &World, nodes: &[(&str, &str)]) {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        let mut context = contexts.load("home").unwrap();
        let entry = |(id, at): &(&str, &str)| ((*id).to_owned(), vec![(*at).to_owned()]);
        context.settings.nodes = nodes.iter().map(entry).collect();
        contexts.save(&context).unwrap();
    }

    /// The calls since the last query.
    pub(super) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl Served {
    /// Takes any bundle to its end, from where a transfer of it broke, and refuses one that this
    /// node cannot use.
    async fn receives(
        &self,
        call: &'static str,
        phase: Phase,
        mut incoming: Streaming<v1::UpdateRequest>,
    ) -> Result<Response<Answers<v1::UpdateProgress>>, Status> {
        let v1::UpdateRequest { data: head, resume, one_way } = incoming.message().await?.unwrap();
        let part = self.part.lock().unwrap().clone();
        let part = if resume && part.starts_with(&head) { part } else { Vec::new() };
        let (served, at) = (self.clone(), part.len() as u64);
        let receiving = async move {
            let mut bundle = if part.is_empty() { head } else { part };
            while let Some(piece) = incoming.message().await? {
                bundle.extend(piece.data);
            }
            let bundle = polis_bundle::Bundle::open(&*bundle, None).unwrap();
            let version = bundle.manifest().version.to_string();
            let mut sinks = [std::io::sink(), std::io::sink()];
            let [kernel, system] = &mut sinks;
            bundle.parts([kernel, system], &mut |_bytes| ()).unwrap();
            let from = if at > 0 { format!(" from {at}") } else { String::new() };
            let one_way = if one_way { ", one way" } else { "" };
            served.note(&format!("{call} {version}{from}{one_way}"));
            let (phase, slot) = (phase.into(), "B".to_owned());
            Ok(v1::UpdateProgress { phase, version, slot, ..Default::default() })
        };
        Ok(resume_at(Response::new(stream::once(receiving).boxed()), at))
    }

    fn note(&self, call: &str) {
        self.asked.lock().unwrap().push(call.to_owned());
    }

    /// The records of the crowd, if it is there.
    fn crowd<T>(&self, records: impl FnOnce() -> Vec<T>) -> Vec<T> {
        if self.crowd.load(Ordering::Relaxed) { records() } else { Vec::new() }
    }
}

fn not_served<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no test needs it"))
}

/// A Kubernetes with one controller, and fixed nodes and pods.
#[derive(Clone, Debug, Default)]
struct Kubernetes {
    /// Whether the node has the role.
    there: Arc<AtomicBool>,
    /// Whether its API server is not ready yet.
    starts: Arc<AtomicBool>,
    /// Whether the node has the role of a worker.
    works: Arc<AtomicBool>,
    /// The messages of a drain of the worker.
    drain: Arc<Mutex<Vec<Result<v1::DrainProgress, Status>>>>,
    /// Whether the node is a worker too, and its kubelet in a crash loop.
    loops: Arc<AtomicBool>,
}

impl Kubernetes {
    fn roles(&self) -> Option<v1::NodeRoles> {
        let has = |role: &AtomicBool| role.load(Ordering::Relaxed);
        let roles = v1::NodeRoles {
            kubernetes_controller: has(&self.there)
                .then_some(v1::node_roles::KubernetesController {}),
            kubernetes_worker: (has(&self.works) || has(&self.loops))
                .then_some(v1::node_roles::KubernetesWorker {}),
            ..Default::default()
        };
        (roles != v1::NodeRoles::default()).then_some(roles)
    }

    fn services(&self) -> Vec<v1::services_response::Service> {
        let starts = self.starts.load(Ordering::Relaxed);
        let service = |(part, state, cause): (&str, &str, &str)| v1::services_response::Service {
            name: format!("root.{part}"),
            state: state.to_owned(),
            cause: cause.to_owned(),
            restarts: if state == "dead" { 7 } else { 0 },
            ..Default::default()
        };
        let api_server = match starts {
            true => ("workload.controller.apiserver", "starting", "no quorum"),
            false => ("workload.controller.apiserver", "healthy", ""),
        };
        let controller = [
            ("workload.controller.access", "healthy", ""),
            api_server,
            ("workload.controller.certificates", "healthy", ""),
        ];
        let worker = [
            ("containerd", "healthy", ""),
            ("workload.worker.kubelet", "dead", "kubelet ended with status 1: no swap"),
        ];
        let there = self.there.load(Ordering::Relaxed);
        let loops = self.loops.load(Ordering::Relaxed);
        let controller = controller.into_iter().filter(|_| there);
        controller.chain(worker.into_iter().filter(|_| loops)).map(service).collect()
    }
}

impl Gateway for Kubernetes {
    fn open(&self, _caller: &Caller) -> Arc<dyn Exchange> {
        Arc::new(self.clone())
    }

    fn refusal(&self, status: &Status) -> http::Response<Body> {
        let answer = http::Response::builder().status(403);
        answer.body(Body::new(status.message().to_owned())).unwrap()
    }
}

#[tonic::async_trait]
impl Exchange for Kubernetes {
    async fn call(&self, request: http::Request<hyper::body::Incoming>) -> http::Response<Body> {
        let (code, text) = match request.uri().path() {
            "/readyz" if self.starts.load(Ordering::Relaxed) => (500, "[-]etcd failed: x\n"),
            "/readyz" => (200, "ok"),
            "/api/v1/nodes" => (200, NODES),
            "/api/v1/pods" if request.uri().query() == Some("limit=250") => (200, PODS),
            "/api/v1/pods" => (200, MORE_PODS),
            _ => (404, "404 page not found"),
        };
        let answer = http::Response::builder().status(code);
        answer.body(Body::new(text.to_owned())).unwrap()
    }
}

const NODES: &str = r#"{"items": [{"metadata": {"name": "polis-1"}, "status": {
    "nodeInfo": {"kubeletVersion": "v1.37.2"},
    "conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady",
        "message": "no network"}]}}]}"#;

/// The first of two answers.
const PODS: &str = r#"{"metadata": {"continue": "a=b"}, "items": [
    {"metadata": {"namespace": "default", "name": "web"}, "spec": {"nodeName": "polis-1"},
     "status": {"phase": "Running", "containerStatuses": [{"name": "web", "ready": true}]}},
    {"metadata": {"namespace": "default", "name": "job"}, "status": {"phase": "Succeeded"}}]}"#;

const MORE_PODS: &str = r#"{"items": [
    {"metadata": {"namespace": "shop", "name": "cart"}, "spec": {"nodeName": "polis-1"},
     "status": {"phase": "Running", "containerStatuses": [{"name": "main", "ready": false,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}}}]}}]}"#;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn answers<T: Send + 'static>(all: Vec<T>) -> Response<Answers<T>> {
    Response::new(stream::iter(all.into_iter().map(Ok)).boxed())
}

#[tonic::async_trait]
impl Maintenance for Served {
    async fn describe(
        &self,
        _request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        self.note("Describe");
        let disk = |name: &str, system| v1::MachineDisk {
            name: name.to_owned(),
            bytes: 3 << 30,
            model: "Ultra".to_owned(),
            serial: "S4EW".to_owned(),
            system,
        };
        Ok(Response::new(v1::DescribeResponse {
            code: "#0601.0000".to_owned(),
            stage: "parameters".to_owned(),
            causes: vec!["this machine has no node parameters".to_owned()],
            next: "put them there".to_owned(),
            version: "0.1.0".to_owned(),
            image: "5d41402abc4b2a76".to_owned(),
            slot: "A".to_owned(),
            addresses: vec!["192.0.2.1".to_owned()],
            disks: vec![disk("sda", false), disk("vda", true)],
            parameters: vec!["SMBIOS OEM string (type 11): absent".to_owned()],
            uptime_seconds: UPTIME,
            ..v1::DescribeResponse::default()
        }))
    }

    type ReadLogStream = Answers<v1::ReadLogResponse>;

    async fn read_log(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<Self::ReadLogStream>, Status> {
        self.note(&format!("ReadLog {}", request.into_inner().log));
        let piece = v1::ReadLogResponse { text: "one\u{1b}[2J\n".to_owned() };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(piece)]))))
    }

    async fn give_parameters(
        &self,
        request: Request<v1::GiveParametersRequest>,
    ) -> Result<Response<v1::GiveParametersResponse>, Status> {
        let dry_run = request.into_inner().dry_run;
        self.note(if dry_run { "CheckParameters" } else { "GiveParameters" });
        Ok(Response::new(v1::GiveParametersResponse { replaced: vec!["the ESP".to_owned()] }))
    }

    async fn end(
        &self,
        request: Request<v1::EndRequest>,
    ) -> Result<Response<v1::EndResponse>, Status> {
        self.note(if request.into_inner().power_off { "End off" } else { "End" });
        Ok(Response::new(v1::EndResponse {}))
    }
}

#[tonic::async_trait]
impl NodeManagement for Served {
    type LogsStream = Answers<v1::LogsResponse>;
    type ConsoleStream = Answers<v1::ConsoleFrame>;

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        self.note("GetStatus");
        let node_id = node_id(NODE).to_string();
        let uptime_seconds = UPTIME;
        let waits_for = match self.leads.load(Ordering::Relaxed) {
            true => String::new(),
            false => LEADERLESS.to_owned(),
        };
        Ok(Response::new(v1::GetStatusResponse {
            node_id,
            uptime_seconds,
            waits_for,
            etcd_cluster: self.etcd_cluster.lock().unwrap().clone(),
            ..Default::default()
        }))
    }

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let v1::LogsRequest { name, raw, .. } = request.into_inner();
        self.note(&format!("Logs {name}"));
        // Without what programs print, the line is an event.
        let none = raw == i32::from(v1::logs_request::Raw::None);
        let event = none.then(|| ("event".to_owned(), "ready".to_owned()));
        let entry = v1::logs_response::Entry {
            name: if name.is_empty() { "kernel".to_owned() } else { name },
            message: self.says.lock().unwrap().clone(),
            time_unix_nanos: 1_700_000_000_123_456_789,
            uptime_seconds: UPTIME - 60.0,
            fields: event.into_iter().collect(),
            ..Default::default()
        };
        Ok(answers(vec![v1::LogsResponse { entries: vec![entry], ..Default::default() }]))
    }

    async fn console(
        &self,
        _request: Request<v1::ConsoleRequest>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        self.note("Console");
        let metrics = polis_tui::snapshot::Metrics {
            processors: 4,
            cpu: vec![90, 12],
            memory_total: 8 << 30,
            memory_used: 2 << 30,
            disk_written: vec![4096],
            received: vec![2048],
            data_total: 100 << 30,
            data_used: 98 << 30,
            ..Default::default()
        };
        let snapshot = polis_tui::Snapshot { metrics: Some(metrics), ..Default::default() };
        let snapshot = serde_json::to_vec(&snapshot).unwrap();
        let frame = stream::iter([Ok(v1::ConsoleFrame { snapshot })]);
        Ok(Response::new(frame.chain(stream::pending()).boxed()))
    }

    async fn get_firewall(
        &self,
        _request: Request<v1::GetFirewallRequest>,
    ) -> Result<Response<v1::GetFirewallResponse>, Status> {
        self.note("GetFirewall");
        let configuration = self.firewall.lock().unwrap().clone();
        let rule = v1::get_firewall_response::Rule {
            name: "management".to_owned(),
            ports: "tcp/7839".to_owned(),
            callers: "any".to_owned(),
            purpose: "operators, and nodes in an update".to_owned(),
            accepted: Some(1),
            ..Default::default()
        };
        Ok(Response::new(v1::GetFirewallResponse {
            rules: vec![rule],
            // This machine is not in that network, so it would not get this answer.
            in_force: configuration.sources != [KEPT_OUT],
            configuration: Some(configuration),
            dropped: Some(0),
            ..Default::default()
        }))
    }

    async fn services(
        &self,
        _request: Request<v1::ServicesRequest>,
    ) -> Result<Response<v1::ServicesResponse>, Status> {
        self.note("Services");
        let names = ["root", "root.consensus", "root.curator", "root.kernel", "root.network"];
        let services = names.map(|name| v1::services_response::Service {
            name: name.to_owned(),
            ..Default::default()
        });
        let services = services.into_iter().chain(self.kubernetes.services()).collect();
        // A quarter of a processor for the node, whenever it is asked.
        let uptime_seconds = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let process = |name: &str, id, share: f64| v1::services_response::Process {
            name: name.to_owned(),
            id,
            cpu_seconds: uptime_seconds * share,
            memory_bytes: u64::from(id) << 20,
        };
        let processes = vec![process("root", 64, 0.25), process("root.consensus.etcd", 96, 0.5)];
        Ok(Response::new(v1::ServicesResponse { services, processes, uptime_seconds }))
    }

    type DrainStream = Answers<v1::DrainProgress>;

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        let v1::DrainRequest { timeout_seconds, force } = request.into_inner();
        let messages = match self.kubernetes.works.load(Ordering::Relaxed) {
            true => {
                self.note(&format!("Drain {timeout_seconds} {force}"));
                self.kubernetes.drain.lock().unwrap().clone()
            }
            false => {
                let state = v1::drain_progress::State::NoWorker.into();
                vec![Ok(v1::DrainProgress { state, ..Default::default() })]
            }
        };
        Ok(Response::new(stream::iter(messages).chain(stream::pending()).boxed()))
    }

    type UpdateStream = Answers<v1::UpdateProgress>;

    async fn update(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::UpdateStream>, Status> {
        self.receives("Update", Phase::Installed, request.into_inner()).await
    }

    type StoreBundleStream = Answers<v1::UpdateProgress>;

    async fn store_bundle(
        &self,
        request: Request<Streaming<v1::UpdateRequest>>,
    ) -> Result<Response<Self::StoreBundleStream>, Status> {
        self.receives("StoreBundle", Phase::Stored, request.into_inner()).await
    }

    type FetchBundleStream = Answers<v1::UpdateRequest>;

    async fn fetch_bundle(
        &self,
        _request: Request<v1::FetchBundleRequest>,
    ) -> Result<Response<Self::FetchBundleStream>, Status> {
        not_served()
    }

    async fn get_attestation_keys(
        &self,
        _request: Request<v1::GetAttestationKeysRequest>,
    ) -> Result<Response<v1::GetAttestationKeysResponse>, Status> {
        let tpm = self.tpm.lock().unwrap();
        let keys = tpm.software.as_ref().ok_or_else(no_tpm)?.keys();
        let attestation = tpm.pretended.clone().unwrap_or(keys.attestation);
        let keys = Keys { attestation, ..keys }.into_message();
        Ok(Response::new(v1::GetAttestationKeysResponse { keys: Some(keys) }))
    }

    async fn attest(
        &self,
        request: Request<v1::AttestRequest>,
    ) -> Result<Response<v1::AttestResponse>, Status> {
        self.note("Attest");
        let asked = Question::from_message(request.into_inner().question.unwrap()).unwrap();
        let tpm = self.tpm.lock().unwrap();
        let software = tpm.software.as_ref().ok_or_else(no_tpm)?;
        let question = qualifier(&asked.nonce, &node_id(NODE).to_string());
        let mut registers = tpm.registers.clone();
        registers.retain(|number, _value| asked.registers.contains(number));
        let answer = match &tpm.pretended {
            None => software.prove(&asked.credential, &question, registers).unwrap(),
            // It cannot open the credential, and has all else that the question asks for.
            Some(_) => {
                let own = Challenge::new(&software.keys()).unwrap();
                let opened = software.prove(&own.credential, &question, registers).unwrap();
                Answer { secret: vec![0; 32], ..opened }
            }
        };
        Ok(Response::new(v1::AttestResponse { answer: Some(answer.into_message()) }))
    }

    async fn reboot(
        &self,
        request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::RebootResponse>, Status> {
        self.note(if request.into_inner().power_off { "PowerOff" } else { "Reboot" });
        Ok(Response::new(v1::RebootResponse {}))
    }

    async fn announce_firmware_update(
        &self,
        request: Request<v1::AnnounceFirmwareUpdateRequest>,
    ) -> Result<Response<v1::AnnounceFirmwareUpdateResponse>, Status> {
        let cancel = request.into_inner().cancel;
        self.note(if cancel { "AnnounceFirmwareUpdate cancel" } else { "AnnounceFirmwareUpdate" });
        Ok(Response::new(v1::AnnounceFirmwareUpdateResponse { sealed: true }))
    }

    async fn reset(
        &self,
        request: Request<v1::ResetRequest>,
    ) -> Result<Response<v1::ResetResponse>, Status> {
        assert_eq!(request.into_inner().node_id, node_id(NODE).to_string());
        self.note("Reset");
        Ok(Response::new(v1::ResetResponse {}))
    }

    async fn unlock(
        &self,
        _request: Request<v1::UnlockRequest>,
    ) -> Result<Response<v1::UnlockResponse>, Status> {
        self.note("Unlock");
        Ok(Response::new(v1::UnlockResponse {}))
    }
}

#[tonic::async_trait]
impl CuratorLocal for Served {
    type GetCurrentLeaderStream = Answers<v1::GetCurrentLeaderResponse>;

    async fn get_current_leader(
        &self,
        _request: Request<v1::GetCurrentLeaderRequest>,
    ) -> Result<Response<Self::GetCurrentLeaderStream>, Status> {
        let (now, served) = (self.leader(), self.clone());
        let before = now.leader_id.clone();
        let next = stream::once(async move {
            loop {
                let next = served.leader();
                if next.leader_id != before {
                    return Ok(next);
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        });
        let answers = stream::iter([Ok(now)]).chain(next).chain(stream::pending());
        Ok(Response::new(answers.boxed()))
    }

    async fn get_ca_certificate(
        &self,
        _request: Request<v1::GetCaCertificateRequest>,
    ) -> Result<Response<v1::GetCaCertificateResponse>, Status> {
        Ok(Response::new(v1::GetCaCertificateResponse { ca_certificate: self.ca.clone() }))
    }
}

impl Served {
    /// The leader of now: this node, or none.
    fn leader(&self) -> v1::GetCurrentLeaderResponse {
        let id = node_id(NODE).to_string();
        let leads = self.leads.load(Ordering::Relaxed);
        v1::GetCurrentLeaderResponse {
            leader_id: if leads { id.clone() } else { String::new() },
            this_id: id,
            crl_digest: Crl::read(&self.crl.lock().unwrap()).map_or(Vec::new(), |crl| crl.digest()),
            ..Default::default()
        }
    }

    /// The rotation of its CA, which goes on for two questions.
    async fn rotation(&self) -> v1::GetRotationResponse {
        let ca_certificate = self.authority.authorities().await.signing.clone();
        let asked = self.rotation.fetch_add(1, Ordering::Relaxed);
        let ended_at = if asked < 2 { 0 } else { 1_700_000_100 };
        let step = if asked < 2 { v1::get_rotation_response::Step::Peers.into() } else { 0 };
        v1::GetRotationResponse {
            rotation: Some(v1::Rotation { ended_at, ..begun_rotation() }),
            step,
            waits_for: if asked < 2 { vec![node_id(NODE).to_string()] } else { Vec::new() },
            ca_certificate,
            ..Default::default()
        }
    }
}

/// A rotation that has just begun.
fn begun_rotation() -> v1::Rotation {
    v1::Rotation { number: 1, began_at: 1_700_000_000, ..Default::default() }
}

/// The report of the node about an order: it gives up one with the name server [`REVERTS`].
fn network_report(order: Option<&v1::NetworkOrder>) -> v1::NetworkReport {
    let card = v1::NetworkLink {
        name: "eth0".to_owned(),
        kind: "card".to_owned(),
        mac: "52:54:00:70:6f:00".to_owned(),
        carrier: true,
        ..Default::default()
    };
    let Some(order) = order else {
        return v1::NetworkReport { links: vec![card], ..Default::default() };
    };
    let network = order.configuration.clone().unwrap_or_default();
    let reverts = network.nameservers.iter().any(|server| server == REVERTS);
    let (state, cause) = match reverts {
        true => (v1::NetworkState::Reverted, "no curator was reached over it"),
        false => (v1::NetworkState::Confirmed, ""),
    };
    let member = v1::NetworkLink { on: "bond0".to_owned(), ..card };
    let vlan = v1::NetworkLink {
        name: "bond0.7".to_owned(),
        kind: "vlan".to_owned(),
        vlan: 7,
        addresses: vec!["10.0.2.15/24".to_owned(), "2001:db8::7/128".to_owned()],
        origins: vec!["DHCP".to_owned(), "DHCPv6".to_owned()],
        ..member.clone()
    };
    v1::NetworkReport {
        number: order.number,
        state: state.into(),
        cause: cause.to_owned(),
        links: vec![member, vlan],
    }
}

#[tonic::async_trait]
impl Management for Served {
    type GetAuditStream = Answers<v1::GetAuditResponse>;
    type GetNodesStream = Answers<v1::NodeInfo>;
    type SnapshotEtcdStream = Answers<v1::SnapshotChunk>;

    async fn get_register_ticket(
        &self,
        request: Request<v1::GetRegisterTicketRequest>,
    ) -> Result<Response<v1::GetRegisterTicketResponse>, Status> {
        self.note("GetRegisterTicket");
        let lifetime = i64::try_from(request.into_inner().lifetime_seconds).unwrap();
        let ends_at = if lifetime == 0 { 0 } else { 1_700_000_000 };
        Ok(Response::new(v1::GetRegisterTicketResponse { ticket: vec![5; 32], ends_at }))
    }

    async fn get_cluster_info(
        &self,
        request: Request<v1::GetClusterInfoRequest>,
    ) -> Result<Response<v1::GetClusterInfoResponse>, Status> {
        let known = request.into_inner().crl_digest;
        let crl = self.crl.lock().unwrap().clone();
        let other = Crl::read(&crl).filter(|crl| crl.digest() != known);
        Ok(Response::new(v1::GetClusterInfoResponse {
            crl: other.map(|crl| crl.der).unwrap_or_default(),
            ca_certificate: self.ca.clone(),
            leader: node_id(NODE).to_string(),
            refused_registrations: self.crowd(crowd::refused),
            update: self
                .update
                .lock()
                .unwrap()
                .clone()
                .map(|update| v1::GetUpdateResponse { update: Some(update), ..Default::default() }),
            ..Default::default()
        }))
    }

    async fn get_nodes(
        &self,
        _request: Request<v1::GetNodesRequest>,
    ) -> Result<Response<Self::GetNodesStream>, Status> {
        if !self.leads.load(Ordering::Relaxed) {
            return Err(Status::unavailable("this node does not lead"));
        }
        let network_order = self.network.lock().unwrap().clone();
        let status = v1::NodeStatus {
            external_address: "192.0.2.1".to_owned(),
            network: Some(network_report(network_order.as_ref())),
            ..Default::default()
        };
        let node = v1::NodeInfo {
            network_order,
            id: node_id(NODE).to_string(),
            public_key: key(NODE).verifying_key().to_bytes().to_vec(),
            state: v1::NodeState::Up.into(),
            status: Some(status),
            health: v1::NodeHealth::Healthy.into(),
            heartbeat_age_ms: 1200,
            registered_at: 1_700_000_000,
            roles: self.kubernetes.roles(),
            name: NAME.to_owned(),
            ..Default::default()
        };
        Ok(answers([vec![node], self.crowd(crowd::nodes)].concat()))
    }

    async fn approve_node(
        &self,
        _request: Request<v1::ApproveNodeRequest>,
    ) -> Result<Response<v1::ApproveNodeResponse>, Status> {
        self.note("ApproveNode");
        Ok(Response::new(v1::ApproveNodeResponse::default()))
    }

    async fn update_node_roles(
        &self,
        _request: Request<v1::UpdateNodeRolesRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("UpdateNodeRoles");
        Ok(Response::new(v1::NodeInfo::default()))
    }

    async fn update_node_labels(
        &self,
        _request: Request<v1::UpdateNodeLabelsRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("UpdateNodeLabels");
        Ok(Response::new(v1::NodeInfo::default()))
    }

    async fn name_node(
        &self,
        request: Request<v1::NameNodeRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        let v1::NameNodeRequest { name, .. } = request.into_inner();
        self.note(&format!("NameNode {name}"));
        Ok(Response::new(v1::NodeInfo { name, ..Default::default() }))
    }

    async fn configure_node_network(
        &self,
        request: Request<v1::ConfigureNodeNetworkRequest>,
    ) -> Result<Response<v1::NodeInfo>, Status> {
        self.note("ConfigureNodeNetwork");
        let v1::ConfigureNodeNetworkRequest { configuration, .. } = request.into_inner();
        let order = Some(v1::NetworkOrder { number: 7, configuration });
        self.network.lock().unwrap().clone_from(&order);
        Ok(Response::new(v1::NodeInfo { network_order: order, ..Default::default() }))
    }

    async fn decommission_node(
        &self,
        _request: Request<v1::DecommissionNodeRequest>,
    ) -> Result<Response<v1::DecommissionNodeResponse>, Status> {
        self.note("DecommissionNode");
        Ok(Response::new(v1::DecommissionNodeResponse::default()))
    }

    async fn delete_node(
        &self,
        _request: Request<v1::DeleteNodeRequest>,
    ) -> Result<Response<v1::DeleteNodeResponse>, Status> {
        self.note("DeleteNode");
        Ok(Response::new(v1::DeleteNodeResponse {}))
    }

    async fn configure_cluster(
        &self,
        request: Request<v1::ConfigureClusterRequest>,
    ) -> Result<Response<v1::ConfigureClusterResponse>, Status> {
        self.note("ConfigureCluster");
        let Some(firewall) = request.into_inner().configuration.and_then(|it| it.firewall) else {
            return Ok(Response::new(v1::ConfigureClusterResponse::default()));
        };
        self.firewall.lock().unwrap().clone_from(&firewall);
        let trial = v1::FirewallTrial { configuration: Some(firewall), until: i64::MAX };
        let configuration =
            v1::ClusterConfiguration { firewall_trial: Some(trial), ..Default::default() };
        Ok(Response::new(v1::ConfigureClusterResponse { configuration: Some(configuration) }))
    }

    async fn confirm_firewall(
        &self,
        _request: Request<v1::ConfirmFirewallRequest>,
    ) -> Result<Response<v1::ConfirmFirewallResponse>, Status> {
        self.note("ConfirmFirewall");
        Ok(Response::new(v1::ConfirmFirewallResponse::default()))
    }

    async fn set_registry(
        &self,
        request: Request<v1::SetRegistryRequest>,
    ) -> Result<Response<v1::SetRegistryResponse>, Status> {
        let registry = request.into_inner().registry.unwrap();
        self.note(&format!("SetRegistry {}", registry.host));
        let registry = Some(polis_wire::registry::shown(&registry));
        Ok(Response::new(v1::SetRegistryResponse { registry }))
    }

    async fn delete_registry(
        &self,
        request: Request<v1::DeleteRegistryRequest>,
    ) -> Result<Response<v1::DeleteRegistryResponse>, Status> {
        self.note(&format!("DeleteRegistry {}", request.into_inner().host));
        Ok(Response::new(v1::DeleteRegistryResponse {}))
    }

    async fn list_registries(
        &self,
        _request: Request<v1::ListRegistriesRequest>,
    ) -> Result<Response<v1::ListRegistriesResponse>, Status> {
        let host = "registry.example:5000".to_owned();
        let username = "ann".to_owned();
        let registry = v1::Registry { host, username, ..Default::default() };
        Ok(Response::new(v1::ListRegistriesResponse { registries: vec![registry] }))
    }

    async fn get_recovery_key(
        &self,
        _request: Request<v1::GetRecoveryKeyRequest>,
    ) -> Result<Response<v1::GetRecoveryKeyResponse>, Status> {
        self.note("GetRecoveryKey");
        let encrypted_recovery_key = encrypted(&RECOVERY_KEY);
        Ok(Response::new(v1::GetRecoveryKeyResponse { encrypted_recovery_key }))
    }

    async fn confirm_recovery_key(
        &self,
        _request: Request<v1::ConfirmRecoveryKeyRequest>,
    ) -> Result<Response<v1::ConfirmRecoveryKeyResponse>, Status> {
        self.note("ConfirmRecoveryKey");
        Ok(Response::new(v1::ConfirmRecoveryKeyResponse {}))
    }

    async fn get_etcd_status(
        &self,
        _request: Request<v1::GetEtcdStatusRequest>,
    ) -> Result<Response<v1::ConsensusStatus>, Status> {
        let member = v1::ConsensusMember {
            id: 1,
            node_id: node_id(NODE).to_string(),
            answers: self.answers.load(Ordering::Relaxed),
            ..Default::default()
        };
        let members = [vec![member], self.crowd(crowd::members)].concat();
        self.etcd_read.notify_one();
        Ok(Response::new(v1::ConsensusStatus { leader: 1, members, ..Default::default() }))
    }

    async fn snapshot_etcd(
        &self,
        _request: Request<v1::SnapshotEtcdRequest>,
    ) -> Result<Response<Self::SnapshotEtcdStream>, Status> {
        let file = encrypted(&[SNAPSHOT, &Sha256::digest(SNAPSHOT)].concat());
        let chunks = file.chunks(100).map(|data| v1::SnapshotChunk { data: data.to_vec() });
        Ok(answers(chunks.collect()))
    }

    async fn get_audit(
        &self,
        _request: Request<v1::GetAuditRequest>,
    ) -> Result<Response<Self::GetAuditStream>, Status> {
        let (head, entries) = self.audit.lock().unwrap().clone();
        Ok(answers(vec![v1::GetAuditResponse { head: Some(head), entries }]))
    }

    async fn begin_update(
        &self,
        request: Request<v1::BeginUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        let v1::BeginUpdateRequest { bundle, dry_run, one_way } = request.into_inner();
        let bundle = bundle.unwrap();
        let call = if dry_run { "PlanUpdate" } else { "BeginUpdate" };
        let consent = if one_way { ", one way" } else { "" };
        self.note(&format!("{call} {}{consent}", bundle.version));
        let etcd = self.etcd_cluster.lock().unwrap().clone();
        let update = update_of(bundle, v1::cluster_update::State::Loading);
        let update = v1::ClusterUpdate { etcd, one_way, ..update };
        if !dry_run {
            *self.update.lock().unwrap() = Some(update.clone());
        }
        Ok(Response::new(update))
    }

    async fn get_update(
        &self,
        _request: Request<v1::GetUpdateRequest>,
    ) -> Result<Response<v1::GetUpdateResponse>, Status> {
        let update = self.update.lock().unwrap().clone();
        // An earlier one, which is over.
        let update = update.unwrap_or_else(|| {
            let bundle = v1::UpdateBundle { version: "0.9.0".to_owned(), ..Default::default() };
            update_of(bundle, v1::cluster_update::State::Done)
        });
        let update = Some(update);
        let waits_for = format!("{} does not have the bundle yet", node_id(NODE));
        let waits_since = 1_700_000_000;
        Ok(Response::new(v1::GetUpdateResponse { update, waits_for, waits_since }))
    }

    async fn rotate_authorities(
        &self,
        _request: Request<v1::RotateAuthoritiesRequest>,
    ) -> Result<Response<v1::Rotation>, Status> {
        self.note("RotateAuthorities");
        let number = self.authority.authorities().await.rotations + 1;
        self.authority.rotate(number).await;
        self.authority.conclude().await;
        let own = self.authority.curator(NODE).await;
        for shown in self.shown.lock().unwrap().iter() {
            shown.send_replace(Some(own.clone()));
        }
        Ok(Response::new(begun_rotation()))
    }

    async fn get_rotation(
        &self,
        _request: Request<v1::GetRotationRequest>,
    ) -> Result<Response<v1::GetRotationResponse>, Status> {
        Ok(Response::new(self.rotation().await))
    }

    async fn control_update(
        &self,
        request: Request<v1::ControlUpdateRequest>,
    ) -> Result<Response<v1::ClusterUpdate>, Status> {
        use v1::control_update_request::Control;
        let control = request.into_inner().control();
        self.note(&format!("ControlUpdate {}", control.as_str_name()));
        let mut update = self.update.lock().unwrap();
        let update = update.as_mut().unwrap();
        match control {
            Control::Pause => {
                update.paused = true;
                update.set_state(v1::cluster_update::State::Running);
            }
            Control::Resume => {
                update.paused = false;
                update.set_state(v1::cluster_update::State::Failed);
            }
            Control::Abort => update.set_state(v1::cluster_update::State::Aborted),
            Control::Unspecified => panic!("no control"),
        }
        Ok(Response::new(update.clone()))
    }
}

/// An update of the one node.
fn update_of(bundle: v1::UpdateBundle, state: v1::cluster_update::State) -> v1::ClusterUpdate {
    let step = v1::cluster_update::Step {
        node_id: node_id(NODE).to_string(),
        state: v1::cluster_update::step::State::Waiting.into(),
        voter: true,
        since: 1_700_000_000,
        ..Default::default()
    };
    v1::ClusterUpdate {
        bundle: Some(bundle),
        holder: node_id(NODE).to_string(),
        state: state.into(),
        steps: vec![step],
        began_at: 1_700_000_000,
        ..Default::default()
    }
}

#[tonic::async_trait]
impl Aaa for Served {
    async fn escrow(
        &self,
        _request: Request<v1::EscrowRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        self.note("Escrow");
        let owner = self.authority.user("owner", Role::Owner, PERSON).await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: owner.certificate,
            ca_certificate: self.ca.clone(),
            authorities: Some(self.authority.authorities().await.to_message()),
        }))
    }

    async fn renew(
        &self,
        _request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let owner = self.authority.user("owner", Role::Owner, PERSON).await;
        let authorities = self.authority.authorities().await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: owner.certificate,
            ca_certificate: authorities.signing.clone(),
            authorities: Some(authorities.to_message()),
        }))
    }

    async fn create_user(
        &self,
        request: Request<v1::CreateUserRequest>,
    ) -> Result<Response<v1::EscrowResponse>, Status> {
        let v1::CreateUserRequest { name, public_key, .. } = request.into_inner();
        self.note(&format!("CreateUser {name}"));
        assert_eq!(public_key, key(PERSON).verifying_key().to_bytes(), "tests invite this key");
        let user = self.authority.user(&name, Role::Viewer, PERSON).await;
        Ok(Response::new(v1::EscrowResponse {
            certificate: user.certificate,
            ca_certificate: self.ca.clone(),
            authorities: Some(self.authority.authorities().await.to_message()),
        }))
    }

    async fn revoke_user(
        &self,
        request: Request<v1::RevokeUserRequest>,
    ) -> Result<Response<v1::RevokeUserResponse>, Status> {
        self.note(&format!("RevokeUser {}", request.into_inner().name));
        Ok(Response::new(v1::RevokeUserResponse {}))
    }

    async fn list_users(
        &self,
        _request: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        let public_key = key(PERSON).verifying_key().to_bytes().to_vec();
        let role = v1::UserRole::Owner.into();
        let user = v1::User { name: "owner".to_owned(), role, public_key, revoked: false };
        let users = [vec![user], self.crowd(crowd::users)].concat();
        Ok(Response::new(v1::ListUsersResponse { users }))
    }
}
