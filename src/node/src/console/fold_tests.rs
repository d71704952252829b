//! Tests of the snapshot that the console makes of event values.

use polis_tui::snapshot::Node;

use super::*;
use polis_base::environment::Environment;
use polis_machine::parameters::{Bonding, LinkSettings};

fn values() -> Values {
    let variable = |name: &str| match name {
        "POLIS_STAGES" => Some("kernel=0-4.5".to_owned()),
        "POLIS_CONTROL_FD" => Some("3".to_owned()),
        "POLIS_RECOVERY_FD" | "POLIS_MAINTENANCE" => None,
        name => Some(name.to_owned()),
    };
    let environment = Environment::from_variables(variable).unwrap();
    Values { stages: environment.stages.clone(), ..Values::nothing(environment) }
}

#[test]
fn a_cluster_survives_the_loss_of_those_that_answer_and_are_not_needed() {
    use crate::console::members::{Probed, Reported};
    use polis_control::consensus::{Member, MemberId};
    let mut values = values();
    let member = |number: u64| Member {
        id: MemberId(number),
        name: number.to_string(),
        peer_url: String::new(),
        learner: number == 4,
    };
    values.consensus = consensus::Status {
        standing: consensus::MemberStatus::Voter,
        member: Some(MemberId(1)),
        leader: Some(MemberId(2)),
        peer_url: "https://one".to_owned(),
        members: (1..=4).map(member).collect(),
        ..Default::default()
    };
    // No member was asked yet; this node's own does not serve here: the test gives no
    // client.
    let etcd = folded(&values).etcd.unwrap();
    assert_eq!((etcd.quorum, etcd.survives), (true, None));
    let answers: Vec<_> = etcd.members.iter().map(|member| member.answers).collect();
    assert_eq!(answers, [Some(false), None, None, None]);
    let reported = Reported {
        took: Duration::from_millis(2),
        behind: 8,
        share: 60,
        db_size: 9,
        reaches: Some(vec![1]),
    };
    for number in 2..=4 {
        let connected = Some(number != 3);
        values
            .members
            .insert(MemberId(number), Probed { connected, reported: Some(reported.clone()) });
    }
    let etcd = folded(&values).etcd.unwrap();
    assert_eq!(etcd.survives, Some(0));
    let answers: Vec<_> = etcd.members.iter().map(|member| member.answers).collect();
    assert_eq!(answers, [false, true, false, true].map(Some));
    // The own member reaches whom etcd is connected to; of the others, their nodes know.
    assert_eq!(etcd.members[0].reaches, Some(vec![2, 4]));
    assert_eq!(etcd.members[1].reaches, Some(vec![1]));
    let learner = &etcd.members[3];
    let caught_up = polis_tui::snapshot::MemberStatus::Learner { caught_up: Some(60) };
    assert_eq!(learner.standing, caught_up);
    assert_eq!((learner.lag, learner.round_trip), (Some(8), Some(2000)));
    values.consensus.leader = None;
    let etcd = folded(&values).etcd.unwrap();
    assert_eq!((etcd.quorum, etcd.survives), (false, None));
}

fn folded(values: &Values) -> Snapshot {
    fold(values, &Arc::default(), Duration::from_secs(9), SystemTime::UNIX_EPOCH)
}

#[test]
fn unknown_values_are_not_invented() {
    let snapshot = folded(&values());
    assert_eq!((snapshot.etcd, snapshot.pki, snapshot.ready), (None, None, None));
    assert_eq!(snapshot.header.clock, "1970-01-01 00:00:00 UTC");
    assert_eq!(snapshot.stages.len(), stage::Stage::ALL.len());
    assert_eq!(snapshot.stages[0].elapsed, Duration::from_millis(4500));
    assert_eq!(snapshot.stages[1].state, StageState::Pending);
}

#[test]
fn only_a_time_that_something_has_confirmed_stands_without_a_mark() {
    let mut values = values();
    for state in ClockState::ALL {
        values.time.state = state;
        let is_unset = [ClockState::Unset, ClockState::Floor].contains(&state);
        assert_eq!(folded(&values).header.clock_unset, is_unset, "{state:?}");
    }
}

