//! The management of a node, over real connections.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use polis_proto::v1;
use polis_proto::v1::node_management_client::NodeManagementClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinHandle;
use tonic::Code;

use super::*;
use polis_base::recovery::form;
use polis_base::stage::Stages;
use polis_control::cluster::unlock::Announcements;
use polis_control::cluster::unlock::request::{self, Open, Requests};
use polis_runtime::supervisor::Handles;
use polis_wire::identity::NodeId;
use polis_wire::rpc::Role;
use polis_wire::rpc::client::{Channel, Expect, Trust, dial};
use polis_wire::rpc::resumes_at;
use polis_wire::rpc::testing::{Authority, SOON, key, node_id, self_signed};

struct Running {
    addresses: [SocketAddr; 2],
    end: watch::Receiver<Option<Reason>>,
    reset: watch::Receiver<Option<tokio::time::Instant>>,
    authority: Authority,
    handles: Handles,
    ctx: Context,
    task: JoinHandle<Result<(), Error>>,
    owned: Owned,
}

/// A machine of an image without keys.
fn unsigned() -> polis_machine::update::Config {
    polis_machine::update::Config {
        disk: "/dev/vda".into(),
        slot: "A".to_owned(),
        version: "0.1.0".to_owned(),
        variant: "base".to_owned(),
        kubernetes: None,
        release_key: None,
        kernels: "/esp/EFI/Linux".into(),
        efivars: "/sys/firmware/efi/efivars".into(),
        before: polis_base::files::Root::at("/nonexistent".as_ref()).data.node.trial,
    }
}

/// Event values whose owners would be other services.
struct Owned {
    _cluster: watch::Sender<cluster::Status>,
    workload: watch::Sender<workload::Status>,
    _ready: watch::Sender<bool>,
    _credentials: watch::Sender<Option<Credentials>>,
    _access_list: watch::Sender<Arc<AccessList>>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    _unlock_requests: watch::Sender<Open>,
    calls: Calls,
    disk: tempfile::TempDir,
}

impl Running {
    async fn start() -> Self {
        let authority = Authority::new().await;
        let credentials = authority.node(1).await;
        Self::start_with(authority, Some(credentials), watch::Sender::default()).await
    }

    async fn start_with(
        authority: Authority,
        credentials: Option<Credentials>,
        unlock_requests: watch::Sender<Open>,
    ) -> Self {
        Self::start_on(authority, credentials, unlock_requests, unsigned()).await
    }

