//! The server of a machine in maintenance, called over TLS.

use std::net::TcpListener;
use std::time::Duration;

use polis_base::stage::Stages;
use polis_base::trapdoor::code;
use polis_proto::v1;
use polis_proto::v1::maintenance_client::MaintenanceClient;
use polis_proto::v1::node_parameters::Cluster;
use polis_runtime::supervisor::Handles;
use polis_wire::identity::NodeKey;
use polis_wire::maintenance::{Code, Keys};
use polis_wire::rpc::client::{Channel, DialError, Expect, Trust, dial};
use polis_wire::rpc::testing::Authority;
use polis_wire::rpc::{Credentials, REASON, Role};
use prost::Message as _;
use tonic::{Code as StatusCode, Status};

use super::gate::Owner;
use super::*;

/// A machine in maintenance, and the way to its port.
struct World {
    base: tempfile::TempDir,
    service: Service,
    gate: Gate,
    address: SocketAddr,
    handles: Handles,
}

impl World {
    async fn new(owner: Option<Owner>) -> Self {
        let base = tempfile::tempdir().unwrap();
        let tree = files::Root::at(base.path());
        tree.create().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let environment = Environment {
            control: 3,
            recovery: None,
            disk: "/dev/vda".into(),
            esp: "/dev/vda1".into(),
            slot: "A".to_owned(),
            version: "0.1.0".to_owned(),
            image: "5d41402abc4b2a76".to_owned(),
            stages: Stages::new(),
            previous_guru: None,
            maintenance: None,
        };
        let report = Report::new(code::PARAMETERS_ABSENT, vec!["none".to_owned()]);
        let service = Service {
            environment,
            report,
            firewall: firewall::Config::live(false),
            tree,
            kernel: ["sys", "dev"].map(|name| base.path().join(name)),
            listen: Listen::Bound(Arc::new(listener)),
            end: watch::Sender::default(),
            shown: watch::Sender::default(),
        };
        let gate = Gate::new(owner).unwrap();
        let (ctx, handles) = Context::for_test();
        let network = watch::Sender::default();
        let listening = watch::Sender::new(None);
        let surveyor = Surveyor::new(service.places());
        service.server(&ctx, &gate, surveyor, &network, &listening).unwrap();
        listening.subscribe().wait_for(Option::is_some).await.unwrap();
        Self { base, service, gate, address, handles }
    }

    /// The code on the screen.
    fn code(&self) -> Code {
        self.gate.notice().strip_prefix("--code ").unwrap().parse().unwrap()
    }

    async fn dial(&self, expect: Expect, own: &Credentials) -> Result<Channel, DialError> {
        let (host, port) = (self.address.ip().to_string(), self.address.port());
        dial(&host, port, expect, &Trust::Unchecked, Some(own)).await.map(|it| it.channel)
    }

    /// A client who takes any machine for the right one.
    async fn as_caller(&self, own: &Credentials) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.dial(Expect::AnyNode, own).await.unwrap())
    }

    async fn describe(&self, own: &Credentials) -> Result<v1::DescribeResponse, Status> {
        let described = self.as_caller(own).await.describe(v1::DescribeRequest {}).await;
        described.map(tonic::Response::into_inner)
    }

    fn calls(&self) -> u64 {
        self.service.shown.borrow().calls
    }
}

fn of(key: &NodeKey) -> Credentials {
    let (certificate, key) = (key.proof().unwrap(), key.to_pkcs8_der().unwrap().into());
    Credentials { certificate, key, authorities: None }
}

fn parameters() -> v1::NodeParameters {
    let owner_public_key = NodeKey::from_seed(&[5; 32]).public_key().to_vec();
    let bootstrap = v1::ClusterBootstrap { owner_public_key, ..v1::ClusterBootstrap::default() };
    let cluster = Some(Cluster::ClusterBootstrap(bootstrap));
    v1::NodeParameters { cluster, ..v1::NodeParameters::default() }
}

fn reason(status: &Status) -> &str {
    status.metadata().get(REASON).and_then(|it| it.to_str().ok()).unwrap_or_default()
}

fn given(parameters: Vec<u8>) -> v1::GiveParametersRequest {
    v1::GiveParametersRequest { parameters, replace: false, dry_run: false }
}