#[test]
fn only_what_a_server_gave_has_a_lease_and_it_ends() {
    let address: Cidr = "10.0.2.15/24".parse().unwrap();
    let six: Cidr = "2001:db8::7/128".parse().unwrap();
    let ends = Some(Duration::from_secs(69));
    let mut values = values();
    values.network.interfaces = vec![network::Interface {
        index: 2,
        name: "eth0".to_owned(),
        kind: network::Kind::Card(None),
        path: String::new(),
        mtu: 1500,
        planned: None,
        mac: "52:54:00:00:00:01".parse().unwrap(),
        carrier: true,
        driver: None,
        addresses: vec!["fd00::1/64".parse().unwrap(), address, six],
        asking: true,
        leased: Some(network::Leased { address, ends }),
        leased_v6: Some(network::Leased { address: six, ends: None }),
    }];
    let shown = folded(&values).network.interfaces.remove(0).addresses;
    assert_eq!((&*shown[0].source, shown[0].lease), ("router", None));
    assert_eq!((&*shown[1].source, shown[1].lease), ("DHCP", Some(Duration::from_secs(60))));
    assert_eq!((&*shown[2].source, shown[2].lease), ("DHCPv6", None));
}

#[test]
fn links_without_an_address_by_plan_are_not_missing_one() {
    let link = |kind, planned| network::Interface {
        index: 2,
        name: "bond0".to_owned(),
        kind,
        mac: "52:54:00:00:00:01".parse().unwrap(),
        carrier: true,
        driver: None,
        path: String::new(),
        mtu: 1500,
        planned,
        addresses: Vec::new(),
        asking: false,
        leased: None,
        leased_v6: None,
    };
    let member = network::Membership { bond: "bond0".to_owned(), active: false };
    let asking = LinkSettings { dhcp: true, ..LinkSettings::default() };
    let mut values = values();
    values.network.interfaces = vec![
        link(network::Kind::Card(Some(member)), None),
        link(network::Kind::Bond(Some(Bonding::ActiveBackup)), Some(LinkSettings::default())),
        link(network::Kind::Vlan { on: "bond0".to_owned(), id: 7 }, Some(asking)),
        link(network::Kind::Card(None), None),
    ];
    let shown = folded(&values).network.interfaces;
    let bonds: Vec<_> = shown.iter().map(|link| link.bond.as_deref()).collect();
    assert_eq!(bonds, [Some("bond0"), None, None, None]);
    let kinds: Vec<_> = shown.iter().map(|link| (link.kind.as_str(), link.silent)).collect();
    assert_eq!(
        kinds,
        [
            ("member of bond0, waits", true),
            ("bond, active-backup", true),
            ("VLAN 7 on bond0", false),
            ("", false),
        ]
    );
    assert_eq!(shown[2].planned.as_deref(), Some("DHCP"));
    // A member without a carrier does not wait for its turn.
    values.network.interfaces[0].carrier = false;
    let shown = folded(&values).network.interfaces;
    assert_eq!(shown[0].kind, "member of bond0, no carrier");
}

#[test]
fn ages_of_nodes_grow_without_a_new_report() {
    let mut values = values();
    let node = Node { heartbeat: Some(Duration::from_secs(2)), ..Node::default() };
    let nodes = Nodes { nodes: vec![node], ..Nodes::default() };
    let at = Duration::from_secs(5);
    values.cluster_nodes = ClusterNodes { at, nodes: Some(nodes) };
    let shown = folded(&values).nodes.unwrap();
    assert_eq!(shown.nodes[0].heartbeat, Some(Duration::from_secs(6)));
}

#[test]
fn a_key_that_can_be_lost_or_found_is_warned_of() {
    let mut values = values();
    values.cluster.keys = Some(cluster::KeyStatus {
        sealed: false,
        keeper: Some(cluster::Keeper::Disk),
        recovery_key_unsaved: true,
        firmware_update_announced: false,
    });
    let warnings = folded(&values).warnings;
    assert_eq!(warnings.len(), 2);
    let help: Vec<_> = warnings.iter().filter_map(|warning| warning.help.as_deref()).collect();
    let [share, recovery_key] = help[..] else { panic!("{warnings:?}") };
    assert!(share.ends_with("polisctl cluster configure --cold-start attended"), "{share}");
    assert!(recovery_key.starts_with("polisctl node recovery-key "), "{recovery_key}");
}

#[test]
fn certificates_hang_below_the_authority_of_their_own_namespace() {
    let at = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
    let authority = AuthorityView {
        namespace: "one".to_owned(),
        name: "ca".to_owned(),
        fingerprint: "ff".repeat(32),
        not_before: at(0),
        not_after: at(200),
        issued: 1,
        crl_number: 0,
        crl_issued: None,
        revoked: Vec::new(),
    };
    let fingerprint = fingerprint(&authority);
    let words = FingerprintWords::from([(fingerprint, "a-b-c-d".to_owned())]);
    let overview = Overview { authorities: vec![authority], certificates: Vec::new() };
    let shown = pki(&overview, &words, at(50)).unwrap().authorities.remove(0);
    assert_eq!((&*shown.name, shown.used, shown.days_left), ("one ca", 25, 150));
    assert_eq!(shown.words.as_deref(), Some("a-b-c-d"));
}

