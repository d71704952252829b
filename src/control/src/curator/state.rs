//! The life of a node's record: which requests may change it, and how. Pure.
//!
//! | request \ state | (absent)  | NEW            | STANDBY        | UP, never home | UP, joined | DECOMMISSIONED |
//! |-----------------|-----------|----------------|----------------|----------------|------------|----------------|
//! | register        | NEW       | same, refreshed| same, join key | same, join key | same¹      | refused        |
//! | return⁶         | not found | refused        | refused        | yes            | yes        | refused        |
//! | approve         | not found | STANDBY        | same           | same           | same       | refused        |
//! | commit          | not found | refused        | UP             | same, new keys | refused    | refused        |
//! | returned⁶       | not found | refused        | refused        | same           | same       | refused        |
//! | join            | not found | refused        | refused        | joined         | same       | refused        |
//! | status          | not found | refused        | refused        | joined         | same       | refused        |
//! | prove           | not found | refused        | refused        | yes⁵           | yes⁵       | refused        |
//! | roles, labels   | not found | yes            | yes            | yes            | yes        | refused²       |
//! | taints          | not found | yes            | yes            | yes            | yes        | refused        |
//! | name            | not found | yes            | yes            | yes            | yes        | refused²       |
//! | network         | not found | refused        | refused        | yes            | yes        | refused        |
//! | leave⁴          | not found | yes            | yes            | yes            | yes        | yes            |
//! | decommission    | not found | refused        | refused        | DECOMM.        | DECOMM.    | same           |
//! | delete          | not found | gone           | gone           | refused³       | refused³   | gone           |
//!
//! ¹ with the join key that it has; with another one it is refused: another machine
//!   would open the disk of a member.
//! ² roles and a name cannot be given; to take away a missing role changes nothing, and a
//!   name that is taken away is free for another node.
//! ³ unless forced.
//! ⁴ meanwhile the role consensus member cannot be given; taking it ends the departure.
//! ⁵ one proof for a boot: later ones of that boot change nothing. A machine without a TPM
//!   leaves no fault.
//! ⁶ a node whose certificate ended while it was off: `returning`. Its request is approved like a
//!   registration, and ends with its first status. Meanwhile the role consensus member cannot be
//!   given.
//!
//! No request leaves a node with the role Kubernetes controller and without the role consensus
//! member: its API server reads and writes the etcd beside it.
//!
//! Invariants:
//! - No request moves a record back to an earlier state of a node's life, except after the
//!   record was deleted.
//! - A decommissioned node has no roles and no keys.
//! - Once a node was home, its join key and the keys of its disk stay.
//!
//! What this module does not do: check tickets, fingerprints or policies, ask
//! whether etcd can do without the node (`nodes`, `membership`), or give places in the
//! network of pods (`pod_network`).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::attesting;
use super::capacity::Shortage;
use super::returning::{self, Refused, Return};
use polis_proto::v1::{self, NodeState};

use polis_wire::identity::{Identity, NodeName, Nonce};
use polis_wire::parameters::TAINTS_MAX;
use polis_wire::pod_network::Prefix;

/// Labels of one node; as many as the parameters may give.
const LABELS_MAX: usize = 64;

