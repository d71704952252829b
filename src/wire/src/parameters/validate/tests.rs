use polis_proto::v1::cluster_configuration::{
    ColdStart as WireColdStart, StorageSecurityPolicy, TpmMode as WireTpmMode,
};
use polis_proto::v1::network_configuration as wire_network;
use polis_proto::v1::node_parameters::Cluster as WireCluster;
use polis_proto::v1::{
    ClusterBootstrap, ClusterDirectory, ClusterRegister, ConsoleConfiguration,
    NetworkConfiguration, NodeParameters, cluster_directory,
};
use proptest::prelude::*;

use super::super::{FieldError, Network};
use super::*;
use polis_base::trapdoor::code;

/// The base point: valid and of full order.
fn owner() -> Vec<u8> {
    let mut key = vec![0x66; 32];
    key[0] = 0x58;
    key
}

fn ca() -> Vec<u8> {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    params.self_signed(&key).unwrap().der().to_vec()
}

pub(super) fn bootstrapping() -> ClusterBootstrap {
    ClusterBootstrap { owner_public_key: owner(), ..Default::default() }
}

pub(super) fn registering() -> ClusterRegister {
    let node = cluster_directory::Node {
        id: format!("polis-{}", "0a".repeat(16)),
        addresses: vec!["10.0.0.1:7835".to_owned()],
    };
    ClusterRegister {
        cluster_directory: Some(ClusterDirectory { nodes: vec![node] }),
        register_ticket: b"ticket".to_vec(),
        ca_certificate: ca(),
        labels: BTreeMap::new(),
        name: String::new(),
    }
}

pub(super) fn with(cluster: WireCluster) -> NodeParameters {
    NodeParameters { cluster: Some(cluster), ..Default::default() }
}

fn with_network(network: NetworkConfiguration) -> NodeParameters {
    NodeParameters {
        network: Some(network),
        ..with(WireCluster::ClusterBootstrap(bootstrapping()))
    }
}

fn with_interface(interface: wire_network::Interface) -> NodeParameters {
    with_network(NetworkConfiguration { interfaces: vec![interface], ..Default::default() })
}