#[test]
fn a_cluster_without_an_owner_says_so_first_and_does_not_ask_for_the_recovery_key() {
    let at = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
    let mut values = values();
    values.pki.authorities = vec![AuthorityView {
        namespace: "polis:curator".to_owned(),
        name: "cluster".to_owned(),
        fingerprint: "ff".repeat(32),
        not_before: at(0),
        not_after: at(200),
        issued: 1,
        crl_number: 0,
        crl_issued: None,
        revoked: Vec::new(),
    }];
    let ca = fingerprint(&values.pki.authorities[0]);
    values.words = FingerprintWords::from([(ca, "a-b-c-d".to_owned())]);
    let keys = cluster::KeyStatus {
        sealed: true,
        keeper: None,
        recovery_key_unsaved: true,
        firmware_update_announced: false,
    };
    values.cluster.keys = Some(keys);
    assert!(warnings(&values).iter().all(|it| it.text != UNOWNED), "the boot goes on");
    let done = stage::Entry {
        state: stage::State::Done,
        started: Duration::ZERO,
        changed: Duration::from_secs(9),
    };
    values.stages.insert(stage::Stage::Roles, done);
    let shown = warnings(&values);
    assert_eq!(shown[0].text, UNOWNED);
    let help = shown[0].help.as_deref().unwrap();
    assert!(help.ends_with("cluster take-ownership --fingerprint a-b-c-d"), "{help}");
    assert!(shown.iter().all(|it| it.text != RECOVERY_KEY), "{shown:?}");

    values.pki.certificates = vec![CertificateView {
        namespace: "polis:curator".to_owned(),
        issuer: "cluster".to_owned(),
        name: "owner".to_owned(),
        serial: String::new(),
        fingerprint: String::new(),
        not_before: at(0),
        renew_at: at(20),
        not_after: at(30),
        managed: false,
        renewal: Renewal::WhenUsed,
        revoked: false,
    }];
    let shown = warnings(&values);
    assert!(shown.iter().all(|it| it.text != UNOWNED), "{shown:?}");
    assert!(shown.iter().any(|it| it.text == RECOVERY_KEY), "{shown:?}");
}

#[test]
fn a_stage_that_waits_says_for_how_long() {
    let mut values = values();
    let state = stage::State::Waiting("a lease".to_owned());
    let (started, changed) = (Duration::from_secs(5), Duration::from_secs(7));
    values.stages.insert(stage::Stage::Network, stage::Entry { state, started, changed });
    let shown = folded(&values).stages.remove(4);
    let since = Duration::from_secs(2);
    assert_eq!(shown.state, StageState::Waiting { what: "a lease".to_owned(), since });
    assert_eq!(shown.elapsed, Duration::from_secs(4));
}

#[test]
fn children_follow_their_parent_whatever_its_neighbour_is_called() {
    let mut values = values();
    for name in ["root", "root.a", "root.a-b", "root.a.c"] {
        let entry = supervisor::Entry {
            state: supervisor::State::Dead,
            restarts: 1,
            cause: None,
            down: false,
            since: Duration::from_secs(4),
        };
        values.services.insert(name.into(), entry);
    }
    let shown: Vec<_> =
        folded(&values).services.iter().map(|it| format!("{} {}", it.depth, it.name)).collect();
    assert_eq!(shown, ["0 root", "1 a", "2 c", "1 a-b"]);
}

#[test]
fn a_certificate_that_has_ended_has_negative_days_and_is_all_used() {
    let at = |days: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400);
    let view = CertificateView {
        namespace: "n".to_owned(),
        issuer: "i".to_owned(),
        name: "c".to_owned(),
        serial: String::new(),
        fingerprint: String::new(),
        not_before: at(100),
        renew_at: at(150),
        not_after: at(200),
        managed: true,
        renewal: Renewal::ByUser,
        revoked: false,
    };
    let early = certificate(&view, at(125));
    assert_eq!((early.used, early.renew_at, early.days_left), (25, 50, 75));
    assert_eq!((early.renews.as_deref(), early.when_used), (Some("1970-05-31"), false));
    let person = CertificateView { renewal: Renewal::WhenUsed, ..view.clone() };
    let person = certificate(&person, at(125));
    assert_eq!((person.renews.as_deref(), person.when_used), (Some("1970-05-31"), true));
    let late = certificate(&view, at(201));
    assert_eq!((late.used, late.days_left), (100, -1));
    assert_eq!(certificate(&view, at(0)).used, 0);
}

#[test]
fn a_fingerprint_is_read_and_other_text_is_zero() {
    assert_eq!(bytes(&"ff0a".repeat(16))[..3], [0xff, 0x0a, 0xff]);
    assert_eq!([bytes("ff0a"), bytes("é!")], [[0; 32]; 2]);
}