#[tokio::test]
async fn the_holder_of_the_code_is_served_and_no_other() {
    let world = World::new(None).await;
    let Keys { machine, caller } = world.code().keys();
    let channel = world.dial(Expect::Node(machine.id()), &of(&caller)).await.unwrap();
    let described = MaintenanceClient::new(channel).describe(v1::DescribeRequest {}).await;
    let described = described.unwrap().into_inner();
    assert_eq!((&*described.code, described.home), ("#0601.0000", false));
    assert_eq!(world.calls(), 1);
    assert!(world.service.shown.borrow().caller.contains("127.0.0.1"));

    // Another code: the caller itself ends the handshake.
    let other = Code::generate().unwrap().keys();
    let ended = world.dial(Expect::Node(other.machine.id()), &of(&other.caller)).await;
    assert!(matches!(ended, Err(DialError::Handshake { .. })), "{:?}", ended.err());
    // A caller that takes any machine for the right one is refused.
    let machine_key = world.describe(&of(&machine)).await;
    let strangers = [world.describe(&of(&other.caller)).await, machine_key];
    for refused in strangers {
        let refused = refused.unwrap_err();
        assert_eq!((refused.code(), reason(&refused)), (StatusCode::Unauthenticated, "gate"));
    }
    assert_eq!(world.calls(), 1, "a refused call puts nothing off");
    world.handles.cancel().await;
}

#[tokio::test]
async fn a_stranger_does_nothing_by_any_call() {
    let world = World::new(Some(Owner::Key([1; 32]))).await;
    let mut client = world.as_caller(&of(&NodeKey::from_seed(&[9; 32]))).await;
    let refused = [
        client.describe(v1::DescribeRequest {}).await.map(drop),
        client.read_log(v1::ReadLogRequest::default()).await.map(drop),
        client.give_parameters(given(parameters().encode_to_vec())).await.map(drop),
        client.end(v1::EndRequest { power_off: true }).await.map(drop),
    ];
    for refused in refused {
        assert_eq!(reason(&refused.unwrap_err()), "gate");
    }
    assert_eq!(*world.service.end.borrow(), None);
    assert_eq!(world.service.tree.esp.parameters.read().unwrap(), None);
    world.handles.cancel().await;
}

#[tokio::test]
async fn a_machine_with_an_owner_shows_no_code_and_serves_the_owner_s_key() {
    let owner = NodeKey::from_seed(&[5; 32]);
    let world = World::new(Some(Owner::Key(owner.public_key()))).await;
    assert!(world.gate.notice().starts_with("--fingerprint "), "{}", &*world.gate.notice());
    assert!(!format!("{:?}", world.gate).contains("--"));
    world.describe(&of(&owner)).await.unwrap();
    world.describe(&of(&NodeKey::from_seed(&[6; 32]))).await.unwrap_err();
    let code = Code::generate().unwrap().keys();
    world.describe(&of(&code.caller)).await.unwrap_err();
    world.handles.cancel().await;
}

#[tokio::test]
async fn a_machine_that_registers_serves_the_owners_of_that_cluster() {
    let authority = Authority::new().await;
    let world = World::new(Some(Owner::Cluster(authority.der.clone()))).await;
    let owner = authority.user("otto", Role::Owner, 3).await;
    world.describe(&owner).await.unwrap();
    let operator = authority.user("ann", Role::Operator, 4).await;
    let refused = world.describe(&operator).await.unwrap_err();
    assert_eq!(refused.code(), StatusCode::PermissionDenied);
    world.describe(&of(&NodeKey::from_seed(&[6; 32]))).await.unwrap_err();
    // An owner of another cluster.
    let other = Authority::new().await.user("otto", Role::Owner, 3).await;
    world.describe(&other).await.unwrap_err();
    world.handles.cancel().await;
}

