//! What the leader and the node report of work that goes on: a rotation, an update, a network.

use std::sync::atomic::Ordering;

use polis_proto::v1;

use super::served::Served;
use super::{NODE, REVERTS, TRIES};
use polis_wire::rpc::testing::node_id;

impl Served {
    /// The rotation of its CA, which goes on for two questions.
    pub(super) async fn rotation(&self) -> v1::GetRotationResponse {
        let ca_certificate = self.authority.authorities().await.signing.clone();
        let asked = self.rotation.fetch_add(1, Ordering::Relaxed);
        let ended_at = if asked < 2 { 0 } else { 1_700_000_100 };
        let step = if asked < 2 { v1::get_rotation_response::Step::Peers.into() } else { 0 };
        v1::GetRotationResponse {
            rotation: Some(v1::Rotation { ended_at, ..begun_rotation() }),
            step,
            waits_for: if asked < 2 { vec![node_id(NODE).to_string()] } else { Vec::new() },
            ca_certificate,
            ..Default::default()
        }
    }
}

/// A rotation that has just begun.
pub(super) fn begun_rotation() -> v1::Rotation {
    v1::Rotation { number: 1, began_at: 1_700_000_000, ..Default::default() }
}

/// The report of the node about an order: it gives up one with the name server [`REVERTS`], and
/// does not get to an end with [`TRIES`].
pub(super) fn network_report(order: Option<&v1::NetworkOrder>) -> v1::NetworkReport {
    let card = v1::NetworkLink {
        name: "eth0".to_owned(),
        kind: "card".to_owned(),
        mac: "52:54:00:70:6f:00".to_owned(),
        carrier: true,
        ..Default::default()
    };
    let Some(order) = order else {
        return v1::NetworkReport { links: vec![card], ..Default::default() };
    };
    let network = order.configuration.clone().unwrap_or_default();
    let has = |server: &str| network.nameservers.iter().any(|named| named == server);
    let (state, cause) = match (has(REVERTS), has(TRIES)) {
        (true, _) => (v1::NetworkState::Reverted, "no curator was reached over it"),
        (false, true) => (v1::NetworkState::Trying, ""),
        (false, false) => (v1::NetworkState::Confirmed, ""),
    };
    let member = v1::NetworkLink { on: "bond0".to_owned(), ..card };
    let vlan = v1::NetworkLink {
        name: "bond0.7".to_owned(),
        kind: "vlan".to_owned(),
        vlan: 7,
        addresses: vec!["10.0.2.15/24".to_owned(), "2001:db8::7/128".to_owned()],
        origins: vec!["DHCP".to_owned(), "DHCPv6".to_owned()],
        ..member.clone()
    };
    v1::NetworkReport {
        number: order.number,
        state: state.into(),
        cause: cause.to_owned(),
        links: vec![member, vlan],
        faults: Vec::new(),
    }
}

/// An update of the one node.
pub(super) fn update_of(
    bundle: v1::UpdateBundle,
    state: v1::cluster_update::State,
) -> v1::ClusterUpdate {
    let step = v1::cluster_update::Step {
        node_id: node_id(NODE).to_string(),
        state: v1::cluster_update::step::State::Waiting.into(),
        voter: true,
        since: 1_700_000_000,
        ..Default::default()
    };
    v1::ClusterUpdate {
        bundle: Some(bundle),
        holder: node_id(NODE).to_string(),
        state: state.into(),
        steps: vec![step],
        began_at: 1_700_000_000,
        ..Default::default()
    }
}
