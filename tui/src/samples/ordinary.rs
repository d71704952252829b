//! An ordinary day.

use std::time::Duration;

use super::{
    NODES, certificate, date, empty, home, interface, logs, member, percents, restarted, service,
    stage, used, wave,
};
use crate::snapshot::{
    Authority, Certificate, Crl, Etcd, Health, History, Interface, Member, MemberStatus, Metrics,
    Network, Node, NodeState, Nodes, Pki, Severity, Snapshot, Snapshots, StageState, Taken,
    Workloads,
};

/// The services of a node that votes, without those that only a boot needs.
const SERVICES: [(u16, &str); 36] = [
    (0, "root"),
    (1, "cluster"),
    (1, "consensus"),
    (2, "certificate"),
    (2, "crl"),
    (2, "maintenance"),
    (2, "overview"),
    (2, "promoter"),
    (2, "snapshots"),
    (1, "console"),
    (2, "load"),
    (2, "members"),
    (2, "tty1"),
    (2, "words"),
    (1, "credentials"),
    (1, "curator"),
    (2, "directory"),
    (2, "health"),
    (2, "leader"),
    (2, "server"),
    (2, "standing"),
    (2, "status"),
    (1, "kernel"),
    (1, "agent"),
    (2, "leader"),
    (1, "logs"),
    (1, "management"),
    (2, "certificate"),
    (2, "grpc"),
    (2, "metrics"),
    (1, "names"),
    (1, "network"),
    (1, "nodes"),
    (1, "parameters"),
    (1, "roles"),
    (1, "storage"),
];

/// How long ago the cluster was founded, in days; the others joined a day later.
const AGE: i64 = 34;

/// A cluster of three, five weeks after it was founded and two after its last restart.
#[must_use]
pub fn ordinary() -> Snapshot {
    let mut snapshot = Snapshot {
        header: home(UP),
        workloads: Some(Workloads::default()),
        ready: Some(Duration::from_millis(9_412)),
        stages: [
            ("kernel", 0, 910),
            ("initramfs", 910, 640),
            ("system", 1_550, 1_120),
            ("storage", 2_700, 2_400),
            ("network", 2_680, 1_230),
            ("parameters", 2_690, 40),
            ("cluster", 3_910, 5_490),
            ("consensus", 5_100, 3_180),
            ("curator", 8_290, 820),
            ("roles", 9_110, 302),
        ]
        .map(|(name, started, elapsed)| stage(name, StageState::Done, started, elapsed))
        .into(),
        network: Network {
            interfaces: vec![Interface {
                received: wave(1 << 10, 240 << 10, 3),
                sent: wave(1 << 10, 180 << 10, 4),
                ..interface(
                    "eth0",
                    "52:54:00:12:34:56",
                    true,
                    &[("10.0.2.15/24", "DHCP", Some(86_283))],
                )
            }],
            gateway: Some("10.0.2.2".to_owned()),
            nameservers: vec!["10.0.2.3".to_owned()],
            time_servers: vec!["2.debian.pool.ntp.org".to_owned()],
            ..Network::default()
        },
        nodes: Some(Nodes {
            nodes: (0..3).map(node).collect(),
            leader: Some(NODES[1].to_owned()),
            stale: None,
            late_after: Some(Duration::from_secs(15)),
            update: None,
        }),
        etcd: Some(etcd()),
        pki: Some(pki()),
        services: SERVICES.map(|(depth, name)| service(depth, name)).into(),
        metrics: Some(metrics()),
        logs: logs(&[
            (1_551, Severity::Info, "root", "Polis 0.1.0, slot A, image 5d41402abc4b2a76"),
            (
                2_702,
                Severity::Info,
                "root.storage",
                "opened the data partition on /dev/vda, 7.4 GiB",
            ),
            (3_909, Severity::Info, "root.network", "eth0 has 10.0.2.15/24 by DHCP for 86400 s"),
            (5_102, Severity::Info, "root.consensus", "starting etcd as a member of 3"),
            (
                8_281,
                Severity::Info,
                "root.consensus",
                "etcd is serving, member 8e9e05c52164694d, voter",
            ),
            (
                8_295,
                Severity::Info,
                "root.curator",
                "following: polis-0b7d3a9915c04e218f6610aa3c5d7e94 leads",
            ),
            (9_412, Severity::Info, "root.cluster", "home, as one of 3 nodes"),
            (43_203_952, Severity::Info, "root.network", "eth0: 10.0.2.15 for another 86400 s"),
            (
                604_809_551,
                Severity::Info,
                "root.consensus.maintenance",
                "freed 2.1 MiB of the database",
            ),
            (
                604_811_020,
                Severity::Debug,
                "root.consensus.etcd",
                "finished defragmenting directory",
            ),
            (907_203_871, Severity::Info, "root.network", "eth0: 10.0.2.15 for another 86400 s"),
            (
                1_209_600_077,
                Severity::Info,
                "root.consensus.snapshots",
                "took a snapshot of etcd revision=803211 kept=24",
            ),
            (1_209_603_940, Severity::Info, "root.network", "eth0: 10.0.2.15 for another 86400 s"),
        ]),
        ..empty()
    };
    restarted(&mut snapshot, UP);
    super::date::dated(snapshot)
}

