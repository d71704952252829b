//! Nodes that consist of `consensus` alone.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use polis_base::files::Root;
use polis_base::users::ETCD;
use polis_control::consensus::client::{Client, User};
use polis_control::consensus::snapshots::Pace;
use polis_control::consensus::{
    Config, MemberStatus, Members, Orders, PEER_PORT, Peer, Probe, QUOTA, Restarts, Service, Start,
    Status,
};
use polis_qemu::deadline::Deadline;
use polis_runtime::board::Board;
use polis_runtime::event::until;
use polis_runtime::lines::Lines;
use polis_runtime::logtree::{Query, Tree, layer};
use polis_runtime::supervisor::{Context, Policy, Supervisor};
use polis_tests::patiently;
use polis_wire::identity::NodeKey;
use polis_wire::pki::{Host, Overview};
use tokio::sync::{mpsc, watch};

/// Longer than anything here may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(45);

/// The etcd to test with. Without it, the tests fail.
pub(crate) fn etcd() -> PathBuf {
    let Some(path) = std::env::var_os("POLIS_ETCD") else {
        panic!("POLIS_ETCD does not name an etcd; `cargo xtask test` provides one");
    };
    let path = PathBuf::from(path);
    assert!(path.is_file(), "POLIS_ETCD names {}, which is not a file", path.display());
    path
}

/// A loopback address that no other test uses: the process is in its middle,
/// the number of the node in this process at its end.
fn address() -> Ipv4Addr {
    static NODES: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, NODES.fetch_add(1, Ordering::Relaxed))
}

/// A machine that is off: its disk, its key, its address.
pub(crate) struct Machine {
    disk: tempfile::TempDir,
    pub(crate) key: NodeKey,
    pub(crate) peer: Peer,
    pub(crate) config: Config,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let disk = tempfile::tempdir().unwrap();
        // As `/` is: the user of etcd passes through it.
        std::fs::set_permissions(disk.path(), Permissions::from_mode(0o755)).unwrap();
        let root = Root::at(disk.path());
        root.create().unwrap();
        let address = address();
        let config = Config {
            binary: etcd(),
            // It could not reach a program below the home of root.
            user: None,
            tree: root.data.etcd,
            sockets: root.ephemeral.consensus,
            listen: SocketAddr::from((address, PEER_PORT)),
            restorer: etcd().with_file_name("etcdutl"),
            snapshot: root.esp.etcd_snapshot,
            directory: root.esp.cluster_directory,
            quota: QUOTA,
            snapshot_pace: Pace::default(),
            probe: Probe::default(),
        };
        // Names would have to be in /etc/hosts; addresses are in the certificate.
        let peer = Peer { host: Host::Address(IpAddr::V4(address)), port: PEER_PORT };
        Self { disk, key: NodeKey::generate().unwrap(), peer, config }
    }

    pub(crate) fn name(&self) -> String {
        self.key.id().to_string()
    }

    /// Lets etcd run as the user that a node gives it, from a copy of the program that this
    /// user reaches.
    pub(crate) fn with_user_of_etcd(mut self) -> Self {
        let program = self.disk.path().join("etcd");
        std::fs::copy(&self.config.binary, &program).unwrap();
        self.config.binary = program;
        self.config.user = Some(ETCD);
        self
    }

    /// The content of its disk.
    pub(crate) fn root(&self) -> Root {
        Root::at(self.disk.path())
    }

    pub(crate) fn orders(&self, start: Start) -> Orders {
        Orders { key: self.key.clone(), peer: self.peer.clone(), start }
    }

    /// Switches it on.
    pub(crate) fn start(&self, start: Start) -> Node {
        let (orders_to, orders) = watch::channel(Some(self.orders(start)));
        let service = Service::new(self.config.clone(), orders);
        let (status, overview, members) = (service.status(), service.overview(), service.members());
        let restarts = service.restarts();
        let Running { supervisor, logs, written, .. } =
            supervise("consensus", move |ctx| service.clone().run(ctx));
        let name = self.name();
        let socket = self.config.sockets.client().to_owned();
        Node {
            name,
            socket,
            supervisor,
            status,
            overview,
            members,
            restarts,
            logs,
            written,
            orders: orders_to,
        }
    }

    /// The content of the file from which etcd reads its CRL.
    pub(crate) fn crl_file(&self) -> Vec<u8> {
        self.config.tree.peer_crl.read().unwrap().unwrap()
    }
}

/// A cluster of one machine, and a client with the rights of `user`.
pub(crate) async fn cluster_of_one(user: User) -> (Machine, Node, Client) {
    let machine = Machine::new();
    let node = machine.start(Start::Bootstrap);
    let client = node.client(user).await;
    (machine, node, client)
}

/// A service that runs, and its status.
pub(crate) struct Running {
    pub(crate) supervisor: Supervisor,
    pub(crate) stages: Board,
    pub(crate) logs: Tree,
    pub(crate) written: mpsc::Receiver<String>,
}