    async fn start_on(
        authority: Authority,
        credentials: Option<Credentials>,
        unlock_requests: watch::Sender<Open>,
        machine: polis_machine::update::Config,
    ) -> Self {
        let node = node_id(1);
        let status = cluster::Status {
            state: cluster::State::Home,
            node: Some(node),
            ..cluster::Status::default()
        };
        let (cluster, clusters) = watch::channel(status);
        let (snapshot, snapshots) = watch::channel(Arc::default());
        let (ready, readies) = watch::channel(true);
        let (workload, workloads) = watch::channel(workload::Status::default());
        let up = AccessList { nodes: Some([node].into()), ..AccessList::default() };
        let (access_list, access_lists) = watch::channel(Arc::new(up));
        // A node whose disk is locked does not know its users.
        if credentials.is_some() {
            authority.admits(&access_list);
        }
        let (credentials, own) = watch::channel(credentials);
        let environment = Environment {
            control: 3,
            recovery: None,
            disk: "/dev/vda".into(),
            esp: "/dev/vda1".into(),
            slot: "A".to_owned(),
            version: "0.1.0".to_owned(),
            image: "0123456789abcdef".to_owned(),
            stages: Stages::default(),
            previous_guru: None,
            maintenance: None,
        };
        let announcements = watch::Sender::default();
        let inputs = Inputs {
            environment,
            cluster: clusters,
            consensus: watch::Sender::default().subscribe(),
            pki: watch::Sender::default().subscribe(),
            ready: readies,
            report: watch::Sender::default().subscribe(),
            ring: watch::Sender::default().subscribe(),
            snapshot: snapshots,
            credentials: own,
            unlock_requests: Requests::new(unlock_requests.subscribe()),
            announcements: Announcements::new(announcements.subscribe()),
            access_list: access_lists,
            workload: workloads,
            drains: Drains::default(),
            time: watch::Sender::default().subscribe(),
            forwarding: watch::Sender::default().subscribe(),
            shipping: watch::Sender::default().subscribe(),
            cluster_update: watch::Sender::default().subscribe(),
            mirror: watch::Sender::default().subscribe(),
            volumes: watch::Sender::default().subscribe(),
            firewall: watch::Sender::default().subscribe(),
        };
        let bound = || Listen::Bound(Arc::new(TcpListener::bind("127.0.0.1:0").unwrap()));
        let limits = Limits::default();
        let listening = [watch::Sender::default(), watch::Sender::default()];
        let mut listens = listening.each_ref().map(watch::Sender::subscribe);
        let disk = tempfile::tempdir().unwrap();
        let root = polis_base::files::Root::at(disk.path());
        root.create().unwrap();
        let calls = Calls::new(root.data.node.calls);
        calls.open().await;
        let (end, ends) = watch::channel(None);
        let (reset, resets) = watch::channel(None);
        let service = Service {
            config: Config { listen: bound(), metrics: bound(), limits },
            tpm: Tpm::new("/nonexistent".into()),
            inputs,
            table: Arc::new(Table::polis().unwrap()),
            servers: Vec::new(),
            end,
            reset,
            update: Door::new(
                machine,
                watch::Sender::default().subscribe(),
                watch::Sender::default(),
            ),
            bundles: Store::new(root.data.update),
            calls: calls.clone(),
            firewall: crate::firewall::Config::live(false),
            listening,
        };
        let (ctx, handles) = Context::for_test();
        #[expect(clippy::disallowed_methods, reason = "a test has no supervisor")]
        let task = tokio::spawn(service.run(ctx.clone()));
        let mut addresses = Vec::new();
        for listens in &mut listens {
            addresses.push(listens.wait_for(Option::is_some).await.unwrap().unwrap());
        }
        let addresses = [addresses[0], addresses[1]];
        let owned = Owned {
            _cluster: cluster,
            workload,
            _ready: ready,
            _credentials: credentials,
            _access_list: access_list,
            snapshot,
            _unlock_requests: unlock_requests,
            calls,
            disk,
        };
        Self { addresses, end: ends, reset: resets, authority, handles, ctx, task, owned }
    }

    async fn client(&self, role: Role) -> NodeManagementClient<Channel> {
        let user = self.authority.user(role.as_str(), role, 5).await;
        let trust = Trust::in_one(self.authority.der.clone());
        let (host, port) = (self.addresses[0].ip().to_string(), self.addresses[0].port());
        let expect = Expect::Node(node_id(1));
        let connection = dial(&host, port, expect, &trust, Some(&user)).await.unwrap();
        NodeManagementClient::new(connection.channel)
    }

    async fn stop(self) {
        self.handles.cancel().await;
        tokio::time::timeout(SOON, self.task).await.unwrap().unwrap().unwrap();
    }