/// Seconds since then.
const UP: u64 = 1_209_720;

/// A node that is well.
pub(super) fn node(at: usize) -> Node {
    Node {
        id: NODES[at].to_owned(),
        address: Some(format!("10.0.2.{}", 15 + at)),
        state: NodeState::Up,
        health: Health::Healthy,
        roles: vec!["consensus member".to_owned()],
        etcd: Some(MemberStatus::Voter),
        labels: vec![format!("zone={}", ["a", "b", "c"][at])],
        version: Some("0.1.0".to_owned()),
        clock: Some("2 ms ahead".to_owned()),
        leader: at == 1,
        own: at == 0,
        ..Node::default()
    }
}

/// The numbers of the members of etcd.
const IDS: [u64; 3] = [0x8e9e_05c5_2164_694d, 0x0b7d_3a99_15c0_4e21, 0xfe12_9001_d4c8_b3a7];

fn etcd() -> Etcd {
    let db_size = 20_480 * 641;
    let one = |at: usize, id, lag, round_trip| Member {
        own: at == 0,
        leader: at == 1,
        lag: Some(lag),
        round_trip: Some(round_trip),
        db_size: Some(db_size),
        reaches: Some(IDS.into_iter().filter(|other| *other != id).collect()),
        ..member(NODES[at], id)
    };
    Etcd {
        state: "voter".to_owned(),
        version: "3.5.21".to_owned(),
        members: vec![one(0, IDS[0], 0, 310), one(1, IDS[1], 0, 1_240), one(2, IDS[2], 2, 1_870)],
        term: 3,
        index: 1_204_117,
        applied: 1_204_117,
        db_size,
        db_used: 20_480 * 502,
        db_quota: 2 << 30,
        alarms: Vec::new(),
        quorum: true,
        survives: Some(1),
        past: History {
            pace: Duration::from_secs(120),
            commit: wave(2_100, 6_900, 15)[..30].to_vec(),
            elections: (0..30).map(|at| u64::from(at == 11)).collect(),
            db_size: (0..30).map(|at| db_size - (29 - at) * 20_480).collect(),
        },
        snapshots: Some(Snapshots {
            kept: 24,
            newest: Some(Taken {
                age: Duration::from_secs(120),
                bytes: db_size - 20_480,
                revision: 803_211,
            }),
            problem: None,
        }),
        bucket: None,
    }
}

fn pki() -> Pki {
    let authority = |name: &str, words: &str, step: u8| Authority {
        name: name.to_owned(),
        fingerprint: std::array::from_fn(|at| {
            u8::try_from(at * usize::from(step) % 251).unwrap_or(0)
        }),
        words: Some(words.to_owned()),
        ends: date::day(3_650 - AGE),
        days_left: 3_650 - AGE,
        used: used(AGE, 3_650),
        issued: 9,
        crl: Some(Crl { number: 3, entries: 1, age: Duration::from_secs(190) }),
    };
    Pki {
        authorities: vec![
            authority("cluster CA", "ticket-summer-gravity-owl", 37),
            authority("etcd CA", "rebuild-cactus-zero-lamp", 91),
        ],
        certificates: vec![
            certificate(NODES[0], "cluster CA", AGE, 90),
            certificate(NODES[1], "cluster CA", AGE - 1, 90),
            certificate(NODES[2], "cluster CA", AGE - 1, 90),
            Certificate { when_used: true, ..certificate("owner", "cluster CA", 14, 30) },
            certificate(NODES[0], "etcd CA", AGE, 3_650),
            certificate(NODES[1], "etcd CA", AGE - 1, 3_650),
            certificate(NODES[2], "etcd CA", AGE - 1, 3_650),
        ],
    }
}

fn metrics() -> Metrics {
    Metrics {
        pace: Duration::from_secs(2),
        processors: 4,
        cpu: percents(2, 22, 1),
        memory: percents(20, 22, 2),
        memory_total: 2 << 30,
        memory_used: 411 << 20,
        disk_read: wave(0, 40 << 10, 5),
        disk_written: wave(0, 700 << 10, 6),
        received: wave(1 << 10, 240 << 10, 3),
        sent: wave(1 << 10, 180 << 10, 4),
        data_total: 7_942 << 20,
        data_used: 1_204 << 20,
        data_unwritten: 0,
    }
}
