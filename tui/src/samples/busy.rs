//! A day on which much happens, all of it well.

use std::time::Duration;

use super::{NODES, interface, member, ordinary, percents, remember, say, service_of, wave};
use crate::snapshot::{
    Health, Interface, Member, MemberStatus, Node, NodeState, ServiceState, Severity, Snapshot,
    Update, UpdateState, Warning,
};

const NEWCOMERS: [&str; 2] =
    ["polis-c41d07be5590a1f2e86633d9cf015a7b", "polis-e7723f0a94bb41c8a0d65b12e83f9c44"];

/// When the learner came, in milliseconds since the node was started.
const BEGUN: u64 = 1_209_668_000;

/// A cluster that grows while it works: a learner copies, a node waits for a person.
#[must_use]
pub fn busy() -> Snapshot {
    let mut snapshot = ordinary();
    snapshot.warnings = vec![Warning {
        text: "The recovery key of this machine's disk is stored only in the cluster. An \
               owner saves it:"
            .to_owned(),
        help: Some(format!("polisctl node recovery-key {}", NODES[0])),
    }];
    if let Some(nodes) = &mut snapshot.nodes {
        nodes.update = Some(Update {
            version: "0.2.0".to_owned(),
            state: UpdateState::Running,
            done: 1,
            total: 3,
            node: Some(NODES[2].to_owned()),
            since: Some("2026-02-17 13:58 UTC".to_owned()),
            waits_for: format!("{}: it writes the new system to its disk", NODES[2]),
        });
        let own = &mut nodes.nodes[0].roles;
        own.extend(super::workloads::ROLES.map(str::to_owned));
        nodes.nodes.push(Node {
            id: NEWCOMERS[0].to_owned(),
            address: Some("10.0.2.18".to_owned()),
            state: NodeState::Up,
            health: Health::Healthy,
            roles: vec!["consensus member".to_owned()],
            etcd: Some(MemberStatus::Learner { caught_up: None }),
            labels: vec!["zone=d".to_owned(), "disk=nvme".to_owned()],
            version: Some("0.1.0".to_owned()),
            ..Node::default()
        });
        nodes.nodes.push(Node {
            id: NEWCOMERS[1].to_owned(),
            address: Some("10.0.2.19".to_owned()),
            state: NodeState::New,
            words: Some("copper-hazard-willow-dune".to_owned()),
            ..Node::default()
        });
    }
    snapshot.workloads = Some(super::workloads::starting());
    if let Some(etcd) = &mut snapshot.etcd {
        etcd.members.push(Member {
            standing: MemberStatus::Learner { caught_up: Some(71) },
            lag: Some(349_120),
            round_trip: Some(2_450),
            db_size: Some(9 << 20),
            ..member(NEWCOMERS[0], 0x51ac_77e0_19d2_f604)
        });
        etcd.db_size = 1_310 << 20;
        etcd.db_used = 1_102 << 20;
        etcd.index = 1_204_560;
    }
    snapshot.network.interfaces.push(Interface {
        received: wave(20 << 20, 90 << 20, 8),
        sent: wave(30 << 20, 110 << 20, 9),
        addresses: interface("", "", true, &[("192.168.40.7/22", "parameters", None)])
            .addresses
            .into_iter()
            .map(|mut address| {
                address.primary = false;
                address
            })
            .collect(),
        asking: false,
        driver: Some("ixgbe".to_owned()),
        ..interface("enp3s0f1", "a0:36:9f:5c:11:02", true, &[])
    });
    if let Some(metrics) = &mut snapshot.metrics {
        metrics.cpu = percents(55, 99, 11);
        remember(metrics, percents(70, 88, 12));
        metrics.disk_read = wave(1 << 20, 40 << 20, 13);
        metrics.disk_written = wave(60 << 20, 410 << 20, 14);
        metrics.received = wave(20 << 20, 90 << 20, 8);
        metrics.sent = wave(30 << 20, 110 << 20, 9);
        metrics.data_used = 2_130 << 20;
        metrics.data_unwritten = 4_860 << 20;
    }
    if let Some(server) = service_of(&mut snapshot, "server") {
        server.state = ServiceState::Starting;
        server.since = Duration::from_millis(640);
        server.restarts = 1;
        server.cause = Some("cannot listen on port 7835: address in use".to_owned());
    }
    if let Some(consensus) = service_of(&mut snapshot, "consensus") {
        consensus.since = Duration::from_secs(9 * 86_400);
        consensus.restarts = 1;
        consensus.cause = Some("etcd ended with status 1 after 3.4 s".to_owned());
    }
    for at in 0..40u64 {
        let text = format!("sent a part of the snapshot to c41d07be ({} of 128 MiB)", 3 * at);
        say(
            &mut snapshot.logs,
            &[(BEGUN + 1_200 * at, Severity::Info, "root.consensus.etcd", &text)],
        );
    }
    say(
        &mut snapshot.logs,
        &[
            (
                BEGUN + 48_044,
                Severity::Warning,
                "root.consensus.etcd",
                "slow fdatasync: took 1.12 s, expected less than 1 s; the disk is busy with the snapshot that is sent to the learner",
            ),
            (
                BEGUN + 49_310,
                Severity::Info,
                "root.curator",
                "polis-e7723f0a94bb41c8a0d65b12e83f9c44 registers from 10.0.2.19",
            ),
            (BEGUN + 50_902, Severity::Info, "root.curator.rpc", "owner reads the list of nodes"),
        ],
    );
    super::date::dated(snapshot)
}
