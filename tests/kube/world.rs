//! A controller that consists of `consensus` and `workload` alone.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ed25519_dalek::SigningKey;
use polis_base::files::Group;
use polis_base::sys::clock;
use polis_control::cluster;
use polis_control::consensus::Start;
use polis_control::consensus::client::User;
use polis_control::curator::audit;
use polis_machine::network;
use polis_proto::v1;
use polis_runtime::event::until;
use polis_runtime::logtree::Query;
use polis_tests::patiently;
use polis_wire::identity::NodeId;
use polis_wire::node_roles::{Nodes, Role};
use polis_wire::pki::{self, Namespace, WorkerPurpose};
use polis_wire::pod_network::Networks;
use polis_wire::rpc::client::{Client, Timeouts};
use polis_wire::rpc::testing::{Authority, node_id};
use polis_wire::rpc::{self, AccessList, Credentials, Listen};
use polis_workload::drain::Drains;
use polis_workload::{Answer, Api, Config, Identity, Part, Service, Site, Status};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::harness::{Machine, Node, Running, supervise};

/// An API server starts in five seconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Longer than any controller takes for its part on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// Between two questions to a program.
const PAUSE: Duration = Duration::from_millis(100);

/// The address that the API server announces: the first one of a network that no
/// machine has. A loopback address would be refused.
const ADVERTISED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Between two looks at the certificates: a node takes an hour.
const LOOK: Duration = Duration::from_secs(1);

/// The seed of the key that the node shows to users of Polis.
const FACE: u8 = 1;

/// The record of a healthy node with these roles.
pub(crate) fn worker_record(roles: &[Role]) -> v1::NodeInfo {
    v1::NodeInfo {
        state: v1::NodeState::Up.into(),
        roles: Some(Role::record(roles)),
        health: v1::NodeHealth::Healthy.into(),
        name: "web-1".to_owned(),
        ..Default::default()
    }
}

/// The programs to test with. Without them, the stories fail.
pub(crate) fn kube() -> PathBuf {
    let Some(path) = std::env::var_os("POLIS_KUBE") else {
        panic!("POLIS_KUBE does not name the programs; `cargo xtask test` provides them");
    };
    let path = PathBuf::from(path);
    assert!(path.is_file(), "POLIS_KUBE names {}, which is not a file", path.display());
    path
}

/// A machine with the role, that is on.
pub(crate) struct Controller {
    pub(crate) machine: Machine,
    pub(crate) etcd: Node,
    pub(crate) site: Site,
    pub(crate) status: watch::Receiver<Status>,
    /// The CA of the cluster, for certificates of users.
    pub(crate) authority: Authority,
    /// The permitted callers.
    pub(crate) access_list: watch::Sender<Arc<AccessList>>,
    /// Where users are let in.
    pub(crate) access: SocketAddr,
    /// What is counted there.
    pub(crate) metrics: Arc<rpc::Metrics>,
    roles: watch::Sender<Option<v1::NodeRoles>>,
    /// The report of the leader of the cluster.
    nodes: watch::Sender<Option<Arc<Nodes>>>,
    /// Values that have to live as long as the service.
    _values: (
        watch::Sender<cluster::Status>,
        watch::Sender<network::Status>,
        watch::Sender<Networks>,
        watch::Sender<Option<Credentials>>,
    ),
    running: Running,
}

impl Controller {
    /// Founds a cluster of one, and waits until every part does its work.
    pub(crate) async fn ready() -> Self {
        let controller = Self::start().await;
        controller
            .waits("everything to be ready", |status| {
                status.all().is_some_and(|all| all.name() == "ready")
            })
            .await;
        controller
    }