#[test]
fn a_snapshot_that_grows_older_is_the_one_of_that_moment() {
    use crate::console::age::later;
    let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let mut values = values();
    let entry = |state| stage::Entry {
        state,
        started: Duration::from_secs(5),
        changed: Duration::from_secs(7),
    };
    let waiting = stage::State::Waiting("a lease".to_owned());
    values.stages.insert(stage::Stage::Network, entry(waiting));
    values.stages.insert(stage::Stage::Storage, entry(stage::State::Started));
    values.stages.insert(stage::Stage::Parameters, entry(stage::State::Done));
    values.services.insert(
        "root".into(),
        supervisor::Entry {
            state: supervisor::State::Healthy,
            restarts: 1,
            cause: None,
            down: false,
            since: Duration::from_secs(4),
        },
    );
    let address: Cidr = "10.0.2.15/24".parse().unwrap();
    values.network.interfaces = vec![network::Interface {
        index: 2,
        name: "eth0".to_owned(),
        kind: network::Kind::Card(None),
        path: String::new(),
        mtu: 1500,
        planned: None,
        mac: "52:54:00:00:00:01".parse().unwrap(),
        carrier: true,
        driver: None,
        addresses: vec![address],
        asking: true,
        leased: Some(network::Leased { address, ends: Some(Duration::from_secs(69)) }),
        leased_v6: None,
    }];
    let received = Node { heartbeat: Some(Duration::from_secs(2)), ..Node::default() };
    values.cluster_nodes = ClusterNodes {
        at: Duration::from_secs(5),
        nodes: Some(Nodes {
            nodes: vec![received, Node::default()],
            stale: Some(Duration::from_secs(3)),
            ..Nodes::default()
        }),
    };
    let taken = consensus::snapshots::Taken { number: 1, at: at(80), bytes: 7, revision: 9 };
    values.consensus = consensus::Status {
        peer_url: "https://one".to_owned(),
        snapshots: Some(consensus::snapshots::Snapshots {
            kept: 1,
            newest: Some(taken),
            ..Default::default()
        }),
        ..Default::default()
    };
    values.shipping.delivery = Some(shipping::Delivery {
        newest: Some(shipping::Shipped { at: at(70), revision: 8, bytes: 7 }),
        failure: Some(shipping::Failure { cause: "refused".to_owned(), help: None, since: at(60) }),
        ..Default::default()
    });
    values.pki.authorities = vec![AuthorityView {
        namespace: "one".to_owned(),
        name: "ca".to_owned(),
        fingerprint: "ff".repeat(32),
        not_before: at(0),
        not_after: at(1_000_000),
        issued: 1,
        crl_number: 3,
        crl_issued: Some(at(90)),
        revoked: Vec::new(),
    }];
    values.pki.certificates = vec![CertificateView {
        namespace: "one".to_owned(),
        issuer: "ca".to_owned(),
        name: "c".to_owned(),
        serial: String::new(),
        fingerprint: String::new(),
        not_before: at(0),
        renew_at: at(300_000),
        not_after: at(500_000),
        managed: true,
        renewal: Renewal::ByUser,
        revoked: false,
    }];
    let then = |uptime, now| fold(&values, &Arc::default(), Duration::from_secs(uptime), at(now));
    let mut shown = then(9, 100);
    // Past the end of the lease, of the certificate and of the authority; and the
    // wall clock is set back.
    for (uptime, now) in [(10, 101_u64), (11, 102), (70, 400_000), (71, 600_000), (72, 7)] {
        let logs = Arc::default();
        shown = later(&shown, &values, &logs, Duration::from_secs(uptime), at(now));
        assert_eq!(shown, then(uptime, now), "at {uptime}");
        let bucket = shown.etcd.as_ref().and_then(|it| it.bucket.as_ref()).unwrap();
        assert_eq!(bucket.failing, now.checked_sub(60).map(Duration::from_secs), "at {uptime}");
    }
}

#[test]
fn pods_that_leave_are_a_warning_with_what_they_wait_for_until_they_are_gone() {
    let mut values = values();
    for (state, cause, wanted) in [
        (State::Draining, "", Some("Pods leave this node.")),
        (
            State::Draining,
            "the end of shop/web",
            Some("Pods leave this node, and it waits for the end of shop/web."),
        ),
        (State::Drained, "", None),
    ] {
        values.workload.drain = state;
        cause.clone_into(&mut values.workload.drain_cause);
        let shown = warnings(&values);
        let shown = shown.iter().find(|it| it.text.starts_with("Pods leave"));
        assert_eq!(shown.map(|it| &*it.text), wanted);
        assert!(shown.is_none_or(|it| it.help.as_deref() == Some(LEAVING_HELP)));
    }
}