/// A request to change a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// A machine registers.
    Register(Registration),
    /// An operator approves it.
    Approve,
    /// The machine commits.
    Commit(Commitment),
    /// The node asks for a new certificate, since its own has ended.
    Return(Return),
    /// This boot of the node, which was approved, receives its certificate.
    Returned {
        /// The boot, as in [`Return`].
        boot_id: String,
    },
    /// The node was home, and joins again.
    Join,
    /// The node sends its status.
    Status(v1::NodeStatus),
    /// The TPM of a member has proved a start of it, or proves nothing of it.
    Prove(v1::TpmAttestation),
    /// An operator gives and takes roles.
    Roles {
        /// The roles to give.
        add: v1::NodeRoles,
        /// The roles to take.
        remove: v1::NodeRoles,
    },
    /// An operator sets and removes labels.
    Labels {
        /// New values.
        set: BTreeMap<String, String>,
        /// Keys to remove.
        remove: Vec<String>,
    },
    /// An operator sets and removes taints.
    Taints {
        /// New ones, which replace those of the same key and effect.
        set: Vec<v1::NodeTaint>,
        /// Those to remove; without an effect, each of the key.
        remove: Vec<v1::NodeTaint>,
    },
    /// An operator gives it a name, or takes it away where that is empty. `names`
    /// checks that no other node has it.
    Name(String),
    /// An operator orders another network for it. The number is of this order, unless it is the
    /// former one.
    Network(v1::NetworkOrder),
    /// The owner has saved the recovery key.
    ForgetRecoveryKey,
    /// It begins to leave etcd, and `leaving` names the next step.
    Leave(v1::Departure),
    /// It ends the departure from etcd: it is out, or must stay.
    Stay,
    /// An operator decommissions it for good.
    Decommission,
    /// An operator deletes it.
    Delete {
        /// Although it is a member: it is dead.
        force: bool,
    },
}

/// The fields of a registration.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The key that its certificate proved.
    pub identity: Identity,
    /// The public half of the key that it will join with.
    pub join_key: [u8; 32],
    /// Whether it has a TPM and uses it.
    pub tpm: bool,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its address.
    pub address: String,
    /// The name that its parameters give it.
    pub name: Option<NodeName>,
    /// Seconds since 1970.
    pub now: i64,
    /// Chosen after the key was received; the first registration of a node keeps it.
    pub nonce: Nonce,
    /// The proof of its TPM since the last time; `None`: nothing new.
    pub attestation: Option<v1::TpmAttestation>,
}

/// The fields of a commit, which the cluster keeps.
#[derive(Clone, PartialEq)]
pub struct Commitment {
    /// The cluster's half of its disk's key; empty without encryption.
    pub cluster_unlock_key: Vec<u8>,
    /// The protection of its disk.
    pub storage_kind: v1::StorageKind,
    /// The key that opens its disk alone; empty without encryption.
    pub recovery_key: Vec<u8>,
    /// The boot that commits; not kept.
    pub boot_id: String,
}

/// Hides the keys.
impl fmt::Debug for Commitment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Commitment({:?}, …)", self.storage_kind)
    }
}

/// The result for the record.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The record stays.
    Keep(Box<v1::Node>),
    /// The record is written.
    Put(Box<v1::Node>),
    /// The record is removed; this is its last content.
    Delete(Box<v1::Node>),
}