pub(super) fn eth0() -> wire_network::Interface {
    wire_network::Interface { r#match: "eth0".to_owned(), ..Default::default() }
}

fn read(message: &NodeParameters) -> Result<Parameters, Error> {
    parse(&message.encode_to_vec())
}

#[track_caller]
fn refused(message: &NodeParameters) -> FieldError {
    match read(message).unwrap_err() {
        Error::OwnerKey(error)
        | Error::Ticket(error)
        | Error::CaCertificate(error)
        | Error::Field(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_minimal_bootstrap_has_the_defaults() {
    let parameters = read(&with(WireCluster::ClusterBootstrap(bootstrapping()))).unwrap();
    let Cluster::Bootstrap(bootstrap) = parameters.cluster else { panic!("not a bootstrap") };
    assert_eq!(bootstrap.configuration.domain, "cluster.internal");
    assert_eq!(bootstrap.configuration.tpm, TpmMode::BestEffort);
    assert_eq!(bootstrap.configuration.storage, StoragePolicy::Unspecified);
    assert_eq!(parameters.network, Network::default());
}

#[test]
fn a_minimal_registration_is_accepted() {
    let parameters = read(&with(WireCluster::ClusterRegister(registering()))).unwrap();
    let printed = format!("{parameters:?}");
    // All of it: any two bytes may be in the certificate, which is another each time.
    assert!(!printed.contains("116, 105, 99, 107, 101, 116"), "the ticket is not printed");
    let Cluster::Register(register) = parameters.cluster else { panic!("not a registration") };
    assert_eq!(register.ticket.0.as_slice(), b"ticket");
}

#[test]
fn nothing_chosen_has_its_own_code() {
    let error = parse(&[]).unwrap_err();
    assert_eq!(error.code(), code::PARAMETERS_NOTHING_CHOSEN);
}

#[test]
fn an_owner_key_of_31_bytes_says_so() {
    let mut message = bootstrapping();
    message.owner_public_key.pop();
    let error = read(&with(WireCluster::ClusterBootstrap(message))).unwrap_err();
    assert_eq!(error.code(), code::PARAMETERS_OWNER_KEY.with_detail(1));
    insta::assert_snapshot!(error, @"cluster_bootstrap.owner_public_key is 31 bytes; allowed is a raw Ed25519 public key of 32 bytes");
}

#[test]
fn an_owner_key_must_be_a_point_of_full_order() {
    let mut identity = vec![0; 32];
    identity[0] = 1;
    let mut off_curve = vec![0; 32];
    off_curve[0] = 2;
    for key in [identity, off_curve, vec![0; 32]] {
        let message = ClusterBootstrap { owner_public_key: key, ..Default::default() };
        let error = read(&with(WireCluster::ClusterBootstrap(message))).unwrap_err();
        assert!(matches!(error, Error::OwnerKey(_)), "{error}");
    }
}

#[test]
fn an_empty_ticket_has_its_own_code() {
    let message = ClusterRegister { register_ticket: vec![], ..registering() };
    let error = read(&with(WireCluster::ClusterRegister(message))).unwrap_err();
    assert_eq!(error.code(), code::PARAMETERS_TICKET.with_detail(2));
}

#[test]
fn only_a_ca_certificate_is_trusted() {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let leaf = rcgen::CertificateParams::default().self_signed(&key).unwrap().der().to_vec();
    let mut two = ca();
    two.push(0);
    for der in [vec![], b"noise".to_vec(), leaf, two] {
        let message = ClusterRegister { ca_certificate: der, ..registering() };
        let error = read(&with(WireCluster::ClusterRegister(message))).unwrap_err();
        assert!(matches!(error, Error::CaCertificate(_)), "{error}");
    }
}

#[test]
fn the_directory_is_neither_empty_nor_ambiguous() {
    let good = registering();
    let node = good.cluster_directory.clone().unwrap().nodes.remove(0);
    let upper = cluster_directory::Node { id: node.id.to_uppercase(), ..node.clone() };
    let silent = cluster_directory::Node { addresses: vec![], ..node.clone() };
    for (nodes, path) in [
        (vec![], "cluster_register.cluster_directory.nodes"),
        (vec![node.clone(), node], "cluster_register.cluster_directory.nodes[1].id"),
        (vec![upper], "cluster_register.cluster_directory.nodes[0].id"),
        (vec![silent], "cluster_register.cluster_directory.nodes[0].addresses"),
    ] {
        let message =
            ClusterRegister { cluster_directory: Some(ClusterDirectory { nodes }), ..good.clone() };
        assert_eq!(refused(&with(WireCluster::ClusterRegister(message))).path, path);
    }
}

#[test]
fn enums_out_of_range_are_refused() {
    for (tpm_mode, storage_security_policy, number) in [(4, 0, 2), (-1, 0, 2), (0, 5, 3)] {
        let configuration =
            v1::ClusterConfiguration { tpm_mode, storage_security_policy, ..Default::default() };
        let message =
            ClusterBootstrap { cluster_configuration: Some(configuration), ..bootstrapping() };
        assert_eq!(refused(&with(WireCluster::ClusterBootstrap(message))).number, number);
    }
}

#[test]
fn a_new_cluster_has_no_attestation_policy() {
    let configuration = v1::ClusterConfiguration {
        attestation: Some(v1::AttestationPolicy::default()),
        ..Default::default()
    };
    let message =
        ClusterBootstrap { cluster_configuration: Some(configuration), ..bootstrapping() };
    let refused = refused(&with(WireCluster::ClusterBootstrap(message)));
    assert_eq!(refused.number, 20);
    assert!(refused.allowed.contains("cluster configure --attestation-image"), "{refused}");
}

#[test]
fn a_new_cluster_has_no_names_of_kubernetes() {
    let configuration = v1::ClusterConfiguration {
        kubernetes: Some(v1::KubernetesConfiguration::default()),
        ..Default::default()
    };
    let message =
        ClusterBootstrap { cluster_configuration: Some(configuration), ..bootstrapping() };
    let refused = refused(&with(WireCluster::ClusterBootstrap(message)));
    assert_eq!(refused.number, 24);
    assert!(refused.allowed.contains("cluster configure --kubernetes-name"), "{refused}");
}

#[test]
fn a_new_cluster_has_no_proxy() {
    let configuration =
        v1::ClusterConfiguration { proxy: Some(Default::default()), ..Default::default() };
    let message =
        ClusterBootstrap { cluster_configuration: Some(configuration), ..bootstrapping() };
    let refused = refused(&with(WireCluster::ClusterBootstrap(message)));
    assert_eq!(refused.number, 26);
    assert!(refused.allowed.contains("cluster configure --proxy"), "{refused}");
}

fn time<'a>(servers: impl IntoIterator<Item = (&'a str, bool)>) -> v1::TimeConfiguration {
    let server = |(host, nts): (&str, bool)| v1::NtpServer { host: host.to_owned(), nts };
    v1::TimeConfiguration { servers: servers.into_iter().map(server).collect() }
}

#[test]
fn the_time_servers_of_a_cluster_are_hosts_each_named_once() {
    let read = |servers: &[(&str, bool)]| {
        let configuration = v1::ClusterConfiguration {
            time: Some(time(servers.iter().copied())),
            ..Default::default()
        };
        let message =
            ClusterBootstrap { cluster_configuration: Some(configuration), ..bootstrapping() };
        with(WireCluster::ClusterBootstrap(message))
    };
    assert!(
        parse(&read(&[("ntp.example.org", true), ("192.0.2.1", false)]).encode_to_vec()).is_ok()
    );
    const PATH: &str = "cluster_bootstrap.cluster_configuration.time.servers";
    // Text that would become a second directive of chronyd, or an option of the first.
    for host in ["a b", "a\nallow all", "a#", "1.2.3", "", "-x"] {
        let error = refused(&read(&[("good", false), (host, false)]));
        assert_eq!((error.path, error.number), (format!("{PATH}[1].host"), 1), "{host:?}");
    }
    let twice = refused(&read(&[("a", false), ("a", true)]));
    assert_eq!(twice.path, format!("{PATH}[1].host"));
    let names: Vec<_> = (0..9).map(|i| format!("n{i}")).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), false)).collect();
    assert_eq!(refused(&read(&many)).path, PATH);
}