/// Runs one service, and restarts it as often as it dies.
pub(crate) fn supervise<R, F, E>(name: &'static str, run: R) -> Running
where
    R: Fn(Context) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<anyhow::Error> + 'static,
{
    let logs = Tree::new(None);
    // The first of several nodes gets the events of all: a failed story shows them.
    layer::install(logs.clone());
    let (lines, written) = Lines::channel();
    let stages = Board::new(BTreeMap::new(), lines.clone());
    let supervisor = Supervisor::start(stages.clone(), lines, logs.clone(), move |ctx| {
        let run = run.clone();
        async move {
            ctx.healthy();
            let _child = ctx.spawn(name, Policy::forever(), run);
            ctx.cancelled().await;
            Ok::<_, Infallible>(())
        }
    });
    Running { supervisor, stages, logs, written }
}

/// A machine that is on.
pub(crate) struct Node {
    name: String,
    pub(crate) supervisor: Supervisor,
    pub(crate) status: watch::Receiver<Status>,
    pub(crate) overview: watch::Receiver<Overview>,
    pub(crate) members: Members,
    pub(crate) restarts: Restarts,
    socket: PathBuf,
    logs: Tree,
    written: mpsc::Receiver<String>,
    pub(crate) orders: watch::Sender<Option<Orders>>,
}

impl Node {
    /// Waits until the status is as it should be, and returns it.
    #[track_caller]
    pub(crate) fn waits(
        &self,
        what: &'static str,
        so: impl Fn(&Status) -> bool,
    ) -> impl Future<Output = Status> {
        let at = std::panic::Location::caller();
        let mut status = self.status.clone();
        let (logs, name) = (self.logs.clone(), self.name.clone());
        async move {
            let found = until(&mut status, "status", |status| so(status).then(|| status.clone()));
            match patiently(PATIENCE, found).await {
                Ok(found) => found.unwrap(),
                Err(_late) => {
                    let log: Vec<_> =
                        logs.backlog(&Query::all()).iter().map(|entry| entry.line()).collect();
                    let last = log[log.len().saturating_sub(60)..].join("\n");
                    let status = status.borrow().clone();
                    panic!("{at}: waited for {name} {what}, but it is {status:#?}\n{last}");
                }
            }
        }
    }

    pub(crate) async fn voter(&self) -> Status {
        self.waits("to be a voter", |status| status.standing == MemberStatus::Voter).await
    }

    /// A client with the rights of `user`, once it is a voter.
    pub(crate) async fn client(&self, user: User) -> Client {
        self.voter().await.voter().unwrap().user(user)
    }

    /// Writes the certificates of the peers without a term: a leader is missing.
    pub(crate) async fn peers_pki(&self) -> Client {
        self.client(User::EtcdPki).await
    }

    pub(crate) async fn voter_of(&self, members: usize) -> Status {
        self.waits("to be a voter among so many", |status| {
            status.standing == MemberStatus::Voter && status.voters() == members
        })
        .await
    }

    /// Every event line of this word so far, without its time.
    pub(crate) fn lines(&mut self, word: &str) -> Vec<String> {
        let start = format!("POLIS {word} ");
        let mut lines = Vec::new();
        while let Ok(line) = self.written.try_recv() {
            if line.starts_with(&start) {
                lines.push(line.split(" t=").next().unwrap().to_owned());
            }
        }
        lines
    }

    /// The same up to the one that has `wanted` in it: a status is there a moment before its line.
    pub(crate) async fn lines_up_to(&mut self, word: &str, wanted: &str) -> Vec<String> {
        let mut lines = Vec::new();
        eventually("its event line", || {
            lines.extend(self.lines(word));
            lines.last().is_some_and(|line: &String| line.contains(wanted))
        })
        .await;
        lines
    }

    /// A client without a namespace, for what nothing of ours does.
    pub(crate) async fn etcd(&self) -> etcd_client::Client {
        let address = format!("unix://{}", self.socket.display());
        let endpoint = tonic::transport::Endpoint::from_shared(address).unwrap();
        let channel = etcd_client::Channel::Tonic(endpoint.connect_lazy());
        etcd_client::Client::from_channel(channel, None).await.unwrap()
    }

    /// The process of its etcd.
    pub(crate) fn pid(&self) -> rustix::process::Pid {
        let wanted = format!("--name\0{}\0", self.name);
        let found = std::fs::read_dir("/proc").unwrap().find_map(|entry| {
            let pid = entry.unwrap().file_name().to_str()?.parse::<i32>().ok()?;
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            String::from_utf8_lossy(&command).contains(&wanted).then_some(pid)
        });
        rustix::process::Pid::from_raw(found.expect("its etcd runs")).unwrap()
    }

    /// Pulls the plug of etcd.
    pub(crate) fn kill(&self) {
        rustix::process::kill_process(self.pid(), rustix::process::Signal::KILL).unwrap();
    }

    pub(crate) async fn stop(self) {
        self.supervisor.stop().await;
    }
}

/// Waits for a condition that no event value shows.
#[track_caller]
pub(crate) fn eventually(
    what: &'static str,
    mut so: impl FnMut() -> bool,
) -> impl Future<Output = ()> {
    let at = std::panic::Location::caller();
    async move {
        let mut end = Deadline::within(PATIENCE);
        while !so() {
            assert!(!end.is_over(), "{at}: waited for {what}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