    /// The answer of the metrics port to a request, head and all.
    async fn metrics(&self, credentials: Option<&Credentials>, path: &str) -> String {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.authority.der.clone().into()).unwrap();
        let builder = rustls::ClientConfig::builder_with_provider(rpc::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match credentials {
            Some(own) => {
                let key = rustls_pki_types::PrivatePkcs8KeyDer::from(own.key.to_vec());
                let chain = vec![own.certificate.clone().into()];
                builder.with_client_auth_cert(chain, key.into()).unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let tcp = tokio::net::TcpStream::connect(self.addresses[1]).await.unwrap();
        let name = node_id(1).to_string().try_into().unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut tls = connector.connect(name, tcp).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
        tls.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = tls.read_to_end(&mut answer);
        // A server that ends without a farewell has still answered.
        let _ended = tokio::time::timeout(SOON, read).await.unwrap();
        String::from_utf8(answer).unwrap()
    }
}

#[tokio::test]
async fn a_node_says_how_it_is_and_what_its_services_do() {
    let running = Running::start().await;
    let mut client = running.client(Role::Viewer).await;
    let status = client.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.node_id, node_id(1).to_string());
    assert_eq!((status.cluster_state.as_str(), status.ready), ("home", true));
    let services = client.services(v1::ServicesRequest {}).await.unwrap().into_inner().services;
    let named: Vec<_> = services.iter().map(|service| service.name.as_str()).collect();
    assert_eq!(named, ["test", "test.certificate", "test.grpc", "test.metrics"]);
    assert!(services.iter().all(|service| service.state == "healthy"), "{services:?}");
    running.stop().await;
}

#[tokio::test]
async fn only_who_operates_ends_the_machine_and_gets_a_reply_before() {
    let running = Running::start().await;
    let request = v1::RebootRequest { power_off: true };
    let refused = running.client(Role::Viewer).await.reboot(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert_eq!(*running.end.borrow(), None);
    let mut operator = running.client(Role::Operator).await;
    operator.reboot(request).await.unwrap();
    assert_eq!(*running.end.borrow(), Some(Reason::PowerOff));
    // Only the call that was made is reported, and before its answer it was on the disk.
    let calls = running.owned.calls.oldest(9);
    let told: Vec<_> = calls.iter().map(|it| (&*it.who, &*it.call, &*it.what, it.code)).collect();
    assert_eq!(told, [("operator operator", "Reboot", "power off", 0)]);
    assert_eq!(calls[0].from, "127.0.0.1");
    running.stop().await;
}

#[tokio::test]
async fn only_who_operates_drains_a_node_and_a_node_without_pods_says_so() {
    let running = Running::start().await;
    let request = v1::DrainRequest { timeout_seconds: 60, force: false };
    let refused = running.client(Role::Viewer).await.drain(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut operator = running.client(Role::Operator).await;
    let mut told = operator.drain(request).await.unwrap().into_inner();
    let first = told.message().await.unwrap().unwrap();
    assert_eq!(first.state(), v1::drain_progress::State::NoWorker);
    let wrong = v1::DrainRequest { timeout_seconds: 0, force: false };
    assert_eq!(operator.drain(wrong).await.unwrap_err().code(), Code::InvalidArgument);

    // A worker whose service of drains has not answered yet is not drained.
    running.owned.workload.send_modify(|status| {
        status.parts.insert(workload::Part::Kubelet, workload::PartState::Ready);
    });
    let mut first = operator.drain(request).await.unwrap().into_inner();
    let mut second = operator.drain(request).await.unwrap().into_inner();
    assert_eq!(first.message().await.unwrap_err().code(), Code::Aborted);
    let silent = tokio::time::timeout(Duration::from_millis(200), second.message()).await;
    assert!(silent.is_err(), "{silent:?}");
    running.stop().await;
}

/// A handler that borrowed the picture of the console twice, with a new picture in between,
/// stopped both for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_is_told_while_the_picture_of_the_console_changes() {
    let running = Running::start().await;
    let mut client = running.client(Role::Viewer).await;
    let (pictures, end) = (running.owned.snapshot.clone(), Arc::new(AtomicBool::new(false)));
    let ended = Arc::clone(&end);
    let drawing = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            pictures.send_replace(Arc::default());
        }
    });
    for _ in 0..1000 {
        client.get_status(v1::GetStatusRequest {}).await.unwrap();
    }
    end.store(true, Ordering::Relaxed);
    drawing.join().unwrap();
    running.stop().await;
}