#[test]
fn a_bad_label_is_named() {
    let labels = BTreeMap::from([("zone".to_owned(), "a b".to_owned())]);
    let message = ClusterBootstrap { labels, ..bootstrapping() };
    let error = refused(&with(WireCluster::ClusterBootstrap(message)));
    assert_eq!(error.path, "cluster_bootstrap.labels[\"zone\"]");
}

#[test]
fn a_static_interface_is_understood() {
    let interface = wire_network::Interface {
        r#match: "52:54:00:00:00:01".to_owned(),
        dhcp: false,
        addresses: vec!["192.0.2.7/24".to_owned(), "fd00::7/64".to_owned()],
        routes: vec![wire_network::Route {
            destination: "0.0.0.0/0".to_owned(),
            gateway: "192.0.2.1".to_owned(),
            metric: 0,
        }],
        mtu: 9000,
        ..Default::default()
    };
    let parameters = read(&with_interface(interface)).unwrap();
    let interface = &parameters.network.interfaces[0];
    assert_eq!(interface.card.to_string(), "52:54:00:00:00:01");
    assert_eq!(interface.settings.addresses[0].to_string(), "192.0.2.7/24");
    assert_eq!(interface.settings.routes[0].gateway.to_string(), "192.0.2.1");
    assert_eq!(interface.settings.mtu, Some(9000));
}