/// The reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The node does not exist.
    #[error("there is no such node")]
    Unknown,
    /// The node was decommissioned.
    #[error(
        "the node was decommissioned and cannot be a member again; delete it first, and give the \
         machine a new disk"
    )]
    Decommissioned,
    /// The node was not approved.
    #[error("the node was not approved yet")]
    NotApproved,
    /// The node has not committed.
    #[error("the node has not committed yet")]
    NotUp,
    /// The node is a member already.
    #[error("the node has committed already: its disk keys cannot be changed")]
    Joined,
    /// Another machine with its name.
    #[error("the node has committed already, with another join key")]
    Known,
    /// The join key is of no node, and the node that the caller names has another one.
    #[error("the node has another join key, as after a recovery: its recovery key opens the disk")]
    OtherJoinKey,
    /// The node is a member.
    #[error("the node is a member: decommission it first, or use force if the machine is lost")]
    StillUp,
    /// The node sends heartbeats, or this leader cannot know yet.
    #[error(
        "the node runs, or ran until some seconds ago; only one machine gets its half of the key. \
         If this lasts, its disk was copied: switch one of the two off"
    )]
    Running,
    /// The node is leaving etcd.
    #[error("the node is leaving etcd; retry once it has left")]
    Leaving,
    /// A controller without etcd.
    #[error(
        "a Kubernetes controller needs a member of etcd beside it, and the node does not have the \
             role consensus-member: give it that role as well"
    )]
    NoMember,
    /// The controller would lose its etcd.
    #[error(
        "the node is a Kubernetes controller, which needs its member of etcd: take the role \
             kubernetes-controller away first, or both at once"
    )]
    Controls,
    /// Too many labels.
    #[error("a node can have {LABELS_MAX} labels")]
    Labels,
    /// Too many taints.
    #[error("a node can have {TAINTS_MAX} taints")]
    Taints,
    /// Every prefix of the network of pods belongs to a node.
    #[error(
        "the pod network {network} has no free prefix for one more node: take the roles of \
         Kubernetes from a node that does not need them, or delete nodes that are gone"
    )]
    PodNetworkFull {
        /// The network of all pods.
        network: Prefix,
    },
    /// The node is inside a network of Kubernetes.
    #[error(
        "the address {address} of the node is in {network}, which Kubernetes uses for pods and \
         Services: give the machine an address outside of it"
    )]
    InPodNetwork {
        /// The address that it reported.
        address: Ipv4Addr,
        /// The network of pods, or that of Services.
        network: Prefix,
    },
    /// The node has no address for the mesh and for pods.
    #[error(
        "the address {address} of the node is one of IPv6, and pods and Services have IPv4 \
         alone: give the machine an address of IPv4, by DHCP or first in its parameters"
    )]
    NoIpv4 {
        /// The address that it reported.
        address: Ipv6Addr,
    },
    /// The machine has too little for the roles.
    #[error(transparent)]
    Shortage(#[from] Shortage),
    /// The node receives no new certificate, or no role meanwhile.
    #[error(transparent)]
    Returning(#[from] Refused),
}

/// The result of `request` for the record.
///
/// # Errors
///
/// [`Refusal`].
pub fn step(node: Option<v1::Node>, request: Request) -> Result<Step, Refusal> {
    let Some(node) = node else {
        return match request {
            Request::Register(registration) => Ok(Step::Put(Box::new(register(registration)))),
            _ => Err(Refusal::Unknown),
        };
    };
    let state = node.state();
    let before = node.clone();
    let after = match request {
        Request::Register(registration) => register_again(node, state, registration)?,
        Request::Approve => match state {
            NodeState::New => with_state(node, NodeState::Standby),
            NodeState::Standby => node,
            NodeState::Up => returning::approved(node),
            NodeState::Unspecified | NodeState::Decommissioned => {
                return Err(Refusal::Decommissioned);
            }
        },
        Request::Commit(commitment) => commit(node, state, commitment)?,
        Request::Return(request) => {
            member(state)?;
            returning::asked(node, request)?
        }
        Request::Returned { boot_id } => {
            member(state)?;
            match returning::is_approved(&node, &boot_id)? {
                true => node,
                false => return Err(Refusal::NotApproved),
            }
        }
        Request::Join => {
            member(state)?;
            v1::Node { joined: true, ..node }
        }
        Request::Status(status) => {
            member(state)?;
            // Its certificate has not ended, or is the new one.
            v1::Node { joined: true, status: Some(status), returning: None, ..node }
        }
        Request::Prove(proof) => {
            member(state)?;
            match proves(&node, &proof) {
                true => v1::Node { attestation: Some(proof), ..node },
                false => node,
            }
        }
        Request::Roles { add, remove } => {
            let (enters, leaves) =
                (add.consensus_member.is_some(), remove.consensus_member.is_some());
            if enters && !leaves && node.leaving.is_some() {
                return Err(Refusal::Leaving);
            }
            if enters && !leaves && node.returning.is_some() {
                return Err(Refused::Asks.into());
            }
            let leaving = node.leaving.filter(|_| !leaves);
            let had = node.roles.unwrap_or_default();
            let roles = change_roles(had, add, remove);
            let any = roles != v1::NodeRoles::default();
            if any && state == NodeState::Decommissioned {
                return Err(Refusal::Decommissioned);
            }
            if roles.kubernetes_controller.is_some() && roles.consensus_member.is_none() {
                let lost = had.kubernetes_controller.is_some() && had.consensus_member.is_some();
                return Err(if lost { Refusal::Controls } else { Refusal::NoMember });
            }
            let former_voter = node.former_voter && roles.consensus_member.is_some();
            v1::Node { roles: any.then_some(roles), leaving, former_voter, ..node }
        }
        Request::Labels { set, remove } => {
            if state == NodeState::Decommissioned {
                return Err(Refusal::Decommissioned);
            }
            let mut labels = node.labels.clone();
            labels.retain(|key, _| !remove.contains(key));
            labels.extend(set);
            if labels.len() > LABELS_MAX {
                return Err(Refusal::Labels);
            }
            v1::Node { labels, ..node }
        }
        Request::Taints { set, remove } => {
            if state == NodeState::Decommissioned {
                return Err(Refusal::Decommissioned);
            }
            let taints = change_taints(node.taints, set, &remove)?;
            v1::Node { taints, ..node }
        }
        Request::Name(name) => {
            if state == NodeState::Decommissioned && !name.is_empty() {
                return Err(Refusal::Decommissioned);
            }
            v1::Node { name, ..node }
        }
        Request::Network(order) => {
            member(state)?;
            match &node.network_order {
                Some(last) if stands(last, &order, node.status.as_ref()) => node,
                Some(_) | None => v1::Node { network_order: Some(order), ..node },
            }
        }
        Request::ForgetRecoveryKey => v1::Node { recovery_key: Vec::new(), ..node },
        Request::Leave(departure) => v1::Node { leaving: Some(departure), ..node },
        Request::Stay => v1::Node { leaving: None, ..node },
        Request::Decommission => match state {
            NodeState::Up | NodeState::Decommissioned => v1::Node {
                roles: None,
                former_voter: false,
                cluster_unlock_key: Vec::new(),
                recovery_key: Vec::new(),
                network_order: None,
                returning: None,
                ..with_state(node, NodeState::Decommissioned)
            },
            NodeState::Unspecified | NodeState::New | NodeState::Standby => {
                return Err(Refusal::NotUp);
            }
        },
        Request::Delete { force } => {
            if state == NodeState::Up && !force {
                return Err(Refusal::StillUp);
            }
            return Ok(Step::Delete(Box::new(node)));
        }
    };
    let step = if after == before { Step::Keep } else { Step::Put };
    Ok(step(Box::new(after)))
}

/// Whether the last order is the new one, and the node has not given it up.
fn stands(
    last: &v1::NetworkOrder,
    new: &v1::NetworkOrder,
    status: Option<&v1::NodeStatus>,
) -> bool {
    let report = status.and_then(|status| status.network.as_ref());
    let reported = report.filter(|report| report.number == last.number);
    let given_up = reported.is_some_and(|report| {
        matches!(report.state(), v1::NetworkState::Reverted | v1::NetworkState::Refused)
    });
    last.configuration == new.configuration && !given_up
}

fn with_state(node: v1::Node, state: NodeState) -> v1::Node {
    v1::Node { state: state.into(), ..node }
}

fn register(registration: Registration) -> v1::Node {
    // The name is taken beside the record: `nodes`.
    let Registration { identity, join_key, tpm, labels, address, now, nonce, attestation, name: _ } =
        registration;
    v1::Node {
        public_key: identity.public_key.to_vec(),
        state: NodeState::New.into(),
        labels: labels.into_iter().take(LABELS_MAX).collect(),
        join_key: join_key.to_vec(),
        status: Some(v1::NodeStatus { external_address: address, ..Default::default() }),
        tpm,
        registered_at: now,
        nonce: nonce.to_vec(),
        attestation,
        ..Default::default()
    }
}

/// Whether the machine of a node is known to have a TPM.
pub(super) fn has_tpm(node: &v1::Node) -> bool {
    node.tpm || node.attestation.is_some()
}

/// Whether a proof says something new of a member.
fn proves(node: &v1::Node, new: &v1::TpmAttestation) -> bool {
    let failed = |proof: &v1::TpmAttestation| !proof.fault.is_empty();
    match &node.attestation {
        // A fault may pass: a proof of the same boot ends it.
        Some(known) if known.boot_id == new.boot_id => failed(known) && !failed(new),
        Some(_) => true,
        None => has_tpm(node) || !failed(new),
    }
}

fn register_again(
    node: v1::Node,
    state: NodeState,
    registration: Registration,
) -> Result<v1::Node, Refusal> {
    match state {
        // A machine registers again every few seconds until it is approved: its newest values
        // count, and the labels that an operator has set meanwhile stay.
        NodeState::New => {
            let v1::Node { join_key, status, tpm, attestation, .. } = register(registration);
            let attestation = attestation.or(node.attestation);
            Ok(v1::Node { join_key, status, tpm, attestation, ..node })
        }
        NodeState::Standby | NodeState::Up if !node.joined => {
            let Registration { join_key, tpm, attestation, .. } = registration;
            let attestation = attesting::after_approval(node.attestation, attestation);
            Ok(v1::Node { join_key: join_key.to_vec(), tpm, attestation, ..node })
        }
        NodeState::Standby | NodeState::Up => {
            if node.join_key == registration.join_key {
                Ok(node)
            } else {
                Err(Refusal::Known)
            }
        }
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

fn commit(node: v1::Node, state: NodeState, commitment: Commitment) -> Result<v1::Node, Refusal> {
    match state {
        NodeState::New => Err(Refusal::NotApproved),
        NodeState::Standby | NodeState::Up if !node.joined => {
            let status = v1::NodeStatus {
                storage_kind: commitment.storage_kind.into(),
                ..node.status.clone().unwrap_or_default()
            };
            Ok(v1::Node {
                cluster_unlock_key: commitment.cluster_unlock_key,
                recovery_key: commitment.recovery_key,
                status: Some(status),
                ..with_state(node, NodeState::Up)
            })
        }
        NodeState::Standby | NodeState::Up => Err(Refusal::Joined),
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

/// Fails unless the node is a member.
pub(super) fn member(state: NodeState) -> Result<(), Refusal> {
    match state {
        NodeState::Up => Ok(()),
        NodeState::New | NodeState::Standby => Err(Refusal::NotUp),
        NodeState::Unspecified | NodeState::Decommissioned => Err(Refusal::Decommissioned),
    }
}

/// The taints after a change, in the order of their keys and effects.
fn change_taints(
    mut taints: Vec<v1::NodeTaint>,
    set: Vec<v1::NodeTaint>,
    remove: &[v1::NodeTaint],
) -> Result<Vec<v1::NodeTaint>, Refusal> {
    let every = i32::from(v1::node_taint::Effect::Unspecified);
    taints.retain(|taint| {
        let is_removed = |it: &v1::NodeTaint| {
            it.key == taint.key && (it.effect == every || it.effect == taint.effect)
        };
        let is_replaced = |it: &v1::NodeTaint| it.key == taint.key && it.effect == taint.effect;
        !remove.iter().any(is_removed) && !set.iter().any(is_replaced)
    });
    taints.extend(set);
    if taints.len() > TAINTS_MAX {
        return Err(Refusal::Taints);
    }
    taints.sort_by(|one, other| (&one.key, one.effect).cmp(&(&other.key, other.effect)));
    Ok(taints)
}

/// A role that is both given and taken is taken.
fn change_roles(roles: v1::NodeRoles, add: v1::NodeRoles, remove: v1::NodeRoles) -> v1::NodeRoles {
    fn one<T>(has: Option<T>, add: Option<T>, remove: Option<&T>) -> Option<T> {
        if remove.is_some() { None } else { has.or(add) }
    }
    v1::NodeRoles {
        consensus_member: one(
            roles.consensus_member,
            add.consensus_member,
            remove.consensus_member.as_ref(),
        ),
        kubernetes_controller: one(
            roles.kubernetes_controller,
            add.kubernetes_controller,
            remove.kubernetes_controller.as_ref(),
        ),
        kubernetes_worker: one(
            roles.kubernetes_worker,
            add.kubernetes_worker,
            remove.kubernetes_worker.as_ref(),
        ),
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "returning_tests.rs"]
mod returning_tests;
