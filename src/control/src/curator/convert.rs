//! Conversions: records into the types that callers receive, and the messages of callers
//! into checked values.
//!
//! Invariants:
//! - No key and no ticket is in a [`v1::NodeInfo`], nor the boot of a node that returns.
//! - Every field that a caller sends has a bound, and an error names the field.
//!
//! What this module does not do: bound what nodes report of themselves (`bounds`).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use polis_proto::v1;
use tokio::time::Instant;

use super::directory::Known;
use super::error::Error;
use super::health::Heartbeats;
use super::returning;
use crate::consensus::{self, MemberId};
use polis_machine::parameters;
use polis_wire::identity::{InvalidNodeName, NodeId, NodeName};
use polis_wire::node_labels;

/// The public view of a node.
pub(super) fn info(id: NodeId, known: &Known, heartbeats: &Heartbeats) -> v1::NodeInfo {
    let v1::Node {
        public_key,
        state,
        roles,
        labels,
        status,
        tpm,
        recovery_key,
        registered_at,
        leaving,
        cluster_network,
        cluster_unlock_key: _,
        join_key: _,
        joined: _,
        former_voter,
        name,
        nonce,
        attestation,
        network_order,
        returning,
        taints,
    } = v1::Node::clone(&known.node);
    let age = heartbeats.last(id).map(|last| Instant::now().saturating_duration_since(last));
    v1::NodeInfo {
        id: id.to_string(),
        public_key,
        state,
        roles,
        labels,
        status,
        health: known.health.into(),
        heartbeat_age_ms: age.map_or(-1, |age| i64::try_from(age.as_millis()).unwrap_or(i64::MAX)),
        tpm,
        recovery_key_unsaved: !recovery_key.is_empty(),
        registered_at,
        leaving: leaving.is_some(),
        cluster_network,
        former_voter,
        name,
        clock: heartbeats.clock(id),
        nonce,
        attestation,
        attestation_fault: known.attestation_fault.clone(),
        log_deliveries: heartbeats.log_deliveries(id),
        network_order,
        snapshot_delivery: heartbeats.snapshot_delivery(id),
        returning: returning::shown(returning),
        taints,
    }
}

/// The view without what TPMs proved: the endorsement key names a machine for life.
pub(super) fn without_proofs(mut info: v1::NodeInfo) -> v1::NodeInfo {
    info.attestation = None;
    if let Some(returning) = &mut info.returning {
        returning.attestation = None;
    }
    info
}

/// The public view of etcd. `answering` are the members that this one reaches; the state of
/// the others comes from their heartbeats.
pub(super) fn consensus_status(
    status: &consensus::Status,
    answering: &std::collections::BTreeSet<MemberId>,
    heartbeats: &Heartbeats,
) -> v1::ConsensusStatus {
    let member = |member: &consensus::Member| {
        let reported = match status.member == Some(member.id) {
            true => status.figures().map(|figures| (figures, Duration::ZERO)),
            false => member.node().and_then(|node| heartbeats.consensus(node)),
        };
        let (figures, age) = reported.unzip();
        let age = age.map_or(-1, |age| i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        let figures = figures.unwrap_or_default();
        v1::ConsensusMember {
            id: member.id.0,
            node_id: member.node().map_or_else(|| member.name.clone(), |node| node.to_string()),
            peer_urls: vec![member.peer_url.clone()],
            learner: member.learner,
            answers: answering.contains(&member.id),
            applied_index: figures.applied_index,
            db_bytes: figures.db_bytes,
            db_used_bytes: figures.db_used_bytes,
            index: figures.index,
            leader: figures.leader,
            told_age_ms: age,
            reach: None,
            snapshots: figures.snapshots,
        }
    };
    v1::ConsensusStatus {
        cluster_id: status.cluster.unwrap_or_default(),
        leader: status.leader.map_or(0, |leader| leader.0),
        term: status.term,
        revision: status.revision,
        quota_bytes: status.db_quota,
        alarms: status.alarms.iter().map(ToString::to_string).collect(),
        members: status.members.iter().map(member).collect(),
        tolerates: u32::try_from(status.spare(answering)).unwrap_or(u32::MAX),
    }
}

/// A node's ID.
pub(super) fn node_id(text: &str, field: &str) -> Result<NodeId, Error> {
    text.parse().map_err(|invalid| Error::Field(format!("{field} is {text:?}; {invalid}")))
}

/// A raw Ed25519 public key.
pub(super) fn key(bytes: &[u8], field: &str, number: u16) -> Result<[u8; 32], Error> {
    parameters::key(bytes, field, number).map_err(|error| Error::Field(error.to_string()))
}

/// Labels of a node.
pub(super) fn labels(
    labels: BTreeMap<String, String>,
    field: &str,
    number: u16,
) -> Result<BTreeMap<String, String>, Error> {
    let checked = parameters::labels(labels, field, number);
    checked.map_err(|error| Error::Field(error.to_string()))
}

/// Labels that an operator sets. Those that Kubernetes or Polis sets itself are refused.
pub(super) fn set_labels(
    labels: BTreeMap<String, String>,
    field: &str,
    number: u16,
) -> Result<BTreeMap<String, String>, Error> {
    let labels = self::labels(labels, field, number)?;
    let checked = node_labels::check(labels.keys());
    checked.map_err(|reserved| Error::Field(format!("{field} names {reserved}")))?;
    Ok(labels)
}

/// The name of a node, or nothing if the field is empty.
pub(super) fn name(text: &str, field: &str) -> Result<Option<NodeName>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    let name = text.parse().map(Some);
    name.map_err(|why: InvalidNodeName| Error::Field(format!("{field} is {text:?}: {why}")))
}