#[test]
fn a_bad_interface_names_the_field() {
    let route = |destination: &str, gateway: &str| {
        vec![wire_network::Route {
            destination: destination.to_owned(),
            gateway: gateway.to_owned(),
            metric: 0,
        }]
    };
    let addresses = |address: &str| vec![address.to_owned()];
    for (interface, path) in [
        (wire_network::Interface { r#match: "eth/0".to_owned(), ..eth0() }, "match"),
        (wire_network::Interface { r#match: "52:54:00:00:00:0A".to_owned(), ..eth0() }, "match"),
        (wire_network::Interface { mtu: 1279, ..eth0() }, "mtu"),
        (wire_network::Interface { mtu: 65_536, ..eth0() }, "mtu"),
        (wire_network::Interface { addresses: addresses("10.0.0.1"), ..eth0() }, "addresses[0]"),
        (wire_network::Interface { addresses: addresses("127.0.0.1/8"), ..eth0() }, "addresses[0]"),
        (
            wire_network::Interface { routes: route("10.0.0.1/8", "10.0.0.1"), ..eth0() },
            "routes[0].destination",
        ),
        (
            wire_network::Interface { routes: route("::/0", "10.0.0.1"), ..eth0() },
            "routes[0].gateway",
        ),
    ] {
        assert_eq!(
            refused(&with_interface(interface)).path,
            format!("network.interfaces[0].{path}")
        );
    }
}

#[test]
fn an_interface_is_configured_once() {
    let network = NetworkConfiguration { interfaces: vec![eth0(), eth0()], ..Default::default() };
    assert_eq!(refused(&with_network(network)).path, "network.interfaces[1].match");
}

#[test]
fn a_terminal_outside_dev_is_refused() {
    let message = NodeParameters {
        console: Some(ConsoleConfiguration { tui: vec!["ttyS1".to_owned(), "../x".to_owned()] }),
        ..with(WireCluster::ClusterBootstrap(bootstrapping()))
    };
    assert_eq!(refused(&message).path, "console.tui[1]");
}

#[test]
fn a_field_of_the_wrong_type_is_malformed() {
    // cluster_bootstrap as a number.
    assert_eq!(parse(&[8, 1]).unwrap_err().code(), code::PARAMETERS_MALFORMED);
}

fn any_name() -> impl Strategy<Value = String> {
    "[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\\.[a-z]{1,8}){0,3}"
}

fn any_labels() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map(
        "([a-z]{1,5}\\.io/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?",
        "([A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?)?",
        0..8,
    )
}

pub(super) fn any_interface() -> impl Strategy<Value = wire_network::Interface> {
    (
        any::<[u8; 6]>(),
        any::<bool>(),
        prop::collection::vec((1u8..127, any::<u8>(), 0u32..=32), 0..4),
        prop::collection::vec((any::<u32>(), 0u32..=32, any::<u32>()), 0..4),
        prop_oneof![Just(0u32), 1280u32..=65_535],
    )
        .prop_map(|(mac, dhcp, addresses, routes, mtu)| wire_network::Interface {
            r#match: super::super::Mac(mac).to_string(),
            dhcp,
            addresses: addresses.iter().map(|(a, b, p)| format!("{a}.1.2.{b}/{p}")).collect(),
            routes: routes
                .into_iter()
                .map(|(bits, prefix, metric)| {
                    let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                    let network = std::net::Ipv4Addr::from_bits(bits & mask);
                    let destination = format!("{network}/{prefix}");
                    wire_network::Route { destination, gateway: "10.0.0.1".to_owned(), metric }
                })
                .collect(),
            mtu,
            ..Default::default()
        })
}

prop_compose! {
    fn any_valid()(
        domain in any_name(),
        tpm in 0i32..=3,
        storage in 0i32..=4,
        cold_start in 0i32..=2,
        labels in any_labels(),
        interface in any_interface(),
        servers in prop::collection::vec(any::<[u8; 4]>(), 0..4),
        names in prop::collection::btree_set("[a-z]{1,8}(\\.[a-z]{1,8}){0,3}", 0..4),
        tui in prop::collection::vec("[a-zA-Z0-9]{1,16}", 0..4),
    ) -> NodeParameters {
        let configuration = v1::ClusterConfiguration {
            cluster_domain: domain,
            tpm_mode: WireTpmMode::try_from(tpm).unwrap().into(),
            storage_security_policy: StorageSecurityPolicy::try_from(storage).unwrap().into(),
            cold_start: WireColdStart::try_from(cold_start).unwrap().into(),
            time: Some(time(names.iter().map(|name| (name.as_str(), false)))),
            ..v1::ClusterConfiguration::default()
        };
        let bootstrap = ClusterBootstrap {
            cluster_configuration: Some(configuration),
            labels,
            ..bootstrapping()
        };
        NodeParameters {
            cluster: Some(WireCluster::ClusterBootstrap(bootstrap)),
            network: Some(NetworkConfiguration {
                interfaces: vec![interface],
                nameservers: servers.into_iter().map(|s| std::net::Ipv4Addr::from(s).to_string()).collect(),
                ntp_servers: names.into_iter().collect(),
                ..Default::default()
            }),
            console: Some(ConsoleConfiguration { tui }),
            wipes: String::new(),
            install: None,
            volumes: Vec::new(),
            mirror: None,
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        if let Err(error) = parse(&bytes) {
            let report = error.report(super::super::Source::Esp, Vec::new());
            prop_assert!(!report.next.is_empty());
        }
    }

    #[test]
    fn every_valid_message_is_accepted(message in any_valid()) {
        let read = read(&message);
        prop_assert!(read.is_ok(), "{}", read.unwrap_err());
    }

    #[test]
    fn a_message_cut_short_is_refused_or_is_a_whole_shorter_one(message in any_valid(), cut in any::<prop::sample::Index>()) {
        let bytes = message.encode_to_vec();
        let cut = &bytes[..cut.index(bytes.len())];
        if let Ok(shorter) = parse(cut) {
            // A cut between two top-level fields leaves a valid message: it must parse
            // on its own.
            let whole = NodeParameters::decode(cut).unwrap();
            prop_assert_eq!(whole.encode_to_vec().len(), cut.len());
            prop_assert!(matches!(shorter.cluster, Cluster::Bootstrap(_)));
        }
    }

    #[test]
    fn an_unknown_field_anywhere_at_the_top_is_refused(message in any_valid(), number in 9u8..15) {
        let mut bytes = message.encode_to_vec();
        bytes.extend([number << 3, 1]);
        prop_assert_eq!(
            parse(&bytes).unwrap_err().code(),
            code::PARAMETERS_UNKNOWN_FIELD.with_detail(u16::from(number))
        );
    }
}

#[test]
fn a_hundred_kilobytes_of_random_bytes_never_panic() {
    let mut state = 1u32;
    let input: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(100_000)
    .collect();
    for start in 0..2000 {
        assert!(parse(&input[start..]).is_err());
    }
}

#[test]
fn a_name_is_one_that_a_node_may_have_and_only_a_full_id_is_wiped() {
    let named = |name: &str| {
        let register = ClusterRegister { name: name.to_owned(), ..registering() };
        parse(&with(WireCluster::ClusterRegister(register)).encode_to_vec())
    };
    let Ok(Parameters { cluster: Cluster::Register(register), wipes, .. }) = named("web-1") else {
        panic!("it is not read")
    };
    assert_eq!((register.name, wipes), (Some("web-1".parse().unwrap()), None));
    for wrong in ["Web", "polis-web", "-a", "abc123"] {
        let error = named(wrong).unwrap_err().to_string();
        assert!(error.contains("cluster_register.name"), "{wrong}: {error}");
    }
    let id = format!("polis-{}", "0a".repeat(16));
    let wiping = |text: &str| {
        let cluster = with(WireCluster::ClusterBootstrap(bootstrapping()));
        parse(&NodeParameters { wipes: text.to_owned(), ..cluster }.encode_to_vec())
    };
    assert_eq!(wiping(&id).unwrap().wipes, Some(id.parse().unwrap()));
    for part in [&id[..20], &id[6..], "web-1"] {
        let error = wiping(part).unwrap_err().to_string();
        assert!(error.contains("wipes is"), "{part}: {error}");
    }
}
