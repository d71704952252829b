//! A one-node cluster on loopback, for tests of complete command lines.
//!
//! The certificates, TLS and the rules of access are those of a node. The services return
//! fixed answers and record every call, so that a test can assert which calls a command did
//! not make.
//!
//! One file a service: `curator`, `management`, `users`, `node`, `maintenance`, `kubernetes`;
//! `changes` has what a test changes of the cluster while it runs.

mod changes;
mod crowd;
mod curator;
mod kubernetes;
mod maintenance;
mod management;
mod node;
mod records;
mod served;
mod tpm;
mod users;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use ed25519_dalek::pkcs8::EncodePrivateKey as _;
use polis_proto::v1;
use polis_proto::v1::aaa_server::AaaServer;
use polis_proto::v1::curator_local_server::CuratorLocalServer;
use polis_proto::v1::maintenance_server::MaintenanceServer;
use polis_proto::v1::management_server::ManagementServer;
use polis_proto::v1::node_management_server::NodeManagementServer;
use tokio::sync::watch;
use tonic::service::RoutesBuilder;

use self::kubernetes::Kubernetes;
use self::served::Served;
pub(crate) use self::served::Takes;
use self::tpm::Tpm;
use super::contexts::{self, Context, Contexts, Settings};
use super::testing::World;
use polis_wire::age::{self, Recipient};
use polis_wire::rpc::testing::{Authority, Running, key};
use polis_wire::rpc::{App, Credentials, Limits, Role};
use polis_wire::s3::testing::Store;

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

/// The kernel that the node has started.
pub(super) const KERNEL: &[u8] = b"the kernel of the node";

/// A source that does not have the operator.
pub(super) const KEPT_OUT: &str = "203.0.113.0/24";

/// A name server: the node gives up a network with it.
pub(super) const REVERTS: &str = "192.0.2.66";

/// A name server: the node tries a network with it without an end.
pub(super) const TRIES: &str = "192.0.2.67";

/// The certificate that a server shows.
type Shown = watch::Sender<Option<Credentials>>;

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
    settings: Arc<Mutex<served::Settings>>,
    /// What the next looks at its update find.
    update_looks: Arc<Mutex<VecDeque<v1::ClusterUpdate>>>,
    /// What it has of a bundle whose transfer broke.
    pub(super) part: Arc<Mutex<Vec<u8>>>,
    /// The cluster version of its etcd; empty: not known.
    pub(super) etcd_cluster: Arc<Mutex<String>>,
    /// A bucket with a snapshot, and how the command line names it.
    bucket: Option<(Store, String)>,
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
        let settings: Arc<Mutex<served::Settings>> = Arc::default();
        let update_looks: Arc<Mutex<VecDeque<v1::ClusterUpdate>>> = Arc::default();
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
                update_looks: Arc::clone(&update_looks),
                rotation: Arc::default(),
                settings: Arc::clone(&settings),
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
            settings,
            update_looks,
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

    /// The CA in the context.
    pub(super) fn ca(world: &World) -> Option<Vec<u8>> {
        let contexts = Contexts::find(Some(world.path("polis")), |_name| None).unwrap();
        contexts.load("home").unwrap().ca
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

    /// How the command line names its bucket.
    pub(super) fn bucket(&self) -> String {
        self.bucket.as_ref().map(|(_, target)| target.clone()).unwrap_or_default()
    }

    /// Where its controller lets users in.
    pub(super) fn gateway(&self) -> String {
        self.gateway.as_ref().unwrap().address.to_string()
    }

    /// Blocks until somebody has read the state of etcd.
    pub(super) fn until_etcd_is_read(&self) {
        self.runtime.block_on(self.etcd_read.notified());
    }

    /// The calls since the last query.
    pub(super) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}