/// Names of labels to remove, while these are `set` at the same time.
pub(super) fn gone(
    names: Vec<String>,
    set: &BTreeMap<String, String>,
) -> Result<Vec<String>, Error> {
    if let Some(both) = names.iter().find(|name| set.contains_key(*name)) {
        let both = format!("remove names {both:?}, which is set as well; allowed is one of both");
        return Err(Error::Field(both));
    }
    let valueless = names.iter().map(|name| (name.clone(), String::new())).collect();
    labels(valueless, "remove", 3)?;
    Ok(names)
}

/// Taints to set, and those to remove.
pub(super) fn taints(set: &[v1::NodeTaint], remove: &[v1::NodeTaint]) -> Result<(), Error> {
    let checked = parameters::node_taints(set, "set", 2)
        .and_then(|()| parameters::removed_taints(remove, set, "remove", 3));
    checked.map_err(|error| Error::Field(error.to_string()))
}

/// The address of a node, or nothing if the field is empty.
pub(super) fn address(text: &str, field: &str) -> Result<Option<IpAddr>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    let invalid = |_parse| Error::Field(format!("{field} is {text:?}; allowed is an IP address"));
    unicast(text.parse::<IpAddr>().map_err(invalid)?, field).map(Some)
}

/// Checks that an address can be a node's: others connect to it, and let it in.
pub(super) fn unicast(address: IpAddr, field: &str) -> Result<IpAddr, Error> {
    let all = IpAddr::V4(Ipv4Addr::BROADCAST);
    if address.is_unspecified() || address.is_multicast() || address == all {
        let allowed = "allowed is the address of a node";
        return Err(Error::Field(format!("{field} is {address}; {allowed}")));
    }
    Ok(address)
}

/// The order of a network by an operator; the number is chosen here.
///
/// # Errors
///
/// [`Error::Field`], and that no random number can be had.
pub(super) fn network_order(
    configuration: Option<v1::NetworkConfiguration>,
) -> Result<v1::NetworkOrder, Error> {
    let checked =
        configuration.map(|message| parameters::network(message, "configuration")).transpose();
    let network = checked.map_err(|error| Error::Field(error.to_string()))?;
    let mut number = [0; 8];
    number.copy_from_slice(&super::nodes::nonce()?[..8]);
    // Zero means none.
    let number = u64::from_ne_bytes(number).max(1);
    Ok(v1::NetworkOrder { number, configuration: network.map(|network| network.message()) })
}