    /// Founds a cluster of one, and gives the node the role.
    pub(crate) async fn start() -> Self {
        let machine = Machine::new().with_user_of_etcd();
        let etcd = machine.start(Start::Bootstrap);
        etcd.voter().await;
        let site = site(&machine);
        let Listen::Bound(bound) = &site.access else { panic!("{:?}", site.access) };
        let access = bound.local_addr().unwrap();
        let authority = Authority::new().await;
        let (shown, credentials) = watch::channel(Some(authority.node(FACE).await));
        let known = AccessList { nodes: Some(BTreeSet::new()), ..AccessList::default() };
        let access_list = watch::Sender::new(Arc::new(known));
        authority.admits(&access_list);
        let metrics = Arc::new(rpc::Metrics::new(&rpc::Table::users()));
        let (member, cluster) = watch::channel(cluster::Status {
            state: cluster::State::Home,
            node: Some(machine.key.id()),
            ..cluster::Status::default()
        });
        let given = Role::record(&[Role::ConsensusMember, Role::KubernetesController]);
        let (roles, asked) = watch::channel(Some(given));
        // Others than the default ones, so that a part with the default ones fails.
        let (networks, chosen) = watch::channel(Networks {
            pods: "172.16.0.0/13".parse().unwrap(),
            services: "172.24.0.0/16".parse().unwrap(),
        });
        let (network, addresses) = watch::channel(network::Status {
            primary: Some(IpAddr::V4(ADVERTISED)),
            ..network::Status::default()
        });
        let own = v1::NodeInfo {
            state: v1::NodeState::Up.into(),
            roles: Some(given),
            health: v1::NodeHealth::Healthy.into(),
            ..Default::default()
        };
        let own = Nodes::from([(machine.key.id(), own)]);
        let nodes = watch::Sender::new(Some(Arc::new(own)));
        let service = Service {
            config: Config {
                site: site.clone(),
                host: None,
                mesh: None,
                tree: machine.root(),
                look: LOOK,
            },
            cluster,
            roles: asked,
            networks: chosen,
            consensus: etcd.status.clone(),
            network: addresses,
            nodes: nodes.subscribe(),
            containerd: watch::channel(Default::default()).1,
            client: Client::new(
                watch::channel(Vec::new()).1,
                watch::channel(None).1,
                Timeouts::default(),
            ),
            identity: Identity {
                credentials,
                access_list: access_list.subscribe(),
                metrics: Arc::clone(&metrics),
            },
            status: watch::Sender::default(),
            drains: Drains::default(),
            mesh: Default::default(),
        };
        let status = service.status.subscribe();
        let running = supervise("workload", move |ctx| service.clone().run(ctx));
        let _values = (member, network, networks, shown);
        Self {
            machine,
            etcd,
            site,
            status,
            authority,
            access_list,
            access,
            metrics,
            roles,
            nodes,
            _values,
            running,
        }
    }

    /// The name in the certificate that the node shows to users.
    pub(crate) fn server_name() -> String {
        node_id(FACE).to_string()
    }

    /// The leader reports this record of another node from now on; `None`: it is gone.
    pub(crate) fn reports(&self, node: NodeId, record: Option<v1::NodeInfo>) {
        self.nodes.send_modify(|nodes| {
            let nodes = Arc::make_mut(nodes.get_or_insert_default());
            match record {
                Some(record) => nodes.insert(node, record),
                None => nodes.remove(&node),
            };
        });
    }

    /// The way to the API server of a part of a worker, with a certificate as the leader
    /// gives it.
    pub(crate) async fn worker(&self, purpose: WorkerPurpose, node: NodeId) -> Api {
        let key = SigningKey::from_bytes(&[41; 32]);
        let wish = purpose.certificate(node, None, key.verifying_key().to_bytes());
        let client = self.etcd.status.borrow().voter().unwrap().user(User::KubernetesPki);
        let issued = Namespace::new(client, "").ensure(&wish, clock::now()).await.unwrap();
        let pair = self.site.data.pair(purpose.name(), Group::Root);
        pair.certificate.write(pki::certificate_pem(&issued.der).as_bytes()).unwrap();
        pair.key.write(pki::key_pem(&key).as_bytes()).unwrap();
        self.api(purpose.name())
    }

    /// Takes the role away.
    pub(crate) fn take_role(&self) {
        self.roles.send_replace(Some(Role::record(&[Role::ConsensusMember])));
    }

    /// Waits until the status is as it should be, and returns it.
    #[track_caller]
    pub(crate) fn waits(
        &self,
        what: &'static str,
        so: impl Fn(&Status) -> bool,
    ) -> impl Future<Output = Status> {
        let at = std::panic::Location::caller();
        let (mut status, logs) = (self.status.clone(), self.running.logs.clone());
        async move {
            let found = until(&mut status, "status", |status| so(status).then(|| status.clone()));
            match patiently(PATIENCE, found).await {
                Ok(found) => found.unwrap(),
                Err(_late) => {
                    let log: Vec<_> =
                        logs.backlog(&Query::all()).iter().map(|entry| entry.line()).collect();
                    let last = log[log.len().saturating_sub(60)..].join("\n");
                    let status = status.borrow().clone();
                    panic!("{at}: waited for {what}, but it is {status:#?}\n{last}");
                }
            }
        }
    }