#[tokio::test]
async fn parameters_are_written_only_if_a_node_would_use_them() {
    let world = World::new(None).await;
    let file = &world.service.tree.esp.given_parameters;
    let content = |message: &[u8]| parameters::given_content(&world.service.places(), message);
    let mut client = world.as_caller(&of(&world.code().keys().caller)).await;
    let good = parameters().encode_to_vec();

    let too_large = vec![b'p'; (64 << 10) + 1];
    for bad in [&b""[..], &good[..20], b"polis-parameters-v1:%", &[0x98, 0x06, 0x01], &too_large] {
        let refused = client.give_parameters(given(bad.to_vec())).await.unwrap_err();
        assert_eq!(refused.code(), StatusCode::InvalidArgument, "{}", refused.message());
    }
    let dry_run = v1::GiveParametersRequest { dry_run: true, ..given(good.clone()) };
    client.give_parameters(dry_run).await.unwrap();
    assert_eq!(file.read().unwrap(), None, "nothing was written");

    client.give_parameters(given(good.clone())).await.unwrap();
    assert_eq!(file.read().unwrap(), Some(content(&good)));

    // Others are replaced on request alone.
    let wipes = format!("polis-{}", "ab".repeat(16));
    let other = v1::NodeParameters { wipes, ..parameters() }.encode_to_vec();
    let text = polis_wire::parameters::text(&other).into_bytes();
    let refused = client.give_parameters(given(text.clone())).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (StatusCode::FailedPrecondition, "parameters"));
    let replace = v1::GiveParametersRequest { replace: true, ..given(text) };
    let answer = client.give_parameters(replace.clone()).await.unwrap().into_inner();
    assert!(answer.replaced[0].contains("polis/given_parameters.pb on the ESP"), "{answer:?}");
    assert_eq!(file.read().unwrap(), Some(content(&other)), "the message, not its text");

    // fw_cfg takes precedence.
    let sys = world.base.path().join("sys/firmware/qemu_fw_cfg");
    let item = sys.join("by_name").join(parameters::FW_CFG_ITEM);
    std::fs::create_dir_all(&item).unwrap();
    std::fs::write(item.join("size"), good.len().to_string()).unwrap();
    std::fs::write(item.join("raw"), &good).unwrap();
    let refused = client.give_parameters(replace.clone()).await.unwrap_err();
    assert_eq!(reason(&refused), "fw-cfg");
    std::fs::remove_dir_all(sys).unwrap();

    // A home, also one that cannot be read.
    let sealed = &world.service.tree.esp.sealed_configuration;
    std::fs::write(sealed.path(), b"damaged").unwrap();
    let refused = client.give_parameters(replace).await.unwrap_err();
    assert_eq!(reason(&refused), "home");
    assert_eq!(file.read().unwrap(), Some(content(&other)));
    world.handles.cancel().await;
}

#[tokio::test]
async fn a_log_comes_in_pieces_and_an_end_is_asked_for_once_it_is_answered() {
    let world = World::new(None).await;
    let mut client = world.as_caller(&of(&world.code().keys().caller)).await;
    let report = format!("number: 1\n{}", "a line of a report\n".repeat(150));
    let folder = world.service.tree.esp.guru.reports[0].path().parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    world.service.tree.esp.guru.reports[3].write(report.as_bytes()).unwrap();
    for _call in 0..2 {
        let request = v1::ReadLogRequest { log: v1::read_log_request::Log::Reports.into() };
        let mut pieces = client.read_log(request).await.unwrap().into_inner();
        let mut text = String::new();
        while let Some(piece) = pieces.message().await.unwrap() {
            text.push_str(&piece.text);
        }
        assert_eq!(text.trim_end(), report.trim_end());
        // The ESP is read once, however often a caller asks.
        std::fs::remove_dir_all(folder).unwrap_or_default();
    }
    client.end(v1::EndRequest { power_off: true }).await.unwrap();
    assert_eq!(*world.service.end.borrow(), Some(Reason::PowerOff));
    world.handles.cancel().await;
}

#[tokio::test]
async fn the_notice_names_the_address_once_the_port_is_open() {
    let (ctx, handles) = Context::for_test();
    let (network, listening) = (watch::Sender::default(), watch::Sender::default());
    let shown = watch::Sender::default();
    let mut seen = shown.subscribe();
    let service = notice::Service {
        gate: zeroize::Zeroizing::new("--code X".to_owned()),
        network: network.subscribe(),
        listening: listening.subscribe(),
        shown,
    };
    let run = tokio::time::timeout(Duration::from_secs(5), service.run(ctx));
    let look = async {
        let primary = Some("192.0.2.1".parse().unwrap());
        network.send_replace(network::Status { primary, ..network::Status::default() });
        listening.send_replace(Some("0.0.0.0:7839".parse().unwrap()));
        let text = "polisctl maintenance describe 192.0.2.1 --code X";
        seen.wait_for(|shown: &Shown| shown.text == text).await.unwrap();
        network.send_replace(network::Status::default());
        seen.wait_for(|shown| shown.text.is_empty()).await.unwrap();
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(run, look);
    ended.unwrap().unwrap();
    assert!(!format!("{:?}", *seen.borrow()).contains("code"));
}
