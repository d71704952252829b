//! Turns records into what callers may know, and what callers send into checked values.
//!
//! Invariants:
//! - No key and no ticket is in a [`v1::NodeInfo`].
//! - Whatever a caller sends has a bound, and a refusal names the field.

use std::collections::BTreeMap;
use std::net::IpAddr;

use polis_proto::v1;
use tokio::time::Instant;

use super::directory::Known;
use super::error::Error;
use super::health::Heartbeats;
use crate::consensus::{self, MemberId};
use crate::identity::NodeId;
use crate::parameters;

/// The longest version, image or boot ID.
const WORD_MAX: usize = 64;

/// What callers may know of a node.
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
        cluster_unlock_key: _,
        join_key: _,
        joined: _,
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
    }
}

/// What callers may know of etcd. `answering` are the members that this one reaches.
pub(super) fn consensus_status(
    status: &consensus::Status,
    answering: &std::collections::BTreeSet<MemberId>,
) -> v1::ConsensusStatus {
    let member = |member: &consensus::Member| {
        let own = status.member == Some(member.id);
        v1::ConsensusMember {
            id: member.id.0,
            node_id: member.name.clone(),
            peer_urls: vec![member.peer_url.clone()],
            learner: member.learner,
            answers: answering.contains(&member.id),
            applied_index: if own { status.applied } else { 0 },
            db_bytes: if own { status.db_size } else { 0 },
            db_used_bytes: if own { status.db_used } else { 0 },
        }
    };
    v1::ConsensusStatus {
        cluster_id: status.cluster.unwrap_or_default(),
        leader: status.leader.map_or(0, |leader| leader.0),
        term: status.term,
        revision: status.index,
        quota_bytes: status.db_quota,
        alarms: status.alarms.iter().map(ToString::to_string).collect(),
        members: status.members.iter().map(member).collect(),
        tolerates: u32::try_from(status.tolerates()).unwrap_or(u32::MAX),
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

/// An address, or nothing where there is none.
pub(super) fn address(text: &str, field: &str) -> Result<Option<IpAddr>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    let address = text.parse();
    address
        .map(Some)
        .map_err(|_parse| Error::Field(format!("{field} is {text:?}; allowed is an IP address")))
}

/// What a node says about itself.
pub(super) fn status(status: Option<v1::NodeStatus>) -> Result<v1::NodeStatus, Error> {
    let status = status.ok_or_else(|| Error::Field("status is missing".to_owned()))?;
    address(&status.external_address, "status.external_address")?;
    let words = [
        ("status.version", &status.version),
        ("status.image", &status.image),
        ("status.boot_id", &status.boot_id),
    ];
    for (field, word) in words {
        if word.len() > WORD_MAX || !word.chars().all(|c| c.is_ascii_graphic()) {
            return Err(Error::Field(format!(
                "{field}: allowed are at most {WORD_MAX} printed characters without spaces"
            )));
        }
    }
    if status.curator_port > u32::from(u16::MAX) {
        return Err(Error::Field("status.curator_port: allowed are 0 to 65535".to_owned()));
    }
    Ok(status)
}