    /// Every event line of the workload so far, without its time and cause.
    pub(crate) fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Ok(line) = self.running.written.try_recv() {
            if let Some(rest) = line.strip_prefix("POLIS workload ") {
                let words: Vec<_> = rest.split(' ').take(2).collect();
                lines.push(words.join(" "));
            }
        }
        lines
    }

    /// What the log of the node has of the audit log of the API server.
    pub(crate) fn audited(&self) -> Vec<String> {
        let entries = self.running.logs.backlog(&Query::all());
        let entries = entries.iter().filter(|entry| audit::is_line(entry));
        entries.map(|entry| entry.body.to_string()).collect()
    }

    /// The way to the API server, as the holder of the certificate for `purpose`.
    pub(crate) fn api(&self, purpose: &str) -> Api {
        let client = Some(self.site.data.pair(purpose, Group::Root));
        Api { address: self.site.api(), ca: self.site.run.ca.clone(), client }
    }

    /// The way to it of a caller who may do everything.
    pub(crate) fn master(&self) -> Api {
        self.api("reconciler")
    }

    /// Makes an object by a caller who may do everything.
    pub(crate) async fn create(&self, path: &str, object: &Value) -> Answer {
        let kind = [("content-type", "application/json")];
        let body = object.to_string().into_bytes();
        self.master().request(http::Method::POST, path, &kind, body).await.unwrap()
    }

    /// The process of one part.
    pub(crate) fn pid(&self, part: Part) -> Pid {
        self.find(part).unwrap_or_else(|| panic!("{} runs", part.name()))
    }

    /// The process of one part, if it runs.
    pub(crate) fn find(&self, part: Part) -> Option<Pid> {
        let program = format!("{}/kube-{}\0", self.site.programs.display(), part.name());
        let found = std::fs::read_dir("/proc").unwrap().find_map(|entry| {
            let pid = entry.unwrap().file_name().to_str()?.parse::<i32>().ok()?;
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            command.starts_with(program.as_bytes()).then_some(pid)
        });
        Pid::from_raw(found?)
    }

    /// Pulls the plug of one part.
    pub(crate) fn kill(&self, part: Part) {
        rustix::process::kill_process(self.pid(part), Signal::KILL).unwrap();
    }

    pub(crate) async fn stop(self) {
        self.running.supervisor.stop().await;
        self.etcd.stop().await;
    }
}

/// Asks until it is so, and prints how long that took.
pub(crate) async fn wait_until(within: Duration, what: &str, so: impl AsyncFn() -> bool) {
    let asked = async {
        while !so().await {
            tokio::time::sleep(PAUSE).await;
        }
    };
    let begun = Instant::now();
    patiently(within, asked).await.unwrap_or_else(|_| panic!("not in time: {what}"));
    println!("{what}: after {:.1} s", begun.elapsed().as_secs_f64());
}

/// Waits until an object, or the refusal in its place, is as it should be, and returns it.
pub(crate) async fn becomes(
    api: &Api,
    path: &str,
    what: &str,
    so: impl Fn(&Value) -> bool,
) -> Value {
    let mut last = Value::Null;
    let looks = async {
        loop {
            let answer = api.get(path).await.unwrap();
            last = serde_json::from_slice(&answer.body).unwrap_or_default();
            if so(&last) {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let found = patiently(SOON, looks).await;
    assert!(found.is_ok(), "{path}: waited for {what}, but it is {last:#}");
    last
}

/// A kubeconfig with this cluster and this user.
pub(crate) fn kubeconfig(cluster: &Value, user: &Value) -> String {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "c", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    });
    config.to_string()
}

/// The site of a running node, with the machine's own address and directories.
fn site(machine: &Machine) -> Site {
    let root = machine.root();
    let programs = root.ephemeral.mount.path().join("programs");
    std::fs::create_dir_all(&programs).unwrap();
    let program = programs.join("kube");
    // The users of the programs reach it there, and not everywhere else.
    std::fs::copy(kube(), &program).unwrap();
    for name in ["kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        symlink(&program, programs.join(name)).unwrap();
    }
    let live = Site::live(&root);
    let address = machine.config.listen.ip();
    let listen = SocketAddr::new(address, live.listen.port());
    let access = std::net::TcpListener::bind((address, 0)).unwrap();
    let access = Listen::Bound(Arc::new(access));
    Site { programs, listen, access, loopback: address, ..live }
}
