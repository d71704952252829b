//! More of everything than fits on a screen.

use std::time::Duration;

use super::{certificate, ordinary};
use crate::snapshot::{Health, Interface, Node, NodeState, Snapshot};

/// How many nodes.
const NODES: u64 = 100;

/// A cluster of a hundred nodes, two of them in trouble.
#[must_use]
pub fn crowd() -> Snapshot {
    let mut snapshot = ordinary();
    let Some(nodes) = &mut snapshot.nodes else { return snapshot };
    nodes.nodes.extend((3..NODES).map(worker));
    nodes.nodes.sort_by(|one, other| one.id.cmp(&other.id));
    if let Some(pki) = &mut snapshot.pki {
        pki.certificates.extend((3..NODES).map(|at| {
            let age = i64::try_from(at * 37 % 60).unwrap_or(0);
            certificate(&name(at), "cluster CA", age, 90)
        }));
    }
    let one = snapshot.network.interfaces[0].clone();
    snapshot.network.interfaces.extend((1..12).map(|number| Interface {
        name: format!("eth{number}"),
        mac: format!("52:54:00:12:34:{number:02x}"),
        addresses: Vec::new(),
        carrier: number % 3 == 0,
        ..one.clone()
    }));
    super::date::dated(snapshot)
}

/// The ID of node `at`: digits that look like those of a fingerprint.
fn name(at: u64) -> String {
    let digits = |seed: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7) ^ seed;
    format!("polis-{:016x}{:016x}", digits(0x5bd1_e995), digits(0x27d4_eb2f))
}

fn worker(at: u64) -> Node {
    let (late, standby) = (at.is_multiple_of(53), at == 71);
    Node {
        id: name(at),
        address: Some(format!("10.0.{}.{}", 2 + at / 50, 15 + at % 50)),
        state: if standby { NodeState::Standby } else { NodeState::Up },
        health: match late {
            _ if standby => Health::Unknown,
            true => Health::Late,
            false => Health::Healthy,
        },
        heartbeat: late.then_some(Duration::from_secs(41)),
        roles: vec!["worker".to_owned()],
        labels: vec![format!("rack={}", at / 20)],
        version: Some("0.1.0".to_owned()),
        ..Node::default()
    }
}