/// The key of a node in the mesh; `None` if the node reports none.
pub(super) fn mesh_key(bytes: &[u8], field: &str) -> Result<Option<[u8; 32]>, Error> {
    if bytes.is_empty() {
        return Ok(None);
    }
    // Zeros are not a valid key: every exchange with them fails.
    let key = <[u8; 32]>::try_from(bytes).ok().filter(|key| *key != [0; 32]);
    key.map(Some).ok_or_else(|| {
        Error::Field(format!("{field} has {} bytes; allowed is an X25519 key of 32", bytes.len()))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::consensus::{Member, MemberStatus};

    #[test]
    fn every_member_is_shown_as_it_reported_itself() {
        let ids: Vec<NodeId> = (1..=3).map(|key| NodeId::from_public_key(&[key; 32])).collect();
        let member = |at: usize| Member {
            id: MemberId(at as u64 + 1),
            name: ids[at].to_string(),
            peer_url: String::new(),
            learner: false,
        };
        let status = consensus::Status {
            standing: MemberStatus::Voter,
            member: Some(MemberId(1)),
            leader: Some(MemberId(2)),
            index: 10,
            applied: 9,
            members: (0..3).map(member).collect(),
            ..Default::default()
        };
        let taken = crate::consensus::snapshots::Snapshots { kept: 7, ..Default::default() };
        let status = consensus::Status { snapshots: Some(taken), ..status };
        let heartbeats = Heartbeats::default();
        // The status of the member that was asked is newer than the one in its node's heartbeat.
        let reported =
            |index| Some(v1::ConsensusFigures { index, leader: 2, ..Default::default() });
        let reported = |index| v1::HeartbeatRequest {
            consensus: reported(index),
            ..v1::HeartbeatRequest::default()
        };
        heartbeats.record(ids[0], reported(5));
        heartbeats.record(ids[1], reported(8));
        heartbeats.record(ids[2], v1::HeartbeatRequest::default());
        let shown = consensus_status(&status, &BTreeSet::new(), &heartbeats).members;
        let of = |at: usize| (shown[at].index, shown[at].leader, shown[at].told_age_ms >= 0);
        assert_eq!([of(0), of(1), of(2)], [(10, 2, true), (8, 2, true), (0, 0, false)]);
        assert_eq!(shown[0].applied_index, 9);
        assert_eq!(shown[0].snapshots.as_ref().unwrap().kept, 7);
        assert!(shown[1].snapshots.is_none() && shown[2].snapshots.is_none());
    }

    proptest! {
        #[test]
        fn arbitrary_values_are_refused_by_field_or_within_bounds(
            text in ".{0,100}", bytes in prop::collection::vec(any::<u8>(), 0..64),
            labels in prop::collection::btree_map(".{0,80}", ".{0,80}", 0..80),
        ) {
            let named = |error: &Error| error.to_string().contains("field_x");
            prop_assert!(node_id(&text, "field_x").as_ref().map_or_else(named, |_id| true));
            prop_assert!(address(&text, "field_x").as_ref().map_or_else(named, |_address| true));
            prop_assert!(super::name(&text, "field_x").as_ref().map_or_else(named, |_name| true));
            prop_assert!(key(&bytes, "field_x", 1).as_ref().map_or_else(named, |_key| true));
            let mesh = mesh_key(&bytes, "field_x");
            let same = |key: Option<[u8; 32]>| key.map_or(bytes.is_empty(), |key| key[..] == bytes);
            prop_assert!(mesh.map_or_else(|error| named(&error), same));
            let count = labels.len();
            match super::labels(labels, "field_x", 1) {
                Ok(labels) => prop_assert_eq!(labels.len(), count),
                Err(error) => prop_assert!(named(&error), "{}", error),
            }
        }
    }

    #[test]
    fn an_address_is_one_that_a_node_can_have() {
        for text in ["192.0.2.7", "2001:db8::7", "127.0.0.1"] {
            assert_eq!(address(text, "address").unwrap(), Some(text.parse().unwrap()));
        }
        assert_eq!(address("", "address").unwrap(), None);
        for text in ["0.0.0.0", "::", "255.255.255.255", "224.0.0.1", "ff02::1", "node-1"] {
            let refused = address(text, "address").unwrap_err().to_string();
            assert!(refused.starts_with("address is ") && refused.contains(text), "{refused}");
        }
    }

    #[test]
    fn a_network_is_checked_before_it_is_ordered() {
        let bond =
            v1::network_configuration::Bond { name: "team0".to_owned(), ..Default::default() };
        let bad = v1::NetworkConfiguration { bonds: vec![bond], ..Default::default() };
        let error = network_order(Some(bad)).unwrap_err().to_string();
        assert!(error.contains("configuration.bonds[0].name is \"team0\""), "{error}");
        let orders = [network_order(None).unwrap(), network_order(None).unwrap()];
        assert_ne!(orders[0].number, orders[1].number);
    }
}