#[tokio::test]
async fn a_follower_of_the_log_or_the_screen_sees_the_end_of_the_service() {
    let running = Running::start().await;
    let mut client = running.client(Role::Viewer).await;
    let request = v1::LogsRequest { follow: true, ..Default::default() };
    let mut logs = client.logs(request).await.unwrap().into_inner();
    let body = polis_runtime::logtree::Body::Raw("hello".to_owned());
    running.ctx.logs().append("test.x", polis_runtime::logtree::Origin::Service, body);
    let first = logs.message().await.unwrap().unwrap();
    assert_eq!(first.entries[0].message, "hello");
    let frames = client.console(v1::ConsoleRequest {}).await.unwrap();
    let mut frames = frames.into_inner();
    let frame = frames.message().await.unwrap().unwrap();
    let _snapshot: Snapshot = serde_json::from_slice(&frame.snapshot).unwrap();
    let early = v1::LogsRequest { boot: -1, ..Default::default() };
    assert_eq!(client.logs(early).await.unwrap_err().code(), Code::Unavailable);
    let ((), logs, frames) =
        tokio::join!(running.stop(), logs.message(), async { frames.message().await });
    assert_eq!(logs.unwrap_err().code(), Code::Unavailable);
    assert_eq!(frames.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn metrics_are_for_those_who_may_read_and_say_what_was_asked() {
    let running = Running::start().await;
    let viewer = running.authority.user("ann", Role::Viewer, 5).await;
    running.client(Role::Viewer).await.services(v1::ServicesRequest {}).await.unwrap();
    let answer = running.metrics(Some(&viewer), "/metrics").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    for line in [
        "polis_build_info{version=\"0.1.0\",image=\"0123456789abcdef\"} 1",
        "polis_cluster_state{state=\"home\"} 1",
        "polis_services{state=\"healthy\"} 4",
        "polis_etcd_standing{standing=\"starting\"} 1",
        "polis_rpc_calls_total{server=\"management\",rpc=\"/polis.v1.NodeManagement/Services\",code=\"Ok\"} 1",
        "polis_rpc_answer_seconds_count{server=\"management\",rpc=\"/polis.v1.NodeManagement/Services\"} 1",
        "polis_log_lost_total 0",
    ] {
        assert!(answer.lines().any(|found| found == line), "{line} is not in:\n{answer}");
    }
    let own = answer.lines().find(|line| line.contains("use=\"own\"")).unwrap();
    assert!(own.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 80.0 * 86_400.0, "{own}");
    assert!(answer.contains("process_resident_memory_bytes "), "{answer}");

    let untrusted = running.metrics(None, "/metrics").await;
    assert!(untrusted.starts_with("HTTP/1.1 401"), "{untrusted}");
    let key = self_signed(9, None);
    assert!(running.metrics(Some(&key), "/metrics").await.starts_with("HTTP/1.1 401"));
    assert!(running.metrics(Some(&viewer), "/other").await.starts_with("HTTP/1.1 404"));
    running.stop().await;
}

#[tokio::test]
async fn a_node_that_has_its_disk_waits_for_no_key() {
    let running = Running::start().await;
    let mut owner = running.client(Role::Owner).await;
    let refused = owner.unlock(v1::UnlockRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    tokio::time::timeout(Duration::from_secs(60), running.stop()).await.unwrap();
}

#[tokio::test]
async fn a_node_that_waits_for_its_key_takes_it_only_from_an_owner() {
    let authority = Authority::new().await;
    let join = self_signed(9, Some(authority.der.clone()));
    let waits = watch::Sender::default();
    let open = waits.clone();
    let mut waiting = request::wait(&open, Some(join.clone()));
    let running = Running::start_with(authority, None, waits).await;
    let text = form::write(&[7; form::SIZE]);
    let unlock = async |role: Role| {
        let user = running.authority.user(role.as_str(), role, 5).await;
        let (host, port) = (running.addresses[0].ip().to_string(), running.addresses[0].port());
        let trust = &Trust::Unchecked;
        let connection = dial(&host, port, Expect::AnyNode, trust, Some(&user)).await.unwrap();
        assert_eq!(connection.certificate, join.certificate);
        let request = v1::UnlockRequest { recovery_key: text.to_string() };
        NodeManagementClient::new(connection.channel).unlock(request).await
    };
    assert_eq!(unlock(Role::Operator).await.unwrap_err().code(), Code::PermissionDenied);
    // No other call is served by a certificate alone.
    let owner = running.authority.user("owner", Role::Owner, 5).await;
    let (host, port) = (running.addresses[0].ip().to_string(), running.addresses[0].port());
    let dialled = dial(&host, port, Expect::AnyNode, &Trust::Unchecked, Some(&owner)).await;
    let mut others = NodeManagementClient::new(dialled.unwrap().channel);
    let refused = others.get_status(v1::GetStatusRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(refused.message().contains("which users there are"), "{refused}");
    let (unlocked, ()) = tokio::join!(unlock(Role::Owner), async {
        let request = waiting.next().await;
        assert_eq!(*request.key.bytes(), [7; form::SIZE]);
        request.answer.send(Ok(())).unwrap();
    });
    unlocked.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn only_an_owner_resets_a_node_and_only_by_its_own_full_id() {
    let running = Running::start().await;
    let reset = |node: NodeId| v1::ResetRequest { node_id: node.to_string() };
    for role in [Role::Viewer, Role::Operator] {
        let refused = running.client(role).await.reset(reset(node_id(1))).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{role:?}");
    }
    let mut owner = running.client(Role::Owner).await;
    let refused = owner.reset(reset(node_id(2))).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(*running.reset.borrow(), None);
    owner.reset(reset(node_id(1))).await.unwrap();
    assert!(running.reset.borrow().is_some_and(|until| until > tokio::time::Instant::now()));
    running.stop().await;
}

#[tokio::test]
async fn only_an_owner_announces_a_firmware_update_and_only_to_a_node_that_is_home() {
    let running = Running::start().await;
    let request = || v1::AnnounceFirmwareUpdateRequest { cancel: false };
    for role in [Role::Viewer, Role::Operator] {
        let call = running.client(role).await.announce_firmware_update(request()).await;
        assert_eq!(call.unwrap_err().code(), Code::PermissionDenied, "{role:?}");
    }
    let call = running.client(Role::Owner).await.announce_firmware_update(request()).await;
    let refused = call.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("not home"), "{refused}");
    running.stop().await;
}

#[tokio::test]
async fn only_an_owner_updates_a_node_and_an_image_without_keys_takes_nothing() {
    let running = Running::start().await;
    let piece =
        || futures::stream::iter([v1::UpdateRequest { data: vec![1; 100], ..Default::default() }]);
    for role in [Role::Viewer, Role::Operator] {
        let refused = running.client(role).await.update(piece()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{role:?}");
    }
    let refused = running.client(Role::Owner).await.update(piece()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.metadata().get(polis_wire::rpc::REASON).unwrap(), "update-no-key");
    assert!(refused.message().contains("was built without keys"), "{refused}");
    running.stop().await;
}

/// A bundle of the signer with this seed.
fn bundle(signer: u8) -> Vec<u8> {
    let (kernel, system) = ([1; 300], vec![2; 3 << 20]);
    let manifest = polis_bundle::Manifest {
        version: semver::Version::new(0, 2, 0),
        security_level: polis_bundle::SECURITY_LEVEL,
        architecture: std::env::consts::ARCH.to_owned(),
        variant: "base".to_owned(),
        image: "00ff".to_owned(),
        from: semver::Version::new(0, 1, 0),
        etcd: semver::Version::new(3, 5, 16),
        kubernetes: None,
        kernel: polis_bundle::Part::of(&kernel[..]).unwrap(),
        system: polis_bundle::Part::of(&*system).unwrap(),
    };
    let mut bundle = Vec::new();
    let parts: [&mut dyn std::io::Read; 2] = [&mut &kernel[..], &mut &*system];
    polis_bundle::write(&mut bundle, &manifest, &key(signer), parts).unwrap();
    bundle
}

#[tokio::test]
async fn a_bundle_whose_transfer_broke_is_received_from_where_it_broke() {
    let authority = Authority::new().await;
    let credentials = Some(authority.node(1).await);
    let release_key = Some(key(3).verifying_key());
    let machine = polis_machine::update::Config { release_key, ..unsigned() };
    let open = watch::Sender::default();
    let running = Running::start_on(authority, credentials, open, machine).await;
    let mut owner = running.client(Role::Owner).await;
    let whole = bundle(3);
    let head = |bundle: &[u8]| {
        let data = polis_bundle::Bundle::open(bundle, None).unwrap().head().to_vec();
        v1::UpdateRequest { data, resume: true, one_way: false }
    };
    // Sends the head, then the bytes from where the node continues up to `end`.
    let mut sends = async |whole: &[u8], end: usize| {
        let first = head(whole);
        let begin = first.data.len();
        let (mut pieces, sent) = futures::channel::mpsc::channel(32);
        pieces.try_send(first).unwrap();
        let answer = owner.store_bundle(sent).await.unwrap();
        let at = usize::try_from(resumes_at(answer.metadata())).unwrap();
        for piece in whole[at.max(begin)..end].chunks(256 << 10) {
            let piece = v1::UpdateRequest { data: piece.to_vec(), ..Default::default() };
            // A node that has an answer takes no more.
            if pieces.try_send(piece).is_err() {
                break;
            }
        }
        drop(pieces);
        let mut answers = answer.into_inner();
        let mut last = Ok(v1::UpdateProgress::default());
        while let Some(next) = answers.message().await.transpose() {
            last = next;
        }
        (at, last)
    };
    let (at, last) = sends(&whole, whole.len() - 10).await;
    assert_eq!((at, last.unwrap_err().code()), (0, Code::FailedPrecondition));
    // That of another signer is another bundle, and changes nothing of this one.
    let foreign = bundle(4);
    let (at, last) = sends(&foreign, foreign.len()).await;
    assert_eq!((at, last.unwrap_err().code()), (0, Code::FailedPrecondition));
    let (at, last) = sends(&whole, whole.len()).await;
    assert_eq!(at, whole.len() - (1 << 20));
    assert_eq!(last.unwrap().phase(), v1::update_progress::Phase::Stored);
    let root = polis_base::files::Root::at(running.owned.disk.path());
    assert!(std::fs::read(root.data.update.path().join("00ff.bundle")).unwrap() == whole);
    // Nothing is left of it to go on with.
    let (at, _last) = sends(&whole, whole.len()).await;
    assert_eq!(at, 0);
    running.stop().await;
}
