//! Values that are too long, too large, or an attack.

use std::sync::Arc;
use std::time::Duration;

use super::failing;
use crate::snapshot::{
    Cluster, Crl, MemberStatus, Node, NodeState, Service, Snapshot, Snapshots, Stage, Taken,
    Warning,
};

/// The longest time that can travel.
const FOR_EVER: Duration = Duration::from_millis(u64::MAX);

/// Names, texts and numbers that are as long as they get, and some that attack.
#[must_use]
pub fn overflowing() -> Snapshot {
    let long = "a-name-longer-than-any-that-a-person-would-choose-but-may-be-sent--- ".repeat(3);
    let evil = format!("{long}\u{1b}[2J\u{202e}\u{6f22}\u{5b57}\r\n\u{2713}");
    let mut snapshot = failing();
    snapshot.header.node = Some(evil.clone());
    snapshot.header.words = Some(evil.clone());
    snapshot.header.address = Some("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff".to_owned());
    snapshot.header.uptime = FOR_EVER;
    snapshot.header.cluster = Cluster::Disowning;
    snapshot.warnings = vec![Warning { text: evil.clone(), help: Some(evil.clone()) }; 3];
    overflow_network(&mut snapshot, &evil);
    for Stage { name, elapsed, .. } in &mut snapshot.stages {
        name.clone_from(&evil);
        *elapsed = Duration::from_secs(86_400 * 400);
    }
    if let Some(nodes) = &mut snapshot.nodes {
        nodes.nodes.push(Node {
            state: NodeState::New,
            words: Some(evil.clone()),
            ..Node::default()
        });
        nodes.leader = Some(evil.clone());
        nodes.stale = Some(FOR_EVER);
        nodes.late_after = Some(FOR_EVER);
        for node in &mut nodes.nodes {
            node.id.clone_from(&evil);
            node.address = Some(evil.clone());
            node.heartbeat = Some(FOR_EVER);
            node.roles = vec![evil.clone(); 3];
            node.labels = vec![evil.clone(); 9];
            node.version = Some(evil.clone());
        }
    }
    if let Some(etcd) = &mut snapshot.etcd {
        for member in &mut etcd.members {
            member.name.clone_from(&evil);
            member.url.clone_from(&evil);
            member.lag = Some(u64::MAX);
            member.round_trip = Some(u64::MAX);
            member.db_size = Some(u64::MAX);
        }
        etcd.members[1].standing = MemberStatus::Learner { caught_up: Some(u8::MAX) };
        etcd.index = u64::MAX;
        etcd.db_size = u64::MAX;
        etcd.db_used = u64::MAX;
        etcd.version.clone_from(&evil);
        etcd.alarms = vec![evil.clone()];
        etcd.snapshots = Some(Snapshots {
            kept: u64::MAX,
            newest: Some(Taken { age: FOR_EVER, bytes: u64::MAX, revision: u64::MAX }),
            problem: Some(evil.clone()),
        });
    }
    if let Some(pki) = &mut snapshot.pki {
        for authority in &mut pki.authorities {
            authority.name.clone_from(&evil);
            authority.words = Some(evil.clone());
            authority.used = u8::MAX;
            authority.crl = Some(Crl { number: u64::MAX, entries: u64::MAX, age: FOR_EVER });
        }
        for certificate in &mut pki.certificates {
            certificate.name.clone_from(&evil);
            certificate.issuer.clone_from(&evil);
            certificate.days_left = i64::MIN;
        }
        pki.certificates[1].issuer.clear();
    }
    snapshot.workloads = Some(super::workloads::overflowing(&evil, FOR_EVER));
    for (depth, service) in (0..).zip(&mut snapshot.services) {
        *service = Service {
            depth: depth * 7,
            name: evil.clone(),
            cause: Some(evil.clone()),
            restarts: u64::MAX,
            since: FOR_EVER,
            state: service.state,
        };
    }
    if let Some(metrics) = &mut snapshot.metrics {
        metrics.cpu.fill(u8::MAX);
        metrics.memory.clear();
        metrics.sent.fill(u64::MAX);
        metrics.memory_used = u64::MAX;
        metrics.memory_total = 1;
        metrics.pace = FOR_EVER;
    }
    for entry in &mut Arc::make_mut(&mut snapshot.logs).entries {
        let entry = Arc::make_mut(entry);
        entry.name.clone_from(&evil);
        entry.text.clone_from(&evil);
        entry.time = FOR_EVER;
    }
    super::date::dated(snapshot)
}

fn overflow_network(snapshot: &mut Snapshot, evil: &str) {
    let interface = &mut snapshot.network.interfaces[0];
    interface.name = evil.to_owned();
    interface.mac = evil.to_owned();
    interface.driver = Some(evil.to_owned());
    interface.received.fill(u64::MAX);
    for address in &mut interface.addresses {
        address.cidr = evil.to_owned();
        address.source = evil.to_owned();
        address.lease = Some(FOR_EVER);
    }
    let interface = interface.clone();
    snapshot.network.interfaces.extend([interface.clone(), interface]);
    snapshot.network.waiting = Some(evil.to_owned());
    snapshot.network.nameservers = vec![evil.to_owned(); 9];
}
