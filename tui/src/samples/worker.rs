//! A machine that works for its cluster and has no part in consensus.

use std::sync::Arc;

use super::{ordinary, service};
use crate::snapshot::{Health, Node, NodeState, Service, Snapshot, StageState};

/// Its node ID.
const WORKER: &str = "polis-d04b7719e2c5486fa3811f6ec0927b35";

/// A worker of the cluster of [`ordinary`].
#[must_use]
pub fn worker() -> Snapshot {
    let mut snapshot = ordinary();
    snapshot.header.node = Some(WORKER.to_owned());
    snapshot.header.words = Some("harbor-nickel-tulip-echo".to_owned());
    snapshot.header.address = Some("10.0.2.21".to_owned());
    "10.0.2.21/24".clone_into(&mut snapshot.network.interfaces[0].addresses[0].cidr);
    for stage in &mut snapshot.stages {
        if ["consensus", "curator"].contains(&stage.name.as_str()) {
            *stage = super::stage(&stage.name, StageState::Pending, 0, 0);
        }
    }
    if let Some(nodes) = &mut snapshot.nodes {
        for node in &mut nodes.nodes {
            node.own = false;
            // It does not receive which of them vote.
            node.etcd = None;
        }
        nodes.nodes[0].roles.push(super::workloads::ROLES[0].to_owned());
        nodes.nodes.push(Node {
            id: WORKER.to_owned(),
            address: snapshot.header.address.clone(),
            state: NodeState::Up,
            health: Health::Healthy,
            roles: vec![super::workloads::ROLES[1].to_owned()],
            labels: vec!["zone=c".to_owned()],
            version: Some("0.1.0".to_owned()),
            own: true,
            ..Node::default()
        });
    }
    (snapshot.etcd, snapshot.pki) = (None, None);
    snapshot.workloads = Some(super::workloads::well(snapshot.header.uptime.as_secs()));
    let since = snapshot.services[0].since;
    snapshot.services.retain(|it| it.depth == 0);
    snapshot.services.extend(
        [
            (1, "cluster"),
            (1, "console"),
            (2, "load"),
            (2, "tty1"),
            (1, "credentials"),
            (1, "kernel"),
            (1, "agent"),
            (2, "leader"),
            (1, "management"),
            (2, "grpc"),
            (2, "metrics"),
            (1, "names"),
            (1, "network"),
            (1, "parameters"),
            (1, "roles"),
            (1, "storage"),
        ]
        .map(|(depth, name)| Service { since, ..service(depth, name) }),
    );
    let not_here = |name: &str| name.starts_with("root.consensus") || name == "root.curator";
    let logs = Arc::make_mut(&mut snapshot.logs);
    logs.entries.retain(|entry| !not_here(&entry.name));
    for (number, entry) in (0..).zip(&mut logs.entries) {
        Arc::make_mut(entry).number = number;
    }
    logs.total = logs.entries.len() as u64;
    super::date::dated(snapshot)
}
